"""Simulated against measured throughput of one engine on this machine, by policy and concurrency.

Usage: simulated_vs_measured.py --engine_dir E --prompts_file F.jsonl [--sweep S.json] [--output V.json] [--svg V.svg]

1. profiles the engine (unless --keep_profile), 2. records on the prompts which drafts the target accepts, 3. times what
a session does beside its passes and what prompts take (simulation_costs.py), 4. measures every policy at every
concurrency, interleaved, `--repeats` times, or reads what load_sweep.py measured (--sweep D/sweep.json, whose runs are
simulated one by one, prompt by prompt), 5. simulates the same runs, 6. prints both. Run it on an idle machine; after a
sweep with --keep_profile, so that both know the same times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from load_sweep import num_prompts, output_tokens
from simulation_costs import session_costs

from trtllm_dspark.cli._acceptance_output import DEFAULT_DOMAIN, record_acceptance
from trtllm_dspark.cli._prompts import Prompt, encode_prompt, read_prompts
from trtllm_dspark.cli.main import main as command
from trtllm_dspark.reports.svg import COLOURS, Series, line_plot
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.simulate.acceptance import AcceptanceProfile
from trtllm_dspark.simulate.scenario import Scenario, Simulator
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.server_file import Overrides, load_server
from trtllm_dspark.simulate.traffic import Arrival, Process, Traffic

POLICIES = "off,fixed:3,fixed:7,threshold:0.3,adaptive"


@dataclass(frozen=True)
class Cell:
    """One policy at one concurrency: tokens/s of every repeat, or median and interval; and, to find errors by, tokens a
    verify round and milliseconds of a round, where they were measured."""

    policy: str
    users: int
    median: float
    low: float
    high: float
    accepted_len: float | None = None
    round_ms: float | None = None

    @staticmethod
    def of(policy: str, users: int, rates: Sequence[float], accepted_len: float | None, round_ms: float) -> Cell:
        """Return the cell of repeated rates; of few repeats the interval is their range."""
        return Cell(policy, users, statistics.median(rates), min(rates), max(rates), accepted_len, round_ms)

    def below(self, other: Cell) -> bool:
        """Whether it is below another beyond doubt: the intervals do not overlap."""
        return self.high < other.low


@dataclass(frozen=True)
class Simulated:
    """What the simulation says of a cell."""

    rate: float
    accepted_len: float


def measure(
    session: Session, requests: Sequence[Request], policies: Sequence[str], users: Sequence[int], repeats: int
) -> list[Cell]:
    """Return the cells; policies take turns so that a busy moment hits all of them."""
    sessions = {policy: session.sibling(speculation=policy) for policy in policies}
    rates: dict[tuple[str, int], list[float]] = {cell: [] for cell in itertools.product(policies, users)}
    rounds = {cell: [0, 0, 0.0, 0] for cell in rates}
    for policy in policies:
        list(run_closed_loop(sessions[policy], requests[: max(users)], batch_size=max(users)))
    for repeat, count in itertools.product(range(repeats), users):
        order = [policies[(repeat + index) % len(policies)] for index in range(len(policies))]
        for policy in order:
            stats, counts = sessions[policy].stats, rounds[policy, count]
            before = stats.round_s, stats.rounds
            started, tokens = time.perf_counter(), 0
            for output in run_closed_loop(sessions[policy], requests, batch_size=count):
                if output.finished:
                    tokens += output.stats.num_output_tokens
                    counts[0] += output.stats.acceptance.emitted
                    counts[1] += output.stats.acceptance.rounds
            rates[policy, count].append(tokens / (time.perf_counter() - started))
            counts[2] += stats.round_s - before[0]
            counts[3] += stats.rounds - before[1]
            print(f"{policy} at {count}: {rates[policy, count][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    return [
        Cell.of(*cell, values, emitted / verified if verified else None, 1e3 * seconds / count)
        for cell, values in rates.items()
        for emitted, verified, seconds, count in [rounds[cell]]
    ]


@dataclass(frozen=True)
class Load:
    """One run of a session: requests of `users` at once, and the repeat it counts for."""

    repeat: int
    users: int
    arrivals: tuple[Arrival, ...]
    domain: str = ""


def simulate(
    server_of: Callable[[str], Server], profile: AcceptanceProfile, policies: Sequence[str], loads: Sequence[Load]
) -> dict[tuple[str, int], Simulated]:
    """Return simulated cells; a run is timed from its first request to its last token.

    Args:
        server_of: policy -> times and limits under it.
        profile: acceptance, one domain a prompt.
        policies: each runs all loads in turn, in one session.
        loads: runs; those of one repeat are one measurement over all domains, as load_sweep.py takes them.
    """
    traffic = [Traffic(f"{load.users} users", Process("closed", load.users), load.arrivals) for load in loads]
    domains = {load.domain for load in loads}
    cells = {}
    for policy in policies:
        simulator = Simulator(Scenario(server_of(policy), profile, seed=1))
        results = simulator.run_turns(Policy.parse(policy), traffic)
        for users in dict.fromkeys(load.users for load in loads):
            rates, rounds, accepted = [], 0, 0
            for repeat in dict.fromkeys(load.repeat for load in loads):
                mine = [
                    run
                    for load, run in zip(loads, results, strict=True)
                    if (load.repeat, load.users) == (repeat, users)
                ]
                if len(mine) < len(domains):
                    continue
                seconds = sum(max(record.last_token_s or 0.0 for record in run) for run in mine)
                rates.append(sum(record.output_tokens for run in mine for record in run) / seconds)
                rounds += sum(record.rounds for run in mine for record in run)
                accepted += sum(record.accepted for run in mine for record in run)
            if rates:
                cells[policy, users] = Simulated(statistics.median(rates), 1 + accepted / max(1, rounds))
    return cells


def sweep_loads(runs: Sequence[Mapping[str, Any]], prompts: Sequence[Arrival], max_tokens: int) -> list[Load]:
    """Return the runs of load_sweep.py as loads: the prompts of each group, in the order in which it took them."""
    by_domain: dict[str, list[Arrival]] = {}
    for arrival in prompts:
        by_domain.setdefault(arrival.domain.rpartition("/")[0], []).append(arrival)
    loads = []
    for repeat, domain, users in dict.fromkeys((r["repeat"], r["domain"], r["concurrency"]) for r in runs):
        if domain not in by_domain:
            raise SystemExit(
                f"the sweep has prompts of '{domain}' and --prompts_file has none; give the sweep's own file"
            )
        mine, size = by_domain[domain], num_prompts(users)
        chosen = tuple(
            replace(mine[(repeat * size + index) % len(mine)], output_tokens=output_tokens(index, max_tokens))
            for index in range(size)
        )
        loads.append(Load(repeat, users, chosen, domain))
    return loads


def read_sweep(raw: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of load_sweep.py, by the rates of whole runs, last requests and all."""
    cells = []
    for entry in raw["cells"]:
        low, high = entry["whole_interval"]
        cells.append(
            Cell(
                entry["speculation"],
                entry["concurrency"],
                entry["whole_tokens_per_s"],
                low,
                high,
                entry.get("accepted_len"),
                entry.get("round_ms"),
            )
        )
    return cells


