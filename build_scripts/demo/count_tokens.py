#!/usr/bin/env python3
"""Count the tokens a target emitted: the input of `trtllm-dspark build --draft_vocab_counts`.

    python build_scripts/demo/count_tokens.py RESPONSES.jsonl OUTPUT.json --vocab_size V

Every line of the responses holds `token_ids` and `response_start`; only ids from `response_start` on are counted.
The output's format is in docs/file_formats.md.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from trtllm_dspark.build.draft_vocab import COUNTS_SCHEMA, COUNTS_SCHEMA_VERSION


def count(responses: Path) -> Counter[int]:
    """Return token id -> occurrences over all responses."""
    counts: Counter[int] = Counter()
    with responses.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            counts.update(record["token_ids"][record["response_start"] :])
    return counts


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Count the tokens a target emitted.")
    parser.add_argument("responses", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--vocab_size", type=int, required=True)
    arguments = parser.parse_args()
    counts = count(arguments.responses)
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    document = {
        "schema": COUNTS_SCHEMA,
        "schema_version": COUNTS_SCHEMA_VERSION,
        "vocab_size": arguments.vocab_size,
        "counts": pairs,
    }
    arguments.output.write_text(json.dumps(document, separators=(",", ":")) + "\n", "utf-8")
    print(f"{sum(counts.values()):,} tokens, {len(counts):,} distinct ids -> {arguments.output}")


if __name__ == "__main__":
    main()
