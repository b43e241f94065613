"""Static against NVML-aware serving when a machine is throttled or lost, and scaling, simulated (docs/simulation.md).

Usage: simulation_cluster.py

Prints Markdown tables; three or more L40S with Qwen3-4B (estimated times), chat, seed 1.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from trtllm_dspark.simulate.faults import Fault
from trtllm_dspark.simulate.published import published
from trtllm_dspark.simulate.scenario import Run, Scenario, Simulator
from trtllm_dspark.simulate.server import Policy
from trtllm_dspark.simulate.server_file import Overrides, load_server
from trtllm_dspark.simulate.traffic import Lengths, Process, Traffic, make_traffic

FAULTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "one machine at 30 % of its clock": ("throttle:0:2:1000:0.3",),
    "one GPU lost for 8 s": ("lost:1:3:8",),
}
WAYS = (
    ("round_robin", False, "fixed:3"),
    ("least_loaded", False, "fixed:3"),
    ("load_aware", True, "adaptive"),
)


def load(text: str, count: int) -> Traffic:
    """Draw chat requests of 128 tokens in and about 150 out."""
    return make_traffic(
        Process.parse(text), count=count, prompt=Lengths.parse("128"), output=Lengths.parse("lognormal:150:0.5"),
        domains={"mt_bench": 1.0, "alpaca": 1.0}, seed=1,
    )  # fmt: skip


def replica_seconds(run: Run) -> float:
    """Return how long replicas served, in sum."""
    changes = run.result.replicas
    end = max(record.last_token_s or 0.0 for record in run.result.records)
    spans = zip(changes, [*changes[1:], (end, 0)], strict=True)
    return sum(count * (until - since) for (since, count), (until, _) in spans)


def main() -> int:
    """Run everything."""
    logging.basicConfig(level=logging.ERROR)
    server = load_server("l40s:qwen3-4b", Overrides(max_batch_size=48, max_seq_len=2048))
    base = Scenario(server, published("qwen3-4b"), seed=1, replicas=3)
    traffic = load("poisson:110", 1500)
    columns = ("fault", "router", "NVML", "policy", "tokens/s", "first token, 50 % ms", "95 % ms")
    columns += ("a user's tokens/s, 5 %", "sent again")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, faults in FAULTS.items():
        for router, nvml, policy in WAYS:
            scenario = replace(base, router=router, nvml=nvml, faults=tuple(map(Fault.parse, faults)))
            run = Simulator(scenario).run(Policy.parse(policy), traffic)
            summary = run.summary
            print(
                f"| {name} | {router} | {'yes' if nvml else 'no'} | {policy} | {summary.throughput:,.0f} "
                f"| {summary.ttft_ms[0]:,.0f} | {summary.ttft_ms[1]:,.0f} | {summary.user_speed[0]:.0f} "
                f"| {run.result.retries} |",
                flush=True,
            )
    print("\n| replicas | first token, 50 % ms | 95 % ms | replica seconds |\n|---|---|---|---|")
    bursts = load("bursty:40:4:40", 1200)
    for replicas, scaling in ((1, None), (4, None), (1, "1:4:3:20")):
        scenario = replace(base, router="least_loaded", replicas=replicas, autoscaling=scaling)
        run = Simulator(scenario).run(Policy.parse("adaptive"), bursts)
        label = f"{replicas}" if scaling is None else "1 to 4, 3 s to start"
        print(
            f"| {label} | {run.summary.ttft_ms[0]:,.0f} | {run.summary.ttft_ms[1]:,.0f} "
            f"| {replica_seconds(run):,.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
