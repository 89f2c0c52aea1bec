"""What makes a measured speed no evidence: functions of prompts, answers and times; "" means nothing found.

* Prompts of random tokens: a drafter that guesses text finds none, one that copies finds itself; neither says
  what real text does.
* Forced acceptance: switches of servers that accept a fixed number of tokens, right or wrong, made for
  measuring kernels. In the answers it shows as steps that all emit the same number.
* Unequal baselines: other prompts, lengths or token counts on one side.
* Impossible numbers: more tokens a step than drafts plus one; a speedup beyond what fewer, dearer steps give.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trtspec.prompts import Prompt
from trtspec.ruler import Answer
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.load import CLOCK_SLACK
from trtspec.verify.records import Records, Row, answers_from, rows_of

FORCED = (
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS",
    "SGLANG_SIMULATE_ACC_LEN",
    "SIMULATE_ACC_LEN",
)
"""Environment variables by which servers accept a fixed number of drafted tokens."""
_MIN_TOKENS = 200
_MIN_STEPS = 40
_UNIFORM_P = 1e-3
_OFF = ("", "0", "-1", "false", "none")


def random_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> str:
    """Whether the prompts' tokens look drawn at random from the vocabulary.

    Text repeats tokens: in n uniform draws from V tokens about n - V (1 - (1 - 1/V)^n) are repeats, in text
    several times as many. Up to 1.5 times plus four deviations (of a Poisson count) is called random. Under
    200 tokens nothing is said.
    """
    tokens = [token for prompt in prompts for token in prompt]
    n = len(tokens)
    if n < _MIN_TOKENS or vocab_size < 2 * n:
        return ""  # in a small vocabulary everything repeats
    repeats = n - len(set(tokens))
    expected = n - vocab_size * -math.expm1(n * math.log1p(-1 / vocab_size))
    if repeats > 1.5 * expected + 4 * math.sqrt(expected + 1):
        return ""
    return (
        f"random tokens as prompts? {repeats} repeats among {n} tokens ({expected:.0f} by chance); "
        "real text repeats itself, and drafters live on it"
    )


def forced_acceptance(emitted: Sequence[Sequence[int]]) -> str:
    """Whether every step emits the same number of tokens, more than one. ``emitted``: of each answer its
    tokens a step; the first step (the prompt's) and the last (it may be cut) do not count."""
    inner = [count for answer in emitted for count in answer[1:-1]]
    if len(inner) < _MIN_STEPS or len(set(inner)) != 1 or inner[0] < 2:
        return ""
    return (
        f"every one of {len(inner)} steps emitted exactly {inner[0]} tokens: acceptance is forced, or "
        "answers repeat themselves"
    )


def forced_switches(environment: Mapping[str, str]) -> str:
    """Whether a variable is set by which a server accepts without looking."""
    found = [name for name in FORCED if environment.get(name, "").strip().lower() not in _OFF]
    return (
        f"{', '.join(found)} is set: the server accepts a fixed number of drafts, right or wrong"
        if found
        else ""
    )


def impossible_length(length: float, draft_tokens: int | None) -> str:
    """Whether more tokens a step are claimed than drafts plus the target's own."""
    if draft_tokens is None or not length > draft_tokens + 1 + 1e-9:
        return ""
    return f"{length:.3f} tokens a step where a step drafts {draft_tokens}: at most {draft_tokens + 1} can be"


def impossible_speedup(speedup: float, length: float, step_ratio: float = 1.0) -> str:
    """Whether a speedup is more than its parts give: tokens a step times ``step_ratio``, the time of a step
    without drafts over one with (at most 1: a step with drafts does all that one without does)."""
    most = length * min(step_ratio, 1.0)
    if not speedup > most * CLOCK_SLACK:
        return ""
    told = f"{length:.2f} tokens a step at {step_ratio:.2f} times the pace"
    return f"speedup {speedup:.2f} is more than {told} can give"


def unequal_work(
    mine: Mapping[str, int], baseline: Mapping[str, int], what: str = "tokens of the answer"
) -> str:
    """Whether two sides did other work. Both: prompt id -> number of ``what``."""
    if set(mine) != set(baseline):
        apart = sorted(set(mine) ^ set(baseline))
        return f"unequal baselines: {len(apart)} prompts on one side only, {apart[0]} first"
    other = [key for key in mine if mine[key] != baseline[key]]
    if not other:
        return ""
    key = other[0]
    sizes = f"{mine[key]} against {baseline[key]}"
    return f"unequal baselines: {len(other)} prompts with other {what}, {key}: {sizes}"


def check_evidence(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    *,
    vocab_size: int,
    draft_tokens: int | None,
    environment: Mapping[str, str] | None = None,
) -> Check:
    """Whether what was measured on these prompts and answers can count. ``draft_tokens``: the most that a
    step may draft, None if not known. ``environment``: this process's, unless given."""
    found = os.environ if environment is None else environment
    switched = {name: found[name] for name in FORCED if name in found}
    return judge_evidence(
        [{"id": prompt.id, "tokens": list(prompt.tokens)} for prompt in prompts],
        rows_of(answers),
        vocab_size=vocab_size,
        draft_tokens=draft_tokens,
        environment=switched,
    )


def judge_evidence(
    prompts: Sequence[Row],
    answers: Sequence[Row],
    *,
    vocab_size: int,
    draft_tokens: int | None,
    environment: Mapping[str, str],
) -> Check:
    """The check from raw rows."""
    given = answers_from(answers)
    steps = [answer.emitted for answer in given]
    # Under greedy decoding a model that repeats itself is drafted perfectly: that is no forced switch.
    lively = [one.emitted for one in given if len(set(one.tokens[len(one.tokens) // 2 :])) > 2]
    emitted = sum(len(one) for one in steps)
    length = sum(map(sum, steps)) / emitted if emitted else math.nan
    problems = [
        problem
        for problem in (
            forced_switches(environment),
            forced_acceptance(lively),
            random_tokens([row["tokens"] for row in prompts], vocab_size),
            impossible_length(length, draft_tokens),
        )
        if problem
    ]
    tokens = sum(len(row["tokens"]) for row in prompts)
    evidence: dict[str, Any] = {
        "problems": problems,
        "prompt_tokens": tokens,
        "distinct_prompt_tokens": len({token for row in prompts for token in row["tokens"]}),
        "steps_by_tokens": dict(sorted(Counter(count for one in steps for count in one).items())),
        "acceptance_length": length,
    }
    arguments = {
        "vocab_size": vocab_size,
        "draft_tokens": draft_tokens,
        "environment": dict(environment),
    }
    return Check(
        "evidence",
        Verdict.ERROR if problems else Verdict.MEASURED,
        f"refused as evidence: {'; '.join(problems)}"
        if problems
        else "no forced acceptance, no random prompts, no more tokens a step than drafts plus one",
        required=bool(problems),
        n=len(prompts),
        n_unit="prompts",
        how="environment, prompts and tokens a step of the answers; see docs/endpoints.md",
        evidence=evidence,
        records=Records("evidence", arguments, {"prompts": list(prompts), "answers": list(answers)}),
    )
