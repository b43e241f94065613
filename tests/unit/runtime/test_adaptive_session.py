"""`adaptive` in a session: what it does without a table, in a bypass, and to the drafter's context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine, collect_outputs, greedy, token_ids
from helpers.virtual_engine import VirtualEngine

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.proposers._features import MAX_PENDING_BYTES
from trtllm_dspark.runtime.proposers.block import BlockProposer
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation import CostTable, LoadLimits
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 17 + index * 5) % 64 for index in range(length)]


def make(engine: VirtualEngine, **options: Any) -> Session:
    return Session(engine, None, speculation="adaptive", cost_table=engine.cost_table(), clock=engine.clock, **options)


class Switch:
    """A load that can forbid drafts."""

    def __init__(self) -> None:
        self.budget: int | None = None

    def limits(self) -> LoadLimits:
        return LoadLimits(verify_budget=self.budget)


def accepted_by_anchor(session: Session, engine: FakeEngine, *, rounds: range, switch: Switch | None) -> dict[int, int]:
    """Run one long request, drafts forbidden in `rounds`; return drafts accepted by the anchor's position."""
    session.add(Request("a", prompt(1, 30), SamplingParams(max_tokens=300)))
    accepted, turn = {}, 0
    while session.has_unfinished():
        if switch is not None:
            switch.budget = 0 if turn in rounds else None
        turn += 1
        position = next((r.num_cached for r in session._slots if r.decoding), None)
        drafts = session.stats.draft_passes
        for output in session.step():
            if position is not None and session.stats.draft_passes > drafts:
                accepted[position] = len(output.new_token_ids) - 1
    return accepted


def test_context_after_plain_rounds_has_no_holes_and_acceptance_is_what_it_would_have_been() -> None:
    """The engine itself refuses to draft on a context that is not the target's cache, token for token."""

    def run(rounds: range) -> tuple[dict[int, int], VirtualEngine]:
        engine, switch = VirtualEngine(max_seq_len=400, max_num_tokens=64, mistake_every=7), Switch()
        session = make(engine, load=switch)
        return accepted_by_anchor(session, engine, rounds=rounds, switch=switch), engine

    never, _ = run(range(0))
    often, engine = run(range(5, 90))
    assert "draft" in engine.passes[engine.passes.index("draft") + 100 :]
    after = [position for position in often if position > 120]
    common = [position for position in after if position in never]
    assert len(common) > 10
    assert [often[position] for position in common] == [never[position] for position in common]
    assert sum(often[p] for p in after) / len(after) > 2


def test_bypass_absorbs_nothing_until_a_probe_needs_it() -> None:
    engine = VirtualEngine(max_seq_len=400, max_num_tokens=200, mistake_every=1, block_us=3000.0)
    session = make(engine)
    session.add(Request("a", prompt(1, 30), SamplingParams(max_tokens=300)))
    outputs = collect_outputs(session)["a"]
    assert token_ids(outputs) == greedy(prompt(1, 30), 300)
    plans = session.stats.plans
    assert plans["bypass"] > 200
    assert 1 <= plans["probe"] <= 12
    absorbs = engine.passes.count("absorb")
    assert absorbs <= 1 + plans["speculate"] + plans["probe"] + 2
    # Never drafting would have taken this long; the prompt's own pass comes on top.
    assert engine.now <= 300 * engine.base_us * 1e-6 / 0.97


def test_bypass_request_that_is_never_drafted_for_is_never_absorbed() -> None:
    engine = VirtualEngine(max_seq_len=400, max_num_tokens=128, mistake_every=1, block_us=20_000.0)
    session = make(engine)
    session.add(Request("a", prompt(1, 30), SamplingParams(max_tokens=40)))
    collect_outputs(session)
    assert session.controller.bypassed
    before = engine.absorbed
    session.add(Request("b", prompt(2, 20), SamplingParams(max_tokens=9)))
    collect_outputs(session)
    assert engine.absorbed == before


def test_bypass_long_prompt_is_absorbed_by_whole_passes_and_drafts_are_right_afterwards() -> None:
    engine = VirtualEngine(max_seq_len=400, max_num_tokens=16, mistake_every=0, max_batch_size=2)
    switch = Switch()
    session = make(engine, load=switch)
    session._controller._adaptive._bypass.active = True  # type: ignore[union-attr]
    switch.budget = 0
    session.add(Request("a", prompt(1, 100), SamplingParams(max_tokens=60)))
    for _ in range(20):
        session.step()
    assert engine.absorbed >= 96
    switch.budget = None
    session._controller._adaptive._bypass.active = False  # type: ignore[union-attr]
    outputs = collect_outputs(session)
    assert session.stats.acceptance.accepted > 10
    assert outputs["a"][-1].finished


