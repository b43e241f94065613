"""Closed-loop load over domains, concurrencies and speculation policies, paired and interleaved.

    python benchmarks/load_sweep.py --engine_dir E --prompts_file F.jsonl --output_dir D [--minutes 22]

Every policy runs the same prompts of a domain at the same concurrency; that is one repeat of a cell, and what is
compared is the ratio to `off` within it. The policies of a repeat take turns of a quarter of a second, each on its own
clock, in another order each time: machines drift by tens of per cent within a minute, and what drifts slower than the
turns falls on all of them. Each request takes another prompt, of half to one and a half of --max_tokens, the same for
every policy. The rate is that of the first tokens, as many as all requests but the last ones ask for: up to there a
free slot finds a next request, and the work is the same for all. How long the last ones take alone says nothing about
this concurrency. Next to the clock stands processor time, from which others on the machine take less.

Sessions live through the whole sweep, as a server's would, each in slots of its own on one engine: what it has cached
must still be there at its next turn. So the engine needs --max_batch_size of policies times the largest concurrency.
Runs are appended to D/runs.jsonl: started again with the same arguments the sweep goes on where it stopped.
`--report_only` prints what the runs so far say.

Writes D/sweep.json (also what simulated_vs_measured.py reads), D/sweep.md and D/sweep.svg. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load_sweep_report as report
from slot_window import SlotWindow

from trtllm_dspark.cli._prompts import Prompt, encode_prompt, read_prompts
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import ContextBatch, Engine
from trtllm_dspark.engine.device import cpu_name
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.runtime import Request, RequestOutput, SamplingParams, Session, Tokenizer
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.runtime.scheduling import load_calibration, load_cost_table
from trtllm_dspark.speculation import measure_cost_table
from trtllm_dspark.speculation.cost_table import check_cost_table, make_monotone

FIXED = "fixed:1,fixed:2,fixed:3,fixed:5,fixed:7"
POLICIES = f"off,{FIXED},threshold:0.1,threshold:0.3,threshold:0.5,early_stop,stale_topk,adaptive"
UNCALIBRATED = "threshold:0.3,adaptive"
CONCURRENCY = "1,2,4,8"
MIN_PROMPTS = 4
"""Prompts of one run at least; otherwise three times as many as run at once."""
TURN_S = 0.25
"""How long a policy runs before the next one has its turn."""

logger = logging.getLogger("load_sweep")


class AbsorbClock:
    """Time an engine takes to absorb features into the drafter's context."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds = 0.0
        self._absorb = engine.absorb
        engine.absorb = self.absorb  # type: ignore[method-assign]

    def absorb(self, batch: ContextBatch) -> None:
        """Absorb, and count the time."""
        started = time.perf_counter()
        self._absorb(batch)
        self.seconds += time.perf_counter() - started


