"""Intervals cover what they claim to, and gates read them the only defensible way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trtspec import stats
from trtspec.verify.gates import Check, Verdict, exit_code, gate_verdict, gated


def texts(
    rng: np.random.Generator, loss: float, num_texts: int = 40, spread: float = 0.05
) -> list[list[float]]:
    """Simulated log-probability losses: texts differ, tokens of one text are alike."""
    blocks = []
    for _ in range(num_texts):
        length = int(rng.integers(20, 120))
        level = rng.normal(0, spread)
        blocks.append(list(loss + level + rng.normal(0, 0.4, size=length)))
    return blocks


def test_interval_of_the_perplexity_ratio_covers_the_truth():
    rng = np.random.default_rng(1)
    truth = math.exp(0.1)
    covered = [
        low <= truth <= high
        for _ in range(150)
        for _, (low, high) in [stats.mean_difference_ratio(texts(rng, 0.1))]
    ]
    assert 0.90 <= np.mean(covered) <= 0.99


def test_tokens_as_blocks_would_claim_too_much():
    """The broken variant: resampling tokens as if they were independent covers far less than 95 %."""
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(40):
        tokens = [[value] for block in texts(rng, 0.0, num_texts=20, spread=0.2) for value in block]
        _, (low, high) = stats.mean_difference_ratio(tokens)
        covered.append(low <= 1.0 <= high)
    assert np.mean(covered) < 0.7


def test_equal_models_pass_and_a_planted_loss_is_caught():
    rng = np.random.default_rng(3)
    same, same_interval = stats.mean_difference_ratio(texts(rng, 0.0))
    worse, worse_interval = stats.mean_difference_ratio(texts(rng, math.log(1.4)))
    assert gate_verdict(same_interval, 1.25, "at most") is Verdict.PASS
    assert gate_verdict(worse_interval, 1.25, "at most") is Verdict.FAIL
    assert same == pytest.approx(1.0, abs=0.06)
    assert worse == pytest.approx(1.4, abs=0.1)


def test_identical_scores_give_exactly_one():
    ratio, interval = stats.mean_difference_ratio([[0.0] * 5, [0.0] * 7])
    assert ratio == 1.0
    assert interval == (1.0, 1.0)


def test_one_block_says_nothing():
    assert stats.mean_difference_ratio([[0.1, 0.2]])[1] == (-math.inf, math.inf)
    assert gate_verdict((-math.inf, math.inf), 1.25, "at most") is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("trials", [1, 10, 300, 5000])
def test_no_event_gives_the_rule_of_three(trials: int):
    bound = stats.rate_upper_bound(0, trials)
    assert bound == pytest.approx(1 - 0.05 ** (1 / trials), rel=1e-9)
    if trials > 100:
        assert bound == pytest.approx(3 / trials, rel=0.02)


def test_upper_bound_covers():
    rng = np.random.default_rng(4)
    events = rng.binomial(200, 0.02, size=2000)
    assert np.mean([stats.rate_upper_bound(int(e), 200) >= 0.02 for e in events]) >= 0.95


def test_rate_interval_by_known_values():
    low, high = stats.rate_interval(8, 10)  # Clopper-Pearson, textbook values
    assert (low, high) == (pytest.approx(0.4439, abs=1e-4), pytest.approx(0.9748, abs=1e-4))
    assert stats.rate_interval(0, 10)[0] == 0.0
    assert stats.rate_interval(10, 10)[1] == 1.0
    assert stats.rate_upper_bound(0, 0) == 1.0
    with pytest.raises(ValueError):
        stats.rate_interval(3, 2)


def answers_of(rng: np.random.Generator, num: int, steps: float, rate: float, alike: float):
    """(accepted, steps) of answers each with a rate of its own around ``rate``; ``alike``: the correlation of
    two steps of one answer."""
    own = rng.beta(rate * (1 - alike) / alike, (1 - rate) * (1 - alike) / alike, size=num)
    trials = 1 + rng.poisson(steps - 1, size=num)
    return rng.binomial(trials, own).tolist(), trials.tolist()


def percentile(top, bottom, rng: np.random.Generator):
    """The broken variant: the quantiles of resampled answers."""
    chosen = rng.integers(0, len(top), size=(200, len(top)))
    top, bottom = np.asarray(top)[chosen].sum(1), np.asarray(bottom)[chosen].sum(1)
    return np.quantile(top / bottom, [0.025, 0.975])


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
@pytest.mark.parametrize(("num", "steps"), [(3, 3), (6, 12), (12, 3), (24, 12)])
def test_interval_of_a_rate_covers_though_steps_of_an_answer_are_alike(rate: float, num: int, steps: int):
    rng = np.random.default_rng(11)
    covered, quantiles = [], []
    for _ in range(200):
        counts = answers_of(rng, num, steps, rate, 0.15)
        _, (low, high) = stats.clustered_rate(*counts)
        covered.append(low <= rate <= high)
        low, high = percentile(*counts, rng)
        quantiles.append(low <= rate <= high)
    assert np.mean(covered) >= 0.91
    assert np.mean(quantiles) < np.mean(covered)
    if num == 3 and rate != 0.5:
        assert np.mean(quantiles) < 0.5


def test_all_steps_alike_are_as_many_trials_as_answers():
    for events, sure in (([3, 4], 1.0), ([0, 0], 0.0)):
        value, (low, high) = stats.clustered_rate(events, [3, 4])
        assert value == sure
        assert high - low == pytest.approx(1 - 0.025**0.5)  # Clopper and Pearson, two of two
    assert (
        stats.clustered_rate([7], [7])[1] == stats.clustered_rate([7, 0], [7, 0])[1] == (-math.inf, math.inf)
    )
    assert math.isnan(stats.clustered_rate([0], [0])[0])
    # Independent steps count one by one, but for what few answers cost.
    assert stats.independent_trials([5] * 50, [10] * 50) == 500
    assert stats.independent_trials([10, 0] * 25, [10] * 50) < 50


@pytest.mark.parametrize("num", [2, 3, 4, 6, 12])
def test_a_bootstrap_over_few_blocks_covers(num: int):
    """As many as a quick run has; the quantiles of the resamples would cover half to nine tenths."""
    rng = np.random.default_rng(12)
    covered, quantiles = [], []
    for _ in range(200):
        top, bottom = rng.lognormal(0.4, 0.2, size=num), np.ones(num)
        truth = math.exp(0.4 + 0.2**2 / 2)
        low, high = stats.ratio_of_sums(top.tolist(), bottom.tolist())[1]
        covered.append(low <= truth <= high)
        low, high = percentile(top, bottom, rng)
        quantiles.append(low <= truth <= high)
    assert np.mean(covered) >= 0.91
    assert np.mean(quantiles) < {2: 0.6, 3: 0.8, 4: 0.85, 6: 0.9, 12: 0.95}[num]


def test_blocks_that_are_all_alike_are_no_certainty():
    value, (low, high) = stats.ratio_of_sums([10, 20], [10, 20], limits=(1.0, 5.0))
    share = 1 - 0.025**0.5
    assert (value, low) == (1.0, 1.0)
    assert high == pytest.approx(1 + 4 * share)
    assert stats.ratio_of_sums([10, 20], [10, 20])[1] == (1.0, 1.0)
    # No step emits less than one token.
    assert stats.ratio_of_sums([10, 40], [10, 20])[1][0] < 1.0
    assert stats.ratio_of_sums([10, 40], [10, 20], limits=(1.0, 5.0))[1] == (1.0, 5.0)
    # A side that never accepts adds its own doubt to a difference; the same computation twice is no doubt.
    steps = [10.0, 20.0, 30.0]
    some = [12.0, 22.0, 39.0]
    _, (low, high) = stats.gap_of_ratios((some, steps), (steps, steps), limits=(1.0, 5.0))
    own_low, own_high = stats.ratio_of_sums(some, steps)[1]
    assert high - low > 2 * (own_high - own_low)
    assert stats.gap_of_ratios((some, steps), (some, steps), limits=(1.0, 5.0)) == (0.0, (0.0, 0.0))


def test_ratio_of_sums_weights_by_size():
    value, (low, high) = stats.ratio_of_sums([10, 100], [10, 50])
    assert value == pytest.approx(110 / 60)
    assert low <= value <= high
    assert math.isnan(stats.ratio_of_sums([0, 0], [0, 0])[0])


def test_a_speedup_is_the_quotient_of_two_rates():
    tokens, mine, theirs = [10, 40], [[1.0, 1.5], [2.0, 2.5]], [[2.0, 2.0], [3.0, 4.0]]
    value, (low, high) = stats.times_faster(mine, theirs)
    rates = [2 * sum(tokens) / np.sum(seconds) for seconds in (mine, theirs)]
    assert value == pytest.approx(rates[0] / rates[1])
    assert low <= value <= high
    assert stats.times_faster([[1.0, 2.0]], [[2.0, 2.0]])[1] == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="not the same"):
        stats.times_faster([[1.0]], [[1.0], [1.0]])


def races(rng: np.random.Generator, paired: bool) -> tuple[float, float]:
    """The interval of a true speedup of 1.5 on a machine whose speed wanders."""
    mine, theirs = [], []
    for _ in range(8):
        work, busy = rng.uniform(0.5, 2.0), rng.lognormal(0, 0.4, size=2)
        mine.append(list(work * busy * rng.lognormal(0, 0.03, size=2)))
        busy = busy if paired else rng.lognormal(0, 0.4, size=2)
        theirs.append(list(1.5 * work * busy * rng.lognormal(0, 0.03, size=2)))
    return stats.times_faster(mine, theirs)[1]


def test_interval_of_the_speedup_covers_and_pairing_narrows_it():
    rng = np.random.default_rng(7)
    paired = [races(rng, True) for _ in range(100)]
    apart = [races(rng, False) for _ in range(100)]
    assert np.mean([low <= 1.5 <= high for low, high in paired]) >= 0.85
    assert np.mean([high - low for low, high in paired]) < 0.4 * np.mean([high - low for low, high in apart])


def test_larger_by_chance_is_exact_and_keeps_its_level():
    assert stats.larger_by_chance([1.0] * 6) == pytest.approx(1 / 64)
    assert stats.larger_by_chance([1.0, -1.0]) == pytest.approx(0.75)
    assert stats.larger_by_chance([0.0, 0.0]) == stats.larger_by_chance([]) == 1.0
    rng = np.random.default_rng(8)
    assert np.mean([stats.larger_by_chance(rng.normal(size=8)) <= 0.05 for _ in range(400)]) <= 0.075
    assert stats.larger_by_chance(list(rng.normal(1.5, 1, size=20))) < 0.01


def test_one_outlier_moves_a_maximum_but_not_a_quantile():
    values = [0.01 * i for i in range(100)]
    assert stats.quantile([*values, 50.0], 0.95) < 1.0
    assert stats.quantile([], 0.95) == 0.0
    assert stats.quantile([3.0], 0.95) == 3.0


def test_more_blocks_are_asked_for_when_the_gate_is_astride():
    assert stats.blocks_needed(1.6, (1.4, 1.8), 1.5, 10) == 33
    # An interval of so many blocks, with their t, has just the half-width asked for.
    error = 0.2 / stats.student(9) * math.sqrt(10)
    assert stats.student(32) * error / math.sqrt(33) <= 0.1 < stats.student(30) * error / math.sqrt(31)
    assert stats.blocks_needed(1.5, (1.4, 1.6), 1.5, 10) is None
    assert stats.blocks_needed(math.nan, (-math.inf, math.inf), 1.5, 10) is None


@pytest.mark.parametrize(
    ("interval", "sense", "verdict"),
    [
        ((1.1, 1.2), "at most", Verdict.PASS),
        ((1.1, 1.25), "at most", Verdict.PASS),
        ((1.2, 1.3), "at most", Verdict.INCONCLUSIVE),
        ((1.26, 1.3), "at most", Verdict.FAIL),
        ((1.3, 1.4), "at least", Verdict.PASS),
        ((1.2, 1.3), "at least", Verdict.INCONCLUSIVE),
        ((1.1, 1.2), "at least", Verdict.FAIL),
        ((math.nan, 1.2), "at least", Verdict.ERROR),
    ],
)
def test_gate_reads_the_whole_interval(interval, sense, verdict):
    assert gate_verdict(interval, 1.25, sense) is verdict


def check(verdict: Verdict, required: bool = True) -> Check:
    return Check(name="x", verdict=verdict, summary="", required=required)


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([check(Verdict.PASS)], 0),
        ([check(Verdict.PASS), check(Verdict.FAIL, required=False)], 0),
        ([check(Verdict.PASS), check(Verdict.SKIPPED, required=False)], 0),
        ([check(Verdict.PASS), check(Verdict.FAIL)], 1),
        ([check(Verdict.INCONCLUSIVE), check(Verdict.FAIL)], 1),
        ([check(Verdict.PASS), check(Verdict.ERROR, required=False)], 0),
        ([check(Verdict.PASS), check(Verdict.ERROR)], 1),
        ([check(Verdict.PASS), check(Verdict.MEASURED, required=False)], 0),
        ([check(Verdict.PASS), check(Verdict.INCONCLUSIVE)], 4),
        ([check(Verdict.PASS), check(Verdict.SKIPPED)], 4),
        ([check(Verdict.PASS, required=False)], 4),
        ([], 4),
    ],
)
def test_exit_code(checks, code):
    assert exit_code(checks) == code


def test_an_undecided_gate_says_how_much_more_it_needs():
    result = gated(
        name="speed",
        what="speedup",
        measured=1.6,
        interval=(1.4, 1.8),
        bound=1.5,
        sense="at least",
        n=10,
        n_unit="prompts",
        how="",
    )
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.summary == (
        "speedup 1.600 (95 % interval 1.400 to 1.800); gate: at least 1.5; "
        "10 prompts do not decide, about 33 prompts would decide"
    )
    assert result.required


def test_without_a_bound_a_number_is_reported_but_not_required():
    result = gated(
        name="speed",
        what="speedup",
        measured=1.6,
        interval=(1.4, 1.8),
        bound=None,
        sense="at least",
        n=10,
        n_unit="prompts",
        how="",
    )
    assert not result.required
    assert result.verdict is Verdict.MEASURED
    assert exit_code([result]) == 4
