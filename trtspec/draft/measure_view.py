"""What ``trtspec draft measure`` shows: tables, a plot of acceptance by position, JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.cost.plot import table
from trtspec.cost.views import Series, View
from trtspec.draft.acceptance import (
    DEAD_LENGTH,
    DEFINITION,
    Acceptance,
    Answered,
    Value,
    by_task,
    chance_length,
    difference,
    summarize,
)
from trtspec.draft.choose import Choice, Option
from trtspec.draft.measure import Measured


@dataclass(frozen=True)
class Measurement:
    """Everything that was measured; ``cells`` end with the recipe's own. ``skipped``: those that were not,
    and why."""

    recipe_name: str
    recipe_digest: str
    kind: str
    data: str
    max_new_tokens: int
    cells: tuple[Measured, ...]
    skipped: tuple[tuple[str, str], ...]
    choice: Choice | None

    @property
    def own(self) -> Measured:
        return self.cells[-1]

    @property
    def failed(self) -> bool:
        """Whether the drafter is dead, or the books contradict each other."""
        return bool(self.own.dead or any(cell.contradictions for cell in self.cells))


def text_of(found: Measurement) -> str:
    """The whole answer for a terminal."""
    own = summarize(found.own.answers)
    parts = [
        f"{found.recipe_name}: {found.kind}, greedy, {own.prompts} prompts of {found.data}, up to "
        f"{found.max_new_tokens} tokens each; intervals are 95 %, over prompts",
        DEFINITION,
        "",
        table(_cells_view(found)),
        "",
        table(positions_view(found)),
    ]
    tasks = by_task(found.own.answers)
    if len(tasks) > 1:
        parts += ["", table(_tasks_view(tasks))]
    steps = ", ".join(f"{tokens}: {count}" for tokens, count in own.histogram.items())
    parts += ["", f"steps by tokens emitted: {steps}"]
    parts.append(
        f"acceptance length {own.length.value:.3f}; from the rates by position 1 + sum of joint = "
        f"{own.predicted:.3f}; with the prompt's own step, as verify counts, {own.with_prompt_step:.3f}"
    )
    parts += [f"not measured: {name}: {why}" for name, why in found.skipped]
    if found.choice is not None:
        parts += ["", *_choice_lines(found.choice)]
    for cell in found.cells:
        parts += [f"contradiction: {cell.cell.name}: {line}" for line in cell.contradictions]
    if found.own.dead:
        parts += ["", f"dead drafter: {found.own.dead}"]
        if found.own.hint:
            parts.append(f"dead drafter: {found.own.hint}")
    return "\n".join(parts)


def _cells_view(found: Measurement) -> View:
    first = found.cells[0]
    rows = []
    for cell in found.cells:
        own = summarize(cell.answers)
        gap = None if cell is first else difference(cell.answers, first.answers)
        rows.append(
            (
                cell.cell.target,
                cell.cell.draft,
                _shown(own.length),
                _shown(own.length_by_request),
                f"{own.rate.value:.1%} ({own.accepted}/{own.drafted})" if own.drafted else "-",
                "-" if gap is None else _shown(gap.length, sign=True),
                "-" if gap is None else _shown(gap.length_by_request, sign=True),
            )
        )
    columns = ("target", "draft", "length", "by request", "rate", "difference", "by request ")
    notes = () if len(rows) == 1 else ("difference: of lengths to the first row, paired by prompt",)
    return View("Acceptance", columns, tuple(rows), notes=notes)


def positions_view(found: Measurement) -> View:
    """Acceptance by position of the recipe's own cell, and a line for every cell."""
    series = []
    for cell in found.cells:
        positions = [p for p in summarize(cell.answers).positions if p.steps]
        points = tuple((float(p.position), p.conditional.value) for p in positions)
        if points:
            series.append(Series(cell.cell.name, points))
        if cell is found.own and points:
            series.append(Series("joint", tuple((float(p.position), p.joint.value) for p in positions)))
    rows = tuple(
        (p.position, _shown(p.conditional), _shown(p.joint), f"{p.offered:.0%}", p.steps)
        for p in summarize(found.own.answers).positions
        if p.steps
    )
    return View(
        f"Acceptance by position, {found.own.cell.name}",
        ("position", "conditional", "joint", "offered", "steps"),
        rows,
        tuple(series),
        "position (level of a tree)",
        "share accepted",
        notes=("conditional: of the steps that accepted all before it; offered: of those, had a candidate",),
    )


def _tasks_view(tasks: dict[str, Acceptance]) -> View:
    rows = tuple(
        (
            task,
            one.prompts,
            _shown(one.length),
            _shown(one.length_by_request),
            f"{one.rate.value:.1%}" if one.drafted else "-",
            " ".join(f"{p.conditional.value:.2f}" for p in one.positions[:6] if p.steps),
        )
        for task, one in tasks.items()
    )
    return View("By task", ("task", "prompts", "length", "by request", "rate", "conditional"), rows)


