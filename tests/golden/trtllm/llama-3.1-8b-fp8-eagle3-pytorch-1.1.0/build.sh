#!/usr/bin/env bash
# llama-3.1-8b-fp8-eagle3-pytorch: backend pytorch, TensorRT-LLM 1.1.0
# rendered and checked against the tables of TensorRT-LLM 1.1.0; not run here.
# Recipe digest 7fcb2501b3e4f25261097a06165b83cfc7d5297adfa80f0ba6b1de0f5e8c28dd.
#
# Run it where TensorRT-LLM 1.1.0 is, such as the image tensorrt-llm/release:1.1.0 of NVIDIA's registry, on
# the GPU that will serve. Set the variables below first.
#
# What the recipe asks for, and what will be done:
# - limits.kv_cache_bytes: null: the KV cache takes most of the memory that is free (0.9 of it by default);
#   give bytes where other programs share the GPU

set -euo pipefail

[ -d "${MODEL_DIR:-}" ] || {
  echo 'error: set MODEL_DIR to the 16-bit checkpoint: the folder of meta-llama/Llama-3.1-8B-Instruct' >&2
  exit 2
}
[[ "${MODEL_DIR}" = /* ]] || MODEL_DIR="${PWD}/${MODEL_DIR}"
[ -d "${HEADS_DIR:-}" ] || {
  echo 'error: set HEADS_DIR to the trained heads: the folder of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B' >&2
  exit 2
}
[[ "${HEADS_DIR}" = /* ]] || HEADS_DIR="${PWD}/${HEADS_DIR}"
[[ "${HEADS_DIR}" != *[\"\\[:cntrl:]]* ]] || {
  echo 'error: HEADS_DIR: a quote, a backslash or a control character in the path; rename the folder' >&2
  exit 2
}
: "${WORK_DIR:=${PWD}/llama-3.1-8b-fp8-eagle3-pytorch}"
[[ "${WORK_DIR}" = /* ]] || WORK_DIR="${PWD}/${WORK_DIR}"
mkdir -p -- "${WORK_DIR}"

found=$(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1) || {
  echo 'error: TensorRT-LLM is not installed here, or does not load (above)' >&2
  exit 3
}
case "${found}" in
  1.1.0 | 1.1.0.post* | 1.1.0+*) ;;
  *) echo "error: this script is for TensorRT-LLM 1.1.0, found ${found}; render it for that one" >&2; exit 3 ;;
esac

command -v trtspec > /dev/null || {
  echo 'error: trtspec is not installed here; install it (its quantize command makes the checkpoint)' >&2
  exit 3
}

step() {  # step KEY OUTPUT WHAT COMMAND...: once; what a run of this script left of OUTPUT is removed first
  local key=$1 output=$2 what=$3
  local mark="${WORK_DIR}/.made-${output##*/}"
  shift 3
  if [ -e "${WORK_DIR}/.done-${key}" ]; then
    echo "done before: ${what}"
    return
  fi
  if [ -e "${output}" ] && [ ! -e "${mark}" ]; then
    echo "error: ${output} is there and not made by this script; move it away, or set another WORK_DIR" >&2
    exit 2
  fi
  echo "== ${what}"
  touch -- "${mark}"
  rm -rf -- "${output}"
  "$@"
  touch -- "${WORK_DIR}/.done-${key}"
}

step 36ca6e364e92 "${WORK_DIR}/target" '1/1 trtspec quantize: the target in fp8, KV cache fp8, as a Hugging Face folder' \
  trtspec quantize \
    --model "${MODEL_DIR}" \
    --format fp8 \
    --kv-cache fp8 \
    --num-samples 64 \
    --max-tokens 512 \
    --seed 0 \
    -o "${WORK_DIR}/target"

cat > "${WORK_DIR}/llm_api.yaml" <<TRTSPEC_END
# llama-3.1-8b-fp8-eagle3-pytorch: rendered and checked against the tables of TensorRT-LLM 1.1.0; not run here
dtype: auto
tensor_parallel_size: 1
pipeline_parallel_size: 1
max_batch_size: 32
max_input_len: 8192
max_seq_len: 10240
max_num_tokens: 8192
max_beam_width: 1
enable_chunked_prefill: true
attn_backend: TRTLLM
disable_overlap_scheduler: false
cuda_graph_config:
  enable_padding: true
  max_batch_size: 32
kv_cache_config:
  enable_block_reuse: true
  dtype: fp8
scheduler_config:
  capacity_scheduler_policy: GUARANTEED_NO_EVICT
enable_iter_perf_stats: true
speculative_config:
  decoding_type: Eagle
  max_draft_len: 4
  speculative_model_dir: "${HEADS_DIR}"
  eagle3_one_model: true
TRTSPEC_END

echo "serve it with: trtllm-serve serve ${WORK_DIR}/target --backend pytorch --host 127.0.0.1 --port 8000 --extra_llm_api_options ${WORK_DIR}/llm_api.yaml"
