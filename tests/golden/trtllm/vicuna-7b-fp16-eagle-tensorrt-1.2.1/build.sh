#!/usr/bin/env bash
# vicuna-7b-fp16-eagle-tensorrt: backend tensorrt, TensorRT-LLM 1.2.1
# rendered and checked against the tables of TensorRT-LLM 1.2.1; not run here.
# Recipe digest 1cdf57fc420f475afa49a411729c63695a192c5a6eb8ca4896b1e1e6196fdb4a.
#
# Run it where TensorRT-LLM 1.2.1 is, such as the image tensorrt-llm/release:1.2.1 of NVIDIA's registry, on
# the GPU that will serve. Set the variables below first.
#
# Warnings:
# - speculation.choices: trtspec serve refuses it: null (EAGLE-2's dynamic tree): Triton's tensorrtllm backend
#   takes static trees only (its configuration has no key for others, and NVIDIA's tutorial says so); write
#   choices, or run the engine without Triton
# - Triton cannot serve it: speculation.choices: null (EAGLE-2's dynamic tree): Triton's tensorrtllm backend
#   takes static trees only (its configuration has no key for others, and NVIDIA's tutorial says so); write
#   choices, or run the engine without Triton
#
# What the recipe asks for, and what will be done:
# - backend.kind: 1.2.1 is the last version with engines; what replaces this recipe later: trtspec migrate
# - limits.kv_cache_bytes: null: the KV cache takes most of the memory that is free (0.9 of it by default);
#   give bytes where other programs share the GPU
# - acceptance.kind: eagle engines decode greedily: a request's temperature has no effect on what is drawn
# - limits.max_seq_tokens: found 2048; trtllm-build adds 36 for drafts, which makes 2084

set -euo pipefail

[ -d "${MODEL_DIR:-}" ] || {
  echo 'error: set MODEL_DIR to the 16-bit checkpoint: the folder of lmsys/vicuna-7b-v1.3' >&2
  exit 2
}
[[ "${MODEL_DIR}" = /* ]] || MODEL_DIR="${PWD}/${MODEL_DIR}"
[ -d "${HEADS_DIR:-}" ] || {
  echo 'error: set HEADS_DIR to the trained heads: the folder of yuhuili/EAGLE-Vicuna-7B-v1.3' >&2
  exit 2
}
[[ "${HEADS_DIR}" = /* ]] || HEADS_DIR="${PWD}/${HEADS_DIR}"
: "${WORK_DIR:=${PWD}/vicuna-7b-fp16-eagle-tensorrt}"
[[ "${WORK_DIR}" = /* ]] || WORK_DIR="${PWD}/${WORK_DIR}"
mkdir -p -- "${WORK_DIR}"
: "${EXAMPLES_DIR:=/app/tensorrt_llm/examples}"

found=$(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1) || {
  echo 'error: TensorRT-LLM is not installed here, or does not load (above)' >&2
  exit 3
}
case "${found}" in
  1.2.1 | 1.2.1.post* | 1.2.1+*) ;;
  *) echo "error: this script is for TensorRT-LLM 1.2.1, found ${found}; render it for that one" >&2; exit 3 ;;
esac

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

step 30f94f6583db "${WORK_DIR}/target" '1/2 eagle/convert_checkpoint.py: target and EAGLE head in one checkpoint' \
  python3 "${EXAMPLES_DIR}/eagle/convert_checkpoint.py" \
    --model_dir "${MODEL_DIR}" \
    --output_dir "${WORK_DIR}/target" \
    --dtype float16 \
    --eagle_model_dir "${HEADS_DIR}" \
    --max_draft_len 31 \
    --num_eagle_layers 5 \
    --max_non_leaves_per_layer 8 \
    --tp_size 1 \
    --pp_size 1 \
    --workers 1

step 6e27a27fef6b "${WORK_DIR}/engine" '2/2 trtllm-build: the engine' \
  trtllm-build \
    --checkpoint_dir "${WORK_DIR}/target" \
    --output_dir "${WORK_DIR}/engine" \
    --max_batch_size 16 \
    --max_input_len 1024 \
    --max_seq_len 2048 \
    --max_num_tokens 2048 \
    --max_beam_width 1 \
    --kv_cache_type paged \
    --remove_input_padding enable \
    --gpt_attention_plugin auto \
    --gemm_plugin auto \
    --context_fmha enable \
    --use_paged_context_fmha enable \
    --use_fp8_context_fmha disable \
    --multiple_profiles disable \
    --workers 1 \
    --speculative_decoding_mode eagle \
    --max_draft_len 31

python3 - "${WORK_DIR}/engine" <<'TRTSPEC_END'
import json, sys
built = json.load(open(f"{sys.argv[1]}/config.json"))["build_config"]
wrong = []
if built.get("max_draft_len", 0) < 31:
    wrong.append(f"max_draft_len is {built.get('max_draft_len')}, wanted 31")
if built.get("max_batch_size", 0) < 16:
    wrong.append(f"max_batch_size is {built.get('max_batch_size')}, wanted 16")
if built.get("plugin_config", {}).get("use_paged_context_fmha") is False:
    wrong.append("paged context attention was switched off")
print("engine:", "; ".join(wrong) or "built as asked")
sys.exit(1 if wrong else 0)
TRTSPEC_END

echo "made: ${WORK_DIR}/engine; Triton cannot serve it"
