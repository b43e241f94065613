"""Build an engine of the tests' closed-form pair, whose every token is known, to load a server with.

Usage: build_toy_engine.py --output_dir D [--mistake_every 5] [--max_batch_size 8] [--max_seq_len 512]
       [--weight_dtype float32|int8|w8a8] [--num_layers 3] [--num_heads 4]
       [--block_size 7]

`--mistake_every 0`: the drafter is never wrong, so that every round emits a whole block. Fewer layers and heads
and longer blocks leave less to the networks and more to what serves them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from trtllm_dspark.build import BuildConfig, build_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.toy_pair import write_toy_pair


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--mistake_every", type=int, default=5)
    parser.add_argument("--max_batch_size", type=int, default=8)
    parser.add_argument("--max_seq_len", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--block_size", type=int, default=7)
    parser.add_argument("--weight_dtype", default="float32", choices=("float32", "int8", "w8a8"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pair = write_toy_pair(
            Path(directory),
            mistake_every=args.mistake_every or None,
            num_layers=args.num_layers,
            num_heads=args.num_heads,
            block_size=args.block_size,
        )
        build_engine(
            BuildConfig(
                target_checkpoint=str(pair.target_dir),
                draft_checkpoint=str(pair.drafter_dir),
                output_dir=args.output_dir,
                max_batch_size=args.max_batch_size,
                max_seq_len=args.max_seq_len,
                weight_dtype=args.weight_dtype,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
