"""Does the engine still find what it read long ago? The check of a quantized KV cache.

Perplexity of short texts hardly touches the cache. Here a sentence with a number of five digits stands in
prose of the project's own, at several depths of prompts of several lengths, and the prompt ends with the
beginning of the same sentence. An item counts as found if every token of the number is the most likely one,
teacher-forced: exactly then greedy decoding would write the number (same argument, position by position),
and one pass tells it. Judged paired against the 16-bit engine, which must itself find most of them, or the
comparison says nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trtspec.engine import Engine, Sampling
from trtspec.errors import InputError, Problem
from trtspec.prompts import HELDOUT_FILE, read_lines
from trtspec.text import Tokenizer
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.noninferiority import BASELINE, judge_pairs
from trtspec.verify.records import Records, Row

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where the needle stands, as a share of the prompt."""
FILLS = (0.25, 0.5, 0.95)
"""Length of the prompt, as a share of what the engine allows."""
MIN_BASELINE = 0.5
"""The baseline must find this share, or the check is INCONCLUSIVE."""
_AS_IS = Sampling(temperature=1.0)
_MIN_LENGTH = 64
_PLACES = (
    *("harbour", "bakery", "library", "museum", "station", "garden", "theatre", "market", "school"),
    *("castle", "mill", "bridge", "tower", "chapel", "orchard", "quarry", "brewery", "lighthouse"),
)


@dataclass(frozen=True)
class Haystack:
    """A prompt as text: it ends where ``number`` is to be written. ``length``: what was asked for, in
    tokens; ``question`` asks the same of a server that only answers chats."""

    id: str
    text: str
    number: str
    length: int
    depth: float
    question: str


@dataclass(frozen=True)
class Needle:
    """One prompt: ``tokens[first:]`` is the number to be found. ``length`` counts all tokens."""

    id: str
    tokens: tuple[int, ...]
    first: int
    depth: float

    @property
    def length(self) -> int:
        return len(self.tokens)


def needles(
    tokenizer: Tokenizer, *, longest: int, per_cell: int = 1, seed: int = 1, sentences: Sequence[str] = ()
) -> list[Needle]:
    """Prompts of up to ``longest`` tokens: every depth x length, ``per_cell`` of each.

    ``sentences``: what they hide in; default: the held-out texts that ship with trtspec. Raises InputError
    if ``longest`` is too short for the smallest.
    """
    found = []
    for hay in haystacks(
        lambda text: len(tokenizer.encode(text)),
        longest=longest,
        per_cell=per_cell,
        seed=seed,
        sentences=sentences,
    ):
        whole, prompt = tokenizer.encode(f"{hay.text} {hay.number}"), tokenizer.encode(hay.text)
        first = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
        found.append(Needle(hay.id, tuple(whole), first, hay.depth))
    return found


def haystacks(
    count: Callable[[str], int],
    *,
    longest: int,
    per_cell: int = 1,
    seed: int = 1,
    sentences: Sequence[str] = (),
) -> list[Haystack]:
    """The prompts of :func:`needles` as text; ``count`` tells the tokens of a text."""
    lengths = sorted({max(_MIN_LENGTH, int(longest * fill)) for fill in FILLS})
    if longest < _MIN_LENGTH:
        message = f"{longest} tokens are too short to hide a sentence in; at least {_MIN_LENGTH} are needed"
        raise InputError(Problem(message, key="limits.max_seq_tokens"))
    chance = random.Random(seed)
    prose = list(sentences) or _prose()
    sizes = [count(" " + sentence) for sentence in prose]
    found = []
    for length in lengths:
        for depth in DEPTHS:
            for copy in range(per_cell):
                place, number = chance.choice(_PLACES), chance.randrange(10_000, 100_000)
                start = chance.randrange(len(prose))
                order = [*range(start, len(prose)), *range(start)]
                name = f"{length}-tokens-depth-{depth:g}-{copy}"
                text = _hide(count, [(prose[i], sizes[i]) for i in order], place, number, length, depth)
                opening = _opening(place)
                question = text.removesuffix(opening) + f"What is the secret number of the {place}?"
                found.append(Haystack(name, text, str(number), length, depth, question))
    return found


def _opening(place: str) -> str:
    return f"The secret number of the {place} is"


