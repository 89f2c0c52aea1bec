"""The launch script run for real, with stand-ins for NVIDIA's programs, and what it refuses to start."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_repositories import DRAFT, EAGLE3, LOOKAHEAD, MEDUSA, NGRAM, recipe_of, rendered, with_serving

from trtspec import artifact
from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.gpu_plan import engine_files, engine_plan
from trtspec.recipe import Parallel, Recipe
from trtspec.recipe_file import load_recipe, recipe_digest
from trtspec.trtllm.launch import (
    LAUNCH_FILE,
    TEMPLATES,
    curl_example,
    docker_command,
    engine_problems,
    engine_wants,
    num_nodes,
    placement_problems,
    render_launch,
)

ROOT = Path(__file__).parents[2]
SAY = """#!/bin/sh
echo STARTED
printf '%s\\n' "$TRTLLM_ORCHESTRATOR" "$TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES" "$0" "$@"
"""


def with_parallel(recipe: Recipe, tp: int, pp: int = 1) -> Recipe:
    return recipe.model_copy(update={"parallel": Parallel(tp=tp, pp=pp)})


def engine_config(recipe: Recipe, *, draft: bool = False, **changes: Any) -> dict[str, Any]:
    """config.json of an engine that fits, changed."""
    wants = {**engine_wants(recipe, draft=draft), **changes}
    build = {
        key: value for key, value in wants.items() if key not in ("world_size", "use_paged_context_fmha")
    }
    build["plugin_config"] = {"use_paged_context_fmha": wants.get("use_paged_context_fmha", False)}
    return {"pretrained_config": {"mapping": {"world_size": wants["world_size"]}}, "build_config": build}


class Container:
    """What the script meets in NVIDIA's image, in a temporary folder."""

    def __init__(self, folder: Path, recipe: Recipe, version: str = "1.2.1", **changes: Any) -> None:
        self.folder, self.recipe = folder, recipe
        self.engine, self.draft = folder / "an engine", folder / "draft"
        self.templates, self.repository = folder / "templates", folder / "repository"
        self.write_programs(version)
        paths = {"engine_dir": str(self.engine), "draft_engine_dir": str(self.draft)}
        files = rendered(recipe, "1.2.1", **paths)
        for name, text in files.items():
            self.put(folder / "work" / "triton" / name, text)
            theirs = (
                name
                if recipe.backend.kind == "tensorrt"
                else name.replace(recipe.serving.model_name, "tensorrt_llm")
            )
            self.put(self.templates / theirs, text)
        for model in ("preprocessing", "postprocessing", "tensorrt_llm_bls", "tensorrt_llm"):
            self.put(self.templates / model / "1" / "model.py", "# theirs\n")
            self.put(self.templates / model / "1" / "helpers.py", "# theirs\n")
        if recipe.backend.kind == "tensorrt":
            self.put(self.engine / "config.json", json.dumps(engine_config(recipe)))
            self.put(self.draft / "config.json", json.dumps(engine_config(recipe, draft=True)))
        draft = paths["draft_engine_dir"] if "draft" in recipe.speculation.kind else None
        script = render_launch(
            recipe, "1.2.1", engine_dir=paths["engine_dir"], draft_engine_dir=draft, **changes
        )
        self.put(folder / "work" / LAUNCH_FILE, script)

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_programs(self, version: str) -> None:
        for name in ("mpirun", "tritonserver"):
            self.put(self.folder / "bin" / name, SAY)
        self.put(self.folder / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0'\necho 'GPU 1'\n")
        for program in (self.folder / "bin").iterdir():
            program.chmod(0o755)
        info = self.folder / "packages" / f"tensorrt_llm-{version}.dist-info"
        self.put(info / "METADATA", f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "packages"),
            "TRITONSERVER": str(self.folder / "bin" / "tritonserver"),
            "TEMPLATES": str(self.templates),
            "MODEL_REPO": str(self.repository),
            **environment,
        }
        self.repository.mkdir(exist_ok=True)
        script = str(self.folder / "work" / LAUNCH_FILE)
        return subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)

    def started(self, **environment: str) -> tuple[list[str], list[str]]:
        """The command that was started, and the two variables of orchestrator mode."""
        done = self.run(**environment)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.partition("STARTED\n")[2].splitlines()
        return lines[2:], lines[:2]


