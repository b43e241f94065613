"""A session and a simulated server ask the controller for the same things in the same situation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine

from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.simulate.blocks import Blocks
from trtllm_dspark.simulate.pool import BlockPool
from trtllm_dspark.simulate.records import RequestRecord
from trtllm_dspark.simulate.replica import Replica
from trtllm_dspark.simulate.server import Policy, Server
from trtllm_dspark.simulate.speculator import Speculator
from trtllm_dspark.simulate.traffic import Arrival
from trtllm_dspark.speculation import SpeculationConfig
from trtllm_dspark.speculation.controller import LoadLimits, RoundOutcome, RoundPlan, SpeculationController

PROMPTS = (3, 30, 9, 14, 5, 21, 2, 11)
OUTPUTS = (40, 12, 25, 33, 1, 18, 30, 2)
SURE = 0.9


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
        str(index): Blocks(np.full((len(counts), 4), SURE, np.float32), np.array(counts, np.int64))
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
