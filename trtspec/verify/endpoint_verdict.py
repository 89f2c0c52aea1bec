"""What two endpoints showed, judged from rows, one a reply: no network, so a bundle can be judged again.

A row: side (url, baseline), at (alone, load, timed), round, request_id, seconds, pieces, tokens, error, text,
token_ids, finish_reason, drafted, accepted, tokens_per_step. See ``docs/endpoints.md`` for the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtspec.stats import least_of_pairs, rate_upper_bound, times_faster
from trtspec.verify.endpoint_acceptance import (
    DRAFTS_NOTHING,
    judge_acceptance,
    judge_comparable,
    judge_plain_baseline,
)
from trtspec.verify.endpoint_load import judge_throughput
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.load import CLOCK_SLACK
from trtspec.verify.power import SUITE_ALPHA
from trtspec.verify.records import Records, Row

ALPHA, PARAMETERS_ALPHA = 0.4 * SUITE_ALPHA, 0.2 * SUITE_ALPHA
"""The chance by which a lossless endpoint may fail: by greedy answers and by sampled ones (each the first),
by the table of sampling parameters."""
_NO_TIE_NATS = 3.0
"""16-bit arithmetic with an 8-bit cache was seen to move scores by up to 0.9 nat."""
_LEAST_NATS, _TIMES_THE_FLOOR, _KNOWN_FLOOR = 1.0, 4.0, 3
"""Where the baseline's own answers part in so many places, what is wider than so many times the widest of
these, and than one nat, is no rounding either."""
_DOUBT = 0.05
"""p-value of differences under load alone from which a server counts as identical: less is not decided."""
SIDES = ("url", "baseline")


def judge_endpoints(
    rows: Sequence[Row],
    *,
    margins: Sequence[Row] = (),
    load: str,
    max_new_tokens: int,
    draft_tokens: int | None,
    min_speedup: float | None,
    counters: Mapping[str, Mapping[str, float] | None],
    acceptance: str = "strict",
    servers: Mapping[str, str] | None = None,
    other_weights: bool = False,
    one_server: bool = False,
    timed: Mapping[str, Sequence[Row]] | None = None,
    concurrency: int | None = None,
    min_tokens_per_s: float | None = None,
    min_speedup_under_load: float | None = None,
) -> list[Check]:
    """Identity, token counter, acceptance, speedup and throughput of two endpoints. ``acceptance``: strict,
    typical, relaxed or skipped, as url's owner says; ``other_weights``: the baseline serves others
    (16-bit ones, say), so that neither identity is claimed nor tokens a step bound the speedup.
    ``counters``: by how much vLLM's draft counters grew on each side, None where it shows none.
    ``margins``: of prompts with other answers the baseline's tokens and the gap between its two best,
    ``request_id, token, nats`` a row. ``servers``: what each side says it is; ``one_server``: both are one
    place and model. ``timed``: requests of each
    side's load, in ``concurrency`` at a time (None: at a rate)."""
    gates = {"min_tokens_per_s": min_tokens_per_s, "min_speedup_under_load": min_speedup_under_load}
    records = Records(
        "endpoints",
        {
            "load": load,
            "max_new_tokens": max_new_tokens,
            "draft_tokens": draft_tokens,
            "min_speedup": min_speedup,
            "counters": counters,
            "acceptance": acceptance,
            "servers": servers,
            "other_weights": other_weights,
            "one_server": one_server,
            "concurrency": concurrency,
            **gates,
        },
        {
            "replies": list(rows),
            "margins": list(margins),
            **{f"load_{side}": list(found) for side, found in (timed or {}).items()},
        },
    )
    accepted = judge_acceptance(rows, counters.get("url"), draft_tokens)
    length = accepted.measured if accepted.verdict is Verdict.MEASURED else None
    checks = [
        _claimed(_drafting(_identity(rows, margins), accepted), acceptance, other_weights),
        _counter(rows, max_new_tokens),
        judge_comparable(rows, servers or {}, one_server, other_weights),
        skipped("baseline_without_speculation", "the baseline serves other weights: its speed is its own")
        if other_weights
        else judge_plain_baseline(rows, counters.get("baseline")),
        accepted,
        _speedup(rows, min_speedup, None if other_weights else length),
    ]
    if timed:
        length = None if other_weights else length
        checks += judge_throughput(timed, load=load, concurrency=concurrency, length=length, **gates)
    return [replace(check, records=records) for check in checks]


