"""``trtspec init``, ``lint`` and ``schema``: writing and checking recipes."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click

from trtspec.cli.output import UserPath, completing, json_option, print_json, problem_fields
from trtspec.errors import EXIT_BAD_INPUT, InputError, Problem
from trtspec.hardware import all_gpus, find_gpu
from trtspec.model_source import find_model
from trtspec.modelspec import read_modelspec
from trtspec.recipe_docs import markdown, starter
from trtspec.recipe_file import (
    Lint,
    json_schema,
    lint_content,
    plain_recipe,
    recipe_digest,
    variants,
)
from trtspec.recipe_file import lint as lint_file
from trtspec.recipe_model import AWQ_KINDS, MODEL_RULES, fitting_group_size, fitting_limits
from trtspec.recipe_rules import RULES
from trtspec.recipe_rules import Rule as RecipeRule
from trtspec.trtllm.export import EXPORT_RULES, ExportRule
from trtspec.trtllm.facts import VERSIONS
from trtspec.trtllm.lint import with_gpu_rules
from trtspec.trtllm.rules import RULES as GPU_RULES
from trtspec.trtllm.rules import Rule as GpuRule
from trtspec.user_files import user_path, write_user_file

_SECTIONS = json_schema()["properties"]
_ALL_RULES: dict[str, RecipeRule | GpuRule | ExportRule] = {
    **RULES,
    **MODEL_RULES,
    **GPU_RULES,
    **EXPORT_RULES,
}


def _kinds(section: str) -> list[str]:
    return list(variants(_SECTIONS[section]))


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Put ``text`` into ``path`` whole or not at all. Raises InputError or MissingError when it cannot, and
    InputError when ``path`` exists and ``force`` is not given."""
    write_user_file(path, text.encode(), overwrite=force)


# --------------------------------------------------------------------------- init