def ranks(argv: list[str]) -> list[list[str]]:
    """The commands that mpirun was given, one a rank."""
    commands: list[list[str]] = [[]]
    for word in argv[1:]:
        if word == ":":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


# --------------------------------------------------------------------------- starting


@pytest.mark.parametrize("tp", [1, 2])
def test_engines_start_a_server_for_each_rank(tmp_path: Path, tp: int) -> None:
    recipe = with_serving(with_parallel(recipe_of(LOOKAHEAD), tp), model_name="chat", http_port=9000)
    container = Container(tmp_path, recipe)
    argv, variables = container.started()
    commands = ranks(argv)
    assert len(commands) == tp
    assert variables == ["", ""]
    for rank, command in enumerate(commands):
        assert command[command.index("-n") + 1] == "1"
        assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=9000"} <= set(command)
        assert "--disable-auto-complete-config" in command
        assert ("--load-model=chat" in command) == (rank > 0)
        assert any(word.endswith(f"shm-region-prefix-name=trtspec_{rank}_") for word in command)
    assert sorted(path.name for path in container.repository.iterdir()) == [
        "chat",
        "ensemble",
        "postprocessing",
        "preprocessing",
        "tensorrt_llm_bls",
    ]
    assert (container.repository / "preprocessing" / "1" / "model.py").read_text() == "# theirs\n"
    assert (container.repository / "ensemble" / "1").is_dir()
    # The rendered files stay as they were: they may be part of a sealed engine.
    assert not (tmp_path / "work" / "triton" / "ensemble" / "1").exists()


def test_two_engines_start_in_orchestrator_mode(tmp_path: Path) -> None:
    container = Container(tmp_path, recipe_of(DRAFT))
    argv, variables = container.started()
    (command,) = ranks(argv)
    assert variables == ["1", "1"]
    assert {f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in (0, 1)} <= set(command)
    assert not any(word.startswith("--load-model") for word in command)
    assert (container.repository / "tensorrt_llm_draft" / "1").is_dir()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_llm_api_starts_under_its_own_launcher_where_there_are_ranks(tmp_path: Path, tp: int) -> None:
    container = Container(tmp_path, with_parallel(recipe_of(EAGLE3), tp))
    argv, _ = container.started()
    assert (Path(argv[0]).name == "tritonserver") == (tp == 1)
    assert argv.count("trtllm-llmapi-launch") == (0 if tp == 1 else tp)
    model = container.repository / "tensorrt_llm" / "1"
    assert sorted(path.name for path in model.iterdir()) == ["helpers.py", "model.py", "model.yaml"]


def test_several_machines_need_a_host_file_and_a_shared_repository(tmp_path: Path) -> None:
    recipe = with_parallel(recipe_of(LOOKAHEAD), 2)
    container = Container(tmp_path, recipe, gpus_per_node=1)
    done = container.run()
    assert done.returncode != 0
    assert "HOSTFILE" in done.stderr
    argv, _ = container.started(HOSTFILE="/hosts")
    assert argv[argv.index("--hostfile") + 1] == "/hosts"
    done = container.run(HOSTFILE="/hosts", MODEL_REPO="")
    assert "folder that all machines see" in done.stderr
    assert (num_nodes(recipe), num_nodes(recipe, 1)) == (1, 2)


def test_ranks_that_cannot_be_placed() -> None:
    def keys(recipe: Recipe) -> list[str | None]:
        return [problem.key for problem in placement_problems(recipe)]

    assert keys(with_parallel(recipe_of(EAGLE3), 16)) == ["parallel.tp"]
    assert keys(with_parallel(recipe_of(EAGLE3), 8, 2)) == []
    assert keys(with_parallel(recipe_of(DRAFT), 16)) == ["parallel.tp"]
    assert keys(with_parallel(recipe_of(LOOKAHEAD), 16)) == []
    with pytest.raises(InputError, match="on machines of 8"):
        render_launch(with_parallel(recipe_of(EAGLE3), 16), "1.2.1", engine_dir="/e")


