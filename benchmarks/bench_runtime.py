"""Where the time of a round goes: engine passes, the native core, and the runtime around them.

    python benchmarks/bench_runtime.py --engine_dir E [--speculation off,fixed:3] [--batch_size 1,4,8]

The runtime's share is what a session adds to the passes: admission, slots, arrays, stops, text, outputs. Shares come
from one run, so a busy machine moves all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import Engine
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.runtime import Request, SamplingParams, Session, Tokenizer

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 120 km in 2 hours and 180 km in 3 hours. What is its average speed?",
    "Tell me about the history of the Silk Road.",
    "Explain what a hash table is.",
)


@dataclass(slots=True)
class Round:
    """Microseconds of one decoding round."""

    total: float
    engine: float
    core: float

    @property
    def runtime(self) -> float:
        return self.total - self.engine - self.core


def measure(engine: Engine, tokenizer: Tokenizer, speculation: str, batch_size: int, max_tokens: int) -> list[Round]:
    """Return the rounds in which all requests decode."""
    session = Session(engine, tokenizer, speculation=speculation)
    for index in range(batch_size):
        prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop=["\nnever written\n"])
        session.add(Request(str(index), prompt, params))
    rounds = []
    stats = session.stats
    while session.has_unfinished():
        prefills, engine_s, core_s = stats.prefill_passes, stats.engine_s, stats.core_s
        start = time.perf_counter()
        session.step()
        total = time.perf_counter() - start
        if stats.prefill_passes == prefills and session.num_running == batch_size:
            rounds.append(Round(total * 1e6, (stats.engine_s - engine_s) * 1e6, (stats.core_s - core_s) * 1e6))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--speculation", default="off,fixed:3,fixed:7,threshold:0.3")
    parser.add_argument("--batch_size", default="1,4,8")
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--num_threads", type=int, default=2)
    args = parser.parse_args()
    engine = load_engine(args.engine_dir, num_threads=args.num_threads)
    tokenizer = Tokenizer.open(open_engine_dir(args.engine_dir, verify_hashes=False))
    measure(engine, tokenizer, "off", 1, 8)
    print("speculation   | batch | rounds | round us | engine us | core us | runtime us | core % | runtime %")
    for speculation in args.speculation.split(","):
        for batch_size in map(int, args.batch_size.split(",")):
            rounds = measure(engine, tokenizer, speculation, batch_size, args.max_tokens)
            total, in_engine, core, runtime = (
                statistics.median(getattr(entry, name) for entry in rounds)
                for name in ("total", "engine", "core", "runtime")
            )
            # Shares are medians of each round's own share.
            core_share = statistics.median(entry.core / entry.total for entry in rounds)
            runtime_share = statistics.median(entry.runtime / entry.total for entry in rounds)
            print(
                f"{speculation:13} | {batch_size:5} | {len(rounds):6} | {total:8.0f} | {in_engine:9.0f} | "
                f"{core:7.0f} | {runtime:10.0f} | {100 * core_share:6.2f} | {100 * runtime_share:9.2f}"
            )
    engine.close()


if __name__ == "__main__":
    main()
