"""Simulated against measured throughput of one engine on this machine, by policy and concurrency.

Usage: simulated_vs_measured.py --engine_dir E --prompts_file F.jsonl [--sweep S.json] [--output V.json] [--svg V.svg]

1. profiles the engine (unless --keep_profile): by this table the sessions decide. 2. records on the prompts which
drafts the target accepts. 3. measures every policy at every concurrency `--repeats` times as load_sweep.py does:
policies take turns of a quarter of a second, on prompts of all domains, others in each repeat. Before, between and
after the repeats it times the passes anew, and what a session takes beside them and for prompts (simulation_costs.py):
a machine may drift by a factor within the hour. 4. simulates the very same runs, prompt by prompt, with the means of
these times. The simulated controller knows the mean table too, where the real one corrects the older one by what it
observes. 5. prints both.

With --sweep D/sweep.json the runs are those that load_sweep.py has measured, and the times beside the passes are taken
once: right after the sweep. With --keep_profile the table is the directory's, from before the sweep; with
--measure_again as well, the mean of that and of one measured now. Run either on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from load_sweep import Policy as Turns
from load_sweep import make_policies, num_prompts, output_tokens, run_in_turns
from simulation_costs import PROMPT_GROUPS, SessionCosts, session_costs

from trtllm_dspark.cli._acceptance_output import DEFAULT_DOMAIN, record_acceptance
from trtllm_dspark.cli._prompts import Prompt, encode_prompt, read_prompts
from trtllm_dspark.cli.main import main as command
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.reports.svg import COLOURS, Series, line_plot
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.proposers import own_proposer
from trtllm_dspark.runtime.scheduling import load_cost_table
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.simulate.acceptance import AcceptanceProfile
from trtllm_dspark.simulate.scenario import Scenario, Simulator
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.server_file import Overrides, load_server
from trtllm_dspark.simulate.times import LookupTable
from trtllm_dspark.simulate.traffic import Arrival, Process, Traffic
from trtllm_dspark.speculation import CostTable, measure_cost_table
from trtllm_dspark.speculation.cost_table import make_monotone

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


@dataclass(frozen=True)
class Load:
    """One run of a session: requests of `users` at once, and the repeat it counts for."""

    repeat: int
    users: int
    arrivals: tuple[Arrival, ...]
    domain: str = ""


class Times:
    """What a simulation needs of the machine, measured whenever it is asked for.

    Args:
        measuring: a policy whose engine nobody uses meanwhile.
        policies: to time sessions under.
        requests: prompts to time, others each time.
    """

    def __init__(self, measuring: Turns, policies: Sequence[str], requests: Sequence[Request]) -> None:
        self._measuring, self._policies, self._requests = measuring, policies, list(requests)
        self._tables: list[CostTable] = []
        self._costs: list[dict[str, SessionCosts]] = []

    def measure(self, *, passes: bool = True) -> None:
        """Time sessions once more, and the passes, as `profile` does."""
        absorbing = self._measuring.absorbing
        with phase("times of a session"):
            costs = session_costs(self._measuring.session, absorbing, self._policies, self._requests)
        self._costs.append(costs)
        used = sum(PROMPT_GROUPS) % len(self._requests)
        self._requests = self._requests[used:] + self._requests[:used]
        if not passes:
            return
        with phase("times of passes"):
            table = measure_cost_table(absorbing.engine)
        make = own_proposer(absorbing.engine.limits)
        if make is not None:
            table = make(absorbing.engine, "rejection", PassTimer(SessionStats(0))).costs(table)
        self._tables.append(make_monotone(table))

    def know(self, table: CostTable) -> None:
        """Let a table from before count as one of those measured here."""
        self._tables.append(table)

    def costs(self) -> dict[str, SessionCosts]:
        """Return the means by policy."""
        return {policy: SessionCosts.mean([found[policy] for found in self._costs]) for policy in self._policies}

    def table(self) -> CostTable:
        """Return the means by shape."""
        first, tables = self._tables[0], self._tables
        if any(set(table.verify_us) != set(first.verify_us) for table in tables):
            raise SystemExit("the engine's cost table has other shapes than a full one; run trtllm-dspark profile")
        verify = {shape: statistics.mean(table.verify_us[shape] for table in tables) for shape in first.verify_us}
        draft = {shape: statistics.mean(table.draft_us[shape] for table in tables) for shape in first.draft_us}
        return CostTable(verify, draft, first.token_sizes)


def measure(
    policies: Sequence[Turns], requests: Sequence[Request], loads: Sequence[Load], max_tokens: int, times: Times
) -> list[Cell]:
    """Return the cells of the loads, whose arrivals are those of requests; policies take turns.

    Args:
        policies: sessions, each with slots of its own.
        requests: prompts by the number behind the slash of an arrival's domain.
        loads: by repeat.
        max_tokens: of a request on average.
        times: measured before, between and after the repeats.
    """
    for policy in policies:
        run_in_turns([policy], [requests[0].prompt_token_ids], 1, 8)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {
        (policy.name, load.users): [] for policy in policies for load in loads
    }
    times.measure()
    for repeat, group in itertools.groupby(loads, key=lambda load: load.repeat):
        for turn, load in enumerate(group):
            order = [policies[(repeat + turn + index) % len(policies)] for index in range(len(policies))]
            prompts = [requests[_number(arrival)].prompt_token_ids for arrival in load.arrivals]
            with phase(f"repeat {repeat + 1}, {load.users} at once"):
                results = run_in_turns(order, prompts, load.users, max_tokens)
            for policy, result in zip(order, results, strict=True):
                found[policy.name, load.users].append(result)
        times.measure()
    return [_cell(*place, results) for place, results in found.items()]


def _cell(policy: str, users: int, results: Sequence[Mapping[str, Any]]) -> Cell:
    total = {name: sum(result[name] for result in results) for name in ("emitted", "verify_rounds", "rounds")}
    round_ms = sum(result["round_ms"] * result["rounds"] for result in results) / total["rounds"]
    accepted_len = total["emitted"] / total["verify_rounds"] if total["verify_rounds"] else None
    return Cell.of(
        policy, users, [result["whole_tokens"] / result["whole_seconds"] for result in results], accepted_len, round_ms
    )


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Print how long something takes."""
    started = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


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
        loads.append(drawn(by_domain[domain], repeat, users, max_tokens, domain))
    return loads


