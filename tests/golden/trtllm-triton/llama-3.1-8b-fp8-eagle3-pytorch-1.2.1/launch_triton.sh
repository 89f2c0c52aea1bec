#!/usr/bin/env bash
# llama-3.1-8b-fp8-eagle3-pytorch: Triton with TensorRT-LLM 1.2.1.
# Rendered and checked against the tables of TensorRT-LLM 1.2.1; not run where it was rendered.
# Run it in NVIDIA's tritonserver:YY.MM-trtllm-python-py3 image whose TensorRT-LLM is 1.2.1.
# Ask it: curl -s -H 'Content-Type: application/json' http://127.0.0.1:8000/v2/models/tensorrt_llm/generate -d '{"text_input": "Hello", "sampling_param_max_tokens": 16, "sampling_param_return_perf_metrics": true}'
set -euo pipefail
MODEL_REPO="${MODEL_REPO:-$(mktemp -d)}"
TEMPLATES="${TEMPLATES:-/app/all_models/llmapi}"

fail() { echo "$0: $*" >&2; exit 3; }

forced="$(compgen -e | grep -E '^(TLLM|TRTLLM)_.*(FORCE|SIMULATE)\w*ACC' || true)"
[ -z "$forced" ] || fail "$forced is set: drafts would be accepted unseen; unset it"

expected="${TENSORRT_LLM_VERSION:-1.2.1}"
found="$(python3 -c 'import importlib.metadata as m; print(m.version("tensorrt_llm").split("+")[0])' 2>/dev/null || true)"
if [ "$found" != "$expected" ]; then
  fail "this was rendered for TensorRT-LLM $expected, here is ${found:-none}; render it for that version, or set" \
    "TENSORRT_LLM_VERSION=${found:-...} to go on all the same"
fi

[ -d "$TEMPLATES" ] || fail "no $TEMPLATES; set TEMPLATES to NVIDIA's /app/all_models/llmapi folder"
cp -r "$(dirname "${BASH_SOURCE[0]}")/triton/." "$MODEL_REPO"
mkdir -p "$MODEL_REPO"/tensorrt_llm/1
cp "$TEMPLATES"/tensorrt_llm/1/*.py "$MODEL_REPO"/tensorrt_llm/1/

# Tensors that NVIDIA's files of this version declare and these here do not.
names() {
  grep -v '^ *#' "$1" | grep -oE '\bname: *"[^"]+"' | sed -E 's/.*"(.*)"/\1/' | sort -u
}
for pair in tensorrt_llm:tensorrt_llm; do
  theirs="$TEMPLATES/${pair%%:*}/config.pbtxt" ours="$MODEL_REPO/${pair##*:}/config.pbtxt"
  missing="$(comm -23 <(names "$theirs") <(names "$ours") | grep -vxF "${pair%%:*}" || true)"
  [ -z "$missing" ] || echo "$0: warning: $ours does not declare" $missing "; $theirs does" >&2
done

server() {
  command=("${TRITONSERVER:-/opt/tritonserver/bin/tritonserver}" --model-repository="$MODEL_REPO"
    --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1
    --http-port=8000 --grpc-port=8001 --metrics-port=8002
    --disable-auto-complete-config "--backend-config=python,shm-region-prefix-name=trtspec_$1_")
  if [ "$1" != 0 ]; then
    command+=(--model-control-mode=explicit --load-model=tensorrt_llm)
  fi
}

server 0
exec "${command[@]}"
