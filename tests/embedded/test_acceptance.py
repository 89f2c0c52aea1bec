"""The exact law of what a verification emits, over every branch of the draft's and the acceptor's draws.

A *world* is a target and a draft law after every prefix. The emitted tokens of one step, continued by
plain sampling from the target, must have the target's law over sequences of fixed length: to 1e-12 for the
strict acceptors, and visibly not for each acceptor with a mistake in it.

One file, because the worlds and the broken acceptors serve all three acceptance functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import get_args

import pytest
import torch
from branches import law_of
from pydantic import TypeAdapter
from torch import Tensor

from trtspec.embedded import opening
from trtspec.embedded.acceptance import Accepted, exact, rejection, typical
from trtspec.embedded.sampling import Draw, TargetLaw, generator_draw
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain, depths, path_to, truncate
from trtspec.engine import Sampling
from trtspec.recipe import Acceptance, ExactAcceptance, RejectionAcceptance, TypicalAcceptance
from trtspec.recipe_facts import fidelity
from trtspec.recipe_file import parse_recipe

Accept = Callable[[Draft, TargetLaw, Draw], Accepted]
Propose = Callable[[Draw], Draft]
Prefix = tuple[int, ...]

UNCUT = Sampling(1.0)
STRICT = 1e-12
VISIBLE = 1e-3


@dataclass(frozen=True)
class World:
    """Random laws after every prefix; the draft's resembles the target's but is another."""

    vocab: int
    seed: int = 0
    sampling: Sampling = UNCUT
    by: str = "prefix"
    """What the laws depend on: "prefix", "depth", or "nothing"."""

    def _normal(self, prefix: Prefix, which: int) -> Tensor:
        key = {"prefix": prefix, "depth": (len(prefix),), "nothing": ()}[self.by]
        generator = torch.Generator().manual_seed(hash((self.seed, which, key)) % 2**62)
        return torch.randn(self.vocab, dtype=torch.float64, generator=generator)

    @cache  # noqa: B019
    def logits(self, prefix: Prefix) -> Tensor:
        return 1.2 * self._normal(prefix, 1)

    @cache  # noqa: B019
    def p(self, prefix: Prefix) -> Tensor:
        return TargetLaw(self.logits(prefix)[None], self.sampling).probs(0)

    @cache  # noqa: B019
    def q(self, prefix: Prefix) -> Tensor:
        return torch.softmax(0.7 * self.logits(prefix) + 0.8 * self._normal(prefix, 2), 0)

    def law(self, draft: Draft) -> TargetLaw:
        prefixes = [()] + [tokens_of(draft, node) for node in range(len(draft))]
        return TargetLaw(torch.stack([self.logits(prefix) for prefix in prefixes]), self.sampling)


def tokens_of(draft: Draft, node: int) -> Prefix:
    return tuple(draft.tokens[step] for step in path_to(draft, node))


def emitted_law(world: World, propose: Propose, accept: Accept) -> dict[Prefix, float]:
    """The law of one step's emitted tokens, the draft's own randomness included."""
    total: dict[Prefix, float] = {}
    for draft, probability in law_of(propose).items():
        law = world.law(draft)

        def step(draw: Draw, draft: Draft = draft, law: TargetLaw = law) -> Prefix:
            accepted = accept(draft, law, draw)
            assert accepted.path == () or accepted.path == path_to(draft, accepted.path[-1])
            return (*(draft.tokens[node] for node in accepted.path), accepted.token)

        for emitted, conditional in law_of(step).items():
            total[emitted] = total.get(emitted, 0.0) + probability * conditional
    assert math.fsum(total.values()) == pytest.approx(1.0, abs=1e-12)
    return total


def deviation(world: World, emitted: dict[Prefix, float]) -> float:
    """The largest difference, over all sequences of the longest emitted length, between the law of the
    emitted tokens continued by the target and the target's own."""
    length = max(map(len, emitted))
    worst = 0.0
    for sequence in itertools.product(range(world.vocab), repeat=length):
        steps = [float(world.p(sequence[:depth])[sequence[depth]]) for depth in range(length)]
        found = math.fsum(
            emitted.get(sequence[:depth], 0.0) * math.prod(steps[depth:]) for depth in range(1, length + 1)
        )
        worst = max(worst, abs(found - math.prod(steps)))
    return worst


