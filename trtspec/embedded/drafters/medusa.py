"""Medusa: heads on the target's last hidden state, each guessing one token further; and Hydra.

Medusa (arXiv 2401.10774, section 2.1): from the hidden state at which the current token was chosen, head i
guesses the i + 1st token behind the current one, all heads at once and without knowing each other's
guesses. The candidates of the heads are laid out as a tree fixed beforehand. Hydra (arXiv 2402.05109): head
i also sees the embeddings of the current token and of the tokens drafted before its own, so that each
branch has guesses that fit it; the heads run one after the other.

The candidates are the heads' most likely tokens: point masses. Medusa-1 and Medusa-2 differ in how the heads
(and the target) were trained only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.trees import Growth, StaticTree
from trtspec.embedded.heads import MedusaHead, MedusaHeads
from trtspec.embedded.model import Decoder
from trtspec.embedded.tree import EMPTY_DRAFT, Draft
from trtspec.errors import InputError, Problem


@dataclass(frozen=True)
class _Last:
    """The hidden state from which the last of ``known`` tokens was chosen."""

    known: int
    hidden: Tensor


class MedusaDrafter:
    """Drafts ``tree`` with ``heads`` on the hidden states of ``target``.

    Of each sequence one hidden state is kept, that of the last final row. Raises InputError when the tree is
    deeper than there are heads.
    """

    def __init__(self, heads: MedusaHeads, target: Decoder, tree: StaticTree) -> None:
        if tree.depth > len(heads.heads):
            found = f"a tree of {tree.depth} levels for {len(heads.heads)} heads; cut it"
            raise InputError(Problem(found, key="speculation.choices"))
        self.hidden_layers: tuple[int, ...] = (target.spec.num_layers,)
        self.tree = tree
        self._heads = heads
        self._layer = target.spec.num_layers
        self._embedding = target.embedding
        self._last: dict[str, _Last] = {}

    @torch.inference_mode()
    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        for view, outcome, states, ends in zip(sequences, accepted, hidden, logits, strict=True):
            if outcome is None or ends is None:
                continue
            rows = states[self._layer]
            current = len(rows) - len(ends)  # the row of the last token known before
            last = current + 1 + outcome.path[-1] if outcome.path else current
            self._last[view.id] = _Last(len(view.tokens), rows[last].clone())

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sequences)
        growing: list[tuple[int, Growth]] = []
        states = []
        for at, view in enumerate(sequences):
            last = self._last.get(view.id)
            if last is not None and last.known == len(view.tokens) and min(view.max_draft, view.room) > 0:
                growing.append((at, Growth(self.tree.within(view.max_draft, view.room))))
                states.append(last.hidden)
        if not growing:
            return drafts
        inputs = torch.stack(states)
        if self._heads.grounded:
            current = torch.tensor([sequences[at].tokens[-1] for at, _ in growing], device=inputs.device)
            inputs = torch.cat((inputs, self._embedding[current]), -1)
        self._grow([growth for _, growth in growing], inputs)
        for at, growth in growing:
            drafts[at] = growth.draft()
        return drafts

    def _grow(self, growths: list[Growth], inputs: Tensor) -> None:
        """Level by level; ``inputs`` are the heads' inputs at the frontiers of all drafts, in order."""
        grounded = self._heads.grounded
        rows = list(range(len(growths)))
        """Of each node of the frontiers, its row of ``inputs``."""
        for head in self._heads.heads:
            if not growths:
                return
            logits = head_logits(head, inputs)
            most = min(max(growth.num_ranks() for growth in growths), logits.shape[-1])
            best = torch.topk(logits, most, dim=-1).indices.tolist()
            again: list[Growth] = []
            next_rows: list[int] = []
            tokens: list[int] = []
            at = 0
            for growth in growths:
                above = dict(zip(growth.frontier, rows[at : at + len(growth.frontier)], strict=True))
                at += len(growth.frontier)
                candidates = [best[row] for row in above.values()]
                growth.extend(candidates, candidates)
                if growth.frontier:
                    again.append(growth)
                    next_rows += [above[growth.parents[node]] for node in growth.frontier]
                    tokens += [growth.tokens[node] for node in growth.frontier]
            growths = again
            rows = next_rows
            if grounded and growths:
                index = torch.tensor(next_rows, device=inputs.device)
                drafted = torch.tensor(tokens, device=inputs.device)
                inputs = torch.cat((inputs.index_select(0, index), self._embedding[drafted]), -1)
                rows = list(range(len(next_rows)))

    def release(self, sequence_id: str) -> None:
        self._last.pop(sequence_id, None)


def head_logits(head: MedusaHead, x: Tensor) -> Tensor:
    """``[rows, vocab]`` of one head on ``x [rows, inputs]``."""
    for linear, residual in head.blocks:
        x = (x if residual is None else residual(x)) + F.silu(linear(x))
    return head.lm_head(x)
