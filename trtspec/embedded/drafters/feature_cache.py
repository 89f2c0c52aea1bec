"""What an EAGLE drafter remembers of each sequence: features, and its own layer's keys and values, in pages.

Positions are the target's. Slot p of a sequence holds

* the *feature* of position p: what the target computed there, never computed again, and
* the key and value of *pair* p: token p beside the feature of p - 1, from which the head predicts token p +
  1.

Both depend on tokens 0 .. p alone, so a page of slots can be found by its tokens and shared like a page of
the target's own cache (:class:`PagedCache`), and a prompt that hits the one mostly hits the other. Slot 0
has no pair. Only what became final is ever stored here; the nodes of a draft live in scratch slots behind
the pages and are overwritten by the next one, so there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.embedded.kvcache import CacheCorrupted, PagedCache, PageTable, SlotCopy
from trtspec.embedded.kvstore import KvStore
from trtspec.modelspec import ModelSpec


@dataclass(eq=False)
class FeatureState:
    """One sequence. Features of positions below ``computed`` are in their slots, the pairs
    ``first .. paired`` have keys and values; ``computed`` is at most the number of known tokens - 1."""

    table: PageTable
    computed: int
    paired: int
    first: int = 1
    whole: bool = True
    """Nothing is missing before ``computed``; only then may pages be shared."""
    known: int = 0
    """Known tokens when ``output`` was made."""
    output: Tensor | None = None
    """[feature]: the head's output at the last pair, that of the current token."""


class FeatureCache:
    """``num_pages`` pages of ``page_tokens`` slots, and ``num_scratch`` slots behind them."""

    def __init__(
        self,
        spec: ModelSpec,
        feature_size: int,
        *,
        num_pages: int,
        page_tokens: int,
        num_scratch: int,
        prefix_cache: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_pages * page_tokens
        """Also the first scratch slot."""
        self.store = KvStore(spec, self.num_slots + num_scratch, dtype=dtype, device=device)
        self.features = torch.zeros(self.num_slots, feature_size, dtype=dtype, device=device)
        self._cache = PagedCache(num_pages, page_tokens, prefix_cache=prefix_cache, device=device)
        self._states: dict[str, FeatureState] = {}  # least recently observed first

    def get(self, sequence_id: str) -> FeatureState | None:
        return self._states.get(sequence_id)

    def reach(
        self, sequence_id: str, tokens: Sequence[int], start: int, stop: int, active: Collection[str]
    ) -> FeatureState | None:
        """The state, with slots up to position ``stop``, of a sequence whose features of positions
        ``start <= p < stop`` are at hand; None if no pages are left.

        A new sequence takes over what another with the same first tokens left. If features before ``start``
        are missing nevertheless, the pairs start behind the gap: shorter context, worse drafts, still lawful.
        Sequences outside ``active`` (preempted ones) lose their state first.
        """
        state = self._states.pop(sequence_id, None)
        while state is None:
            opened = self._cache.open(tokens)
            if opened is None:
                if not self._drop_idle(active):
                    return None
                continue
            table, copy = opened
            if copy is not None:
                self._copy(copy)
            state = FeatureState(table, table.num_computed, max(0, table.num_computed - 1))
        self._states[sequence_id] = state
        if state.computed < start:
            state.whole = False
            state.first, state.computed, state.paired = start + 1, start, start
        while not self._cache.grow(state.table, max(stop, state.computed) + 1):
            if not self._drop_idle(active):
                self.release(sequence_id)
                return None
        return state

    def commit(self, state: FeatureState, tokens: Sequence[int]) -> None:
        """Let the slots below ``state.computed`` be found by their tokens; their content is in place."""
        if state.whole:
            self._cache.commit(state.table, tokens, range(state.computed - state.table.num_computed))

    def release(self, sequence_id: str) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self._cache.release(state.table)

    def _drop_idle(self, active: Collection[str]) -> bool:
        idle = next((name for name in self._states if name not in active), None)
        if idle is None:
            return False
        self.release(idle)
        return True

    def _copy(self, copy: SlotCopy) -> None:
        self.store.copy(copy.source, copy.target)
        self.features.index_copy_(0, copy.target, self.features.index_select(0, copy.source))

    def check_integrity(self) -> None:
        """Raise :class:`CacheCorrupted` unless the books of pages and sequences balance."""
        self._cache.check_integrity()
        for name, state in self._states.items():
            if not state.table.num_computed <= state.computed or not state.paired <= state.computed:
                raise CacheCorrupted(f"{name}: {state.paired} pairs of {state.computed} features")
            if len(state.table.slots(0, state.paired + 1)) != state.paired + 1:
                raise CacheCorrupted(f"{name}: {state.paired} pairs have too few slots")
        held = sum(1 for state in self._states.values() for _ in state.table._pages)
        shared = self._cache.pages_held
        if held < shared:
            raise CacheCorrupted(f"{shared} pages are held, the sequences know of {held}")

    @property
    def num_sequences(self) -> int:
        return len(self._states)
