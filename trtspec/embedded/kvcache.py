"""Who owns which KV slot: pages with reference counts, prefix reuse and copy-on-write.

The cache hands out *pages* of ``page_tokens`` consecutive slots. Position ``p`` of a sequence lives in
slot ``pages[p // page_tokens] * page_tokens + p % page_tokens``. Every page is in exactly one state:

* **free**: no content;
* **held**: in the table of at least one sequence;
* **cached**: held by none, but its content can still be found by its tokens. Least recently used
  cached pages are evicted when no page is free.

A page is *published* (can be found) once all its slots hold the KV of tokens that became final; draft
rows live beyond that point, so they never can be found. Published pages form a tree: the key of a page
is (parent page, its tokens), looked up by hash and compared token by token, so a hash collision cannot
return foreign content. A published page is never written again. Whoever holds a page also holds its
ancestors, hence a page is released, and so evicted, no later than its ancestors.

Only the bookkeeping is here; :class:`trtspec.embedded.kvstore.KvStore` has the tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class CacheCorrupted(RuntimeError):
    """The books do not balance: a bug in the cache or in how it is driven."""


@dataclass(frozen=True)
class SlotCopy:
    """KV to copy from ``source`` to ``target`` slots, both ``[n] int64``; they may overlap, so that
    everything must be read before anything is written. Due before the next forward."""

    source: Tensor
    target: Tensor


class _Page:
    __slots__ = ("children", "number", "parent", "refs", "tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self.parent: _Page | None = None
        self.tokens: tuple[int, ...] | None = None  # None: not published
        self.children: dict[tuple[int, ...], _Page] = {}


class PageTable:
    """One sequence's pages, in position order; only :class:`PagedCache` changes it.

    ``num_computed`` positions hold the KV of final tokens; the rows of a step are written to the slots
    behind them.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.num_computed = 0
        self._pages: list[_Page] = []
        self._num_published = 0
        self._slots = torch.empty(0, dtype=torch.int64, device=device)

    def slots(self, start: int, stop: int) -> Tensor:
        """[stop - start] int64: the slots of positions start <= p < stop (a view)."""
        return self._slots[start:stop]


