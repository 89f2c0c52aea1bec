"""A smaller model drafts a chain: speculative decoding as first described.

Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318. The draft model is any decoder with the
target's tokenizer, also the target itself in a cheaper format. It has weights and a paged KV cache of its
own; one call of :meth:`DraftModelDrafter.propose` is

    roll back   KV of drafted tokens that became output stays, of the others it is forgotten
    catch up    one forward over the tokens that are new since (usually one or two; at first the prompt)
    draft       further forwards of one row a sequence, all sequences in one batch

so K tokens take K forwards of the draft: the one that catches up yields the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.kvcache import CacheCorrupted, PagedCache, PageTable
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.sampling import Draw, TargetLaw, draft_draw
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain
from trtspec.errors import InputError


@dataclass(eq=False)
class _State:
    """One sequence. ``table`` is None until it is first drafted for, and after its pages were needed."""

    draw: Draw
    table: PageTable | None = None
    written: list[int] = field(default_factory=list)
    """Tokens whose KV is in the slots behind the table's computed ones: known when they were written, then
    drafted. How many of them are final is seen at the next call."""


@dataclass(eq=False)
class _Job:
    """What one call does for one sequence: ``count`` rows from ``start``, then a draft of ``room`` tokens, 0
    when the rows do not reach the last known token."""

    at: int
    view: DraftView
    state: _State
    table: PageTable
    start: int
    count: int = 0
    room: int = 0
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.view.tokens) - self.start


class DraftModelDrafter:
    """Drafts chains of up to ``num_draft_tokens`` tokens with ``model``.

    ``new_store`` makes its KV store of that many slots; ``num_pages`` of ``page_tokens`` tokens are shared by
    all sequences. When they run out, sequences that are not being drafted for (preempted ones) lose
    theirs first; then drafts get shorter. Nothing a sequence loses here can change its output.

    ``max_rows`` bounds the rows of one forward. A long prompt is caught up with over several calls, in
    which its sequence is not drafted for and the others wait no longer than that.

    ``sampled``: for requests that sample, draw each candidate from the draft's law under the request's own
    temperature, top-k and top-p and hand that law over, as rejection sampling wants it: it then accepts
    with probability sum(min(p, q)), the most that any coupling of the two can reach. Otherwise, and for
    greedy requests, draft the likeliest tokens: under ``exact`` acceptance a candidate x is accepted with
    probability p(x), so drawing it would accept sum(q p), which is at most the largest p.

    ``vocab_size`` is the target's: rows that only pad one of the two vocabularies are never drafted.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Decoder,
        new_store: Callable[[int], KvStore],
        *,
        num_draft_tokens: int,
        num_pages: int,
        page_tokens: int,
        max_rows: int,
        vocab_size: int,
        prefix_cache: bool = True,
        sampled: bool = False,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._model = model
        self._store = new_store(num_pages * page_tokens)
        self._cache = PagedCache(num_pages, page_tokens, prefix_cache=prefix_cache, device=model.device)
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._sampled = sampled
        self._states: dict[str, _State] = {}  # least recently drafted for first

    # ------------------------------------------------------------------ drafting

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        """Chains; raises InputError if the draft model's logits are not finite."""
        drafts = [EMPTY_DRAFT] * len(sequences)
        jobs = self._jobs(sequences)
        if not jobs:
            return drafts
        logits = self._forward(
            [(job.table, job.start, self._pending_tokens(job), job.room > 0) for job in jobs]
        )
        for job in jobs:
            job.state.written = self._pending_tokens(job)
        drafting = [job for job in jobs if job.room]
        while drafting:
            self._choose(drafting, logits)
            drafting = [job for job in drafting if len(job.tokens) < job.room]
            if drafting:
                logits = self._forward(
                    [
                        (job.table, len(job.view.tokens) + len(job.tokens) - 1, job.tokens[-1:], True)
                        for job in drafting
                    ]
                )
            for job in drafting:
                job.state.written.append(job.tokens[-1])
        for job in jobs:
            drafts[job.at] = self._draft(job)
        return drafts

    def _pending_tokens(self, job: _Job) -> list[int]:
        return list(job.view.tokens[job.start : job.start + job.count])

    def _jobs(self, sequences: Sequence[DraftView]) -> list[_Job]:
        """What to do in this call, the sequences with the fewest tokens to catch up with first."""
        jobs = []
        busy = {view.id for view in sequences}
        for at, view in enumerate(sequences):
            state = self._states.pop(view.id, None) or _State(draft_draw(view.sampling.seed))
            self._states[view.id] = state
            if view.max_draft < 1:
                continue
            table = self._rolled_back(state, view.tokens) or self._opened(state, view.tokens, busy)
            if table is not None:
                jobs.append(_Job(at, view, state, table, table.num_computed))
        budget = self._max_rows
        jobs.sort(key=lambda job: job.pending)
        for job in jobs:
            count = min(job.pending, budget)
            known = job.view.tokens[job.start : job.start + count]
            if not known or max(known) >= self._model.spec.vocab_size:
                continue
            room = min(self.num_draft_tokens, job.view.max_draft) if count == job.pending else 0
            fits = self._make_room(job.table, job.start + count + max(room - 1, 0), busy)
            if fits < job.start + count:
                continue
            job.count, job.room = count, min(room, fits - (job.start + count) + 1)
            budget -= count
        return [job for job in jobs if job.count]

    def _rolled_back(self, state: _State, tokens: Sequence[int]) -> PageTable | None:
        """The state's table, computed as far as it holds ``tokens``; the last is always left to compute."""
        table = state.table
        if table is None:
            return None
        start = table.num_computed
        kept = 0
        for written, token in zip(state.written, tokens[start:-1], strict=False):
            if written != token:
                break
            kept += 1
        self._cache.commit(table, tokens, range(kept))
        state.written = []
        return table

    def _opened(self, state: _State, tokens: Sequence[int], busy: set[str]) -> PageTable | None:
        """A table for a sequence that has none; None if there are no pages for it."""
        opened = self._cache.open(tokens)
        while opened is None:
            if not self._evict_idle(busy):
                return None
            opened = self._cache.open(tokens)
        state.table, copy = opened
        if copy is not None:
            self._store.copy(copy.source, copy.target)
        return state.table

    def _make_room(self, table: PageTable, num_tokens: int, busy: set[str]) -> int:
        """Give ``table`` that many slots, or as many as there are; how many."""
        while not self._cache.grow(table, num_tokens):
            if not self._evict_idle(busy):
                num_tokens = min(num_tokens, self._cache.capacity(table))
                self._cache.grow(table, num_tokens)
                break
        return num_tokens

    def _evict_idle(self, busy: set[str]) -> bool:
        """Take the pages of the sequence drafted for the longest ago that is not ``busy``; False if none."""
        for name, state in self._states.items():
            if state.table is not None and name not in busy:
                self._close(state)
                return True
        return False

    def _close(self, state: _State) -> None:
        if state.table is not None:
            self._cache.release(state.table)
            state.table, state.written = None, []

    def _forward(self, rows: Sequence[tuple[PageTable, int, list[int], bool]]) -> Tensor:
        """``[wanted, vocab]`` logits of one forward. Of each sequence: its table, the position of its first
        row, the tokens of its rows, and whether the logits after the last are wanted."""
        device = self._model.device
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        slots: list[Tensor] = []
        parts: list[SequenceRows] = []
        for table, start, new, is_wanted in rows:
            stop = start + len(new)
            parts.append(SequenceRows(len(tokens), len(new), context=table.slots(0, start)))
            tokens += new
            positions += range(start, stop)
            slots.append(table.slots(start, stop))
            if is_wanted:
                wanted.append(len(tokens) - 1)
        batch = StepBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.cat(slots),
            sequences=tuple(parts),
            logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
        )
        return self._model.forward(batch, self._store)[0][:, : self._vocab_size]

    def _choose(self, jobs: Sequence[_Job], logits: Tensor) -> None:
        """Append one token to each job by its row of ``logits``, and its law where it was drawn."""
        likeliest = logits.argmax(-1)
        # argmax takes NaN for the largest number, so the maximum shows every NaN and +inf.
        highest = logits.gather(1, likeliest[:, None])
        if not bool(torch.isfinite(highest).all()):
            raise InputError(
                "the draft model's logits are not finite; its weights or scales hold NaN or infinity, or the "
                "dtype overflows: build it with another speculation.quantization, or use a wider dtype"
            )
        tokens = likeliest.tolist()
        confidence = (highest[:, 0] - logits.logsumexp(-1)).exp().clamp(max=1.0).tolist()
        for row, job in enumerate(jobs):
            if self._sampled and not job.view.sampling.greedy:
                law = TargetLaw(logits[row : row + 1], job.view.sampling)
                tokens[row] = law.sample(0, job.state.draw)
                job.laws.append(law.probs(0))
            job.tokens.append(tokens[row])
            job.confidence.append(confidence[row])

    def _draft(self, job: _Job) -> Draft:
        if not job.laws:
            return chain(job.tokens, confidence=job.confidence)
        probs = torch.stack(job.laws)
        return chain(job.tokens, F.pad(probs, (0, self._vocab_size - probs.shape[1])))

    # ------------------------------------------------------------------ the rest of the protocol

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Nothing to learn: the next call sees by the tokens what was accepted."""

    def release(self, sequence_id: str) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self._close(state)

    @property
    def pages_held(self) -> int:
        """Pages of the draft's KV cache that sequences in flight hold."""
        return self._cache.pages_held

    def check_integrity(self) -> None:
        """Raise CacheCorrupted if the books of the draft's KV cache do not balance; for tests."""
        self._cache.check_integrity()
        held = 0
        for name, state in self._states.items():
            if state.table is None:
                if state.written:
                    raise CacheCorrupted(f"{name} has no pages for {len(state.written)} written tokens")
                continue
            needed = self._cache.pages_for(state.table.num_computed + len(state.written))
            if needed > len(state.table._pages):
                raise CacheCorrupted(f"{name} wrote to {needed} pages and has {len(state.table._pages)}")
            held += 1
        if held != len(self._cache._tables):
            raise CacheCorrupted(f"{len(self._cache._tables)} tables for {held} sequences")
