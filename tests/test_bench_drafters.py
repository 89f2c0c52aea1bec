"""trtspec bench drafters: real engines on a tiny target; what is marked and counted, what fits a screen."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from test_build_heads import write_heads
from tiny import make_tiny_model

from trtspec.artifact import Artifact, open_artifact
from trtspec.bench import marked
from trtspec.bench.drafters import Comparison, Trace, compare_drafters, contenders, row_of
from trtspec.cli import main
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.tree import path_to
from trtspec.errors import InputError

RECIPE = """version: 1
name: tiny
model: {source: ./model}
backend: {kind: embedded, dtype: float32, threads: 1}
speculation: {kind: ngram, num_draft_tokens: 3, min_ngram: 1}
limits: {max_batch_size: 4, max_input_tokens: 3000, max_seq_tokens: 3500, max_num_tokens: 512}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    make_tiny_model(folder / "model", max_positions=4096, layers=4)
    write_heads(folder / "medusa", "medusa")
    write_heads(folder / "eagle", "eagle")
    (folder / "r.yaml").write_text(RECIPE)
    assert main(["build", str(folder / "r.yaml"), "-o", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Artifact:
    return open_artifact(folder / "tiny")


def compared(artifact: Artifact, kinds: list[str] | None = None, heads: Path | None = None) -> Comparison:
    return compare_drafters(
        artifact,
        contenders(artifact, kinds, heads),
        workloads=("chat", "copy"),
        num_prompts=2,
        new_tokens=12,
        rounds=1,
        shown="copy",
    )


# --------------------------------------------------------------------------- the comparison


def test_every_drafter_writes_the_same_and_the_counts_agree(artifact: Artifact, folder: Path) -> None:
    result = compared(artifact, heads=folder / "medusa")
    assert [row.drafter for row in result.rows] == 2 * ["none", "ngram", "lookahead", "medusa"]
    for row in result.rows:
        assert (row.identical, row.prompts) == (2, 2)
        assert row.tokens_per_step
        assert row.step_cost
        assert row.ratio == pytest.approx(row.tokens_per_step / row.step_cost), "one round: an identity"
        assert list(row.by_depth) == sorted(row.by_depth, reverse=True)
        assert all(0 < share <= 1 for share in row.by_depth)
        assert row.accepted <= row.drafted
    none = result.rows[0]
    assert (none.tokens_per_step, none.drafted, none.step_cost, none.ratio) == (1.0, 0, 1.0, 1.0)
    assert set(result.answers) == {"none", "ngram", "lookahead", "medusa"}
    assert len({trace.tokens for trace in result.answers.values()}) == 1


def test_an_acceptance_that_changes_answers_is_seen(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anything(draft: Any, law: Any, draw: Any) -> Accepted:
        return Accepted(path_to(draft, len(draft) - 1), law.sample(len(draft), draw))

    monkeypatch.setattr("trtspec.embedded.engine.exact", anything)
    rows = {(row.workload, row.drafter): row for row in compared(artifact, ["ngram"]).rows}
    assert rows["copy", "ngram"].accepted == rows["copy", "ngram"].drafted > 0
    assert rows["copy", "ngram"].identical < 2


def test_the_prompts_own_step_is_not_counted() -> None:
    trace = Trace((1, 2, 3, 4), ((1, 0, 0), (2, 4, 1), (1, 4, 0)), 2.0)
    plain = Trace((1, 2, 3, 4), ((1, 0, 0),) + 3 * ((1, 0, 0),), 3.0)
    row = row_of("chat", "ngram", [[trace]], [[plain]])
    assert row.tokens_per_step == 1.5
    assert (row.drafted, row.accepted, row.by_depth) == (8, 1, (0.5,))
    assert row.step_cost == pytest.approx(1.0)
    assert row.ratio == pytest.approx(1.5)


def test_the_recipes_own_settings_are_kept(artifact: Artifact) -> None:
    found = {one.name: one.artifact for one in contenders(artifact, None, None)}
    assert list(found) == ["none", "ngram", "lookahead", "eagle"]
    assert found["eagle"] is None
    ngram = found["ngram"]
    assert ngram is not None
    assert ngram.recipe.speculation == artifact.recipe.speculation
    assert ngram.target_dir == artifact.target_dir


def test_heads_are_known_by_what_they_hold(artifact: Artifact, folder: Path) -> None:
    names = [one.name for one in contenders(artifact, None, folder / "eagle")]
    assert names == ["none", "ngram", "lookahead", "eagle"]
    with pytest.raises(InputError, match="no such folder"):
        contenders(artifact, None, folder / "nowhere")


def test_every_bad_kind_is_named(artifact: Artifact) -> None:
    with pytest.raises(InputError) as caught:
        contenders(artifact, ["ngram", "magic", "draft_model", "eagle3"], None)
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 3
    for text, words in zip(told, ("magic: unknown", "no draft model", "--heads"), strict=True):
        assert words in text


def test_what_names_no_kind_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kinds in ("", " ,"):
        assert main(["bench", "drafters", str(folder / "tiny"), "--kinds", kinds]) == 2
        assert capsys.readouterr().err.startswith("error: --kinds: names nothing; allowed: none, ngram")
    assert main(["bench", "drafters", str(folder / "tiny"), "--kinds", ",ngram,", "--dry-run"]) == 0


def test_errors_of_rows_for_a_file_are_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is not JSON when --json names a file."""
    rows = str(folder / "absent" / "rows.json")
    for verb in ("drafters", "engine"):
        assert main(["bench", verb, str(folder / "tiny"), "--json", rows]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {rows}: no such file or directory")


# --------------------------------------------------------------------------- marked text


def shown(found: list[tuple[str, bool]], *, color: bool, width: int = 40, most: int = 1000) -> str:
    return "\n".join(marked.lines(found, color=color, width=width, most=most))


def width_of(line: str) -> int:
    """Independently of the code: terminals give East Asian wide and full-width characters two columns."""
    line = re.sub(r"\x1b\[\d+m", "", line)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in line)
    return len(line) + wide - sum(unicodedata.category(char) in ("Mn", "Me") for char in line)


ALPHABET = "ab c d  e\u4e16\u754c\u00e9o\u0301.,;:"


def random_pieces(seed: int) -> list[tuple[str, bool]]:
    chance = random.Random(seed)
    return [
        ("".join(chance.choices(ALPHABET, k=chance.randint(1, 9))), chance.random() < 0.4) for _ in range(60)
    ]


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("width", [7, 40, 98])
def test_lines_fit_and_lose_nothing(color: bool, width: int) -> None:
    for seed in range(20):
        found = random_pieces(seed)
        text = shown(found, color=color, width=width)
        assert all(width_of(line) <= width for line in text.splitlines())
        bare = re.sub(r"\x1b\[\d+m|[\[\]]", "", text)
        assert re.sub(r"\s", "", bare) == re.sub(r"\s", "", "".join(piece for piece, _ in found))


def test_counting_characters_instead_of_columns_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked, "columns", lambda char: 1)
    lines = shown([("\u4e16" * 100, False)], color=False).splitlines()
    assert max(map(width_of, lines)) > 40


def test_what_was_accepted_is_what_is_marked() -> None:
    found = [("one ", False), ("two ", True), ("three", True), (" four", False)]
    assert shown(found, color=False) == "one [two three] four"
    assert shown(found, color=True) == "one \x1b[32mtwo three\x1b[39m four"


def test_colour_does_not_run_into_the_next_line() -> None:
    lines = shown([("word " * 30, True)], color=True).splitlines()
    assert len(lines) > 3
    for line in lines:
        assert line.startswith(marked.GREEN)
        assert line.endswith(marked.PLAIN)


def test_a_models_text_does_not_drive_the_terminal() -> None:
    text = shown([("a\x1b[2Jb\u202ec\r\td\n", True)], color=False)
    assert text == "[a·[2Jb·c· d↵]"


def test_a_long_text_ends_in_an_ellipsis() -> None:
    lines = shown([("word " * 200, False)], color=False, most=3).splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("…")


def test_pieces_are_the_answer_and_split_where_drafts_ended() -> None:
    steps = ((1, 0, 0), (3, 4, 2), (1, 4, 1))
    found = list(marked.pieces((1, 2, 3, 4, 5), steps, lambda tokens: "".join(map(str, tokens))))
    assert found == [("1", False), ("23", True), ("4", False), ("5", True)]


# --------------------------------------------------------------------------- the verb


def test_the_verb_fits_a_screen_and_writes_what_it_shows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = tmp_path / "d.json", tmp_path / "d.svg"
    given = ["bench", "drafters", str(folder / "tiny"), "--prompts", "1", "--tokens", "12", "--rounds", "1"]
    assert main([*given, "--json", str(data), "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert all(width_of(line) <= 100 for line in out.splitlines()), out
    assert len(out.splitlines()) <= 45
    assert "no heads" in out
    assert "\x1b" not in out
    assert "[in brackets]" in out
    value = json.loads(data.read_text())
    assert value["trtspec"]["schema"] == "trtspec.bench-drafters/1"
    assert {row["drafter"] for row in value["rows"]} == {"none", "ngram", "lookahead", "eagle"}
    for answer in value["answers"].values():
        assert sum(step[0] for step in answer["steps"]) == len(answer["tokens"]) == 12
    ElementTree.fromstring(picture.read_text())


def test_heads_beside_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["bench", "drafters", str(folder / "tiny"), "--prompts", "1", "--tokens", "8", "--rounds", "1"]
    assert main([*given, "--heads", str(folder / "eagle")]) == 0
    out = capsys.readouterr().out
    assert "no heads" not in out
    assert re.search(r"^copy +eagle +[\d.]+ ", out, re.MULTILINE)


def test_a_dry_run_runs_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "drafters", str(folder / "tiny"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "none: runs", "ngram: runs", "lookahead: runs", "eagle: no heads"
    ]  # fmt: skip
    assert main(["bench", "drafters", str(folder / "tiny"), "--kinds", "medusa"]) == 2
    assert "no heads" in capsys.readouterr().err


def test_a_typical_recipes_drafters_are_compared_by_exact_acceptance(artifact: Artifact) -> None:
    from trtspec.recipe import TypicalAcceptance

    loose = artifact.recipe.model_copy(update={"acceptance": TypicalAcceptance(kind="typical")})
    for one in contenders(dataclasses.replace(artifact, recipe=loose), ["ngram"], None):
        assert one.artifact is not None
        assert one.artifact.recipe.acceptance.kind == "exact"
