#!/usr/bin/env bash
# vicuna-7b-fp8-medusa-tensorrt: backend tensorrt, TensorRT-LLM 1.0.0
# rendered and checked against the tables of TensorRT-LLM 1.0.0; not run here.
# Recipe digest 309d5e1d073681583106267ddf914e54d9053b019ef86035f9ff3e6cc6cdf7f8.
#
# Run it where TensorRT-LLM 1.0.0 is, such as the image tensorrt-llm/release:1.0.0 of NVIDIA's registry, on
# the GPU that will serve. Set the variables below first.
#
# What the recipe asks for, and what will be done:
# - quantization.calibration.data: builtin; quantize.py reads a data set of the hub, or a folder of JSONL with
#   text: the one that CALIB_DATASET names
# - limits.kv_cache_bytes: null: the KV cache takes most of the memory that is free (0.9 of it by default);
#   give bytes where other programs share the GPU
# - acceptance.kind: medusa engines decode greedily: a request's temperature has no effect on what is drawn
# - speculation.choices: null: the engine is built for 63 drafted tokens whatever the heads; with fewer than
#   four heads list the paths
# - limits.max_seq_tokens: found 2048; trtllm-build adds 63 for drafts, which makes 2111

set -euo pipefail

[ -d "${MODEL_DIR:-}" ] || {
  echo 'error: set MODEL_DIR to the 16-bit checkpoint: the folder of lmsys/vicuna-7b-v1.3' >&2
  exit 2
}
[[ "${MODEL_DIR}" = /* ]] || MODEL_DIR="${PWD}/${MODEL_DIR}"
[ -d "${HEADS_DIR:-}" ] || {
  echo 'error: set HEADS_DIR to the trained heads: the folder of FasterDecoding/medusa-vicuna-7b-v1.3' >&2
  exit 2
}
[[ "${HEADS_DIR}" = /* ]] || HEADS_DIR="${PWD}/${HEADS_DIR}"
: "${WORK_DIR:=${PWD}/vicuna-7b-fp8-medusa-tensorrt}"
[[ "${WORK_DIR}" = /* ]] || WORK_DIR="${PWD}/${WORK_DIR}"
mkdir -p -- "${WORK_DIR}"
: "${EXAMPLES_DIR:=/app/tensorrt_llm/examples}"
: "${CALIB_DATASET:=cnn_dailymail}"

found=$(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1) || {
  echo 'error: TensorRT-LLM is not installed here, or does not load (above)' >&2
  exit 3
}
case "${found}" in
  1.0.0 | 1.0.0.post* | 1.0.0+*) ;;
  *) echo "error: this script is for TensorRT-LLM 1.0.0, found ${found}; render it for that one" >&2; exit 3 ;;
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

step 1c5f39e2fad5 "${WORK_DIR}/target" '1/2 quantize.py: calibrate and export fp8, KV cache fp8, as a TensorRT-LLM checkpoint' \
  python3 "${EXAMPLES_DIR}/quantization/quantize.py" \
    --model_dir "${MODEL_DIR}" \
    --output_dir "${WORK_DIR}/target" \
    --dtype float16 \
    --qformat fp8 \
    --kv_cache_dtype fp8 \
    --calib_dataset "${CALIB_DATASET}" \
    --calib_size 64 \
    --calib_max_seq_length 512 \
    --seed 0 \
    --medusa_model_dir "${HEADS_DIR}" \
    --num_medusa_heads 4 \
    --max_draft_len 63 \
    --tp_size 1 \
    --pp_size 1

step c64aae45fd84 "${WORK_DIR}/engine" '2/2 trtllm-build: the engine' \
  trtllm-build \
    --checkpoint_dir "${WORK_DIR}/target" \
    --output_dir "${WORK_DIR}/engine" \
    --max_batch_size 8 \
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
    --use_fp8_context_fmha enable \
    --multiple_profiles disable \
    --workers 1 \
    --speculative_decoding_mode medusa \
    --max_draft_len 63

python3 - "${WORK_DIR}/engine" <<'TRTSPEC_END'
import json, sys
built = json.load(open(f"{sys.argv[1]}/config.json"))["build_config"]
wrong = []
if built.get("max_draft_len", 0) < 63:
    wrong.append(f"max_draft_len is {built.get('max_draft_len')}, wanted 63")
if built.get("max_batch_size", 0) < 8:
    wrong.append(f"max_batch_size is {built.get('max_batch_size')}, wanted 8")
if built.get("plugin_config", {}).get("use_paged_context_fmha") is False:
    wrong.append("paged context attention was switched off")
print("engine:", "; ".join(wrong) or "built as asked")
sys.exit(1 if wrong else 0)
TRTSPEC_END

echo "made: ${WORK_DIR}/engine; Triton cannot serve it"
