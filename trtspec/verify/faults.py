"""The self-test of ``trtspec verify``: faults are planted in a tiny engine, and the checks must see them.

Every fault is judged by a check that verification really runs, called as it is there. Beside each planted
fault the same check judges the engine without it and must have nothing against it: a check that always fails
catches everything and is worth nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.engine import Engine, EngineStats, Output, Request, Sampling
from trtspec.prompts import Prompt
from trtspec.ruler import run
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.labels import check_parameters
from trtspec.verify.load import Contender, check_acceptance, check_speed, race, too_fast
from trtspec.verify.lossless import check_lossless, requests_for
from trtspec.verify.power import Simulation, simulate, simulation_json
from trtspec.verify.quality import check_quality
from trtspec.verify.sampled import check_sampled

SCHEMA = "trtspec.self_test/1"
_SEEN = (Verdict.FAIL, Verdict.ERROR)


@dataclass(frozen=True)
class Size:
    """How much is drawn and simulated."""

    tokens: int = 2496
    bias: float = 0.02
    prompts: int = 6
    answer_tokens: int = 32
    runs: int = 100
    null_runs: int = 1000


FULL = Size()
SMALL = Size(tokens=1248, bias=0.04, answer_tokens=24, runs=20, null_runs=100)
"""Cut down: the same faults and checks, in fewer tokens."""


@dataclass(frozen=True)
class Planted:
    """One fault: ``by`` is the name of the check, ``verdict`` what it says of the fault, ``sound`` what it
    says of the same engine without it. Caught: a verdict that fails a report here, and not there."""

    fault: str
    caught: bool
    by: str
    verdict: str
    sound: str
    summary: str
    seconds: float


@dataclass(frozen=True)
class SelfTest:
    faults: tuple[Planted, ...]
    bias: Simulation

    @property
    def passed(self) -> bool:
        return self.bias.passed and all(one.caught for one in self.faults)


def to_json(found: SelfTest) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "passed": found.passed,
        "faults": [asdict(one) for one in found.faults],
        "bias": simulation_json(found.bias),
    }


def self_test(size: Size = FULL, on_fault: Callable[[str, int, int], None] = lambda *_: None) -> SelfTest:
    """Plant every fault, one after the other; ``on_fault(name, done, total)`` before each.

    Raises MissingError without torch or scipy.
    """
    from trtspec.embedded.specimen import one_thread

    trials = _trials(size)
    found = []
    for number, (fault, faulty, sound) in enumerate(trials):
        on_fault(fault, number, len(trials))
        began = time.perf_counter()
        with one_thread():
            bad, good = faulty(), sound()
        caught = _fails(bad) and not _fails(good) and good.verdict is not Verdict.INCONCLUSIVE
        seconds = round(time.perf_counter() - began, 2)
        found.append(
            Planted(fault, caught, bad.name, bad.verdict.value, good.verdict.value, bad.summary, seconds)
        )
    on_fault("the bias of 2026, simulated", len(trials), len(trials))
    return SelfTest(tuple(found), simulate(runs=size.runs, null_runs=size.null_runs))


def _fails(check: Check) -> bool:
    return check.required and check.verdict in _SEEN


# --------------------------------------------------------------------------- the faults

_Trial = tuple[str, Callable[[], Check], Callable[[], Check]]


def _trials(size: Size) -> list[_Trial]:
    """(fault, the check of the engine with it, the check without it)."""
    from trtspec.embedded import specimen
    from trtspec.embedded.acceptance import rejection, typical

    rig = _Rig(size)
    epsilon_delta = functools.partial(typical, epsilon=0.3, delta=0.09)
    sampled = functools.cache(lambda: rig.sampled(rejection))
    lossless = functools.cache(lambda: rig.lossless())
    trees = functools.cache(lambda: rig.lossless(trees=True))
    parameters = functools.cache(lambda: rig.parameters())
    acceptance = functools.cache(lambda: rig.acceptance())
    kv = functools.cache(lambda: rig.quality(kv_format="int8", kv_scales=specimen.calibrated_scales()))
    head = functools.cache(lambda: rig.quality())

    def tree_fault(planted: Callable[[], contextlib.AbstractContextManager[None]]) -> Check:
        rig.tree_answers()  # of the engine without the fault
        return rig.lossless(trees=True, planted=planted)

    return [
        ("biased residual", lambda: rig.sampled(specimen.biased_residual), sampled),
        ("accept always", lambda: rig.sampled(specimen.accept_always), sampled),
        ("typical acceptance labelled strict", lambda: rig.sampled(epsilon_delta), sampled),
        ("stale KV after a rejection", lambda: rig.lossless(store=specimen.StaleStore), lossless),
        ("wrong tree mask", lambda: tree_fault(specimen.wrong_tree_mask), trees),
        ("wrong positions in a branch", lambda: tree_fault(specimen.wrong_positions), trees),
        ("head of another model", lambda: rig.head(trained_on=1), lambda: rig.head(trained_on=0)),
        ("early stop", lambda: rig.lossless(change=_stops_early), lossless),
        ("temperature ignored", lambda: rig.parameters(_ignores_temperature), parameters),
        ("dropped last token", lambda: rig.lossless(change=_drops_the_last_token), lossless),
        ("KV scales of 1.0", lambda: rig.quality(kv_format="int8", kv_scales=specimen.UNIT_SCALES), kv),
        ("quantized lm_head", lambda: rig.quality(model=specimen.specimen(head_bits=3)), head),
        ("inflated token counter", lambda: rig.acceptance(_counts_double), acceptance),
        ("sleep in the baseline", lambda: rig.speed(0.08), lambda: rig.speed(0.0)),
    ]


class _Rig:
    """The tiny engine with its drafters, before the checks that verification runs."""

    def __init__(self, size: Size) -> None:
        from trtspec.embedded import specimen

        self._specimen, self._size = specimen, size
        chance = random.Random(2)
        self._prompts = [
            Prompt(f"p{number}", tuple(chance.randrange(specimen.VOCAB) for _ in range(6 + 2 * number)))
            for number in range(size.prompts)
        ]
        self._plain = specimen.open_specimen()

    def _drafting(self, accept: Any = None, **options: Any) -> Engine:
        accepting = {} if accept is None else {"accept": accept}
        engine: Engine = self._specimen.open_specimen(self._specimen.model_drafter(), **accepting, **options)
        return engine

    def sampled(self, accept: Any) -> Check:
        return check_sampled(
            self._drafting(accept),
            self._plain,
            self._prompts,
            tokens=self._size.tokens,
            max_new_tokens=self._size.answer_tokens,
            temperature=1.0,
            bias=self._size.bias,
            draft_limit=self._specimen.DRAFT_TOKENS,
            dtype="float64",
            required=True,
        )

    @functools.cached_property
    def _answers(self) -> dict[str, tuple[int, ...]]:
        requests = requests_for(self._prompts, self._size.answer_tokens, frozenset())
        return {one.request_id: one.tokens for one in run(self._plain, requests, draft_limit=0).answers}

    def tree_answers(self) -> dict[str, tuple[int, ...]]:
        return self._answers

    def lossless(
        self,
        *,
        trees: bool = False,
        change: Callable[[Engine], Engine] = lambda engine: engine,
        planted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        **options: Any,
    ) -> Check:
        engine: Engine
        if trees:
            starts = {one.id: len(one.tokens) for one in self._prompts}
            engine = self._specimen.open_specimen(self._specimen.TreeDrafter(self._answers, starts))
        else:
            engine = self._drafting(**options)
        limit = self._specimen.DRAFT_TOKENS
        with planted():
            return check_lossless(
                change(engine),
                self._plain,
                self._prompts,
                max_new_tokens=self._size.answer_tokens,
                stop_tokens=frozenset(),
                draft_limit=2 * limit if trees else limit,
                dtype="float64",
                speculates=True,
                required=True,
                floor_prompts=0,
                noise_texts=0,
            ).check

    def parameters(self, change: Callable[[Engine], Engine] = lambda engine: engine) -> Check:
        return check_parameters(
            change(self._drafting()),
            self._plain,
            self._prompts,
            draft_limit=self._specimen.DRAFT_TOKENS,
            dtype="float64",
            required=True,
        )

    def acceptance(self, change: Callable[[Engine], Engine] = lambda engine: engine) -> Check:
        return self._accepted(change(self._drafting()), self._specimen.DRAFT_TOKENS, None)

    def head(self, trained_on: int) -> Check:
        """Acceptance of a head that was fitted to what the target of that seed says; the gate is half of what
        a head of one token can gain."""
        model = self._specimen.specimen(seed=trained_on)
        source = self._plain if trained_on == 0 else self._specimen.open_specimen(model=model)
        requests = requests_for(self._prompts, 2 * self._size.answer_tokens, frozenset())
        answers = run(source, requests, draft_limit=0).answers
        texts = [
            [*request.prompt_tokens, *answer.tokens]
            for request, answer in zip(requests, answers, strict=True)
        ]
        drafter = self._specimen.HeadDrafter(self._specimen.fit_head(model, texts))
        return self._accepted(self._specimen.open_specimen(drafter), 1, 1.5)

    def _accepted(self, engine: Engine, draft_limit: int, bound: float | None) -> Check:
        requests = requests_for(self._prompts, self._size.answer_tokens, frozenset())
        found = run(engine, requests, draft_limit=draft_limit)
        return check_acceptance(
            found.answers, draft_limit=draft_limit, bound=bound, contradictions=found.contradictions
        )

    @functools.cached_property
    def _texts(self) -> list[list[int]]:
        """What the target itself says, so that it finds it likely: quality can only be lost on it."""
        requests = [
            Request(one.id, one.tokens, 2 * self._size.answer_tokens, Sampling(0.7, seed=number))
            for number, one in enumerate(self._prompts)
        ]
        return [list(one.tokens) for one in run(self._plain, requests, draft_limit=0).answers]

    def quality(self, **options: Any) -> Check:
        target = self._specimen.open_specimen(**options)
        return check_quality(target, self._plain, self._texts, bound=1.05, source="what the target says")

    def speed(self, sleep_s: float) -> Check:
        plain = Altered(self._plain, delay_s=sleep_s)
        limit = self._specimen.DRAFT_TOKENS
        contenders = [Contender("recipe", self._drafting(), limit), Contender("no_speculation", plain, 0)]
        for _ in range(1 if sleep_s else 3):  # a busy machine is timed again, as the protocol does
            found = race(contenders, self._prompts[:3], [10] * 3, rounds=1)
            if not too_fast(found):
                break
        return check_speed(found, check_name="speedup", name="recipe", over="no_speculation", bound=0.01)


class Altered:
    """An engine with a fault in front of it, on what goes in, what comes out, what it counts, or the
    clock."""

    def __init__(
        self,
        engine: Engine,
        *,
        change_request: Callable[[Request], Request] = lambda request: request,
        change_output: Callable[[Output], Output] = lambda output: output,
        change_stats: Callable[[EngineStats], EngineStats] = lambda stats: stats,
        delay_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._change_request = change_request
        self._change_output = change_output
        self._change_stats = change_stats
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: Request) -> None:
        self._engine.add(self._change_request(request))

    def step(self) -> list[Output]:
        if self._delay_s:  # sleeping 0 s gives the processor away too
            time.sleep(self._delay_s)
        return [self._change_output(output) for output in self._engine.step()]

    def stats(self) -> EngineStats:
        return self._change_stats(self._engine.stats())


def _altered(engine: Engine, **faults: Any) -> Engine:
    found: Engine = Altered(engine, **faults)  # type: ignore[assignment]
    return found


def _stops_early(engine: Engine) -> Engine:
    def change(request: Request) -> Request:
        return dataclasses.replace(request, max_new_tokens=max(1, request.max_new_tokens - 3))

    return _altered(engine, change_request=change)


def _ignores_temperature(engine: Engine) -> Engine:
    def change(request: Request) -> Request:
        sampling = request.sampling
        if sampling.greedy:
            return request
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, temperature=1.0))

    return _altered(engine, change_request=change)


def drops_the_last_token(output: Output) -> Output:
    if output.finish_reason is None:
        return output
    return dataclasses.replace(output, new_tokens=output.new_tokens[:-1])


def _drops_the_last_token(engine: Engine) -> Engine:
    return _altered(engine, change_output=drops_the_last_token)


def counts_double(stats: EngineStats) -> EngineStats:
    return dataclasses.replace(stats, generated_tokens=2 * stats.generated_tokens)


def _counts_double(engine: Engine) -> Engine:
    return _altered(engine, change_stats=counts_double)


# --------------------------------------------------------------------------- shown


def lines(found: SelfTest) -> Sequence[str]:
    """For a terminal, a fault a line, then what the simulation of the bias says."""
    width = max(len(one.fault) for one in found.faults)
    shown = [
        f"{'caught' if one.caught else 'MISSED':<7} {one.fault:<{width}}  by {one.by}: {one.verdict} "
        f"(without it {one.sound})"
        for one in found.faults
    ]
    bias = found.bias
    low, high = bias.false_alarm_interval
    shown += [
        "",
        f"bias of 2026, 10/60/30 % intended, 10.16/63.04/26.80 % produced: w^2 = {bias.bias:.6f}",
        f"  detected in {bias.detected} of {bias.runs} seeded runs of at most {bias.draws:,} draws "
        f"({bias.mean_draws:,.0f} on average; computed power {bias.power:.4f})",
        f"  false alarms in {bias.false_alarms} of {bias.null_runs:,} runs of the intended law (95 % "
        "interval "
        f"{low:.2%} to {high:.2%}; alpha {bias.alpha:g})",
        "",
        f"self-test: {'PASS' if found.passed else 'FAIL'} ({sum(one.caught for one in found.faults)} of "
        f"{len(found.faults)} faults caught)",
    ]
    return shown
