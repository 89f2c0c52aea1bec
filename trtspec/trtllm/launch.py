"""The script that serves a rendered Triton repository inside NVIDIA's container, and what it checks first.

It does what NVIDIA's launch_triton_server.py does, which binds to every address; so the commands are
written out here, with the recipe's. Three ways to start, by what runs:

- engines, *leader mode*: one tritonserver for each rank under ``mpirun``; all but the first load only the
  engine;
- two engines (draft model), *orchestrator mode*: one tritonserver that starts a worker process for each
  rank;
- the LLM API: one tritonserver, under ``trtllm-llmapi-launch`` for each rank where there are several (as
  NVIDIA's own tests start it).
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.recipe import (
    DraftModelSpeculation,
    EagleSpeculation,
    LookaheadSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    Recipe,
    TensorrtBackend,
)
from trtspec.recipe_facts import drafted_positions, paged_context_off
from trtspec.trtllm.facts import load_facts
from trtspec.trtllm.triton import PYTHON_MODELS
from trtspec.trtllm.triton_cpp import BLS, draft_name, front_model

LAUNCH_FILE = "launch_triton.sh"
TEMPLATES = {"tensorrt": "/app/all_models/inflight_batcher_llm", "pytorch": "/app/all_models/llmapi"}
"""Where NVIDIA's tritonserver images with TensorRT-LLM have the models' Python files, by backend."""
SPECULATIVE_MODES = {"draft_tokens_external": 2, "medusa": 4, "lookahead_decoding": 8, "eagle": 32}
"""SpeculativeDecodingMode, as an engine's config.json has it."""
FORCED_ACCEPTANCE = r"^(TLLM|TRTLLM)_.*(FORCE|SIMULATE)\w*ACC"
"""Names of debugging switches (TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS): drafts are accepted unseen."""
GPUS_PER_NODE = 8
_SERVER = "/opt/tritonserver/bin/tritonserver"