def test_request_that_rests_among_others_keeps_no_more_than_a_pass_waiting() -> None:
    engine = VirtualEngine(max_seq_len=400, max_num_tokens=16, mistake_every=0, max_batch_size=2)
    session = make(engine)
    session._controller._adaptive.plan = lambda requests, caps, *rest: (  # type: ignore[method-assign, union-attr]
        "speculate",
        np.where([request.request.request_id == "drafts" for request in requests], caps, 0),
    )
    for name, max_tokens in (("drafts", 200), ("rests", 60)):
        session.add(Request(name, prompt(1, 10), SamplingParams(max_tokens=max_tokens)))
    waiting = []
    while session.has_unfinished():
        session.step()
        for request in session._slots:
            if request.request.request_id == "rests":
                waiting.append(request.num_pending)
                assert all(part.base is None for part in request.features[:-1]), "a pass of others is kept"
    assert session.stats.draft_passes > 100
    assert waiting[1] >= 10, "its prompt was absorbed though nothing was drafted for it"
    assert 10 < max(waiting) <= 16
    assert waiting.index(max(waiting)) < len(waiting) - 10, "it was absorbed"


def two_times(one_token: float, whole_block: float) -> CostTable:
    verify = {VerifyShape(1, 1, 1, 0): one_token, VerifyShape(1, 5, 5, 0): whole_block}
    return CostTable(verify, {DraftShape(1, 0): 9.0})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (two_times(100.0, 100.5), "flat"),
        (two_times(100.0, 50.0), "inverted"),
    ],
)
def test_adaptive_useless_table_decodes_plainly_and_says_so_once(
    caplog: pytest.LogCaptureFixture, table: CostTable, message: str
) -> None:
    engine = FakeEngine()
    session = Session(engine, None, speculation="adaptive", cost_table=table)
    session.add(Request("a", prompt(1, 9), SamplingParams(max_tokens=20)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(1, 9), 20)
    assert "draft" not in engine.passes
    assert "absorb" not in engine.passes
    assert caplog.text.count("decodes plainly") == 1
    assert message in caplog.text


@pytest.mark.parametrize(
    ("engine", "message"),
    [(FakeEngine(has_drafter=False), "needs a drafter"), (FakeEngine(has_confidence=False), "needs a confidence head")],
)
def test_adaptive_engine_that_cannot_speculate_decodes_plainly_and_says_so_once(
    caplog: pytest.LogCaptureFixture, engine: FakeEngine, message: str
) -> None:
    session = Session(engine, None, speculation="adaptive")
    session.add(Request("a", prompt(1, 9), SamplingParams(max_tokens=20)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(1, 9), 20)
    assert caplog.text.count("decodes plainly") == 1
    assert message in caplog.text
    with pytest.raises(ConfigError, match=message):
        Session(engine, None, speculation="threshold")


def test_load_that_closes_admission_keeps_requests_waiting() -> None:
    class Closed:
        admit = False

        def limits(self) -> LoadLimits:
            return LoadLimits(admit=self.admit, max_requests=1)

    load = Closed()
    session = make(VirtualEngine(), load=load)
    for name in "ab":
        session.add(Request(name, prompt(1, 4), SamplingParams(max_tokens=5)))
    session.step()
    assert (session.num_running, session.num_waiting) == (0, 2)
    load.admit = True
    session.step()
    assert (session.num_running, session.num_waiting) == (1, 1)
    assert len(collect_outputs(session)) == 2


def test_early_stop_level_stretch_near_the_end_is_no_flat_table(caplog: pytest.LogCaptureFixture) -> None:
    """The last drafts of a request may lie on one step of a rising staircase."""
    steps = {1: 100.0, 2: 100.0, 3: 150.0, 4: 150.0, 5: 200.0}
    table = CostTable({VerifyShape(1, k, k, 0): us for k, us in steps.items()}, {DraftShape(1, 0): 5.0})
    session = Session(FakeEngine(max_batch_size=1), None, speculation="early_stop", cost_table=table)
    session.add(Request("a", prompt(1, 9), SamplingParams(max_tokens=20)))
    collect_outputs(session)
    assert "flat" not in caplog.text


def test_virtual_session_times_are_predicted() -> None:
    engine = VirtualEngine(max_seq_len=400, mistake_every=5)
    session = make(engine)
    session.add(Request("a", prompt(1, 20), SamplingParams(max_tokens=120)))
    collect_outputs(session)
    state = session.controller.state
    assert state.predicted_us == pytest.approx(state.measured_us, rel=0.1)
    assert state.correction.base == pytest.approx(1.0, abs=0.05)


def test_prompts_are_no_part_of_what_a_draft_is_measured_to_take() -> None:
    engine = VirtualEngine(max_seq_len=400, mistake_every=0, absorb_us=400.0)
    session = make(engine)
    seen: list[float] = []
    learn = session._controller.observe

    def observe(outcome: Any) -> None:
        if outcome.draft_us is not None:
            seen.append(outcome.draft_us)
        learn(outcome)

    session._controller.observe = observe  # type: ignore[method-assign]
    for number in range(3):
        session.add(Request(str(number), prompt(number, 90), SamplingParams(max_tokens=12)))
        collect_outputs(session)
    assert len(seen) > 3
    # A round leaves at most a block and its anchor to absorb; a prompt would take 36 ms.
    assert max(seen) <= engine.block_us + engine.absorb_us * (engine.gamma + 1) + 1e-6
    assert engine.absorbed > 3 * 90


def test_what_gathered_for_a_resting_request_is_no_part_of_what_a_draft_is_measured_to_take() -> None:
    engine = VirtualEngine(max_seq_len=400, mistake_every=0, absorb_us=400.0)
    session = make(engine)
    plan, observe = session._controller.plan, session._controller.observe
    seen: list[tuple[float, int]] = []
    before = 0

    def rest(requests: Any, **options: Any) -> Any:
        """Let the second request rest whenever the first one drafts."""
        nonlocal before
        before = engine.absorbed
        found = plan(requests, **options)
        caps = found.caps.copy()
        caps[1:] *= not found.caps[:1].any()
        return found._replace(caps=caps)

    def watch(outcome: Any) -> None:
        if outcome.draft_us is not None and len(outcome.accepted) == 2:
            seen.append((outcome.draft_us, engine.absorbed - before))
        observe(outcome)

    session._controller.plan = rest  # type: ignore[method-assign]
    session._controller.observe = watch  # type: ignore[method-assign]
    for number in range(2):
        session.add(Request(str(number), prompt(number, 4), SamplingParams(max_tokens=300 - 150 * number)))
    collect_outputs(session)
    # What gathered was absorbed in one of these rounds, 32 tokens of it, beside what the drafting request's round left.
    assert max(absorbed for _, absorbed in seen) >= 32
    assert max(draft_us for draft_us, _ in seen) <= engine.block_us + engine.absorb_us * (engine.gamma + 1) + 1e-6


def test_what_a_session_does_beside_the_passes_of_rounds_with_drafts_is_charged_to_them() -> None:
    engine = VirtualEngine(max_seq_len=400, mistake_every=3)
    session = make(engine)
    controller = session._controller
    choose = controller.verify_lens

    def slow(*args: Any, **options: Any) -> Any:
        engine.now += 700e-6
        return choose(*args, **options)

    controller.verify_lens = slow  # type: ignore[method-assign]
    session.add(Request("a", prompt(1, 20), SamplingParams(max_tokens=300)))
    collect_outputs(session)
    assert session.stats.plans["measure"] >= 1
    costs = controller._costs
    assert costs is not None
    for _ in range(8):
        costs.observe_beside(False, 0.0)
    assert costs.beside_us == controller.state.beside_us == pytest.approx(700.0, rel=1e-6)


def test_features_that_wait_in_a_bypass_are_bounded_and_hold_no_pass() -> None:
    most_pending, size = 500, MAX_PENDING_BYTES // (4 * 500)
    absorbed: list[list[int]] = []
    engine = SimpleNamespace(
        limits=SimpleNamespace(max_num_tokens=4096, feature_size=size),
        absorb=lambda batch: absorbed.append(batch.row_lens.tolist()),
    )
    proposer = BlockProposer(engine, "rejection", PassTimer(SessionStats(4)))  # type: ignore[arg-type]
    requests: Any = [SimpleNamespace(features=[], num_pending=0, num_context=0, slot=slot) for slot in range(2)]
    most = 0
    for _ in range(400):
        whole = np.zeros((4, 2), np.float32)
        for request, rows in zip(requests, (whole[:3], whole[3:]), strict=True):
            request.features.append(rows)
            request.num_pending += len(rows)
        proposer.catch_up(requests, lazy=True)
        for request in requests:
            assert all(part.base is None for part in request.features)
            request.num_pending = sum(map(len, request.features))
        most = max(most, sum(request.num_pending for request in requests))
    assert most_pending - 4 <= most <= most_pending
    # The one that has more waiting makes room, the other goes on waiting.
    assert absorbed[0] == [3 * (most_pending // 4 + 1)]
    assert sum(map(sum, absorbed)) + sum(request.num_pending for request in requests) == 1600
