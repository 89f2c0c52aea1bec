#!/usr/bin/env bash
# Draft heads on a real model: train, check, build, compare, verify. Each command is printed before it runs.
# Heads and answers are kept in heads/: a second run goes on where this one stopped, and trains nothing twice.
#
#   KINDS="eagle3"    only these kinds (default: "eagle3 medusa")
#   PROMPTS=1408      prompts that are answered and learnt from, up to 2400
#   TRAIN="--epochs 2 --max-minutes 5"   more options of `trtspec draft train`
set -euo pipefail
cd "$(dirname "$0")/.."

model=sample:smollm2-135m-instruct
bold= plain=
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
# Large buffers that glibc gives back and takes again cost a training half its time in page faults.
export MALLOC_MMAP_THRESHOLD_=2147483648 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456

run() {
    printf '\n%s$ %s%s\n' "$bold" "$*" "$plain"
    "$@"
}

start=$(date +%s)
read -ra kinds <<<"${KINDS:-eagle3 medusa}"
read -ra more <<<"${TRAIN:-}"
status=0
for kind in "${kinds[@]}"; do
    heads=heads/smollm2-$kind
    name=smollm2-bf16-$kind
    if [ ! -e "$heads/trtspec_heads.json" ]; then
        run trtspec draft train --kind "$kind" --model "$model" -o "$heads" --work heads/work \
            --answers heads/answers --max-prompts "${PROMPTS:-1408}" ${more[@]+"${more[@]}"}
    fi
    run trtspec draft check "$heads" --model "$model"
    run trtspec build "recipes/$name.yaml"
    run trtspec bench drafters "engines/$name" --quick
    run trtspec verify "engines/$name" --quick -o "engines/$name.report.json" || status=$?
done
printf '\ndemo-heads: %d s; exit code %d (0 pass, 1 a gate failed, 4 inconclusive)\n' $(($(date +%s) - start)) "$status"
exit "$status"
