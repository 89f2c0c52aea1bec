"""Loss and acceptance against what was learnt, for a terminal and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtspec.cost.plot import svg, terminal
from trtspec.cost.views import Series, View


def acceptance_view(kind: str, curve: Sequence[dict[str, Any]]) -> View:
    """Acceptance length of a chain on answers kept back, and the loss, against thousands of tokens seen."""
    points = tuple((point["tokens"] / 1000, point["acceptance_length"]) for point in curve)
    loss = tuple((point["tokens"] / 1000, point["loss"]) for point in curve if point["loss"] is not None)
    return View(
        title=f"{kind}: training",
        columns=("tokens", "loss", "acceptance length", "acceptance by level"),
        rows=tuple(
            (
                point["tokens"],
                None if point["loss"] is None else round(point["loss"], 3),
                round(point["acceptance_length"], 3),
                " ".join(f"{rate:.2f}" for rate in point["acceptance"]),
            )
            for point in curve
        ),
        series=(Series("acceptance length", points), Series("loss", loss)),
        x_label="thousand tokens seen",
        y_label="tokens per step; loss (nats)",
        notes=("acceptance: teacher-forced, greedy, best candidate of each level, on answers kept back",),
    )


def curve_svg(kind: str, curve: Sequence[dict[str, Any]]) -> str:
    return svg(acceptance_view(kind, curve))


def curve_text(kind: str, curve: Sequence[dict[str, Any]]) -> str:
    """The acceptance length as a plot of characters; the loss has another scale."""
    view = acceptance_view(kind, curve)
    return terminal(View(**{**vars(view), "series": view.series[:1], "y_label": "tokens per step"}))
