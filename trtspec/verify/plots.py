"""Plots of a report as SVG text: no script, no font, no network; colours come from the page's CSS variables.

Every plot reads the evidence of checks and is left out where that has nothing for it, whatever else it holds.
Evidence keys, for checks of any name:

* ``steps_by_tokens_emitted`` {tokens: steps}; ``acceptance_length_by_task`` {task: tokens a step};
* ``by_load`` [{load, speedup, low, high}]; ``matrix`` {rows, columns, cells: [[{verdict, speedup} or null]]};
* ``seconds`` {side: [[seconds]]}; ``samples_ms`` {metric: {side: [ms]}};
* ``divergences`` [{gap_nats, prompt_id, position}] with ``noise`` {usual_nats, nats};
* ``kl_quantiles`` {share: nats}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from trtspec.verify.gates import Check, finite
from trtspec.verify.i18n import TEXTS, Say, task_title
from trtspec.verify.latency import quantile_of
from trtspec.verify.report import Report

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 44, 16, 26, 42
_CHAR = 6.6
"""Width of a character of the plots' labels, about."""
_MAX_POINTS = 400
_PACES = (0.7, 0.95, 1.05, 1.4)
"""Where the heat map's colour changes, in times as fast."""
MARKS = {"PASS": "✓", "FAIL": "✗", "INCONCLUSIVE": "?", "SKIPPED": "–", "ERROR": "!", "MEASURED": "·"}


@dataclass(frozen=True)
class Figure:
    """``text`` says in words what is to be seen; ``columns`` and ``rows`` are the numbers."""

    title: str
    svg: str
    text: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def figures(report: Report, say: Say) -> list[Figure]:
    """Every plot that the report has numbers for."""
    found: list[Figure | None] = [_speedups(report.checks, say)]
    for check in report.checks:
        found += [
            _acceptance(check, say),
            _tasks(check, say),
            _by_load(check, say),
            _seconds(check, say),
            _margins(check, say),
            _kl(check, say),
            _matrix(check, say),
        ]
    found += _samples(report.checks, say)
    return [one for one in found if one is not None]


# --------------------------------------------------------------------------- the plots


def _acceptance(check: Check, say: Say) -> Figure | None:
    steps = {
        int(key): count
        for key, count in _pairs(check.evidence.get("steps_by_tokens_emitted"))
        if key.isdigit() and int(key) <= 256
    }
    total = sum(steps.values())
    if not total or max(steps) < 2:
        return None
    # A step emits what it accepted and one token of the target's own.
    shares = [
        (place, sum(count for emitted, count in steps.items() if emitted > place) / total)
        for place in range(1, max(steps))
    ]
    axes = _Axes((0.5, len(shares) + 0.5), (0.0, 1.0), height=200)
    width = min(36.0, 0.7 * (axes.x(2) - axes.x(1)))
    body = [
        _rect("bar", axes.x(place) - width / 2, axes.y(share), width, axes.y(0) - axes.y(share))
        + (_text(axes.x(place), axes.y(share) - 4, f"{share:.0%}", "middle") if len(shares) <= 8 else "")
        for place, share in shares
    ]
    every = max(1, math.ceil(len(shares) / 10))
    ticks = [(float(place), str(place)) for place, _ in shares if (place - 1) % every == 0]
    frame = axes.frame(
        ticks, [(v, f"{v:.0%}") for v in (0, 0.5, 1)], say("plot.acceptance.x"), say("plot.acceptance.y")
    )
    text = say("plot.acceptance.text", first=f"{shares[0][1]:.1%}", steps=f"{total:.0f}")
    rows = tuple((str(place), f"{share:.1%}") for place, share in shares)
    columns = (say("plot.position"), say("plot.acceptance.y"))
    title = say("plot.acceptance") + (f" ({say('side.other')})" if check.name.startswith("vs_other.") else "")
    return _figure(title, frame + body, axes.height, text, columns, rows)