def _drafting(check: Check, accepted: Check) -> Check:
    """What is identical where nothing was drafted shows nothing of drafting."""
    none = accepted.summary == DRAFTS_NOTHING or (accepted.measured is not None and accepted.measured <= 1)
    if check.verdict is not Verdict.PASS or not none:
        return check
    text = "but url drafts nothing, so this shows nothing of speculation (is it turned on there?)"
    return replace(check, verdict=Verdict.INCONCLUSIVE, summary=f"{check.summary}; {text}")


def _claimed(check: Check, acceptance: str, other_weights: bool) -> Check:
    """``check`` of greedy answers, as far as ``acceptance`` promises them: an approximate one is never
    lossless, and a relaxed one may differ at temperature 0 too, as other weights do."""
    if acceptance == "strict" and not other_weights:
        return check
    if (acceptance == "typical" and not other_weights) or check.verdict is Verdict.ERROR:
        return replace(check, name="greedy")
    reason = "other weights" if other_weights else f"{acceptance} acceptance"
    summary = f"not claimed ({reason}): {check.summary}"
    return replace(check, name="greedy", verdict=Verdict.MEASURED, summary=summary, required=False)


def answers_of(rows: Sequence[Row], side: str, at: str, number: int = 0) -> dict[str, Row]:
    """The first reply to each prompt."""
    found: dict[str, Row] = {}
    for row in rows:
        if (row["side"], row["at"], row["round"]) == (side, at, number):
            found.setdefault(str(row["request_id"]), row)
    return found


def same_answer(left: Row, right: Row) -> bool:
    """By token ids where both show them."""
    same = _same_ids(left, right)
    return bool(left["text"] == right["text"]) if same is None else same and not _contradict(left, right)


def _same_ids(left: Row, right: Row) -> bool | None:
    """None where one side shows none."""
    ids = left["token_ids"], right["token_ids"]
    return None if None in ids else bool(ids[0] == ids[1])


def _contradict(left: Row, right: Row) -> bool:
    """Whether the same ids come with other texts: those of one side are not its answer's. A character that
    the token limit cuts may end one text and not the other."""
    texts = [row["text"].rstrip("\ufffd") for row in (left, right)]
    return bool(_same_ids(left, right)) and texts[0] != texts[1]


def _margin_at(row: Row, whole: Row, margins: Sequence[Row]) -> float | None:
    """The margin where ``row`` parts from the reference; None where it is not known."""
    mine = [one for one in margins if one["request_id"] == whole["request_id"]]
    ids = row["token_ids"], whole["token_ids"]
    if all(one.get("at") is not None for one in mine) and None not in ids:
        place = _parting(*ids)
        return next((float(one["nats"]) for one in mine if one["at"] == place), None)
    left, right = row["text"], whole["text"]
    at = _parting(left, right)
    passed = ""
    for one in mine:
        passed += one["token"]
        if not right.startswith(passed) and not passed.startswith(right):
            return None  # asked again, the baseline took another way
        if len(passed) > at:
            return float(one["nats"])
    return None


