"""What Triton and the engine process cost: the same requests in process and through `generate_stream`, interleaved.

Usage: bench_serving.py --engine_dir E --prompts_file F.jsonl [--batch_size 8] [--max_tokens 64] [--rounds 5]
       [--speculation fixed]

Prints one JSON line with the median tokens a second of both paths and the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import load_serving

from trtllm_dspark.runtime import Request, SamplingParams, Session


def in_process(session: Session, prompts: list[str], max_tokens: int) -> float:
    """Return tokens a second of one batch in this process."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        raise SystemExit("the engine has no tokenizer")
    started, tokens = time.monotonic(), 0
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), tokenizer.encode(prompt), SamplingParams(max_tokens=max_tokens)))
    while session.has_unfinished():
        tokens += sum(len(output.new_token_ids) for output in session.step())
    return tokens / (time.monotonic() - started)


def through_triton(port: int, prompts: list[str], max_tokens: int) -> float:
    """Return tokens a second of one batch over HTTP, one stream a request."""

    async def batch() -> int:
        load = load_serving.Load()
        jobs = [load_serving.Job(prompt, max_tokens, "ensemble", None) for prompt in prompts]
        await asyncio.gather(*(load_serving.stream(("127.0.0.1", port), job, load) for job in jobs))
        return load.tokens

    started = time.monotonic()
    tokens = asyncio.run(batch())
    return tokens / (time.monotonic() - started)


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
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculation", default="fixed")
    parser.add_argument("--num_threads", type=int, default=2)
    args = parser.parse_args()
    lines = args.prompts_file.read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: args.batch_size]]
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-m", "trtllm_dspark.cli.main", "serve", f"--engine_dir={args.engine_dir}"]
    command += [f"--{name}_port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    command += [f"--speculation={args.speculation}", f"--num_threads={args.num_threads}", "--log_level=error"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if server.stdout is None or not server.stdout.readline().startswith("ready"):
            raise SystemExit("the server did not start")
        session = Session.open(args.engine_dir, num_threads=args.num_threads, speculation=args.speculation)
        in_process(session, prompts, 8)
        through_triton(ports[0], prompts, 8)
        pairs = [
            (in_process(session, prompts, args.max_tokens), through_triton(ports[0], prompts, args.max_tokens))
            for _ in range(args.rounds)
        ]
        session.close()
    finally:
        server.terminate()
        server.wait()
    print(
        json.dumps(
            {
                "in_process_tokens_per_s": round(statistics.median(pair[0] for pair in pairs), 1),
                "triton_tokens_per_s": round(statistics.median(pair[1] for pair in pairs), 1),
                "ratio": round(statistics.median(pair[1] / pair[0] for pair in pairs), 4),
                "batch_size": len(prompts),
                "speculation": args.speculation,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
