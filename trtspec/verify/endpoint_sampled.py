"""Do two endpoints sample the same law? Judged from many short answers of both to the same prompts.

Three streams are drawn in turn, none of which shares a seed with another: the endpoint under test, the
baseline, and as *control* the baseline once more (A/A). Shared seeds would make the two sides depend on each
other where a server draws in the same order with and without drafts: equal answers would then hide a
difference of laws. A server that takes no seeds draws with randomness of its own; one whose answers to a
prompt are all alike does not sample, which is told, not judged.

What is compared are token ids where both sides send them. Else the text is cut into pieces by a rule that
looks at nothing but the text: what two answers of one law make of a function of them has one law again, so
the test stays valid, and sees what text shows. Pieces of the *stream* are no such function: a step with
drafts sends several tokens at once.

The tests and their sequence of looks are those of :mod:`trtspec.verify.blackbox`. A difference counts only
if the control shows none: where the baseline does not draw like itself, this is no ruler.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtspec.prompts import Chat
from trtspec.ruler import Answer
from trtspec.verify.approximate import MIN_PROMPTS, REPETITION_MARGIN, Sampled, repetition_over
from trtspec.verify.arrivals import closed_loop, giving_up
from trtspec.verify.blackbox import FIRST_TOKENS, beginnings, found_bias, judge_blackbox, planned_answers
from trtspec.verify.duration import about
from trtspec.verify.endpoint import (
    Endpoint,
    Reply,
    SamplingParams,
    ask,
    is_refused,
    lost,
    not_asked,
    reply_fields,
    takes,
)
from trtspec.verify.endpoint_verdict import ALPHA
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.power import LOOKS, told_bias
from trtspec.verify.records import Records, Row

Stream = Literal["baseline", "url", "control"]
STREAMS: tuple[Stream, ...] = ("baseline", "url", "control")
_TOKENS = 2 * FIRST_TOKENS + 2
"""Of an answer: the first ones are compared as they stand, pairs of neighbours everywhere."""
_MOST_FAILED = 0.05
_PILOT_ANSWERS = 4
"""To each prompt that may be drawn from, to see on which url drafts."""
_DRAFTED_AN_ANSWER = 0.25
"""Fewer drafted tokens an answer test what is sampled without drafts."""
_PRIME = 2**31 - 1
_FEWEST_ANSWERS = 20
"""However large a bias is asked for: the first look takes a quarter of them."""
_PILOT, _MOST_PILOTS = len(STREAMS), 256
_SIDES = ("baseline", "url", "baseline")
"""Who is asked for each stream."""
_PIECES = re.compile(r"\s*[A-Za-z0-9_]+|\s*\S|\s+")


@dataclass(frozen=True)
class DrawSettings:
    """How much is drawn. ``tokens``: of each stream; None: as many as ``bias`` (w^2) needs. ``seconds``: what
    it may take before it is left out; None: any time."""

    prompts: int = 2
    tokens: int | None = None
    bias: float = 0.1
    temperature: float = 1.0
    seconds: float | None = 900.0

    @property
    def needed(self) -> int:
        """Answers a prompt and stream after which the bias is found with power 0.99."""
        return max(_FEWEST_ANSWERS, planned_answers(self.bias, self.prompts, alpha=ALPHA))

    @property
    def drawn(self) -> int:
        """Answers a prompt and stream that are drawn at most."""
        return self.needed if self.tokens is None else max(1, self.tokens // (self.prompts * _TOKENS))

    @property
    def planned(self) -> int:
        """Answers at the last look: more than needed if more are asked for."""
        return max(self.needed, self.drawn)


def seed_of(stream: int, prompt: int, at: int) -> int:
    """A seed for each draw, below 2^31, in no order and never twice: multiplying by 48271 permutes what is
    below the prime 2^31 - 1 (Lehmer). For 4 streams, 400 prompts, a million draws."""
    return (1 + stream * 400_000_000 + prompt * 1_000_000 + at) * 48271 % _PRIME


@dataclass(frozen=True)
class _Draws:
    """Asks for sampled answers. A place is (stream, number of the prompt, number of the draw)."""

    endpoints: Mapping[str, Endpoint]
    chats: Sequence[Chat]
    temperature: float
    concurrency: int
    seeded: Mapping[str, bool]
    """By side, whether requests carry a seed."""
    max_tokens: int = _TOKENS

    def one(self, side: str, place: tuple[int, int, int]) -> Row:
        return self._row(side, place, self._reply(side, place))

    def _seed(self, side: str, place: tuple[int, int, int]) -> int | None:
        return seed_of(*place) if self.seeded[side] else None

    def _reply(self, side: str, place: tuple[int, int, int]) -> Reply:
        return ask(
            self.endpoints[side],
            self.chats[place[1]],
            max_tokens=self.max_tokens,
            clock=time.perf_counter,
            params=SamplingParams(self.temperature, seed=self._seed(side, place)),
        )

    def _row(self, side: str, place: tuple[int, int, int], reply: Reply) -> Row:
        stream, prompt, at = place
        told = {"stream": (*STREAMS, "pilot")[stream], "request_id": self.chats[prompt].id, "at": at}
        return {**told, "seed": self._seed(side, place), **answer_fields(reply)}

    def _loop(
        self,
        sides: Sequence[str],
        places: Sequence[tuple[int, int, int]],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Row]:
        """A row for each place, asked of the side beside it, until that answers no more."""
        senders = {
            side: giving_up(
                lambda number, _, side=side: self._reply(side, places[number]),  # type: ignore[misc]
                lost,
                lambda number, due, why: not_asked(
                    self.chats[places[number][1]], time.perf_counter(), due, why
                ),
            )
            for side in dict.fromkeys(sides)
        }

        def send(number: int, due: float | None) -> Row:
            side = sides[number]
            return self._row(side, places[number], senders[side](number, due))

        return closed_loop(send, len(places), self.concurrency, on_progress)

    def all(
        self,
        places: Sequence[tuple[int, int, int]],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Row]:
        """A row for each place of :data:`STREAMS`, in that order."""

        return self._loop([_SIDES[stream] for stream, _, _ in places], places, on_progress)

    def asked(self, side: str, places: Sequence[tuple[int, int, int]]) -> list[Row]:
        """Rows of one side that are not judged."""
        return self._loop([side] * len(places), places)


def check_sampled(
    endpoints: Mapping[str, Endpoint],
    chats: Sequence[Chat],
    settings: DrawSettings,
    *,
    concurrency: int,
    drafted: Callable[[], float | None] = lambda: None,
    greedy: Mapping[str, float] | None = None,
    stage: Callable[[str], Callable[[int, int], None]] = lambda name: lambda done, total: None,
) -> Check:
    """Draw look by look, ``concurrency`` requests at a time, until a look rejects or all is drawn.

    ``endpoints``: url and baseline. ``drafted``: tokens that url drafted so far, where the server counts
    them. ``greedy``: how much it drafted in the greedy answer to each of ``chats``
    (:func:`drafts_by_prompt`). Asked are the prompts on which it drafts most, by a few answers that are not
    judged, else by ``greedy``: an acceptance that spoils what is drawn shows only where something was
    drafted."""
    greedy = greedy or {}
    seeded = {side: takes(one, "seed") for side, one in endpoints.items()}
    draws = _Draws(endpoints, chats, settings.temperature, concurrency, seeded)
    for side in endpoints:
        reply = draws.one(side, (_PILOT, 0, 0))
        if seeded[side] and is_refused(reply["error"]):
            seeded[side] = False  # what is refused is perhaps the seed
            reply = draws.one(side, (_PILOT, 0, 0))
        if reply["error"]:
            reason = f"{side} answers no sampled request: {reply['error']}; --no-sampled leaves this out"
            return skipped("sampled", reason, True)
    speculates = any(value > 0 for value in greedy.values())
    if len(chats) > settings.prompts:
        places = [
            (_PILOT, number, at)
            for number in range(len(chats))
            for at in range(concurrency, concurrency + _PILOT_ANSWERS)
        ]
        pilot = draws.asked("url", places)
        counts = {
            chat.id: [row["drafted"] for row in pilot if row["request_id"] == chat.id] for chat in chats
        }
        told = all(None not in found for found in counts.values())
        seen = {one: float(sum(found)) for one, found in counts.items()} if told else greedy
        speculates = speculates or any(value > 0 for value in seen.values())
        chats = sorted(chats, key=lambda chat: -seen.get(chat.id, 0.0))[: settings.prompts]
        draws = replace(draws, chats=chats)
    seconds = _pace(draws) * len(STREAMS) * len(chats) * settings.drawn
    if settings.seconds is not None and seconds > settings.seconds:
        reason = f"would take about {seconds:.0f} s, over {settings.seconds:.0f} s; --sampled runs it"
        return skipped("sampled", reason)
    on_progress = stage(f"sampled: url, baseline, control, {about(seconds)} at most")
    rows: list[Row] = []
    before, had = drafted(), 0
    for share in LOOKS:
        wanted, done = min(round(share * settings.planned), settings.drawn), len(rows)

        def progress(more: int, _total: int, done: int = done) -> None:
            on_progress(done + more, settings.drawn * len(chats) * len(STREAMS))

        numbers, streams = range(len(chats)), range(len(STREAMS))
        rows += draws.all(
            [(stream, one, at) for at in range(had, wanted) for one in numbers for stream in streams],
            progress,
        )
        had = wanted
        check = judge_draws(
            rows,
            planned=settings.planned,
            bias=settings.bias,
            temperature=settings.temperature,
            drafted=None if before is None else (drafted() or before) - before,
            seeded=seeded,
            speculates=speculates,
        )
        if check.verdict in (Verdict.FAIL, Verdict.ERROR) or wanted == settings.drawn or _gone(rows):
            break
    return check


def drafts_by_prompt(rows: Sequence[Row]) -> dict[str, float]:
    """Of url's greedy answers: tokens drafted in them where it tells, else kept drafts as far as it tells."""
    found: dict[str, float] = {}
    for row in rows:
        if row["side"] != "url" or row["at"] != "alone" or row["error"]:
            continue
        kept = sum(size - 1 for size in row["emitted"] or ())
        steps = row["tokens_per_step"]
        if row["drafted"] is not None:
            kept = row["drafted"]
        elif steps and row["tokens"]:
            kept = row["tokens"] * (1 - 1 / max(steps, 1.0))
        found.setdefault(str(row["request_id"]), float(kept))
    return found