# --------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_draft_len": 0}, "max_draft_len: found 0, at least 15 is needed"),
        ({"speculative_decoding_mode": 1}, "speculative_decoding_mode: found 1, 8 is needed"),
        ({"world_size": 2}, "world_size: found 2, 1 is needed"),
        ({"max_batch_size": 2}, "max_batch_size: found 2, at least 4"),
        ({"use_paged_context_fmha": False}, "use_paged_context_fmha: found False, True is needed"),
    ],
)
def test_an_engine_that_does_not_fit_is_not_served(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """The check in the script is the function's own source: both are asked."""
    recipe = recipe_of(LOOKAHEAD)
    wants = engine_wants(recipe, draft=False)
    assert engine_problems(engine_config(recipe), wants) == []
    config = engine_config(recipe, **changes)
    (problem,) = engine_problems(config, wants)
    assert message in problem
    container = Container(tmp_path, recipe)
    container.put(container.engine / "config.json", json.dumps(config))
    done = container.run()
    assert (done.returncode, "STARTED" in done.stdout) == (3, False)
    assert message in done.stderr


def test_an_engines_mode_may_be_written_as_a_name_or_not_at_all() -> None:
    wants = engine_wants(recipe_of(MEDUSA), draft=False)
    for mode in ("MEDUSA", None):
        assert engine_problems(engine_config(recipe_of(MEDUSA), speculative_decoding_mode=mode), wants) == []
    assert len(engine_problems({}, wants)) == 5


def test_no_engine_at_all(tmp_path: Path) -> None:
    container = Container(tmp_path, recipe_of(LOOKAHEAD))
    (container.engine / "config.json").unlink()
    done = container.run()
    assert done.returncode == 3
    assert "the engine does not fit" in done.stderr


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0"])
def test_another_version_is_refused_unless_it_is_wanted(tmp_path: Path, version: str) -> None:
    container = Container(tmp_path, recipe_of(LOOKAHEAD), version)
    done = container.run()
    assert done.returncode == 3
    assert f"rendered for TensorRT-LLM 1.2.1, here is {version}" in done.stderr
    container.started(TENSORRT_LLM_VERSION=version)


def test_a_local_part_of_the_version_does_not_matter(tmp_path: Path) -> None:
    Container(tmp_path, recipe_of(LOOKAHEAD), "1.2.1+cu13").started()


def test_forced_acceptance_is_refused(tmp_path: Path) -> None:
    container = Container(tmp_path, recipe_of(LOOKAHEAD))
    for switch in ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "TRTLLM_SIMULATE_ACCEPTANCE"):
        done = container.run(**{switch: "3"})
        assert done.returncode == 3
        assert f"{switch} is set" in done.stderr
    container.started(TLLM_LOG_LEVEL="INFO")


def test_missing_files_of_the_container_are_named(tmp_path: Path) -> None:
    done = Container(tmp_path, recipe_of(LOOKAHEAD)).run(TEMPLATES="/nowhere")
    assert done.returncode == 3
    assert f"set TEMPLATES to NVIDIA's {TEMPLATES['tensorrt']} folder" in done.stderr


def test_tensors_that_only_nvidias_version_declares_are_named(tmp_path: Path) -> None:
    container = Container(tmp_path, recipe_of(LOOKAHEAD))
    assert "warning" not in container.run().stderr
    theirs = container.templates / "preprocessing" / "config.pbtxt"
    theirs.write_text(
        theirs.read_text() + '# name: "not"\noutput [ { name: "NEW_OUTPUT" data_type: TYPE_BOOL } ]\n'
    )
    done = container.run()
    assert done.returncode == 0
    assert "preprocessing/config.pbtxt does not declare NEW_OUTPUT" in done.stderr
    assert "not" not in done.stderr.split("declare ")[1].split(" ")[0]


# --------------------------------------------------------------------------- texts