def mixed_loads(prompts: Sequence[Arrival], users: Sequence[int], repeats: int, max_tokens: int) -> list[Load]:
    """Return loads of all domains in turn, other prompts in each repeat."""
    by_domain: dict[str, list[Arrival]] = {}
    for arrival in prompts:
        by_domain.setdefault(arrival.domain.rpartition("/")[0], []).append(arrival)
    mixed = [entry for row in itertools.zip_longest(*by_domain.values()) for entry in row if entry is not None]
    return [drawn(mixed, repeat, count, max_tokens) for repeat in range(repeats) for count in users]


def drawn(prompts: Sequence[Arrival], repeat: int, users: int, max_tokens: int, domain: str = "") -> Load:
    """Return the prompts and lengths that load_sweep.py takes in one repeat of a cell."""
    size = num_prompts(users)
    chosen = tuple(
        replace(prompts[(repeat * size + index) % len(prompts)], output_tokens=output_tokens(index, max_tokens))
        for index in range(size)
    )
    return Load(repeat, users, chosen, domain)


def _number(arrival: Arrival) -> int:
    """Return which prompt it is: main() makes each a domain of its own."""
    return int(arrival.domain.rpartition("/")[2])


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
    """Return rows, the largest error, and rankings of separable measured cells that the simulation turns round.

    A row has the errors of the rate and of its ratio to `off` at the same users, None where that was not measured.
    """
    rows, turned, pairs = [], [], 0
    for cell in cells:
        found = simulated[cell.policy, cell.users]
        plain = next((other for other in cells if (other.policy, other.users) == ("off", cell.users)), None)
        over_off = None
        if plain is not None:
            over_off = found.rate / simulated["off", cell.users].rate * plain.median / cell.median - 1
        rows.append({"policy": cell.policy, "users": cell.users, "measured": round(cell.median, 1),
                     "low": round(cell.low, 1), "high": round(cell.high, 1), "simulated": round(found.rate, 1),
                     "error": round(found.rate / cell.median - 1, 4),
                     "error_over_off": None if over_off is None else round(over_off, 4),
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
    parser.add_argument("--max_tokens", type=int, default=40, help="of a request on average")
    parser.add_argument("--max_prompts", type=int, default=48, help="all that two repeats at eight take")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--users", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--keep_profile", action="store_true", help="use the cost_table.json that is there")
    parser.add_argument("--sweep", type=Path, help="cells measured by load_sweep.py")
    parser.add_argument("--measure_again", action="store_true", help="with --sweep: average the table with a new one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    sweep, cells = None, list[Cell]()
    policies, mean_tokens = args.policies.split(","), args.max_tokens
    users = [int(part) for part in args.users.split(",")]
    if args.sweep:
        sweep = json.loads(args.sweep.read_text(encoding="utf-8"))
        mean_tokens, args.max_prompts = int(sweep["facts"]["max_tokens"]), 10**6
        cells = [cell for cell in read_sweep(sweep) if cell.policy in policies and cell.users in users]
        if not cells:
            raise SystemExit(f"{args.sweep} has no cell of --policies {args.policies} at --users {args.users}")
        policies = list(dict.fromkeys(cell.policy for cell in cells))
    args.max_tokens = max(output_tokens(index, mean_tokens) for index in range(5))
    if not args.keep_profile:
        flags = ["--engine_dir", str(args.engine_dir), "--num_threads", str(args.num_threads), "--log_level", "error"]
        with phase("profile"):
            if command(["profile", *flags]):
                return 1
    prompts = spread(read_prompts(args.prompts_file), args.max_prompts)
    prompts = [replace(p, domain=f"{p.domain or DEFAULT_DOMAIN}/{index}") for index, p in enumerate(prompts)]
    with phase("acceptance"):
        profile = record(args, prompts)
    args.uncalibrated, args.concurrency = "", args.users
    # The first one is for measuring times, on slots of its own.
    opened = open_policies(args, ["off"] if sweep is not None else ["off", *policies])
    try:
        measuring = opened[0]
        directory, engine = open_engine_dir(args.engine_dir, verify_hashes=False), measuring.absorbing.engine
        known = load_cost_table(directory, engine, num_threads=args.num_threads)
        if known is None:
            raise SystemExit(f"{args.engine_dir} has no cost table of this machine; run without --keep_profile")
        requests = [encode(measuring.session, prompt, args) for prompt in prompts]
        arrivals = [
            Arrival(0.0, len(request.prompt_token_ids), args.max_tokens, prompt.domain or "")
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        times = Times(measuring, policies, requests)
        if sweep is not None:
            loads = sweep_loads(sweep["runs"], arrivals, mean_tokens)
            times.know(known)
            times.measure(passes=args.measure_again)
        else:
            loads = mixed_loads(arrivals, users, args.repeats, mean_tokens)
            cells = measure(opened[1:], requests, loads, mean_tokens, times)
    finally:
        for policy in opened:
            policy.session.close()
    costs, table = times.costs(), times.table()
    server = replace(load_server(str(args.engine_dir), Overrides()), table=LookupTable.of(table))
    with phase("simulation"):
        simulated = simulate(lambda policy: costs[policy].apply(server), profile, policies, loads)
    result = compare(cells, simulated)
    columns = ("policy", "requests at once", "measured tokens/s (range)", "simulated", "error",
               "error of the rate over `off`", "tokens a round: both")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in result["rows"]:
        over_off = "" if row["error_over_off"] is None else f"{row['error_over_off']:+.1%}"
        print(
            f"| {row['policy']} | {row['users']} | {row['measured']} ({row['low']}-{row['high']}) "
            f"| {row['simulated']} | {row['error']:+.1%} | {over_off} "
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


def open_policies(args: argparse.Namespace, names: Sequence[str]) -> list[Turns]:
    """Return sessions under these policies, each with slots of its own on one engine."""
    return make_policies(argparse.Namespace(**{**vars(args), "policies": ",".join(names)}))


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