def drawn(
    world: World, parents: Prefix, *, replace: bool = False, dtype: torch.dtype = torch.float64
) -> Propose:
    """A tree whose tokens are drawn from q, siblings without replacement unless ``replace``."""

    def propose(draw: Draw) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        for node, parent in enumerate(parents):
            prefix = tokens_of(Draft(tuple(tokens), parents[:node]), parent)
            q = world.q(prefix).to(dtype)
            weights = q.to(torch.float64, copy=True)
            if not replace:
                weights[[tokens[other] for other in range(node) if parents[other] == parent]] = 0.0
            tokens.append(draw(weights))
            rows.append(q)
        return Draft(tuple(tokens), parents, torch.stack(rows)) if rows else EMPTY_DRAFT

    return propose


def fixed(draft: Draft) -> Propose:
    return lambda draw: draft


def random_points(vocab: int, parents: Prefix, seed: int) -> Draft:
    """Point-mass candidates at random: duplicates of siblings and improbable tokens among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (len(parents),), generator=generator).tolist()
    return Draft(tuple(tokens), parents)


def reference(draft: Draft, law: TargetLaw, draw: Draw, *, fault: str = "") -> Accepted:
    """Multi-round rejection in plain lists, with a mistake put in on request."""

    def weights(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    vocab = law.vocab_size
    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        p = law.probs(at + 1).tolist()
        tried: list[int] = []
        for node in (node for node, parent in enumerate(draft.parents) if parent == at):
            x = draft.tokens[node]
            q = [float(token == x) for token in range(vocab)]
            if draft.probs is not None:
                q = draft.probs[node].tolist()
            if fault != "sibling not removed":
                if x in tried:
                    continue
                q = [0.0 if token in tried else mass for token, mass in enumerate(q)]
            q = [mass / sum(q) for mass in q]
            accept = 1.0 if fault == "always accept" else min(1.0, p[x] / q[x])
            if fault == "ratio not capped by siblings":
                accept = min(1.0, float(law.probs(at + 1)[x]) / q[x])
            if draw(weights([accept, 1.0 - accept])) == 0:
                path.append(node)
                break
            residual = [max(mass - other, 0.0) for mass, other in zip(p, q, strict=True)]
            if fault == "residual of q":
                residual = [max(other - mass, 0.0) for mass, other in zip(p, q, strict=True)]
            if fault == "draws q after a rejection":
                residual = q
            if fault != "no residual" and sum(residual) > 0.0:
                p = [mass / sum(residual) for mass in residual]
            tried.append(x)
        else:
            if fault == "bonus from q" and path and not tried and draft.probs is not None:
                return Accepted(tuple(path), draw(draft.probs[path[-1]].double()))
            return Accepted(tuple(path), draw(weights(p)))


CHAIN_4 = (-1, 0, 1, 2)
FAN_3 = (-1, -1, -1)
TREE_5 = (-1, -1, 0, 0, 1)
DEEP_TREE = (-1, -1, 0, 1, 3, 4)
SHAPES = [(), (-1,), (-1, 0), CHAIN_4, FAN_3, TREE_5]
SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.6, top_k=2),
    Sampling(1.0, top_p=0.6),
    Sampling(1.5, top_k=3, top_p=0.8),
]


@pytest.mark.parametrize("accept", [exact, rejection])
@pytest.mark.parametrize("sampling", SAMPLINGS)
class TestStrictAcceptorsKeepTheTargetsLaw:
    @pytest.mark.parametrize("parents", SHAPES)
    @pytest.mark.parametrize(("vocab", "seed"), [(3, 5), (4, 0)])
    def test_drawn_without_replacement(
        self, accept: Accept, sampling: Sampling, parents: Prefix, vocab: int, seed: int
    ) -> None:
        world = World(vocab, seed, sampling)
        assert deviation(world, emitted_law(world, drawn(world, parents), accept)) < STRICT

    @pytest.mark.parametrize("parents", [FAN_3, TREE_5])
    def test_drawn_with_replacement(self, accept: Accept, sampling: Sampling, parents: Prefix) -> None:
        world = World(3, 5, sampling)
        assert deviation(world, emitted_law(world, drawn(world, parents, replace=True), accept)) < STRICT

    @pytest.mark.parametrize("parents", [*SHAPES[1:], DEEP_TREE])
    @pytest.mark.parametrize("seed", range(3))
    def test_point_masses(self, accept: Accept, sampling: Sampling, parents: Prefix, seed: int) -> None:
        world = World(4 if max(depths(Draft(parents, parents))) > 2 else 6, seed, sampling)
        draft = random_points(world.vocab, parents, seed)
        assert deviation(world, emitted_law(world, fixed(draft), accept)) < STRICT


@pytest.mark.parametrize("accept", [exact, rejection])
def test_a_larger_vocabulary(accept: Accept) -> None:
    world = World(6)
    for parents in ((-1, 0), (-1, -1, 0)):
        assert deviation(world, emitted_law(world, drawn(world, parents), accept)) < STRICT


def test_a_drawn_tree_of_depth_four() -> None:
    world = World(2)
    assert deviation(world, emitted_law(world, drawn(world, DEEP_TREE), rejection)) < STRICT


def test_two_steps_in_a_row_with_a_draft_that_depends_on_the_first() -> None:
    world = World(3, 5)

    def shifted(prefix: Prefix) -> World:
        class Later(World):
            def logits(self, later: Prefix) -> Tensor:
                return world.logits(prefix + later)

            def q(self, later: Prefix) -> Tensor:
                return world.q(prefix + later)

        return Later(3, 5)

    total: dict[Prefix, float] = {}
    for first, probability in emitted_law(world, drawn(world, (-1, 0)), rejection).items():
        # The second draft is longer the less of the first was accepted.
        parents = tuple(range(-1, 2 - len(first)))
        after = shifted(first)
        for second, conditional in emitted_law(after, drawn(after, parents), rejection).items():
            total[first + second] = total.get(first + second, 0.0) + probability * conditional
    assert deviation(world, total) < STRICT


class TestMistakesAreSeen:
    """The same measurement on acceptors that are wrong; without the mistake the reference passes."""

    def test_the_reference_without_a_mistake(self) -> None:
        world = World(4)
        for parents in (CHAIN_4, FAN_3, TREE_5):
            emitted = emitted_law(world, drawn(world, parents), reference)
            assert deviation(world, emitted) < STRICT
            assert emitted == pytest.approx(emitted_law(world, drawn(world, parents), rejection), abs=1e-13)

    @pytest.mark.parametrize(
        ("fault", "parents"),
        [
            ("no residual", (-1,)),
            ("residual of q", (-1,)),
            ("draws q after a rejection", (-1,)),
            ("always accept", (-1,)),
            ("bonus from q", (-1,)),
            ("sibling not removed", FAN_3),
            ("ratio not capped by siblings", FAN_3),
        ],
    )
    def test_in_drawn_drafts(self, fault: str, parents: Prefix) -> None:
        world = World(4)
        assert (
            deviation(world, emitted_law(world, drawn(world, parents), partial(reference, fault=fault)))
            > VISIBLE
        )

    @pytest.mark.parametrize("fault", ["no residual", "always accept", "ratio not capped by siblings"])
    def test_in_point_masses(self, fault: str) -> None:
        world = World(4)
        draft = Draft((0, 1, 0, 2), (-1, -1, 0, 1))
        assert deviation(world, emitted_law(world, fixed(draft), reference)) < STRICT
        assert deviation(world, emitted_law(world, fixed(draft), partial(reference, fault=fault))) > VISIBLE

    def test_a_target_row_off_by_one(self) -> None:
        world = World(4)

        def off_by_one(draft: Draft, law: TargetLaw, draw: Draw) -> Accepted:
            accepted = exact(draft, law, draw)
            return Accepted(accepted.path, law.sample(max(0, len(accepted.path) - 1), draw))

        assert deviation(world, emitted_law(world, fixed(chain([0, 1])), off_by_one)) > VISIBLE


class TestHowSiblingsWereDrawnMatters:
    """docs/math.md, multi-round rejection: which drafts may carry ``probs``."""

    def test_without_replacement_needs_the_removal_and_with_replacement_does_not_mind(self) -> None:
        world = World(4)
        kept = partial(reference, fault="sibling not removed")
        without, with_ = drawn(world, FAN_3), drawn(world, FAN_3, replace=True)
        assert deviation(world, emitted_law(world, without, rejection)) < STRICT
        assert deviation(world, emitted_law(world, with_, rejection)) < STRICT
        assert deviation(world, emitted_law(world, with_, kept)) < STRICT
        assert deviation(world, emitted_law(world, without, kept)) > VISIBLE

    @pytest.mark.parametrize("with_probs", [True, False])
    def test_candidates_picked_by_their_probability_must_be_point_masses(self, with_probs: bool) -> None:
        world = World(4)
        q = world.q(())
        tokens = tuple(q.topk(2).indices.tolist())
        draft = Draft(tokens, (-1, -1), torch.stack([q, q]) if with_probs else None)
        found = deviation(world, emitted_law(world, fixed(draft), rejection))
        assert found > VISIBLE if with_probs else found < STRICT

    def test_a_draft_pruned_by_the_probability_of_what_was_drawn_is_biased(self) -> None:
        world = World(4)

        def pruned(draw: Draw) -> Draft:
            draft = drawn(world, (-1,))(draw)
            assert draft.probs is not None
            return draft if float(draft.probs[0, draft.tokens[0]]) > 0.3 else EMPTY_DRAFT

        assert deviation(world, emitted_law(world, pruned, rejection)) > VISIBLE
        # The tokens alone are safe however they were chosen.
        assert deviation(world, emitted_law(world, pruned, exact)) < STRICT

    def test_a_draft_cut_by_its_shape_is_not(self) -> None:
        world = World(4)

        def cut(draw: Draw) -> Draft:
            return truncate(drawn(world, TREE_5)(draw), 3)

        assert deviation(world, emitted_law(world, cut, rejection)) < STRICT

    def test_siblings_may_have_different_draft_laws(self) -> None:
        world, other = World(4), World(4, seed=5)

        def propose(draw: Draw) -> Draft:
            first, second = world.q(()), other.q(())
            tokens = (draw(first), draw(second))
            return Draft(tokens, (-1, -1), torch.stack([first, second]))

        assert deviation(world, emitted_law(world, propose, rejection)) < STRICT


class TestEdges:
    def test_tokens_outside_the_law_are_never_emitted(self) -> None:
        world = World(5, sampling=Sampling(1.0, top_k=2))
        outside = [token for token in range(5) if float(world.p(())[token]) == 0.0]
        draft = Draft(tuple(outside), (-1,) * len(outside))
        accepts = [exact, rejection, partial(typical, epsilon=0.3, delta=0.09)]
        for accept in accepts:
            emitted = emitted_law(world, fixed(draft), accept)
            assert {len(tokens) for tokens in emitted} == {1}
            assert deviation(world, emitted) < STRICT

    def test_greedy_rejection_is_greedy_exact(self) -> None:
        world = World(4, sampling=Sampling())
        for seed in range(8):
            draft = random_points(4, TREE_5, seed)
            one, other = (emitted_law(world, fixed(draft), accept) for accept in (exact, rejection))
            assert one == other
            assert list(one.values()) == [1.0]

    def test_greedy_exact_draws_nothing(self) -> None:
        def no_draw(weights: Tensor) -> int:
            raise AssertionError("drew")

        world = World(4, sampling=Sampling())
        best = int(world.logits(()).argmax())
        accepted = exact(chain([best]), world.law(chain([best])), no_draw)
        assert accepted == Accepted((0,), int(world.logits((best,)).argmax()))

    def test_a_single_precision_draft_law_is_exact_too(self) -> None:
        # It is the law that the tokens were drawn from, whatever it approximates.
        world = World(3)
        propose = drawn(world, TREE_5, dtype=torch.float32)
        assert deviation(world, emitted_law(world, propose, rejection)) < STRICT

    def test_an_unnormalised_draft_law_is_normalised(self) -> None:
        world = World(3)

        def doubled(draw: Draw) -> Draft:
            draft = drawn(world, FAN_3)(draw)
            assert draft.probs is not None
            return Draft(draft.tokens, draft.parents, 2.0 * draft.probs)

        assert deviation(world, emitted_law(world, doubled, rejection)) < STRICT

    def test_one_hot_draft_laws_are_point_masses(self) -> None:
        world = World(4)
        draft = random_points(4, TREE_5, 1)
        one_hot = torch.nn.functional.one_hot(torch.tensor(draft.tokens), 4).double()
        with_probs = Draft(draft.tokens, draft.parents, one_hot)
        one, other = (emitted_law(world, fixed(d), rejection) for d in (draft, with_probs))
        assert one == pytest.approx(other, abs=1e-14)

    def test_a_candidate_that_its_law_cannot_give_is_a_point_mass(self) -> None:
        world = World(3)
        q = torch.tensor([[0.0, 0.5, 0.5]])
        assert deviation(world, emitted_law(world, fixed(chain([0], q)), rejection)) < STRICT

    def test_a_draft_law_equal_to_the_targets_is_always_accepted(self) -> None:
        world = World(3)
        for wobble in (1.0, 1.0 + 2e-16, 1.0 - 1e-16):
            scale = torch.tensor([1.0, wobble, 1.0], dtype=torch.float64)
            for token in range(3):
                draft = chain([token], world.p(())[None] * scale)
                emitted = emitted_law(world, fixed(draft), rejection)
                assert sum(p for tokens, p in emitted.items() if len(tokens) == 1) < 1e-15

    def test_an_empty_residual_falls_back_to_the_law_not_to_a_forbidden_candidate(self) -> None:
        logits = torch.tensor([[0.0, 0.0, -math.inf]] * 2, dtype=torch.float64)
        law = TargetLaw(logits, Sampling(1.0))
        draft = chain([2], torch.tensor([[0.5, 0.5, 1e-20]], dtype=torch.float64))
        assert law_of(lambda draw: rejection(draft, law, draw)) == {
            Accepted((), 0): 0.5,
            Accepted((), 1): 0.5,
        }

    def test_exact_follows_the_first_of_equal_siblings(self) -> None:
        world = World(3, sampling=Sampling())
        best = int(world.logits(()).argmax())
        draft = Draft((best, best), (-1, -1))
        assert exact(draft, world.law(draft), generator_draw(0)).path == (0,)


class TestAcceptanceRateAndLength:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("sampling", SAMPLINGS)
    def test_alpha_is_one_less_the_total_variation(self, seed: int, sampling: Sampling) -> None:
        world = World(5, seed, sampling)
        p, q = world.p(()), world.q(())
        alpha = float(torch.minimum(p, q).sum())
        assert alpha == pytest.approx(1.0 - 0.5 * float((p - q).abs().sum()))
        emitted = emitted_law(world, drawn(world, (-1,)), rejection)
        assert sum(m for tokens, m in emitted.items() if len(tokens) == 2) == pytest.approx(alpha, abs=1e-13)
        # Sampling the target's own token and comparing accepts less often, and both accept lawfully.
        emitted = emitted_law(world, drawn(world, (-1,)), exact)
        agree = sum(m for tokens, m in emitted.items() if len(tokens) == 2)
        assert agree == pytest.approx(float((p * q).sum()), abs=1e-13)
        assert agree < alpha

    def test_for_point_masses_both_strict_acceptors_accept_with_the_targets_probability(self) -> None:
        world = World(5)
        for token in range(5):
            for accept in (exact, rejection):
                emitted = emitted_law(world, fixed(chain([token])), accept)
                accepted = sum(m for tokens, m in emitted.items() if len(tokens) == 2)
                assert accepted == pytest.approx(float(world.p(())[token]), abs=1e-13)

    @pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4])
    def test_expected_length_for_a_constant_rate(self, num_draft_tokens: int) -> None:
        world = World(3, by="nothing")
        alpha = float(torch.minimum(world.p(()), world.q(())).sum())
        parents = tuple(range(-1, num_draft_tokens - 1))
        emitted = emitted_law(world, drawn(world, parents), rejection)
        length = sum(m * len(tokens) for tokens, m in emitted.items())
        assert length == pytest.approx((1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha), abs=1e-12)

    def test_expected_length_for_rates_by_position(self) -> None:
        world = World(3, by="depth")
        rates = [float(torch.minimum(world.p((0,) * d), world.q((0,) * d)).sum()) for d in range(4)]
        emitted = emitted_law(world, drawn(world, CHAIN_4), rejection)
        length = sum(m * len(tokens) for tokens, m in emitted.items())
        by_position = 1.0 + sum(math.prod(rates[: depth + 1]) for depth in range(4))
        assert length == pytest.approx(by_position, abs=1e-12)
        # One rate for all positions, the first one's, is another number.
        assert length != pytest.approx((1 - rates[0] ** 5) / (1 - rates[0]), rel=0.01)

    def test_more_siblings_accept_more(self) -> None:
        world = World(4)
        accepted = []
        for count in range(1, 4):
            emitted = emitted_law(world, drawn(world, (-1,) * count), rejection)
            accepted.append(sum(m for tokens, m in emitted.items() if len(tokens) == 2))
        assert accepted == sorted(accepted)
        assert accepted[0] < accepted[-1]


class TestSeeds:
    """exact: one draw per token from the law that plain sampling uses, so the seed decides the text."""

    @staticmethod
    def generate(world: World, accept: Accept, seed: int, junk: int | None) -> tuple[list[int], int]:
        draw, draws = generator_draw(seed), 0

        def counted(weights: Tensor) -> int:
            nonlocal draws
            draws += 1
            return draw(weights)

        generator = torch.Generator().manual_seed(junk or 0)
        text: list[int] = []
        while len(text) < 40:
            draft = EMPTY_DRAFT
            if junk is not None:
                count = int(torch.randint(7, (1,), generator=generator))
                parents = [
                    int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
                    for node in range(count)
                ]
                tokens = torch.randint(world.vocab, (count,), generator=generator).tolist()
                draft = Draft(tuple(tokens), tuple(parents))
            known = tuple(text)
            rows = [known] + [known + tokens_of(draft, node) for node in range(len(draft))]
            law = TargetLaw(torch.stack([world.logits(prefix) for prefix in rows]), world.sampling)
            accepted = accept(draft, law, counted)
            text += [*(draft.tokens[node] for node in accepted.path), accepted.token]
        return text, draws

    @pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=3, top_p=0.9)])
    def test_text_with_any_draft_is_the_text_without(self, sampling: Sampling) -> None:
        world = World(4, sampling=sampling)
        plain, draws = self.generate(world, exact, 7, None)
        assert draws == len(plain)
        for junk in range(5):
            text, draws = self.generate(world, exact, 7, junk)
            assert text[:40] == plain[:40]
            assert draws == len(text)

    def test_rejection_keeps_the_law_but_not_the_text(self) -> None:
        world = World(4)
        plain, _ = self.generate(world, rejection, 7, None)
        assert any(self.generate(world, rejection, 7, junk)[0][:40] != plain[:40] for junk in range(3))


class TestTypical:
    @staticmethod
    def passes(world: World, draft: Draft, node: int, epsilon: float, delta: float) -> bool:
        """Whether every token down to the node is plausible, by the paper's inequality in plain numbers."""
        for step in path_to(draft, node):
            before = tokens_of(draft, draft.parents[step])
            p = world.p(before).tolist()
            entropy = -sum(mass * math.log(mass) for mass in p if mass > 0.0)
            if not p[draft.tokens[step]] > min(epsilon, delta * math.exp(-entropy)):
                return False
        return True

    @pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 0.09), (0.1, 0.9), (1.0, 1.0), (0.05, 1.0)])
    @pytest.mark.parametrize("parents", [CHAIN_4, TREE_5, DEEP_TREE])
    def test_takes_the_longest_plausible_path_and_of_several_the_likeliest(
        self, epsilon: float, delta: float, parents: Prefix
    ) -> None:
        for seed in range(12):
            world = World(4, seed)
            draft = random_points(4, parents, seed)
            accepted = typical(draft, world.law(draft), generator_draw(seed), epsilon, delta)
            plausible = [
                node for node in range(len(draft)) if self.passes(world, draft, node, epsilon, delta)
            ]
            longest = max((len(path_to(draft, node)) for node in plausible), default=0)
            assert len(accepted.path) == longest
            if longest:
                assert accepted.path[-1] in plausible

                def likelihood(node: int, world: World = world, draft: Draft = draft) -> float:
                    return math.prod(
                        float(world.p(tokens_of(draft, draft.parents[step]))[draft.tokens[step]])
                        for step in path_to(draft, node)
                    )

                rivals = [node for node in plausible if len(path_to(draft, node)) == longest]
                assert likelihood(accepted.path[-1]) == pytest.approx(max(map(likelihood, rivals)))

    def test_the_following_token_has_the_targets_law(self) -> None:
        world = World(4)
        best = int(world.p(()).argmax())
        emitted = emitted_law(world, fixed(chain([best])), partial(typical, epsilon=0.05, delta=1.0))
        expected = {(best, token): float(mass) for token, mass in enumerate(world.p((best,)))}
        assert emitted == pytest.approx(expected, abs=1e-14)

    def test_is_not_lossless(self) -> None:
        world = World(3)
        draft = chain([int(world.p(()).argmax())])
        assert (
            deviation(world, emitted_law(world, fixed(draft), partial(typical, epsilon=0.3, delta=0.09)))
            > 0.1
        )

    def test_never_accepts_only_where_nothing_is_plausible(self) -> None:
        # Threshold 0.3 under a flat law of five tokens at 0.2 each: then it is plain sampling.
        law = TargetLaw(torch.zeros(2, 5), Sampling(1.0))
        outcomes = law_of(lambda draw: typical(chain([1]), law, draw, 0.3, 5.0))
        assert outcomes == pytest.approx({Accepted((), token): 0.2 for token in range(5)})
        # The entropy term lowers it below 0.2: then the candidate always passes.
        outcomes = law_of(lambda draw: typical(chain([1]), law, draw, 0.3, 0.9))
        assert {accepted.path for accepted in outcomes} == {(0,)}

    def test_greedy_is_exact(self) -> None:
        world = World(4, sampling=Sampling())
        for seed in range(6):
            draft = random_points(4, TREE_5, seed)
            law = world.law(draft)
            draw = generator_draw(0)
            assert typical(draft, law, draw, 0.3, 0.09) == exact(draft, law, draw)


