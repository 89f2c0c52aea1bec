"""``trtspec recommend``: from a scenario, a model and a GPU to a recipe with its reasons."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from trtspec.cli.output import UserPath, json_option, print_json, print_warning
from trtspec.cli.recipe import write_text
from trtspec.cost.calibrate import read_calibration
from trtspec.cost.estimate import Deployment, Estimate
from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.cost.trace import fields as trace_fields
from trtspec.cost.trace import find_line
from trtspec.errors import InputError, Problem
from trtspec.hardware import Gpu, find_gpu
from trtspec.known_models import NamedModel, find_model
from trtspec.recipe_file import plain_recipe
from trtspec.recommend import recommend as decide
from trtspec.recommend.decision import Recommendation, Rejected, show
from trtspec.recommend.evidence import read_evidence
from trtspec.recommend.formats import NAMES
from trtspec.recommend.heads import read_heads
from trtspec.recommend.write import recipe_text
from trtspec.scenario import PRESETS, Scenario, describe_scenario, dump_scenario, load_scenario

NO_GPU = ("none", "cpu")


@click.command()
@click.option("--scenario", metavar="NAME|FILE", help=f"A preset ({', '.join(PRESETS)}) or a YAML file.")
@click.option(
    "--model", metavar="DIR|ID|SIZE", help="Checkpoint folder, sample, hub id, or a size such as 8B."
)
@click.option("--gpu", metavar="NAME", help="Such as H100-SXM; none: a machine without one.")
@click.option("--count", type=int, default=1, show_default=True, help="Number of GPUs.")
@click.option("--backend", type=click.Choice(["embedded", "pytorch", "tensorrt"]), help="Default: what fits.")
@click.option("--weights", type=click.Choice(list(NAMES)), help="Allow this weights format only.")
@click.option("--heads", metavar="DIR", help="Trained Medusa, EAGLE or EAGLE-3 heads of this model.")
@click.option(
    "--draft", metavar="DIR|ID|SIZE", help="A draft model; none: no draft model. Default: a published one."
)
@click.option("--report", metavar="FILE", help="A verify report: passed quality gate, measured acceptance.")
@click.option("--calibrate", metavar="FILE", help="Step times measured on this GPU (16 bit, one GPU).")
@click.option("--task", help="Kind of text: chat, code, math, qa, rag, summarization, translation.")
@click.option("--input-tokens", type=int, help="Prompt of a typical request.")
@click.option("--output-tokens", type=int, help="Answer of a typical request.")
@click.option("--concurrency", type=int, help="Requests in flight at once.")
@click.option("--temperature", type=float, help="0: greedy.")
@click.option("--copy-fraction", type=float, help="Share of the answer that repeats known text.")
@click.option("--fidelity", help="exact, distribution or approximate.")
@click.option("--memory", help="normal or tight.")
@click.option("--slo-ttft-ms", type=float, help="Bound on the time to the first token.")
@click.option("--slo-tpot-ms", type=float, help="Bound on the time per output token.")
@click.option("-o", "--output", type=UserPath(), help="Write the recipe; - for stdout.")
@click.option("--force", is_flag=True, help="Overwrite the recipe file.")
@click.option("--explain", is_flag=True, help="Print the path and every number with its formula.")
@click.option(
    "--show-scenario", metavar="NAME|FILE", help="Print a scenario as YAML, to copy and change, and exit."
)
@json_option
def recommend(
    scenario: str | None,
    model: str | None,
    gpu: str | None,
    count: int,
    backend: Any,
    weights: str | None,
    heads: str | None,
    draft: str | None,
    report: str | None,
    calibrate: str | None,
    output: Path | None,
    force: bool,
    explain: bool,
    show_scenario: str | None,
    as_json: bool,
    **described: Any,
) -> None:
    """Recommend quantization, drafting and limits for a scenario, with the numbers.

    No GPU, no network: all is computed. A scenario is a preset, a YAML file, or described by the options
    alone; options beside --scenario override its keys. Exit code 2: the request cannot be met (the message
    says what would fit); 4: only with a quality gate that has not been passed yet.
    """
    if show_scenario is not None:
        click.echo(dump_scenario(load_scenario(show_scenario)), nl=False)
        return
    if as_json and str(output) == "-":
        raise click.UsageError("--json and -o - both want stdout; choose one")
    work = _scenario(scenario, described)
    missing = [flag for flag, value in (("--model", model), ("--gpu", gpu)) if value is None]
    if missing or model is None or gpu is None:
        raise click.UsageError(f"{' and '.join(missing)} missing; for example: --model 8B --gpu H100-SXM")
    board, named = _board(gpu), find_model(model)
    found = decide(
        work,
        named,
        board,
        count=count,
        backend=backend,
        heads=read_heads(heads, named.spec) if heads is not None else None,
        draft=_draft(draft, named),
        evidence=read_evidence(Path(report), named.source) if report is not None else None,
        weights=weights,
        coefficients=_coefficients(calibrate, named, board),
    )
    text = recipe_text(found, _command())
    if str(output) == "-":
        click.echo(text, nl=False)
    elif output is not None:
        write_text(output, text, force=force)
    for warning in found.warnings:
        print_warning(warning)
    if as_json:
        print_json("recommend", _json(found, output, named))
    elif str(output) != "-":
        for line in _render(found, named, explain):
            click.echo(line)
        click.echo(_next_step(found, output))


def _scenario(name: str | None, described: dict[str, Any]) -> Scenario:
    values = {key: value for key, value in described.items() if value is not None}
    slo = {key.removeprefix("slo_"): values.pop(key) for key in list(values) if key.startswith("slo_")}
    if slo:
        values["slo"] = slo
    try:
        return describe_scenario(values) if name is None else load_scenario(name, values)
    except InputError as error:
        if name is not None and not values:
            raise
        raise InputError([_as_option(problem, name, values) for problem in error.problems]) from None


def _as_option(problem: Problem, name: str | None, values: dict[str, Any]) -> Problem:
    """A problem with a value that an option gave names the option, not a line of the preset."""
    key = problem.key or ""
    if not key or (name is not None and key.split(".")[0] not in values):
        return problem
    option = "--" + key.replace("slo.", "slo-").replace("_", "-")
    message = problem.message
    if name is None and message.startswith("missing"):
        message += f", or start from a preset: --scenario {PRESETS[1]}"
    return Problem(message, key=option)


def _board(name: str) -> Gpu | None:
    return None if name.lower() in NO_GPU else find_gpu(name)


def _draft(source: str | None, target: NamedModel) -> NamedModel | None:
    if source == "none" or (source is None and target.draft is None):
        return None
    return find_model(source if source is not None else str(target.draft))


def _coefficients(file: str | None, model: NamedModel, board: Gpu | None) -> Coefficients:
    if file is None:
        return DEFAULT
    if board is None:
        raise InputError("--calibrate refits the step times of a GPU; name it with --gpu")
    found = read_calibration(Path(file), Deployment(model.spec, board))
    if found.coefficients is None:
        raise InputError(f"{file}: holds no step times; a verify report goes to --report")
    return found.coefficients


def _command() -> Sequence[str]:
    import shlex

    arguments = sys.argv[1:] if sys.argv and "recommend" in sys.argv[1:] else []
    return [shlex.quote(word) for word in ("trtspec", *arguments)] if arguments else []


# --------------------------------------------------------------------------- printing


def _render(found: Recommendation, model: NamedModel, explain: bool) -> Iterator[str]:
    work = found.scenario
    yield click.style(f"{work.name}: {found.model} on {found.gpu}", bold=True)
    yield (
        f"  {work.task}, {work.input_tokens} in, {work.output_tokens} out, {work.concurrency} at once, "
        f"temperature {work.temperature:g}, fidelity {work.fidelity}, copies "
        + ("as usual for the task" if work.copy_fraction is None else f"{work.copy_fraction:.0%}")
    )
    yield f"  model: {model.origin}"
    yield ""
    yield "chosen"
    for reason in found.because:
        yield f"  {reason.step:<12} {reason.choice}"
        yield from _wrapped(reason.because, "  " + " " * 13)
        if explain and reason.numbers:
            shown = "; ".join(
                f"{name} {show(v)}{' ' + unit if unit else ''}" for name, v, unit in reason.numbers
            )
            yield from _wrapped(f"[{shown}]", "  " + " " * 13)
    yield ""
    yield from _numbers(found)
    yield ""
    yield "rejected" + " " * 37 + "TPOT ms   tokens/s"
    for rejected in sorted(found.rejected, key=lambda r: (r.step, r.tpot_ms or 0.0)):
        yield from _rejected(rejected)
        if explain and rejected.estimate is not None:
            yield from _short_trace(rejected.estimate)
    if explain:
        for name, estimate in (
            ("same weights, no drafting", found.plain),
            ("16 bit, no drafting", found.baseline),
        ):
            if estimate is not None and estimate.fits:
                yield f"the row {name}"
                yield from _short_trace(estimate)
        yield from _trace(found)


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(
        text,
        108,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _numbers(found: Recommendation) -> Iterator[str]:
    rows = (
        ("recommended", found.estimate),
        ("same weights, no drafting", found.plain),
        ("16 bit, no drafting", found.baseline),
    )
    if found.estimate is None:
        yield "estimate: none without a GPU; trtspec verify measures"
        return
    yield (
        f"{'estimate for one engine':<28}{'TTFT ms':>9}{'TPOT ms':>9}{'range':>16}{'tokens/s':>10}{'GiB':>7}"
        f"{'fits':>6}  accepted"
    )
    for name, estimate in rows:
        if estimate is None:
            continue
        if not estimate.fits:
            gib = estimate.memory.weights_bytes / 2**30
            yield f"  {name:<26} does not fit: {gib:.1f} GiB of weights on each GPU"
            continue
        low, high = estimate.interval
        memory = estimate.memory
        fits = str(memory.max_sequences)
        yield (
            f"  {name:<26}{show(estimate.ttft_ms):>9}{show(estimate.tpot_ms):>9}"
            f"{show(low) + ' - ' + show(high):>16}{show(estimate.tokens_per_s):>10}"
            f"{memory.total_bytes / 2**30:>7.1f}{fits:>6}"
            + (f"  {show(estimate.acceptance_length)} tokens/step" if estimate.acceptance_length > 1 else "")
        )
    yield f"  basis: {found.estimate.basis}; fits: sequences at full length that one engine holds"
    for assumption in found.estimate.assumptions:
        yield from _wrapped(f"assumes: {assumption}", "  ")


def _rejected(rejected: Rejected) -> Iterator[str]:
    tpot = "" if rejected.tpot_ms is None else show(rejected.tpot_ms)
    rate = "" if rejected.tokens_per_s is None else show(rejected.tokens_per_s)
    yield f"  {rejected.what:<42}{tpot:>8}{rate:>11}".rstrip()
    yield from _wrapped(rejected.because, "      ")


def _trace(found: Recommendation) -> Iterator[str]:
    if found.estimate is None:
        return
    yield ""
    yield "every number of the recommended row: value = formula (inputs); source"
    for line in found.estimate.trace:
        yield f"  {line.name} = {line.value:.6g} {line.unit} = {line.formula}"
        inputs = ", ".join(f"{name} {value:.6g}" for name, value in line.inputs.items())
        yield from _wrapped(f"({inputs}); {line.source}" if line.source else f"({inputs})", "      ")


def _short_trace(estimate: Estimate) -> Iterator[str]:
    """The lines that a rejected alternative's time per token is made of."""
    for name in ("verify.step_ms", "draft.step_ms", "draft_ms", "round_ms", "plain.step_ms", "tpot_ms"):
        if name == "plain.step_ms" and find_line(estimate.trace, "round_ms") is not None:
            continue
        line = find_line(estimate.trace, name)
        if line is not None:
            inputs = ", ".join(f"{key} {value:.5g}" for key, value in line.inputs.items())
            yield from _wrapped(f"{name} = {line.value:.5g} = {line.formula} ({inputs})", "        ")


