#!/usr/bin/env bash
# vicuna-7b-fp8-medusa-tensorrt: Triton with TensorRT-LLM 1.2.1.
# Rendered and checked against the tables of TensorRT-LLM 1.2.1; not run where it was rendered.
# Run it in NVIDIA's tritonserver:YY.MM-trtllm-python-py3 image whose TensorRT-LLM is 1.2.1.
# Ask it: curl -s -H 'Content-Type: application/json' http://127.0.0.1:8000/v2/models/ensemble/generate -d '{"text_input": "Hello", "max_tokens": 16}'
set -euo pipefail
MODEL_REPO="${MODEL_REPO:-$(mktemp -d)}"
TEMPLATES="${TEMPLATES:-/app/all_models/inflight_batcher_llm}"

fail() { echo "$0: $*" >&2; exit 3; }

forced="$(compgen -e | grep -E '^(TLLM|TRTLLM)_.*(FORCE|SIMULATE)\w*ACC' || true)"
[ -z "$forced" ] || fail "$forced is set: drafts would be accepted unseen; unset it"

expected="${TENSORRT_LLM_VERSION:-1.2.1}"
found="$(python3 -c 'import importlib.metadata as m; print(m.version("tensorrt_llm").split("+")[0])' 2>/dev/null || true)"
if [ "$found" != "$expected" ]; then
  fail "this was rendered for TensorRT-LLM $expected, here is ${found:-none}; render it for that version, or set" \
    "TENSORRT_LLM_VERSION=${found:-...} to go on all the same"
fi

[ -d "$TEMPLATES" ] || fail "no $TEMPLATES; set TEMPLATES to NVIDIA's /app/all_models/inflight_batcher_llm folder"
cp -r "$(dirname "${BASH_SOURCE[0]}")/triton/." "$MODEL_REPO"
mkdir -p "$MODEL_REPO"/ensemble/1
mkdir -p "$MODEL_REPO"/tensorrt_llm/1
cp -r "$TEMPLATES"/preprocessing/1 "$MODEL_REPO"/preprocessing/
cp -r "$TEMPLATES"/postprocessing/1 "$MODEL_REPO"/postprocessing/
cp -r "$TEMPLATES"/tensorrt_llm_bls/1 "$MODEL_REPO"/tensorrt_llm_bls/

# Tensors that NVIDIA's files of this version declare and these here do not.
names() {
  grep -v '^ *#' "$1" | grep -oE '\bname: *"[^"]+"' | sed -E 's/.*"(.*)"/\1/' | sort -u
}
for pair in preprocessing:preprocessing postprocessing:postprocessing tensorrt_llm_bls:tensorrt_llm_bls ensemble:ensemble tensorrt_llm:tensorrt_llm; do
  theirs="$TEMPLATES/${pair%%:*}/config.pbtxt" ours="$MODEL_REPO/${pair##*:}/config.pbtxt"
  missing="$(comm -23 <(names "$theirs") <(names "$ours") | grep -vxF "${pair%%:*}" || true)"
  [ -z "$missing" ] || echo "$0: warning: $ours does not declare" $missing "; $theirs does" >&2
done

python3 - "${WORK_DIR}/engine/config.json" '{"max_batch_size": 8, "max_draft_len": 63, "max_seq_len": 2048, "speculative_decoding_mode": 4, "use_paged_context_fmha": true, "world_size": 1}' <<'CHECK' || fail "the engine does not fit"
from __future__ import annotations
import json, sys

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

sys.exit("; ".join(engine_problems(json.load(open(sys.argv[1])), json.loads(sys.argv[2]))) or 0)
CHECK

server() {
  command=("${TRITONSERVER:-/opt/tritonserver/bin/tritonserver}" --model-repository="$MODEL_REPO"
    --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1
    --http-port=8000 --grpc-port=8001 --metrics-port=8002
    --disable-auto-complete-config "--backend-config=python,shm-region-prefix-name=trtspec_$1_")
  if [ "$1" != 0 ]; then
    command+=(--model-control-mode=explicit --load-model=tensorrt_llm)
  fi
}

# Leader mode: a server for each of 1 ranks; all but the first load only tensorrt_llm.
launch=(mpirun --allow-run-as-root)
for ((rank = 0; rank < 1; rank++)); do
  server "$rank"
  [ "$rank" = 0 ] || launch+=(:)
  launch+=(-n 1 "${command[@]}")
done
exec "${launch[@]}"
