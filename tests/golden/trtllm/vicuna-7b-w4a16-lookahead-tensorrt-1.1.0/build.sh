#!/usr/bin/env bash
# vicuna-7b-w4a16-lookahead-tensorrt: backend tensorrt, TensorRT-LLM 1.1.0
# rendered and checked against the tables of TensorRT-LLM 1.1.0; not run here.
# Recipe digest a47b444fd9a08e002a4653ef48368a09f2b3a094ffdf9e229c6d0fc1d0463695.
#
# Run it where TensorRT-LLM 1.1.0 is, such as the image tensorrt-llm/release:1.1.0 of NVIDIA's registry, on
# the GPU that will serve. Set the variables below first.
#
# What the recipe asks for, and what will be done:
# - quantization.calibration.data: builtin; quantize.py reads a data set of the hub, or a folder of JSONL with
#   text: the one that CALIB_DATASET names
# - quantization.calibration.num_samples: 64; quantize.py takes 32 for AWQ
# - quantization.kind: w4a16_awq: trtllm-build drops use_fused_mlp, which is on by default
# - limits.kv_cache_bytes: null: the KV cache takes most of the memory that is free (0.9 of it by default);
#   give bytes where other programs share the GPU
# - limits.max_seq_tokens: found 2048; trtllm-build adds 15 for drafts, which makes 2063
# - gates.min_acceptance_length: null: a dead drafter, about 1.0 tokens a step, would pass; give at least 1.1

set -euo pipefail

[ -d "${MODEL_DIR:-}" ] || {
  echo 'error: set MODEL_DIR to the 16-bit checkpoint: the folder of lmsys/vicuna-7b-v1.3' >&2
  exit 2
}
[[ "${MODEL_DIR}" = /* ]] || MODEL_DIR="${PWD}/${MODEL_DIR}"
: "${WORK_DIR:=${PWD}/vicuna-7b-w4a16-lookahead-tensorrt}"
[[ "${WORK_DIR}" = /* ]] || WORK_DIR="${PWD}/${WORK_DIR}"
mkdir -p -- "${WORK_DIR}"
: "${EXAMPLES_DIR:=/app/tensorrt_llm/examples}"
: "${CALIB_DATASET:=cnn_dailymail}"

found=$(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1) || {
  echo 'error: TensorRT-LLM is not installed here, or does not load (above)' >&2
  exit 3
}
case "${found}" in
  1.1.0 | 1.1.0.post* | 1.1.0+*) ;;
  *) echo "error: this script is for TensorRT-LLM 1.1.0, found ${found}; render it for that one" >&2; exit 3 ;;
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

step 1914ba6d5ce9 "${WORK_DIR}/target" '1/2 quantize.py: calibrate and export w4a16_awq, KV cache none, as a TensorRT-LLM checkpoint' \
  python3 "${EXAMPLES_DIR}/quantization/quantize.py" \
    --model_dir "${MODEL_DIR}" \
    --output_dir "${WORK_DIR}/target" \
    --dtype float16 \
    --qformat int4_awq \
    --awq_block_size 128 \
    --calib_dataset "${CALIB_DATASET}" \
    --calib_size 64 \
    --calib_max_seq_length 512 \
    --seed 0 \
    --tp_size 1 \
    --pp_size 1

step e3c0804f8663 "${WORK_DIR}/engine" '2/2 trtllm-build: the engine' \
  trtllm-build \
    --checkpoint_dir "${WORK_DIR}/target" \
    --output_dir "${WORK_DIR}/engine" \
    --max_batch_size 4 \
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
    --speculative_decoding_mode lookahead_decoding \
    --max_draft_len 15

python3 - "${WORK_DIR}/engine" <<'TRTSPEC_END'
import json, sys
built = json.load(open(f"{sys.argv[1]}/config.json"))["build_config"]
wrong = []
if built.get("max_draft_len", 0) < 15:
    wrong.append(f"max_draft_len is {built.get('max_draft_len')}, wanted 15")
if built.get("max_batch_size", 0) < 4:
    wrong.append(f"max_batch_size is {built.get('max_batch_size')}, wanted 4")
if built.get("plugin_config", {}).get("use_paged_context_fmha") is False:
    wrong.append("paged context attention was switched off")
print("engine:", "; ".join(wrong) or "built as asked")
sys.exit(1 if wrong else 0)
TRTSPEC_END

echo "made: ${WORK_DIR}/engine; Triton cannot serve it"
