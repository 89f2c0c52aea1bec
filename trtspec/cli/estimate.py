"""``trtspec estimate``, ``sweep`` and ``explain``: a recipe's price, what moves it, where it comes from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from trtspec.cli.output import FloatRange, UserPath, human_bytes, json_option, print_json
from trtspec.cli.recipe import write_text
from trtspec.cost import plot, views
from trtspec.cost.calibrate import read_calibration
from trtspec.cost.estimate import Deployment, Estimate, Workload
from trtspec.cost.steps import DEFAULT, coefficient_table
from trtspec.cost.trace import TraceLine, find_line
from trtspec.cost.trace import fields as trace_fields
from trtspec.errors import InputError
from trtspec.hardware import find_gpu
from trtspec.known_models import find_model
from trtspec.recipe_file import load_recipe

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _workload_options(function: _Function) -> _Function:
    for option in reversed(
        (
            click.option("--gpu", metavar="NAME", help="Such as H100-SXM; how many: the recipe's parallel."),
            click.option("--model", metavar="DIR|ID|SIZE", help="Instead of the recipe's model."),
            click.option("--draft", metavar="DIR|ID|SIZE", help="Instead of the recipe's draft model."),
            click.option("--task", default="chat", show_default=True, help="For acceptance from tables."),
            click.option("--input-tokens", type=click.IntRange(1), help="Default: half of max_input_tokens."),
            click.option(
                "--output-tokens", type=click.IntRange(1), default=256, show_default=True,
                help="Answer of a request.",
            ),
            click.option(
                "--concurrency", type=click.IntRange(1), default=1, show_default=True,
                help="Requests in flight.",
            ),
            click.option(
                "--temperature", type=FloatRange(0.0), default=0.0, show_default=True, help="0: greedy."
            ),
            click.option(
                "--copy-fraction", type=FloatRange(0.0, 1.0), help="Share of the answer that is copied."
            ),
            click.option(
                "--calibrate", type=UserPath(), metavar="FILE",
                help="A verify report or measured step times; see docs/math.md.",
            ),
            click.option(
                "--silicon", is_flag=True, help="Step times from AIConfigurator (trtspec[silicon])."
            ),
        )
    ):  # fmt: skip
        function = option(function)
    return function


def _priced(recipe_path: Path, given: dict[str, Any]) -> tuple[views.Priced, str]:
    """The recipe with its model, GPU, workload and calibration; and what the calibration was."""
    recipe = load_recipe(recipe_path)
    if given["gpu"] is None:
        raise InputError("--gpu is missing; name the GPU, such as --gpu H100-SXM")
    if recipe.backend.kind == "embedded" and getattr(recipe.backend, "device", "cpu") == "cpu":
        note = "the recipe runs on the CPU; the numbers are for the GPU named"
    else:
        note = ""
    base = recipe_path.resolve().parent
    spec = find_model(given["model"] or recipe.model.source, Path(".") if given["model"] else base).spec
    draft_spec = None
    if recipe.speculation.kind == "draft_model":
        source = given["draft"] or recipe.speculation.model.source
        draft_spec = find_model(source, Path(".") if given["draft"] else base).spec
    deployment = Deployment(
        spec,
        find_gpu(given["gpu"]),
        tp=recipe.parallel.tp,
        pp=recipe.parallel.pp,
        quantization=recipe.quantization,
        speculation=recipe.speculation,
        acceptance=recipe.acceptance,
        draft_spec=draft_spec,
        backend=recipe.backend.kind,
        max_num_tokens=recipe.limits.max_num_tokens,
        max_batch_size=recipe.limits.max_batch_size,
    )
    workload = Workload(
        given["input_tokens"] or max(1, recipe.limits.max_input_tokens // 2),
        given["output_tokens"],
        given["concurrency"],
        given["temperature"],
        given["copy_fraction"],
        given["task"],
    )
    coefficients = DEFAULT
    if given["calibrate"] is not None:
        plain = replace(deployment, max_batch_size=None)
        calibration = read_calibration(given["calibrate"], plain)
        note = "; ".join(filter(None, (note, calibration.note)))
        coefficients = calibration.coefficients or coefficients
        if calibration.curve is not None:
            deployment = replace(deployment, acceptance_curve=calibration.curve)
    if given["silicon"]:
        from trtspec.cost.silicon import silicon_coefficients

        coefficients = silicon_coefficients(deployment, workload)
        note = "; ".join(filter(None, (note, coefficients.source)))
    return views.Priced(deployment, workload, coefficients), note


def _fields(e: Estimate) -> dict[str, Any]:
    value = {name: getattr(e, name) for name in e.__dataclass_fields__ if name not in ("trace", "memory")}
    value["memory"] = {**asdict(e.memory), "total_bytes": e.memory.total_bytes}
    value["trace"] = [trace_fields(line) for line in e.trace]
    return value


@click.command()
@click.argument("recipe", type=UserPath())
@_workload_options
@click.option("--explain", is_flag=True, help="Print every number with its formula.")
@json_option
def estimate(recipe: Path, explain: bool, as_json: bool, **given: Any) -> None:
    """Price RECIPE on a GPU: memory, TTFT, TPOT, throughput, speedup, break-even batch.

    No GPU is needed: all is computed from config.json, the GPU table and docs/math.md.
    """
    priced, note = _priced(recipe, given)
    e = priced.estimate()
    if as_json:
        print_json("estimate", {"gpu": priced.deployment.gpu.name, **_fields(e), "calibration": note or None})
        return
    for line in _lines(priced, e, note):
        click.echo(line)
    if explain:
        click.echo("")
        for traced in e.trace:
            click.echo(_formula(traced))


def _lines(priced: views.Priced, e: Estimate, note: str) -> list[str]:
    d, w, m = priced.deployment, priced.workload, e.memory
    low, high = e.interval
    boards = d.gpu.name if d.tp * d.pp == 1 else f"{d.tp * d.pp} x {d.gpu.name}"
    lines = [
        f"{boards}; {d.quantization.kind} weights, {d.quantization.kv_cache} KV, speculation "
        f"{d.speculation.kind}; {w.input_tokens} in, {w.output_tokens} out, concurrency "
        f"{w.concurrency}, {w.task}",
        "",
        f"TPOT        {e.tpot_ms:9.3f} ms   [{low:.3f}, {high:.3f}]",
        f"TTFT        {e.ttft_ms:9.1f} ms",
        f"throughput  {e.tokens_per_s:9.1f} tokens/s",
    ]
    if d.speculation.kind != "none":
        limit = "none up to 512" if e.break_even_batch is None else str(e.break_even_batch)
        lines += [
            f"speedup     {e.speedup:9.3f} x    over the same weights without drafting",
            f"acceptance  {e.acceptance_length:9.3f} tokens/step, bonus token included",
            f"round       {e.round_ms:9.3f} ms   plain step {e.plain_step_ms:.3f} ms, "
            f"drafting {e.draft_ms:.3f} ms",
            f"break-even  {limit:>9}      batch from which drafting loses",
        ]
    lines += [
        f"bound by    {e.bound:>9}",
        f"memory      {human_bytes(m.total_bytes):>9}      of {human_bytes(m.capacity_bytes)} a GPU: weights "
        f"{human_bytes(m.weights_bytes)}, draft {human_bytes(m.draft_weights_bytes)}, KV "
        f"{human_bytes(m.kv_bytes)}, activations {human_bytes(m.activations_bytes)}, "
        f"runtime {human_bytes(m.reserve_bytes)}",
        f"sequences   {m.max_sequences:9}      of full length fit; {e.admitted} run together",
        f"basis       {e.basis:>9}      {note}".rstrip(),
    ]
    if not e.fits:
        lines.append("does not fit: not even one sequence of full length has room")
    return lines + [f"assumed: {text}" for text in e.assumptions]


# --------------------------------------------------------------------------- sweep

VIEWS = ("scenarios", "draft-quantization", "batch", "best-length", "pareto")


def _values(text: str) -> tuple[str, list[float]]:
    """``NAME=1,2,4`` or ``NAME=LOW:HIGH:STEP`` (HIGH included)."""
    name, found, values = text.partition("=")
    try:
        if ":" in values:
            low, high, step = (float(part) for part in values.split(":"))
            count = int((high - low) / step + 1e-9) + 1
            numbers = [round(low + i * step, 10) for i in range(count)]
        else:
            numbers = [float(part) for part in values.split(",")]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if not found or not 1 <= len(numbers) <= 200:
        raise InputError(f"--vary {text}: give NAME=1,2,4 or NAME=LOW:HIGH:STEP, at most 200 values")
    return name.strip(), numbers


@click.command()
@click.argument("what", metavar="VIEW|RECIPE")
@click.argument("recipe", required=False, type=UserPath())
@_workload_options
@click.option("--vary", multiple=True, metavar="NAME=VALUES", help="Own sweep over one or two inputs.")
@click.option("--metric", default="speedup", show_default=True, help=f"One of {', '.join(views.METRICS)}.")
@click.option("--alpha", type=FloatRange(0.0, 1.0), default=0.8, show_default=True, help="Without a recipe.")
@click.option(
    "--draft-tokens", type=click.IntRange(0), default=4, show_default=True, help="K without a recipe."
)
@click.option("--c", type=FloatRange(0.0, min_open=True), default=10.0, show_default=True,
              help="Target step in draft steps, without a recipe.")  # fmt: skip
@click.option(
    "--q-target",
    type=FloatRange(0.0, min_open=True),
    default=2.0,
    show_default=True,
    help="Target: what quantization gains.",
)
@click.option(
    "--q-draft",
    type=FloatRange(0.0, min_open=True),
    default=2.0,
    show_default=True,
    help="Draft: what quantization gains.",
)
@click.option("--plot", "plot_path", type=UserPath(), help="Write the plot: .svg or .png.")
@click.option("--force", is_flag=True, help="Overwrite the plot.")
@json_option
def sweep(
    what: str, recipe: Path | None, vary: tuple[str, ...], metric: str, alpha: float, draft_tokens: int,
    c: float, q_target: float, q_draft: float, plot_path: Path | None, force: bool, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Vary what matters and tabulate. VIEW is one of:

    \b
    scenarios           neither, both, only the target, only the draft quantized
    draft-quantization  what leaving the draft in 16 bit loses
    batch               speedup against batch, break-even marked
    best-length         K* against alpha (and context)
    pareto              throughput against speed, over formats, drafting, batch
    vary                your own: --vary alpha=.5:.9:.1 --vary K=2,4,8

    With RECIPE and --gpu the numbers are priced for them; without, they are the closed form in alpha, K, c,
    q_t and q_d.
    """
    if what not in (*VIEWS, "vary"):
        close = difflib.get_close_matches(what, (*VIEWS, "vary"), n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join((*VIEWS, 'vary'))}"
        raise InputError(f"no view {what!r}; {hint}")
    if plot_path is not None and plot_path.suffix not in (".svg", ".png"):
        raise InputError(f"{plot_path}: a plot is written as .svg or .png")
    if (what == "vary") != bool(vary):
        raise InputError("--vary goes with the view 'vary', and the view 'vary' needs --vary")
    if recipe is None:
        view = _closed_view(what, views.Closed(alpha, draft_tokens, c, q_target, q_draft), vary, metric)
    else:
        priced, note = _priced(recipe, given)
        if what in ("batch", "pareto", "draft-quantization") or any(v.startswith("batch") for v in vary):
            # The question is what a batch would cost, not what this recipe's own limit admits.
            priced = replace(priced, deployment=replace(priced.deployment, max_batch_size=None))
        view = _priced_view(what, priced, vary, metric)
        view = replace(view, notes=(*view.notes, *([note] if note else [])))
    if plot_path is not None:
        _write_plot(view, plot_path, force)
    if as_json:
        print_json("sweep", asdict(view))
        return
    click.echo(plot.table(view))
    drawn = plot.terminal(view)
    if drawn:
        click.echo("\n" + drawn)