def _tasks(check: Check, say: Say) -> Figure | None:
    found = _pairs(check.evidence.get("acceptance_length_by_task"))[:20]
    if not found:
        return None
    labels = [task_title(name, say) for name, _ in found]
    low, high = 1.0, max(1.0, *(value for _, value in found)) * 1.05
    axes = _Axes(
        (low, max(high, 1.1)), (0.0, float(len(found))), height=_BOTTOM + 8 + 24 * len(found), left=104, top=8
    )
    body = []
    for number, (label, (_, value)) in enumerate(zip(labels, found, strict=True)):
        y = axes.y(len(found) - number - 0.5)
        end = axes.x(max(value, low))
        body.append(_rect("bar", axes.x(low), y - 7, end - axes.x(low), 14))
        body.append(_text(axes.left - 6, y + 4, _cut(label, 14), "end"))
        inside = end > _WIDTH - 50
        body.append(
            _text(end + (-4 if inside else 4), y + 4, f"{value:.2f}", "end" if inside else "start", inside)
        )
    frame = axes.frame(_ticks(*axes.xs), [], say("plot.tasks.x"), "")
    rows = tuple((label, f"{value:.3f}") for label, (_, value) in zip(labels, found, strict=True))
    columns = (say("plot.prompt"), say("unit.tokens/step"))
    text = say("joined").join(f"{label} {value:.2f}" for label, (_, value) in zip(labels, found, strict=True))
    return _figure(say("plot.tasks"), frame + body, axes.height, text, columns, rows)


def _speedups(checks: Sequence[Check], say: Say) -> Figure | None:
    found = [
        (check.name, check.measured, check.interval, check.bound)
        for check in checks
        if check.name.removeprefix("vs_").removeprefix("other.").startswith("speedup")
        and check.measured is not None
        and math.isfinite(check.measured)
    ]
    rows = [
        (name, value, interval if interval and all(map(math.isfinite, interval)) else None, bound)
        for name, value, interval, bound in found
    ]
    return _forest(say("plot.speedup"), rows, say)


def _by_load(check: Check, say: Say) -> Figure | None:
    listed = check.evidence.get("by_load")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return None
    rows = []
    for one in listed[:40]:
        value = finite(one.get("speedup")) if isinstance(one, Mapping) else None
        if value is None or not isinstance(one, Mapping):
            continue
        low, high = finite(one.get("low")), finite(one.get("high"))
        interval = (low, high) if low is not None and high is not None else None
        rows.append((str(one.get("load", "")), value, interval, None))
    title = "plot.speedup" if any(interval for _, _, interval, _ in rows) else "plot.speedup.bare"
    return _forest(f"{say(title)} ({check.name})", rows, say)


def _forest(
    title: str, rows: Sequence[tuple[str, float, tuple[float, float] | None, float | None]], say: Say
) -> Figure | None:
    if not rows:
        return None
    everything = [1.0, *(value for _, value, _, _ in rows)]
    # A whisker of a few prompts may reach far beyond all values: it ends at the edge, the table has its ends.
    edges = 0.5 * min(everything), 2 * max(everything)
    everything += [
        min(max(end, edges[0]), edges[1]) for _, _, interval, _ in rows if interval for end in interval
    ]
    everything += [bound for *_, bound in rows if bound is not None]
    low, high = min(everything), max(everything)
    room = 0.08 * ((high - low) or 1.0)
    axes = _Axes(
        (low - room, high + room),
        (0.0, float(len(rows))),
        height=_BOTTOM + 8 + 38 * len(rows),
        left=18,
        top=8,
    )
    body = [_line("one", axes.x(1), axes.x(1), axes.top, axes.bottom)]
    texts, table = [], []
    for number, (name, value, interval, bound) in enumerate(rows):
        y = axes.y(len(rows) - number - 0.62)
        body.append(_text(axes.left + 2, y - 9, _cut(name, 44), "start"))
        if bound is not None:
            x = axes.x(bound)
            body.append(_line("gate", x, x, y - 8, y + 8))
        ends = ("", "")
        if interval is not None:
            left, right = (axes.x(min(max(end, edges[0]), edges[1])) for end in interval)
            body.append(_line("whisker", left, right, y, y))
            ends = (f"{interval[0]:.3f}", f"{interval[1]:.3f}")
            texts.append(say("plot.speedup.text", name=name, value=f"{value:.2f}", low=ends[0], high=ends[1]))
        body.append(f'<circle class="dot" cx="{axes.x(value):.1f}" cy="{y:.1f}" r="4"/>')
        table.append((name, f"{value:.3f}", *ends, "" if bound is None else f"{bound:g}"))
    frame = axes.frame(_ticks(*axes.xs), [], say("plot.speedup.x"), "")
    columns = (say("check"), say("measured"), "2.5 %", "97.5 %", say("gate"))
    return _figure(title, frame + body, axes.height, " ".join(texts), columns, tuple(table))