class PagedCache:
    """``num_pages`` pages of ``page_tokens`` slots each, shared by all sequences.

    ``prefix_cache`` False publishes nothing: every page is freed with its sequence. ``device`` is where
    the slot numbers are kept.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        *,
        prefix_cache: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._prefix_cache = prefix_cache
        self._device = device
        self._pages = [_Page(number) for number in range(num_pages)]
        self._free = self._pages[::-1]
        self._cached: OrderedDict[_Page, None] = OrderedDict()  # least recently used first
        self._root = _Page(-1)
        self._tables: set[PageTable] = set()

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def pages_cached(self) -> int:
        return len(self._cached)

    @property
    def pages_held(self) -> int:
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def pages_available(self) -> int:
        """Pages that could be handed out now."""
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` slots take."""
        return -(-num_tokens // self.page_tokens)

    def open(
        self, tokens: Sequence[int], *, spare_pages: int = 0
    ) -> tuple[PageTable, SlotCopy | None] | None:
        """A table with room for all of ``tokens``, of which the longest cached prefix is already computed.

        At least the last token stays to be computed: its logits are wanted. A prefix that ends inside a
        page is continued in a fresh page, to which the matching slots must be copied: the second value.
        None, and nothing changed, if fewer than ``spare_pages`` would remain available.
        """
        hits, source, num_partial = self._longest_prefix(tokens)
        num_fresh = self.pages_for(len(tokens)) - len(hits)
        num_unheld_hits = sum(page.refs == 0 for page in hits)
        if num_fresh + num_unheld_hits + spare_pages > self.pages_available:
            return None
        for page in hits:
            self._hold(page)
        if source is not None and source in self._cached:
            self._cached.move_to_end(source)
        table = PageTable(self._device)
        self._tables.add(table)
        self._append(table, hits)
        self._append(table, [self._take() for _ in range(num_fresh)])
        table._num_published = len(hits)
        start = len(hits) * self.page_tokens
        table.num_computed = start + num_partial
        if source is None:
            return table, None
        # The source may just have been evicted by our own needs. Its content lasts until the next forward.
        first = source.number * self.page_tokens
        copied = torch.arange(first, first + num_partial, device=self._device)
        return table, SlotCopy(copied, table.slots(start, table.num_computed).clone())

    def capacity(self, table: PageTable) -> int:
        """Slots that ``table`` could have if it took every available page."""
        return (len(table._pages) + self.pages_available) * self.page_tokens

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Give ``table`` at least ``num_tokens`` slots; False, and nothing changed, if pages lack."""
        num_fresh = self.pages_for(num_tokens) - len(table._pages)
        if num_fresh > self.pages_available:
            return False
        if num_fresh > 0:
            self._append(table, [self._take() for _ in range(num_fresh)])
        return True

    def commit(self, table: PageTable, known: Sequence[int], rows: Sequence[int]) -> SlotCopy | None:
        """Make rows of the last forward final; the others are forgotten and surplus pages freed.

        ``rows`` are indices into the sequence's rows of that forward, ascending: row i was written to the
        i-th slot after the computed ones. ``known`` are all final tokens of the sequence, those of ``rows``
        included (and usually one more, not computed yet). Rows that do not follow each other, an accepted
        path of a draft tree, are moved together: the copy to do is returned, due at once, since pages
        that became full are published here.
        """
        start = table.num_computed
        table.num_computed = stop = start + len(rows)
        copy = None
        if rows and rows[-1] != len(rows) - 1:
            moved = next(at for at, row in enumerate(rows) if row != at)
            source = torch.tensor([start + row for row in rows[moved:]], device=self._device)
            copy = SlotCopy(table._slots[source], table.slots(start + moved, stop).clone())
        self._shrink(table, len(known))
        if self._prefix_cache:
            self._publish(table, known)
        return copy

    def release(self, table: PageTable) -> None:
        """Give back every page of ``table``; published ones stay cached. The table is dead afterwards."""
        self._tables.remove(table)
        self._shrink(table, 0)

    def clear(self) -> None:
        """Evict every cached page: for when what lies in them can no longer be trusted."""
        while self._cached:
            self._evict()

    # ------------------------------------------------------------------ pages

    def _longest_prefix(self, tokens: Sequence[int]) -> tuple[list[_Page], _Page | None, int]:
        """Full pages that hold a prefix of ``tokens[:-1]``; a page that continues it, and how far."""
        if not self._prefix_cache:
            return [], None, 0
        size, limit = self.page_tokens, len(tokens) - 1
        hits: list[_Page] = []
        last = self._root
        for start in range(0, limit - size + 1, size):
            child = last.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            hits.append(child)
            last = child
        start = len(hits) * size
        rest = tuple(tokens[start : min(start + size, limit)])
        source, longest = None, 0
        for key, child in last.children.items():
            common = _common_prefix(key, rest)
            if common > longest:
                source, longest = child, common
        return hits, source, longest

    def _take(self) -> _Page:
        if not self._free:
            self._evict()
        page = self._free.pop()
        page.refs = 1
        return page

    def _evict(self) -> None:
        """Free the least recently used cached page, which by then is nobody's parent."""
        page, _ = self._cached.popitem(last=False)
        assert page.parent is not None
        assert page.tokens is not None
        del page.parent.children[page.tokens]
        page.parent = page.tokens = None
        self._free.append(page)

    def _hold(self, page: _Page) -> None:
        page.refs += 1
        self._cached.pop(page, None)

    def _drop(self, page: _Page) -> None:
        page.refs -= 1
        if page.refs == 0 and page.tokens is not None:
            self._cached[page] = None
        elif page.refs == 0:
            self._free.append(page)

    def _append(self, table: PageTable, pages: Sequence[_Page]) -> None:
        old = len(table._pages)
        table._pages.extend(pages)
        needed = len(table._pages) * self.page_tokens
        if needed > len(table._slots):
            room = max(needed, 2 * len(table._slots))
            grown = torch.empty(room, dtype=torch.int64, device=self._device)
            grown[: len(table._slots)] = table._slots
            table._slots = grown
        if pages:
            self._write_slots(table, old, pages)

    def _write_slots(self, table: PageTable, index: int, pages: Sequence[_Page]) -> None:
        size = self.page_tokens
        firsts = torch.tensor([page.number * size for page in pages], device=self._device)
        slots = firsts[:, None] + torch.arange(size, device=self._device)
        table._slots[index * size : (index + len(pages)) * size] = slots.reshape(-1)

    def _shrink(self, table: PageTable, num_tokens: int) -> None:
        # Last page first: a cached page must be older than its ancestors to be evicted before them.
        while len(table._pages) > self.pages_for(num_tokens):
            self._drop(table._pages.pop())

    def _publish(self, table: PageTable, known: Sequence[int]) -> None:
        size = self.page_tokens
        while (table._num_published + 1) * size <= table.num_computed:
            index = table._num_published
            page = table._pages[index]
            parent = table._pages[index - 1] if index else self._root
            key = tuple(known[index * size : (index + 1) * size])
            twin = parent.children.get(key)
            if twin is None:
                page.parent, page.tokens = parent, key
                parent.children[key] = page
            else:  # another sequence was first: share its page, so that one content has one page
                self._hold(twin)
                self._drop(page)
                table._pages[index] = twin
                self._write_slots(table, index, [twin])
            table._num_published += 1

    # ------------------------------------------------------------------ the auditor

    def check_integrity(self) -> None:
        """Raise :class:`CacheCorrupted`, naming every fault, unless all books agree. Changes nothing."""
        faults: list[str] = []
        free, cached = set(self._free), set(self._cached)
        held = Counter(page for table in self._tables for page in table._pages)
        if len(free) != len(self._free):
            faults.append("a page is in the free list twice")
        if free & cached or free & held.keys() or cached & held.keys():
            faults.append("a page is in two states")
        if len(free) + len(cached) + len(held) != self.num_pages:
            faults.append(
                f"free {len(free)} + cached {len(cached)} + held {len(held)} is not {self.num_pages} pages"
            )
        for page in self._pages:
            if page.refs != held[page]:
                faults.append(f"page {page.number} counts {page.refs} holders and has {held[page]}")
            if (page in free or page.tokens is None) and page.children:
                faults.append(f"page {page.number} is not published but has children")
            if page in free and page.tokens is not None:
                faults.append(f"page {page.number} is free and published")
            if page in cached and page.tokens is None:
                faults.append(f"page {page.number} is cached but cannot be found")
            if page.tokens is not None and (
                page.parent is None or page.parent.children.get(page.tokens) is not page
            ):
                faults.append(f"page {page.number} is published but its parent does not lead to it")
            if page.parent is not None and page.parent is not self._root and page.parent.refs < page.refs:
                faults.append(f"page {page.number} is held by someone who does not hold its parent")
            if page.tokens is None and held[page] > 1:
                faults.append(f"page {page.number} is not published but shared")
        age = {page: at for at, page in enumerate(self._cached)}
        for page in self._cached:
            if page.parent in age and age[page.parent] < age[page]:
                faults.append(f"page {page.number} would outlive its parent")
        for table in self._tables:
            faults.extend(self._table_faults(table))
        if faults:
            raise CacheCorrupted("; ".join(faults))

    def _table_faults(self, table: PageTable) -> list[str]:
        faults = []
        pages, size = table._pages, self.page_tokens
        numbers = [page.number for page in pages]
        if len(set(numbers)) != len(numbers):
            faults.append(f"a table has a page twice: {numbers}")
        if table.num_computed > len(pages) * size:
            faults.append(f"{table.num_computed} computed tokens in {len(pages)} pages")
        expected = [number * size + offset for number in numbers for offset in range(size)]
        if table._slots[: len(expected)].tolist() != expected:
            faults.append(f"slots do not follow the pages {numbers}")
        if self._prefix_cache and table._num_published != table.num_computed // size:
            faults.append(f"{table._num_published} pages published of {table.num_computed} computed tokens")
        for index, page in enumerate(pages):
            parent = pages[index - 1] if index else self._root
            if index < table._num_published and page.parent is not parent:
                faults.append(f"page {page.number} is published under another parent than the table's")
            if index >= table._num_published and page.tokens is not None:
                faults.append(f"page {page.number} is published before its tokens are final")
        return faults


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))
