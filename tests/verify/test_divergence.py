"""Divergence of laws and degenerate text: identities, oracles, and faults that must be seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from built_tiny import build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.verify.degenerate import degenerate_rows, degeneration, judge_degenerate
from trtspec.verify.divergence import compare_laws, judge_divergence, kl_rows, tail_of
from trtspec.verify.gates import Verdict
from trtspec.verify.quality import check_quality

GATES = {"max_mean_kl": 0.1, "max_p99_kl": 1.0, "min_same_top_token": 0.9}
NO_GATES = dict.fromkeys(GATES)


def rows_with(rng: np.random.Generator, kl: float, texts: int = 12, length: int = 60) -> list[dict]:
    return [
        {"text": text, "position": position, "kl": rng.exponential(kl), "same_top": rng.random() > kl}
        for text in range(texts)
        for position in range(length)
    ]


def verdicts(rows: list[dict], gates: dict = GATES) -> dict[str, Verdict]:
    checks = judge_divergence(rows, source="simulated", **gates)
    return {check.name: check.verdict for check in checks}


def test_kl_of_two_laws():
    """Against the sum written out, at float32 too; never negative, 0 for equal ones, infinite where the
    target excludes what the baseline may say."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(40), size=8), rng.dirichlet(np.ones(40), size=8)
    expected = [sum(b * math.log(b / a) for a, b in zip(*two, strict=True)) for two in zip(q, p, strict=True)]
    assert kl_rows(np.log(q), np.log(p)) == pytest.approx(expected)
    assert kl_rows(np.log(q).astype(np.float32), np.log(p).astype(np.float32)) == pytest.approx(
        expected, rel=1e-4
    )
    assert (kl_rows(np.log(p), np.log(p)) == 0).all()
    never = np.log(q)
    never[0, 3] = -np.inf
    assert math.isinf(kl_rows(never, np.log(p))[0])
    assert kl_rows(np.log(p), never)[0] < math.inf
    broken = np.log(q)
    broken[2, 1] = np.nan
    assert math.isnan(kl_rows(broken, np.log(p))[2])
    assert math.isnan(kl_rows(np.log(p), broken)[2])


def test_the_tail_is_the_quantile_and_texts_move_together():
    rng = np.random.default_rng(2)
    values = [list(rng.exponential(1.0, size=80)) for _ in range(10)]
    value, (low, high) = tail_of(values)
    assert value == np.quantile(np.concatenate(values), 0.99, method="inverted_cdf")
    assert low <= value <= high
    one_bad = [[0.0] * 80 for _ in range(9)] + [[5.0] * 80]
    # Whole texts are drawn: the bad one may be absent, or more of them be worse than anything seen.
    assert tail_of(one_bad)[1] == (0.0, math.inf)
    assert tail_of([[0.0] * 80] * 10) == (0.0, (0.0, 0.0))


def test_the_interval_of_the_tail_covers_where_that_of_the_bootstrap_does_not():
    """Eight texts of different levels, as many as a quick run has."""
    rng = np.random.default_rng(8)
    truth = math.exp(2.326348 * math.sqrt(1 + 0.3**2))
    covered, quantiles = [], []
    for _ in range(200):
        texts = np.exp(rng.normal(rng.normal(0, 0.3, size=(8, 1)), 1, size=(8, 127)))
        _, (low, high) = tail_of(texts.tolist())
        covered.append(low <= truth <= high)
        # Broken: the quantiles of resampled texts.
        chosen = rng.integers(0, 8, size=(200, 8))
        again = np.quantile(texts[chosen].reshape(200, -1), 0.99, axis=1, method="inverted_cdf")
        low, high = np.quantile(again, [0.025, 0.975])
        quantiles.append(low <= truth <= high)
    assert np.mean(covered) >= 0.93
    assert np.mean(quantiles) < 0.86


@pytest.mark.parametrize(("kl", "verdict"), [(0.01, Verdict.PASS), (0.5, Verdict.FAIL)])
def test_gates(kl: float, verdict: Verdict):
    assert set(verdicts(rows_with(np.random.default_rng(3), kl)).values()) == {verdict}


def test_without_gates_it_is_measured():
    rows = rows_with(np.random.default_rng(3), 0.5)
    assert set(verdicts(rows, NO_GATES).values()) == {Verdict.MEASURED}


def test_little_evidence_is_inconclusive():
    rows = rows_with(np.random.default_rng(4), 0.001, texts=3)
    assert set(verdicts(rows).values()) == {Verdict.INCONCLUSIVE}
    short = rows_with(np.random.default_rng(4), 0.001, texts=8, length=10)
    assert verdicts(short)["p99_kl"] is Verdict.INCONCLUSIVE


def test_one_token_that_is_no_number_is_not_dropped():
    rows = rows_with(np.random.default_rng(5), 0.01)
    for broken in (math.nan, math.inf, None):
        rows[7]["kl"] = broken
        assert set(verdicts(rows).values()) == {Verdict.ERROR}
    assert set(verdicts([]).values()) == {Verdict.ERROR}