def _seconds(check: Check, say: Say) -> Figure | None:
    sides = check.evidence.get("seconds")
    if not isinstance(sides, Mapping):
        return None
    series = {str(name): _flat(values) for name, values in sides.items()}
    title = f"{say('plot.latency')} ({check.name})"
    return _cdf(title, series, say("plot.latency.x"), say)


def _samples(checks: Sequence[Check], say: Say) -> list[Figure | None]:
    """One plot a metric and load, the sides of all checks in it."""
    merged: dict[tuple[str, str], dict[str, list[float]]] = {}
    for check in checks:
        metrics, loads = check.evidence.get("samples_ms"), check.evidence.get("loads")
        load = ", ".join(map(str, loads)) if isinstance(loads, list) else ""
        for metric, sides in metrics.items() if isinstance(metrics, Mapping) else ():
            if isinstance(sides, Mapping):
                found = merged.setdefault((str(metric), load), {})
                found.update({str(side): _flat(values) for side, values in sides.items()})
    return [
        _cdf(
            say("plot.latency-of", metric=metric) + (f" ({load})" if load else ""),
            series,
            f"{metric}, ms",
            say,
        )
        for (metric, load), series in list(merged.items())[:24]
    ]


def _cdf(title: str, series: Mapping[str, list[float]], unit: str, say: Say) -> Figure | None:
    found = {name: sorted(values) for name, values in series.items() if values}
    if not found:
        return None
    names = list(found)[:4]
    low = min(found[name][0] for name in names)
    high = max(found[name][-1] for name in names)
    room = 0.04 * ((high - low) or abs(high) or 1.0)
    axes = _Axes((low - room, high + room), (0.0, 1.0), height=190 + 16 * len(names))
    axes = _Axes(axes.xs, axes.ys, height=axes.height, top=_TOP + 16 * len(names) - 10)
    body, table, texts = [], [], []
    for number, name in enumerate(names):
        values = found[name]
        label = _side(name, found, say)
        points = min(len(values), _MAX_POINTS)
        picked = [round(i * (len(values) - 1) / max(points - 1, 1)) for i in range(points)]
        path, before = [f"M{axes.x(values[0]):.1f} {axes.y(0):.1f}"], 0.0
        for index in picked:
            share = (index + 1) / len(values)
            path.append(f"L{axes.x(values[index]):.1f} {axes.y(before):.1f}V{axes.y(share):.1f}")
            before = share
        path.append(f"H{_WIDTH - _RIGHT}")
        body.append(f'<path class="curve s{number}" d="{"".join(path)}"/>')
        y = 10 + 16 * number
        body.append(_line(f"curve s{number}", _LEFT, _LEFT + 28, y, y))
        body.append(_text(_LEFT + 34, y + 4, _cut(label, 40), "start"))
        middle, most = (quantile_of(values, share).value for share in (0.5, 0.9))
        texts.append(
            say("plot.latency.few", name=label, n=len(values))
            if middle is None
            else say("plot.latency.text", name=label, value=_short(middle))
        )
        table.append((label, str(len(values)), *("" if v is None else _short(v) for v in (middle, most))))
    shares = [(v, f"{v:.0%}") for v in (0, 0.5, 0.9, 1)]
    frame = axes.frame(_ticks(*axes.xs), shares, unit, "")
    columns = (say("plot.latency"), say("n"), "p50", "p90")
    return _figure(title, frame + body, axes.height, " ".join(texts), columns, tuple(table))


def _side(name: str, sides: Mapping[str, object], say: Say) -> str:
    """A side's name in words. Beside ``url`` the baseline is the other endpoint, not a 16-bit engine here."""
    key = "side.endpoint" if name == "baseline" and "url" in sides else f"side.{name}"
    return say(key) if key in TEXTS else name


