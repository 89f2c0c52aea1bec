"""What TensorRT-LLM does with a recipe: every rule fires where it must and is silent on the least change."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_recipes_gpu import BAD_RECIPES, PYT, TRT, Bad, made

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.recipe_file import load_recipe
from trtspec.recipe_model import MODEL_RULES
from trtspec.recipe_rules import RULES as RECIPE_RULES
from trtspec.recipe_yaml import dotted
from trtspec.trtllm.case import Case, Told
from trtspec.trtllm.export import EXPORT_RULES
from trtspec.trtllm.facts import VERSIONS, load_facts, versions_for
from trtspec.trtllm.rules import RULES, Finding, check
from trtspec.versions import parse_range

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
IDS = [f"{number}-{bad.rule}" for number, bad in enumerate(BAD_RECIPES)]


def findings(bad: Bad) -> list[Finding]:
    return check(bad.recipe(), bad.version, gpu=bad.board(), checkpoint=bad.checkpoint, draft=bad.draft)


def of_rule(bad: Bad) -> list[Finding]:
    return [finding for finding in findings(bad) if finding.rule == bad.rule]


@pytest.mark.parametrize("bad", BAD_RECIPES, ids=IDS)
def test_a_bad_recipe_fires_its_rule_and_no_other_error(bad: Bad) -> None:
    found = findings(bad)
    assert [dotted(finding.path) for finding in found if finding.rule == bad.rule] == [bad.key]
    errors = {finding.rule for finding in found if finding.severity == "error"}
    assert errors == ({bad.rule} if RULES[bad.rule].severity == "error" else set())


@pytest.mark.parametrize("bad", BAD_RECIPES, ids=IDS)
def test_the_least_change_silences_it(bad: Bad) -> None:
    repaired = bad.repaired()
    assert repaired != bad
    assert not of_rule(repaired)


def test_every_rule_has_a_bad_recipe_and_there_are_enough() -> None:
    assert set(RULES) == {bad.rule for bad in BAD_RECIPES}
    assert len({(bad.rule, bad.version, repr(bad.changes), bad.gpu) for bad in BAD_RECIPES}) >= 90
    assert sum(RULES[bad.rule].severity == "error" for bad in BAD_RECIPES) >= 50


def wrong_with(id: str, rule: Callable[[Case], Told]) -> str | None:
    """Whether ``rule``, in the place of ``id``, is silent on a bad recipe or fires on a repaired one."""
    for bad in BAD_RECIPES:
        if bad.rule != id:
            continue
        for given, must in ((bad, True), (bad.repaired(), False)):
            facts = load_facts(given.version)
            case = Case(given.recipe(), facts, given.board(), given.checkpoint, given.draft)
            if bool(list(rule(case))) != must:
                return "never fires" if must else "always fires"
    return None


def _never(case: Case) -> Told:
    yield from ()


def _always(case: Case) -> Told:
    yield ("name",), "anything"


@pytest.mark.parametrize("id", RULES)
def test_a_rule_that_no_longer_fires_or_always_fires_is_noticed(id: str) -> None:
    assert wrong_with(id, RULES[id].check) is None
    assert wrong_with(id, _never) == "never fires"
    assert wrong_with(id, _always) == "always fires"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_have_no_error_on_any_version_they_name(path: Path) -> None:
    recipe = load_recipe(path)
    if recipe.backend.kind == "embedded":
        assert all(check(recipe, version) == [] for version in VERSIONS)
        return
    versions = versions_for(recipe.backend.kind, parse_range(recipe.backend.version))
    assert versions
    for version in versions:
        assert [f for f in check(recipe, version) if f.severity == "error"] == []


def test_the_ids_are_no_one_elses_and_each_rule_says_why_and_whence() -> None:
    every = [*RECIPE_RULES, *MODEL_RULES, *RULES, *EXPORT_RULES]
    assert [name for name, count in Counter(every).items() if count > 1] == []
    for rule in (*RULES.values(), *EXPORT_RULES.values()):
        assert rule.id.startswith("trtllm-")
        assert rule.why.endswith(".")
        assert len(rule.why) > 30
        assert rule.source


def test_messages_say_what_was_found_or_asked_and_what_to_do() -> None:
    for bad in BAD_RECIPES:
        for finding in of_rule(bad):
            assert len(finding.message) < 260
            if finding.severity == "error":
                assert ";" in finding.message or "divide" in finding.message or "KV heads" in finding.message


def test_an_unknown_version_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"the nearest is 1\.2\.1"):
        check(made(TRT, {}), "1.2.0")


# --------------------------------------------------------------------------- numbers that are laws


@pytest.mark.parametrize("batch", [1, 8, 64, 512])
@pytest.mark.parametrize("nodes", [1, 4, 63])
def test_rows_are_those_of_the_builder(batch: int, nodes: int) -> None:
    from trtspec.trtllm.rules_build import built_rows

    choices = [[n] for n in range(nodes)]
    recipe = made(
        TRT,
        {
            "speculation": {"kind": "medusa", "heads": "h", "choices": choices},
            "limits": {"max_batch_size": batch, "max_num_tokens": 4096},
        },
    )
    case = Case(recipe, load_facts("1.2.1"), None, None, None)
    assert built_rows(case) == min(max(4096, batch * (nodes + 1)), 2048 * batch)


def test_the_default_medusa_build_has_131072_rows() -> None:
    from trtspec.trtllm.rules_build import built_rows

    recipe = made(
        TRT,
        {
            "speculation": {"kind": "medusa", "heads": "h", "choices": None},
            "limits": {"max_batch_size": 2048},
        },
    )
    assert built_rows(Case(recipe, load_facts("1.2.1"), None, None, None)) == 131072


# --------------------------------------------------------------------------- the command line


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return os.fspath(path)


ENGINE = """version: 1
name: a
model: {source: org/model}
backend:
  kind: tensorrt
  version: "VERSIONS"
