"""One run: a server, a policy, acceptance and a load; and the same over many loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.load import LoadPolicy
from trtllm_dspark.simulate.acceptance import AcceptanceProfile
from trtllm_dspark.simulate.cluster import Cluster, ClusterResult
from trtllm_dspark.simulate.faults import Fault
from trtllm_dspark.simulate.load_source import SimulatedMonitor, load_control
from trtllm_dspark.simulate.node import Node
from trtllm_dspark.simulate.pool import BlockPool
from trtllm_dspark.simulate.records import RequestRecord, Summary, summarise
from trtllm_dspark.simulate.replica import Replica
from trtllm_dspark.simulate.router import make_router
from trtllm_dspark.simulate.scaling import Autoscaler
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.speculator import Speculator
from trtllm_dspark.simulate.times import LookupTable
from trtllm_dspark.simulate.traffic import Traffic
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.controller import FixedCalibrator, SpeculationController
from trtllm_dspark.speculation.cost_table import make_monotone

STEADY_FROM = 0.2
"""Share of the time until the last arrival that counts as warming up."""


@dataclass(frozen=True)
class Scenario:
    """Everything but the policy and the load.

    Attributes:
        server: limits and times.
        acceptance: of the server's own drafter.
        others: acceptance of the drafters of `mtpK` policies; one profile for all K.
        seed: of everything drawn.
        replicas: servers from the start.
        router: name of the router.
        faults: what happens to which server.
        autoscaling: as `Autoscaler.parse` reads it, or None.
        nvml: whether servers read their device and adapt to it.
    """

    server: Server
    acceptance: AcceptanceProfile
    others: AcceptanceProfile | None = None
    seed: int = 0
    replicas: int = 1
    router: str = "round_robin"
    faults: tuple[Fault, ...] = ()
    autoscaling: str | None = None
    nvml: bool = False


@dataclass(frozen=True)
class Run:
    """What one run gave.

    Attributes:
        policy: how it drafted.
        load: its load in words.
        users: users of a closed loop, or None.
        summary: figures; of the steady part where the load has one.
        result: everything behind them.
    """

    policy: Policy
    load: str
    users: int | None
    summary: Summary
    result: ClusterResult = field(repr=False)


class Simulator:
    """Run policies and loads of one scenario; blocks are drawn once.

    Raises:
        ConfigError: the profile does not know as many drafts as the server makes, or a fault names no replica.
    """

    def __init__(self, scenario: Scenario) -> None:
        server = scenario.server
        if scenario.acceptance.draft_len < server.max_draft_len:
            raise ConfigError(
                f"acceptance profile '{scenario.acceptance.name}' knows {scenario.acceptance.draft_len} drafts and "
                f"{server.name} makes {server.max_draft_len}; give another profile or fewer drafts"
            )
        for fault in scenario.faults:
            if fault.replica >= scenario.replicas:
                raise ConfigError(f"a fault names replica {fault.replica}; there are {scenario.replicas}, from 0")
        if scenario.replicas < 1:
            raise ConfigError("there must be at least one replica")
        self.scenario = scenario
        self._pools: dict[str, BlockPool] = {}
        self._tables: dict[str, CostTable] = {}

    def run(self, policy: Policy, traffic: Traffic) -> Run:
        """Run one policy under one load.

        Raises:
            ConfigError: the server or the profiles cannot serve the policy.
        """
        scenario = self.scenario
        cluster = Cluster(
            lambda number: self._node(policy, number),
            replicas=scenario.replicas,
            router=make_router(scenario.router),
            faults=scenario.faults,
            autoscaler=None if scenario.autoscaling is None else Autoscaler.parse(scenario.autoscaling),
            sampled=scenario.nvml,
        )
        result = cluster.run(traffic)
        return Run(policy, traffic.name, traffic.users, _steady(result), result)

    def run_turns(self, policy: Policy, loads: Sequence[Traffic]) -> list[list[RequestRecord]]:
        """Run loads one after the other on one session that keeps what it has learned; return the requests of each.

        Users are in its process, as those of `runtime.closed_loop`.
        """
        node = self._node(policy, 0)
        router = make_router(self.scenario.router)
        return [
            Cluster(lambda number: node, replicas=1, router=router, in_process=True).run(load).records for load in loads
        ]

    def _node(self, policy: Policy, number: int) -> Node:
        scenario, server = self.scenario, self.scenario.server
        pool, profile, gamma = self._drafter(policy)
        monitor = SimulatedMonitor()
        controller = SpeculationController(
            policy.speculation,
            max_draft_len=gamma,
            cost_table=self._known_times(policy),
            calibrator=None if profile.calibration is None else FixedCalibrator(profile.calibration),
            load=load_control(monitor, server, gamma),
        )
        speculator = Speculator(controller, pool, full_below=policy.full_below)
        replica = Replica(server, policy, pool, speculator, seed=scenario.seed, number=number)
        return Node(replica, monitor, LoadPolicy() if scenario.nvml else None)

    def _known_times(self, policy: Policy) -> CostTable:
        """Return the times a controller knows: as a session takes them, never falling where they decide."""
        table = self.scenario.server.table_of(policy)
        if not policy.speculation.needs_cost_table:
            return table
        if policy.drafter not in self._tables:
            plain = CostTable(table.verify_us, table.draft_us, table.token_sizes)
            self._tables[policy.drafter] = LookupTable.of(make_monotone(plain))
        return self._tables[policy.drafter]

    def _drafter(self, policy: Policy) -> tuple[BlockPool, AcceptanceProfile, int]:
        """Return blocks, profile and gamma of a policy's drafter."""
        scenario = self.scenario
        if not policy.drafter:
            profile, gamma = scenario.acceptance, scenario.server.max_draft_len
        elif scenario.others is None:
            raise ConfigError(f"policy '{policy.name}' needs the acceptance of its drafter; give --mtp_acceptance")
        else:
            profile, gamma = scenario.others, policy.speculation.draft_len or 1
        name = profile.name if not policy.drafter else policy.drafter
        if name not in self._pools:
            cut = profile.cut(gamma)
            self._pools[name] = BlockPool({domain: cut.blocks(domain, seed=scenario.seed) for domain in cut.domains})
        return self._pools[name], profile, gamma


