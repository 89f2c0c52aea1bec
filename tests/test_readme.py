"""The README is true: its commands parse, its examples read so, its table is lint's verdict."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from trtspec.cli import COMMANDS, main
from trtspec.errors import InputError
from trtspec.recipe_file import lint_content, parse_recipe
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.plan import plan_commands
from trtspec.versions import parse_range

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = re.findall(r"^\$ trtspec (.+)$", README, re.MULTILINE)


def command(verb: str) -> click.Command:
    module, attribute = COMMANDS[verb][0].split(":")
    found: click.Command = getattr(import_module(module), attribute)
    return found


@pytest.mark.parametrize("file", ["README.md", "README.zh-CN.md"])
def test_every_verb_is_told_and_no_other(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    # The first column only: a verb that another's row mentions is not told.
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [
        part.removeprefix("trtspec ").split()[0] for cell in first for part in re.findall(r"`([^`]+)`", cell)
    ]
    assert set(COMMANDS) - set(named) == set()
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


TRANSCRIPT = README[README.index("~~~console") : README.index("\n~~~\n")]


def untold(prose: str, transcript: str) -> list[str]:
    """Decimals of the prose that no number of the transcript rounds to."""
    found = [float(number) for number in re.findall(r"(?<![\w.])\d+\.\d+", transcript)]
    return [
        number
        for number in re.findall(r"(?<![\w.])\d+\.\d+", prose)
        if not any(f"{one:.{len(number.split('.')[1])}f}" == number for one in found)
    ]


def test_what_is_said_of_the_run_is_in_the_run() -> None:
    start = README.index("Read it as an engineer would")
    prose = README[start : README.index("\n\n", start)]
    assert len(re.findall(r"\d\.\d", prose)) > 5
    assert untold(prose, TRANSCRIPT) == []
    assert untold(prose.replace("1.", "7."), TRANSCRIPT)  # a stale number is seen


def test_the_chinese_excerpt_is_of_the_same_run() -> None:
    text = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    start = text.index("$ trtspec bench drafters")
    lines = text[start : text.index("\n```", start)].splitlines()
    assert len(lines) > 5
    assert set(lines) <= set(TRANSCRIPT.splitlines())


# Row of the table, in English and Chinese -> what its recipes say.
ROWS = {
    ("16 bit, no speculation", "16 位，不推测"): "speculation: {kind: none}",
    ("weights FP8", "权重 FP8"): "quantization: {kind: fp8}",
    ("weights W4A16 (AWQ)", "权重 W4A16（AWQ）"): "quantization: {kind: w4a16_awq}",
    ("weights W4A8 (AWQ)", "权重 W4A8（AWQ）"): "quantization: {kind: w4a8_awq}",
    ("weights W8A8 (SmoothQuant)", "权重 W8A8（SmoothQuant）"): "quantization: {kind: w8a8_sq}",
    ("weights NVFP4", "权重 NVFP4"): "quantization: {kind: nvfp4}",
    ("KV cache FP8", "KV 缓存 FP8"): "quantization: {kind: fp8, kv_cache: fp8}",
    ("KV cache INT8", "KV 缓存 INT8"): "quantization: {kind: w4a16_awq, kv_cache: int8}",
    ("n-gram", "n-gram"): "speculation: {kind: ngram}",
    ("draft model", "草稿模型"): "speculation: {kind: draft_model, model: {source: a/d}}",
    ("lookahead", "lookahead"): "speculation: {kind: lookahead}",
    ("Medusa", "Medusa"): "speculation: {kind: medusa, heads: h}",
    ("EAGLE-1/2", "EAGLE-1/2"): "speculation: {kind: eagle, heads: h}",
    ("EAGLE-3", "EAGLE-3"): "speculation: {kind: eagle3, heads: h}",
}
COLUMNS = [
    ("embedded", None),
    *(
        (kind, version)
        for kind in ("pytorch", "tensorrt")
        for version in versions_for(kind, parse_range(">=0"))
    ),
]
RUN, RENDERED, REFUSED = "run", "✓", "–"


def cell(kind: str, version: str | None, section: str) -> str:
    """What the project says of a recipe: it ran here, it is rendered and checked, or it is refused."""
    # The context kernel of an INT8 cache is not paged; 0.17's builder refuses what later ones switch off.
    paged = ", paged_context_fmha: false" if kind == "tensorrt" and "int8" in section else ""
    text = (
        f"version: 1\nname: x\nmodel: {{source: a/b}}\nbackend: {{kind: {kind}{paged}}}\n{section}\n"
        "limits: {max_batch_size: 8, max_num_tokens: 4096}\n"
    )
    result = lint_content(text.encode(), "r.yaml")
    if result.recipe is None:
        return REFUSED
    if version is None:
        return RUN
    try:
        plan_commands(result.recipe, version)
    except InputError:
        return REFUSED
    return RENDERED


def shown(readme: str) -> list[list[str]]:
    """Rows of the table in a README, without its two lines of head."""
    lines = readme[readme.index("| `embedded` |") :].split("\n\n")[0].splitlines()
    return [[one.strip() for one in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(("file", "language"), [("README.md", 0), ("README.zh-CN.md", 1)])
def test_the_table_of_what_runs_where_is_what_the_rules_and_the_plan_say(file: str, language: int) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if "| `embedded` |" in line)
    assert re.findall(r"\d+\.\d+\.\d+(?:rc\d+)?", head) == [version for _, version in COLUMNS if version]
    expected = [
        [names[language], *(cell(kind, version, section) for kind, version in COLUMNS)]
        for names, section in ROWS.items()
    ]
    assert shown(text) == expected


def test_the_table_would_not_pass_with_another_verdict() -> None:
    assert cell("pytorch", "1.2.1", ROWS["Medusa", "Medusa"]) == REFUSED
    assert cell("tensorrt", "0.17.0", ROWS["weights NVFP4", "权重 NVFP4"]) == REFUSED
    assert cell("tensorrt", "0.21.0", ROWS["weights NVFP4", "权重 NVFP4"]) == RENDERED
