"""Microseconds of processor time that the adaptive controller takes a round, by call and number of requests.

    python benchmarks/bench_controller.py [--requests 1,8,64,256] [--rounds 500] [--repeats 9] [--max_draft_len 7]

`speculating`: requests of four kinds of text, of which some rest; `plain`: none of them is worth a draft. Every request
ends after 250 rounds on average and another takes its place. Times are those that a table of the same shape predicts.
Shown is the run of least total of several, as others may use the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from trtllm_dspark.speculation import CostTable, RoundOutcome, SpeculationConfig, SpeculationController
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape

CALLS = ("plan", "verify_lens", "observe", "forget")
ROUNDS_A_REQUEST = 250
WARM_UP = 100
"""Rounds before those that count: curves are read from the table once."""
TEXTS = {"speculating": (0.2, 0.6, 0.8, 0.95), "plain": (0.05,)}


@dataclass
class Costs:
    """Processor time of one case.

    Attributes:
        micros: by call, a round.
        drafted: share of the rounds that drafted.
    """

    micros: dict[str, float]
    drafted: float

    @property
    def total(self) -> float:
        return sum(self.micros.values())


def table(most: int, gamma: int) -> CostTable:
    """Return times of passes in which a request's first draft costs a tenth of its part of a pass."""
    counts = sorted({1, 2, 4, 8, 16, 32, 64, 128, 256, most})
    verify = {
        VerifyShape(r, r * k, k, depth): 5000.0 + 20.0 * r + 0.1 * depth + 10.0 * r * (k - 1)
        for r in counts
        for k in range(1, gamma + 2)
        for depth in (0, 4096)
    }
    return CostTable(verify, {DraftShape(r, 0): 400.0 + 5.0 * r for r in counts})


def measure(case: str, count: int, gamma: int, rounds: int) -> Costs:
    """Run rounds of `count` requests."""
    rng = np.random.default_rng(0)
    config = SpeculationConfig("adaptive")
    controller = SpeculationController(config, max_draft_len=gamma, cost_table=table(count, gamma))
    texts = np.array(TEXTS[case])
    chances = texts[np.arange(count) % len(texts)]
    requests = list(range(count))
    caps, everybody = np.full(count, gamma), np.ones(count, np.bool_)
    ends = rng.random((WARM_UP + rounds, count)) < 1.0 / ROUNDS_A_REQUEST
    noise = rng.uniform(0.9, 1.1, (64, count, gamma))
    runs = np.minimum(rng.geometric(1.0 - chances, (64, count)) - 1, gamma)
    spent, drafted = dict.fromkeys(CALLS, 0), 0
    clock = time.thread_time_ns
    start = clock()
    for _ in range(1000):
        clock()
    overhead = (clock() - start) / 1000
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            spent, drafted = dict.fromkeys(CALLS, 0), 0
        confidence = np.minimum(chances[:, None] * noise[number % 64], 1.0).astype(np.float32)
        start = clock()
        plan = controller.plan(requests, caps=caps, token_budget=count * gamma, depth=256 + number // 4)
        planned = clock()
        lengths = np.zeros(count, np.int64)
        if plan.drafts:
            drafted += 1
            chosen = clock()
            lengths = controller.verify_lens(plan, requests, caps=plan.caps, confidence=confidence, depth=256)
            spent["verify_lens"] += clock() - chosen
        spent["plan"] += planned - start
        accepted = np.minimum(runs[number % 64], lengths)
        tokens = int(lengths.sum())
        outcome = RoundOutcome(
            plan, requests, 256, lengths, accepted, confidence if plan.drafts else None,
            everybody if plan.caps.all() else plan.caps > 0,
            400.0 + 5.0 * count if plan.drafts else None, 5000.0 + 20.0 * count + 10.0 * tokens,
        )  # fmt: skip
        start = clock()
        controller.observe(outcome)
        spent["observe"] += clock() - start
        start = clock()
        for place in ends[number].nonzero()[0].tolist():
            controller.forget(requests[place])
            requests[place] += count
        spent["forget"] += clock() - start
    return Costs({call: max(0.0, spent[call] / rounds - overhead) / 1e3 for call in CALLS}, drafted / rounds)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--max_draft_len", type=int, default=7)
    args = parser.parse_args()
    columns = " ".join(f"{call:>12}" for call in (*CALLS, "us a round"))
    print(f"{'case':12} {'requests':>8} {'drafted':>8} {columns}")
    for case in TEXTS:
        for count in map(int, args.requests.split(",")):
            runs = [measure(case, count, args.max_draft_len, args.rounds) for _ in range(args.repeats)]
            costs = min(runs, key=lambda run: run.total)
            parts = " ".join(f"{costs.micros[call]:12.1f}" for call in CALLS)
            print(f"{case:12} {count:8d} {costs.drafted:8.0%} {parts} {costs.total:12.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
