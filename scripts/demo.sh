#!/usr/bin/env bash
# The main job on a real model, with the commands a user would type: build, serve, ask, verify.
# Each command is printed before it runs. `make demo` sets up what is missing and calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

name=smollm2-w4a16-kv8-ngram
engine=engines/$name
work=$(mktemp -d)
server=
bold= plain=
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi

show() {  # the command as it can be pasted into a shell
    local words=$1 word
    shift
    for word in "$@"; do
        case $word in
            *[!A-Za-z0-9_./:=@-]*) word=\'${word//\'/\'\\\'\'}\' ;;
        esac
        words+=" $word"
    done
    printf '\n%s$ %s%s\n' "$bold" "$words" "$plain"
}
run() { show "$@"; "$@"; }
# shellcheck disable=SC2329
stop() {
    if [ -n "$server" ]; then kill -TERM "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

free_ports() {  # the recipe's own ports if nobody has them, else three free ones
    python - "$@" <<'PY'
import socket, sys
def free(port):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return None
        return s.getsockname()[1]
wanted = [int(port) for port in sys.argv[1:]]
if not all(free(port) for port in wanted):
    held = [socket.socket() for _ in wanted]
    for s in held:
        s.bind(("127.0.0.1", 0))
    wanted = [s.getsockname()[1] for s in held]
print(*wanted)
PY
}

start=$(date +%s)
run trtspec build "recipes/$name.yaml"
run trtspec inspect "$engine"

read -r http grpc metrics < <(free_ports 8000 8001 8002)
ports=()
if [ "$http" != 8000 ]; then ports=(--http-port "$http" --grpc-port "$grpc" --metrics-port "$metrics"); fi
show trtspec serve "$engine" "${ports[@]}"
trtspec serve "$engine" "${ports[@]}" --log "$work/server.log" --ready-file "$work/ready" &
server=$!
while [ ! -e "$work/ready" ]; do
    kill -0 "$server" 2>/dev/null || { echo "the server did not start; its log:"; cat "$work/server.log"; exit 3; }
    sleep 0.2
done

run trtspec generate --engine "$engine" --url "127.0.0.1:$grpc" --stats --max-tokens 80 \
    "Write a Python function that returns the n-th Fibonacci number."
request='{"text_input": "The capital of France is", "sampling_param_max_tokens": 8, "sampling_param_exclude_input_from_output": true}'
url=http://127.0.0.1:$http/v2/models/tensorrt_llm/generate
if command -v curl >/dev/null; then
    run curl -s -H 'Content-Type: application/json' -d "$request" "$url"
    echo
fi
kill -TERM "$server"; wait "$server" || true; server=

# HEADS names a folder of heads that were trained for this model (`make demo-heads` leaves some in heads/): they
# are then compared too.
heads=()
if [ -z "${HEADS:-}" ] && [ -e heads/smollm2-eagle3/trtspec_heads.json ]; then HEADS=heads/smollm2-eagle3; fi
if [ -n "${HEADS:-}" ]; then heads=(--heads "$HEADS"); fi
run trtspec bench drafters "$engine" --quick "${heads[@]}"

status=0
run trtspec verify "$engine" --quick -o "$engine.report.json" || status=$?
printf '\ndemo: %d s, verify ended with exit code %d (0 pass, 1 a gate failed, 4 inconclusive)\n' \
    $(($(date +%s) - start)) "$status"
exit "$status"
