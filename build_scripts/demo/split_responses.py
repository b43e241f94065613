#!/usr/bin/env python3
"""Set responses aside for validation, by prompt.

    python build_scripts/demo/split_responses.py RESPONSES.jsonl... --train TRAIN.jsonl --validation GREEDY.jsonl

One prompt in `--one_in` goes to validation with all its responses, chosen by a hash of its tokens; the greedy ones are
written to GREEDY.jsonl, one a prompt, the others dropped. What the target wrote as user's turns stays in training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np


def held_out(prompt_ids: list[int], one_in: int) -> bool:
    """Return whether a prompt is one of those set aside."""
    digest = hashlib.sha256(np.asarray(prompt_ids, np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Set responses aside for validation, by prompt.")
    parser.add_argument("responses", type=Path, nargs="+")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--one_in", type=int, default=40)
    args = parser.parse_args()
    train, greedy = [], {}
    for path in args.responses:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            prompt = record["token_ids"][: record["response_start"]]
            if record["domain"] == "self_made" or not held_out(prompt, args.one_in):
                train.append(line)
            elif record["temperature"] == 0:
                greedy[tuple(prompt)] = line
    args.train.write_text("".join(f"{line}\n" for line in train), encoding="utf-8")
    args.validation.write_text("".join(f"{line}\n" for line in greedy.values()), encoding="utf-8")
    print(f"{len(train)} responses to train on, {len(greedy)} greedy ones to validate with")


if __name__ == "__main__":
    main()