def _next_step(found: Recommendation, output: Path | None) -> str:
    if output is None:
        return "\nwrite the recipe with: -o recipe.yaml"
    if found.recipe.backend.kind == "embedded":
        return f"\nwrote {output}; next: trtspec build {output}"
    return f"\nwrote {output}; next, where the GPU is: trtspec build {output}"


def _json(found: Recommendation, output: Path | None, model: NamedModel) -> dict[str, Any]:
    def priced(estimate: Any) -> dict[str, Any] | None:
        if estimate is None:
            return None
        return {
            "ttft_ms": estimate.ttft_ms,
            "tpot_ms": estimate.tpot_ms,
            "tpot_interval_ms": list(estimate.interval),
            "tokens_per_s": estimate.tokens_per_s,
            "memory_bytes": estimate.memory.total_bytes,
            "max_sequences": estimate.memory.max_sequences,
            "fits": estimate.fits,
            "acceptance_length": estimate.acceptance_length,
            "break_even_batch": estimate.break_even_batch,
            "bound": estimate.bound,
            "basis": estimate.basis,
            "assumptions": list(estimate.assumptions),
        }

    return {
        "scenario": found.scenario.model_dump(mode="json"),
        "model": {"source": found.model, "origin": model.origin},
        "gpu": found.gpu,
        "count": found.recipe.parallel.tp * found.replicas,
        "replicas": found.replicas,
        "file": str(output) if output is not None else None,
        "recipe": plain_recipe(found.recipe),
        "estimate": priced(found.estimate),
        "no_drafting": priced(found.plain),
        "baseline": priced(found.baseline),
        "because": [
            {
                "step": reason.step,
                "choice": reason.choice,
                "because": reason.because,
                "numbers": [{"name": n, "value": v, "unit": u} for n, v, u in reason.numbers],
            }
            for reason in found.because
        ],
        "rejected": [
            {
                "step": r.step,
                "what": r.what,
                "because": r.because,
                "tpot_ms": r.tpot_ms,
                "tokens_per_s": r.tokens_per_s,
            }
            for r in found.rejected
        ],
        "warnings": list(found.warnings),
        "trace": [dict(trace_fields(line)) for line in (found.estimate.trace if found.estimate else ())],
    }
