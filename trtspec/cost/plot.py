"""Draws a view: as text for a terminal, as SVG without any package, as PNG where matplotlib is installed."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from trtspec.cost.views import Cell, Series, View
from trtspec.errors import MissingError

COLORS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf"),
    *("#8c564b", "#7f7f7f", "#e377c2", "#bcbd22", "#000000", "#aec7e8"),
)
LETTERS = "ox+*#@%&"
WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 170, 40, 52


def table(view: View) -> str:
    """The rows as aligned text under their columns, notes below."""
    cells = [list(view.columns), *([_cell(value) for value in row] for row in view.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(view.columns))]
    numeric = [all(not isinstance(row[i], str) for row in view.rows) for i in range(len(view.columns))]
    lines = [
        "  ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([view.title, "", *lines, *(f"note: {note}" for note in view.notes)])


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def ticks(low: float, high: float, *, log: bool = False, count: int = 5) -> list[float]:
    """Round values that cover low .. high: powers of two on a log scale, else steps of 1, 2 or 5."""
    if log:
        first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
        step = max(1, (last - first) // 8)
        return [2.0**i for i in range(first, last + 1, step)]
    span = (high - low) or abs(high) or 1.0
    raw = span / count
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * (1 - 1e-9))
    start = math.floor(low / step + 1e-9) * step
    values = []
    while start < high + step * (1 - 1e-9):
        values.append(round(start, 12))
        start += step
    return values


def _frame(view: View) -> tuple[list[float], list[float]]:
    """Ticks of both axes."""
    xs = [x for s in view.series for x, _ in s.points] + [x for x, _ in view.marks]
    ys = [y for s in view.series for _, y in s.points]
    return ticks(min(xs), max(xs), log=view.log_x), ticks(min(0.0, *ys), max(ys))


def _share(value: float, axis: list[float], log: bool = False) -> float:
    low, high = axis[0], axis[-1]
    if log:
        value, low, high = math.log2(value), math.log2(low), math.log2(high)
    return (value - low) / (high - low) if high > low else 0.5


def terminal(view: View, width: int = 64, height: int = 16) -> str:
    """The plot in characters: a letter per series, ``|`` at marks; empty for a view without series."""
    if not view.series:
        return ""
    xs, ys = _frame(view)
    grid = [[" "] * width for _ in range(height)]
    for x, _label in view.marks:
        column = round(_share(x, xs, view.log_x) * (width - 1))
        for line in grid:
            line[column] = "|"
    for s, letter in zip(view.series, LETTERS * 9, strict=False):
        for x, y in s.points:
            column = round(_share(x, xs, view.log_x) * (width - 1))
            grid[height - 1 - round(_share(y, ys) * (height - 1))][column] = letter
    labels = [f"{ys[-1]:g}", *[""] * (height - 2), f"{ys[0]:g}"]
    left = max(map(len, labels))
    lines = [f"{label:>{left}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    lines.append(" " * left + " +" + "-" * width)
    low, high = f"{xs[0]:g}", f"{xs[-1]:g}"
    lines.append(" " * (left + 2) + low + view.x_label.center(width - len(low) - len(high)) + high)
    keys = [f"{letter} {s.name}" for s, letter in zip(view.series, LETTERS * 9, strict=False)]
    keys += [f"| {label}" for _, label in view.marks]
    return "\n".join([view.y_label, *lines, "  ".join(keys)])


def svg(view: View) -> str:
    """The plot as one SVG file: axes, lines (or points), marks, legend. Raises ValueError for a view that has
    nothing to plot."""
    if not view.series:
        raise ValueError(f"{view.title}: nothing to plot")
    xs, ys = _frame(view)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + _share(x, xs, view.log_x) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - _share(y, ys) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(view.title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(view.title)}</text>',
    ]
    for y in ys:
        (x0, height), (x1, _) = at(xs[0], y), at(xs[-1], y)
        parts.append(f'<line x1="{x0}" y1="{height}" x2="{x1}" y2="{height}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 6}" y="{height + 4}" text-anchor="end">{y:g}</text>')
    for x in xs:
        across, bottom = at(x, ys[0])
        parts.append(f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(view.x_label)}</text>')
    parts.append(
        f'<text transform="rotate(-90)" x="{-HEIGHT / 2}" y="16" text-anchor="middle">'
        f"{escape(view.y_label)}</text>"
    )
    for x, label in view.marks:
        (across, top), (_, bottom) = at(x, ys[-1]), at(x, ys[0])
        parts.append(
            f'<line x1="{across}" y1="{top}" x2="{across}" y2="{bottom}" stroke="#333" '
            'stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text x="{across + 4}" y="{top + 12}">{escape(label)}</text>')
    for i, s in enumerate(view.series):
        color = COLORS[i % len(COLORS)]
        parts += _drawn(s, color, [at(x, y) for x, y in s.points])
        y = TOP + 16 * i + 8
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 8}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 28}" y="{y + 1}">{escape(s.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(s: Series, color: str, points: list[tuple[float, float]]) -> list[str]:
    out = []
    if not s.scatter:
        path = " ".join(f"{x},{y}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    return out + [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in points]


def png(view: View, path: Path) -> None:
    """Write the plot as PNG. Raises MissingError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError(
            f"{path}: PNG needs matplotlib, which is not installed; name the file .svg, "
            "or run: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, s in enumerate(view.series):
        xs, ys = [x for x, _ in s.points], [y for _, y in s.points]
        line = "none" if s.scatter else "-"
        axes.plot(xs, ys, marker="o", linestyle=line, label=s.name, color=COLORS[i % len(COLORS)])
    for x, label in view.marks:
        axes.axvline(x, linestyle="--", color="#333", label=label)
    if view.log_x:
        axes.set_xscale("log", base=2)
    axes.set(title=view.title, xlabel=view.x_label, ylabel=view.y_label)
    axes.legend()
    figure.savefig(path)
