"""Train drafters of several kinds for the same time on the same sequences and compare what they are worth.

    python benchmarks/train_arms.py --target_checkpoint P --responses_file R --validation_file W --minutes 10 \
        --output_dir D [--arms dspark,gated,rnn,dflash,one_layer,eagle3,mtp,ngram]

Every arm starts from the target, sees the same seed and the same sequences (captured before its clock starts), trains
`--minutes` of wall time on otherwise idle cores, and ends with its rate at 0. Accepted lengths are greedy walks along
`--validation_file`, greedy answers of the target that nobody trains on; prompt lookup walks there without training.
Drafters are left in `OUTPUT_DIR/drafters/ARM`, a line of JSON an arm on stdout, the table behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint import load_target
from trtllm_dspark.runtime.proposers._lookup import PromptLookup
from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response, read_responses

ARMS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "dflash": {"markov_head": "none"},
    "one_layer": {"num_layers": 1},
    "eagle3": {"kind": "eagle3"},
    "mtp": {"kind": "mtp"},
}
LOOKUP = "ngram"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare kinds of drafters after equal training time.")
    parser.add_argument("--target_checkpoint", required=True)
    parser.add_argument("--responses_file", type=Path, required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--block_size", type=int, default=7)
    parser.add_argument("--draft_vocab_size", type=int)
    parser.add_argument("--draft_vocab_counts", type=Path)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", default=",".join((*ARMS, LOOKUP)))
    args = parser.parse_args()
    names = args.arms.split(",")
    unknown = [name for name in names if name not in (*ARMS, LOOKUP)]
    if unknown:
        parser.error(f"--arms names {unknown[0]}; known are {', '.join((*ARMS, LOOKUP))}")
    vocab = load_target(args.target_checkpoint).config.vocab_size
    responses, validation = read_responses(args.responses_file, vocab), read_responses(args.validation_file, vocab)
    base = TrainConfig(
        args.target_checkpoint,
        args.output_dir,
        minutes=args.minutes,
        block_size=args.block_size,
        draft_vocab_size=args.draft_vocab_size,
        draft_vocab_counts=args.draft_vocab_counts,
        num_threads=args.num_threads,
        seed=args.seed,
    )
    results = []
    for name in names:
        if name == LOOKUP:
            result = {"accepted_len": _lengths(look_up(validation, args.block_size))}
        else:
            result = train_arm(replace(base, **ARMS[name]), name, responses, validation)
        results.append({"arm": name, **result})
        print(json.dumps(results[-1]), flush=True)
    print_table(results)
    return 0


def train_arm(
    config: TrainConfig, name: str, responses: Sequence[Response], validation: Sequence[Response]
) -> dict[str, Any]:
    """Train one arm and return its size, steps, blocks and accepted length by domain."""
    run = Run(Preparation(config), responses)
    try:
        run.trainer.capture(responses)
        run.restart_clock()
        blocks, seconds = 0, 0.0

        def told(report: Any, num_steps: int | None) -> None:
            nonlocal blocks, seconds
            blocks, seconds = blocks + report.num_blocks, seconds + report.seconds
            print(
                f"{name}: step {report.step} of {num_steps}: loss {report.loss:.3f} tau {report.tau:.2f}",
                file=sys.stderr,
            )

        run.train(stop=lambda: False, told=told)
        walks = run.validate(validation)
        run.export(config.output_dir / "drafters" / name)
    finally:
        run.close()
    return {
        "parameters": sum(value.numel() for value in run.trainer.parameters.values()),
        "minutes": round(seconds / 60, 2),
        "steps": run.trainer.steps_done,
        "blocks": blocks,
        "accepted_len": _lengths(walks),
    }


def look_up(validation: Sequence[Response], draft_len: int) -> dict[str, tuple[int, int]]:
    """Return tokens and rounds of prompt lookup along the responses, by domain, as `Run.validate` does."""
    walks: dict[str, tuple[int, int]] = {}
    for response in validation:
        place, end = response.response_start, len(response.token_ids)
        text = PromptLookup(response.token_ids[: place + 1])
        emitted = rounds = 0
        # A last round that the sequence's end cuts off is not counted.
        while place + draft_len < end:
            drafts, _ = text.propose(draft_len)
            following = response.token_ids[place + 1 : place + 1 + draft_len]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == following[accepted]:
                accepted += 1
            text.extend(response.token_ids[place + 1 : place + 2 + accepted])
            place, emitted, rounds = place + accepted + 1, emitted + accepted + 1, rounds + 1
        before = walks.get(response.domain, (0, 0))
        walks[response.domain] = before[0] + emitted, before[1] + rounds
    return walks


def _lengths(walks: dict[str, tuple[int, int]]) -> dict[str, float]:
    total = (sum(emitted for emitted, _ in walks.values()), sum(rounds for _, rounds in walks.values()))
    return {name: round(emitted / max(rounds, 1), 3) for name, (emitted, rounds) in {**walks, "all": total}.items()}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print the arms as a table in Markdown, the best accepted length first."""
    ranked = sorted(results, key=lambda result: -result["accepted_len"]["all"])
    domains = list(ranked[0]["accepted_len"])
    print("\n| arm | parameters | steps | blocks |", " | ".join(domains), "|")
    print("|---|---|---|---|" + "---|" * len(domains))
    for result in ranked:
        facts = [str(result.get(name, "none")) for name in ("parameters", "steps", "blocks")]
        lengths = [f"{result['accepted_len'][domain]:.2f}" for domain in domains]
        print("|", " | ".join([result["arm"], *facts, *lengths]), "|")


if __name__ == "__main__":
    sys.exit(main())
