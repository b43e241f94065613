"""What Triton and the engine process cost: the same requests in process and through `generate_stream`, interleaved.

Usage: bench_serving.py --engine_dir E --prompts_file F.jsonl [--batch_size 8] [--max_tokens 64] [--rounds 5]
       [--waves 3] [--speculation fixed]

Every round runs both paths once, first one, then the other, with the same prompts and exactly `max_tokens` tokens
each (end tokens are ignored); which path goes first alternates. A run is `waves` times as many requests as run at
once; the server gets all of them at once and queues what waits, so both paths always have a next request for a free
slot. Prints one JSON line: median tokens a second of both, the median of the rounds' ratios with an interval that
assumes no distribution (order statistics; the confidence it has is printed), and CPU time a token: in process, and
served for the engine process, for the rest of the server and for the client, which another load of the machine
disturbs less than rates.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import load_serving

from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop


@dataclass(frozen=True, slots=True)
class Run:
    """One batch: tokens a second, and CPU seconds a token of each part."""

    tokens_per_s: float
    cpu_s: dict[str, float]


def in_process(session: Session, prompts: list[str], batch_size: int, max_tokens: int) -> Run:
    """Run the requests in this process, so many at once."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        raise SystemExit("the engine has no tokenizer")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    started, spent, tokens = time.monotonic(), time.process_time(), 0
    requests = (Request(str(index), tokenizer.encode(prompt), params) for index, prompt in enumerate(prompts))
    for output in run_closed_loop(session, requests, batch_size=batch_size):
        tokens += len(output.new_token_ids)
    check_count(tokens, prompts, max_tokens)
    return Run(tokens / (time.monotonic() - started), {"in_process": (time.process_time() - spent) / tokens})


def through_triton(port: int, launcher_pid: int, prompts: list[str], max_tokens: int) -> Run:
    """Run the requests over HTTP, one stream each."""
    load = load_serving.Load()
    jobs = [load_serving.Job(prompt, max_tokens, "ensemble", None, ignore_eos=True) for prompt in prompts]

    async def batch() -> float:
        started = time.monotonic()
        await asyncio.gather(*(load_serving.stream(("127.0.0.1", port), job, load) for job in jobs))
        return time.monotonic() - started

    before = load_serving.cpu_seconds(launcher_pid)
    seconds = asyncio.run(batch())
    spent = load_serving.cpu_seconds(launcher_pid).since(before)
    check_count(load.tokens, prompts, max_tokens)
    cpu_s = {"engine_process": spent.engine, "rest_of_server": spent.rest, "client": spent.client}
    return Run(load.tokens / seconds, {part: value / load.tokens for part, value in cpu_s.items()})


def check_count(tokens: int, prompts: list[str], max_tokens: int) -> None:
    """Refuse to compare batches of different size."""
    if tokens != len(prompts) * max_tokens:
        raise SystemExit(f"{tokens} tokens came instead of {len(prompts)} x {max_tokens}; use shorter prompts")


def median_interval(values: list[float], *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return an interval for the median between two order statistics, and its confidence, which few values limit."""
    ordered, count = sorted(values), len(values)
    left_out = [sum(math.comb(count, i) for i in range(rank + 1)) / 2**count for rank in range((count + 1) // 2)]
    rank = max((r for r, tail in enumerate(left_out) if 1 - 2 * tail >= confidence), default=0)
    return ordered[rank], ordered[count - 1 - rank], 1 - 2 * left_out[rank]


def free_port() -> int:
    """Return a port nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Start a server, run both paths in turn, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--prompts_file", type=Path, required=True)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--max_tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculation", default="fixed")
    parser.add_argument("--num_threads", type=int, default=2)
    args = parser.parse_args()
    lines = args.prompts_file.read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [texts[index % len(texts)] for index in range(args.waves * args.batch_size)]
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-m", "trtllm_dspark.cli.main", "serve", f"--engine_dir={args.engine_dir}"]
    command += [f"--{name}_port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    command += [f"--speculation={args.speculation}", f"--num_threads={args.num_threads}", "--log_level=error"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if server.stdout is None or not server.stdout.readline().startswith("ready"):
            raise SystemExit("the server did not start")
        session = Session.open(args.engine_dir, num_threads=args.num_threads, speculation=args.speculation)
        alone = functools.partial(in_process, session, prompts, args.batch_size)
        served = functools.partial(through_triton, ports[0], server.pid, prompts)
        alone(args.max_tokens)
        served(args.max_tokens)
        pairs = []
        for number in range(args.rounds):
            if number % 2:
                second = served(args.max_tokens)
                pairs.append((alone(args.max_tokens), second))
            else:
                pairs.append((alone(args.max_tokens), served(args.max_tokens)))
        session.close()
    finally:
        server.terminate()
        server.wait()
    ratios = [triton.tokens_per_s / process.tokens_per_s for process, triton in pairs]
    low, high, confidence = median_interval(ratios)
    parts = [{**process.cpu_s, **triton.cpu_s} for process, triton in pairs]
    print(
        json.dumps(
            {
                "in_process_tokens_per_s": round(statistics.median(pair[0].tokens_per_s for pair in pairs), 1),
                "triton_tokens_per_s": round(statistics.median(pair[1].tokens_per_s for pair in pairs), 1),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_interval": [round(low, 4), round(high, 4)],
                "interval_confidence": round(confidence, 3),
                "cpu_ms_per_token": {
                    name: round(1e3 * statistics.median(part[name] for part in parts), 3) for name in parts[0]
                },
                "rounds": len(pairs),
                "batch_size": args.batch_size,
                "requests": len(prompts),
                "speculation": args.speculation,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
