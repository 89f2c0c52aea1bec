"""The matrix of formats and drafters, judged from its records: no engine, so a bundle can be judged again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtspec.recipe import Gates, Recipe
from trtspec.recipe_facts import fidelity
from trtspec.ruler import acceptance_length
from trtspec.stats import Interval, mean_difference_ratio, rate_upper_bound, times_faster
from trtspec.verify import quality
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.load import Race, check_speed, race_from, too_fast
from trtspec.verify.lossless import compare
from trtspec.verify.records import Records, Row, answers_from

FORMATS = ("BF16", "FP8", "W4A16", "W4A16+KV8")
EXTRA = "KV8"
"""Not a row: what the 8-bit cache costs alone."""
DRAFTERS = ("none", "ngram", "lookahead", "draft_model", "medusa", "eagle")


@dataclass(frozen=True)
class Matrix:
    """``skipped``: "FORMAT" or "FORMAT DRAFTER" -> why. ``answers``: (float64) a row an answer; ``tokens``:
    a row a scored token; ``runs``: a row a timed answer, each with its ``format``."""

    answers: tuple[Row, ...]
    tokens: tuple[Row, ...]
    runs: tuple[Row, ...]
    skipped: Mapping[str, str]


def own_cell(recipe: Recipe) -> str:
    """The cell that is the recipe's own, "FORMAT DRAFTER"; "" if it is none of them."""
    kind, cache = recipe.quantization.kind, recipe.quantization.kv_cache
    formats = {
        ("none", False): "BF16",
        ("fp8", False): "FP8",
        ("w4a16_awq", False): "W4A16",
        ("w4a16_awq", True): "W4A16+KV8",
    }
    name = formats.get((kind, cache != "none"))
    drafter = "eagle" if recipe.speculation.kind == "eagle3" else recipe.speculation.kind
    return f"{name} {drafter}" if name else ""


def check_matrix(matrix: Matrix, recipe: Recipe, formats: Sequence[str] = FORMATS) -> list[Check]:
    """The checks of a matrix that was measured."""
    return judge_matrix(
        matrix.answers,
        matrix.tokens,
        matrix.runs,
        skipped=dict(matrix.skipped),
        formats=list(formats),
        **asked_of_matrix(recipe),
    )


def asked_of_matrix(recipe: Recipe) -> dict[str, Any]:
    """The arguments of :func:`judge_matrix` that follow from the recipe."""
    given, unset = (gates.model_dump(mode="json") for gates in (recipe.gates, Gates()))
    judged = ("lossless", "max_perplexity_ratio", "min_speedup")
    return {
        "own": own_cell(recipe),
        "label": fidelity(recipe),
        "max_perplexity_ratio": recipe.gates.max_perplexity_ratio,
        "min_speedup": recipe.gates.min_speedup,
        "unasked": [name for name in given if name not in judged and given[name] != unset[name]],
    }


def judge_matrix(
    answers: Sequence[Row],
    tokens: Sequence[Row],
    runs: Sequence[Row],
    *,
    skipped: Mapping[str, str],
    formats: Sequence[str],
    own: str,
    label: str,
    max_perplexity_ratio: float | None,
    min_speedup: float | None,
    unasked: Sequence[str] | None = None,
) -> list[Check]:
    """A check for the whole, one for the interaction, one for each cell. Required: the whole (no cell that
    drafts changes a greedy answer) and ``own``, the recipe's cell, which its gates are about; where no cell
    is its own, or it has gates that no cell answers (``unasked``; None: not told), that is a required check
    that was skipped."""
    arguments: dict[str, Any] = {
        "skipped": dict(skipped),
        "formats": list(formats),
        "own": own,
        "label": label,
        "max_perplexity_ratio": max_perplexity_ratio,
        "min_speedup": min_speedup,
        **({} if unasked is None else {"unasked": list(unasked)}),
    }
    records = Records(
        "matrix", arguments, {"answers": list(answers), "tokens": list(tokens), "runs": list(runs)}
    )
    scores = _scores(tokens)
    cells: list[Check] = []
    table: list[list[dict[str, Any] | None]] = []
    for name in formats:
        row: list[dict[str, Any] | None] = []
        for drafter in DRAFTERS:
            cell = f"{name} {drafter}"
            reason = skipped.get(name, skipped.get(cell, ""))
            check = (
                Check(f"cell {cell}", Verdict.SKIPPED, reason, required=cell == own)
                if reason
                else _cell(name, drafter, answers, scores, runs, arguments)
            )
            cells.append(check)
            row.append({"verdict": check.verdict.value, "speedup": check.evidence.get("speedup_over_bf16")})
        table.append(row)
    checks = [
        _whole(cells, table, formats, scores),
        *_left_open(own in [check.name.removeprefix("cell ") for check in cells], unasked),
        *_interaction(scores, skipped),
        *cells,
    ]
    return [replace(check, records=records) for check in checks]