# --------------------------------------------------------------------------- labels


def accept_of(kind: str) -> Accept:
    """What the engine runs for a recipe with this kind of acceptance."""
    return opening._acceptance(TypeAdapter(Acceptance).validate_python({"kind": kind}))


def label_of(kind: str) -> str:
    text = "version: 1\nname: x\nmodel: {source: m}\nbackend: {kind: embedded}\nspeculation: {kind: ngram}\n"
    gates = "gates: {lossless: false}\n" if kind == "typical" else ""
    return fidelity(parse_recipe(f"{text}acceptance: {{kind: {kind}}}\n{gates}"))


def wrong_labels(label: Callable[[str], str], accept: Callable[[str], Accept] = accept_of) -> list[str]:
    """The kinds of acceptance whose exact output law does not bear out their label."""
    wrong = []
    for kind in ("exact", "rejection", "typical"):
        worlds = [World(3, seed) for seed in range(4)]
        bias = max(
            deviation(world, emitted_law(world, fixed(random_points(3, TREE_5, seed)), accept(kind)))
            for seed, world in enumerate(worlds)
        )
        if (label(kind) == "strict") != (bias < STRICT):
            wrong.append(kind)
    return wrong


class TestLabels:
    def test_a_label_says_what_the_law_is(self) -> None:
        assert get_args(get_args(Acceptance)[0]) == (ExactAcceptance, RejectionAcceptance, TypicalAcceptance)
        assert wrong_labels(label_of) == []

    def test_typical_labelled_strict_is_caught(self) -> None:
        assert wrong_labels(lambda kind: "strict") == ["typical"]
        assert wrong_labels(lambda kind: "approximate") == ["exact", "rejection"]

    def test_typical_run_where_strict_is_said_is_caught(self) -> None:
        assert wrong_labels(label_of, lambda kind: accept_of("typical")) == ["exact", "rejection"]

    def test_without_speculation_any_acceptance_is_strict(self) -> None:
        text = "version: 1\nname: x\nmodel: {source: m}\nbackend: {kind: embedded}\n"
        assert fidelity(parse_recipe(text + "acceptance: {kind: typical}\n")) == "strict"
