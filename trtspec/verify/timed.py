"""Requests as a client timed them, their service level, the steady state of a load and its rates.

Times are seconds on one clock of the client. :mod:`trtspec.verify.endpoint` and
:mod:`trtspec.verify.served_load` make the records, :mod:`trtspec.verify.latency` judges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from trtspec.stats import Interval, rate_interval
from trtspec.verify.records import Row


@dataclass(frozen=True)
class Timed:
    """One request as the client saw it. ``arrivals_s``: when each piece with text came, ascending."""

    request_id: str
    due_s: float
    """When the load wanted it sent: ``sent_s`` in a closed loop."""
    sent_s: float
    arrivals_s: tuple[float, ...]
    ended_s: float
    tokens: int | None
    """Of the answer; None: not known."""
    error: str = ""
    stretch: int = 0
    """Which part of its side's load, where two sides had theirs in turn; each fills and drains for itself."""

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals_s[0] - self.due_s if self.arrivals_s and not self.error else None

    @property
    def tpot_s(self) -> float | None:
        """None for answers of one token, or whose tokens nobody counted."""
        if self.error or self.tokens is None or self.tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.error else self.ended_s - self.due_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        times = self.arrivals_s
        return tuple(b - a for a, b in pairwise(times)) if not self.error else ()


@dataclass(frozen=True)
class Objectives:
    """The service level; None: not asked for."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def any(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def met(self, record: Timed) -> bool:
        """Whether one request meets all of them; a time that is not known meets no objective (but TPOT of an
        answer of a single token, which has no later ones to be late)."""
        if record.error:
            return False
        for limit, value in ((self.ttft_s, record.ttft_s), (self.e2e_s, record.e2e_s)):
            if limit is not None and (value is None or value > limit):
                return False
        if self.tpot_s is None or record.tokens == 1:
            return True
        return record.tpot_s is not None and record.tpot_s <= self.tpot_s


def steady(records: Sequence[Timed], *, concurrency: int | None = None) -> list[Timed]:
    """The requests of the steady state.

    Closed loop (``concurrency``): not those sent while it filled (they met an emptier server), nor the last
    to be sent, which drain. Which those are is told by when they were *sent*: to leave out what ended late
    would leave out the long ones. Open loop: those due in the first tenth of the time are warm-up. Empty
    where nothing is left.
    """
    if not records:
        return []
    stretches = _stretches(records)
    if len(stretches) > 1:
        return [kept for one in stretches for kept in steady(one, concurrency=concurrency)]
    if concurrency is None:
        start = min(record.due_s for record in records)
        cut = start + 0.1 * (max(record.due_s for record in records) - start)
        return [record for record in records if record.due_s >= cut]
    if concurrency == 1:
        return sorted(records, key=lambda record: record.sent_s)[1:]  # one at a time neither fills nor drains
    ends = sorted(record.ended_s for record in records)
    filled = ends[min(concurrency, len(ends)) - 1]
    by_sending = sorted(records, key=lambda record: record.sent_s)
    return [record for record in by_sending[:-concurrency] if record.sent_s >= filled]


def _stretches(records: Sequence[Timed]) -> list[list[Timed]]:
    found: dict[int, list[Timed]] = {}
    for record in records:
        found.setdefault(record.stretch, []).append(record)
    return list(found.values())


@dataclass(frozen=True)
class Window:
    """The steady part of a closed loop (of one stretch): from when as many requests have ended as are in
    flight to when the last one is sent, seconds on the client's clock."""

    start_s: float
    end_s: float

    def ended(self, records: Sequence[Timed]) -> list[Timed]:
        return [record for record in records if self.start_s < record.ended_s <= self.end_s]

    def tokens(self, records: Sequence[Timed]) -> float | None:
        """Tokens that arrived in it, also of requests that began before or end later; None: not counted.

        An answer's tokens are spread evenly over its pieces: nobody says how many a piece held. A request
        that failed brings nothing.
        """
        total = 0.0
        for record in records:
            if record.error or not record.arrivals_s:
                continue
            if record.tokens is None:
                return None
            inside = sum(self.start_s < at <= self.end_s for at in record.arrivals_s)
            total += record.tokens * inside / len(record.arrivals_s)
        return total


def window_of(records: Sequence[Timed], concurrency: int) -> Window | None:
    """The window of one stretch, None where it is empty."""
    if len(records) <= concurrency:
        return None
    start = sorted(record.ended_s for record in records)[concurrency - 1]
    end = max(record.sent_s for record in records)
    return Window(start, end) if end > start else None


@dataclass(frozen=True)
class Rates:
    """``duration_s``: of the windows of a closed loop, else first request due to last answer.
    ``ended_per_s``: failed ones too. ``goodput``: requests a second within the objectives; ``within``: the
    share of ``requests``, those of the steady state, that meet them, with its Clopper-Pearson interval."""

    requests: int
    failed: int
    duration_s: float
    ended_per_s: float
    requests_per_s: float
    tokens_per_s: float | None
    goodput: float
    within: float
    within_interval: Interval


def rates(records: Sequence[Timed], objectives: Objectives, *, concurrency: int | None = None) -> Rates:
    """Throughput and goodput. Without objectives goodput is the throughput of requests that did not fail.

    Of a closed loop (``concurrency``) what ends and arrives within its windows counts. Requests that lie
    wholly within would be too few: those in flight at its edges did their share in it.
    """
    if not records:
        raise ValueError("no requests")
    kept = steady(records, concurrency=concurrency) or records
    parts = [
        (window, one)
        for one in _stretches(records)
        if concurrency is not None and (window := window_of(one, concurrency)) is not None
    ]
    ended: list[Timed] = []
    if parts:
        duration = sum(window.end_s - window.start_s for window, _ in parts)
        ended = [record for window, one in parts for record in window.ended(one)]
        counts = [window.tokens(one) for window, one in parts]
    if not ended:
        ended = list(kept)
        duration = max(one.ended_s for one in kept) - min(one.due_s for one in kept)
        counts = [one.tokens for one in kept if not one.error]
    total = None if None in counts else sum(count for count in counts if count is not None)
    met = sum(objectives.met(record) for record in kept)
    # No time at all passes where requests are given up before they are sent.
    per_s = 1 / duration if duration > 0 else 0.0
    return Rates(
        len(kept),
        sum(bool(record.error) for record in kept),
        duration,
        len(ended) * per_s,
        sum(not record.error for record in ended) * per_s,
        None if total is None else total * per_s,
        sum(objectives.met(record) for record in ended) * per_s,
        met / len(kept),
        rate_interval(met, len(kept)),
    )


def timed_rows(records: Sequence[Timed]) -> list[dict[str, Any]]:
    """The records as JSON values."""
    return [{**asdict(record), "arrivals_s": list(record.arrivals_s)} for record in records]


def timed_from(rows: Sequence[Row]) -> list[Timed]:
    """The records whose :func:`timed_rows` these are."""
    return [
        Timed(
            str(row["request_id"]),
            row["due_s"],
            row["sent_s"],
            tuple(row["arrivals_s"]),
            row["ended_s"],
            row["tokens"],
            row["error"],
            row.get("stretch", 0),
        )
        for row in rows
    ]