def _write_plot(view: views.View, path: Path, force: bool) -> None:
    if not view.series:
        raise InputError(f"{view.title}: a table only, there is nothing to plot")
    if path.suffix == ".svg":
        write_text(path, plot.svg(view), force=force)
        return
    if path.exists() and not force:
        raise InputError(f"{path}: exists; choose another name, or --force to overwrite")
    plot.png(view, path)


def _closed_view(what: str, given: views.Closed, vary: Sequence[str], metric: str) -> views.View:
    if what == "vary":
        return views.vary(given, dict(_values(text) for text in vary), metric)
    if what == "scenarios":
        return views.scenarios_closed(given)
    if what == "draft-quantization":
        return views.draft_loss_closed(given)
    if what == "best-length":
        return views.best_length_closed(given)
    raise InputError(
        f"the view {what!r} needs a recipe and --gpu: batch and memory are not in the closed form"
    )


def _priced_view(what: str, given: views.Priced, vary: Sequence[str], metric: str) -> views.View:
    if what == "vary":
        return views.vary(given, dict(_values(text) for text in vary), metric)
    if what == "scenarios":
        return views.scenarios_priced(given)
    if what == "draft-quantization":
        return views.draft_loss_priced(given)
    if what == "batch":
        return views.by_batch(given)
    if what == "best-length":
        return views.best_length_priced(given)
    return views.pareto(given)