def _parting(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Where two sequences part: the first place with other items, or the end of the shorter one."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _good(row: Row | None) -> list[Row]:
    return [] if row is None or row["error"] else [row]


def _identity(rows: Sequence[Row], margins: Sequence[Row]) -> Check:
    name = "lossless"
    reference, other = answers_of(rows, "baseline", "alone"), answers_of(rows, "url", "alone")
    failed = [row for row in rows if row["error"]]
    answered = [key for key in reference if _good(reference[key]) and _good(other.get(key))]
    # Where both say nothing there is nothing to compare: a refusal, or content that this client cannot read.
    known = [
        key
        for key in answered
        if any(one[key]["text"] or one[key]["token_ids"] for one in (reference, other))
    ]
    how = (
        "greedy answers of both endpoints to the same prompts, one and several at a time; noise floor: "
        "prompts to which the baseline answers otherwise when asked again or under load; exact one-sided "
        "McNemar test"
    )
    if not known or all(not reference[key]["text"] for key in known):
        reason = f"no answers to compare: {failed[0]['error']}" if failed else "every answer is empty"
        return Check(name, Verdict.ERROR, reason, required=True, how=how)
    again = [answers_of(rows, "baseline", "alone", number) for number in range(1, _rounds(rows))]
    again += [answers_of(rows, "baseline", "load", number) for number in (0, 1)]
    floor_runs = {key: [row for run in again for row in _good(run.get(key))] for key in known}
    loaded = answers_of(rows, "url", "load")
    # As often as the baseline may differ from itself, and no more often: else noise would count twice.
    under_load = {
        key: row
        for key in known
        for row in _good(loaded.get(key))
        if len(floor_runs[key]) > 1 and not same_answer(row, reference[key])
    }
    noisy = {
        key for key, found in floor_runs.items() if any(not same_answer(row, reference[key]) for row in found)
    }
    different = [key for key in known if not same_answer(reference[key], other[key])]
    late = [key for key in under_load if key not in different]
    mine = {*different, *late}
    chance = _by_chance(len(mine - noisy), len(noisy - mine))
    contradicted = [
        f"{key}: {reference[key]['text'][:40]!r} and {row['text'][:40]!r}"
        for key in known
        for row in (other[key], *_good(loaded.get(key)), *floor_runs[key])
        if _contradict(row, reference[key])
    ]
    by_ids = all(_same_ids(reference[key], other[key]) is not None for key in known)
    what = "token by token" if by_ids else "by their text (a server shows no token ids)"
    early = [key for key in different if _is_cut(other[key], reference[key])]
    gaps = {key: _margin_at(other[key], reference[key], margins) for key in different}
    late_gaps = {key: _margin_at(row, reference[key], margins) for key, row in under_load.items()}
    floor_gaps = [
        gap
        for key, found in floor_runs.items()
        for row in found
        if not same_answer(row, reference[key])
        if (gap := _margin_at(row, reference[key], margins)) is not None
    ]
    details = [_told(key, reference[key], other[key], gaps[key]) for key in different[:10]]
    details += [
        f"under load: {_told(key, reference[key], under_load[key], late_gaps[key])}"
        for key in late[: 10 - len(details)]
    ]
    known_gaps = [gap for gap in gaps.values() if gap is not None]
    # Where the baseline itself leaves its best token as far behind, that is no sign of the other.
    least = max(_NO_TIE_NATS, max(floor_gaps, default=0.0))
    if len(floor_gaps) >= _KNOWN_FLOOR:
        least = max(_LEAST_NATS, _TIMES_THE_FLOOR * max(floor_gaps))
    wide = [gap for gap in (*gaps.values(), *late_gaps.values()) if gap is not None and gap > least]
    warnings = [f"{len(failed)} requests failed, {failed[0]['side']}: {failed[0]['error']}"] if failed else []
    if len(known) < len(answered):
        warnings.append(f"{len(answered) - len(known)} prompts left out: both answers are empty")
    unasked = [row for row in failed if row["at"] != "timed"]
    bound = rate_upper_bound(len(different), len(known))
    evidence = {
        "prompts": len(known),
        "different": len(different),
        "floor": len(noisy),
        "by_chance": chance,
        "end_early": len(early),
        "different_under_load": len(under_load),
        "mismatch_rate_upper_bound": bound,
        "compared": "token ids" if by_ids else "text",
        "margins_nats": known_gaps,
        "floor_margins_nats": floor_gaps,
    }
    floor = f"the baseline differs from itself on {len(noisy)}"
    loads = f"; under load {len(late)} more differ" if late else ""
    differ = f"{len(different)} of {len(known)} answers differ {what}"
    more = f"ask more prompts ({max(2 * len(known), 7)})"
    meant = (
        "; other weights on purpose: --other-weights; a server's own defaults (generation_config.json, "
        "penalties) must be alike"
    )
    if contradicted:
        verdict = Verdict.ERROR
        summary = (
            f"the same token ids stand for other texts in {len(contradicted)} answers: they are not those of "
            f"the answers, or one server does not spell as the other ({contradicted[0]})"
        )
    elif wide:
        verdict = Verdict.FAIL
        summary = (
            f"{differ}, {len(wide)} where the baseline's "
            f"best token leads by up to {max(wide):.1f} nat: no rounding does that; {floor}"
            + (f", up to {max(floor_gaps):.2g} nat apart" if floor_gaps else "")
            + f"{loads}{meant}"
        )
    elif (
        different
        and chance >= ALPHA
        and len(known_gaps) == len(different)
        and max(known_gaps) <= min(max(floor_gaps, default=-1.0), _NO_TIE_NATS)
    ):
        verdict = Verdict.PASS
        summary = (
            f"numeric ties only: {differ}, where the two "
            f"best tokens are at most {max(known_gaps):.2g} nat apart; {floor}, up to "
            f"{max(floor_gaps):.2g} nat apart{loads}"
        )
    elif chance < ALPHA or len(early) >= max(3, len(different) / 2):
        verdict = Verdict.FAIL
        summary = f"{differ}; {floor}{loads}"
        summary += f"; by chance: {chance:.2g}" if chance < ALPHA else ""
        summary += f"; {len(early)} end early" if early else ""
        summary += meant
    elif not different and chance >= _DOUBT:
        verdict = Verdict.PASS
        rate = f"mismatch rate below {bound:.1%} (95 %)"
        summary = f"identical on {len(known)} prompts {what}; {rate}; {floor}{loads}"
        if len({reference[key]["text"] for key in known}) == 1 < len(known):
            verdict = Verdict.INCONCLUSIVE
            summary = (
                f"all {len(known)} prompts get one and the same answer, which shows no more than one prompt "
                "does; ask others, or look what serves there"
            )
    elif not different:
        verdict = Verdict.INCONCLUSIVE
        summary = f"identical on {len(known)} prompts {what}; {floor}{loads}; by chance: {chance:.2g}; {more}"
    else:
        verdict = Verdict.INCONCLUSIVE
        why = "Without log-probabilities a near tie looks like a fault, however many prompts are asked"
        if len(known_gaps) < len(different):
            more = "serve where they are told (vLLM)"
        else:
            own = f"part at up to {max(floor_gaps):.2g} nat" if floor_gaps else "did not part"
            why = f"They part at margins of up to {max(known_gaps):.2g} nat; the baseline's own answers {own}"
        summary = f"{differ}; {floor}{loads}. {why}; {more}, or verify the engine's folder"
    if unasked and verdict is Verdict.PASS:
        verdict = Verdict.INCONCLUSIVE
        summary = (
            f"{len(unasked)} requests failed of those that are compared ({unasked[0]['side']}: "
            f"{unasked[0]['error']}); else {summary}"
        )
    return Check(
        name,
        verdict,
        summary,
        required=True,
        n=len(known),
        n_unit="prompts",
        how=how,
        warnings=tuple(warnings),
        evidence=evidence,
        details=tuple(details),
    )


def _by_chance(mine: int, floor: int) -> float:
    """P(at least ``mine`` of the discordant prompts are mine), by noise (McNemar 1947, exact)."""
    total = mine + floor
    return float(sum(math.comb(total, k) for k in range(mine, total + 1)) / 2**total)


def _rounds(rows: Sequence[Row]) -> int:
    return 1 + max((row["round"] for row in rows if row["at"] == "alone"), default=0)


def _is_cut(row: Row, whole: Row) -> bool:
    return len(row["text"]) < len(whole["text"]) and whole["text"].startswith(row["text"])


def _told(key: str, reference: Row, other: Row, gap: float | None) -> str:
    left, right = (one["token_ids"] for one in (reference, other))
    if left is None or right is None:
        left, right = reference["text"], other["text"]
    at = _parting(left, right)
    unit = "character" if isinstance(left, str) else "token"
    told = "" if gap is None else f", top-2 margin {gap:.2g}"
    return f"{key}: {unit} {at}: baseline {left[at : at + 12]!r}, url {right[at : at + 12]!r}{told}"


def _counter(rows: Sequence[Row], max_new_tokens: int) -> Check:
    """Whether both sides count tokens alike: a counter that runs ahead looks like speed."""
    name, wrong = "token_counter", []
    counted = [row for row in rows if row["tokens"] is not None and not row["error"]]
    if not counted:
        return skipped(name, "neither endpoint says how many tokens it sent")
    for row in counted:
        where = f"{row['side']}: {row['request_id']}"
        if row["token_ids"] is not None and row["tokens"] != len(row["token_ids"]):
            wrong.append(f"{where}: {row['tokens']} tokens claimed, {len(row['token_ids'])} sent")
        if row["tokens"] > max_new_tokens:
            wrong.append(f"{where}: {row['tokens']} tokens claimed, {max_new_tokens} were asked for")
        if row["tokens"] < row["pieces"]:
            wrong.append(f"{where}: {row['tokens']} tokens claimed in {row['pieces']} pieces of text")
    by_side = {side: answers_of(counted, side, "alone") for side in SIDES}
    shared = [key for key in by_side["url"] if key in by_side["baseline"]]
    pairs = [(key, by_side["url"][key], by_side["baseline"][key]) for key in shared]
    equal = [(key, a, b) for key, a, b in pairs if a["text"] == b["text"] and a["text"]]
    wrong += [
        f"{key}: the same text is {a['tokens']} tokens at url, {b['tokens']} at the baseline"
        for key, a, b in equal
        if a["tokens"] != b["tokens"]
    ]
    evidence = {"counted": len(counted), "same_text_on_both": len(equal), "wrong": len(wrong)}
    if wrong:
        text = f"tokens are not counted alike: {wrong[0]}" + (
            f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        )
        return Check(
            name, Verdict.ERROR, text, required=True, n=len(counted), n_unit="requests", evidence=evidence
        )
    text = f"{len(counted)} counts hold; {len(equal)} texts that both sent have as many tokens on both sides"
    return Check(
        name, Verdict.MEASURED, text, required=False, n=len(counted), n_unit="requests", evidence=evidence
    )


def _speedup(rows: Sequence[Row], bound: float | None, length: float | None) -> Check:
    rounds = _rounds(rows)
    runs = {side: [answers_of(rows, side, "alone", number) for number in range(rounds)] for side in SIDES}
    kept, unequal = [], 0
    for key in runs["baseline"][0]:
        every = [runs[side][number].get(key) for side in SIDES for number in range(rounds)]
        good = [row for row in every if row is not None and not row["error"] and row["text"]]
        if len(good) < len(every):
            continue
        counted = all(row["tokens"] is not None for row in good)  # else on one side only
        sizes = {row["tokens"] if counted else row["text"] for row in good}
        if len(sizes) == 1:
            kept.append(key)
        else:
            unequal += 1
    required = bound is not None
    if len(kept) < 2 or unequal > len(kept):
        reason = (
            f"{unequal} prompts with answers of unequal length, {len(kept)} of equal, at least two needed"
        )
        if unequal > len(kept):
            reason = f"unequal work: {unequal} prompts with answers of unequal length, {len(kept)} of equal"
        if failed := [row for row in rows if row["at"] == "alone" and row["error"]]:
            reason += (
                f"; {len(failed)} requests failed, the first at {failed[0]['side']}: {failed[0]['error']}"
            )
        return skipped("speedup", reason, required)
    seconds = {
        side: [[runs[side][number][key]["seconds"] for number in range(rounds)] for key in kept]
        for side in SIDES
    }
    ratio, interval = times_faster(seconds["url"], seconds["baseline"])
    evidence: dict[str, Any] = {
        "seconds": seconds,
        "prompts": len(kept),
        "unequal": unequal,
        "rounds": rounds,
        "interleaved": True,
        "loads": ["1 at a time"],
        "acceptance_length": length,
    }
    how = (
        "seconds from request to last piece, one request at a time, both endpoints in turn; "
        "prompts to which all answers have the same length; 95 % paired bootstrap over prompts and rounds"
    )
    # Few prompts have a wide interval; what every single pair of runs shows is sure all the same.
    sure = max(interval[0], least_of_pairs(seconds["url"], seconds["baseline"]))
    if length is not None and sure > length * CLOCK_SLACK:
        text = (
            f"speedup {ratio:.2f} is more than {length:.2f} tokens a step can give: a step with drafts is no "
            "cheaper than one without; the baseline is slowed down, or weights or hardware differ"
        )
        return Check("speedup", Verdict.ERROR, text, required=required, how=how, evidence=evidence)
    lost = len(runs["baseline"][0]) - len(kept) - unequal
    warnings = [
        f"{count} prompts left out: {why}"
        for count, why in (
            (unequal, "answers of unequal length"),
            (lost, "requests failed or answers are empty"),
        )
        if count
    ]
    mine = [runs["url"][0][key] for key in kept]
    one_by_one = sum(row["tokens"] or math.inf for row in mine) <= 1.05 * sum(row["pieces"] for row in mine)
    if length is None and one_by_one and sure > CLOCK_SLACK:
        warnings.append(
            "url sends one token at a time: unless it takes its steps apart, it is not drafts that make it "
            "faster; compare weights, hardware and load of both sides"
        )
    return gated(
        name="speedup",
        what="one request at a time: speedup",
        measured=ratio,
        interval=interval,
        bound=bound,
        sense="at least",
        n=len(kept),
        n_unit="prompts",
        how=how,
        warnings=tuple(warnings),
        evidence=evidence,
    )
