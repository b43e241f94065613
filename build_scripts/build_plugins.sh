#!/usr/bin/env bash
# Compile the CUDA kernels and the TensorRT 11 plugin library into build/plugins: bash build_scripts/build_plugins.sh [FLAGS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -x .venv/bin/trtllm-dspark ]; then
    command=.venv/bin/trtllm-dspark
elif command -v trtllm-dspark >/dev/null; then
    command=trtllm-dspark
else
    echo "build_plugins.sh: trtllm-dspark is not installed; run: python3 -m venv .venv && .venv/bin/pip install -e '.[kernels]'" >&2
    exit 2
fi
exec "$command" build_plugins --source_dir "$PWD" --output_dir build/plugins "$@"
