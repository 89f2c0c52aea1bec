"""Drafters: what proposes candidate tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.tree import Draft
from trtspec.engine import Sampling


@dataclass(frozen=True)
class DraftView:
    """What a drafter may see of one sequence; it never changes ``tokens``."""

    id: str
    tokens: Sequence[int]
    """Every known token, prompt and generated; the last is the current token. Only ever grows, and may be
    the engine's own list: read it during the call, keep no reference to it."""
    max_draft: int
    """The most tokens that a chain may have, and the deepest level of a tree."""
    sampling: Sampling = field(default_factory=Sampling)
    """The request's own, for a drafter that draws its candidates."""
    max_nodes: int | None = None
    """The most nodes that a tree may have, if none is deeper than ``max_draft``; None: ``max_draft``. Near
    the end of an answer a broad tree fits where a long chain does not."""
    start: int = 0
    """In :meth:`Drafter.observe`: the position of the first of the sequence's rows of that forward. Positions
    before it may never have been observed: their KV came from the prefix cache."""

    @property
    def room(self) -> int:
        """The most nodes of any draft."""
        return self.max_draft if self.max_nodes is None else self.max_nodes


class Drafter(Protocol):
    """Proposes drafts for the sequences of one engine and keeps whatever state that needs, by sequence id."""

    hidden_layers: tuple[int, ...]
    """The target's layers whose outputs :meth:`observe` wants; () for none."""

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        """One draft per sequence, in order, of at most ``room`` nodes and ``max_draft`` levels (the engine
        cuts off what is beyond); EMPTY_DRAFT where there is nothing to propose. Sequences may be missing in
        one call and back in the next (preemption)."""
        ...

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """What a target forward found, all four parallel by sequence; ``tokens`` already hold the outcome.

        ``accepted`` is None while a prompt is not yet fully computed. ``hidden[i][layer]`` is
        ``[rows, hidden]``: the sequence's rows of that forward, known tokens first, then the nodes of its
        draft. ``logits[i]`` is ``[1 + nodes, vocab]``: after the current token and after each node that
        is not :attr:`Draft.silent`; None with ``accepted`` None. The tensors are valid during the call only.
        """
        ...

    def release(self, sequence_id: str) -> None:
        """Forget a sequence: it ended or was cancelled. Unknown ids are ignored."""
        ...


class Stateless:
    """What a drafter that neither learns nor keeps anything need not say."""

    hidden_layers: tuple[int, ...] = ()

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Nothing to learn."""

    def release(self, sequence_id: str) -> None:
        """Nothing to forget."""
