"""The matrix of formats and drafters: a tiny model built for real, and judges that catch what is planted."""

from __future__ import annotations

import copy
import json

import pytest
from built_tiny import NGRAM, RECIPE, build_tiny
from tiny import make_tiny_model

from trtspec.artifact import open_artifact
from trtspec.build import build
from trtspec.cli import main
from trtspec.cli.verify_matrix import absolute
from trtspec.recipe_file import load_recipe
from trtspec.verify.gates import Verdict, exit_code
from trtspec.verify.matrix import MatrixSettings, _cells, derived, quantization_of, run_matrix
from trtspec.verify.matrix_verdict import DRAFTERS, Matrix, check_matrix, judge_matrix, own_cell
from trtspec.verify.recheck import rejudge

SMALL = MatrixSettings(2, 6, 120, 2, 6, 1)


def builder(folder, calls=None):
    def made(recipe):
        if calls is not None:
            calls.append(recipe.name)
        file = folder / f"{recipe.name}.yaml"
        file.write_text(json.dumps(recipe.model_dump(mode="json")))
        return open_artifact(build(file, folder / "engines").folder)

    return made


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    make_tiny_model(folder / "model", seed=0)
    path = folder / "recipe.yaml"
    text = RECIPE.format(
        dtype="float32", speculation="{kind: ngram, num_draft_tokens: 3, min_ngram: 1}", gates="{}"
    )
    path.write_text(text)
    base = absolute(load_recipe(path), folder)
    calls: list[str] = []
    matrix, _ = run_matrix(
        base, folder / "m", SMALL, builder(folder, calls), draft=None, heads=(), formats=("BF16",)
    )
    return folder, base, matrix, calls


def test_every_cell_ran_or_says_why_and_is_judged_again(measured):
    _, base, matrix, _ = measured
    checks = {check.name: check for check in check_matrix(matrix, base, ("BF16",))}
    assert checks["matrix"].verdict is Verdict.PASS, checks["matrix"].summary
    assert [name for name in checks if name.startswith("cell")] == [f"cell BF16 {one}" for one in DRAFTERS]
    assert checks["cell BF16 ngram"].required  # the recipe's own
    assert checks["cell BF16 ngram"].evidence["lossless"]["different"] == 0
    for name in ("draft_model", "medusa", "eagle"):
        assert checks[f"cell BF16 {name}"].verdict is Verdict.SKIPPED
        assert "--" in checks[f"cell BF16 {name}"].summary
    grid = checks["matrix"].evidence["matrix"]
    assert [len(row) for row in grid["cells"]] == [len(grid["columns"])]
    assert rejudge(checks["matrix"].records) == list(checks.values())


def test_a_run_that_stopped_goes_on_and_what_changed_is_measured_again(measured):
    folder, base, matrix, _ = measured
    parts = folder / "m" / "parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    (parts / "exact-BF16-ngram.json").unlink()
    (parts / "quality-BF16.json").write_text("{damaged")
    cut = json.loads((parts / "exact-BF16-none.json").read_text())
    (parts / "exact-BF16-none.json").write_text(json.dumps({**cut, "rows": cut["rows"][:1]}))
    (parts / "exact-BF16-lookahead.json").write_text(json.dumps({"key": cut["key"]}))
    again, _ = run_matrix(base, folder / "m", SMALL, builder(folder), draft=None, heads=(), formats=("BF16",))
    after = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {
        "exact-BF16-ngram.json", "quality-BF16.json", "exact-BF16-none.json", "exact-BF16-lookahead.json",
    }  # fmt: skip
    assert again.runs == matrix.runs  # times and all: they were not measured again
    assert again.answers == matrix.answers
    other = MatrixSettings(2, 7, 120, 2, 6, 1)
    run_matrix(base, folder / "m", other, builder(folder), draft=None, heads=(), formats=("BF16",))
    assert all(path.stat().st_mtime_ns != before[path.name] for path in parts.iterdir())


