"""How fast, and how much of it is drafting: acceptance and tokens/s at batch 1.

The contenders run the same prompts to the same lengths (those the answer has without speculation,
stop token included), right after one another, in an order that turns from round to round, so that a slow
minute of the machine hits all of them. One estimator throughout: tokens/s is all tokens over
all the time, and a speedup the quotient of two such rates. Tokens are counted by the engine and checked
against the tokens returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtspec.engine import Engine
from trtspec.prompts import Prompt
from trtspec.ruler import Answer, Run, acceptance_length, acceptance_within, emitted_histogram, run
from trtspec.stats import Interval, clustered_rate, larger_by_chance, ratio_of_sums, times_faster
from trtspec.verify.gates import Check, Verdict, gated
from trtspec.verify.lossless import requests_for
from trtspec.verify.records import Records, Row, answers_from, rows_of

DEFINITION = "acceptance length = tokens emitted per target step, bonus or recovered token included"
MOST_POSITIONS = 8
"""Of which acceptance is told one by one."""
DEAD_LENGTH = 1.02
"""Below this, drafting yields next to nothing."""
# Clock noise that a speedup may carry before it contradicts the token counts.
CLOCK_SLACK = 1.10
# Acceptance in 16 bit above that in float64: by chance less often than this, and not a trifle.
_SUSPICIOUS_P = 0.02
_SUSPICIOUS_RATE = 0.05


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

    def seconds(self, name: str) -> list[list[float]]:
        """``[prompt][round]``"""
        return [[one.seconds for one in rounds] for rounds in self.runs[name]]

    def tokens_per_s(self, name: str) -> float:
        """All tokens over all the time."""
        runs = [one for rounds in self.runs[name] for one in rounds]
        return sum(one.tokens for one in runs) / sum(one.seconds for one in runs)

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
    held_back_steps: int = 0,
) -> Check:
    """Acceptance length over ``answers`` (token-weighted; the evidence has the request-weighted mean too,
    and the length of each of ``tasks``, the kinds of the prompts). ``held_back_steps``: of
    :class:`~trtspec.ruler.Run`."""
    how = (
        f"{DEFINITION}; greedy, the engine's step counts; 95 % bootstrap over requests; shares: Korn and "
        "Graubard's interval, in which steps of one answer count as far as they differ"
    )
    steps = [float(len(answer.emitted)) for answer in answers]
    tokens = [float(len(answer.tokens)) for answer in answers]
    length, interval = ratio_of_sums(tokens, steps, limits=length_limits(answers, draft_limit))
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
        "held_back_steps": held_back_steps,
        "acceptance_by_position": (positions := by_position(answers)),
        "acceptance_length_by_task": _by_task(answers, tasks),
        "steps_by_tokens_emitted": emitted_histogram(answers),
        "contradictions": list(contradictions),
    }
    records = Records(
        "acceptance",
        {
            "draft_limit": draft_limit,
            "bound": bound,
            "contradictions": list(contradictions),
            "tasks": list(tasks),
            "held_back_steps": held_back_steps,
        },
        {"requests": rows_of(answers)},
    )
    problem = ""
    if contradictions:
        problem = f"the engine's counts contradict its outputs: {contradictions[0]}"
    elif draft_limit is not None and length > draft_limit + 1:
        problem = (
            f"acceptance length {length:.3f} is impossible: {draft_limit} drafted tokens and one more make "
            f"at most {draft_limit + 1} a step"
        )
    warnings: tuple[str, ...] = ()
    stuck = sum(_is_stuck(answer) for answer in answers)
    if stuck:
        warnings += (
            f"{stuck} of {len(answers)} answers end in the same one or two tokens over and over: drafting is "
            "easy there, so real text may gain less",
        )
    rate = (
        f"{accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.1%})"
        if drafted
        else "none drafted"
    )
    if drafted:
        low, high = clustered_rate([one.accepted for one in answers], [one.drafted for one in answers])[1]
        evidence["acceptance_rate_interval"] = [low, high]
        rate += f", interval {low:.1%} to {high:.1%}" if math.isfinite(low) else ""
    if held_back_steps:
        rate += f", drafting held back in {held_back_steps} steps (max_concurrency, or none would have paid)"
    check = acceptance_gate(
        problem,
        rate,
        length,
        interval,
        bound=bound,
        n=len(answers),
        how=how,
        warnings=warnings,
        evidence=evidence,
        records=records,
    )
    told = [
        f"position {one['position']}: {one['accepted']:.1%}"
        + (f" ({one['low']:.1%} to {one['high']:.1%})" if one["low"] is not None else "")
        + f" of {one['steps']} steps that got there"
        for one in positions
    ]
    return replace(check, details=tuple(told))


def length_limits(answers: Sequence[Answer], draft_limit: int | None) -> Interval:
    """The fewest and the most tokens that a step can emit; without a limit, of what was drafted."""
    most = draft_limit
    if most is None:
        most = max((one for answer in answers for one in answer.drafted_by_step), default=0)
        most = max(most, *(one - 1 for answer in answers for one in answer.emitted), 0)
    return 1.0, 1.0 + most


def reached_position(answer: Answer, position: int) -> tuple[float, float]:
    """Steps that accepted the draft at ``position``, and those that could have: they accepted all before
    and had drafted as many. None of an engine that does not tell the drafts of each step."""
    steps = [
        min(emitted - 1, drafted)
        for emitted, drafted in zip(answer.emitted, answer.drafted_by_step, strict=False)
        if drafted >= position and emitted >= position
    ]
    return float(sum(one >= position for one in steps)), float(len(steps))


def by_position(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Acceptance at each position given that all before were accepted, with its interval over requests. In a
    tree a position is a depth, and a step whose tree ended above it counts against it."""
    found = []
    for position in range(1, MOST_POSITIONS + 1):
        columns = list(zip(*(reached_position(answer, position) for answer in answers), strict=True))
        if not columns or not sum(columns[1]):
            break
        value, (low, high) = clustered_rate(*columns)
        ends = (low, high) if math.isfinite(low) else (None, None)
        steps = int(sum(columns[1]))
        found.append(
            {"position": position, "accepted": value, "low": ends[0], "high": ends[1], "steps": steps}
        )
    return found