def _hide(
    count: Callable[[str], int],
    prose: Sequence[tuple[str, int]],
    place: str,
    number: int,
    length: int,
    depth: float,
) -> str:
    """Prose of up to ``length`` tokens, with the sentence at ``depth``, and its beginning at the end."""
    opening = _opening(place)
    hidden = f"{opening} {number}."
    budget = length - count(f"{hidden} {hidden}") - 2
    while True:
        before: list[str] = []
        after: list[str] = []
        used = at = passed_over = 0
        while passed_over < len(prose):
            sentence, size = prose[at % len(prose)]
            at += 1
            if used + size > budget:
                passed_over += 1
                continue
            (before if used + size / 2 <= depth * budget else after).append(sentence)
            used, passed_over = used + size, 0
        text = " ".join([*before, hidden, *after, opening])
        whole = count(f"{text} {number}")
        if whole <= length or budget <= 0:
            return text
        budget -= whole - length  # sentences joined may take more tokens than alone


def _prose() -> list[str]:
    problems: list[Problem] = []
    texts = [str(value["text"]) for _, value in read_lines(HELDOUT_FILE, problems)]
    return [
        f"{sentence.strip().rstrip('.')}."
        for text in texts
        for sentence in text.replace("\n", " ").split(". ")
        if 20 < len(sentence) < 300 and "```" not in sentence
    ]


def measure_retrieval(
    target: Engine,
    baseline: Engine,
    items: Sequence[Needle],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """A row an item: was the number found, and its log-probability, by either engine."""
    rows: list[Row] = []
    for done, item in enumerate(items, start=1):
        row: dict[str, object] = {"id": item.id, "length": item.length, "depth": item.depth}
        for side, engine in (("target", target), ("baseline", baseline)):
            # The law of the last tokens only: no row of the vocabulary for each token of the prompt.
            scores = engine.score_law(item.tokens, _AS_IS, first=item.first)
            row[side] = not any(scores.above)
            row[f"{side}_logprob"] = math.fsum(scores.logprobs)
        rows.append(row)
        on_progress(done, len(items))
    return rows


def judge_retrieval(every: Sequence[Row], *, margin: float | None, over: str = BASELINE) -> Check:
    """The verdict on the rows of :func:`measure_retrieval`, or of servers, which write the number and give
    no log-probabilities. ``margin``: gates.max_retrieval_loss; ``over``: the baseline's name."""
    errors = [str(row.get("target_error") or row.get("baseline_error") or "") for row in every]
    rows = [row for row, error in zip(every, errors, strict=True) if not error]
    sides = ("target", "baseline")
    numbers = [row[f"{side}_logprob"] for row in rows for side in sides if f"{side}_logprob" in row]
    lengths = sorted({row["length"] for row in rows})
    by_depth = {
        f"{depth:g}": [
            sum(bool(row[side]) for row in rows if row["depth"] == depth) for side in ("target", "baseline")
        ]
        for depth in sorted({row["depth"] for row in rows})
    }
    check = judge_pairs(
        "retrieval",
        f"numbers found in prompts of {lengths[0]} to {lengths[-1]} tokens" if rows else "numbers found",
        [float(row["target"]) for row in rows],
        [float(row["baseline"]) for row in rows],
        margin=margin,
        how=(
            "a sentence with a number hidden in prose; found: "
            + (
                "every token of the number is the most likely one, teacher-forced through each engine's own "
                "KV cache format, as greedy decoding would write it"
                if numbers
                else "the first number of the server's greedy answer"
            )
        ),
        over=over,
        unscored=[error for error in errors if error],
        evidence={"lengths": [lengths[0], lengths[-1]] if rows else [], "found_by_depth": by_depth},
        records=Records("retrieval", {"margin": margin, "over": over}, {"items": every}),
        details=tuple(_told(row) for row in rows if row["baseline"] and not row["target"])[:10],
    )
    if not all(number is not None and math.isfinite(number) for number in numbers):
        return replace(check, verdict=Verdict.ERROR, summary="a log-probability is not a finite number")
    if margin is not None and rows and check.verdict is not Verdict.ERROR:
        share = sum(bool(row["baseline"]) for row in rows) / len(rows)
        if share < MIN_BASELINE:
            text = f"{over} itself finds only {share:.0%}, so this can tell nothing"
            return replace(check, verdict=Verdict.INCONCLUSIVE, summary=f"{text}. {check.summary}")
    return check


def _told(row: Row) -> str:
    if "target_logprob" in row:
        return f"{row['id']}: lost ({row['target_logprob']:.1f} against {row['baseline_logprob']:.1f} nats)"
    return f"{row['id']}: lost ({row['target_output'].strip()[:40]!r} instead of {row['number']})"