def _pace(draws: _Draws) -> float:
    """Seconds an answer takes, ``concurrency`` at a time: a third of them of url. None of these is judged."""
    count = min(draws.concurrency, _MOST_PILOTS)
    places = [(_PILOT, number % len(draws.chats), number) for number in range(count)]
    seconds = {}
    for side in draws.endpoints:
        began = time.perf_counter()
        draws.asked(side, places)
        seconds[side] = (time.perf_counter() - began) / len(places)
    return (2 * seconds["baseline"] + seconds["url"]) / 3


def answer_fields(reply: Reply) -> dict[str, Any]:
    """Of a reply to a sampled request, what it said, as JSON values."""
    return {**reply_fields(reply), "answers": reply.answers}


def _gone(rows: Sequence[Row]) -> bool:
    """Whether a stream only fails by now: its server died."""
    last = {stream: [row for row in rows if row["stream"] == stream][-20:] for stream in STREAMS}
    return any(all(row["error"] for row in some) for some in last.values())


def pieces(text: str) -> list[str]:
    """``text`` cut by its characters alone: a run of ASCII letters and digits with the space before it, else
    one character. Joined they are the text again."""
    return _PIECES.findall(text)


def units(rows: Sequence[Row]) -> tuple[list[list[int]], bool]:
    """Each answer as numbers, equal where it says the same, and whether they are the servers' token ids."""
    if all(row["token_ids"] is not None for row in rows):
        return [list(row["token_ids"]) for row in rows], True
    cut = [pieces(row["text"]) for row in rows]
    numbers = {piece: number for number, piece in enumerate(sorted({one for row in cut for one in row}))}
    return [[numbers[one] for one in row] for row in cut], False


