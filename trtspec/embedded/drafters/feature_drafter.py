"""Drafting with an EAGLE head: features kept, pairs computed once, trees grown level by level.

A round, for a sequence of n known tokens:

* :meth:`FeatureDrafter.observe`: the target has computed positions up to n - 2. Their features are stored,
  the pairs up to (token n - 1, feature n - 2) run through the head in one batch with the other sequences'.
  The output at the last pair is what the next draft starts from, so the first drafted token rests on the
  target's own features alone.
* :meth:`FeatureDrafter.propose`: the candidates of that output are level 1. Each further level pairs its
  tokens with the outputs they came from, in scratch slots; they see the sequence's pairs and their ancestors.

A pair's rotary position is that of its feature, n - 2 for the current token, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.eagle import EagleHead
from trtspec.embedded.drafters.feature_cache import FeatureCache, FeatureState
from trtspec.embedded.drafters.trees import DynamicTree, Growth, StaticTree
from trtspec.embedded.sampling import Draw, TargetLaw, generator_draw
from trtspec.embedded.tree import EMPTY_DRAFT, Draft

_STREAM = 0x5DEECE66D
"""Added to a request's seed: the draft's draws must not be the target's."""


@dataclass(eq=False)
class _Drafting:
    """One sequence in :meth:`FeatureDrafter.propose`."""

    at: int
    view: DraftView
    state: FeatureState
    growth: Growth
    first_scratch: int
    used: int = 0
    scratch: dict[int, int] = field(default_factory=dict)
    """Of each computed node, which of the sequence's scratch slots holds its pair."""
    rows: range = range(1)
    """The rows of the current outputs that belong to its frontier, in order."""
    came_from: dict[int, int] = field(default_factory=dict)
    """Of each node of the frontier, the row of the current outputs that it is a candidate of."""


