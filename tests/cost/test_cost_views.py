"""The verbs estimate, sweep and explain: what they print, draw, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trtspec.cli import main
from trtspec.cost import plot, views
from trtspec.cost.trace import TraceLine, recompute

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
EAGLE3 = str(RECIPES / "llama-3.1-8b-fp8-eagle3-pytorch.yaml")
DRAFT = str(RECIPES / "llama-3.1-70b-fp8-draft-model-tensorrt.yaml")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_estimate_prints_and_explains(run: Run) -> None:
    code, out, _ = run("estimate", EAGLE3, "--gpu", "H100", "--concurrency", 4, "--explain")
    assert code == 0
    for word in ("TPOT", "TTFT", "break-even", "acceptance", "assumed:", "verify.step_ms", "with weights"):
        assert word in out


def test_estimate_json_carries_a_trace_that_recomputes(run: Run) -> None:
    code, out, _ = run("estimate", DRAFT, "--gpu", "H200", "--json")
    value = json.loads(out)
    assert code == 0
    assert value["trtspec"]["schema"] == "trtspec.estimate/1"
    lines = [TraceLine(**line) for line in value["trace"]]
    assert all(recompute(line) == pytest.approx(line.value, rel=1e-12, abs=1e-15) for line in lines)
    assert value["interval"][0] < value["tpot_ms"] < value["interval"][1]


@pytest.mark.parametrize(
    "recipe", sorted(RECIPES.glob("*-tensorrt.yaml")) + sorted(RECIPES.glob("*-pytorch.yaml"))
)
def test_every_shipped_gpu_recipe_is_priced(run: Run, recipe: Path) -> None:
    code, out, err = run("estimate", recipe, "--gpu", "H100")
    assert code == 0, err
    assert "TPOT" in out


def test_the_four_scenarios(run: Run) -> None:
    code, out, _ = run("sweep", "scenarios", "--json")
    rows = {row[0]: row[3] for row in json.loads(out)["rows"]}
    assert code == 0
    assert rows == {
        "neither quantized": 2.4011, "both quantized": 4.8023, "target only": 3.7351, "draft only": 2.8013
    }  # fmt: skip
    code, out, _ = run("sweep", "scenarios", DRAFT, "--gpu", "H200", "--json")
    times = {row[0]: row[1] for row in json.loads(out)["rows"]}
    assert times["both quantized"] < times["target only"] < times["neither quantized"]


def test_the_batch_view_marks_the_break_even(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "version: 1\nname: x\nmodel: {source: meta-llama/Llama-3.1-8B-Instruct}\nbackend: {kind: tensorrt}\n"
        "speculation: {kind: medusa, heads: somewhere}\n"
    )
    picture = tmp_path / "b.svg"
    code, out, err = run(
        "sweep", "batch", recipe, "--gpu", "H100", "--input-tokens", 256, "--plot", picture, "--json"
    )
    assert code == 0, err
    view = json.loads(out)
    (mark,) = view["marks"]
    gains = {row[0]: row[3] for row in view["rows"]}
    assert all((gain < 1) == (batch >= mark[0]) for batch, gain in gains.items())
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg")
    assert f"break-even {mark[0]:.0f}" in picture.read_text()
    code, _, err = run("sweep", "batch", recipe, "--gpu", "H100", "--plot", picture)
    assert code == 2
    assert "exists" in err


@pytest.mark.parametrize("name", ["draft-quantization", "best-length", "scenarios"])
def test_views_without_a_recipe(run: Run, name: str) -> None:
    code, out, err = run("sweep", name)
    assert code == 0, err
    assert "K" in out


@pytest.mark.parametrize("name", ["draft-quantization", "best-length", "scenarios", "batch", "pareto"])
def test_views_of_a_recipe(run: Run, name: str) -> None:
    code, out, err = run("sweep", name, DRAFT, "--gpu", "H200")
    assert code == 0, err
    assert "H200" in out


def test_the_frontier_is_not_dominated(run: Run) -> None:
    _, out, _ = run("sweep", "pareto", EAGLE3, "--gpu", "H100", "--json")
    rows = json.loads(out)["rows"]
    front = [row for row in rows if row[4] == "yes"]
    assert front
    for row in rows:
        better = [r for r in rows if r[2] > row[2] and r[3] > row[3]]
        assert not (row in front and better)
        assert row in front or any(r[2] >= row[2] and r[3] >= row[3] for r in front)


def test_own_sweeps(run: Run) -> None:
    code, out, _ = run("sweep", "vary", "--vary", "alpha=.5:.9:.1", "--vary", "K=2,4", "--json")
    view = json.loads(out)
    assert code == 0
    assert [row[0] for row in view["rows"]] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert dict(zip(view["columns"], view["rows"][3], strict=True))["K 4"] == 4.8023
    code, out, _ = run(
        "sweep", "vary", EAGLE3, "--gpu", "L4", "--vary", "context=1024,8192", "--metric", "tpot_ms", "--json"
    )
    rows = json.loads(out)["rows"]
    assert code == 0
    assert rows[1][1] > rows[0][1]


def test_explain_goes_down_to_the_sources(run: Run) -> None:
    code, out, _ = run("explain", "tpot_ms", EAGLE3, "--gpu", "H100")
    assert code == 0
    for name in ("round_ms", "verify.weights_ms", "target.layer_params", "constants", "memory_efficiency"):
        assert name in out
    code, out, _ = run("explain", "all", EAGLE3, "--gpu", "H100")
    assert "prefill.linear_ms" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("explain", "tpott_ms", EAGLE3, "--gpu", "H100"), 2, "nearest: tpot_ms"),
        (("estimate", EAGLE3), 2, "--gpu is missing"),
        (("estimate", EAGLE3, "--gpu", "A100"), 2, "A100-PCIe-80G or A100-SXM-80G"),
        (("estimate", EAGLE3, "--gpu", "A100-SXM"), 2, "no FP8 rate"),
        (("estimate", EAGLE3, "--gpu", "H100", "--task", "poetry"), 2, "no acceptance prior"),
        (("sweep", "bach"), 2, "did you mean batch?"),
        (("sweep", "batch"), 2, "needs a recipe"),
        (("sweep", "vary"), 2, "--vary"),
        (("sweep", "vary", "--vary", "alpha=a"), 2, "NAME=1,2,4"),
        (("sweep", "vary", "--vary", "batch=1,2"), 2, "without a recipe"),
        (("sweep", "scenarios", "--plot", "x.gif"), 2, ".svg or .png"),
        (("sweep", "scenarios", "--plot", "x.svg"), 2, "nothing to plot"),
        (("sweep", "vary", "--vary", "K=1,2", "--metric", "tpot_ms"), 2, "no metric"),
    ],
)
def test_refusals(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    found, _, err = run(*arguments)
    assert (found, message in err) == (code, True), err


def test_png_needs_matplotlib(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    code, _, err = run("sweep", "best-length", "--plot", picture)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert code == 3
        assert "matplotlib" in err
        assert not picture.exists()
    else:
        assert code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_ticks_cover_the_range_in_round_steps() -> None:
    assert plot.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert plot.ticks(1, 256, log=True)[0] == 1
    assert plot.ticks(1, 256, log=True)[-1] == 256
    for low, high in ((0, 0.37), (0, 3.2), (100, 4000), (5, 5)):
        values = plot.ticks(low, high)
        assert values[0] <= low
        assert values[-1] >= high


def test_text_in_a_plot_is_escaped() -> None:
    view = views.View("a < b & c", ("x",), ((1,),), (views.Series("<s>", ((0.0, 1.0), (1.0, 2.0))),))
    assert ElementTree.fromstring(plot.svg(view)).tag.endswith("svg")


def test_the_verbs_start_without_torch_or_numpy() -> None:
    code = (
        "import sys, trtspec.cli.estimate as e; from trtspec.cost.estimate import estimate; "
        "print([m for m in ('torch', 'numpy', 'scipy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
