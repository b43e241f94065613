#!/usr/bin/env python3
"""Pack a DeepSpec drafter to int8, one scale a row: how the demo's drafter is stored.

    python build_scripts/demo/pack_drafter.py SOURCE_DIR OUTPUT_DIR

Matrices become int8 with float32 scales `{name}_scale`; vectors and the one-row confidence head stay float32. The
output's `config.json` is the source's plus `"quantization": {"method": "int8_per_row"}` (docs/checkpoints.md).
Prints the relative error of every matrix.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from trtllm_dspark.checkpoint.arrays import Array
from trtllm_dspark.checkpoint.int8_rows import METHOD, SCALE_SUFFIX, quantise_rows
from trtllm_dspark.checkpoint.safetensors_io import read_directory, read_json, write_file
from trtllm_dspark.errors import CheckpointError, DsparkError


def pack(source: Path, output: Path) -> None:
    """Write the int8 form of the drafter in `source` into `output`.

    Raises:
        CheckpointError: the source cannot be read or is packed already.
    """
    config = read_json(source / "config.json")
    if "quantization" in config:
        raise CheckpointError(f"{source} is packed already; pass the floating-point drafter")
    stored, _ = read_directory(source)
    packed: dict[str, Array] = {}
    print(f"{'tensor':<44} {'shape':<14} {'max |error|':>12} {'rms error / rms':>16}")
    for name, tensor in stored.items():
        weight = tensor.lazy().load()
        if weight.ndim != 2 or weight.shape[0] == 1:
            packed[name] = weight
            continue
        values, scales = quantise_rows(weight)
        packed[name], packed[name + SCALE_SUFFIX] = values, scales
        error = values.astype(np.float32) * scales[:, None] - weight
        relative = np.sqrt(np.square(error).mean() / np.square(weight).mean())
        shape = "x".join(map(str, weight.shape))
        print(f"{name:<44} {shape:<14} {np.abs(error).max():>12.2e} {relative:>16.4%}")
    output.mkdir(parents=True, exist_ok=True)
    write_file(output / "model.safetensors", packed)
    text = json.dumps({**config, "quantization": {"method": METHOD}}, indent=2)
    (output / "config.json").write_text(text + "\n", "utf-8")
    print(f"{output / 'model.safetensors'}: {(output / 'model.safetensors').stat().st_size:,} bytes")


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Pack a DeepSpec drafter to int8, one scale a row.")
    parser.add_argument("source", type=Path, help="directory of the floating-point drafter")
    parser.add_argument("output", type=Path, help="directory to write")
    arguments = parser.parse_args()
    try:
        pack(arguments.source, arguments.output)
    except DsparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