def compare(cells: Sequence[Cell], simulated: Mapping[tuple[str, int], Simulated]) -> dict[str, Any]:
    """Return rows, the largest error, and rankings of separable measured cells that the simulation turns round."""
    rows, turned, pairs = [], [], 0
    for cell in cells:
        found = simulated[cell.policy, cell.users]
        rows.append({"policy": cell.policy, "users": cell.users, "measured": round(cell.median, 1),
                     "low": round(cell.low, 1), "high": round(cell.high, 1), "simulated": round(found.rate, 1),
                     "error": round(found.rate / cell.median - 1, 4),
                     "measured_accepted_len": None if cell.accepted_len is None else round(cell.accepted_len, 3),
                     "simulated_accepted_len": round(found.accepted_len, 3), "round_ms": cell.round_ms})  # fmt: skip
    for first, second in itertools.permutations(cells, 2):
        if first.users == second.users and first.below(second):
            pairs += 1
            if simulated[first.policy, first.users].rate >= simulated[second.policy, second.users].rate:
                turned.append(f"{first.users}: {first.policy} against {second.policy}")
    worst = max(abs(row["error"]) for row in rows)
    return {"rows": rows, "largest_error": worst, "separable_pairs": pairs, "turned_pairs": turned}


def plot(cells: Sequence[Cell], simulated: Mapping[tuple[str, int], Simulated]) -> str:
    """Return measured bands and simulated curves."""
    series = []
    for index, policy in enumerate(dict.fromkeys(cell.policy for cell in cells)):
        mine = [cell for cell in cells if cell.policy == policy]
        users = [cell.users for cell in mine]
        colour = COLOURS[index % len(COLOURS)]
        series.append(
            Series(
                f"{policy}, measured",
                users,
                [c.median for c in mine],
                [c.low for c in mine],
                [c.high for c in mine],
                colour=colour,
            )  # fmt: skip
        )
        rates = [simulated[policy, count].rate for count in users]
        series.append(Series(f"{policy}, simulated", users, rates, style="line", colour=colour, dash=1))
    return line_plot(
        series, title="Simulated and measured", x_label="requests at once", y_label="tokens/s", x_log=True, height=440
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--prompts_file", type=Path, required=True)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--max_prompts", type=int, default=24)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--users", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--keep_profile", action="store_true", help="use the cost_table.json that is there")
    parser.add_argument("--sweep", type=Path, help="cells measured by load_sweep.py")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    sweep = None
    if args.sweep:
        sweep = json.loads(args.sweep.read_text(encoding="utf-8"))
        mean_tokens = int(sweep["facts"]["max_tokens"])
        args.max_tokens, args.max_prompts = max(output_tokens(index, mean_tokens) for index in range(5)), 10**6
    if not args.keep_profile:
        flags = ["--engine_dir", str(args.engine_dir), "--num_threads", str(args.num_threads), "--log_level", "error"]
        if command(["profile", *flags]):
            return 1
    prompts = spread(read_prompts(args.prompts_file), args.max_prompts)
    prompts = [replace(p, domain=f"{p.domain or DEFAULT_DOMAIN}/{index}") for index, p in enumerate(prompts)]
    profile = record(args, prompts)
    policies, users = args.policies.split(","), [int(part) for part in args.users.split(",")]
    session = Session.open(args.engine_dir, num_threads=args.num_threads, speculation="off")
    try:
        if session.cost_table is None:
            raise SystemExit(f"{args.engine_dir} has no cost table of this machine; run without --keep_profile")
        requests = [encode(session, prompt, args) for prompt in prompts]
        if sweep is not None:
            cells = [cell for cell in read_sweep(sweep) if cell.policy in policies and cell.users in users]
            if not cells:
                raise SystemExit(f"{args.sweep} has no cell of --policies {args.policies} at --users {args.users}")
            policies = list(dict.fromkeys(cell.policy for cell in cells))
        else:
            cells = measure(session, requests, policies, users, args.repeats)
        costs = session_costs(session, policies, requests)
    finally:
        session.close()
    arrivals = [
        Arrival(0.0, len(request.prompt_token_ids), args.max_tokens, prompt.domain or "")
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    if sweep is not None:
        loads = sweep_loads(sweep["runs"], arrivals, int(sweep["facts"]["max_tokens"]))
    else:
        loads = [Load(repeat, count, tuple(arrivals)) for repeat in range(args.repeats) for count in users]
    server = load_server(str(args.engine_dir), Overrides())
    simulated = simulate(lambda policy: costs[policy].apply(server), profile, policies, loads)
    result = compare(cells, simulated)
    columns = ("policy", "requests at once", "measured tokens/s (range)", "simulated", "error", "tokens a round: both")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in result["rows"]:
        print(
            f"| {row['policy']} | {row['users']} | {row['measured']} ({row['low']}-{row['high']}) "
            f"| {row['simulated']} | {row['error']:+.1%} "
            f"| {row['measured_accepted_len'] or 1.0:.2f}, {row['simulated_accepted_len']:.2f} |"
        )
    print(
        f"\nlargest error {result['largest_error']:.1%}; of {result['separable_pairs']} pairs whose measured ranges do "
        f"not overlap {len(result['turned_pairs'])} are ranked the other way {result['turned_pairs'] or ''}"
    )
    for policy, found in costs.items():
        print(f"{policy}: {found}")
    if args.output:
        content = {**result, "costs": {policy: asdict(found) for policy, found in costs.items()}}
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    if args.svg:
        args.svg.write_text(plot(cells, simulated))
    return 0


def spread(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """Return at most so many prompts, evenly from the whole file so that every domain is there."""
    if len(prompts) <= most:
        return list(prompts)
    return [prompts[turn * len(prompts) // most] for turn in range(most)]


def encode(session: Session, prompt: Prompt, args: argparse.Namespace) -> Request:
    """Return a greedy request of exactly so many tokens, as load_sweep.py sends them."""
    if session.tokenizer is None:
        raise SystemExit("the engine has no tokenizer")
    ids = encode_prompt(prompt, session.tokenizer, raw=args.raw)
    return Request(str(prompt.index), ids, SamplingParams(max_tokens=args.max_tokens, ignore_eos=True))


def record(args: argparse.Namespace, prompts: Sequence[Prompt]) -> AcceptanceProfile:
    """Record acceptance on the prompts, greedy: every prompt is a domain of its own, whose text a request replays."""
    plain = argparse.Namespace(
        engine_dir=args.engine_dir, num_threads=args.num_threads, acceptance="rejection", temperature=0.0, top_k=0,
        top_p=1.0, seed=None, stop=[], ignore_eos=True, raw=args.raw, min_tokens=0, max_tokens=args.max_tokens,
        kernel_library=None,
    )  # fmt: skip
    bare = [replace(prompt, sampling={}) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        return record_acceptance(plain, bare, Path(folder) / "acceptance.json")


if __name__ == "__main__":
    sys.exit(main())