def _left_open(has_own: bool, unasked: Sequence[str] | None) -> list[Check]:
    """Gates of the recipe that nothing here answers: what was not judged is not passed."""
    if unasked is None or (has_own and not unasked):
        return []
    reason = (
        f"not judged here: {', '.join(unasked)}; trtspec verify ENGINE judges them"
        if has_own
        else "no cell has the recipe's own format and drafter, so its gates are not judged here; "
        "trtspec verify ENGINE judges them"
    )
    return [Check("gates", Verdict.SKIPPED, reason, required=True)]


def _scores(tokens: Sequence[Row]) -> dict[str, list[list[float]]]:
    scores: dict[str, list[list[float]]] = {}
    for row in tokens:
        texts = scores.setdefault(row["format"], [])
        if row["text"] == len(texts):
            texts.append([])
        texts[row["text"]].append(row["logprob"])
    return scores


def _cell(
    name: str,
    drafter: str,
    answers: Sequence[Row],
    scores: Mapping[str, list[list[float]]],
    runs: Sequence[Row],
    arguments: Mapping[str, Any],
) -> Check:
    verdicts: list[Verdict] = []
    parts: list[str] = []
    evidence: dict[str, Any] = {"format": name, "drafter": drafter, "label": "lossless"}
    mine, plain = (
        [row for row in answers if (row["format"], row["drafter"]) == (name, one)]
        for one in (drafter, "none")
    )
    if drafter != "none":
        found = compare(answers_from(plain), answers_from(mine))
        told = [line for row in mine for line in row["contradictions"]]
        positions, different = found.positions, len(found.divergences)
        drafted = sum(row["drafted"] for row in mine)
        evidence["lossless"] = {"tokens": positions, "different": different, "drafted": drafted}
        verdicts.append(Verdict.ERROR if told else Verdict.FAIL if different else Verdict.PASS)
        parts.append(
            told[0]
            if told
            else f"NOT lossless: {different} of {len(mine)} answers differ in float64"
            if different
            else f"lossless in float64 ({positions} tokens, {drafted} drafted; mismatch rate below "
            f"{rate_upper_bound(0, positions):.1%})"
        )
        if arguments["label"] == "approximate":
            evidence["label"] = "greedy: lossless; sampled: approximate"
    if name != "BF16":
        bound = arguments["max_perplexity_ratio"]
        kept = quality.judge(scores[name], scores["BF16"], bound=bound, source="held-out texts")
        evidence["perplexity_ratio"] = kept.measured
        if kept.interval is not None:
            evidence["perplexity_ratio_interval"] = list(kept.interval)
        verdicts.append(kept.verdict)
        parts.append(_ratio(kept) if kept.measured else kept.summary)
    rows = [row for row in runs if row["format"] == name]
    told = [line for row in rows for line in row["contradictions"]]
    result = race_from(rows, list(dict.fromkeys(told)))
    contender = "no_speculation" if drafter == "none" else drafter
    baseline = "no_speculation" if name == "BF16" else "baseline"
    speed = None
    evidence["tokens_per_s"] = result.tokens_per_s(contender)
    if drafter != "none":
        speed = check_speed(
            result,
            check_name="speedup",
            name=contender,
            over="no_speculation",
            bound=arguments["min_speedup"],
        )
        timed = [one[0].answers[0] for one in result.runs[contender]]
        evidence["acceptance_length"] = length = acceptance_length(timed)
        offered = sum(one.drafted for one in timed)
        if offered:
            evidence["acceptance_rate"] = rate = sum(one.accepted for one in timed) / offered
            parts.append(f"{rate:.1%} of the drafts accepted, {length:.2f} tokens a step")
        evidence["speedup"] = speed.measured
        verdicts.append(speed.verdict)
        low, high = speed.interval or (float("nan"), float("nan"))
        parts.append(
            f"speedup {speed.measured:.2f} ({low:.2f} to {high:.2f})" if speed.measured else speed.summary
        )
    over: float | None = None
    interval: Interval | None = None
    if not result.contradictions and (speed is None or speed.verdict is not Verdict.ERROR):
        if contender == baseline:
            over = 1.0
        else:
            over, interval = times_faster(result.seconds(contender), result.seconds(baseline))
        known = interval is not None and all(map(math.isfinite, interval))
        between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if known and interval is not None else ""
        parts.append(f"{over:.2f} times BF16 without drafts{between}")
    evidence["speedup_over_bf16"] = over  # None: the times are no evidence
    order = (Verdict.ERROR, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    verdict = next((one for one in order if one in verdicts), Verdict.MEASURED)
    # A busy machine makes times contradict themselves; that is no fault of the cell unless its gate asks.
    asked = arguments["min_speedup"] is not None and f"{name} {drafter}" == arguments["own"]
    if verdict is Verdict.ERROR and speed is not None and not asked and verdicts[-1] is Verdict.ERROR:
        rest = [one for one in verdicts[:-1] if one is not Verdict.ERROR]
        verdict = next((one for one in order if one in rest), Verdict.MEASURED)
    return Check(
        f"cell {name} {drafter}",
        verdict,
        "; ".join(parts),
        required=f"{name} {drafter}" == arguments["own"],
        measured=over,
        interval=interval,
        unit="times BF16",
        warnings=_doubts(result),
        n=len(result.runs[contender]),
        n_unit="prompts",
        how="greedy answers in float64 against the same weights without drafts; perplexity against BF16, "
        "paired by text; one request at a time, the format's drafters and BF16 in turn",
        evidence=evidence,
    )


def _ratio(kept: Check) -> str:
    """The perplexity ratio of a cell, its interval, and what its gate says of it."""
    inside = []
    if kept.interval is not None and all(map(math.isfinite, kept.interval)):
        inside.append(f"{kept.interval[0]:.3f} to {kept.interval[1]:.3f}")
    if kept.bound is not None:
        inside.append(f"at most {kept.bound:g}: {kept.verdict.value}")
    return f"perplexity ratio {kept.measured:.3f}" + (f" ({', '.join(inside)})" if inside else "")


def _doubts(result: Race) -> tuple[str, ...]:
    """A race in which one contender was faster than can be has slowed down what all are compared with."""
    drafted = [one for one in result.runs if one not in ("no_speculation", "baseline")]
    busy = [one for one in drafted if too_fast(result, one)]
    if not busy:
        return ()
    return (
        f"times of {', '.join(busy)} in this race are shorter than can be (machine busy?), so none of its "
        "times says much",
    )


def _whole(
    cells: Sequence[Check],
    table: Sequence[Sequence[Mapping[str, Any] | None]],
    formats: Sequence[str],
    scores: Mapping[str, Any],
) -> Check:
    ran = [one for one in cells if one.verdict is not Verdict.SKIPPED]
    broken = [one.name for one in ran if (one.evidence.get("lossless") or {}).get("different")]
    wrong = [one.name for one in ran if one.verdict is Verdict.ERROR]
    timed = [one for one in ran if one.measured is not None and one.name.split()[1:] != ["BF16", "none"]]
    shown = [one for one in timed if one.interval is not None and one.interval[0] > 1]
    fastest = max(shown or timed, key=lambda one: one.measured or 0.0, default=None)
    verdict = Verdict.FAIL if broken else Verdict.ERROR if wrong else Verdict.PASS if ran else Verdict.SKIPPED
    text = f"{len(ran)} of {len(cells)} cells ran"
    if broken:
        text += f"; NOT lossless: {', '.join(broken)}"
    elif ran:
        text += "; every one that drafts gives the greedy answers of its weights"
    if fastest is not None and fastest.measured:
        which = fastest.name.removeprefix("cell ")
        times = f"{fastest.measured:.2f} times BF16"
        if fastest.interval is not None and all(map(math.isfinite, fastest.interval)):
            times += f", {fastest.interval[0]:.2f} to {fastest.interval[1]:.2f}"
        first = "fastest" if shown else "no cell is shown to be faster than BF16, nearest"
        text += f"; {first}: {which} ({times})"
    together = {"BF16", "W4A16", EXTRA, "W4A16+KV8"} <= set(scores)
    evidence = {
        "matrix": {"rows": list(formats), "columns": list(DRAFTERS), "cells": [list(row) for row in table]},
        # Every race holds the same weights without drafts and BF16, in turn.
        "pitfalls": [
            *(["wrong-baseline"] if ran else []),
            *(["alpha-without-tau"] if any("acceptance_rate" in one.evidence for one in ran) else []),
            *(["untested-together"] if ran and together else []),
        ],
    }
    return Check("matrix", verdict, text, required=True, n=len(ran), n_unit="cells", evidence=evidence)


def _interaction(scores: Mapping[str, list[list[float]]], skipped: Mapping[str, str]) -> list[Check]:
    """Whether 4-bit weights and the 8-bit cache together lose more than the sum of what each loses."""
    name = "interaction_w4a16_kv8"
    needed = ("BF16", "W4A16", EXTRA, "W4A16+KV8")
    absent = [one for one in needed if one not in scores]
    if absent:
        reason = f"{absent[0]} was not measured: {skipped.get(absent[0], 'not asked for')}"
        return [Check(name, Verdict.SKIPPED, reason, required=False)]
    base, weights, cache, both = (scores[one] for one in needed)
    excess = [
        [w + k - b - t for b, w, k, t in zip(*texts, strict=True)]
        for texts in zip(base, weights, cache, both, strict=True)
    ]
    ratio, interval = mean_difference_ratio(excess)
    word = (
        "lose more than"
        if interval[0] > 1
        else "lose less than"
        if interval[1] < 1
        else "are not shown to lose other than"
    )
    text = (
        f"W4A16 and KV8 together {word} the sum of both: perplexity {ratio:.4f} times what their "
        f"factors multiply to (95 % interval {interval[0]:.4f} to {interval[1]:.4f})"
    )
    return [
        Check(
            name,
            Verdict.MEASURED,
            text,
            required=False,
            measured=ratio,
            interval=interval,
            n=len(excess),
            n_unit="texts",
            how="log-probabilities of the same tokens under BF16, each alone, both; bootstrap over texts",
            evidence={"excess_nats": sum(map(sum, excess)) / sum(map(len, excess))},
        )
    ]