class FeatureDrafter:
    """Drafts with ``head`` in the form of ``shape``.

    ``num_pages`` pages hold the state of all sequences in flight; a few more than the target's suffice, since
    a sequence has one position more here. ``samples``: draw the candidates of requests that sample from
    the head's law and hand it over, for rejection acceptance; static trees only.
    """

    def __init__(
        self,
        head: EagleHead,
        shape: StaticTree | DynamicTree,
        *,
        num_pages: int,
        page_tokens: int,
        max_batch_size: int,
        prefix_cache: bool = True,
        samples: bool = False,
    ) -> None:
        if samples and isinstance(shape, DynamicTree):
            raise ValueError("the shape of a dynamic tree depends on its tokens: it cannot be drawn")
        self.hidden_layers = head.hidden_layers
        self.shape = shape
        self._head = head
        self._samples = samples
        self._scratch_per_sequence = shape.num_inner
        self._max_batch_size = max_batch_size
        self._draws: dict[str, Draw] = {}
        self._cache = FeatureCache(
            head.spec,
            head.feature_size,
            num_pages=num_pages,
            page_tokens=page_tokens,
            num_scratch=max_batch_size * shape.num_inner,
            prefix_cache=prefix_cache,
            dtype=head.dtype,
            device=head.device,
        )

    # ------------------------------------------------------------------ what the target found

    @torch.inference_mode()
    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        active = {view.id for view in sequences}
        found: list[tuple[DraftView, FeatureState]] = []
        pieces: list[Mapping[int, Tensor]] = []
        slots: list[Tensor] = []
        for view, outcome, states, ends in zip(sequences, accepted, hidden, logits, strict=True):
            rows = _final_rows(view, outcome, len(next(iter(states.values()))), ends)
            stop = view.start + len(rows)
            state = self._cache.reach(view.id, view.tokens, view.start, stop, active)
            if state is None:
                continue
            found.append((view, state))
            new = rows[state.computed - view.start :] if state.computed < stop else []
            if new:
                index = torch.tensor(new, device=self._head.device)
                pieces.append({layer: values.index_select(0, index) for layer, values in states.items()})
                slots.append(state.table.slots(state.computed, stop))
                state.computed = stop
        if pieces:
            together = {layer: torch.cat([piece[layer] for piece in pieces]) for layer in self.hidden_layers}
            self._cache.features.index_copy_(0, torch.cat(slots), self._head.fuse(together))
        self._pair(found)
        for view, state in found:
            self._cache.commit(state, view.tokens)

    def _pair(self, found: Sequence[tuple[DraftView, FeatureState]]) -> None:
        """Run every pair whose feature is there and whose token is known; keep the last output."""
        tokens: list[int] = []
        positions: list[int] = []
        sources: list[Tensor] = []
        slots: list[Tensor] = []
        parts: list[SequenceRows] = []
        ends: list[tuple[DraftView, FeatureState]] = []
        for view, state in found:
            first, last = max(state.paired + 1, state.first), min(state.computed, len(view.tokens) - 1)
            if first > last:
                continue
            context = state.table.slots(state.first, first)
            parts.append(SequenceRows(len(tokens), last + 1 - first, context))
            tokens += view.tokens[first : last + 1]
            positions += range(first - 1, last)
            sources.append(state.table.slots(first - 1, last))
            slots.append(state.table.slots(first, last + 1))
            state.paired = last
            ends.append((view, state))
        if not parts:
            return
        features = self._cache.features.index_select(0, torch.cat(sources))
        outputs = self._run(tokens, positions, torch.cat(slots), parts, features)
        for part, (view, state) in zip(parts, ends, strict=True):
            state.known = state.paired + 1
            complete = state.known == len(view.tokens)
            state.output = outputs[part.first + part.count - 1].clone() if complete else None

    def _run(
        self,
        tokens: list[int],
        positions: list[int],
        slots: Tensor,
        parts: Sequence[SequenceRows],
        features: Tensor,
    ) -> Tensor:
        device = self._head.device
        batch = StepBatch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            slots=slots,
            sequences=tuple(parts),
            logit_rows=torch.empty(0, dtype=torch.int64, device=device),
        )
        return self._head.forward(features, batch, self._cache.store)

    # ------------------------------------------------------------------ drafts

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sequences)
        drafting = self._begin(sequences)
        if not drafting:
            return drafts
        outputs = torch.stack([one.state.output for one in drafting if one.state.output is not None])
        growing = drafting
        while True:
            self._expand(growing, self._head.logits(outputs))
            growing = [one for one in growing if one.growth.frontier]
            if not growing:
                break
            outputs = self._next_level(growing, outputs)
        for one in drafting:
            drafts[one.at] = one.growth.draft()
        return drafts

    def _begin(self, sequences: Sequence[DraftView]) -> list[_Drafting]:
        drafting: list[_Drafting] = []
        for at, view in enumerate(sequences):
            state = self._cache.get(view.id)
            if state is None or state.output is None or state.known != len(view.tokens):
                continue
            if min(view.max_draft, view.room) < 1:
                continue
            row = len(drafting)
            if row == self._max_batch_size:
                break
            first = self._cache.num_slots + row * self._scratch_per_sequence
            shape = self.shape
            if isinstance(shape, StaticTree):
                shape = shape.within(view.max_draft, view.room)
            else:
                depth, nodes = min(shape.depth, view.max_draft), min(shape.num_nodes, view.room)
                shape = DynamicTree(shape.top_k, depth, nodes)
            one = _Drafting(at, view, state, Growth(shape), first)
            one.rows = range(row, row + 1)
            drafting.append(one)
        return drafting

    def _expand(self, growing: Sequence[_Drafting], logits: Tensor) -> None:
        """Add to every draft the candidates below its frontier; ``logits [rows, draft vocabulary]``."""
        before = [dict(zip(one.growth.frontier, one.rows, strict=True)) for one in growing]
        drawn = [one for one in growing if self._samples and not one.view.sampling.greedy]
        picked = [one for one in growing if one not in drawn] if drawn else growing
        if picked:
            most = min(max(one.growth.num_ranks() for one in picked), logits.shape[-1])
            top = torch.topk(logits, most, dim=-1)
            ids = top.indices if self._head.token_ids is None else self._head.token_ids[top.indices]
            tokens = ids.tolist()
            log_probs = (top.values - torch.logsumexp(logits, -1, keepdim=True)).tolist()
            for one in picked:
                rows = slice(one.rows.start, one.rows.stop)
                one.growth.extend(tokens[rows], log_probs[rows])
        for one in drawn:
            self._draw(one, logits[one.rows.start : one.rows.stop])
        for one, row_of in zip(growing, before, strict=True):
            one.came_from = {node: row_of[one.growth.parents[node]] for node in one.growth.frontier}

    def _draw(self, one: _Drafting, logits: Tensor) -> None:
        """Draw the children of the frontier from the head's law, siblings without replacement."""
        view, head = one.view, self._head
        draw = self._draws.get(view.id)
        if draw is None:
            seed = (view.sampling.seed + _STREAM) % 2**63
            draw = self._draws[view.id] = generator_draw(seed)
        if head.token_ids is not None:
            vocab = head.weights.embedding.shape[0]
            whole = torch.full((len(logits), vocab), -torch.inf, dtype=logits.dtype, device=logits.device)
            logits = whole.index_copy_(1, head.token_ids, logits)
        law = TargetLaw(logits, view.sampling)
        children, laws = [], []
        for row in range(len(one.growth.frontier)):
            q = law.probs(row)
            left = q.clone()
            tokens: list[int] = []
            for _ in range(one.growth.num_children(row)):
                if not float(left.sum()) > 0.0:
                    tokens.append(tokens[0])  # every token is taken: a repeated sibling is passed over
                    continue
                tokens.append(draw(left))
                left[tokens[-1]] = 0.0
            children.append(tokens)
            laws.append(q)
        one.growth.extend_drawn(children, laws)

    def _next_level(self, growing: Sequence[_Drafting], outputs: Tensor) -> Tensor:
        """The head's outputs at the frontiers; also their keys and values, in scratch slots."""
        tokens: list[int] = []
        positions: list[int] = []
        sources: list[int] = []
        slots: list[Tensor] = []
        parts: list[SequenceRows] = []
        device = self._head.device
        for one in growing:
            growth, state = one.growth, one.state
            nodes, used = growth.frontier, one.used
            scratch = torch.arange(one.first_scratch, one.first_scratch + used + len(nodes), device=device)
            for at, node in enumerate(nodes):
                one.scratch[node] = used + at
            context = torch.cat((state.table.slots(state.first, state.known), scratch[:used]))
            parts.append(SequenceRows(len(tokens), len(nodes), context, self._visible(one)))
            one.rows = range(len(tokens), len(tokens) + len(nodes))
            one.used += len(nodes)
            tokens += [growth.tokens[node] for node in nodes]
            positions += [state.known - 2 + growth.level] * len(nodes)
            sources += [one.came_from[node] for node in nodes]
            slots.append(scratch[used:])
        features = outputs.index_select(0, torch.tensor(sources, device=device))
        return self._run(tokens, positions, torch.cat(slots), parts, features)

    def _visible(self, one: _Drafting) -> Tensor | None:
        """``[frontier, scratch pairs + frontier] bool``: a node sees its ancestors and itself; None: all."""
        nodes, used = one.growth.frontier, one.used
        if len(nodes) == 1 and used == one.growth.level - 1:
            return None
        visible = torch.zeros(len(nodes), used + len(nodes), dtype=torch.bool)
        for row, start in enumerate(nodes):
            node = start
            while node >= 0:
                visible[row, one.scratch[node]] = True
                node = one.growth.parents[node]
        return visible.to(self._head.device)

    # ------------------------------------------------------------------ the rest

    def release(self, sequence_id: str) -> None:
        self._cache.release(sequence_id)
        self._draws.pop(sequence_id, None)

    def check_integrity(self) -> None:
        """Raise if the books of the drafter's own cache do not balance."""
        self._cache.check_integrity()


def _final_rows(view: DraftView, outcome: Accepted | None, num_rows: int, ends: Tensor | None) -> list[int]:
    """The rows of a forward whose tokens became final, in position order from ``view.start`` on."""
    if outcome is None or ends is None:
        return list(range(num_rows))
    count = num_rows - (len(ends) - 1)
    emitted = len(view.tokens) - (view.start + count)
    return [*range(count), *(count + node for node in outcome.path[:emitted])]
