"""A session and a simulated server ask the controller for the same things in the same situation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import DOUBTFUL, SURE, FakeEngine
from helpers.virtual_engine import VirtualEngine

from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.simulate.acceptance import from_recorded
from trtllm_dspark.simulate.blocks import Blocks
from trtllm_dspark.simulate.pool import BlockPool
from trtllm_dspark.simulate.records import RequestRecord
from trtllm_dspark.simulate.replica import Replica
from trtllm_dspark.simulate.scenario import Scenario, Simulator
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.speculator import Speculator
from trtllm_dspark.simulate.times import LookupTable
from trtllm_dspark.simulate.traffic import Arrival, Process, Traffic
from trtllm_dspark.speculation import SpeculationConfig
from trtllm_dspark.speculation.controller import LoadLimits, RoundOutcome, RoundPlan, SpeculationController

PROMPTS = (3, 30, 9, 14, 5, 21, 2, 11)
OUTPUTS = (40, 12, 25, 33, 1, 18, 30, 2)
GAMMA = 4


class Load:
    """A load that leaves so many drafts a round and so many requests, less of both from the tenth round on."""

    def __init__(self, drafts: int | None) -> None:
        self.drafts, self.round = drafts, 0

    def limits(self) -> LoadLimits:
        self.round += 1
        if self.drafts is None:
            return LoadLimits()
        late = self.round >= 10
        return LoadLimits(
            verify_budget=self.drafts - 2 * late, max_requests=2 if late else None, admit=self.round != 14
        )


class Asked(list[Any]):
    """What a controller is asked: by round the requests in row order, their caps, the budget and the depth."""

    def spy(self, controller: SpeculationController, name: Any) -> dict[Any, list[int]]:
        """Note every question; return, filled as rounds end, the drafts accepted of every request by drafting round."""
        accepted: dict[Any, list[int]] = {}
        plan, observe = controller.plan, controller.observe

        def noted(requests: Sequence[Hashable], *, caps: Any, token_budget: int, depth: int) -> RoundPlan:
            if len(requests):
                self.append(([name(request) for request in requests], caps.tolist(), token_budget, depth))
            return plan(requests, caps=caps, token_budget=token_budget, depth=depth)

        def learned(outcome: RoundOutcome) -> None:
            if outcome.plan.drafts:
                for request, count in zip(outcome.requests, outcome.accepted.tolist(), strict=True):
                    accepted.setdefault(name(request), []).append(count)
            observe(outcome)

        controller.plan, controller.observe = noted, learned  # type: ignore[method-assign]
        return accepted


class Replayed(BlockPool):
    """Blocks of one request a domain, met from the first on."""

    def place(self, domain: str, generator: np.random.Generator) -> int:
        return self._range[domain][0]


@pytest.mark.parametrize("drafts", [None, 7])
@pytest.mark.parametrize("max_num_tokens", [12, 17, 64])
@pytest.mark.parametrize("speculation", ["fixed:3", "threshold:0.3", "off"])
def test_the_controller_is_asked_the_same(
    server: Server, speculation: str, max_num_tokens: int, drafts: int | None
) -> None:
    engine = FakeEngine(max_num_tokens=max_num_tokens)
    session = Session(engine, None, speculation=speculation, load=Load(drafts))
    by_session, by_server = Asked(), Asked()
    accepted = by_session.spy(session.controller, lambda request: int(request.request.request_id))
    for index, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        session.add(Request(str(index), [3 + (index + step) % 50 for step in range(prompt)], params))
    while session.has_unfinished():
        session.step()

    blocks = {
        str(index): Blocks(np.full((len(counts), 4), 0.9, np.float32), np.array(counts, np.int64))
        for index in range(len(PROMPTS))
        for counts in [accepted.get(index, [0])]
    }
    server = replace(server, max_batch_size=4, max_seq_len=96, max_num_tokens=max_num_tokens, max_draft_len=4)
    controller = SpeculationController(SpeculationConfig.parse(speculation), max_draft_len=4, load=Load(drafts))
    by_server.spy(controller, lambda request: request)
    pool = Replayed(blocks)
    replica = Replica(server, Policy.parse(speculation), pool, Speculator(controller, pool), seed=0)
    for index, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        replica.submit(Arrival(0.0, prompt, output, str(index)), RequestRecord(index, str(index), 0.0, prompt), 0.0)
    now, ended = 0.0, 0
    while ended < len(PROMPTS):
        seconds = replica.start(now)
        assert seconds is not None or drafts is not None
        now += seconds or 1.0
        ended += len(replica.finish(now))

    assert by_server == by_session
    assert len(by_session) >= 20
    if drafts is not None or max_num_tokens < 64:
        # Somewhere the budget binds: not all drafts fit.
        assert any(min(budget, drafts or budget) < 3 * len(caps) for _, caps, budget, _ in by_session)


def blocks_by_token(prompt: int, output: int, mistake_every: int) -> Blocks:
    """Return a block for every token of a text of the fake engine, whose drafter is wrong where it says it doubts."""
    positions = np.arange(prompt, prompt + output)
    accepted = np.minimum((-(positions + 1)) % mistake_every, GAMMA)
    steps = np.arange(GAMMA)
    logits = np.where(steps == accepted[:, None], DOUBTFUL, SURE)
    # Behind a mistake the drafter knows the target's rule again, and is right about a text that is not this one.
    return Blocks((1 / (1 + np.exp(-logits))).astype(np.float32), accepted.astype(np.int64), (0,))


@pytest.mark.parametrize("users", [1, 2, 4])
@pytest.mark.parametrize("speculation", ["off", "fixed:1", "fixed:4", "threshold:0.5", "early_stop", "adaptive"])
def test_throughput_is_a_sessions(speculation: str, users: int) -> None:
    """The same requests on the same clock: what the simulation leaves out is less than 3 % of the time."""
    prompts, output, gamma = [5, 40, 17, 30, 8, 25], 60, GAMMA
    engine = VirtualEngine(max_seq_len=160, max_num_tokens=48, mistake_every=4, absorb_us=20.0)
    table = engine.cost_table()
    session = Session(engine, None, speculation=speculation, cost_table=table, clock=engine.clock)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    requests = [
        Request(str(index), [3 + (index + step) % 50 for step in range(prompt)], params)
        for index, prompt in enumerate(prompts)
    ]
    for _ in run_closed_loop(session, requests, batch_size=users):
        pass
    measured = len(prompts) * output / engine.now

    domains = {str(index): blocks_by_token(prompt, output + 8, 4) for index, prompt in enumerate(prompts)}
    profile = from_recorded("fake", "by hand", domains)
    server = Server(
        "test", LookupTable.of(table), False, 4, 160, 48, gamma,
        prefill_us=(engine.base_us - engine.per_token_us, engine.per_token_us), absorb_us=engine.absorb_us,
    )  # fmt: skip
    arrivals = tuple(Arrival(0.0, prompt, output, str(index)) for index, prompt in enumerate(prompts))
    load = Traffic("test", Process("closed", users), arrivals)
    simulator = Simulator(Scenario(server, profile))
    (records,) = simulator.run_turns(Policy.parse(speculation), [load])
    simulated = len(prompts) * output / max(record.last_token_s or 0.0 for record in records)
    assert simulated == pytest.approx(measured, rel=0.03)
