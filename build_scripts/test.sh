#!/usr/bin/env bash
# Set up a virtual environment and pass every test that needs no GPU: bash build_scripts/test.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source build_scripts/_env.sh

setup_venv triton,kernels,tensorrt-rtx,train,test "${1:-}"
# tritonserver and cmake are looked up on PATH.
export PATH="$PWD/.venv/bin:$PATH"

echo "== ruff"
ruff check .
ruff format --check .
echo "== mypy"
mypy
echo "== C++ tests under sanitizers"
cmake --preset cpu-asan >/dev/null
cmake --build --preset cpu-asan -j 2
ctest --preset cpu-asan
# Two workers for two cores; tests/helpers/work_units.py says what stays together. A worker that dies is a failed test.
stage() {
    echo "== pytest: $1"
    python -m pytest -q -n 2 -rs --durations=5 -m "$2" tests
}
stage "without servers, builders and models" "not smollm2 and not triton and not tensorrt_rtx"
stage "TensorRT-RTX" "tensorrt_rtx"
stage "SmolLM2" "smollm2 and not triton"
stage "Triton" "triton"
