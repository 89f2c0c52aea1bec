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

    @property
    def num_heads(self) -> int:
        return len(self._heads.heads)

    @property
    def grounded(self) -> bool:
        """Whether what a head offers depends on the branch (Hydra)."""
        return self._heads.grounded

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
        """Level by level; ``inputs`` are the heads' inputs at the frontiers of all drafts, in order. Only
        grounded heads wait for the level before: the others have all said what they say at once."""
        grounded = self._heads.grounded
        depth = max(growth.shape.depth for growth in growths)
        said = [] if grounded else medusa_logits(self._heads, inputs, depth)
        rows = list(range(len(growths)))
        """Of each node of the frontiers, its row of ``inputs``."""
        for level, head in enumerate(self._heads.heads):
            if not growths:
                return
            logits = head_logits(head, inputs) if grounded else said[level]
            most = min(max(growth.num_ranks() for growth in growths), logits.shape[-1])
            top = torch.topk(logits, most, dim=-1)
            best = top.indices.tolist()
            log_probs = (top.values - torch.logsumexp(logits, -1, keepdim=True)).tolist()
            again: list[Growth] = []
            next_rows: list[int] = []
            tokens: list[int] = []
            at = 0
            for growth in growths:
                above = dict(zip(growth.frontier, rows[at : at + len(growth.frontier)], strict=True))
                at += len(growth.frontier)
                growth.extend(
                    [best[row] for row in above.values()], [log_probs[row] for row in above.values()]
                )
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
    return head.lm_head(_behind_blocks(head, x))


def medusa_logits(heads: MedusaHeads, x: Tensor, count: int) -> list[Tensor]:
    """Of each of the first ``count`` heads ``[rows, vocab]`` on the same ``x [rows, hidden]``.

    Heads that share an output projection, as those trained on the target's own do, run it once over all their
    rows: at a few rows it costs what reading its weight costs.
    """
    if heads.first is None:
        starts = [x] * count
    else:
        together = F.silu(heads.first(x)).view(len(x), len(heads.heads), -1)
        starts = [x + together[:, at] for at in range(count)]
    states = [_behind_blocks(head, start) for head, start in zip(heads.heads, starts, strict=False)]
    logits: list[Tensor] = [x] * count
    for lm_head in {id(head.lm_head): head.lm_head for head in heads.heads[:count]}.values():
        sharing = [at for at in range(count) if heads.heads[at].lm_head is lm_head]
        outputs = lm_head(torch.cat([states[at] for at in sharing]))
        for at, part in zip(sharing, torch.split(outputs, len(x)), strict=True):
            logits[at] = part
    return logits


def _behind_blocks(head: MedusaHead, x: Tensor) -> Tensor:
    for linear, residual in head.blocks:
        x = (x if residual is None else residual(x)) + F.silu(linear(x))
    return x
