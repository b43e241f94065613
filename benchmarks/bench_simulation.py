"""Simulated rounds a second of one core, the serving code's controller in the loop.

Usage: bench_simulation.py [--users 64] [--rounds 4000] [--repeats 5] [--policies off,early_stop,stale_topk,adaptive]

Processor time, not the clock, of the fastest of some equal runs: others may use the machine, its caches too. Blocks are
drawn before. Prints one line a policy.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from trtllm_dspark.simulate.published import published
from trtllm_dspark.simulate.scenario import Scenario, Simulator
from trtllm_dspark.simulate.server import Policy
from trtllm_dspark.simulate.server_file import Overrides, load_server
from trtllm_dspark.simulate.traffic import Lengths, Process, make_traffic


def main() -> int:
    """Measure every policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policies", default="off,fixed:3,threshold:0.3,early_stop,stale_topk,adaptive")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    server = load_server("h200:qwen3-8b", Overrides(max_batch_size=args.users, max_seq_len=8192))
    simulator = Simulator(Scenario(server, published("qwen3-8b")))
    for name in args.policies.split(","):
        policy = Policy.parse(name)
        # About four tokens a request and round where drafts are verified.
        tokens = args.rounds * (1 if name == "off" else 4)
        load = make_traffic(
            Process("closed", args.users), count=args.users * max(1, tokens // 1000), prompt=Lengths.parse("128"),
            output=Lengths.parse("uniform:500:1500"), domains={"math": 1.0, "alpaca": 1.0}, seed=1,
        )  # fmt: skip
        simulator.run(policy, make_traffic(Process("closed", 1), count=1, prompt=Lengths.parse("8"), seed=1,
                                           output=Lengths.parse("8"), domains={"math": 1.0}))  # fmt: skip
        seconds = float("inf")
        for _ in range(args.repeats):
            started = time.process_time()
            run = simulator.run(policy, load)
            seconds = min(seconds, time.process_time() - started)
        log = run.result.logs[0]
        mean = sum(log.num_requests) / max(1, len(log))
        print(f"{name:14} {len(log) / seconds:8.0f} rounds/s, {mean:.0f} requests a round", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
