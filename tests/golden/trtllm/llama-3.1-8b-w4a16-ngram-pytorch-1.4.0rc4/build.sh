#!/usr/bin/env bash
# llama-3.1-8b-w4a16-ngram-pytorch: backend pytorch, TensorRT-LLM 1.4.0rc4
# rendered and checked against the tables of TensorRT-LLM 1.4.0rc4; not run here.
# Recipe digest 904e127e8afa87054281e25e4ce085c5587fefecba554148e4bd45ea006eee53.
#
# Run it where TensorRT-LLM 1.4.0rc4 is, such as the image tensorrt-llm/release:1.4.0rc4 of NVIDIA's registry,
# on the GPU that will serve. Set the variables below first.
#
# What the recipe asks for, and what will be done:
# - limits.kv_cache_bytes: null: the KV cache takes most of the memory that is free (0.9 of it by default);
#   give bytes where other programs share the GPU
# - speculation.min_ngram: found 2; TensorRT-LLM has max_ngram only and takes matches of one token too
# - gates.min_acceptance_length: null: a dead drafter, about 1.0 tokens a step, would pass; give at least 1.1

set -euo pipefail

[ -d "${MODEL_DIR:-}" ] || {
  echo 'error: set MODEL_DIR to the 16-bit checkpoint: the folder of meta-llama/Llama-3.1-8B-Instruct' >&2
  exit 2
}
[[ "${MODEL_DIR}" = /* ]] || MODEL_DIR="${PWD}/${MODEL_DIR}"
: "${WORK_DIR:=${PWD}/llama-3.1-8b-w4a16-ngram-pytorch}"
[[ "${WORK_DIR}" = /* ]] || WORK_DIR="${PWD}/${WORK_DIR}"
mkdir -p -- "${WORK_DIR}"

found=$(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1) || {
  echo 'error: TensorRT-LLM is not installed here, or does not load (above)' >&2
  exit 3
}
case "${found}" in
  1.4.0rc4 | 1.4.0rc4.post* | 1.4.0rc4+*) ;;
  *) echo "error: this script is for TensorRT-LLM 1.4.0rc4, found ${found}; render it for that one" >&2; exit 3 ;;
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

step d8c571f0b4e4 "${WORK_DIR}/target" '1/1 trtspec quantize: the target in w4a16_awq, KV cache none, as a Hugging Face folder' \
  trtspec quantize \
    --model "${MODEL_DIR}" \
    --format w4a16_awq \
    --kv-cache none \
    --group-size 128 \
    --num-samples 64 \
    --max-tokens 512 \
    --seed 0 \
    -o "${WORK_DIR}/target"

cat > "${WORK_DIR}/llm_api.yaml" <<TRTSPEC_END
# llama-3.1-8b-w4a16-ngram-pytorch: rendered and checked against the tables of TensorRT-LLM 1.4.0rc4; not run here
dtype: auto
tensor_parallel_size: 1
pipeline_parallel_size: 1
max_batch_size: 16
max_input_len: 16384
max_seq_len: 18432
max_num_tokens: 8192
max_beam_width: 1
enable_chunked_prefill: true
attn_backend: TRTLLM
disable_overlap_scheduler: true
cuda_graph_config:
  enable_padding: true
  max_batch_size: 16
kv_cache_config:
  enable_block_reuse: true
  dtype: auto
scheduler_config:
  capacity_scheduler_policy: GUARANTEED_NO_EVICT
enable_iter_perf_stats: true
return_perf_metrics: true
speculative_config:
  decoding_type: NGram
  max_draft_len: 6
  max_matching_ngram_size: 4
  is_keep_all: true
  is_use_oldest: false
  is_public_pool: false
TRTSPEC_END

echo "serve it with: trtllm-serve serve ${WORK_DIR}/target --backend pytorch --host 127.0.0.1 --port 8000 --config ${WORK_DIR}/llm_api.yaml"
