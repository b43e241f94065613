"""Simulated against measured throughput of one engine on this machine, by policy and concurrency.

Usage: simulated_vs_measured.py --engine_dir E --prompts_file F.jsonl [--sweep S.json] [--output V.json] [--svg V.svg]

1. profiles the engine (unless --keep_profile), 2. records its acceptance on the prompts and what the runtime costs
beside the passes, 3. measures every policy at every concurrency, interleaved, `--repeats` times, or reads what
load_sweep.py measured (--sweep D/sweep.json, whose prompts and lengths are taken then), 4. simulates the same runs,
5. prints both. Run it on an idle machine; after a sweep with --keep_profile, so that both know the same times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    """One policy at one concurrency: tokens/s of every repeat, or median and interval."""

    policy: str
    users: int
    median: float
    low: float
    high: float

    @staticmethod
    def of(policy: str, users: int, rates: Sequence[float]) -> Cell:
        """Return the cell of repeated rates; of few repeats the interval is their range."""
        return Cell(policy, users, statistics.median(rates), min(rates), max(rates))

    def below(self, other: Cell) -> bool:
        """Whether it is below another beyond doubt: the intervals do not overlap."""
        return self.high < other.low


def measure(
    session: Session, requests: Sequence[Request], policies: Sequence[str], users: Sequence[int], repeats: int
) -> list[Cell]:
    """Return the cells; policies take turns so that a busy moment hits all of them."""
    sessions = {policy: session.sibling(speculation=policy) for policy in policies}
    rates: dict[tuple[str, int], list[float]] = {cell: [] for cell in itertools.product(policies, users)}
    for policy in policies:
        list(run_closed_loop(sessions[policy], requests[: max(users)], batch_size=max(users)))
    for repeat, count in itertools.product(range(repeats), users):
        order = [policies[(repeat + index) % len(policies)] for index in range(len(policies))]
        for policy in order:
            started, tokens = time.perf_counter(), 0
            for output in run_closed_loop(sessions[policy], requests, batch_size=count):
                if output.finished:
                    tokens += output.stats.num_output_tokens
            rates[policy, count].append(tokens / (time.perf_counter() - started))
            print(f"{policy} at {count}: {rates[policy, count][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    return [Cell.of(*cell, values) for cell, values in rates.items()]


def host_costs(session: Session, requests: Sequence[Request]) -> tuple[float, float]:
    """Return microseconds of a round beside its passes, and more for every token, from plain decoding at 1 and at 8."""
    points = []
    for count in (1, min(8, session.limits.max_batch_size)):
        plain = session.sibling(speculation="off")
        for _ in run_closed_loop(plain, requests[:count], batch_size=count):
            pass
        stats = plain.stats
        decoding = stats.acceptance.rounds / max(1, stats.verify_passes)
        points.append((decoding, 1e6 * (stats.round_s - stats.engine_s) / max(1, stats.rounds)))
    (few, low), (many, high) = points
    slope = max(0.0, (high - low) / (many - few)) if many > few else 0.0
    return max(0.0, low - slope * few), slope


def simulate(
    server: Server, profile: AcceptanceProfile, arrivals: Sequence[Arrival], cells: Sequence[Cell], *, grouped: bool
) -> dict[tuple[str, int], float]:
    """Return simulated tokens/s of every cell, each run timed from its first request to its last token.

    Args:
        server: times and limits.
        profile: acceptance.
        arrivals: the requests.
        cells: what to simulate.
        grouped: runs of one domain and max(4, concurrency) prompts, as load_sweep.py has them, and their median; else
            one run of everything.
    """
    simulator = Simulator(Scenario(server, profile, seed=1))
    rates = {}
    for cell in cells:
        loads = _loads(arrivals, cell.users, grouped=grouped)
        runs = simulator.run_turns(Policy.parse(cell.policy), loads)
        rates[cell.policy, cell.users] = statistics.median(
            sum(record.output_tokens for record in run) / max(record.last_token_s or 0.0 for record in run)
            for run in runs
        )
    return rates


def _loads(arrivals: Sequence[Arrival], users: int, *, grouped: bool) -> list[Traffic]:
    process, groups = Process("closed", users), [list(arrivals)]
    if grouped:
        size = max(4, users)
        by_domain = [[a for a in arrivals if a.domain == name] for name in dict.fromkeys(a.domain for a in arrivals)]
        # Domains take turns; the last prompts of a domain that fill no group are left out.
        turns = [[mine[start : start + size] for start in range(0, len(mine) - size + 1, size)] for mine in by_domain]
        groups = [group for turn in itertools.zip_longest(*turns) for group in turn if group]
    return [Traffic(f"{users} users", process, tuple(group)) for group in groups]


def read_sweep(path: Path) -> list[Cell]:
    """Read cells of load_sweep.py: `cells` with speculation, concurrency, tokens_per_s and its interval."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    cells = []
    for entry in raw["cells"]:
        low, high = entry.get("interval") or (entry["low"], entry["high"])
        cells.append(Cell(entry["speculation"], entry["concurrency"], entry["tokens_per_s"], low, high))
    return cells