def test_a_broken_tail_hides_in_the_mean_only():
    """One token in thirty is far off: perplexity and the mean look well, the 99th percentile does not."""
    rng = np.random.default_rng(6)
    rows = rows_with(rng, 0.001)
    for row in rows:
        if rng.random() < 1 / 30:
            row["kl"] = 1.5
    found = verdicts(rows)
    assert found["mean_kl"] is Verdict.PASS
    assert found["p99_kl"] is Verdict.FAIL


def test_engines(tmp_path):
    """The same engine diverges by nothing; another by what its own scores say, in the order of the texts."""
    texts = [prompt.tokens for prompt in repetitive_prompts(6)]
    first = open_engine(build_tiny(tmp_path / "a"), "no_speculation")
    other = open_engine(build_tiny(tmp_path / "b", seed=1), "no_speculation")
    same = compare_laws(first, first, texts)
    assert len(same) == sum(len(text) - 1 for text in texts)
    assert all(row["kl"] == 0 and row["same_top"] and row["target"] == row["baseline"] for row in same)
    rows = compare_laws(first, other, texts)
    scores = [first.score(text) for text in texts]
    assert [row["target"] for row in rows] == pytest.approx([x for one in scores for x in one.logprobs])
    assert all(row["kl"] > 0 for row in rows)
    check = check_quality(first, other, texts, bound=1.25, source="x")
    assert check.records is not None
    assert check.records.tables["tokens"] == rows
    chunks = list(first.score_rows(texts[0], chunk_tokens=5))
    assert {chunk.shape[1] for chunk in chunks} == {first.vocab_size}
    assert np.exp(np.concatenate(chunks)).sum(axis=1) == pytest.approx(1.0)
    laws = np.concatenate(chunks)
    assert laws[np.arange(len(laws)), list(texts[0][1:])] == pytest.approx(scores[0].logprobs)


TEXT = [5, 9, 3, 7, 9, 5, 11, 3, 2, 8, 5, 1, 9, 4, 6, 3, 12, 5, 7, 1, 3, 9, 2, 14, 5, 3, 8, 1, 9, 6]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (TEXT, ""),
        ([5], ""),
        ([5, 5, 5], ""),
        ([], "empty"),
        ([0, 0], "empty"),  # nothing but stop tokens
        ([7] * 8, "one token"),
        ([*TEXT[:8], *[7] * 9], "one token"),
        ([*TEXT, *[7] * 9], ""),  # a ruler under a heading
        ([1, 2] * 10, "loop"),
        ([*TEXT[:10], *[4, 5, 6] * 6], "loop"),
        ([*TEXT[:10], *[4, 5, 6] * 6, 4], "loop"),  # cut in the middle of a round
        ([*TEXT, *[4, 5, 6] * 6], ""),  # a refrain after a longer text
        ([*range(20, 40), *range(20, 40)], ""),  # said twice is a quotation
        ([*range(20, 40), *range(20, 40), *range(20, 40), 0], "loop"),
    ],
)
def test_what_is_no_text(tokens: list[int], found: str):
    assert degeneration(tokens, {0}) == found


def test_the_loop_is_found_as_a_plain_search_finds_it():
    rng = np.random.default_rng(7)
    for _ in range(300):
        tokens = [int(t) for t in rng.integers(1, 3, size=int(rng.integers(16, 40)))]
        loops = any(
            tokens[-fill:-period] == tokens[-fill + period :]
            for period in range(2, len(tokens) // 3 + 1)
            for fill in range(max(3 * period, 16, (len(tokens) + 1) // 2), len(tokens) + 1)
        )
        assert (degeneration(tokens) in ("loop", "one token")) >= loops
        assert loops or degeneration(tokens) != "loop"


def judged(target: list[list[int]], baseline: list[list[int]], margin: float | None = None):
    ids = [str(number) for number in range(len(target))]
    return judge_degenerate(degenerate_rows("greedy", ids, target, baseline, {0}), margin=margin)


def test_new_faults_fail_without_any_gate():
    check = judged([[7] * 20] * 12, [TEXT] * 12)
    assert check.verdict is Verdict.FAIL
    assert check.required
    assert "12 one token" in check.summary


def test_faults_that_the_baseline_has_too_are_its_own():
    check = judged([[7] * 20] * 12, [[7] * 20] * 12)
    assert check.verdict is Verdict.MEASURED
    assert not check.required
    assert judged([TEXT] * 11 + [[]], [TEXT] * 12).verdict is Verdict.MEASURED  # one of twelve: chance


def test_with_a_gate_few_answers_do_not_pass():
    assert judged([TEXT] * 12, [TEXT] * 12, 0.1).verdict is Verdict.INCONCLUSIVE
    assert judged([TEXT] * 40, [TEXT] * 40, 0.1).verdict is Verdict.PASS
    assert judged([[]] * 30 + [TEXT] * 10, [TEXT] * 40, 0.1).verdict is Verdict.FAIL
