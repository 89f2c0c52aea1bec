"""How fast, and how much of it is drafting: acceptance and tokens/s at batch 1.

The three contenders run the same prompts to the same lengths (those the answer has without speculation,
stop token included), right after one another, in an order that turns from round to round, so that a slow
minute of the machine hits all of them. Tokens are counted by the engine and checked against the tokens
returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.engine import Engine
from trtspec.verify.gates import Check, Verdict, gated
from trtspec.verify.lossless import requests_for
from trtspec.verify.ruler import Answer, Run, acceptance_length, emitted_histogram, run
from trtspec.verify.stats import median_of_blocks, ratio_of_sums
from trtspec.verify.texts import Prompt

DEFINITION = "acceptance length = tokens emitted per target step, bonus or recovered token included"
DEAD_LENGTH = 1.02
"""Below this, drafting yields next to nothing."""
# Clock noise that a ratio of medians may carry before it contradicts the token counts.
_CLOCK_SLACK = 1.10


@dataclass(frozen=True)
class Contender:
    """An engine in the race. ``name``: recipe, no_speculation or baseline."""

    name: str
    engine: Engine
    draft_limit: int | None


@dataclass(frozen=True)
class Race:
    """``runs[contender][prompt]``: one Run a round. Every run answers one prompt."""

    runs: Mapping[str, Sequence[Sequence[Run]]]
    contradictions: tuple[str, ...]

    def tokens_per_s(self, name: str) -> list[list[float]]:
        """``[prompt][round]``"""
        return [[one.tokens / one.seconds for one in rounds] for rounds in self.runs[name]]

    def ratios(self, name: str, over: str) -> list[list[float]]:
        """``[prompt][round]``: tokens/s of one over the other's, of runs next to each other."""
        return [
            [
                left.tokens / left.seconds / (right.tokens / right.seconds)
                for left, right in zip(a, b, strict=True)
            ]
            for a, b in zip(self.runs[name], self.runs[over], strict=True)
        ]