def _margins(check: Check, say: Say) -> Figure | None:
    listed, noise = check.evidence.get("divergences"), check.evidence.get("noise")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not isinstance(noise, Mapping):
        return None
    found = [
        (gap, one)
        for one in listed
        if isinstance(one, Mapping) and (gap := finite(one.get("gap_nats"))) is not None
    ]
    usual, largest = finite(noise.get("usual_nats")), finite(noise.get("nats"))
    if not found or usual is None or largest is None:
        return None
    positive = [value for value in (usual, largest, *(gap for gap, _ in found)) if value > 0]
    least, most = math.log10(min(positive, default=1e-3)), math.log10(max(positive, default=1.0))
    low, high = math.floor(least - 0.1), max(math.ceil(most + 0.1), math.floor(least) + 1)
    axes = _Axes((float(low), float(high)), (0.0, 1.0), height=170, left=24, top=44)

    def x(value: float) -> float:
        return axes.x(math.log10(value)) if value > 0 else axes.x(low)

    body = []
    for kind, value, key, y in (("usual", usual, "usual", 14), ("largest", largest, "largest", 30)):
        at = x(value)
        body.append(_line(f"noise {kind}", at, at, y + 4, axes.bottom))
        side = "end" if at > _WIDTH * 0.6 else "start"
        body.append(_text(at, y, f"{say(f'plot.margins.{key}')} {value:.2g}", side))
    for number, (gap, _) in enumerate(found[:_MAX_POINTS]):
        at = axes.y(0.15 + 0.7 * ((number * 0.618) % 1.0))  # spread, so that equal gaps can be told apart
        body.append(f'<circle class="dot" cx="{x(gap):.1f}" cy="{at:.1f}" r="4"/>')
    ticks = [(float(power), f"{10.0**power:g}") for power in range(int(low), int(high) + 1)]
    frame = axes.frame(ticks, [], say("plot.margins.x"), "")
    text = say("plot.margins.text", count=len(found), usual=f"{usual:.2g}", largest=f"{largest:.2g}")
    rows = tuple(
        (str(one.get("prompt_id", "")), str(one.get("position", "")), f"{gap:.3g}")
        for gap, one in found[:200]
    )
    columns = (say("plot.prompt"), say("plot.token"), say("plot.gap"))
    return _figure(say("plot.margins", name=check.name), frame + body, axes.height, text, columns, rows)


