"""What two endpoints show of their drafts, and whether they may be compared at all: from rows, no network.

Tokens a step of a server, best source first:

* its own tokens a step of each answer (trtspec, trtllm-serve);
* vLLM's counters: every step of a request emits one token of the target's and the drafts it accepts, so
  ``generated - accepted`` steps emitted ``generated`` tokens, steps without a draft among them. Drafts that
  were accepted beyond the end of an answer are counted as accepted, so this is a little too high (by less
  than K tokens an answer);
* token ids of each event of a stream. A server that lags behind its own engine puts two steps into one
  event, so this is an upper bound; it serves where there are no counters, and for the interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from trtspec.ruler import shared_start
from trtspec.stats import Interval, ratio_of_sums
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.load import DEFINITION
from trtspec.verify.records import Row
from trtspec.verify.sanity import forced_acceptance, random_tokens

Grown = Mapping[str, float] | None
DRAFTS_NOTHING = "its counters of drafts did not grow: it does not speculate"
_LIKE = 0.05
"""Relative difference up to which events of a stream are taken for steps."""
_ONE_SERVER = (
    "url and baseline are one server and model: this shows its noise, and nothing of what drafts do; serve "
    "the same weights without speculation beside it"
)
_FEWEST_AGAIN = 5
"""Prompts that were asked again, for it to be seen that answers are kept."""
_UNKNOWN: Interval = (-math.inf, math.inf)


class Length(NamedTuple):
    """Tokens a step, how it is known, and of how many requests. ``bound``: it may be less."""

    value: float
    interval: Interval
    source: str
    requests: int
    bound: bool = False


_ANY_LENGTH: Interval = (1.0, math.inf)
"""Tokens a step where nobody says how many a step drafts."""


def _by_server(rows: Sequence[Row], side: str) -> Length | None:
    tokens, steps = [], []
    for row in rows:
        if row["side"] == side and row["tokens_per_step"] and row["tokens"] and not row["error"]:
            tokens.append(float(row["tokens"]))
            steps.append(row["tokens"] / row["tokens_per_step"])
    if not tokens:
        return None
    return Length(
        *ratio_of_sums(tokens, steps, limits=_ANY_LENGTH),
        "the server's tokens a step of each answer",
        len(tokens),
    )


def _emitted(rows: Sequence[Row], side: str) -> list[list[int]]:
    """Tokens of each event of each answer; alone, where a server lags least."""
    return [
        row["emitted"]
        for row in rows
        if row["side"] == side and row["at"] == "alone" and row.get("emitted") and not row["error"]
    ]


def _by_events(rows: Sequence[Row], side: str) -> Length | None:
    found = _emitted(rows, side)
    if not found:
        return None
    value, interval = ratio_of_sums(
        [float(sum(one)) for one in found], [float(len(one)) for one in found], limits=_ANY_LENGTH
    )
    return Length(value, interval, "token ids of each event of a stream, alone", len(found), bound=True)


def _others(rows: Sequence[Row], side: str, counted: Mapping[str, float]) -> str:
    """Why the counters are not those of these requests alone, "" if they are."""
    if any(value < 0 for value in counted.values()):
        return "its counters fell: the server was started anew"
    sent = sum(row["tokens"] or 0 for row in rows if row["side"] == side)
    generated = counted.get("generated")
    if generated is None or not sent or abs(generated - sent) <= 0.02 * sent:
        return ""
    broken = any(row["error"] for row in rows if row["side"] == side)
    why = "answers broke off, or others use it" if broken else "others use it"
    return f"its counter of generated tokens grew by {generated:.0f}, {sent} came here: {why}"


def length_of(rows: Sequence[Row], side: str, counted: Grown) -> Length | str:
    """Tokens a step of ``side``; or why it is not known. ``counted``: by how much vLLM's counters grew."""
    told, events = _by_server(rows, side), _by_events(rows, side)
    if told is not None:
        return told
    others = "" if counted is None else _others(rows, side, counted)
    if counted is None or others:
        if events is None:
            return others or "the endpoint shows neither drafts nor steps"
        return events._replace(source=f"{events.source} ({others})" if others else events.source)
    if not counted["drafts"]:
        return DRAFTS_NOTHING
    requests = sum(row["side"] == side for row in rows)
    generated = counted.get("generated")
    if generated is None:
        value = 1 + counted["accepted"] / counted["drafts"]
        return Length(value, _UNKNOWN, "/metrics: 1 + accepted / drafts, in steps that drafted", requests)
    value = generated / max(generated - counted["accepted"], 1.0)
    source = "/metrics: generated / (generated - accepted), of all steps"
    if events is None or abs(events.value / value - 1) > _LIKE:
        return Length(value, _UNKNOWN, source, requests)
    low, high = events.interval
    shift = value - events.value  # the counters' value, the events' spread
    return Length(value, (low + shift, high + shift), f"{source}; interval: events of streams", requests)