def _choice_lines(choice: Choice) -> list[str]:
    def row(label: str, option: Option) -> tuple[str, str, float, float, str]:
        return label, option.label, round(option.length, 3), round(option.nodes, 1), _speed(option)

    rows = [row("no drafts", choice.none), row("recipe", choice.current)]
    if not choice.keep:
        rows.append(row("best", choice.best))
    how = (
        "on the half of the prompts that it was not chosen on" if choice.cross_fitted else "on these prompts"
    )
    notes = [
        "predicted: one sequence, after the first token, from these answers and steps timed on this machine",
        "steps by rows: " + ", ".join(f"{rows} {ms:.2f} ms" for rows, ms in choice.costs[:12]),
    ]
    if choice.draft_costs:
        costs = ", ".join(f"{levels} {ms:.2f} ms" for levels, ms in choice.draft_costs)
        notes.append(f"drafts by levels: {costs}")
    if not choice.keep:
        doubt = "; not sure by these prompts, measure more" if choice.gain.interval[0] < 1 else ""
        notes.append(f"best: {how}: {_shown(choice.gain)} times the recipe's speed{doubt}")
    view = View("What pays", ("", "drafts", "length", "nodes", "tokens/s"), tuple(rows), notes=tuple(notes))
    lines = [table(view)]
    if choice.keep:
        lines.append("the recipe's own is as good as any that was priced (within 2 %)")
    fastest = max(choice.best.tokens_per_s.value, choice.current.tokens_per_s.value)
    if choice.none.tokens_per_s.value >= fastest:
        lines.append("drafting nothing is faster than all of them on this machine")
    return lines


def _speed(option: Option) -> str:
    low, high = option.tokens_per_s.interval
    if not math.isfinite(low) or low == high:
        return f"{option.tokens_per_s.value:.1f}"
    return f"{option.tokens_per_s.value:.1f} ({low:.1f} to {high:.1f})"


def _shown(value: Value, *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    if math.isnan(value.value):
        return "-"
    low, high = value.interval
    if not math.isfinite(low) or not math.isfinite(high):
        return f"{value.value:{form}}"
    return f"{value.value:{form}} ({low:{form}} to {high:{form}})"


# --------------------------------------------------------------------------- JSON


def fields_of(found: Measurement) -> dict[str, Any]:
    """The whole answer as JSON values; what is not known (NaN, an interval without ends) is null."""
    fields: dict[str, Any] = {
        "recipe_name": found.recipe_name,
        "recipe_digest": found.recipe_digest,
        "speculation": found.kind,
        "data": found.data,
        "max_new_tokens": found.max_new_tokens,
        "definition": DEFINITION,
        "cells": [_cell_fields(cell, found.cells[0]) for cell in found.cells],
        "skipped": [{"cell": name, "why": why} for name, why in found.skipped],
        "dead": {
            "is_dead": bool(found.own.dead),
            "why": found.own.dead,
            "hint": found.own.hint,
            "below_length": DEAD_LENGTH,
            "chance_length": chance_length(found.own.answers),
        },
        "choice": None if found.choice is None else _choice_fields(found.choice),
    }
    known: dict[str, Any] = _known(fields)
    return known


def _cell_fields(cell: Measured, first: Measured) -> dict[str, Any]:
    return {
        "target": cell.cell.target,
        "draft": cell.cell.draft,
        **asdict(summarize(cell.answers)),
        "by_task": {task: asdict(one) for task, one in by_task(cell.answers).items()},
        "difference_to_first": None if cell is first else asdict(difference(cell.answers, first.answers)),
        "per_prompt": [_prompt_fields(answer) for answer in cell.answers],
        "contradictions": list(cell.contradictions),
    }


def _prompt_fields(answer: Answered) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "task": answer.task,
        "tokens": answer.emitted,
        "steps": len(answer.steps),
        "drafted": sum(step.drafted for step in answer.steps),
        "accepted": sum(step.accepted for step in answer.steps),
    }


def _choice_fields(choice: Choice) -> dict[str, Any]:
    fields = asdict(choice)
    fields["replayed"] = {"length": choice.replayed.length, "predicted": choice.replayed.predicted}
    return fields


def _known(value: Any) -> Any:
    if isinstance(value, Value):
        return _known({"value": value.value, "interval": value.interval})
    if isinstance(value, dict):
        if set(value) == {"value", "interval"} and not all(map(math.isfinite, value["interval"])):
            value = {**value, "interval": None}
        return {str(key): _known(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
