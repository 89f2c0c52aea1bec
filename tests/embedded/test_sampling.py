"""Laws against a reference that sorts plain Python numbers; draws at the edges of their uniform."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from branches import law_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtspec.embedded.sampling import TargetLaw, generator_draw, inverse_cdf
from trtspec.engine import Sampling
from trtspec.errors import InputError

BELOW_ONE = 1.0 - 2.0**-53


def no_draw(weights: Tensor) -> int:
    raise AssertionError("a greedy law must not draw")


def reference_law(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, top-k, top-p by sorting everything; ties by id."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    peak = logits[ranked[0]]
    mass = {token: math.exp((logits[token] - peak) / sampling.temperature) for token in ranked}
    total = math.fsum(mass.values())
    kept: list[int] = []
    for token in ranked:
        reached = math.fsum(mass[other] for other in kept) / total
        # The exact sum and a running one may differ in the last bit, on either side of top_p.
        assume(abs(reached - sampling.top_p) > 1e-9 or not kept)
        if kept and sampling.top_p < 1.0 and reached >= sampling.top_p:
            break
        kept.append(token)
    total = math.fsum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(logits))]


def law(logits: list[float], sampling: Sampling) -> list[float]:
    return TargetLaw(torch.tensor([logits], dtype=torch.float32), sampling).probs(0).tolist()


tied_logits = st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 0.75, 2.0]), min_size=1, max_size=9)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 11),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
)


class TestTargetLaw:
    @settings(max_examples=300, deadline=None)
    @given(tied_logits, samplings)
    def test_is_the_reference_law(self, logits: list[float], sampling: Sampling) -> None:
        assert law(logits, sampling) == pytest.approx(reference_law(logits, sampling), abs=1e-13)

    @pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 5.0, 30.0])
    @pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-15])
    def test_nucleus_of_a_large_vocabulary_is_a_prefix_of_the_full_order(
        self, scale: float, top_p: float
    ) -> None:
        rng = np.random.default_rng(7)
        # Half precision makes many ties.
        logits = (rng.standard_normal(6000) * scale).astype(np.float16).astype(np.float32)
        found = TargetLaw(torch.from_numpy(logits)[None], Sampling(1.0, top_p=top_p)).probs(0).numpy()
        full = np.exp(logits.astype(np.float64) - logits.max())
        full /= full.sum()
        order = np.argsort(-full, kind="stable")
        size = int((found > 0).sum())
        kept = order[:size]
        assert set(np.flatnonzero(found)) == set(kept)
        assert found[kept] == pytest.approx(full[kept] / full[kept].sum(), rel=1e-12)
        # Long enough and no longer, up to the rounding of sums of 6000 terms.
        assert full[kept].sum() >= top_p - 1e-12
        assert size == 1 or full[kept[:-1]].sum() < top_p + 1e-12

    def test_a_top_p_that_rounding_puts_out_of_reach_keeps_every_token(self) -> None:
        out_of_reach = 0
        for seed in range(40):
            logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(seed))
            out_of_reach += float(TargetLaw(logits, Sampling(1.0)).probs(0).sum()) < BELOW_ONE
            probs = TargetLaw(logits, Sampling(1.0, top_p=BELOW_ONE)).probs(0)
            assert int((probs > 0.0).sum()) >= 2999
        assert out_of_reach > 0

    def test_smallest_set_that_reaches_top_p(self) -> None:
        # Mass .5 is reached by two of four equal tokens: the two of lowest id, not three.
        assert law([1.0] * 4, Sampling(1.0, top_p=0.5)) == [0.5, 0.5, 0.0, 0.0]
        assert law([1.0] * 4, Sampling(1.0, top_p=0.500001)) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])

    def test_top_k_comes_before_top_p(self) -> None:
        logits = [math.log(weight) for weight in (0.4, 0.3, 0.2, 0.1)]
        # Of the top two, normalised to 4/7 and 3/7, the first alone reaches .55; of all four it does not.
        assert law(logits, Sampling(1.0, top_k=2, top_p=0.55)) == [1.0, 0.0, 0.0, 0.0]
        assert law(logits, Sampling(1.0, top_p=0.55))[1] > 0.0

    @pytest.mark.parametrize("top_k", [0, 3, 4, 1000])
    def test_top_k_that_covers_the_vocabulary_changes_nothing(self, top_k: int) -> None:
        assert law([0.0, 1.0, 2.0], Sampling(1.0, top_k=top_k)) == law([0.0, 1.0, 2.0], Sampling(1.0))

    @pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
    def test_tiny_temperature_is_the_argmax_and_shares_ties(self, temperature: float) -> None:
        assert law([3.0, 9.0, -4.0], Sampling(temperature)) == [0.0, 1.0, 0.0]
        assert law([9.0, 3.0, 9.0], Sampling(temperature)) == [0.5, 0.0, 0.5]

    def test_huge_temperature_is_uniform(self) -> None:
        assert law([3.0, 90.0, -4.0], Sampling(1e30)) == pytest.approx([1 / 3] * 3)

    def test_sums_to_one_in_float64_whatever_the_logits_dtype(self) -> None:
        logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            probs = TargetLaw(logits.to(dtype), Sampling(0.9, top_p=0.95)).probs(0)
            assert probs.dtype == torch.float64
            assert float(probs.sum()) == pytest.approx(1.0, abs=1e-14)

    def test_a_row_does_not_depend_on_the_other_rows(self) -> None:
        logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
        sampling = Sampling(0.8, top_k=700, top_p=0.9)
        together = TargetLaw(logits, sampling)
        for row in (2, 0, 3, 1):
            alone = TargetLaw(logits[row : row + 1], sampling)
            assert torch.equal(together.probs(row), alone.probs(0))

    @settings(max_examples=60, deadline=None)
    @given(tied_logits, samplings)
    def test_sample_has_the_law_that_probs_says(self, logits: list[float], sampling: Sampling) -> None:
        target = TargetLaw(torch.tensor([logits]), sampling)
        drawn = law_of(lambda draw: target.sample(0, draw))
        probs = target.probs(0).tolist()
        assert drawn == pytest.approx({token: p for token, p in enumerate(probs) if p > 0.0}, abs=1e-14)

    def test_greedy_takes_the_lowest_of_the_largest_without_a_draw(self) -> None:
        target = TargetLaw(torch.tensor([[1.0, 5.0, 5.0], [7.0, 7.0, 7.0]]), Sampling())
        assert [target.sample(row, no_draw) for row in (0, 1)] == [1, 0]
        assert target.probs(0).tolist() == [0.0, 1.0, 0.0]

    def test_greedy_uses_the_argmax_it_is_given(self) -> None:
        target = TargetLaw(torch.tensor([[1.0, 5.0, 5.0]]), Sampling(), argmax=[2])
        assert target.sample(0, no_draw) == 2
        assert target.probs(0).tolist() == [0.0, 0.0, 1.0]

    def test_minus_infinity_is_probability_zero(self) -> None:
        assert law([0.0, -math.inf, 0.0], Sampling(1.0)) == [0.5, 0.0, 0.5]
        assert law([0.0, -math.inf, -math.inf], Sampling(1.0, top_k=2)) == [1.0, 0.0, 0.0]

    @pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
    @pytest.mark.parametrize(
        "sampling",
        [Sampling(), Sampling(1.0), Sampling(1.0, top_k=1), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)],
    )
    def test_non_finite_logits_are_an_error_at_their_row_only(
        self, bad: list[float], sampling: Sampling
    ) -> None:
        target = TargetLaw(torch.tensor([[0.0, 1.0, 2.0], bad]), sampling)
        target.probs(0)
        with pytest.raises(InputError, match="row 1: non-finite logits"):
            target.probs(1)
        with pytest.raises(InputError, match="row 1: non-finite logits"):
            target.sample(1, lambda weights: 0)


weights_lists = st.lists(
    st.one_of(st.just(0.0), st.sampled_from([5e-324, 1e-320, 1e-17, 1e300]), st.floats(0.0, 1.0)),
    min_size=1,
    max_size=8,
).filter(lambda weights: sum(weights) > 0.0)
uniforms = st.one_of(st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, BELOW_ONE, 1.0]), st.floats(0.0, BELOW_ONE))


class TestInverseCdf:
    @settings(max_examples=400, deadline=None)
    @given(weights_lists, uniforms)
    def test_never_returns_a_zero_weight(self, weights: list[float], uniform: float) -> None:
        assert weights[inverse_cdf(torch.tensor(weights, dtype=torch.float64), uniform)] > 0.0

    def test_a_search_from_the_other_side_would_return_one(self) -> None:
        weights = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        assert int(torch.searchsorted(torch.cumsum(weights, 0), 0.0, right=False)) == 0
        assert inverse_cdf(weights, 0.0) == 1

    @settings(max_examples=200, deadline=None)
    @given(weights_lists, uniforms, uniforms)
    def test_grows_with_the_uniform(self, weights: list[float], one: float, other: float) -> None:
        tensor = torch.tensor(weights, dtype=torch.float64)
        low, high = sorted((one, other))
        assert inverse_cdf(tensor, low) <= inverse_cdf(tensor, high)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    def test_each_index_owns_an_interval_as_long_as_its_weight(self, weights: list[int]) -> None:
        tensor = torch.tensor(weights, dtype=torch.float64)
        ends = np.cumsum(weights) / sum(weights)
        for start, (index, end) in zip([0.0, *ends], enumerate(ends), strict=False):
            if weights[index]:
                assert inverse_cdf(tensor, start + 1e-9) == index
                assert inverse_cdf(tensor, end - 1e-9) == index

    def test_need_not_be_normalised_or_float64(self) -> None:
        assert inverse_cdf(torch.tensor([1, 2, 1]), 0.74) == 1
        assert inverse_cdf(torch.tensor([1, 2, 1], dtype=torch.float32), 0.76) == 2

    def test_subnormal_weights_keep_their_proportions(self) -> None:
        weights = torch.full((8,), 5e-324, dtype=torch.float64)
        assert [inverse_cdf(weights, (index + 0.5) / 8) for index in range(8)] == list(range(8))

    @pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    def test_nothing_to_draw_from_is_an_error(self, weights: list[float]) -> None:
        with pytest.raises(ValueError, match="cannot draw"):
            inverse_cdf(torch.tensor(weights, dtype=torch.float64), 0.5)


class TestGeneratorDraw:
    weights = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2], dtype=torch.float64)

    def test_same_seed_same_stream(self) -> None:
        one, other = generator_draw(11), generator_draw(11)
        assert [one(self.weights) for _ in range(50)] == [other(self.weights) for _ in range(50)]

    def test_other_seed_other_stream(self) -> None:
        one, other = generator_draw(11), generator_draw(12)
        assert [one(self.weights) for _ in range(50)] != [other(self.weights) for _ in range(50)]

    def test_one_uniform_per_draw_whatever_the_weights(self) -> None:
        one, other = generator_draw(3), generator_draw(3)
        for size in (1, 2, 700):
            one(torch.ones(size, dtype=torch.float64))
            other(self.weights)
        assert [one(self.weights) for _ in range(20)] == [other(self.weights) for _ in range(20)]

    def test_a_neighbour_and_the_global_generator_change_nothing(self) -> None:
        alone = generator_draw(5)
        expected = [alone(self.weights) for _ in range(40)]
        mixed, neighbour = generator_draw(5), generator_draw(6)
        found = []
        for _ in range(40):
            torch.rand(3)
            neighbour(self.weights)
            found.append(mixed(self.weights))
        assert found == expected

    def test_frequencies(self) -> None:
        draw = generator_draw(0)
        trials = 20_000
        counts = np.bincount([draw(self.weights) for _ in range(trials)], minlength=5)
        expected = self.weights.numpy() * trials
        assert counts[1] == 0
        drawn = expected > 0
        chi_square = float(((counts - expected)[drawn] ** 2 / expected[drawn]).sum())
        assert chi_square < 16.3  # three degrees of freedom, p = .001

    def test_streams_of_neighbouring_seeds_are_uncorrelated(self) -> None:
        fine = torch.ones(1000, dtype=torch.float64)
        streams = []
        for seed in range(4):
            draw = generator_draw(seed)
            streams.append([draw(fine) for _ in range(2000)])
        for one, other in pairwise(streams):
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.08