def judge_draws(
    draws: Sequence[Row],
    *,
    planned: int,
    bias: float,
    temperature: float,
    drafted: float | None,
    seeded: Mapping[str, bool],
    speculates: bool = False,
) -> Check:
    """The verdict over the rows of ``draws`` (stream, request_id, at, error, text, token_ids, drafted), by
    stream in the order in which they were drawn. ``speculates``: url was seen to draft, if not in these."""
    name = "sampled"
    good = [row for row in draws if not row["error"]]
    said, by_ids = units(good)
    prompts = list(dict.fromkeys(str(row["request_id"]) for row in draws))
    answers: dict[str, dict[str, list[list[int]]]] = {
        stream: {prompt: [] for prompt in prompts} for stream in STREAMS
    }
    for row, unit in zip(good, said, strict=True):
        answers[row["stream"]][str(row["request_id"])].append(unit)
    found = judge_blackbox(
        reference=answers["baseline"], drafted=answers["url"], planned=planned, bias=bias, alpha=ALPHA
    )
    control = judge_blackbox(
        reference=answers["baseline"], drafted=answers["control"], planned=planned, bias=bias, alpha=ALPHA
    )
    shown = found_bias(min(found.n, planned), len(prompts), alpha=ALPHA)
    counts = [row["drafted"] for row in good if row["stream"] == "url" and row["drafted"] is not None]
    all_drafted = sum(counts) if counts else drafted
    alike = [
        stream
        for stream in STREAMS
        if found.n > 1 and all(len(set(map(tuple, one))) == 1 for one in answers[stream].values())
    ]
    told = [
        prompt
        for prompt in prompts
        if answers["baseline"][prompt] and answers["url"][prompt]
        if any(
            beginnings(answers["baseline"][prompt], answers["url"][prompt], length).shape[1] > 1
            for length in range(2, FIRST_TOKENS + 1)
        )
    ]
    failed = {
        stream: [row for row in draws if row["stream"] == stream and row["error"]] for stream in STREAMS
    }
    many = [
        stream
        for stream, rows in failed.items()
        if len(rows) > _MOST_FAILED * sum(row["stream"] == stream for row in draws)
    ]
    scope = f"{found.n} answers a side to each of {len(prompts)} prompts at temperature {temperature:g}"
    mine = sum(row["stream"] == "url" for row in good)
    few = speculates and all_drafted is not None and all_drafted < _DRAFTED_AN_ANSWER * mine
    verdict, summary = Verdict.INCONCLUSIVE, ""
    if many:
        rows = failed[many[0]]
        summary = (
            f"{len(rows)} requests of {many[0]} failed ({rows[0]['error']}): what came is no fair sample"
        )
    elif "baseline" in alike or "control" in alike:
        summary = (
            f"all {found.n} answers of the baseline to a prompt are alike: it does not sample at temperature "
            f"{temperature:g}, or knows one seed only; ask other prompts, or a higher --temperature"
        )
    elif control.verdict is Verdict.FAIL:
        summary = (
            "the baseline does not draw like itself, so it is no ruler: " + control.summary.partition(": ")[2]
        )
    elif found.verdict is Verdict.FAIL:
        verdict, summary = Verdict.FAIL, found.summary
        if "url" in alike:
            summary = f"all {found.n} answers of url to a prompt are alike, the baseline's are not: {summary}"
    elif found.verdict is Verdict.PASS and not told:
        summary = f"{scope}: their first {FIRST_TOKENS} tokens are all alike or all different; ask others"
    elif found.verdict is Verdict.PASS and few:
        summary = (
            f"{scope} show no difference, but url drafted only {all_drafted:.0f} tokens in them: this shows "
            "what it samples without drafts; ask prompts on which it drafts (--prompts)"
        )
    elif found.verdict is Verdict.PASS:
        verdict = Verdict.PASS
        summary = f"{scope} show no difference; a bias of w^2 = {shown:.3g} would have been found with 99 %"
        if all_drafted:
            summary += f"; url drafted {all_drafted:.0f} tokens in them"
    else:
        summary = (
            f"{scope} show no difference; w^2 = {shown:.3g} would have been found. {planned} answers "
            f"({planned * len(prompts) * _TOKENS} --sampled-tokens) would decide on w^2 = {bias:g}"
        )
    warnings = [f"prompt {one} tells nothing: its answers begin alike" for one in prompts if one not in told]
    if all_drafted == 0 and not few:
        warnings.append("nothing was drafted in these answers, nor in the greedy ones")
    some = sum(map(len, failed.values()))
    warnings += [f"{some} requests failed and are left out"] if some else []
    warnings += [
        f"{side} takes no seed: its randomness is its own" for side, yes in seeded.items() if not yes
    ]
    evidence = {
        "looks": found.evidence["looks"],
        "control": control.evidence["looks"],
        "planned": planned,
        "planned_bias": bias,
        "found_bias": shown,
        "alpha": ALPHA,
        "temperature": temperature,
        "compared": "token ids" if by_ids else "text",
        "telling_prompts": len(told),
        "failed": {stream: len(rows) for stream, rows in failed.items()},
        "drafted": all_drafted,
    }
    arguments = {
        "planned": planned,
        "bias": bias,
        "temperature": temperature,
        "drafted": drafted,
        "seeded": dict(seeded),
        "speculates": speculates,
    }
    return replace(
        found,
        name=name,
        verdict=verdict,
        summary=summary,
        how=(
            f"{found.how}; by {evidence['compared']}; no seed is used twice; control: the baseline against "
            "itself, likewise"
        ),
        details=told_bias(shown),
        warnings=tuple(warnings) if verdict is not Verdict.INCONCLUSIVE or found.n else (),
        evidence=evidence,
        records=Records("endpoint_sampled", arguments, {"draws": list(draws)}),
    )