def race(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    *,
    rounds: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Race:
    """Run every prompt ``rounds`` times on every contender, one request at a time, after a warm-up.

    No stop tokens: each answer has exactly its ``lengths`` tokens, else the race is contradictory.
    """
    requests = requests_for(prompts, lengths, frozenset())
    runs: dict[str, list[list[Run]]] = {one.name: [[] for _ in requests] for one in contenders}
    wrong: list[str] = []
    for one in contenders:
        run(one.engine, requests[:1], draft_limit=one.draft_limit)
    done, total = 0, rounds * len(requests) * len(contenders)
    turn = 0
    for _ in range(rounds):
        for number, request in enumerate(requests):
            order = [*contenders[turn % len(contenders) :], *contenders[: turn % len(contenders)]]
            turn += 1
            for one in order:
                result = run(one.engine, [request], draft_limit=one.draft_limit)
                runs[one.name][number].append(result)
                wrong += [f"{one.name}: {line}" for line in result.contradictions]
                if len(result.answers[0].tokens) != lengths[number]:
                    wrong.append(
                        f"{one.name}: {request.id}: {len(result.answers[0].tokens)} tokens "
                        f"where {lengths[number]} were to be compared"
                    )
                done += 1
                on_progress(done, total)
    return Race(runs, tuple(dict.fromkeys(wrong)))


def check_acceptance(
    answers: Sequence[Answer],
    *,
    draft_limit: int | None,
    bound: float | None,
    contradictions: Sequence[str],
    tasks: Sequence[str] = (),
) -> Check:
    """Acceptance length over ``answers`` (token-weighted; the evidence has the request-weighted mean too,
    and the length of each of ``tasks``, the kinds of the prompts)."""
    how = f"{DEFINITION}; greedy, the engine's step counts; 95 % bootstrap over requests"
    steps = [float(len(answer.emitted)) for answer in answers]
    tokens = [float(len(answer.tokens)) for answer in answers]
    length, interval = ratio_of_sums(tokens, steps)
    drafted = sum(answer.drafted for answer in answers)
    accepted = sum(answer.accepted for answer in answers)
    rates = [answer.accepted / answer.drafted for answer in answers if answer.drafted]
    lengths = [len(answer.tokens) / len(answer.emitted) for answer in answers if answer.emitted]
    evidence: dict[str, Any] = {
        "definition": DEFINITION,
        "acceptance_length": length,
        "acceptance_length_mean_over_requests": sum(lengths) / len(lengths) if lengths else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_rate_mean_over_requests": sum(rates) / len(rates) if rates else None,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length_by_task": _by_task(answers, tasks),
        "steps_by_tokens_emitted": emitted_histogram(answers),
        "contradictions": list(contradictions),
    }
    problem = ""
    if contradictions:
        problem = f"the engine's books do not balance: {contradictions[0]}"
    elif draft_limit is not None and length > draft_limit + 1:
        problem = (
            f"acceptance length {length:.3f} is impossible: {draft_limit} drafted tokens and one more make "
            f"at most {draft_limit + 1} a step"
        )
    if problem:
        return Check(
            "acceptance",
            Verdict.ERROR,
            problem,
            required=bound is not None,
            bound=bound,
            how=how,
            evidence=evidence,
        )
    warnings: tuple[str, ...] = ()
    stuck = sum(_is_stuck(answer) for answer in answers)
    if stuck:
        warnings += (
            f"{stuck} of {len(answers)} answers end in a repeated token or two: drafts are easy there",
        )
    if length < DEAD_LENGTH:
        warnings += (f"dead drafter: {length:.3f} tokens a step; drafting yields nothing on these prompts",)
    rate = (
        f"{accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.1%})"
        if drafted
        else "none drafted"
    )
    return gated(
        name="acceptance",
        what=f"{rate}; acceptance length",
        measured=length,
        interval=interval,
        bound=bound,
        sense="at least",
        unit="tokens/step",
        n=len(answers),
        n_unit="requests",
        how=how,
        warnings=warnings,
        evidence=evidence,
    )


def _by_task(answers: Sequence[Answer], tasks: Sequence[str]) -> dict[str, float]:
    return {
        task: acceptance_length([answer for answer, kind in zip(answers, tasks, strict=True) if kind == task])
        for task in dict.fromkeys(tasks)
        if task
    }


def _is_stuck(answer: Answer) -> bool:
    """Broken kernels and loops show as an answer that repeats itself; acceptance then means little."""
    half = answer.tokens[len(answer.tokens) // 2 :]
    return len(half) >= 8 and len(set(half)) <= 2


def check_speed(result: Race, *, check_name: str, name: str, over: str, bound: float | None) -> Check:
    """Speedup of contender ``name`` over ``over``, gated by the lower end of its interval."""
    rounds = len(result.runs[name][0])
    how = (
        "batch 1, greedy; wall time of whole requests, prompt included; the same prompts to the same "
        f"lengths, {rounds} rounds, contenders in turn; median over prompts of each prompt's median "
        "ratio; 95 % bootstrap over prompts; prefix cache as in the recipe"
    )
    evidence: dict[str, Any] = {
        "tokens_per_s": {one: _rate(result, one) for one in (name, over)},
        "ratios": result.ratios(name, over),
        "prompts": len(result.runs[name]),
        "rounds": rounds,
        "contradictions": list(result.contradictions),
    }
    ratio, interval = median_of_blocks(result.ratios(name, over))
    answers = [rounds_[0].answers[0] for rounds_ in result.runs[name]]
    problem = ""
    if result.contradictions:
        problem = f"the race is void: {result.contradictions[0]}"
    elif over == "no_speculation":
        evidence["acceptance_length"] = length = acceptance_length(answers)
        possible = _possible(result, name, over)
        pairs = zip(result.ratios(name, over), possible, strict=True)
        # Every single pair: a machine that is busy for a while makes some of them impossible, not all.
        if all(value > most * _CLOCK_SLACK for values, most in pairs for value in values):
            problem = (
                f"speedup {ratio:.2f} [{interval[0]:.2f}, {interval[1]:.2f}] is more than fewer target steps "
                f"can give: {length:.2f} tokens a step, and a step with drafts is no cheaper than one "
                "without; the engine without speculation is slowed down, or the clock is wrong"
            )
    if problem:
        return Check(
            check_name,
            Verdict.ERROR,
            problem,
            required=bound is not None,
            bound=bound,
            how=how,
            evidence=evidence,
        )
    rates = evidence["tokens_per_s"]
    return gated(
        name=check_name,
        what=f"{rates[name]['median']:.1f} against {rates[over]['median']:.1f} tokens/s: speedup",
        measured=ratio,
        interval=interval,
        bound=bound,
        sense="at least",
        n=len(result.runs[name]),
        n_unit="prompts",
        how=how,
        evidence=evidence,
    )


def _possible(result: Race, name: str, over: str) -> list[float]:
    """For each prompt the speedup if a step with drafts cost no more than one without."""
    return [
        len(there[0].answers[0].emitted) / len(here[0].answers[0].emitted)
        for here, there in zip(result.runs[name], result.runs[over], strict=True)
    ]


def _rate(result: Race, name: str) -> dict[str, Any]:
    value, interval = median_of_blocks(result.tokens_per_s(name))
    return {"median": value, "interval_95": list(interval)}