def compare(cells: Sequence[Cell], simulated: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """Return rows, the largest error, and rankings of separable measured cells that the simulation turns round."""
    rows, turned, pairs = [], [], 0
    for cell in cells:
        rate = simulated[cell.policy, cell.users]
        rows.append({"policy": cell.policy, "users": cell.users, "measured": round(cell.median, 1),
                     "low": round(cell.low, 1), "high": round(cell.high, 1), "simulated": round(rate, 1),
                     "error": round(rate / cell.median - 1, 4)})  # fmt: skip
    for first, second in itertools.permutations(cells, 2):
        if first.users == second.users and first.below(second):
            pairs += 1
            if simulated[first.policy, first.users] >= simulated[second.policy, second.users]:
                turned.append(f"{first.users}: {first.policy} against {second.policy}")
    worst = max(abs(row["error"]) for row in rows)
    return {"rows": rows, "largest_error": worst, "separable_pairs": pairs, "turned_pairs": turned}


def plot(cells: Sequence[Cell], simulated: Mapping[tuple[str, int], float]) -> str:
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
        rates = [simulated[policy, count] for count in users]
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
    if args.sweep:
        facts = json.loads(args.sweep.read_text(encoding="utf-8"))["facts"]
        args.max_tokens, args.max_prompts = int(facts["max_tokens"]), 10**6
    if not args.keep_profile:
        flags = ["--engine_dir", str(args.engine_dir), "--num_threads", str(args.num_threads), "--log_level", "error"]
        if command(["profile", *flags]):
            return 1
    prompts = spread(read_prompts(args.prompts_file), args.max_prompts)
    profile = record(args, prompts)
    session = Session.open(args.engine_dir, num_threads=args.num_threads, speculation="off")
    try:
        requests = [encode(session, prompt, args) for prompt in prompts]
        server = load_server(str(args.engine_dir), Overrides())
        host_us, token_us = host_costs(session, requests)
        server = replace(server, host_us=host_us, host_token_us=token_us)
        policies, users = args.policies.split(","), [int(part) for part in args.users.split(",")]
        if args.sweep:
            cells = [cell for cell in read_sweep(args.sweep) if cell.policy in policies and cell.users in users]
        else:
            cells = measure(session, requests, policies, users, args.repeats)
    finally:
        session.close()
    arrivals = [
        Arrival(0.0, len(request.prompt_token_ids), args.max_tokens, prompt.domain or DEFAULT_DOMAIN)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    simulated = simulate(server, profile, arrivals, cells, grouped=args.sweep is not None)
    result = compare(cells, simulated)
    print("| policy | requests at once | measured tokens/s (range) | simulated | error |\n|---|---|---|---|---|")
    for row in result["rows"]:
        print(
            f"| {row['policy']} | {row['users']} | {row['measured']} ({row['low']}-{row['high']}) "
            f"| {row['simulated']} | {row['error']:+.1%} |"
        )
    print(
        f"\nlargest error {result['largest_error']:.1%}; of {result['separable_pairs']} pairs whose measured ranges do "
        f"not overlap {len(result['turned_pairs'])} are ranked the other way {result['turned_pairs'] or ''}\n"
        f"beside the passes a round takes {host_us:.0f} us and {token_us:.0f} us a token"
    )
    if args.output:
        args.output.write_text(json.dumps({**result, "host_us": host_us, "host_token_us": token_us}, indent=1) + "\n")
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
    """Record acceptance on the prompts, greedy, through the chat template."""
    plain = argparse.Namespace(
        engine_dir=args.engine_dir, num_threads=args.num_threads, acceptance="rejection", temperature=0.0, top_k=0,
        top_p=1.0, seed=None, stop=[], ignore_eos=True, raw=args.raw, min_tokens=0, max_tokens=args.max_tokens,
        kernel_library=None,
    )  # fmt: skip
    bare = [replace(prompt, sampling={}) for prompt in prompts]
    return record_acceptance(plain, bare, args.engine_dir / "acceptance.json")


if __name__ == "__main__":
    sys.exit(main())
