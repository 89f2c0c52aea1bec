"""The cache's books, and what lies in its slots, after every one of thousands of random operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.embedded.kvcache import CacheCorrupted, PagedCache, PageTable, SlotCopy

Prefix = tuple[int, ...]


class Slots:
    """Stands for the KV tensors: a slot holds the whole prefix that its KV is a function of."""

    def __init__(self, cache: PagedCache) -> None:
        self.content: list[Prefix | None] = [None] * (cache.num_pages * cache.page_tokens)

    def copy(self, copy: SlotCopy | None) -> None:
        if copy is not None:
            read = [self.content[slot] for slot in copy.source.tolist()]
            for slot, value in zip(copy.target.tolist(), read, strict=True):
                self.content[slot] = value

    def write(self, table: PageTable, prefixes: Sequence[Prefix]) -> None:
        start = table.num_computed
        for slot, prefix in zip(table.slots(start, start + len(prefixes)).tolist(), prefixes, strict=True):
            self.content[slot] = prefix

    def check(self, table: PageTable, tokens: Sequence[int]) -> None:
        slots = table.slots(0, table.num_computed).tolist()
        assert [self.content[slot] for slot in slots] == [
            tuple(tokens[: at + 1]) for at in range(table.num_computed)
        ]


class Driver:
    """Random life: open (fork by prefix), prefill chunks, drafts of chains and trees, commit, release."""

    def __init__(self, cache: PagedCache, seed: int) -> None:
        self.cache = cache
        self.slots = Slots(cache)
        self.random = random.Random(seed)
        self.live: list[tuple[PageTable, list[int]]] = []
        self.texts: list[list[int]] = [[]]
        self.hits = self.copies = self.refused = self.moved = 0

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.random.choice(
                [self.open, self.open, self.advance, self.advance, self.advance, self.release]
            )()
            self.cache.check_integrity()
            assert self.cache.pages_free + self.cache.pages_cached + self.cache.pages_held == (
                self.cache.num_pages
            )
            for table, tokens in self.live:
                self.slots.check(table, tokens)

    def open(self) -> None:
        text = self.random.choice(self.texts)
        kept = self.random.randint(0, len(text))
        tokens = text[:kept] + [self.random.randrange(3) for _ in range(self.random.randint(1, 12))]
        before = (self.cache.pages_free, self.cache.pages_cached)
        spare = self.random.randrange(3)
        opened = self.cache.open(tokens, spare_pages=spare)
        if opened is None:
            self.refused += 1
            assert before == (self.cache.pages_free, self.cache.pages_cached)
            return
        table, copy = opened
        assert self.cache.pages_available >= spare
        assert table.num_computed < len(tokens)
        self.hits += table.num_computed > 0
        self.copies += copy is not None
        self.slots.copy(copy)
        self.live.append((table, tokens))
        self.texts = [*self.texts[-20:], tokens]

    def advance(self) -> None:
        if not self.live:
            return
        table, tokens = self.random.choice(self.live)
        pending = len(tokens) - table.num_computed
        if pending > 1:
            count = self.random.randint(1, pending)
            stop = table.num_computed + count
            self.slots.write(table, [tuple(tokens[: at + 1]) for at in range(table.num_computed, stop)])
            self._commit(table, tokens, range(count))
            if count < pending:
                return
        else:
            parents = [self.random.randrange(-1, node) for node in range(self.random.randint(0, 6))]
            if not self.cache.grow(table, len(tokens) + len(parents)):
                if not self.cache.grow(table, len(tokens)):
                    return
                parents = []
            prefixes = [tuple(tokens)]
            for parent in parents:
                prefixes.append((*prefixes[parent + 1], self.random.randrange(3)))
            self.slots.write(table, prefixes)
            leaf = self.random.randint(0, len(parents))
            path = [0]
            row = leaf
            while row:
                path.insert(1, row)
                row = parents[row - 1] + 1
            self.moved += path != list(range(len(path)))
            tokens += prefixes[leaf][len(tokens) :]
            # Sometimes the path is cut, as a stop token does, and nothing is left to compute.
            tokens += [self.random.randrange(3)] if self.random.random() < 0.8 else []
            self._commit(table, tokens, path)
            if table.num_computed == len(tokens):
                self._end(table)
                return
        if table.num_computed == len(tokens):
            tokens.append(self.random.randrange(3))
            if not self.cache.grow(table, len(tokens)):
                self._end(table)

    def release(self) -> None:
        if self.live:
            self._end(self.random.choice(self.live)[0])

    def _commit(self, table: PageTable, tokens: list[int], rows: Sequence[int]) -> None:
        self.slots.copy(self.cache.commit(table, tokens, rows))

    def _end(self, table: PageTable) -> None:
        self.live = [(other, tokens) for other, tokens in self.live if other is not table]
        self.cache.release(table)


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_books_and_contents_agree_after_every_operation(page_tokens: int, prefix_cache: bool) -> None:
    driver = Driver(PagedCache(96 // page_tokens, page_tokens, prefix_cache=prefix_cache), seed=page_tokens)
    driver.run(1500)
    assert driver.refused > 10
    assert driver.moved > 10
    if prefix_cache:
        assert driver.hits > 10
        assert driver.copies > 10 or page_tokens == 1
    else:
        assert driver.hits == driver.copies == driver.cache.pages_cached == 0
    for table, _ in driver.live:
        driver.cache.release(table)
    driver.cache.check_integrity()
    assert driver.cache.pages_held == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 5))
def test_any_shape_of_cache_keeps_its_books(seed: int, num_pages: int, page_tokens: int) -> None:
    Driver(PagedCache(num_pages, page_tokens), seed).run(60)


# ---------------------------------------------------------------- broken caches, which must be noticed


class ForgetsToDecrement(PagedCache):
    def _drop(self, page):
        if page.refs > 1:
            return
        super()._drop(page)


class LosesSurplusPages(PagedCache):
    def _shrink(self, table, num_tokens):
        while len(table._pages) > self.pages_for(num_tokens):
            table._pages.pop()


class FreesPublishedPages(PagedCache):
    def _drop(self, page):
        page.refs -= 1
        if page.refs == 0:
            self._free.append(page)


class ReleasesFirstPageFirst(PagedCache):
    def _shrink(self, table, num_tokens):
        table._pages[self.pages_for(num_tokens) :] = table._pages[self.pages_for(num_tokens) :][::-1]
        super()._shrink(table, num_tokens)


class HandsOutHeldPages(PagedCache):
    def _take(self):
        page = super()._take()
        self._free.insert(0, page)
        return page


class PublishesUnfinishedPages(PagedCache):
    """Publishes the page that the drafts were written to as soon as it is allocated."""

    def _publish(self, table, known):
        missing = table._num_published * self.page_tokens + self.page_tokens - len(known)
        if missing > 0 and len(table._pages) > table._num_published:
            known = [*known, *[0] * missing]
            table.num_computed, computed = len(known), table.num_computed
            super()._publish(table, known)
            table.num_computed = computed
        else:
            super()._publish(table, known)


class NeverMovesAcceptedRows(PagedCache):
    def commit(self, table, known, rows):
        super().commit(table, known, rows)


class CommitsEveryRow(PagedCache):
    """Takes the rows as written: rejected ones stay in front of the accepted ones."""

    def commit(self, table, known, rows):
        return super().commit(table, known, range(len(rows)))


class WritesIntoSharedPages(PagedCache):
    """Continues a partial hit in place instead of in a copy."""

    def open(self, tokens, *, spare_pages=0):
        opened = super().open(tokens, spare_pages=spare_pages)
        if opened is None or opened[1] is None:
            return opened
        table, copy = opened
        index = table._num_published
        page = self._pages[int(copy.source[0]) // self.page_tokens]
        self._hold(page)
        self._drop(table._pages[index])
        table._pages[index] = page
        self._write_slots(table, index, [page])
        return table, None


class TrustsTheFirstToken(PagedCache):
    """Finds pages by a hash that collides, without comparing their tokens."""

    def _longest_prefix(self, tokens):
        hits, last = [], self._root
        for start in range(0, len(tokens) - self.page_tokens, self.page_tokens):
            same = [page for key, page in last.children.items() if key[0] == tokens[start]]
            if not same:
                break
            hits.append(last := same[0])
        return hits, None, 0


class KeepsEvictedPagesInTheIndex(PagedCache):
    def _evict(self):
        page, _ = self._cached.popitem(last=False)
        page.parent = page.tokens = None
        self._free.append(page)


@pytest.mark.parametrize(
    "broken",
    [
        ForgetsToDecrement,
        LosesSurplusPages,
        FreesPublishedPages,
        ReleasesFirstPageFirst,
        HandsOutHeldPages,
        PublishesUnfinishedPages,
        NeverMovesAcceptedRows,
        CommitsEveryRow,
        WritesIntoSharedPages,
        TrustsTheFirstToken,
        KeepsEvictedPagesInTheIndex,
    ],
)
def test_a_broken_cache_is_noticed(broken: Callable[..., PagedCache]) -> None:
    with pytest.raises((CacheCorrupted, AssertionError)):
        Driver(broken(32, 3), seed=1).run(1500)


# ---------------------------------------------------------------- particular promises


def opened(cache: PagedCache, tokens: list[int]) -> tuple[PageTable, SlotCopy | None]:
    found = cache.open(tokens)
    assert found is not None
    return found


def finish(cache: PagedCache, tokens: list[int]) -> None:
    table, _ = opened(cache, tokens)
    cache.commit(table, tokens, range(len(tokens) - table.num_computed))
    cache.release(table)


def test_the_last_token_is_always_left_to_compute() -> None:
    cache = PagedCache(8, 4)
    text = list(range(8))
    finish(cache, text)
    table, copy = opened(cache, text)
    assert table.num_computed == 7
    assert copy is not None
    assert copy.source.tolist() == [int(copy.source[0]) + at for at in range(3)]
    assert copy.target.tolist() == table.slots(4, 7).tolist()
    assert not set(copy.source.tolist()) & set(table.slots(0, 8).tolist())


def test_longest_partial_page_wins() -> None:
    cache = PagedCache(16, 4)
    finish(cache, [1, 2, 3, 4, 9])
    finish(cache, [1, 2, 8, 8, 9])
    table, _ = opened(cache, [1, 2, 3, 5, 6])
    assert table.num_computed == 3


def test_twins_computed_at_once_end_up_sharing_pages() -> None:
    cache = PagedCache(8, 2)
    text = [1, 2, 3, 4, 5]
    first, _ = opened(cache, text)
    second, _ = opened(cache, text)
    assert first.num_computed == second.num_computed == 0
    cache.commit(first, text, range(4))
    cache.commit(second, text, range(4))
    assert first.slots(0, 4).tolist() == second.slots(0, 4).tolist()
    assert cache.pages_held == 4  # two shared, one each for the token to come
    cache.check_integrity()


def test_least_recently_used_leaves_first() -> None:
    cache = PagedCache(4, 2)
    finish(cache, [1, 1, 2, 2])
    finish(cache, [3, 3, 4, 4])
    table, _ = opened(cache, [1, 1, 2, 2, 5])  # uses the older text: a third page is needed
    assert table.num_computed == 4
    other = cache.open([3, 3, 9])
    assert other is None  # one page left, the root of the younger text
    other_table, _ = opened(cache, [3, 3])
    assert other_table.num_computed == 1
    cache.check_integrity()


def test_evicting_the_source_of_a_partial_hit_does_no_harm() -> None:
    cache = PagedCache(2, 4)
    slots = Slots(cache)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    table, _ = opened(cache, text)
    slots.write(table, [tuple(text[: at + 1]) for at in range(8)])
    cache.commit(table, text, range(8))
    cache.release(table)
    again = [1, 2, 3, 4, 5, 6, 9]
    table, copy = opened(cache, again)
    slots.copy(copy)
    assert table.num_computed == 6
    slots.check(table, again)
    cache.check_integrity()


def test_clear_forgets_what_nobody_holds() -> None:
    cache = PagedCache(8, 2)
    finish(cache, [1, 1, 2, 2, 3])
    table, _ = opened(cache, [1, 1, 5])
    cache.clear()
    cache.check_integrity()
    assert (cache.pages_free, cache.pages_cached, cache.pages_held) == (6, 0, 2)
    cache.release(table)
    assert opened(cache, [1, 1, 2, 2, 3])[0].num_computed == 2


def test_rejected_rows_give_their_pages_back() -> None:
    cache = PagedCache(8, 2)
    table, _ = opened(cache, [1, 2, 3])
    cache.commit(table, [1, 2, 3], range(2))
    assert cache.grow(table, 3 + 8)
    assert cache.pages_held == 6
    cache.commit(table, [1, 2, 3, 4], [0])
    assert cache.pages_held == 2
    cache.check_integrity()


def test_grow_beyond_the_cache_changes_nothing() -> None:
    cache = PagedCache(3, 2)
    table, _ = opened(cache, [1, 2, 3])
    assert cache.capacity(table) == 6
    assert not cache.grow(table, 7)
    assert cache.pages_free == 1
    assert cache.grow(table, 6)


def test_the_auditor_names_every_fault() -> None:
    cache = PagedCache(4, 2)
    opened(cache, [1, 2, 3])
    cache._pages[0].refs += 1
    cache._free.append(cache._free[0])
    with pytest.raises(CacheCorrupted, match=r"free list twice.*page 0 counts 2 holders and has 1"):
        cache.check_integrity()


def test_slots_are_int64_and_follow_the_pages() -> None:
    cache = PagedCache(4, 3)
    table, _ = opened(cache, [5, 6, 7, 8])
    assert table.slots(0, 4).dtype == torch.int64
    assert table.slots(0, 4).tolist() == [0, 1, 2, 3]
