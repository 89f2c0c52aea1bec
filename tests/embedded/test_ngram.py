"""Prompt lookup against a reference that searches the whole text anew each time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.embedded.drafters import Drafter, DraftView
from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.tree import EMPTY_DRAFT
from trtspec.errors import InputError


@dataclass(frozen=True)
class Search:
    """A brute-force lookup; the defaults are the rule, each other value a mistake."""

    longest_first: bool = True
    latest_first: bool = True
    suffix_itself: bool = False
    wrap: bool = True

    def __call__(self, tokens: Sequence[int], room: int, low: int, high: int) -> list[int]:
        lengths = range(low, high + 1)
        for n in reversed(lengths) if self.longest_first else lengths:
            ends = range(n, len(tokens) + self.suffix_itself)
            for end in reversed(ends) if self.latest_first else ends:
                if tokens[end - n : end] == tokens[len(tokens) - n :]:
                    if end == len(tokens):
                        return []
                    text = list(tokens)
                    while len(text) < len(tokens) + room:
                        text.append(text[end + len(text) - len(tokens)])
                    found = text[len(tokens) :]
                    return found if self.wrap else found[: len(tokens) - end]
        return []


def propose(drafter: Drafter, tokens: Sequence[int], room: int = 99, name: str = "a") -> list[int]:
    (draft,) = drafter.propose([DraftView(name, tokens, room)])
    assert draft.is_chain
    assert draft.probs is None
    return list(draft.tokens)


texts = st.integers(1, 3).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=40))


@settings(max_examples=300, deadline=None)
@given(
    texts,
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_proposes_what_a_search_of_the_whole_text_finds(
    tokens: list[int], low: int, more: int, num_draft_tokens: int, room: int
) -> None:
    drafter = NgramDrafter(num_draft_tokens, low, low + more)
    expected = Search()(tokens, min(num_draft_tokens, room), low, low + more)
    assert propose(drafter, tokens, room) == expected


@pytest.mark.parametrize(
    "mistake",
    [Search(longest_first=False), Search(latest_first=False), Search(suffix_itself=True), Search(wrap=False)],
)
def test_each_rule_of_the_search_matters(mistake: Search) -> None:
    rng = random.Random(0)
    disagreements = 0
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(4, 30))]
        disagreements += propose(NgramDrafter(4, 1, 3), tokens) != mistake(tokens, 4, 1, 3)
    assert disagreements > 20


@settings(max_examples=150, deadline=None)
@given(texts, st.data())
def test_an_index_that_grew_proposes_what_a_fresh_one_does(tokens: list[int], data: st.DataObject) -> None:
    grown = NgramDrafter(5, 1, 3)
    known: list[int] = []
    while len(known) < len(tokens):
        known.extend(tokens[len(known) : len(known) + data.draw(st.integers(1, 6))])
        assert propose(grown, known) == propose(NgramDrafter(5, 1, 3), known)


def test_room_of_nothing_still_keeps_the_index_up_to_date() -> None:
    drafter = NgramDrafter(4, 1, 2)
    assert propose(drafter, [1, 2, 3], 0) == []
    assert propose(drafter, [1, 2, 3, 1, 2]) == [3, 1, 2, 3]


def test_longest_then_latest() -> None:
    #         |longest|        |latest |
    tokens = [1, 2, 3, 7, 9, 3, 8, 2, 3, 6, 1, 2, 3]
    assert propose(NgramDrafter(1, 1, 3), tokens) == [7]
    assert propose(NgramDrafter(1, 1, 2), tokens) == [6]


def test_no_earlier_occurrence_no_draft() -> None:
    drafter = NgramDrafter(4, 2, 3)
    assert drafter.propose([DraftView("a", [5], 9), DraftView("b", [5, 5], 9)]) == [EMPTY_DRAFT] * 2
    assert propose(drafter, [1, 2, 3, 4], name="c") == []
    # A single token recurs, but a match must have two.
    assert propose(drafter, [1, 2, 3, 1], name="d") == []


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_periodic_text_drafts_full_length_by_copying_its_own_draft(period: int) -> None:
    tokens = [index % period for index in range(period + 2)]
    assert propose(NgramDrafter(16, 1, 2), tokens) == [
        index % period for index in range(period + 2, period + 18)
    ]


def test_sequences_do_not_see_each_other_and_release_forgets() -> None:
    drafter = NgramDrafter(2, 2, 2)
    assert propose(drafter, [1, 2, 3, 1, 2], name="a") == [3, 1]
    assert propose(drafter, [9, 1, 2], name="b") == []
    drafter.release("a")
    drafter.release("never seen")
    # The id starts anew with another text, in which the old one's places mean nothing.
    assert propose(drafter, [7, 1, 2], name="a") == []
    assert propose(drafter, [7, 1, 2, 4, 1, 2], name="a") == [4, 1]


def test_order_of_a_call_does_not_matter() -> None:
    views = [DraftView("a", [1, 2, 3, 1, 2], 4), DraftView("b", [5, 6, 5], 4), DraftView("c", [7], 4)]
    there = NgramDrafter(4, 1, 2).propose(views)
    assert NgramDrafter(4, 1, 2).propose(views[::-1]) == there[::-1]


class CountingList(list):
    """A list that counts the tokens read from it."""

    reads = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found


def test_a_step_reads_the_new_tokens_not_the_whole_text() -> None:
    rng = random.Random(1)
    tokens = CountingList(rng.randrange(50) for _ in range(5000))
    drafter = NgramDrafter(4, 2, 4)
    propose(drafter, tokens)
    tokens.reads = 0
    for _ in range(10):
        tokens.append(rng.randrange(50))
        propose(drafter, tokens)
    # Per new token at most 2 + 3 + 4 to index, as many to look up, and 4 to copy.
    assert tokens.reads <= 10 * (9 + 9 + 4)


def test_the_text_is_not_changed() -> None:
    tokens = [1, 2, 1, 2, 1]
    propose(NgramDrafter(8, 1, 2), tokens)
    assert tokens == [1, 2, 1, 2, 1]


def test_sizes_that_do_not_fit_are_refused_together() -> None:
    with pytest.raises(InputError) as caught:
        NgramDrafter(0, 0, -1)
    assert [problem.key for problem in caught.value.problems] == [
        "speculation.num_draft_tokens",
        "speculation.min_ngram",
        "speculation.max_ngram",
    ]