def judge_acceptance(rows: Sequence[Row], counted: Grown, draft_tokens: int | None) -> Check:
    """Drafted, accepted and tokens a step of ``url``. ``draft_tokens``: the most that a step drafts."""
    found = length_of(rows, "url", counted)
    if isinstance(found, str):
        return skipped("acceptance", found)
    totals = [
        (row["drafted"], row["accepted"])
        for row in rows
        if row["side"] == "url" and row["drafted"] is not None and row["accepted"] is not None
    ]
    counters = counted or {}
    mine = not _others(rows, "url", counters) if counters else False
    drafted = sum(one for one, _ in totals) if totals else counters.get("drafted", 0) if mine else 0
    accepted = sum(one for _, one in totals) if totals else counters.get("accepted", 0) if mine else 0
    evidence: dict[str, Any] = {"acceptance_length": found.value, "drafted": drafted, "accepted": accepted}
    if drafted:
        evidence["acceptance_rate"] = accepted / drafted
    if mine and counters.get("drafts"):
        evidence["drafting_steps"] = counters["drafts"]
        evidence["acceptance_length_of_drafting_steps"] = 1 + counters["accepted"] / counters["drafts"]
        evidence["accepted_by_position"] = _by_position(counters)
    if steps := _emitted(rows, "url"):
        counts = Counter(count for one in steps for count in one)
        evidence["steps_by_tokens_emitted"] = {str(key): counts[key] for key in sorted(counts)}
    problem = ""
    if drafted and accepted > drafted:
        problem = f"{accepted:.0f} drafted tokens accepted of {drafted:.0f} drafted"
    if draft_tokens is not None and found.value > draft_tokens + 1 + 1e-6:
        problem = (
            f"{found.value:.2f} tokens a step, and a step drafts {draft_tokens}: "
            f"at most {draft_tokens + 1} can be"
        )
    if problem:
        return Check("acceptance", Verdict.ERROR, problem, required=True, evidence=evidence)
    rate = f"{accepted:.0f} of {drafted:.0f} drafted tokens accepted; " if drafted else ""
    return gated(
        name="acceptance",
        what=f"{rate}tokens a step",
        measured=found.value,
        interval=found.interval,
        bound=None,
        sense="at least",
        unit="tokens/step",
        n=found.requests,
        n_unit="requests",
        how=f"{DEFINITION}; {found.source}" + ("; at most" if found.bound else ""),
        evidence=evidence,
    )


def _by_position(counters: Mapping[str, float]) -> list[float]:
    """Of the steps that drafted, the share that accepted drafts up to each position."""
    places = sorted(int(key[12:]) for key in counters if key.startswith("accepted_at_"))
    return [counters[f"accepted_at_{place}"] / counters["drafts"] for place in places]


