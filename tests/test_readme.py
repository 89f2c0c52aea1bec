"""The README is true: its commands parse, its examples read so, its table is lint's verdict."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from trtspec.cli import COMMANDS, main
from trtspec.recipe_file import lint_content, parse_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = re.findall(r"^\$ trtspec (.+)$", README, re.MULTILINE)


def command(verb: str) -> click.Command:
    module, attribute = COMMANDS[verb][0].split(":")
    found: click.Command = getattr(import_module(module), attribute)
    return found


def test_every_verb_is_told_and_no_other() -> None:
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    told = set(re.findall(r"[a-z]+", " ".join(re.findall(r"`([^`]+)`", table))))
    assert set(COMMANDS) - told == set()
    assert {line.split()[0] for line in TYPED} <= set(COMMANDS)


@pytest.mark.parametrize("line", TYPED)
def test_a_command_that_is_shown_can_be_typed(line: str) -> None:
    verb, *arguments = shlex.split(line)
    with command(verb).make_context(verb, list(arguments)):
        pass


def test_an_option_that_does_not_exist_would_be_seen() -> None:
    with pytest.raises(click.NoSuchOption):
        command("verify").make_context("verify", ["engines/x", "--fast"])


def test_the_transcript_is_the_demo() -> None:
    demo = (ROOT / "scripts" / "demo.sh").read_text(encoding="utf-8")
    in_demo = re.findall(r"^(?:run|show) trtspec (\w+)", demo, re.MULTILINE)
    in_readme = [line.split()[0] for line in TYPED if "lint" not in line]
    assert in_readme == in_demo


def test_the_recipe_that_is_shown_is_the_demos() -> None:
    shown = re.search(r"```yaml\n(version: 1.+?)```", README, re.DOTALL)
    assert shown
    given = parse_recipe(shown.group(1))
    shipped = parse_recipe((ROOT / "recipes" / "smollm2-w4a16-kv8-ngram.yaml").read_bytes())
    for key in ("name", "model", "backend", "quantization", "speculation", "gates"):
        assert getattr(given, key) == getattr(shipped, key), key


def test_the_mistake_that_is_shown_reads_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    head = "version: 1\nname: x\nmodel:\n  source: nowhere\nbackend:\n  kind: embedded\n"
    Path("my.yaml").write_text(head + "quantization:\n  kind: w4a16_awq\n  group_size: 48\n")
    assert main(["lint", "my.yaml"]) == 2
    line = capsys.readouterr().out.splitlines()[0]
    assert line in README.splitlines()


SECTIONS = {
    "n-gram": "speculation: {kind: ngram}",
    "draft model": "speculation: {kind: draft_model, model: {source: a/d}}",
    "lookahead": "speculation: {kind: lookahead}",
    "Medusa": "speculation: {kind: medusa, heads: h}",
    "EAGLE-1/2": "speculation: {kind: eagle, heads: h}",
    "EAGLE-3": "speculation: {kind: eagle3, heads: h}",
    "W8A8": "quantization: {kind: w8a8_sq}",
    "INT8": "quantization: {kind: fp8, kv_cache: int8}",
    "NVFP4": "quantization: {kind: nvfp4}",
}


@pytest.mark.parametrize("what", SECTIONS)
def test_the_table_of_what_runs_where_is_lints_verdict(what: str) -> None:
    row = next(line for line in README.splitlines() if line.startswith("|") and what in line.split("|")[1])
    cells = [cell.strip() for cell in row.split("|")[2:5]]
    for backend, cell in zip(("embedded", "pytorch", "tensorrt"), cells, strict=True):
        text = (
            f"version: 1\nname: x\nmodel: {{source: a/b}}\nbackend: {{kind: {backend}}}\n{SECTIONS[what]}\n"
            "limits: {max_batch_size: 8, max_num_tokens: 4096}\n"
        )
        result = lint_content(text.encode(), "r.yaml")
        assert bool(result.errors) == (cell == "refused"), (backend, cell, result.errors)
