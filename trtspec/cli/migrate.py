"""``trtspec migrate`` and ``import``: recipes from other backends and from TensorRT-LLM's own files."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

import click

from trtspec.cli.output import UserPath, json_option, print_json
from trtspec.recipe_file import load_recipe, recipe_digest
from trtspec.trtllm.account import Change, Migration, Outcome, describe, migrated_yaml, shown
from trtspec.trtllm.imported import describe_use
from trtspec.trtllm.importing import Imported, import_file, imported_yaml
from trtspec.trtllm.migrate import TARGETS, Target
from trtspec.trtllm.migrate import migrate as migrate_recipe
from trtspec.user_files import user_path, write_user_file

_COMMENTS = "comments of the file do not come along"


@click.command()
@click.argument("recipe", type=UserPath())
@click.option("--to", required=True, type=click.Choice(TARGETS), help="Backend to migrate to.")
@click.option("--heads", help="Trained heads to draft with there: folder or hub id.")
@click.option("--name", show_default="the recipe's with the backend at its end", help="Names engines/NAME.")
@click.option("-o", "--output", help="File to write; - for stdout.  [default: none, only the account]")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@json_option
def migrate(
    recipe: Path,
    to: Target,
    heads: str | None,
    name: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Move a recipe to another backend, and account for every key.

    Each key is kept, renamed, replaced or lost, with the reason. What is written lints without errors.
    Without -o nothing is written.
    """
    _one_stdout(output, as_json)
    source = load_recipe(recipe)
    migration = migrate_recipe(source, to, heads=heads, name=name, base=recipe.resolve().parent)
    text = migrated_yaml(migration, recipe.name)
    written = _write(output, text, force)
    if as_json:
        print_json("migrate", {"file": written, **_migration_fields(migration), "yaml": text})
    elif output == "-":
        click.echo(text, nl=False)
    else:
        for line in _account_lines(migration):
            click.echo(line)
        click.echo(f"wrote {written}" if written else "nothing was written; -o FILE writes the recipe")


def _one_stdout(output: str | None, as_json: bool) -> None:
    if output == "-" and as_json:
        raise click.UsageError("--json and -o - both want stdout; choose one")


def _write(output: str | None, text: str, force: bool) -> str | None:
    if output is None or output == "-":
        return None
    path = user_path(output)
    write_user_file(path, text.encode(), overwrite=force)
    return str(path)


def _migration_fields(migration: Migration) -> dict[str, object]:
    return {
        "from": migration.source.backend.kind,
        "to": migration.recipe.backend.kind,
        "name": migration.recipe.name,
        "digest": recipe_digest(migration.recipe),
        "keys": [_change_fields(change) for change in migration.changes],
        "added": [{"key": one.key, "value": one.value, "why": one.why or None} for one in migration.added],
        "note": _COMMENTS,
    }


def _change_fields(change: Change) -> dict[str, object]:
    return {
        "key": change.key,
        "outcome": change.outcome,
        "found": change.found,
        "to": change.to,
        "value": change.value,
        "why": change.why or None,
    }


def _account_lines(migration: Migration) -> list[str]:
    source, recipe = migration.source, migration.recipe
    lines = [f"{source.name} ({source.backend.kind}) -> {recipe.name} ({recipe.backend.kind})"]
    colors: tuple[tuple[Outcome, str], ...] = (("renamed", "cyan"), ("replaced", "yellow"), ("lost", "red"))
    for outcome, color in colors:
        for change in migration.of(outcome):
            if not (outcome == "lost" and change.default):
                lines += _wrapped(click.style(f"{outcome:<10}", fg=color), describe(change))
    silent = [change.key for change in migration.of("lost") if change.default]
    kept = [change.key for change in migration.of("kept")]
    for one in migration.added:
        if one.why:
            lines += _wrapped(
                click.style(f"{'new':<10}", fg="cyan"), f"{one.key}: {shown(one.value)}: {one.why}"
            )
    added = [f"{one.key} {shown(one.value)}" for one in migration.added if not one.why]
    for label, keys in (("lost, at its default", silent), ("kept", kept), ("new, at its default", added)):
        if keys:
            lines += _wrapped(f"{label}:", ", ".join(keys))
    return [*lines, f"note: {_COMMENTS}"]


def _wrapped(label: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
    return [f"{label} {wrapped[0]}", *(f"{'':<11}{line}" for line in wrapped[1:])]


@click.command("import")
@click.argument("path", type=UserPath())
@click.option("--model", help="The checkpoint: folder, sample or hub id. No engine says which it was.")
@click.option("--heads", help="The trained heads, for medusa, eagle and EAGLE-3.")
@click.option("--draft-model", help="The draft checkpoint, for an engine with external draft tokens.")
@click.option(
    "--tensorrt-llm",
    "version",
    metavar="VERSION",
    show_default="what the file says, or the versions that know all of its keys",
    help="Version the file is for.",
)
@click.option("--name", show_default="from the file or folder", help="Names engines/NAME.")
@click.option("-o", "--output", help="File to write; - for stdout.  [default: none, only the account]")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@json_option
def import_(
    path: Path,
    model: str | None,
    heads: str | None,
    draft_model: str | None,
    version: str | None,
    name: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Make a recipe from a TensorRT-LLM engine or an LLM API options file.

    PATH is an engine's folder or its config.json (0.17 to 1.2.1), or the YAML of --extra_llm_api_options /
    --config (0.21 and later). Every key of it is accounted for: used, without a counterpart, or unknown.
    """
    _one_stdout(output, as_json)
    imported = import_file(
        path, model=model, heads=heads, draft_model=draft_model, version=version, name=name
    )
    text = imported_yaml(imported, path.name)
    written = _write(output, text, force)
    if as_json:
        print_json("import", {"file": written, **_import_fields(imported), "yaml": text})
    elif output == "-":
        click.echo(text, nl=False)
    else:
        for line in _import_lines(imported):
            click.echo(line)
        next_step = f"wrote {written}; next: {shlex.join(['trtspec', 'lint', written or ''])}"
        click.echo(next_step if written else "nothing was written; -o FILE writes the recipe")


def _import_fields(imported: Imported) -> dict[str, object]:
    return {
        "kind": imported.kind,
        "tensorrt_llm": imported.version,
        "name": imported.recipe.name,
        "digest": recipe_digest(imported.recipe),
        "keys": [
            {"key": use.key, "outcome": use.outcome, "found": use.found, "to": use.to, "why": use.why or None}
            for use in imported.uses
        ],
        "assumed": [{"key": key, "value": value, "why": why} for key, value, why in imported.assumed],
    }


def _import_lines(imported: Imported) -> list[str]:
    lines = [f"{imported.kind}, TensorRT-LLM {imported.version} -> {imported.recipe.name}"]
    for outcome, color in (("used", "green"), ("unknown", "yellow")):
        for use in imported.uses:
            if use.outcome == outcome:
                lines += _wrapped(click.style(f"{outcome:<10}", fg=color), describe_use(use))
    for key, value, why in imported.assumed:
        lines += _wrapped(click.style(f"{'assumed':<10}", fg="yellow"), f"{key}: {value}: {why}")
    dropped = [use for use in imported.uses if use.outcome == "no counterpart"]
    for use in dropped:
        if use.why:
            lines += _wrapped(f"{'left out':<10}", describe_use(use))
    plain = [use.key for use in dropped if not use.why]
    if plain:
        lines += _wrapped("left to TensorRT-LLM:", ", ".join(plain))
    return lines