def test_a_token_that_drafting_changed_fails_cell_and_matrix(measured):
    _, base, matrix, _ = measured
    answers = copy.deepcopy(list(matrix.answers))
    row = next(row for row in answers if row["drafter"] == "lookahead")
    row["tokens"][2] = (row["tokens"][2] + 1) % 256
    checks = {one.name: one for one in check_matrix(
        Matrix(tuple(answers), matrix.tokens, matrix.runs, matrix.skipped), base, ("BF16",)
    )}  # fmt: skip
    assert checks["cell BF16 lookahead"].verdict is Verdict.FAIL
    assert checks["matrix"].verdict is Verdict.FAIL
    assert "NOT lossless" in checks["matrix"].summary
    short = copy.deepcopy(list(matrix.answers))
    next(row for row in short if row["drafter"] == "ngram")["tokens"].pop()
    found = check_matrix(Matrix(tuple(short), matrix.tokens, matrix.runs, matrix.skipped), base, ("BF16",))
    assert "NOT lossless: cell BF16 ngram" in found[0].summary


def test_impossible_times_are_shown_as_no_speed(measured):
    _, base, matrix, _ = measured
    runs = copy.deepcopy(list(matrix.runs))
    for row in runs:
        if row["contender"] == "ngram":
            row["seconds"] /= 1000
    checks = {one.name: one for one in check_matrix(
        Matrix(matrix.answers, matrix.tokens, tuple(runs), matrix.skipped), base, ("BF16",)
    )}  # fmt: skip
    assert checks["cell BF16 ngram"].measured is None
    assert "times BF16" not in checks["cell BF16 ngram"].summary
    assert checks["cell BF16 ngram"].verdict is Verdict.PASS  # lossless all the same; nobody asked for speed
    assert "ngram" not in checks["matrix"].summary


def test_a_busy_machine_fails_only_the_cell_whose_speed_a_gate_asks(measured):
    _, base, matrix, _ = measured
    gates = base.gates.model_copy(update={"min_speedup": 0.001})
    asked = base.model_copy(update={"gates": gates})
    for drafter, verdict in (("lookahead", Verdict.PASS), ("ngram", Verdict.ERROR)):
        runs = [  # a step takes as long with drafts as without, but for one drafter's
            {**row, "seconds": 0.01 * len(row["emitted"]) / (1000 if row["contender"] == drafter else 1)}
            for row in matrix.runs
        ]
        found = Matrix(matrix.answers, matrix.tokens, tuple(runs), matrix.skipped)
        checks = {check.name: check for check in check_matrix(found, asked, ("BF16",))}
        assert checks["matrix"].verdict is verdict
        # What one contender proves impossible is said of every time of its race.
        cells = [check for name, check in checks.items() if name.startswith("cell") and check.evidence]
        assert all("machine busy?" in check.warnings[0] and drafter in check.warnings[0] for check in cells)
    sound = [{**row, "seconds": 0.01 * len(row["emitted"])} for row in matrix.runs]
    found = Matrix(matrix.answers, matrix.tokens, tuple(sound), matrix.skipped)
    assert not any(check.warnings for check in check_matrix(found, asked, ("BF16",)))


def test_gates_that_no_cell_answers_are_no_pass(measured):
    """Gates of another kind, and those of a recipe that is none of the cells."""
    _, base, matrix, _ = measured
    assert "gates" not in [one.name for one in check_matrix(matrix, base, ("BF16",))]
    gates = base.gates.model_copy(update={"max_task_loss": 0.05, "min_acceptance_length": 1.5})
    cache = base.quantization.model_copy(update={"kv_cache": "int8"})
    for update, says in (
        ({"gates": gates}, "not judged here: min_acceptance_length, max_task_loss;"),
        ({"quantization": cache}, "no cell has the recipe's own format and drafter"),
    ):
        recipe = base.model_copy(update=update)
        checks = check_matrix(matrix, recipe, ("BF16",))
        left = next(one for one in checks if one.name == "gates")
        assert (left.verdict, left.required) == (Verdict.SKIPPED, True)
        assert says in left.summary
        assert exit_code(checks) == 4
        assert rejudge(checks[0].records) == checks