# --------------------------------------------------------------------------- explain


def _formula(line: TraceLine) -> str:
    inputs = ", ".join(f"{name} {_number(value)}" for name, value in line.inputs.items())
    text = f"{line.name} = {_number(line.value)} {line.unit}\n    = {line.formula}\n    with {inputs}"
    return text + (f"\n    source: {line.source}" if line.source else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.10g}"


def _chain(lines: Sequence[TraceLine], line: TraceLine) -> list[TraceLine]:
    """The lines that ``line`` rests on, itself first: an input is the last earlier line of that value."""
    wanted, out = [line], []
    while wanted:
        current = wanted.pop(0)
        if current in out:
            continue
        out.append(current)
        earlier = lines[: lines.index(current)]
        for value in current.inputs.values():
            found = [e for e in earlier if e.value == value and value not in (0.0, 1.0)]
            wanted += found[-1:]
    return out


@click.command()
@click.argument("number")
@click.argument("recipe", type=UserPath())
@_workload_options
@json_option
def explain(number: str, recipe: Path, as_json: bool, **given: Any) -> None:
    """Trace NUMBER (tpot_ms, ttft_ms, speedup, verify.kv_ms ...) of RECIPE on a GPU to formulas, inputs and
    sources; "all" lists the names."""
    priced, _note = _priced(recipe, given)
    lines = priced.estimate().trace
    if number == "all":
        for line in lines:
            click.echo(f"{line.name:32} {_number(line.value):>20} {line.unit}")
        return
    line_or_none = find_line(lines, number)
    if line_or_none is None:
        names = list(dict.fromkeys(line.name for line in lines))
        close = difflib.get_close_matches(number, names, n=3, cutoff=0.4)
        raise InputError(
            f"no number {number!r}; {'nearest: ' + ', '.join(close) if close else 'see: explain all'}"
        )
    chain = _chain(lines, line_or_none)
    constants = {
        name: entry
        for name, entry in coefficient_table()["coefficients"].items()
        if any(getattr(priced.coefficients, name) in line.inputs.values() for line in chain)
    }
    if as_json:
        print_json("explain", {"lines": [trace_fields(line) for line in chain], "constants": constants})
        return
    for line in chain:
        click.echo(_formula(line))
    click.echo("\nconstants" + ("" if priced.coefficients.basis == "roofline" else " (before calibration)"))
    for name, entry in constants.items():
        click.echo(f"    {name} {entry['value']:g} ({entry['unit']}): {entry['source']}")