# --------------------------------------------------------------------------- approximate acceptance


def check_repetition(
    endpoints: Mapping[str, Endpoint],
    chats: Sequence[Chat],
    *,
    temperature: float,
    max_tokens: int,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Check:
    """What is judged of approximate acceptance without scores: does it repeat itself more than the baseline?
    One sampled answer of both to each prompt."""
    seeded = {side: takes(one, "seed") for side, one in endpoints.items()}
    draws = _Draws(endpoints, chats, temperature, concurrency, seeded, max_tokens)
    places = [(stream, one, 0) for one in range(len(chats)) for stream in (0, 1)]
    rows = draws.all(places, on_progress)
    return judge_repetition(rows, temperature=temperature)


def judge_repetition(draws: Sequence[Row], *, temperature: float) -> Check:
    """The share of 4-grams that an answer had before, url less baseline, by prompts that both answered."""
    name = "approximate_repetition"
    good = [row for row in draws if not row["error"]]
    said, by_ids = units(good)
    texts = {(row["stream"], str(row["request_id"])): unit for row, unit in zip(good, said, strict=True)}
    prompts = [one for stream, one in texts if stream == "url" and ("baseline", one) in texts]
    records = Records("endpoint_repetition", {"temperature": temperature}, {"draws": list(draws)})
    if len(prompts) < MIN_PROMPTS:
        text = f"{len(prompts)} prompts answered by both are too few to judge by, at least {MIN_PROMPTS}"
        return Check(name, Verdict.INCONCLUSIVE, text, required=True, n=len(prompts), records=records)
    mine, strict = (
        Sampled(
            tuple((Answer(one, tuple(texts[stream, one]), "length", (), 0, 0, ()),) for one in prompts), ()
        )
        for stream in ("url", "baseline")
    )
    share, excess, spread = repetition_over(mine, strict)
    return gated(
        name=name,
        what=f"{share:.1%} of the 4-grams occurred before in their answer; excess over the baseline",
        measured=excess,
        interval=spread,
        bound=REPETITION_MARGIN,
        sense="at most",
        n=len(prompts),
        n_unit="prompts",
        how=(
            f"sampled at temperature {temperature:g}, one answer a prompt, by "
            f"{'token ids' if by_ids else 'text'}; 95 % bootstrap over prompts"
        ),
        evidence={"repeated_share": share, "repeated_share_strict": share - excess},
        records=records,
    )