def acceptance_gate(
    problem: str,
    rate: str,
    length: float,
    interval: Interval,
    *,
    bound: float | None,
    n: int,
    how: str,
    warnings: tuple[str, ...] = (),
    evidence: dict[str, Any],
    records: Records,
) -> Check:
    """The check ``acceptance`` of ``n`` requests: ERROR with ``problem`` if there is one, required whatever
    the gates, for an engine that miscounts is a fault; else the length against its bound."""
    if problem:
        return Check(
            "acceptance",
            Verdict.ERROR,
            problem,
            required=True,
            bound=bound,
            how=how,
            evidence=evidence,
            records=records,
        )
    if length < DEAD_LENGTH:
        warnings += (f"the drafter is of no use on these prompts: {length:.3f} tokens a step (1 without it)",)
    return gated(
        name="acceptance",
        what=f"{rate}; tokens a step",
        measured=length,
        interval=interval,
        bound=bound,
        sense="at least",
        unit="tokens/step",
        n=n,
        n_unit="requests",
        how=how,
        warnings=warnings,
        evidence=evidence,
        records=records,
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


def too_fast(result: Race, name: str = "recipe", over: str = "no_speculation") -> Literal["", "sum", "all"]:
    """Whether drafting seems to gain more than it saves in target steps, and a step with drafts is no
    cheaper than one without: then the clock measured something else, such as another program that slowed
    one side down. "all": in every single pair of runs; "sum": all together, though not in each."""
    # Every single pair: a machine that is busy for a while makes some of them impossible, not all.
    pairs = zip(result.ratios(name, over), _possible(result, name, over), strict=True)
    if all(value > most * CLOCK_SLACK for values, most in pairs for value in values):
        return "all"
    steps = {
        one: sum(len(run.answers[0].emitted) for rounds in result.runs[one] for run in rounds)
        for one in (name, over)
    }
    speedup = result.tokens_per_s(name) / result.tokens_per_s(over)
    return "sum" if speedup > steps[over] / steps[name] * CLOCK_SLACK else ""


def check_speed(
    result: Race, *, check_name: str, name: str, over: str, bound: float | None, retimed: bool = False
) -> Check:
    """Speedup of contender ``name`` over ``over``, gated by the lower end of its interval. ``retimed``:
    this is the second race, because the first one's times were impossible."""
    rounds = len(result.runs[name][0])
    prompts = len(result.runs[name])
    times = "once" if rounds == 1 else f"{rounds} times"
    how = (
        "batch 1, greedy; wall time of whole requests, prompt included; the same prompts to the same "
        f"lengths, each {times}, contenders in turn; tokens/s: all tokens over all the time; speedup: the "
        "quotient of the two; 95 % paired bootstrap over prompts and their rounds; prefix cache as in the "
        "recipe"
    )
    ratio, interval = times_faster(result.seconds(name), result.seconds(over))
    rates = {one: result.tokens_per_s(one) for one in (name, over)}
    evidence: dict[str, Any] = {
        "tokens_per_s": rates,
        "ratios": result.ratios(name, over),
        "seconds": {one: result.seconds(one) for one in (name, over)},
        "prompts": prompts,
        "rounds": rounds,
        "loads": ["1 at a time"],
        "contradictions": list(result.contradictions),
        "interleaved": True,
    }
    records = Records(
        "speed",
        {
            "check_name": check_name,
            "name": name,
            "over": over,
            "bound": bound,
            "contradictions": list(result.contradictions),
            "retimed": retimed,
        },
        {"runs": race_rows(result, (name, over))},
    )
    problem = doubt = ""
    if result.contradictions:
        problem = f"the race is void: {result.contradictions[0]}"
    elif over == "no_speculation":
        answers = [rounds_[0].answers[0] for rounds_ in result.runs[name]]
        evidence["acceptance_length"] = length = acceptance_length(answers)
        excess = too_fast(result, name, over)
        text = (
            f"speedup {ratio:.2f} is more than fewer target steps can give ({length:.2f} tokens a step, and "
            "a step with drafts is no cheaper than one without); machine busy? measure again when it is idle"
        )
        if excess == "all":
            problem = f"{text} (else the engine without speculation is slowed down, or the clock is wrong)"
        elif excess:
            doubt = text
    if problem:
        return Check(
            check_name,
            Verdict.ERROR,
            problem,
            required=bound is not None or bool(result.contradictions),
            bound=bound,
            how=how,
            evidence=evidence,
            records=records,
        )
    label = f"batch 1, prompt included, {prompts} prompt{'s' if prompts > 1 else ''} {times}"
    check = gated(
        name=check_name,
        what=f"{rates[name]:.1f} against {rates[over]:.1f} tokens/s ({label}): speedup",
        measured=ratio,
        interval=interval,
        bound=bound,
        sense="at least",
        n=prompts,
        n_unit="prompts",
        how=how,
        evidence=evidence,
        records=records,
    )
    if retimed:
        check = replace(check, warnings=("timed twice: the first times were impossible; machine busy?",))
    if not doubt:
        return check
    verdict = Verdict.INCONCLUSIVE if check.verdict is Verdict.PASS else check.verdict
    return replace(check, verdict=verdict, warnings=(*check.warnings, doubt))


def race_rows(result: Race, names: Sequence[str]) -> list[Row]:
    """A row for every timed run of ``names``."""
    return [
        {"contender": name, "prompt": prompt, "round": number, "seconds": one.seconds, "counted": one.tokens}
        | rows_of(one.answers)[0]
        for name in names
        for prompt, rounds in enumerate(result.runs[name])
        for number, one in enumerate(rounds)
    ]


def race_from(rows: Sequence[Row], contradictions: Sequence[str]) -> Race:
    """The race whose :func:`race_rows` these are."""
    runs: dict[str, list[list[Run]]] = {}
    for row in rows:
        prompts = runs.setdefault(row["contender"], [])
        if row["prompt"] == len(prompts):
            prompts.append([])
        prompts[row["prompt"]].append(Run(answers_from([row]), row["seconds"], row["counted"], ()))
    return Race(runs, tuple(contradictions))


def _possible(result: Race, name: str, over: str) -> list[float]:
    """For each prompt the speedup if a step with drafts cost no more than one without."""
    return [
        len(there[0].answers[0].emitted) / len(here[0].answers[0].emitted)
        for here, there in zip(result.runs[name], result.runs[over], strict=True)
    ]


def compare_acceptance(
    check: Check, here: Sequence[Answer], exact: Sequence[Answer], *, required: bool
) -> Check:
    """``check`` (of losslessness, in 16 bit) with what the acceptance rates say.

    ``here`` and ``exact``: the same prompts in the recipe's own arithmetic and in float64, of which only
    as many tokens count as ``exact`` has. A strict acceptance keeps no draft but the target's own choice, so
    rounding moves the rate up as often as down. A rate that is higher prompt after prompt (sign-flip
    permutation test) means that drafts are kept which the target would not choose: INCONCLUSIVE, and
    ``required`` if the recipe demands losslessness. Fewer than six prompts cannot show it.
    """
    by_id = {answer.request_id: answer for answer in here}
    counts = []
    for answer in exact:
        mine = acceptance_within(by_id[answer.request_id], len(answer.tokens))
        counts.append((*mine, answer.drafted, answer.accepted))
    drafted, accepted, exact_drafted, exact_accepted = (sum(column) for column in zip(*counts, strict=True))
    if not drafted or not exact_drafted:
        return check
    rate, exact_rate = accepted / drafted, exact_accepted / exact_drafted
    differences = [a / d - b / c for d, a, c, b in counts if d and c]
    chance = larger_by_chance(differences)
    evidence = {
        "prompts": len(differences),
        "rate": rate,
        "rate_float64": exact_rate,
        "higher_by_chance": chance,
        "least_possible": 2.0 ** -len(differences),
    }
    records = check.records and check.records.also(
        arguments={"compare_required": required}, tables={"float64": rows_of(exact)}
    )
    check = replace(
        check,
        evidence={**check.evidence, "acceptance_rate_against_float64": evidence},
        records=records,
    )
    if not (chance <= _SUSPICIOUS_P and rate > exact_rate + _SUSPICIOUS_RATE):
        return check
    text = (
        f"suspicious: {rate:.0%} of the drafts are accepted, {exact_rate:.0%} in float64 on the same prompts "
        f"(by chance: {chance:.1%}); rounding should not raise it"
    )
    if check.verdict is Verdict.FAIL or check.verdict is Verdict.ERROR:
        return replace(check, warnings=(*check.warnings, text))
    return replace(check, verdict=Verdict.INCONCLUSIVE, required=required, summary=f"{text}. {check.summary}")