@dataclass(slots=True)
class Policy:
    """A policy, the session that keeps what it learns, and the clock of its engine."""

    name: str
    session: Session
    calibrated: bool
    absorbing: AbsorbClock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--prompts_file", type=Path, required=True, help="prompts with a 'domain' each")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--uncalibrated", default=UNCALIBRATED, help="policies also run without calibration.json")
    parser.add_argument("--concurrency", default=CONCURRENCY)
    parser.add_argument("--max_tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=6, help="repeats of every cell, unless the time is over before")
    parser.add_argument("--minutes", type=float, default=22.0, help="start no further repeat of a cell after this time")
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--report_only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs_file = args.output_dir / "runs.jsonl"
    if not args.report_only:
        measure(args, runs_file)
    runs = [json.loads(line) for line in runs_file.read_text(encoding="utf-8").splitlines()]
    manifest = open_engine_dir(args.engine_dir, verify_hashes=False).manifest
    facts = {
        "device": cpu_name(),
        "num_threads": args.num_threads,
        "max_tokens": args.max_tokens,
        "engine_hash": manifest.engine_hash,
        "prompts_file": args.prompts_file.name,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(report.write(runs, facts, args.output_dir))


def measure(args: argparse.Namespace, runs_file: Path) -> None:
    """Append runs until every cell has its repeats or the time is over."""
    policies = make_policies(args)
    tokenizer = policies[0].session.tokenizer
    assert tokenizer is not None
    domains: dict[str, list[list[int]]] = {}
    for prompt in read_prompts(args.prompts_file):
        domains.setdefault(prompt.domain or "all", []).append(encode(prompt, tokenizer))
    done = finished_groups(runs_file, len(policies))
    deadline = time.monotonic() + 60 * args.minutes
    for policy in policies:
        run_in_turns([policy], next(iter(domains.values()))[:1], 1, 8)
    turn = 0
    for repeat in range(args.repeats):
        for domain, prompts in domains.items():
            for concurrency in map(int, args.concurrency.split(",")):
                turn += 1
                key = (repeat, domain, concurrency)
                if key in done:
                    continue
                if time.monotonic() > deadline:
                    logger.warning("the time is over in repeat %d; start again to go on", repeat + 1)
                    return
                size = num_prompts(concurrency)
                chosen = [prompts[(repeat * size + index) % len(prompts)] for index in range(size)]
                order = [policies[(turn + index) % len(policies)] for index in range(len(policies))]
                results = run_in_turns(order, chosen, concurrency, args.max_tokens)
                place = {"repeat": repeat, "domain": domain, "concurrency": concurrency}
                lines = [place | result for result in results]
                # A group is written whole, so that an interrupted one leaves nothing.
                with runs_file.open("a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))
                logger.info("repeat %d, %s, %d at once: done", repeat + 1, domain, concurrency)


def make_policies(args: argparse.Namespace) -> list[Policy]:
    """Return the policies, each with slots of its own on one engine.

    Engines of their own would differ: one that is loaded first is slower by some 7% than the next ones here.
    """
    engine = load_engine(args.engine_dir, num_threads=args.num_threads, verify_hashes=False)
    directory = open_engine_dir(args.engine_dir, verify_hashes=False)
    tokenizer, calibration = Tokenizer.open(directory), load_calibration(directory)
    names = [(name, True) for name in args.policies.split(",")]
    if calibration is None:
        logger.warning("no calibration.json: everything runs uncalibrated; trtllm-dspark calibrate writes one")
    else:
        names += [(name, False) for name in args.uncalibrated.split(",") if name]
    slots = engine.limits.max_batch_size // len(names)
    if slots < max(map(int, args.concurrency.split(","))):
        raise SystemExit(
            f"{len(names)} policies take turns on an engine of {engine.limits.max_batch_size} slots; build one with "
            f"--max_batch_size {len(names)} times --concurrency {args.concurrency}"
        )
    windows = [SlotWindow(engine, index * slots, slots) for index in range(len(names))]
    table = load_cost_table(directory, engine, num_threads=args.num_threads)
    if table is None:
        logger.warning("no cost table of this machine: measuring one now; trtllm-dspark profile measures more")
        table = measure_cost_table(windows[0])
        check_cost_table(table)
        table = make_monotone(table)

    def policy(name: str, calibrated: bool, window: SlotWindow) -> Policy:
        absorbing = AbsorbClock(window)
        used = calibration if calibrated else None
        session = Session(window, tokenizer, speculation=name, cost_table=table, calibration=used)
        return Policy(name, session, calibrated, absorbing)

    return [policy(name, calibrated, window) for (name, calibrated), window in zip(names, windows, strict=True)]


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    return encode_prompt(prompt, tokenizer, raw=False)


def num_prompts(concurrency: int) -> int:
    """Return the prompts of one run."""
    return max(MIN_PROMPTS, 3 * concurrency)


def output_tokens(index: int, max_tokens: int) -> int:
    """Return the tokens of a run's request: requests that join together must not end together."""
    return max_tokens * (2 + 3 * index % 5) // 4


def run_in_turns(
    policies: list[Policy], prompts: list[list[int]], concurrency: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Run the prompts once with every policy, in turns, and return what a report needs of each."""
    runs = [Run(policy, prompts, concurrency, max_tokens) for policy in policies]
    waiting = list(runs)
    while waiting:
        # The order turns over, so that none always follows the same one.
        waiting = [run for run in reversed(waiting) if run.advance(TURN_S)]
    return [run.result() for run in runs]


class Run:
    """One policy's run of the prompts, on a clock that stands still while others have their turn."""

    def __init__(self, policy: Policy, prompts: list[list[int]], concurrency: int, max_tokens: int) -> None:
        self.policy = policy
        stats = policy.session.stats
        self._before = (stats.rounds, stats.round_s, stats.engine_s, dict(stats.plans))
        # Lengths are given: a policy must not win by ending early.
        requests = [
            Request(str(index), prompt, SamplingParams(max_tokens=output_tokens(index, max_tokens), ignore_eos=True))
            for index, prompt in enumerate(prompts)
        ]
        self._counted = sum(output_tokens(index, max_tokens) for index in range(len(prompts) - concurrency + 1))
        self._stream = run_closed_loop(policy.session, requests, batch_size=concurrency)
        self._outputs: list[RequestOutput] = []
        self._last_round = stats.rounds
        self._tokens, self._seconds, self._cpu_seconds, self._absorb_seconds = 0, 0.0, 0.0, 0.0
        self._busy = (0, 0.0, 0.0)

    def advance(self, seconds: float) -> bool:
        """Run for some time, to the end of a round, and return whether anything is left to do."""
        started, spent = time.perf_counter(), time.process_time()
        before = (self._seconds, self._cpu_seconds, self._absorb_seconds - self.policy.absorbing.seconds)
        stats = self.policy.session.stats
        first = stats.rounds
        for output in self._stream:
            if output.error is not None:
                raise SystemExit(f"{self.policy.name}: {output.error}")
            self._seconds = before[0] + time.perf_counter() - started
            self._cpu_seconds = before[1] + time.process_time() - spent
            self._absorb_seconds = before[2] + self.policy.absorbing.seconds
            self._tokens += len(output.new_token_ids)
            if self._busy[0] < self._counted or stats.rounds == self._last_round:
                # To the end of the round that reaches the count.
                self._last_round = stats.rounds
                self._busy = (self._tokens, self._seconds, self._cpu_seconds)
            if output.finished:
                self._outputs.append(output)
            if self._seconds - before[0] >= seconds and stats.rounds > first:
                return True
        return False

    def result(self) -> dict[str, Any]:
        """Return a finished run's line."""
        session, before = self.policy.session, self._before
        stats, state = session.stats, session.controller.state
        acceptance = [output.stats.acceptance for output in self._outputs]
        rounds = stats.rounds - before[0]
        plans = {name: count - before[3].get(name, 0) for name, count in stats.plans.items()}
        return {
            "speculation": self.policy.name,
            "calibrated": self.policy.calibrated,
            "tokens": self._busy[0],
            "seconds": self._busy[1],
            "cpu_seconds": self._busy[2],
            "whole_tokens": sum(output.stats.num_output_tokens for output in self._outputs),
            "whole_seconds": self._seconds,
            "absorb_seconds": self._absorb_seconds,
            "beside_us": state.beside_us,
            "rounds": rounds,
            "round_ms": (stats.round_s - before[1]) / rounds * 1e3,
            "engine_ms": (stats.engine_s - before[2]) / rounds * 1e3,
            "verify_rounds": sum(entry.rounds for entry in acceptance),
            "emitted": sum(entry.emitted for entry in acceptance),
            "verified_per_position": [
                sum(column) for column in zip(*(entry.verified_per_position for entry in acceptance), strict=False)
            ],
            "accepted_per_position": [
                sum(column) for column in zip(*(entry.accepted_per_position for entry in acceptance), strict=False)
            ],
            "plans": {name: count for name, count in plans.items() if count},
            "correction": [state.correction.base, state.correction.marginal, state.correction.draft],
        }


def finished_groups(runs_file: Path, num_policies: int) -> set[tuple[int, str, int]]:
    """Return the (repeat, domain, concurrency) that a sweep before has measured in full."""
    if not runs_file.exists():
        return set()
    counts: dict[tuple[int, str, int], int] = {}
    for line in runs_file.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        key = (run["repeat"], run["domain"], run["concurrency"])
        counts[key] = counts.get(key, 0) + 1
    if any(count != num_policies for count in counts.values()):
        raise SystemExit(f"{runs_file} was measured with other policies; give another --output_dir")
    return set(counts)


if __name__ == "__main__":
    main()