def judge_plain_baseline(rows: Sequence[Row], counted: Grown) -> Check:
    """A baseline that speculates itself is none."""
    name = "baseline_without_speculation"
    sent = sum(row["tokens"] or 0 for row in rows if row["side"] == "baseline")
    # A page that stands still, or another replica's, says nothing of drafts; who else asked is no matter.
    fell = counted is not None and any(value < 0 for value in counted.values())
    lives = counted is not None and not fell and counted.get("generated", sent) >= 0.98 * sent
    if counted is not None and lives and counted["drafts"] == 0:
        text = "the baseline's counters say that it drafts nothing"
        return Check(name, Verdict.MEASURED, text, required=False)
    found = length_of(rows, "baseline", counted)
    length = None if isinstance(found, str) or found.bound else found.value
    if counted is not None and not fell and counted["drafts"] > 0 and length is None:
        length = 1 + counted["accepted"] / counted["drafts"]  # whoever asked: it drafts
    if length is None:
        events = None if isinstance(found, str) else found
        if events is not None and events.value <= 1 + 1e-3:
            return Check(name, Verdict.MEASURED, "the baseline sends one token an event", required=False)
        told = (
            found if events is None else f"{events.value:.2f} tokens an event, which may hold several steps"
        )
        return skipped(name, str(told))
    if length > 1 + 1e-3:
        text = f"the baseline speculates: {length:.2f} tokens a step; no comparison with it shows a speedup"
        return Check(name, Verdict.ERROR, text, required=True, measured=length)
    return Check(name, Verdict.MEASURED, "the baseline sends one token a step", required=False)


# --------------------------------------------------------------------------- can they be compared?