def _steady(result: ClusterResult) -> Summary:
    """Return the figures of a run, throughput and rounds of the time in which the load was steady."""
    whole = summarise(result.records, result.logs)
    start, end = STEADY_FROM * result.last_arrival_s, result.last_arrival_s
    tokens = decoding = drafts = rounds = steps = 0
    for log in result.logs:
        begin = np.array(log.start_s)
        inside = (begin >= start) & (begin < end)
        count, accepted = np.array(log.num_requests)[inside], np.array(log.accepted)[inside]
        tokens += int(count.sum() + accepted.sum() + np.array(log.first_tokens)[inside].sum())
        decoding += int(count.sum())
        drafts += int(np.array(log.drafts)[inside].sum())
        rounds += int(inside.sum())
        steps += int((count > 0).sum())
    if rounds < 50 or end <= start:
        return whole
    return replace(
        whole,
        seconds=end - start,
        throughput=tokens / (end - start),
        verify_budget=drafts / decoding if decoding else None,
        concurrency=decoding / steps if steps else None,
    )


def check_domains(names: Sequence[str], profile: AcceptanceProfile) -> None:
    """Refuse domains that a profile does not know.

    Raises:
        ConfigError: it does not know one.
    """
    for name in names:
        if name not in profile.domains:
            raise ConfigError(
                f"acceptance profile '{profile.name}' has no domain '{name}'; it knows {', '.join(profile.domains)}"
            )


def parse_domains(text: str | None, profile: AcceptanceProfile) -> Mapping[str, float]:
    """Read `math=0.5,chat=0.5`; None weighs all domains of the profile alike.

    Raises:
        ConfigError: a weight is no number, or a domain is not known.
    """
    if text is None:
        return dict.fromkeys(profile.domains, 1.0)
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, weight = part.strip().partition("=")
        try:
            weights[name] = float(weight) if equals else 1.0
        except ValueError:
            weights[name] = -1.0
        if not 0 < weights[name] < float("inf"):
            raise ConfigError(f"domain weight '{part}' is not known; use NAME=WEIGHT with weights above 0")
    check_domains(list(weights), profile)
    return weights