@pytest.mark.parametrize("name", [DRAFT, MEDUSA, LOOKAHEAD, EAGLE3, NGRAM])
def test_golden_script(name: str) -> None:
    draft = "/draft" if name == DRAFT else None
    text = render_launch(recipe_of(name), "1.2.1", engine_dir="${WORK_DIR}/engine", draft_engine_dir=draft)
    golden = ROOT / "tests" / "golden" / "trtllm-triton" / f"{name}-1.2.1" / LAUNCH_FILE
    if os.environ.get("TRTSPEC_UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text
    assert "not run where it was rendered" in text
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_odd_paths_reach_the_engine_check(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" $HOME `c` \\'
    Container(odd, recipe_of(LOOKAHEAD)).started()


def test_a_first_request_has_what_each_model_asks() -> None:
    def body(recipe: Recipe) -> tuple[str, Mapping[str, Any]]:
        line = curl_example(recipe)
        url = line.split("/v2/models/")[1].split("/")[0]
        return url, json.loads(line[line.index("-d '") + 4 : -1])

    model, asked = body(recipe_of(DRAFT))
    assert model == "tensorrt_llm_bls"
    assert (asked["num_draft_tokens"], asked["use_draft_logits"], asked["stream"]) == (4, False, False)
    assert body(recipe_of(MEDUSA)) == ("ensemble", {"text_input": "Hello", "max_tokens": 16})
    model, asked = body(with_serving(recipe_of(EAGLE3), model_name="chat"))
    assert (model, asked["sampling_param_max_tokens"]) == ("chat", 16)
    assert "http://[::1]:8000/" in curl_example(with_serving(recipe_of(MEDUSA), host="::1"))
    assert "http://127.0.0.1:8000/" in curl_example(with_serving(recipe_of(MEDUSA), host="0.0.0.0"))


# --------------------------------------------------------------------------- trtspec serve --dry-run

RECIPE = """\
version: 1
name: tiny
model: {source: "org/name"}
backend: {kind: pytorch}
speculation: {kind: ngram}
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A sealed engine of a GPU backend, its weights made up: serving a GPU engine never reads them here."""
    folder = tmp_path / "an engine"
    (folder / "baseline").mkdir(parents=True)
    (folder / "baseline" / "config.json").write_text("{}")
    (folder / "recipe.yaml").write_text(RECIPE)
    for name, text in engine_files(engine_plan(folder / "recipe.yaml", "1.2.1")).items():
        path = folder / artifact.TRTLLM_DIR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    manifest = artifact.Manifest(
        name="tiny",
        created=artifact.utc_now(),
        recipe_digest=recipe_digest(load_recipe(folder / "recipe.yaml")),
        source=artifact.hash_source(folder / "baseline", [folder / "baseline" / "config.json"]),
        calibration_digest=None,
        target="baseline",
        tools=artifact.tool_versions(),
        machine=artifact.machine_summary(),
        steps=(),
    )
    artifact.seal(folder, manifest)
    return folder


def test_a_dry_run_prints_what_the_engine_holds(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(engine), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for name in ("triton/tensorrt_llm/config.pbtxt", "triton/tensorrt_llm/1/model.yaml", LAUNCH_FILE):
        assert f"==> trtllm/{name}\n{(engine / 'trtllm' / name).read_text()}" in shown
    assert "tables of TensorRT-LLM 1.2.1; not run here" in shown
    assert docker_command(str(engine), f"/engine/trtllm/{LAUNCH_FILE}", "/engine") in shown
    assert main(["serve", str(engine), "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tensorrt_llm"] == "1.2.1"
    assert sorted(printed["files"])[0] == f"trtllm/{LAUNCH_FILE}"
    assert "/engine/baseline" in printed["files"]["trtllm/triton/tensorrt_llm/1/model.yaml"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 3, "served by Triton in NVIDIA's container"),
        (["--dry-run", "--http-port", "9000"], 2, "--http-port: the files of this engine"),
    ],
)
def test_what_serve_does_not_do_for_it(
    engine: Path, options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(engine), *options]) == code
    assert message in capsys.readouterr().err


def test_an_engine_without_a_repository_is_told_apart(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = artifact.read_manifest(engine)
    (engine / "trtllm" / LAUNCH_FILE).unlink()
    artifact.seal(engine, manifest)
    assert main(["serve", str(engine), "--dry-run"]) == 2
    assert "has no Triton repository" in capsys.readouterr().err