quantization:
  kind: fp8
  lm_head: true
"""


def test_lint_names_the_line_the_rule_and_the_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, ENGINE.replace("VERSIONS", ">=0.17,<=1.0"))
    assert main(["lint", file]) == 2
    out = capsys.readouterr().out
    assert f"{file}:9: quantization.lm_head: quantize.py of 0.17.0 leaves" in out
    assert "[trtllm-lm-head-option; TensorRT-LLM 0.17.0]" in out
    assert "checked against the tables of TensorRT-LLM 0.17.0, 0.21.0, 1.0.0; nothing was run" in out


def test_a_known_model_is_checked_without_being_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ENGINE.replace("VERSIONS", ">=1.0,<=1.2.1").replace("  lm_head: true\n", "")
    file = _write(tmp_path, head + "limits: {max_seq_tokens: 8192}\n")
    assert main(["lint", file]) == 0
    assert "vocabulary were not checked" in capsys.readouterr().out
    file = _write(
        tmp_path, head.replace("org/model", "lmsys/vicuna-7b-v1.3") + "limits: {max_seq_tokens: 8192}\n"
    )
    assert main(["lint", file]) == 2
    assert f"{file}:9: limits.max_seq_tokens: found 8192; the model has 2048" in capsys.readouterr().out
    file = _write(tmp_path, head.replace("org/model", "lmsys/vicuna-7b-v1.3"))
    assert main(["lint", file]) == 0
    assert "its sizes are those of the table of known models" in capsys.readouterr().out


def test_lint_for_one_version_and_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path, ENGINE.replace("VERSIONS", ">=0.17,<=1.2.1"))
    assert main(["lint", file, "--tensorrt-llm", "1.2.1"]) == 0
    assert "[trtllm-lm-head]" in capsys.readouterr().out
    assert main(["lint", file, "--tensorrt-llm", "1.2.1", "--gpu", "A30"]) == 2
    assert "[trtllm-fp8-sm]" in capsys.readouterr().out
    assert main(["lint", file, "--tensorrt-llm", "1.2.0"]) == 2
    assert "the nearest is 1.2.1" in capsys.readouterr().err
    assert main(["lint", file, "--gpu", "H1000"]) == 2


def test_a_range_without_a_known_version_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, ENGINE.replace("VERSIONS", "==1.2.0"))
    assert main(["lint", file]) == 2
    assert f"{file}:6: backend.version: no version with a table lies in ==1.2.0" in capsys.readouterr().out


@pytest.mark.parametrize("id", [*RULES, *EXPORT_RULES])
def test_lint_explains_every_rule(id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--explain", id]) == 0
    rule = RULES.get(id) or EXPORT_RULES[id]
    assert f"source: {rule.source}" in capsys.readouterr().out


def test_no_finding_depends_on_the_order_of_anything() -> None:
    recipe = made(PYT, {"speculation": {"kind": "ngram"}})
    assert check(recipe, "1.2.1") == check(recipe, "1.2.1")
    assert not any(re.search(r"\bNone\b", f.message) for f in check(recipe, "1.2.1"))