def test_gates_about_drafts_do_not_stop_the_matrix_and_its_own_cell_drafts_as_the_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.format(
            dtype="float32", speculation=NGRAM, gates="{min_speedup: 0.1, min_acceptance_length: 1.1}"
        )
    )
    make_tiny_model(tmp_path / "model", seed=0)
    base = absolute(load_recipe(tmp_path / "recipe.yaml"), tmp_path)
    built = derived(base, "BF16", quantization_of("BF16", base, ()), None)
    assert builder(tmp_path)(built).recipe.speculation.kind == "none"
    cells = _cells(builder(tmp_path)(built), base.speculation, (), {}, "BF16")
    assert cells["ngram"].recipe.speculation == base.speculation
    assert cells["ngram"].recipe.speculation.num_draft_tokens == 3  # not the default


def test_a_cell_tells_acceptance_rate_and_length(measured):
    _, base, matrix, _ = measured
    runs = [{**row, "drafted": 8, "accepted": 2} for row in matrix.runs]
    checks = {one.name: one for one in check_matrix(
        Matrix(matrix.answers, matrix.tokens, tuple(runs), matrix.skipped), base, ("BF16",)
    )}  # fmt: skip
    assert checks["cell BF16 ngram"].evidence["acceptance_rate"] == 0.25
    assert "25.0% of the drafts accepted, 1.00 tokens a step" in checks["cell BF16 ngram"].summary
    assert "alpha-without-tau" in checks["matrix"].evidence["pitfalls"]


def judged(tokens):
    formats = ["BF16", "W4A16", "W4A16+KV8"]
    found = judge_matrix(
        [], tokens, [], skipped=dict.fromkeys(formats, "x"), formats=formats,
        own="", label="strict", max_perplexity_ratio=None, min_speedup=None,
    )  # fmt: skip
    return next(one for one in found if one.name.startswith("interaction"))


def scored(excess):
    """Weights lose 0.1 nat a token, the cache 0.02, both the sum and ``excess``."""
    import random

    rng, rows = random.Random(5), []
    for text in range(40):
        for _ in range(30):
            base = -3 + rng.gauss(0, 1)
            w, k = 0.1 + rng.gauss(0, 0.1), 0.02 + rng.gauss(0, 0.02)
            for name, value in (
                ("BF16", base), ("W4A16", base - w), ("KV8", base - k),
                ("W4A16+KV8", base - w - k - excess + rng.gauss(0, 0.05)),
            ):  # fmt: skip
                rows.append({"format": name, "text": text, "logprob": value})
    return sorted(rows, key=lambda row: (row["format"], row["text"]))


def test_the_interaction_is_the_excess_over_the_sum():
    assert "not shown to lose other" in judged(scored(0.0)).summary
    more = judged(scored(0.05))
    assert "more than the sum" in more.summary
    assert more.evidence["excess_nats"] == pytest.approx(0.05, abs=0.01)
    assert "less than the sum" in judged(scored(-0.05)).summary
    missing = [row for row in scored(0.0) if row["format"] != "KV8"]
    assert judged(missing).verdict is Verdict.SKIPPED


def test_formats_follow_the_recipe(measured):
    _, base, _, _ = measured
    sizes = {
        quantization_of("W4A16", base, (576, 1536)).group_size,
        quantization_of("W4A16", base, (4096,)).group_size,
    }
    assert sizes == {64, 128}
    assert quantization_of("W4A16+KV8", base, (576,)).kv_cache == "fp8"
    assert quantization_of("KV8", base, ()).kind == "none"
    assert own_cell(base) == "BF16 ngram"


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built = build_tiny(tmp_path)
    assert main(["verify", str(built.folder), "--matrix", str(tmp_path / "recipe.yaml")]) == 2
    assert "not both" in capsys.readouterr().err
    assert main(["verify", "--heads", "x"]) == 2
    assert "--heads belongs to --matrix" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("version: 1\n")
    assert main(["verify", "--matrix", str(tmp_path / "bad.yaml")]) == 2
