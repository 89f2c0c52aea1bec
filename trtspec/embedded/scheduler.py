"""Which rows the next forward computes: continuous batching as bookkeeping, without tensors.

There is no prefill or decode phase. A sequence has *known* tokens (prompt and generated), of which
``num_computed`` have their KV in the cache; each step computes some of the *pending* rest. One pending
token is a decode row, and only that may be followed by draft rows; many are a prompt in
chunks, or a preempted sequence catching up. The shape is that of vLLM v1's scheduler and, for the idea of
mixing both kinds of row under one budget, of Sarathi-Serve (arXiv 2403.02310).

Per step, under ``max_num_tokens`` rows and ``max_batch_size`` sequences:

1. a decode row for every running sequence, in the order of admission; if pages lack, the latest admitted
   is preempted until they suffice;
2. draft rows for those, as far as rows and pages go; they never preempt anyone;
3. chunks of prompts already admitted;
4. waiting requests in the order of arrival, each once pages for all its known tokens are available.
   The first that does not fit holds back the rest, so none starves; nobody is admitted in a step that
   preempted.

Preemption frees the pages and puts the sequence at the head of the queue with nothing computed. It keeps
its tokens, hence its output is as if nothing had happened; often its prefix is still cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from trtspec.embedded.kvcache import PagedCache, PageTable, SlotCopy
from trtspec.engine import Request
from trtspec.errors import InputError


@dataclass(eq=False)
class SequenceState:
    """A request in flight. ``table`` is None while it waits."""

    request: Request
    tokens: list[int]
    """Known: the prompt, then what was generated."""
    table: PageTable | None = None

    @property
    def num_computed(self) -> int:
        return self.table.num_computed if self.table else 0

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is still to be computed; at least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def num_remaining(self) -> int:
        """Tokens it may still generate."""
        return len(self.request.prompt_tokens) + self.request.max_new_tokens - len(self.tokens)


@dataclass(frozen=True)
class ScheduledRows:
    """``count`` known tokens of one sequence from position ``start``, then ``num_draft`` draft nodes.

    The sequence's table has slots for all of them, in this order from ``start``.
    """

    sequence: SequenceState
    table: PageTable
    start: int
    count: int
    num_draft: int = 0

    @property
    def reaches_end(self) -> bool:
        """Whether the last known token is among the rows, so that the next one can be chosen."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True)
class Plan:
    rows: list[ScheduledRows]
    copies: list[SlotCopy]
    """To run in this order before the forward."""


class Scheduler:
    """The queue and the running batch. Counters only grow."""

    def __init__(self, cache: PagedCache, *, max_batch_size: int, max_num_tokens: int) -> None:
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in order of admission
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0

    def add(self, sequence: SequenceState) -> None:
        """Queue it. Raises InputError if the whole KV cache is too small for it alone."""
        request = sequence.request
        # The last generated token is never computed; drafts are trimmed to stay within this too.
        num_slots = len(request.prompt_tokens) + request.max_new_tokens - 1
        if self.cache.pages_for(num_slots) > self.cache.num_pages:
            raise InputError(
                f"request {request.id!r}: {num_slots} tokens exceed the {self.cache.num_pages} pages of "
                f"{self.cache.page_tokens} tokens of the KV cache; shorten it or raise limits.kv_cache_bytes"
            )
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a sequence that finished or was cancelled, and free its pages."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.cache.release(sequence.table)
            sequence.table = None

    def draft_room(self) -> list[tuple[SequenceState, int, int]]:
        """Sequences that the next step may draft for, and the most levels and nodes of each draft.

        A draft n levels deep yields up to n + 1 tokens, so it stays below the tokens still wanted.
        """
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        budget = self.max_num_tokens - len(decoding)
        if budget <= 0:
            return []
        return [
            (sequence, min(sequence.num_remaining - 1, budget), budget)
            for sequence in decoding
            if sequence.num_remaining > 1
        ]

    def schedule(self, num_drafted: Mapping[str, int]) -> Plan:
        """Choose the rows of the next forward; ``num_drafted`` are the nodes on offer, by request id.

        Allocates the slots of the rows. Empty if nothing runs or waits, or if the only running
        sequence had to be preempted.
        """
        budget = self.max_num_tokens
        num_preemptions = self.num_preemptions
        decoding: list[ScheduledRows] = []
        for sequence in [sequence for sequence in self.running if sequence.num_pending == 1]:
            if budget == 0 or not self._make_room(sequence):
                break
            assert sequence.table is not None
            decoding.append(ScheduledRows(sequence, sequence.table, sequence.num_computed, 1))
            budget -= 1

        rows: list[ScheduledRows] = []
        for row in decoding:
            length = row.start + 1
            offered = num_drafted.get(row.sequence.request.id, 0)
            num_draft = min(offered, budget, self.cache.capacity(row.table) - length)
            self.cache.grow(row.table, length + num_draft)
            rows.append(ScheduledRows(row.sequence, row.table, row.start, 1, num_draft))
            budget -= num_draft

        for sequence in self.running:
            if budget > 0 and sequence.num_pending > 1:
                rows.append(_prompt_chunk(sequence, budget))
                budget -= rows[-1].count

        copies: list[SlotCopy] = []
        if self.num_preemptions == num_preemptions:
            while budget > 0 and self._admit(copies):
                rows.append(_prompt_chunk(self.running[-1], budget))
                budget -= rows[-1].count
        return Plan(rows, copies)

    def _make_room(self, sequence: SequenceState) -> bool:
        """A slot for every known token of ``sequence``; False if it was itself preempted for lack of pages.

        The victims are the latest admitted, which have no rows in this step yet.
        """
        while sequence.table is not None:
            if self.cache.grow(sequence.table, len(sequence.tokens)):
                return True
            victim = self.running.pop()
            assert victim.table is not None
            self.cache.release(victim.table)
            victim.table = None
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
        return False

    def _admit(self, copies: list[SlotCopy]) -> bool:
        """Start the request at the head of the queue, if a place and pages for it are there.

        One page stays spare for each running sequence to grow into, lest the newcomer be preempted soon.
        """
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        sequence = self.waiting[0]
        opened = self.cache.open(sequence.tokens, spare_pages=len(self.running))
        if opened is None:
            return False
        sequence.table, copy = opened
        if copy is not None:
            copies.append(copy)
        self.running.append(self.waiting.popleft())
        self.num_prefix_hit_tokens += sequence.num_computed
        return True


def _prompt_chunk(sequence: SequenceState, budget: int) -> ScheduledRows:
    assert sequence.table is not None
    return ScheduledRows(sequence, sequence.table, sequence.num_computed, min(sequence.num_pending, budget))
