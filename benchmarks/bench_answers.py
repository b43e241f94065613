"""Answer prompts as training does, by an engine and in PyTorch: how fast, and whether the answers are the engine's.

    python benchmarks/bench_answers.py --target_checkpoint P --prompts_file F.jsonl --work_dir D \
        [--num_prompts 64 --max_response_len 128 --batch_size 64 --num_threads 2]

Greedy answers to the first prompts, each way once, loading left out; PyTorch captures the features on the way, the
engine none. `equal` counts answers that are the engine's whole; `same_beginning` is the share of the engine's tokens
that come before the first difference. A row of JSON each on stdout.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from trtllm_dspark.cli._prompts import read_prompts
from trtllm_dspark.runtime import Request, SamplingParams
from trtllm_dspark.train.answer import Answerer, SessionAnswerer
from trtllm_dspark.train.pipeline import Preparation, TrainConfig


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare answers by an engine with answers in PyTorch.")
    parser.add_argument("--target_checkpoint", required=True)
    parser.add_argument("--prompts_file", type=Path, required=True)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--max_response_len", type=int, default=128)
    parser.add_argument("--max_seq_len", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_threads", type=int, default=2)
    args = parser.parse_args()
    common = {"steps": 1, "max_seq_len": args.max_seq_len, "num_threads": args.num_threads}
    exact, near = (
        Preparation(TrainConfig(args.target_checkpoint, args.work_dir, weight_dtype=dtype, **common))
        for dtype in ("float32", "bfloat16")
    )
    target = exact.feature_target
    tokenizer = target.tokenizer()
    requests = []
    for index, prompt in enumerate(read_prompts(args.prompts_file)[: args.num_prompts]):
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        if len(ids) < args.max_seq_len:
            requests.append(Request(str(index), ids, SamplingParams(max_tokens=args.max_response_len)))
    session = target.session(max_batch_size=args.batch_size, num_threads=args.num_threads)
    expected = measure("engine, float32", SessionAnswerer(session), requests, args.batch_size, None)
    measure("PyTorch, float32", exact.answerer(args.batch_size), requests, args.batch_size, expected)
    measure("PyTorch, bfloat16", near.answerer(args.batch_size), requests, args.batch_size, expected)


def measure(
    name: str, answerer: Answerer, requests: list[Request], batch_size: int, expected: dict[int, list[int]] | None
) -> dict[int, list[int]]:
    """Answer all requests, print the row, and return the answers."""
    # Loads what is loaded at the first request.
    warm = [Request("0", requests[0].prompt_token_ids, SamplingParams(max_tokens=2))]
    list(answerer.answers(warm, batch_size, stop=lambda: False, keep_features=True))
    started = time.perf_counter()
    answers = list(answerer.answers(requests, batch_size, stop=lambda: False, keep_features=True))
    seconds = time.perf_counter() - started
    answerer.close()
    found = {answer.index: answer.token_ids for answer in answers}
    tokens = sum(map(len, found.values()))
    row = {"answers": name, "number": len(found), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}
    if expected is not None:
        same = sum(_common(found[index], ids) for index, ids in expected.items())
        row["equal"] = sum(found[index] == ids for index, ids in expected.items())
        row["same_beginning"] = round(same / sum(map(len, expected.values())), 4)
    print(json.dumps(row), flush=True)
    return found


def _common(one: list[int], other: list[int]) -> int:
    """Return the tokens before the first difference."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    main()