@click.command()
@click.option("--name", show_default="from the model", help="Names engines/NAME.")
@click.option(
    "--model", default="sample:smollm2-135m-instruct", show_default=True, help="Folder, sample or hub id."
)
@click.option(
    "--backend",
    type=click.Choice(_kinds("backend")),
    default="embedded",
    show_default=True,
    help="What runs the model.",
)
@click.option(
    "--quantization",
    type=click.Choice(_kinds("quantization")),
    default="fp8",
    show_default=True,
    help="Format of the weights.",
)
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    help="Weights that share a scale, for w4a16_awq and w4a8_awq.",
    show_default="the largest that divides the model's layers; 128 if the model is not here",
)
@click.option(
    "--kv-cache",
    type=click.Choice(["none", "fp8", "int8", "nvfp4"]),
    default="fp8",
    show_default=True,
    help="Format of the KV cache.",
)
@click.option(
    "--speculation",
    type=click.Choice(_kinds("speculation")),
    default="ngram",
    show_default=True,
    help="How tokens are drafted.",
)
@click.option("--draft-model", help="With draft_model: its folder, sample or hub id.")
@click.option("--heads", help="With medusa, eagle and eagle3: folder or hub id of the heads.")
@click.option("-o", "--output", show_default="NAME.yaml", help="File to write; - for stdout.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@json_option
def init(
    name: str | None,
    model: str,
    backend: str,
    quantization: str,
    group_size: str | None,
    kv_cache: str,
    speculation: str,
    draft_model: str | None,
    heads: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a starter recipe, every key explained.

    The recipe is checked before it is written, so what init writes, lint accepts. Where the model is on this
    machine, its config.json is checked too; a relative folder starts at the folder of the recipe.
    """
    if group_size is not None and quantization not in AWQ_KINDS:
        raise click.UsageError(
            f"--group-size goes with --quantization {' or '.join(AWQ_KINDS)}, not {quantization}"
        )
    drafting: dict[str, Any] = {"kind": speculation}
    if speculation == "draft_model":
        drafting["model"] = {"source": draft_model or _needed("--draft-model", speculation)}
    elif draft_model is not None:
        raise click.UsageError(f"--draft-model goes with --speculation draft_model, not {speculation}")
    if speculation in ("medusa", "eagle", "eagle3"):
        drafting["heads"] = heads or _needed("--heads", speculation)
    elif heads is not None:
        raise click.UsageError(f"--heads goes with --speculation medusa, eagle or eagle3, not {speculation}")
    data: dict[str, Any] = {
        "version": 1,
        "name": name if name is not None else _name_for(model, quantization, speculation),
        "model": {"source": model},
        "backend": {"kind": backend},
        "quantization": {"kind": quantization, "kv_cache": kv_cache},
        "speculation": drafting,
    }
    base = Path(output).resolve().parent if output not in (None, "-") else Path.cwd()
    _fit(data, group_size, base)
    checked = lint_content(json.dumps(data), "recipe", base)
    if checked.recipe is None:
        # The file does not exist yet, so its lines mean nothing.
        raise InputError([Problem(problem.message, key=problem.key) for problem in checked.errors])
    text = starter(plain_recipe(checked.recipe))
    if output == "-":
        if as_json:
            raise click.UsageError("--json and -o - both want stdout; choose one")
        click.echo(text, nl=False)
        return
    path = user_path(output if output is not None else f"{checked.recipe.name}.yaml")
    write_text(path, text, force=force)
    written = lint_file(path, model=True)
    if as_json:
        listed = {
            "warnings": [problem_fields(problem) for problem in written.warnings],
            "notes": [problem_fields(problem) for problem in written.notes],
        }
        print_json("init", {"file": str(path), "name": checked.recipe.name, **listed})
        return
    for problem in written.warnings:
        click.echo(_marked_line("warning", problem, "yellow"))
    for problem in written.notes:
        click.echo(_marked_line("note", problem))
    click.echo(f"wrote {path}; next: {shlex.join(['trtspec', 'build', str(path)])}")


def _fit(data: dict[str, Any], group_size: str | None, base: Path) -> None:
    """Choose what depends on the model's sizes, as far as they are known: group size and limits."""
    folder = find_model(data["model"]["source"], base)
    spec = None
    if folder is not None:
        with contextlib.suppress(InputError):  # the check of the whole recipe says what is wrong
            spec = read_modelspec(folder)
    if data["quantization"]["kind"] in AWQ_KINDS:
        fitting = fitting_group_size(spec) if spec is not None else None
        if group_size is not None or fitting is not None:
            data["quantization"]["group_size"] = int(group_size or fitting or 0)
    if spec is not None and (limits := fitting_limits(spec)):
        data["limits"] = limits


def _needed(flag: str, speculation: str) -> str:
    raise click.UsageError(f"--speculation {speculation} needs {flag}")


def _name_for(model: str, quantization: str, speculation: str) -> str:
    base = re.sub(r"[^a-z0-9._-]+", "-", model.removeprefix("sample:").rstrip("/").rsplit("/", 1)[-1].lower())
    parts = [base.strip("-._") or "model"]
    parts += [part for part in (quantization, speculation) if part != "none"]
    return "-".join(parts).replace("_", "-")[:63]


# --------------------------------------------------------------------------- lint


@click.command()
@click.argument("files", nargs=-1, type=click.Path())
@click.option(
    "--explain",
    metavar="RULE",
    shell_complete=completing(_ALL_RULES),
    help="Print why a rule exists and exit.",
)
@click.option(
    "--tensorrt-llm",
    "version",
    metavar="VERSION",
    shell_complete=completing(VERSIONS),
    help="For GPU backends: check this version only.",
    show_default="all known versions that the recipe admits",
)
@click.option(
    "--gpu",
    metavar="NAME",
    shell_complete=completing(gpu.name for gpu in all_gpus()),
    help="For GPU backends: check what this GPU can run.",
)
@click.option(
    "--export",
    type=UserPath(),
    metavar="FOLDER",
    help="For GPU backends: a quantized checkpoint made elsewhere, checked against the recipe.",
)
@json_option
@click.pass_context
def lint(
    ctx: click.Context,
    files: tuple[str, ...],
    explain: str | None,
    version: str | None,
    gpu: str | None,
    export: Path | None,
    as_json: bool,
) -> None:
    """Check recipes; report every problem with line and key.

    Needs neither the network nor the model. Where the model is on this machine (a folder, a fetched sample,
    the hub's cache), its config.json and vocabulary are checked against the recipe; else a note says that
    they were not. Recipes for GPU backends are checked against what is known of TensorRT-LLM's versions;
    nothing of it is run. Exit code 2 if a file has an error; warnings and notes do not fail.
    """
    if explain is not None:
        _explain(explain, as_json)
        return
    if not files:
        raise click.UsageError("no file given; for example: trtspec lint recipes/*.yaml")
    if export is not None and len(files) != 1:
        raise click.UsageError("--export goes with one recipe")
    board = None if gpu is None else find_gpu(gpu)
    results = [
        with_gpu_rules(lint_file(file, model=True), file, version=version, gpu=board, export=export)
        for file in files
    ]
    if as_json:
        print_json("lint", {"files": [_lint_fields(result) for result in results]})
    else:
        _print_lint(results)
    if any(result.errors for result in results):
        ctx.exit(EXIT_BAD_INPUT)


def _lint_fields(result: Lint) -> dict[str, Any]:
    recipe = result.recipe
    return {
        "file": result.file,
        "ok": recipe is not None,
        "name": recipe.name if recipe else None,
        "digest": recipe_digest(recipe) if recipe else None,
        "errors": [problem_fields(problem) for problem in result.errors],
        "warnings": [problem_fields(problem) for problem in result.warnings],
        "notes": [problem_fields(problem) for problem in result.notes],
    }


def _print_lint(results: list[Lint]) -> None:
    for result in results:
        for problem in result.errors:
            click.echo(click.style(str(problem), fg="red"))
        for problem in result.warnings:
            click.echo(_marked_line("warning", problem, "yellow"))
        if not result.errors and not result.warnings:
            click.echo(f"{result.file}: {click.style('ok', fg='green')}")
        for problem in result.notes:
            click.echo(_marked_line("note", problem))
    if len(results) > 1:
        bad = sum(bool(result.errors) for result in results)
        errors = sum(len(result.errors) for result in results)
        warnings = sum(len(result.warnings) for result in results)
        click.echo(
            f"{len(results)} recipes: {len(results) - bad} valid, {bad} not "
            f"({_count(errors, 'error')}, {_count(warnings, 'warning')})"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _marked_line(mark: str, problem: Problem, color: str | None = None) -> str:
    marked = Problem(problem.message, problem.file, problem.line, f"{mark}: {problem.key or 'file'}")
    return click.style(str(marked), fg=color)


def _explain(name: str, as_json: bool) -> None:
    rule = _ALL_RULES.get(name)
    if rule is None:
        close = difflib.get_close_matches(name, _ALL_RULES, n=3, cutoff=0.4)
        remedy = f"did you mean {' or '.join(close)}?" if close else f"there is: {', '.join(_ALL_RULES)}"
        raise InputError(f"no rule {name!r}; {remedy}")
    fields: dict[str, Any] = {"rule": rule.id, "severity": rule.severity, "why": rule.why}
    if isinstance(rule, RecipeRule):
        fields["reads"] = list(rule.reads)
        about = f"looks at {', '.join(rule.reads)}"
    else:
        fields["source"] = rule.source
        about = f"source: {rule.source}"
    if as_json:
        print_json("lint-rule", fields)
    else:
        click.echo(f"{rule.id} ({rule.severity}; {about})\n{rule.why}")


# --------------------------------------------------------------------------- schema


@click.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="Print docs/recipes.md instead.")
@click.option("--report", "of_report", is_flag=True, help="Print the JSON Schema of verify's report instead.")
@click.option("-o", "--output", type=UserPath(), help="File to write (or overwrite).")
def schema(as_markdown: bool, of_report: bool, output: Path | None) -> None:
    """Print the recipe's JSON Schema or its reference.

    Editors complete and check recipes with it: put
    `# yaml-language-server: $schema=recipe.schema.json` on the first line.
    """
    if as_markdown and of_report:
        raise InputError("--markdown and --report: one of them; the report's reference is docs/reports.md")
    text = markdown() if as_markdown else json.dumps(json_schema(), indent=2) + "\n"
    if of_report:
        from trtspec.verify.report_file import json_schema as report_schema

        text = json.dumps(report_schema(), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text, force=True)
