"""Train drafters of several kinds for the same time on the same sequences and compare what they are worth.

    python benchmarks/train_arms.py --target_checkpoint P --responses_file R --validation_file W --minutes 10 \
        --output_dir D [--arms dspark,dflash,gated,rnn,one_layer]

Every arm starts from the target, sees the same seed and the same captured features (captured before the clock starts),
trains `--minutes` of wall time on otherwise idle cores, and ends with its rate at 0. Accepted lengths are greedy walks
along `--validation_file`. Prompt lookup needs no training: measure it with `trtllm-dspark eval --drafter ngram`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import read_responses

ARMS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"markov_head": "none"},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn", "sample_positions": False},
    "one_layer": {"num_layers": 1},
}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare kinds of drafters after equal training time.")
    parser.add_argument("--target_checkpoint", required=True)
    parser.add_argument("--responses_file", type=Path, required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--draft_vocab_size", type=int)
    parser.add_argument("--draft_vocab_counts", type=Path)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", default=",".join(ARMS))
    args = parser.parse_args()
    base = TrainConfig(
        args.target_checkpoint,
        args.output_dir,
        minutes=args.minutes,
        draft_vocab_size=args.draft_vocab_size,
        draft_vocab_counts=args.draft_vocab_counts,
        num_threads=args.num_threads,
        seed=args.seed,
    )
    for name in args.arms.split(","):
        result = train_arm(replace(base, **ARMS[name]), args.responses_file, args.validation_file)
        print(json.dumps({"arm": name, "minutes": args.minutes, **result}), flush=True)
    return 0


def train_arm(config: TrainConfig, responses_file: Path, validation_file: Path) -> dict[str, Any]:
    """Train one arm and return its steps, blocks and accepted length by domain."""
    preparation = Preparation(config)
    vocab = preparation.target.config.vocab_size
    responses, validation = read_responses(responses_file, vocab), read_responses(validation_file, vocab)
    run = Run(preparation, responses)
    try:
        run.trainer.capture(responses)
        run.restart_clock()
        blocks = 0

        def told(report: Any, num_steps: int | None) -> None:
            nonlocal blocks
            blocks += report.num_blocks
            print(f"step {report.step} of {num_steps}: loss {report.loss:.3f} tau {report.tau:.2f}", file=sys.stderr)

        run.train(stop=lambda: False, told=told)
        walks = run.validate(validation)
    finally:
        run.close()
    lengths = {domain: round(emitted / max(rounds, 1), 3) for domain, (emitted, rounds) in walks.items()}
    return {"steps": run.trainer.steps_done, "blocks": blocks, "accepted_len": lengths}


if __name__ == "__main__":
    sys.exit(main())