def num_nodes(recipe: Recipe, gpus_per_node: int = GPUS_PER_NODE) -> int:
    """Machines that the recipe's ranks need."""
    return -(-recipe.parallel.tp * recipe.parallel.pp // gpus_per_node)


def render_launch(
    recipe: Recipe,
    version: str,
    *,
    engine_dir: str,
    draft_engine_dir: str | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
) -> str:
    """A bash script that completes a copy of the repository beside it (``triton``), checks and serves it.

    Paths as in :func:`trtspec.trtllm.triton.render_repository`. Raises InputError for ranks that this way of
    serving cannot place.
    """
    facts = load_facts(version)
    problems = list(placement_problems(recipe, gpus_per_node))
    if problems:
        raise InputError(problems)
    engines = {"engine": engine_dir} if isinstance(recipe.backend, TensorrtBackend) else {}
    if engines and draft_engine_dir is not None:
        engines["draft engine"] = draft_engine_dir
    blocks = [
        _header(recipe, facts.version, num_nodes(recipe, gpus_per_node)),
        _version_check(facts.version),
        _copy(recipe),
        *(_engine_check(recipe, name, path) for name, path in engines.items()),
        _start(recipe, gpus_per_node),
    ]
    return "\n".join(blocks)


def placement_problems(recipe: Recipe, gpus_per_node: int = GPUS_PER_NODE) -> Iterator[Problem]:
    """Ranks that this way of serving cannot place on machines of ``gpus_per_node``."""
    parallel, nodes = recipe.parallel, num_nodes(recipe, gpus_per_node)
    if nodes == 1:
        return
    if recipe.backend.kind == "pytorch" and parallel.tp > gpus_per_node:
        yield Problem(
            f"found {parallel.tp} on machines of {gpus_per_node} GPUs; the llmapi model has no tensor "
            "parallelism across machines; lower it, or raise pp",
            key="parallel.tp",
        )
    if isinstance(recipe.speculation, DraftModelSpeculation):
        yield Problem(
            f"{parallel.tp * parallel.pp} GPUs on machines of {gpus_per_node}; two engines are served by one "
            "server on one machine; lower tp",
            key="parallel.tp",
        )


# --------------------------------------------------------------------------- the script


def _header(recipe: Recipe, version: str, nodes: int) -> str:
    ask = curl_example(recipe)
    # The rendered files stay as they are: NVIDIA's are added to a copy.
    repository = 'MODEL_REPO="${MODEL_REPO:-$(mktemp -d)}"'
    if nodes > 1:
        repository = ': "${MODEL_REPO:?set MODEL_REPO to an empty folder that all machines see}"'
    return f"""\
#!/usr/bin/env bash
# {recipe.name}: Triton with TensorRT-LLM {version}.
# Rendered and checked against the tables of TensorRT-LLM {version}; not run where it was rendered.
# Run it in NVIDIA's tritonserver:YY.MM-trtllm-python-py3 image whose TensorRT-LLM is {version}.
# Ask it: {ask}
set -euo pipefail
{repository}
TEMPLATES="${{TEMPLATES:-{TEMPLATES[recipe.backend.kind]}}}"

fail() {{ echo "$0: $*" >&2; exit 3; }}

forced="$(compgen -e | grep -E '{FORCED_ACCEPTANCE}' || true)"
[ -z "$forced" ] || fail "$forced is set: drafts would be accepted unseen; unset it"
"""


def _version_check(version: str) -> str:
    return f"""\
expected="${{TENSORRT_LLM_VERSION:-{version}}}"
found="$(python3 -c 'import importlib.metadata as m; print(m.version("tensorrt_llm").split("+")[0])' 2>/dev/null || true)"
if [ "$found" != "$expected" ]; then
  fail "this was rendered for TensorRT-LLM $expected, here is ${{found:-none}}; render it for that version, or set" \\
    "TENSORRT_LLM_VERSION=${{found:-...}} to go on all the same"
fi
"""  # noqa: E501 (a script's line)


def _copy(recipe: Recipe) -> str:
    """NVIDIA's Python files into the repository, and a look at what they expect to be declared."""
    kind, name = recipe.backend.kind, recipe.serving.model_name
    lines = [
        f'[ -d "$TEMPLATES" ] || fail "no $TEMPLATES; set TEMPLATES to NVIDIA\'s {TEMPLATES[kind]} folder"'
    ]
    lines.append('cp -r "$(dirname "${BASH_SOURCE[0]}")/triton/." "$MODEL_REPO"')
    pairs = [(model, model) for model in PYTHON_MODELS[kind]]
    if kind == "pytorch":
        pairs = [("tensorrt_llm", name)]
        lines.append(f'mkdir -p "$MODEL_REPO"/{name}/1')
        lines.append(f'cp "$TEMPLATES"/tensorrt_llm/1/*.py "$MODEL_REPO"/{name}/1/')
    else:
        empty = ["ensemble", name] + (
            [draft_name(recipe)] if isinstance(recipe.speculation, DraftModelSpeculation) else []
        )
        lines += [f'mkdir -p "$MODEL_REPO"/{folder}/1' for folder in empty]
        lines += [f'cp -r "$TEMPLATES"/{model}/1 "$MODEL_REPO"/{folder}/' for model, folder in pairs]
        pairs += [("ensemble", "ensemble"), ("tensorrt_llm", name)]
    lines += [
        "",
        "# Tensors that NVIDIA's files of this version declare and these here do not.",
        "names() {",
        """  grep -v '^ *#' "$1" | grep -oE '\\bname: *"[^"]+"' | sed -E 's/.*"(.*)"/\\1/' | sort -u""",
        "}",
        f"for pair in {' '.join(f'{model}:{folder}' for model, folder in pairs)}; do",
        '  theirs="$TEMPLATES/${pair%%:*}/config.pbtxt" ours="$MODEL_REPO/${pair##*:}/config.pbtxt"',
        '  missing="$(comm -23 <(names "$theirs") <(names "$ours") | grep -vxF "${pair%%:*}" || true)"',
        '  [ -z "$missing" ] || echo "$0: warning: $ours does not declare" $missing "; $theirs does" >&2',
        "done",
        "",
    ]
    return "\n".join(lines)


def _engine_check(recipe: Recipe, name: str, path: str) -> str:
    """An engine against what is asked of it, by its own config.json; the check is :func:`engine_problems`."""
    wanted = json.dumps(engine_wants(recipe, draft=name != "engine"), sort_keys=True)
    file = _shell_path(f"{path}/config.json")
    return f"""\
python3 - {file} {shlex.quote(wanted)} <<'CHECK' || fail "the {name} does not fit"
from __future__ import annotations
import json, sys

{inspect.getsource(engine_problems)}
sys.exit("; ".join(engine_problems(json.load(open(sys.argv[1])), json.loads(sys.argv[2]))) or 0)
CHECK
"""


def _shell_path(path: str) -> str:
    """A path in double quotes; only the variables of a caller's script (``${NAME}``) stay variables."""
    parts = re.split(r"(\$\{\w+\})", path)
    return '"' + "".join(p if i % 2 else re.sub(r'([\\"$`])', r"\\\1", p) for i, p in enumerate(parts)) + '"'


def engine_wants(recipe: Recipe, *, draft: bool) -> dict[str, Any]:
    """What an engine's config.json must say for this recipe: ``max_*`` at least, the rest exactly."""
    wants: dict[str, Any] = {
        "world_size": recipe.parallel.tp * recipe.parallel.pp,
        "max_batch_size": recipe.limits.max_batch_size,
        "max_seq_len": recipe.limits.max_seq_tokens,
    }
    match recipe.speculation:
        case _ if draft:
            pass
        case DraftModelSpeculation() | NgramSpeculation():
            wants["speculative_decoding_mode"] = SPECULATIVE_MODES["draft_tokens_external"]
        case MedusaSpeculation():
            wants["speculative_decoding_mode"] = SPECULATIVE_MODES["medusa"]
        case LookaheadSpeculation():
            wants["speculative_decoding_mode"] = SPECULATIVE_MODES["lookahead_decoding"]
        case EagleSpeculation():
            wants["speculative_decoding_mode"] = SPECULATIVE_MODES["eagle"]
    if not draft and recipe.speculation.kind != "none":
        wants["max_draft_len"] = drafted_positions(recipe.speculation)
    if not draft and paged_context_off(recipe) is None:
        wants["use_paged_context_fmha"] = True
    return wants


def engine_problems(config: Mapping[str, Any], wants: Mapping[str, Any]) -> list[str]:
    """What an engine's config.json says against what is wanted. Also runs where trtspec is not installed."""
    build = config.get("build_config", {})
    plugins = build.get("plugin_config", {})
    found = {
        "world_size": config.get("pretrained_config", {}).get("mapping", {}).get("world_size"),
        "max_batch_size": build.get("max_batch_size"),
        "max_seq_len": build.get("max_seq_len"),
        "max_draft_len": build.get("max_draft_len"),
        "speculative_decoding_mode": build.get("speculative_decoding_mode"),
        "use_paged_context_fmha": plugins.get("use_paged_context_fmha"),
    }
    problems = []
    for key, need in wants.items():
        value = found[key]
        if key.startswith("max_"):
            if not isinstance(value, int) or value < need:
                problems.append(f"{key}: found {value}, at least {need} is needed; build it again")
        elif value != need and (key != "speculative_decoding_mode" or isinstance(value, int)):
            problems.append(f"{key}: found {value}, {need} is needed; build it again")
    return problems


def _start(recipe: Recipe, gpus_per_node: int) -> str:
    world = recipe.parallel.tp * recipe.parallel.pp
    name = recipe.serving.model_name
    lines = [_server_function(recipe)]
    hosts = ""
    if num_nodes(recipe, gpus_per_node) > 1:
        lines.append(': "${HOSTFILE:?set HOSTFILE to an MPI hostfile, the machine of the endpoints first}"')
        hosts = ' --hostfile "$HOSTFILE"'
    two_engines = recipe.backend.kind == "tensorrt" and isinstance(recipe.speculation, DraftModelSpeculation)
    if two_engines:
        lines += [
            "# Orchestrator mode: the server starts a worker for each rank of each engine.",
            "export TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=1",
            "pools=(--pinned-memory-pool-byte-size=0 --enable-peer-access=false)",
            "for ((gpu = 0; gpu < $(nvidia-smi --list-gpus | wc -l); gpu++)); do",
            '  pools+=("--cuda-memory-pool-byte-size=$gpu:0")',
            "done",
            "server 0",
            'exec mpirun --allow-run-as-root -n 1 "${command[@]}" "${pools[@]}"',
        ]
    elif world == 1 and recipe.backend.kind == "pytorch":
        lines += ["server 0", 'exec "${command[@]}"']
    else:
        wrapper = "trtllm-llmapi-launch " if recipe.backend.kind == "pytorch" else ""
        lines += [
            f"# Leader mode: a server for each of {world} ranks; all but the first load only {name}.",
            f"launch=(mpirun --allow-run-as-root{hosts})",
            f"for ((rank = 0; rank < {world}; rank++)); do",
            '  server "$rank"',
            '  [ "$rank" = 0 ] || launch+=(:)',
            f'  launch+=(-n 1 {wrapper}"${{command[@]}}")',
            "done",
            'exec "${launch[@]}"',
        ]
    return "\n".join([*lines, ""])


def _server_function(recipe: Recipe) -> str:
    serving = recipe.serving
    words = [f"--{what}-address={serving.host}" for what in ("http", "grpc", "metrics")]
    ports = (("http", serving.http_port), ("grpc", serving.grpc_port), ("metrics", serving.metrics_port))
    words += [f"--{what}-port={port}" for what, port in ports]
    return f"""\
server() {{
  command=("${{TRITONSERVER:-{_SERVER}}}" --model-repository="$MODEL_REPO"
    {shlex.join(words[:3])}
    {shlex.join(words[3:])}
    --disable-auto-complete-config "--backend-config=python,shm-region-prefix-name=trtspec_$1_")
  if [ "$1" != 0 ]; then
    command+=(--model-control-mode=explicit --load-model={serving.model_name})
  fi
}}
"""


# --------------------------------------------------------------------------- starting, asking


def docker_command(folder: str, script: str, mounted_at: str) -> str:
    """Run ``script`` (a path in the container) in NVIDIA's Triton image, ``folder`` seen at ``mounted_at``.

    ``TRITON_IMAGE`` stands for the image: which one has which TensorRT-LLM, NVIDIA's support matrix says.
    """
    mount = shlex.quote(f"{folder}:{mounted_at}:ro")
    options = "--rm --gpus all --ipc host --network host --ulimit memlock=-1 --ulimit stack=67108864"
    return f"docker run {options} -v {mount} TRITON_IMAGE bash {shlex.quote(script)}"


def curl_example(recipe: Recipe) -> str:
    """A first request, for the front model of the repository."""
    serving = recipe.serving
    host = "127.0.0.1" if serving.host == "0.0.0.0" else serving.host
    body: dict[str, Any] = {"text_input": "Hello"}
    model = front_model(recipe) if recipe.backend.kind == "tensorrt" else serving.model_name
    if recipe.backend.kind == "pytorch":
        body |= {"sampling_param_max_tokens": 16, "sampling_param_return_perf_metrics": True}
    else:
        body["max_tokens"] = 16
    if model == BLS and isinstance(recipe.speculation, DraftModelSpeculation):
        body |= {
            "num_draft_tokens": recipe.speculation.num_draft_tokens,
            "use_draft_logits": recipe.acceptance.kind == "rejection",
            # Left out, the model's own check of it fails.
            "stream": False,
        }
    host = f"[{host}]" if ":" in host else host
    url = f"http://{host}:{serving.http_port}/v2/models/{model}/generate"
    return f"curl -s -H 'Content-Type: application/json' {url} -d {shlex.quote(json.dumps(body))}"
