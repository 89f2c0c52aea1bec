"""The corpus store against a search of the texts, n-gram trees by their rules, and the build of a store."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tiny_model

from trtspec.artifact import open_artifact
from trtspec.backends import open_engine
from trtspec.build import build
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.corpus import MAX_PLACES, Corpus, build_corpus, main, read_corpus
from trtspec.embedded.drafters.ngram import NgramDrafter, likely_tree
from trtspec.embedded.tree import Draft, children, depths
from trtspec.engine import Request, generate
from trtspec.errors import InputError
from trtspec.text import Tokenizer

texts = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4)


def search(texts: list[list[int]], suffix: list[int], depth: int) -> Counter[tuple[int, ...]]:
    """What follows ``suffix``, by looking everywhere."""
    n = len(suffix)
    return Counter(
        tuple(text[at + n : at + n + depth])
        for text in texts
        for at in range(len(text) - n)
        if text[at : at + n] == suffix
    )


@settings(max_examples=60, deadline=None)
@given(texts, st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 2))
def test_finds_what_a_search_of_the_texts_finds(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], known: list[int], low: int, count: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus") / "store"
    try:
        corpus = build_corpus(texts, folder, vocab_size=4, min_ngram=low, min_count=count)
    except InputError:
        corpus = None
    suffixes = [known[len(known) - n :] for n in range(low, min(len(known), low + 3) + 1)]
    frequent = [
        len(suffix)
        for suffix in suffixes
        if sum(search(texts, suffix[:low], 1).values()) >= count and search(texts, suffix, 1)
    ]
    found = corpus and corpus.find(known, low, low + 3, 5)
    if not frequent:
        assert not found
        return
    suffix = known[len(known) - max(frequent) :]
    assert found
    assert found.length == len(suffix)
    assert Counter(found.continuations) == search(texts, suffix, 5)


def test_many_places_are_sampled_evenly(tmp_path: Path) -> None:
    chance = random.Random(0)
    text = [token for _ in range(5000) for token in (7, chance.choice([1, 1, 1, 2]))]
    found = build_corpus([text], tmp_path / "store", vocab_size=9).find([7], 1, 4, 1)
    assert found is not None
    assert len(found.continuations) == MAX_PLACES
    assert Counter(found.continuations)[1,] == pytest.approx(0.75 * MAX_PLACES, abs=3)


def test_the_smaller_store_is_smaller_and_keeps_what_is_common(tmp_path: Path) -> None:
    common, noise = [1, 2, 3, 4] * 20, list(range(10, 60))
    full = build_corpus([common, noise], tmp_path / "full", vocab_size=64, min_ngram=2)
    small = build_corpus([common, noise], tmp_path / "small", vocab_size=64, min_ngram=2, min_count=2)
    assert len(small) < len(full)
    assert small.find([1, 2], 2, 4, 2) == full.find([1, 2], 2, 4, 2)
    assert full.find([11, 12], 2, 4, 2) is not None
    assert small.find([11, 12], 2, 4, 2) is None


def test_texts_do_not_run_into_each_other(tmp_path: Path) -> None:
    corpus = build_corpus([[1, 2, 3], [4, 5, 6]], tmp_path / "store", vocab_size=9)
    found = corpus.find([2], 1, 2, 4)
    assert found is not None
    assert found.continuations == [(3,)]
    assert corpus.find([3], 1, 2, 4) is None


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a corpus store"):
        Corpus.open(tmp_path)
    with pytest.raises(InputError, match="outside the vocabulary"):
        build_corpus([[9]], tmp_path / "a", vocab_size=9)
    with pytest.raises(InputError, match=r"^speculation.corpus: no run of 1 tokens .* give more text$"):
        build_corpus([[1]], tmp_path / "b", vocab_size=9)
    with pytest.raises(InputError, match="is in it 3 times; give more text, or lower corpus_min_count"):
        build_corpus([[1, 2, 3]], tmp_path / "b", vocab_size=9, min_ngram=2, min_count=3)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- trees


def propose(drafter: NgramDrafter, tokens: list[int], levels: int = 99) -> Draft:
    [draft] = drafter.propose([DraftView("a", tokens, levels, max_nodes=99)])
    return draft


def test_every_way_that_the_suffix_went_on_is_a_branch() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2]
    draft = propose(NgramDrafter(9, 2, 2, branches=3), tokens)
    below = children(draft)
    assert [draft.tokens[node] for node in below[0]] == [5, 4, 3]
    assert propose(NgramDrafter(9, 2, 2, branches=2), tokens).tokens.count(3) == 0
    assert propose(NgramDrafter(9, 2, 2), tokens).tokens == (5, 9, 1, 2, 5, 9, 1, 2, 5)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.integers(2, 5),
    st.integers(1, 9),
    st.integers(1, 6),
)
def test_trees_keep_their_sizes_and_merge_equal_siblings(
    tokens: list[int], branches: int, nodes: int, levels: int
) -> None:
    draft = propose(NgramDrafter(nodes, 1, 3, branches=branches), tokens, levels)
    assert len(draft) <= nodes
    assert max(depths(draft), default=0) <= levels
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    assert sum(not below for below in children(draft)[1:]) <= branches
    # Something is drafted exactly where the chain drafts.
    assert bool(len(draft)) == bool(len(propose(NgramDrafter(nodes, 1, 3), tokens, levels)))


def test_the_likelier_way_gets_more_nodes() -> None:
    ways = [((1, 2, 3, 4), 1.0), ((5, 6, 7, 8), 3.0), ((5, 6, 7, 9), 1.0)]
    draft = likely_tree(ways, 5, 3)
    assert (draft.tokens[0], len([node for node in draft.tokens if node > 4])) == (5, 4)
    assert likely_tree(ways, 8, 1).tokens == (5, 6, 7, 8)


def test_a_chain_takes_the_corpus_where_the_sequence_has_nothing(tmp_path: Path) -> None:
    corpus = build_corpus([[1, 2, 8, 8, 3, 4, 7]], tmp_path / "store", vocab_size=9)
    drafter = NgramDrafter(2, 2, 3, corpus=corpus)
    assert propose(drafter, [5, 3, 4]).tokens == (7,)
    assert propose(NgramDrafter(2, 2, 3), [5, 3, 4]).tokens == ()
    assert propose(NgramDrafter(2, 2, 3, corpus=corpus), [1, 2, 5, 1, 2]).tokens == (5, 1)
    both = propose(NgramDrafter(9, 2, 3, branches=2, corpus=corpus), [1, 2, 5, 1, 2])
    assert {both.tokens[node] for node in children(both)[0]} == {5, 8}


# ---------------------------------------------------------------- files and builds


def test_every_kind_of_file_gives_the_same_texts(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama")
    tokenizer = Tokenizer.load(tmp_path / "model")
    ids = tokenizer.encode("the cat sat")
    (tmp_path / "a.txt").write_text("the cat sat", encoding="utf-8")
    lines = [{"text": "the cat sat"}, {"tokens": ids}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    np.save(tmp_path / "a.npy", np.array([*ids, -1, *ids]))
    assert read_corpus(tmp_path / "a.txt", tokenizer) == [ids]
    assert read_corpus(tmp_path / "a.jsonl", tokenizer) == [ids, ids]
    assert read_corpus(tmp_path / "a.npy", tokenizer) == [ids, ids]
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\nnope\n', encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_corpus(tmp_path / "bad.jsonl", tokenizer)
    assert [problem.line for problem in caught.value.problems] == [1, 2]
    arguments = ["--tokenizer", str(tmp_path / "model"), "--data", str(tmp_path / "bad.jsonl")]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


RECIPE = """\
version: 1
name: tiny
model: {source: ./model}
backend: {kind: embedded, dtype: float64}
speculation: {kind: ngram, min_ngram: 1, branches: 2, corpus: texts.txt}
limits: {max_batch_size: 2, max_input_tokens: 32, max_seq_tokens: 64, max_num_tokens: 64}
serving: {default_max_tokens: 8}
"""


def test_a_build_makes_the_store_once_and_the_engine_drafts_from_it(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "texts.txt").write_text("the cat sat on the mat, the dog sat on the cat", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    built = build(tmp_path / "r.yaml", tmp_path / "engines")
    assert [step.name for step in built.manifest.steps] == ["import", "corpus", "check"]
    assert build(tmp_path / "r.yaml", tmp_path / "engines").up_to_date
    artifact = open_artifact(built.folder, check_hashes=True)
    assert artifact.corpus_dir == built.folder / "corpus"
    requests = [Request("a", tuple(Tokenizer.load(tmp_path / "model").encode("the cat")), 16)]
    answers = []
    for variant in ("recipe", "no_speculation"):
        engine = open_engine(artifact, variant)
        answers.append(generate(engine, requests)[0])
        engine.close()
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].drafted > 0
    (tmp_path / "texts.txt").write_text("another text, the other one", encoding="utf-8")
    again = build(tmp_path / "r.yaml", tmp_path / "engines")
    assert not again.up_to_date
    (tmp_path / "texts.txt").unlink()
    with pytest.raises(InputError, match=r"speculation\.corpus"):
        build(tmp_path / "r.yaml", tmp_path / "engines")
