"""`trtllm-dspark collect`: report, check or delete what `serve --collect_dir` recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `collect`."""
    parser.add_argument("--collect_dir", required=True, type=Path, help="directory of traffic records")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="read every record and refuse a damaged shard")
    action.add_argument("--purge", action="store_true", help="delete all records, the key of the prompts' hashes too")


def run(args: argparse.Namespace) -> int:
    """Do what was asked and print one JSON object."""
    from trtllm_dspark.traffic.layout import read_info
    from trtllm_dspark.traffic.shards import purge, shard_bytes, shard_numbers

    directory = args.collect_dir
    info = read_info(directory)
    if args.purge:
        print(json.dumps({"deleted_shards": purge(directory, info)}))
        return 0
    numbers = shard_numbers(directory)
    report: dict[str, Any] = {
        "shards": len(numbers),
        "bytes": sum(shard_bytes(directory, number) for number in numbers),
        "prompts": info.prompts,
        "target_layer_ids": info.target_layer_ids,
        **_counts(directory, numbers, read_all=args.verify),
    }
    print(json.dumps(report))
    return 0


def _counts(directory: Path, numbers: list[int], *, read_all: bool) -> dict[str, Any]:
    """Count requests and tokens from the lines, and with `read_all` check every record on the way."""
    from trtllm_dspark.traffic.layout import read_info
    from trtllm_dspark.traffic.shards import read_lines, read_shard

    requests = tokens = rounds = emitted = 0
    engines: dict[str, int] = {}
    info = read_info(directory)
    for number in numbers:
        for meta in read_lines(directory, number):
            requests += 1
            tokens += meta["num_output_tokens"]
            engines[meta["engine_hash"]] = engines.get(meta["engine_hash"], 0) + 1
        if read_all:
            for record in read_shard(directory, number, info):
                rounds += len(record.rounds)
                emitted += int(record.rounds[:, 2].sum()) + len(record.rounds)
    report: dict[str, Any] = {"requests": requests, "output_tokens": tokens, "requests_by_engine_hash": engines}
    if read_all:
        report["accepted_len"] = round(emitted / rounds, 3) if rounds else None
    return report
