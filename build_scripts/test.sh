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
echo "== pytest"
python -m pytest -q -m "not smollm2 and not triton and not tensorrt_rtx" tests
echo "== pytest: TensorRT-RTX"
python -m pytest -q -m tensorrt_rtx tests
echo "== pytest: SmolLM2"
python -m pytest -q -m "smollm2 and not triton" tests
echo "== pytest: Triton"
python -m pytest -q -m triton tests
