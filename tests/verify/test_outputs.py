"""What verify and report write: nothing that is read is lost, and what was measured is not lost either."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator

import pytest
from built_tiny import build_tiny, write_jsonl
from made import made_report

from trtspec.artifact import Artifact
from trtspec.cli import main
from trtspec.verify import protocol
from trtspec.verify.bundle import open_bundle, write_bundle
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.records import Records
from trtspec.verify.report import to_bytes
from trtspec.verify.report_file import read_report
from trtspec.verify.settings import QUICK


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("outputs")
    write_jsonl(folder / "p.jsonl", [{"prompt": "rain rain tea"}])
    return build_tiny(folder, dtype="float64", speculation="{kind: none}")


@pytest.fixture
def given(built: Artifact) -> list[str]:
    """A short run."""
    prompts = built.folder.parent.parent / "p.jsonl"
    return ["verify", str(built.folder), "--prompts", str(prompts), "--quick", "--max-new-tokens", "3"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel lets no file of this process grow beyond 7,000 bytes: a report does not fit, JUnit does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-o", "{tmp}/x", "--html", "{tmp}/x"), "--html: is the file of -o too"),
        (("--json", "{tmp}/x", "--junit", "{tmp}/./x"), "--json: is the file of --junit too"),
        (("-o", "{engine}/manifest.json"), "-o: would change ENGINE"),
        (("--bundle", "{engine}/b"), "--bundle: would change ENGINE"),
        (("-o", "{engine}/../../p.jsonl"), "-o: would change --prompts"),
        (("--tasks", "{engine}/recipe.yaml", "-o", "{engine}/recipe.yaml"), "-o: would change"),
        (("--against", "{tmp}/link", "-o", "{tmp}/old"), "-o: would change --against"),
        (("--bundle", "{tmp}/b", "-o", "{tmp}/b/r.json"), "-o: lies in --bundle"),
        (("--json", "{tmp}/no/x"), "no/x: no such file or directory"),
    ],
)
def test_nothing_that_is_read_or_written_is_overwritten(given, built, tmp_path, capsys, options, says):
    (tmp_path / "old").write_text("{}")
    (tmp_path / "link").symlink_to("old")
    before = {path: path.read_bytes() for path in built.folder.rglob("*") if path.is_file()}
    more = [one.format(tmp=tmp_path, engine=built.folder) for one in options]
    assert main([*given, *more]) == 2
    assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in built.folder.rglob("*") if path.is_file()} == before
    assert (tmp_path / "old").read_text() == "{}"


def test_a_report_is_not_replaced_by_its_own_page(tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_bytes(to_bytes(made_report()))
    assert main(["report", str(path), "--html", str(path)]) == 2
    assert "--html: would change REPORT" in capsys.readouterr().err
    assert read_report(path).recipe_name == "x"
    assert main(["report", str(path), "--html", str(tmp_path / "r.html")]) == 4


def test_what_cannot_be_written_is_shown_and_the_rest_is_written(given, tmp_path, capsys, small_files):
    names = {one: str(tmp_path / one) for one in ("r.json", "b", "j.xml")}
    files = ["-o", names["r.json"], "--bundle", names["b"], "--junit", names["j.xml"]]
    assert main([*given, *files]) == 3
    shown = capsys.readouterr()
    assert "verdict: PASS" in shown.out
    assert "report:" not in shown.out
    assert f"error: {names['r.json']}: file too large" in shown.err
    assert f"warning: {names['b']}: file too large" in shown.err
    assert os.listdir(tmp_path) == ["j.xml"]
    assert main([*given, *files, "--json"]) == 3
    shown = capsys.readouterr()
    assert json.loads(shown.out)["report"]["verdict"] == "PASS"
    assert "file too large" in shown.err


def test_files_are_hashed_when_they_are_read(built, tmp_path):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "rain rain tea"}])
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    settings = dataclasses.replace(QUICK, prompts=prompts, max_new_tokens=3)
    found = protocol.verify(built, settings, say=lambda line: prompts.unlink(missing_ok=True))
    assert found.settings["prompts_sha256"] == digest


def test_a_pipe_among_the_files_is_refused_and_not_waited_for(given, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main([*given, "--heldout", str(tmp_path / "pipe")]) == 2
    assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [False, True])
def test_an_engine_that_is_built_anew_meanwhile_has_no_verdict(built, tmp_path, capsys, changes):
    """By the user's own judge, which runs in the middle."""
    engine = shutil.copytree(built.folder, tmp_path / "e")
    item = {"kind": "judge", "prompt": "a", "max_new_tokens": 1}
    tasks = write_jsonl(tmp_path / "t.jsonl", [item])
    script = tmp_path / "judge.py"
    manifest = engine / "manifest.json"
    later = 'text.replace(\'"created": "2\', \'"created": "3\')' if changes else "text"
    script.write_text(
        f"from pathlib import Path\np = Path({str(manifest)!r})\ntext = p.read_text()\n"
        f"p.write_text({later})\nprint(1)\n"
    )
    judge = f"{sys.executable} {script}"
    given = ["verify", str(engine), "--quick", "--num-prompts", "1", "--max-new-tokens", "3"]
    code = main([*given, "--tasks", str(tasks), "--judge", judge])
    shown = capsys.readouterr()
    assert code == (2 if changes else 0), shown.err
    assert ("was built anew while it was verified" in shown.err) == changes
    assert ("verdict:" in shown.out) != changes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--matrix", "r.yaml", "--against", "old"), "--against: has no meaning with --matrix"),
        (("--matrix", "r.yaml", "--tasks", "builtin"), "--tasks: has no meaning with --matrix"),
        (("--matrix", "r.yaml", "--no-sampled"), "--sampled: has no meaning with --matrix"),
        (("--plan", "-o", "x"), "--output: has no meaning with --plan"),
        (("nowhere", "--lm-eval", " ,"), "--lm-eval: names no task"),
        (("--self-test", "--quick"), "--quick: has no meaning with --self-test"),
    ],
)
def test_an_option_that_a_mode_would_pass_over_is_refused(options, says, capsys):
    assert main(["verify", *options]) == 2
    assert says in capsys.readouterr().err
    assert main(["verify", "--plan", "--bias", "0.01"]) == 0


def test_bytes_that_are_no_utf_8_reach_report_and_bundle(tmp_path):
    name = os.fsdecode(b"task:\xff")
    records = Records("later", {"path": name}, {"rows": [{name: name}]})
    check = Check(name, Verdict.MEASURED, name, False, records=records)
    made = made_report(check, engine=name, argv=("trtspec", name))
    (tmp_path / "r.json").write_bytes(to_bytes(made))
    assert read_report(tmp_path / "r.json").checks[0].name == "task:\\udcff"
    write_bundle(tmp_path / "b", made)
    bundle = open_bundle(tmp_path / "b")
    assert bundle.problems == ()
    assert bundle.judged[0].checks == (bundle.report.checks[0].name,)