def _kl(check: Check, say: Say) -> Figure | None:
    points = []
    for key, value in _pairs(check.evidence.get("kl_quantiles")):
        share = _share(key)
        if share is not None and 0 <= share < 1 and value > 0:
            points.append((1 - share, value))
    points.sort(reverse=True)
    if len(points) < 2:
        return None
    xs = (-math.log10(points[0][0]), -math.log10(points[-1][0]))
    low = math.floor(math.log10(min(value for _, value in points)))
    high = max(math.ceil(math.log10(max(value for _, value in points))), low + 1)
    axes = _Axes((xs[0], max(xs[1], xs[0] + 0.1)), (float(low), float(high)), height=200, left=56)
    places = [(axes.x(-math.log10(beyond)), axes.y(math.log10(value))) for beyond, value in points]
    body = ['<path class="curve s0" d="M' + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) + '"/>']
    body += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    across = [(-math.log10(beyond), f"{beyond:.3g}") for beyond, _ in points]
    up = [(float(power), f"{10.0**power:g}") for power in range(low, high + 1)]
    frame = axes.frame(across[:: max(1, len(across) // 6)], up, say("plot.kl.x"), say("plot.kl.y"))
    text = say("plot.kl.text", value=f"{max(value for _, value in points):.3g}")
    rows = tuple((f"{beyond:.4g}", f"{value:.4g}") for beyond, value in points)
    columns = (say("plot.kl.x"), say("plot.kl.y"))
    return _figure(say("plot.kl", name=check.name), frame + body, axes.height, text, columns, rows)


def _matrix(check: Check, say: Say) -> Figure | None:
    matrix = check.evidence.get("matrix")
    if not isinstance(matrix, Mapping):
        return None
    rows, columns, cells = (matrix.get(key) for key in ("rows", "columns", "cells"))
    if not (isinstance(rows, list) and isinstance(columns, list) and isinstance(cells, list)):
        return None
    rows, columns = [str(row) for row in rows[:24]], [str(column) for column in columns[:12]]
    if not rows or not columns:
        return None
    left, top = 92, 74
    wide, high = (_WIDTH - left - 22) / len(columns), 34
    body, table = [], []
    for j, column in enumerate(columns):
        x = left + (j + 0.4) * wide
        body.append(
            f'<text class="tx" transform="translate({x:.1f} {top - 8}) rotate(-38)">'
            f"{escape(_cut(column, 14))}</text>"
        )
    for i, row in enumerate(rows):
        line = cells[i] if i < len(cells) and isinstance(cells[i], list) else []
        body.append(_text(left - 6, top + i * high + high / 2 + 4, _cut(row, 14), "end"))
        shown = [row]
        for j in range(len(columns)):
            cell = line[j] if j < len(line) and isinstance(line[j], Mapping) else {}
            verdict = str(cell.get("verdict", "SKIPPED"))
            verdict = verdict if verdict in MARKS else "SKIPPED"
            speedup = finite(cell.get("speedup"))
            x, y = left + j * wide, top + i * high
            kind = verdict.lower() + ("" if speedup is None else f" speed{_pace(speedup)}")
            body.append(_rect(f"cell {kind}", x + 1.5, y + 1.5, wide - 3, high - 3))
            body.append(_text(x + wide / 2, y + 14, MARKS[verdict], "middle"))
            if speedup is not None:
                body.append(_text(x + wide / 2, y + 28, f"{speedup:.2f}", "middle"))
            shown.append(say(verdict) + ("" if speedup is None else f" {speedup:.2f}"))
        table.append(tuple(shown))
    text = say("plot.matrix.text", rows=len(rows), columns=len(columns))
    heads = (say("plot.matrix.corner"), *columns)
    height = top + high * len(rows) + 8
    return _figure(say("plot.matrix", name=check.name), body, height, text, heads, tuple(table))


def _pace(speedup: float) -> int:
    """Which of the five colours of the heat map: 0 is much slower, 2 about as fast, 4 much faster."""
    return sum(speedup >= edge for edge in _PACES)


# --------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class _Axes:
    xs: tuple[float, float]
    ys: tuple[float, float]
    height: int
    left: int = _LEFT
    top: int = _TOP

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM

    def x(self, value: float) -> float:
        low, high = self.xs
        return self.left + (_WIDTH - _RIGHT - self.left) * (value - low) / ((high - low) or 1.0)

    def y(self, value: float) -> float:
        low, high = self.ys
        return self.bottom - (self.bottom - self.top) * (value - low) / ((high - low) or 1.0)

    def frame(
        self,
        across: Sequence[tuple[float, str]],
        up: Sequence[tuple[float, str]],
        x_title: str,
        y_title: str,
    ) -> list[str]:
        """Axis, grid, ticks and titles."""
        lines = [_line("axis", self.left, _WIDTH - _RIGHT, self.bottom, self.bottom)]
        for value, label in across:
            x = self.x(value)
            lines.append(_line("axis", x, x, self.bottom, self.bottom + 4))
            room = _CHAR * len(label) / 2
            lines.append(_text(min(max(x, room), _WIDTH - room), self.bottom + 16, label, "middle"))
        for value, label in up:
            y = self.y(value)
            lines.append(_line("grid", self.left, _WIDTH - _RIGHT, y, y))
            lines.append(_text(self.left - 5, y + 4, label, "end"))
        middle = (self.left + _WIDTH - _RIGHT) / 2
        lines.append(_text(middle, self.height - 7, x_title, "middle"))
        if y_title:
            lines.append(_text(4, 12, y_title, "start"))
        return lines


def _figure(
    title: str,
    body: Sequence[str],
    height: float,
    text: str,
    columns: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
) -> Figure:
    label = escape(f"{title}. {text}", quote=True)
    svg = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(body)}</svg>'
    return Figure(title, svg, text, columns, rows)


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def _text(x: float, y: float, text: str, anchor: str, inside: bool = False) -> str:
    kind = "tx in" if inside else "tx"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Four to seven round values between the two."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    first = math.ceil(low / step)
    count = min(int((high - first * step) / step + 1e-9) + 1, 12)
    return [((first + i) * step, _short((first + i) * step)) for i in range(count)]


def _short(value: float) -> str:
    """Four figures, and no powers of ten for what people read as a number."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _pairs(value: object) -> list[tuple[str, float]]:
    """Names and numbers of a mapping; what is no number that can be counted is left out."""
    if not isinstance(value, Mapping):
        return []
    found = [(str(key), finite(inner)) for key, inner in value.items()]
    return [(key, number) for key, number in found if number is not None and number >= 0]


def _flat(value: object) -> list[float]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [number for inner in value for number in _flat(inner)]
    number = finite(value)
    return [] if number is None else [number]


def _share(key: str) -> float | None:
    """``0.99``, ``p99`` or ``99%`` as 0.99."""
    text = key.strip().removeprefix("p").removesuffix("%").strip()
    try:
        value = float(text)
    except ValueError:
        return None
    return value / 100 if key.strip()[:1] == "p" or key.strip().endswith("%") or value > 1 else value