def judge_comparable(
    rows: Sequence[Row], servers: Mapping[str, str], one_server: bool = False, other_weights: bool = False
) -> Check:
    """Whether what was measured can count: equal prompts on both sides, one kind of server, answers that
    neither keeps from before, prompts of text, acceptance that is not forced. ``servers``: what each says it
    is, ``vllm 0.32.0``; ``one_server``: both sides are one place and model; ``other_weights``: only quality
    is asked, of which another kind of server is no more than a part."""
    problems, warnings = _unequal_prompts(rows), []
    mine, other = (servers.get(side, "") for side in ("url", "baseline"))
    families = [_family(one) for one in (mine, other)]
    if all(families) and families[0] != families[1] and other_weights:
        warnings.append(
            f"other servers: url is served by {mine}, the baseline by {other}: quality is that of both "
            "together, and speeds compare the servers too"
        )
    elif all(families) and families[0] != families[1]:
        problems.append(
            f"unequal baselines: url is served by {mine}, the baseline by {other}: other arithmetic, other "
            "speed; speculation is judged against the same server without it"
        )
    elif mine != other and all(families):
        warnings.append(f"other versions of the server: url is {mine}, the baseline {other}")
    prompts = _prompt_tokens(rows)
    vocabulary = 1 + max((token for prompt in prompts for token in prompt), default=0)
    lively = [
        row["emitted"]
        for row in rows
        if row["side"] == "url" and row["at"] == "alone" and row.get("emitted") and row["token_ids"]
        if len(set(row["token_ids"][len(row["token_ids"]) // 2 :])) > 2
    ]
    problems += [one for one in (random_tokens(prompts, vocabulary), forced_acceptance(lively)) if one]
    looked = ["the kind of server"] if all(families) else []
    known = [row for row in rows if row.get("prompt_tokens") is not None]
    both = {row["side"] for row in known} == {"url", "baseline"}
    looked += ["tokens of the prompts on both sides"] if both else []
    looked += ["random prompts"] if prompts else []
    looked += ["forced acceptance"] if lively else []
    told = "; ".join(looked) or "nothing: neither server tells"
    verdict, summary = Verdict.MEASURED, f"nothing speaks against it; seen: {told}"
    if doubts := [*([_ONE_SERVER] if one_server else []), *_kept_answers(rows)]:
        verdict, summary = Verdict.INCONCLUSIVE, "; ".join(doubts)
    if problems:
        verdict, summary = Verdict.ERROR, f"refused as evidence: {'; '.join(problems)}"
    return Check(
        "evidence",
        verdict,
        summary,
        required=bool(problems or doubts),
        n=len({row["request_id"] for row in rows}),
        n_unit="prompts",
        how="what the servers say they are, tokens of prompts and of each event; see docs/endpoints.md",
        warnings=tuple(warnings),
        evidence={"problems": problems, "servers": dict(servers), "seen": looked},
    )


def _family(server: str) -> str:
    """The engine behind it, as far as rounding is concerned; "" where it is not known. trtspec's own OpenAI
    front is a client of Triton; Triton and trtllm-serve both may run TensorRT-LLM."""
    name = server.partition(" ")[0].lower()
    return {"vllm": "vllm", "sglang": "sglang"}.get(
        name, "triton" if name in ("triton", "trtspec", "tensorrt_llm") else ""
    )


def _unequal_prompts(rows: Sequence[Row]) -> list[str]:
    """Prompts that became other tokens on the two sides."""
    seen: dict[str, dict[str, Row]] = {"url": {}, "baseline": {}}
    for row in rows:
        if row.get("prompt_tokens") is not None:
            seen[row["side"]].setdefault(str(row["request_id"]), row)
    other = []
    for key in [key for key in seen["url"] if key in seen["baseline"]]:
        mine, theirs = seen["url"][key], seen["baseline"][key]
        ids = [row.get("prompt_token_ids") for row in (mine, theirs)]
        if mine["prompt_tokens"] != theirs["prompt_tokens"]:
            other.append(f"{key}: {mine['prompt_tokens']} tokens against {theirs['prompt_tokens']}")
        elif all(ids) and ids[0] != ids[1]:
            other.append(f"{key}: as many, other ones")
    if not other:
        return []
    return [
        f"unequal baselines: {len(other)} prompts are other tokens on both sides ({other[0]}): another chat "
        "template, tokenizer or model"
    ]


def _kept_answers(rows: Sequence[Row]) -> list[str]:
    """One side that answers what it was asked before much faster, as the other does not: it keeps answers, or
    what it made of them, and its speed is that of a memory."""
    first = {side: dict[str, float]() for side in ("url", "baseline")}
    again = {side: dict[str, list[float]]() for side in first}
    for row in rows:
        if row["error"] or row["at"] == "timed":  # those prompts are asked once
            continue
        key, seconds, side = str(row["request_id"]), max(row["seconds"], 1e-6), row["side"]
        if (row["at"], row["round"]) == ("alone", 0):
            first[side].setdefault(key, seconds)
        else:
            again[side].setdefault(key, []).append(seconds)
    both = [
        key for key in first["url"] if all(key in found[side] for found in (first, again) for side in first)
    ]
    if len(both) < _FEWEST_AGAIN:
        return []
    # Seconds, not factors: prefixes that both keep save both as many, which is more of a faster one's time.
    saved = {side: {key: first[side][key] - median(again[side][key]) for key in both} for side in first}
    for mine, theirs in (("url", "baseline"), ("baseline", "url")):
        faster = [
            key for key in both if saved[mine][key] - max(0.0, saved[theirs][key]) > 0.5 * first[mine][key]
        ]
        if len(faster) < 0.8 * len(both):
            continue
        middle = {side: median(first[side][key] / median(again[side][key]) for key in both) for side in first}
        return [
            f"asked again, {mine} answers {middle[mine]:.1f} times as fast as at first, {theirs} "
            f"{middle[theirs]:.1f} times: it keeps answers or prompts, or first had to warm up, and the "
            "speedup is of that; turn it off on both, or ask once more"
        ]
    return []


def _prompt_tokens(rows: Sequence[Row]) -> list[list[int]]:
    """Of each prompt its tokens, without those with which all begin or end: templates repeat."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row.get("prompt_token_ids"):
            found.setdefault(str(row["request_id"]), list(row["prompt_token_ids"]))
    prompts = list(found.values())
    if len(prompts) < 2:
        return prompts
    start = shared_start(prompts)
    cut = [prompt[start:] for prompt in prompts]
    end = shared_start([prompt[::-1] for prompt in cut])
    return [prompt[: len(prompt) - end] for prompt in cut]
