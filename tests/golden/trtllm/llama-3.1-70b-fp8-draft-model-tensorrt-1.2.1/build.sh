#!/usr/bin/env bash
# llama-3.1-70b-fp8-draft-model-tensorrt: backend tensorrt, TensorRT-LLM 1.2.1
# rendered and checked against the tables of TensorRT-LLM 1.2.1; not run here.
# Recipe digest 4a9d95258563cce9f214efe183314a2bf72a3668708f7dfb42296fe058aeb084.
#
# Run it where TensorRT-LLM 1.2.1 is, such as the image tensorrt-llm/release:1.2.1 of NVIDIA's registry, on
# the GPU that will serve. Set the variables below first.
#
# Warnings:
# - speculation.kind: Triton drafts through its BLS model: one sequence a request and no streaming; for
#   streaming choose backend kind: pytorch, or eagle
#
# What the recipe asks for, and what will be done:
# - quantization.calibration.data: builtin; quantize.py reads a data set of the hub, or a folder of JSONL with
#   text: the one that CALIB_DATASET names
# - limits.max_input_tokens: 4096; the engine admits 6143, because every step sends what was said so far as a
#   prompt
# - speculation.quantization.calibration.data: builtin; quantize.py reads a data set of the hub, or a folder
#   of JSONL with text: the one that CALIB_DATASET names
# - backend.kind: 1.2.1 is the last version with engines; what replaces this recipe later: trtspec migrate
# - limits.kv_cache_bytes: null: the KV cache takes most of the memory that is free (0.9 of it by default);
#   give bytes where other programs share the GPU
# - speculation.kind: the draft model's weights and KV cache come on top of the target's; each takes its part
#   of the memory that is free when it loads
# - limits.max_seq_tokens: found 6144; trtllm-build adds 4 for drafts, which makes 6148

set -euo pipefail

[ -d "${MODEL_DIR:-}" ] || {
  echo 'error: set MODEL_DIR to the 16-bit checkpoint: the folder of meta-llama/Llama-3.1-70B-Instruct' >&2
  exit 2
}
[[ "${MODEL_DIR}" = /* ]] || MODEL_DIR="${PWD}/${MODEL_DIR}"
[ -d "${DRAFT_DIR:-}" ] || {
  echo 'error: set DRAFT_DIR to the draft model'"'"'s checkpoint: the folder of meta-llama/Llama-3.2-1B-Instruct' >&2
  exit 2
}
[[ "${DRAFT_DIR}" = /* ]] || DRAFT_DIR="${PWD}/${DRAFT_DIR}"
: "${WORK_DIR:=${PWD}/llama-3.1-70b-fp8-draft-model-tensorrt}"
[[ "${WORK_DIR}" = /* ]] || WORK_DIR="${PWD}/${WORK_DIR}"
mkdir -p -- "${WORK_DIR}"
: "${EXAMPLES_DIR:=/app/tensorrt_llm/examples}"
: "${CALIB_DATASET:=cnn_dailymail}"

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

step 8da80d5a923d "${WORK_DIR}/target" '1/4 quantize.py: calibrate and export fp8, KV cache fp8, as a TensorRT-LLM checkpoint' \
  python3 "${EXAMPLES_DIR}/quantization/quantize.py" \
    --model_dir "${MODEL_DIR}" \
    --output_dir "${WORK_DIR}/target" \
    --dtype bfloat16 \
    --qformat fp8 \
    --kv_cache_dtype fp8 \
    --calib_dataset "${CALIB_DATASET}" \
    --calib_size 64 \
    --calib_max_seq_length 512 \
    --seed 0 \
    --tp_size 4 \
    --pp_size 1

step 94489429505f "${WORK_DIR}/engine" '2/4 trtllm-build: the engine' \
  trtllm-build \
    --checkpoint_dir "${WORK_DIR}/target" \
    --output_dir "${WORK_DIR}/engine" \
    --max_batch_size 8 \
    --max_input_len 6143 \
    --max_seq_len 6144 \
    --max_num_tokens 4096 \
    --max_beam_width 1 \
    --kv_cache_type paged \
    --remove_input_padding enable \
    --gpt_attention_plugin auto \
    --gemm_plugin auto \
    --context_fmha enable \
    --use_paged_context_fmha enable \
    --use_fp8_context_fmha enable \
    --multiple_profiles disable \
    --workers 4 \
    --speculative_decoding_mode draft_tokens_external \
    --max_draft_len 4

step 59a882803978 "${WORK_DIR}/draft" '3/4 quantize.py: calibrate and export fp8, KV cache fp8, as a TensorRT-LLM checkpoint' \
  python3 "${EXAMPLES_DIR}/quantization/quantize.py" \
    --model_dir "${DRAFT_DIR}" \
    --output_dir "${WORK_DIR}/draft" \
    --dtype bfloat16 \
    --qformat fp8 \
    --kv_cache_dtype fp8 \
    --calib_dataset "${CALIB_DATASET}" \
    --calib_size 64 \
    --calib_max_seq_length 512 \
    --seed 0 \
    --tp_size 4 \
    --pp_size 1

step 7ba598c32b05 "${WORK_DIR}/draft_engine" '4/4 trtllm-build: the engine of the draft model' \
  trtllm-build \
    --checkpoint_dir "${WORK_DIR}/draft" \
    --output_dir "${WORK_DIR}/draft_engine" \
    --max_batch_size 8 \
    --max_input_len 6143 \
    --max_seq_len 6144 \
    --max_num_tokens 4096 \
    --max_beam_width 1 \
    --kv_cache_type paged \
    --remove_input_padding enable \
    --gpt_attention_plugin auto \
    --gemm_plugin auto \
    --context_fmha enable \
    --use_paged_context_fmha enable \
    --use_fp8_context_fmha enable \
    --multiple_profiles disable \
    --workers 4

python3 - "${WORK_DIR}/engine" <<'TRTSPEC_END'
import json, sys
built = json.load(open(f"{sys.argv[1]}/config.json"))["build_config"]
wrong = []
if built.get("max_draft_len", 0) < 4:
    wrong.append(f"max_draft_len is {built.get('max_draft_len')}, wanted 4")
if built.get("max_batch_size", 0) < 8:
    wrong.append(f"max_batch_size is {built.get('max_batch_size')}, wanted 8")
if built.get("plugin_config", {}).get("use_paged_context_fmha") is False:
    wrong.append("paged context attention was switched off")
print("engine:", "; ".join(wrong) or "built as asked")
sys.exit(1 if wrong else 0)
TRTSPEC_END

echo "made: ${WORK_DIR}/engine; Triton cannot serve it"
