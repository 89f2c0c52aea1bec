"""Text that is no answer: nothing, one token over and over, or a loop. Looked for in every answer.

A quantization that went wrong (scales of 1.0, an overflowing KV cache) often shows here first, and a
benchmark that only counts right answers does not tell why they are wrong. Small models also loop by
themselves under greedy decoding, so what counts is a *new* fault: the answer is degenerate, that of the
baseline to the same prompt is not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trtspec.verify.gates import Check, Verdict
from trtspec.verify.noninferiority import BASELINE, judge_pairs, mcnemar
from trtspec.verify.records import Records, Row

MIN_RUN = 8
"""Repetitions of one token that no sentence needs."""
MIN_LOOP = 16
"""Tokens that a loop must fill, three times around at least."""
_PIECE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w{1,4}|[^\w\s]")
NEW_FAULTS_P = 0.01
"""Without a gate, one-sided exact McNemar test: more new faults than chance gives are a FAIL."""


def pieces(text: str) -> list[str]:
    """What stands for the tokens of an answer of which only the text is known: characters of scripts without
    spaces, marks, and words in parts of up to four letters."""
    return _PIECE.findall(text)


def degeneration(tokens: Sequence[object], stop_tokens: Iterable[object] = ()) -> str:
    """What is wrong with an answer (token ids, or :func:`pieces`): "empty", "one token", "loop", or "" if
    nothing is.

    *one token*: at least :data:`MIN_RUN` times in a row, and that is half of the answer or more. *loop*: the
    answer ends in at least three rounds of the same tokens, which fill half of it and :data:`MIN_LOOP`
    tokens or more. Stop tokens at the end do not count.
    """
    stops = frozenset(stop_tokens)
    length = len(tokens)
    while length and tokens[length - 1] in stops:
        length -= 1
    if not length:
        return "empty"
    run = longest = 1
    for before, token in itertools.pairwise(tokens[:length]):
        run = run + 1 if token == before else 1
        longest = max(longest, run)
    if longest >= MIN_RUN and 2 * longest >= length:
        return "one token"
    for period in range(2, length // 3 + 1):
        filled = period
        while filled < length and tokens[length - 1 - filled] == tokens[length - 1 - filled + period]:
            filled += 1
        if filled >= max(3 * period, MIN_LOOP) and 2 * filled >= length:
            return "loop"
    return ""


def degenerate_rows(
    stage: str,
    ids: Sequence[str],
    target: Sequence[Sequence[int]],
    baseline: Sequence[Sequence[int]],
    stop_tokens: Iterable[int],
) -> list[Row]:
    """A row for each pair of answers (token ids): what is wrong with either."""
    stops = frozenset(stop_tokens)
    return [
        {
            "stage": stage,
            "id": name,
            "target": degeneration(mine, stops),
            "baseline": degeneration(theirs, stops),
            "tokens": list(mine),
        }
        for name, mine, theirs in zip(ids, target, baseline, strict=True)
    ]


def judge_degenerate(rows: Sequence[Row], *, margin: float | None, over: str = BASELINE) -> Check:
    """The verdict on :func:`degenerate_rows`. ``margin``: the recipe's gates.max_degenerate_rise;
    ``over``: the baseline's name.

    Without one, more new faults than chance explains still are a FAIL: an engine that writes no text is at
    fault whatever the gates ask.
    """
    name = "degenerate_text"
    bad = [row for row in rows if row["target"]]
    new = [row for row in bad if not row["baseline"]]
    cured = sum(1 for row in rows if row["baseline"] and not row["target"])
    records = Records("degenerate", {"margin": margin, "over": over}, {"answers": rows})
    kinds = {kind: sum(row["target"] == kind for row in rows) for kind in ("empty", "one token", "loop")}
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "none degenerate"
    details = tuple(f"{row['stage']}: {row['id']}: {row['target']}" for row in new[:10])
    check = judge_pairs(
        name,
        "answers that are text (not empty, one token or a loop)",
        [float(not row["target"]) for row in rows],
        [float(not row["baseline"]) for row in rows],
        margin=margin,
        over=over,
        how=(
            f"every generated answer; one token: {MIN_RUN} times in a row and half the answer; loop: "
            f"three rounds at its end, {MIN_LOOP} tokens and half the answer"
        ),
        evidence={"degenerate": len(bad), "new": len(new), "kinds": kinds},
        records=records,
        details=details,
    )
    check = replace(check, summary=f"{check.summary}; {counted}")
    chance = mcnemar(len(new), cured) / 2
    if margin is None and len(new) > cured and chance <= NEW_FAULTS_P:
        text = (
            f"{len(new)} of {len(rows)} answers are degenerate where the baseline's are not ({counted}; by "
            f"chance p = {chance:.2g}): look at the scales of weights and KV cache"
        )
        return replace(check, verdict=Verdict.FAIL, required=True, summary=text)
    return check
