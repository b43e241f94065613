"""The controller in virtual time: what it decides, how fast it follows, and that it never costs anybody much."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
from helpers.virtual_rounds import GAMMA, Cost, Stream, VirtualLoop, plain_rate, roofline, table_of

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import CostTable, LoadLimits, RoundOutcome, SpeculationConfig, SpeculationController
from trtllm_dspark.speculation.bypass import MAX_PROBE_PERIOD, PATIENCE
from trtllm_dspark.speculation.drift import BASE_BOUND, DRAFT_BOUND

TABLE = table_of(roofline)


def controller(mode: str = "adaptive", table: CostTable | None = TABLE, **options: object) -> SpeculationController:
    return SpeculationController(SpeculationConfig.parse(mode), max_draft_len=GAMMA, cost_table=table, **options)  # type: ignore[arg-type]


def loop(table: CostTable = TABLE, cost: object = roofline, **options: object) -> VirtualLoop:
    return VirtualLoop(controller(table=table), cost, table, **options)  # type: ignore[arg-type]


def streams(count: int, chance: float, **options: object) -> list[Stream]:
    return [Stream(f"s{index}", chance, **options) for index in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("chance", [0.02, 0.4, 0.9])
@pytest.mark.parametrize("claimed", [None, 0.98, 0.05])
def test_adaptive_is_never_much_slower_than_plain_decoding(count: int, chance: float, claimed: float | None) -> None:
    """Whatever the drafter accepts and whatever its confidence head says about it."""
    run = loop(noise=0.1)
    run.run(streams(count, chance, claimed=claimed), 600)
    assert run.rate >= 0.97 * plain_rate(roofline, count)


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("chance", [0.3, 0.85])
def test_adaptive_is_as_fast_as_the_best_fixed_length(count: int, chance: float) -> None:
    rates = []
    for length in (1, 2, 3, 5, 7):
        fixed = VirtualLoop(controller(f"fixed:{length}"), roofline, TABLE)
        fixed.run(streams(count, chance), 300)
        rates.append(fixed.rate)
    run = loop()
    run.run(streams(count, chance), 300)
    assert run.rate >= 0.97 * max(*rates, plain_rate(roofline, count))


def test_bypass_begins_after_patience_and_stops_drafting() -> None:
    run = loop()
    run.run(streams(1, 0.02), 400)
    first = run.reasons.index("bypass")
    assert PATIENCE <= first <= PATIENCE + 4
    late = run.reasons[first:]
    assert set(late) == {"bypass", "probe"}
    assert late.count("probe") <= 400 * 0.05
    assert all(not plan.drafts for plan in run.plans if plan.reason == "bypass")
    assert run.controller.state.bypassed


def test_bypass_gain_near_the_margin_does_not_flap() -> None:
    """Between the two margins the state is kept, whichever it is."""
    run = loop(noise=0.05)
    run.run(streams(1, 0.11), 1200)
    bypassed = [reason != "speculate" for reason in run.reasons]
    changes = sum(a != b for a, b in zip(bypassed, bypassed[1:], strict=False))
    assert changes <= 4


def test_bypass_ends_when_a_probe_finds_drafts_accepted_again() -> None:
    run = loop()
    run.run(streams(1, 0.02), 300)
    assert run.controller.bypassed
    run.run(streams(1, 0.9), MAX_PROBE_PERIOD + 10)
    assert not run.controller.bypassed
    assert run.mean_verify_len(-5, None) > 3  # type: ignore[arg-type]


def test_bypass_new_request_is_probed_soon() -> None:
    run = loop()
    run.run(streams(1, 0.02), 300)
    run.controller.forget("s0")
    run.run([Stream("other", 0.9)], 25)
    assert not run.controller.bypassed


def test_probe_drafts_for_one_request_at_a_time_and_tests_a_draft() -> None:
    run = loop()
    run.run(streams(4, 0.02), 600)
    probes = [index for index, reason in enumerate(run.reasons) if reason == "probe"]
    assert probes
    probed = [np.flatnonzero(run.plans[index].caps).tolist() for index in probes]
    assert all(len(rows) == 1 for rows in probed)
    assert len({rows[0] for rows in probed}) > 1
    assert all(sum(run.verify_lens[index].values()) >= 1 for index in probes)


def test_load_step_moves_the_verify_length_within_ten_rounds_without_oscillation() -> None:
    run = loop()
    one, eight = streams(1, 0.85), streams(8, 0.85)
    run.run(one, 60)
    alone, accepted = run.mean_verify_len(30, 60), run.mean_accepted(20, 60, "s0")
    run.run(eight, 60)
    crowded = run.mean_verify_len(90, 120)
    assert crowded < 0.7 * alone
    settled = [run.mean_verify_len(index, index + 1) for index in range(70, 120)]
    assert abs(run.mean_verify_len(70, 80) - crowded) < 0.15 * alone
    assert np.std(settled) < 0.1 * alone
    for stream in eight[1:]:
        run.controller.forget(stream.name)
    run.run(one, 60)
    assert abs(run.mean_verify_len(120, 130) - alone) < 0.15 * alone
    assert abs(run.mean_accepted(130, 170, "s0") - accepted) < 0.25 * accepted
    assert set(run.reasons) == {"speculate", "measure"}


def test_load_step_into_a_bypass_comes_back_within_ten_rounds() -> None:
    run = loop(table_of(roofline, draft_us=2500.0))
    run.run(streams(1, 0.6), 40)
    run.run(streams(8, 0.6), 60)
    assert run.controller.bypassed
    for stream in streams(8, 0.6)[1:]:
        run.controller.forget(stream.name)
    run.run(streams(1, 0.6), 10)
    assert not run.controller.bypassed


def linear(num_requests: int, num_tokens: int) -> float:
    """Return the time of passes in which every draft costs something."""
    return 10_000.0 + 500.0 * (num_tokens - num_requests)


@functools.cache
def length_among(cost: Cost, mates: int, chance: float, claimed: float | None, cap: int) -> float:
    """Return the mean verify length of a request whose drafts are accepted with 0.7, among mates of one kind.

    A draft pass is cheap enough that one request alone pays for it.
    """
    run = loop(table_of(cost, draft_us=90.0), cost)
    others = [Stream(f"mate{index}", chance, claimed, cap) for index in range(mates)]
    run.run([Stream("mine", 0.7), *others], 400)
    return float(np.mean([lengths["mine"] for lengths in run.verify_lens[50:]]))


@pytest.mark.parametrize(("cost", "mates"), [(linear, 1), (linear, 7), (roofline, 7)])
@pytest.mark.parametrize(
    ("chance", "claimed", "cap"),
    [
        pytest.param(0.05, None, GAMMA, id="accepts_little"),
        pytest.param(0.05, 0.9, GAMMA, id="claims_too_much"),
        pytest.param(0.9, 0.05, GAMMA, id="claims_too_little"),
        pytest.param(1.0, None, GAMMA, id="accepts_all"),
        pytest.param(0.5, 0.6, GAMMA, id="other_text"),
        pytest.param(0.6, None, 1, id="asks_for_one"),
        pytest.param(0.7, None, 0, id="speculation_off"),
    ],
)
def test_text_and_options_of_one_tenant_do_not_move_the_budget_of_another(
    cost: Cost, mates: int, chance: float, claimed: float | None, cap: int
) -> None:
    """Mates that accept more, less, are promised too much or ask for less leave its verify lengths as they were."""
    alike = length_among(cost, mates, 0.7, None, GAMMA)
    assert alike > 0.8
    assert length_among(cost, mates, chance, claimed, cap) == pytest.approx(alike, rel=0.1, abs=0.15)


@pytest.mark.parametrize(("draft_us", "drafts"), [(90.0, True), (900.0, False)])
def test_who_drafts_pays_for_the_pass_that_all_wait_for(draft_us: float, drafts: bool) -> None:
    """Seven of eight do not speculate: the one that would has to gain more than the whole pass takes."""
    table = table_of(linear, draft_us=draft_us)
    run = loop(table, linear)
    run.run([Stream("mine", 0.7), *(Stream(f"mate{index}", 0.5, cap=0) for index in range(7))], 400)
    assert (run.reasons[50:].count("speculate") > 300) is drafts
    assert run.controller.bypassed is not drafts
    assert run.rate > 0.97 * plain_rate(linear, 8)


def test_who_was_held_back_drafts_again_when_its_text_changes() -> None:
    run = loop(table_of(linear, draft_us=900.0), linear)
    mates = [Stream(f"mate{index}", 0.5, cap=0) for index in range(7)]
    run.run([Stream("mine", 0.7), *mates], 200)
    assert run.controller.bypassed
    run.run([Stream("mine", 0.98), *mates], 400)
    assert not run.controller.bypassed
    assert run.reasons[-50:].count("speculate") > 40


def test_request_that_loses_rests_by_itself_and_is_probed() -> None:
    run = loop(table_of(linear), linear)
    run.run([Stream("good", 0.8), Stream("poor", 0.05, claimed=0.9)], 400)
    assert not run.controller.bypassed
    drafts = np.array([plan.caps for plan in run.plans[50:] if plan.reason == "speculate"])
    assert (drafts[:, 0] == GAMMA).all()
    probed = drafts[:, 1] > 0
    assert 0 < probed.mean() < 0.05
    tested = [
        lengths["poor"] for plan, lengths in zip(run.plans[50:], run.verify_lens[50:], strict=True) if plan.caps[1]
    ]
    assert set(tested) == {1}


def test_request_that_rests_speculates_again_when_its_text_changes() -> None:
    run = loop(table_of(linear), linear)
    run.run([Stream("good", 0.8), Stream("changing", 0.05)], 200)
    assert run.plans[-1].caps.tolist() == [GAMMA, 0]
    run.run([Stream("good", 0.8), Stream("changing", 0.9)], MAX_PROBE_PERIOD + 10)
    assert run.plans[-1].caps.tolist() == [GAMMA, GAMMA]


def test_drift_of_the_marginal_cost_is_learned_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The table says that drafts are nearly free; they cost three times as much."""
    caplog.set_level(logging.INFO)

    def real(num_requests: int, num_tokens: int) -> float:
        return 10_000.0 + 1500.0 * (num_tokens - num_requests)

    table = table_of(lambda r, t: 5000.0 + 250.0 * (t - r))
    run = VirtualLoop(controller(table=table), real, table, noise=0.05)
    run.run(streams(1, 0.8), 400)
    correction = run.controller.state.correction
    assert correction.base == pytest.approx(2.0, rel=0.15)
    assert correction.marginal == pytest.approx(6.0, rel=0.25)
    assert "rescaled" in caplog.text
    assert caplog.text.count("rescaled") <= 3
    told = VirtualLoop(controller(table=table_of(real)), real, table)
    told.run(streams(1, 0.8), 400)
    assert run.mean_verify_len(200, 400) == pytest.approx(told.mean_verify_len(200, 400), abs=0.6)


def test_drift_of_whole_rounds_corrects_drafts_that_cost_far_more_than_the_table_says() -> None:
    """A device times whole rounds only: plain ones tell what the others take beyond them, and drafting stops."""
    table = table_of(roofline, draft_us=50.0)
    run = VirtualLoop(controller(table=table), roofline, table_of(roofline, draft_us=3000.0), whole=True)
    run.run(streams(1, 0.2), 200)
    assert "measure" in run.reasons[:12]
    correction = run.controller.state.correction
    assert correction.base == pytest.approx(1.0, rel=0.1)
    assert correction.draft > 30
    assert run.controller.bypassed
    assert set(run.reasons[60:]) <= {"bypass", "probe"}
    right = VirtualLoop(controller(table=table), roofline, table, whole=True)
    right.run(streams(1, 0.2), 200)
    assert not right.controller.bypassed


def test_drift_of_whole_rounds_is_no_drift_where_the_table_is_right() -> None:
    run = loop(whole=True, noise=0.02)
    run.run(streams(2, 0.85), 400)
    correction = run.controller.state.correction
    assert correction.base == pytest.approx(1.0, rel=0.05)
    assert correction.draft == pytest.approx(1.0, rel=0.3)
    assert correction.marginal == pytest.approx(1.0, rel=0.3)
    assert run.reasons.count("measure") >= 400 // 64 - 1


def change_clock(run: VirtualLoop, factor: float) -> None:
    """Let passes and drafts take other times from now on."""
    run.cost = lambda r, t: factor * linear(r, t)
    run.table = table_of(run.cost, draft_us=factor * 900.0)


def ratios(run: VirtualLoop) -> tuple[float, float]:
    correction = run.controller.state.correction
    return correction.draft / correction.base, correction.marginal / correction.base


def test_spell_of_a_busy_machine_is_followed_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """What doubles all times decides nothing: a log that filled with it would hide what does."""
    caplog.set_level(logging.INFO)
    run = loop(table_of(linear), linear, noise=0.01)
    for factor in (1.0, 2.0, 1.0, 2.0, 1.0):
        change_clock(run, factor)
        run.run(streams(1, 0.8), 300)
        assert run.controller.state.correction.base == pytest.approx(factor, rel=0.1)
    assert "rescaled" not in caplog.text


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_clock_that_changes_mid_run_changes_no_decision(factor: float, whole: bool) -> None:
    run = loop(table_of(linear), linear, whole=whole, noise=0.01)
    run.run(streams(1, 0.8), 400)
    change_clock(run, factor)
    for _ in range(100):
        run.run(streams(1, 0.8), 10)
        assert all(1 / 1.2 < ratio < 1.2 for ratio in ratios(run))
    assert run.controller.state.correction.base == pytest.approx(factor, rel=0.05)
    assert run.mean_verify_len(-200, None) == pytest.approx(run.mean_verify_len(200, 400), rel=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [False, True])
def test_machine_that_recovers_during_a_bypass_is_drafted_on_again(whole: bool) -> None:
    """It was twice as slow when it drafted last; what drafts took then is no cost of theirs now."""
    run = loop(table_of(linear), linear, whole=whole, noise=0.01)
    change_clock(run, 2.0)
    run.run(streams(1, 0.8), 400)
    run.run(streams(1, 0.02), 100)
    assert run.controller.bypassed
    change_clock(run, 1.0)
    for _ in range(30):
        run.run(streams(1, 0.02), 10)
        assert all(1 / 1.2 < ratio < 1.2 for ratio in ratios(run))
    run.run(streams(1, 0.8), MAX_PROBE_PERIOD + 10)
    assert not run.controller.bypassed


def test_rounds_that_are_not_timed_call_for_a_measured_one() -> None:
    one = controller()
    reasons = []
    for _ in range(40):
        plan = one.plan(["a"], caps=np.array([GAMMA]), token_budget=99, depth=128)
        reasons.append(plan.reason)
        confidence, drafted = np.full((1, GAMMA), 0.9, np.float32), plan.caps > 0
        one.observe(RoundOutcome(plan, ["a"], 128, plan.caps, plan.caps, confidence, drafted))
    assert reasons.index("measure") == 8


def test_table_with_free_drafts_is_usable() -> None:
    table = table_of(roofline, draft_us=0.0)
    run = VirtualLoop(controller(table=table), roofline, TABLE)
    run.run(streams(1, 0.8), 50)
    assert run.controller.state.correction.draft > 1


def test_drift_correction_stays_within_its_bounds() -> None:
    table = table_of(lambda r, t: 1.0 + 0.01 * (t - r), draft_us=1e-3)
    run = VirtualLoop(controller("fixed:3", table), lambda r, t: 1e6, table_of(roofline, draft_us=1e6))
    run.run(streams(1, 0.8), 100)
    correction = run.controller.state.correction
    assert correction.base == BASE_BOUND
    assert 0.25 <= correction.marginal / correction.base <= 4.0
    assert 1 / DRAFT_BOUND <= correction.draft / correction.base <= DRAFT_BOUND


def test_one_interrupted_round_changes_little() -> None:
    run = loop()
    run.run(streams(1, 0.8), 100)
    before = run.mean_verify_len(50, 100)
    outlier = run.cost
    run.cost = lambda r, t: 100 * roofline(r, t)
    run.run(streams(1, 0.8), 1)
    run.cost = outlier
    run.run(streams(1, 0.8), 40)
    assert not run.controller.bypassed
    assert run.mean_verify_len(101, 141) == pytest.approx(before, rel=0.15)


class Load:
    def __init__(self, limits: LoadLimits) -> None:
        self.now = limits

    def limits(self) -> LoadLimits:
        return self.now


def test_load_budget_caps_the_drafts_of_a_round_and_zero_stops_drafting() -> None:
    load = Load(LoadLimits(verify_budget=3, reason="co_tenant"))
    run = VirtualLoop(controller(load=load), roofline, TABLE)
    run.run(streams(2, 0.9), 20)
    drafted = [sum(lengths.values()) for plan, lengths in zip(run.plans, run.verify_lens, strict=True) if plan.drafts]
    assert len(drafted) >= 18
    assert set(drafted) == {3}
    load.now = LoadLimits(verify_budget=0)
    run.run(streams(2, 0.9), 5)
    assert run.reasons[-5:] == ["load"] * 5
    assert not any(plan.drafts for plan in run.plans[-5:])


def test_load_cost_scale_shortens_verify_lengths() -> None:
    def mean(scale: float) -> float:
        def cost(r: int, t: int) -> float:
            return 10_000.0 + 600.0 * scale * (t - r)

        limits = Load(LoadLimits(cost_scale=scale))
        run = VirtualLoop(controller(table=table_of(lambda r, t: 10_000.0 + 600.0 * (t - r)), load=limits), cost, TABLE)
        run.run(streams(1, 0.85), 100)
        assert run.controller.state.correction.marginal == pytest.approx(1.0, abs=0.1), "the scale is not drift"
        return run.mean_verify_len(30, 100)

    assert mean(3.0) < mean(1.0) - 0.5


@pytest.mark.parametrize("mode", ["adaptive", "stale_topk"])
def test_forget_leaves_nothing_of_a_request(mode: str) -> None:
    run = VirtualLoop(controller(mode), roofline, TABLE)
    run.run(streams(4, 0.6), 50)
    for stream in streams(4, 0.6):
        run.controller.forget(stream.name)
    policy, scheduler = run.controller._adaptive, run.controller._scheduler
    if policy is not None:
        assert len(policy._rows) == 0
        assert not policy._probed_at
    if scheduler is not None:
        assert not any(scheduler._past)


def test_plan_without_room_or_drafts_to_verify_drafts_nothing() -> None:
    one = controller()
    assert one.plan(["a"], caps=np.array([0]), token_budget=9, depth=0).reason == "idle"
    assert one.plan(["a"], caps=np.array([3]), token_budget=0, depth=0).reason == "load"
    assert one.plan([], caps=np.zeros(0, np.int64), token_budget=9, depth=0).reason == "idle"
    assert controller("off", None).plan(["a"], caps=np.array([3]), token_budget=9, depth=0).reason == "off"


def test_adaptive_without_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a cost table"):
        controller(table=None)


class Recording:
    """A calibrator that keeps what it is told."""

    def __init__(self, temperature: float, bias: float) -> None:
        self.temperature, self.bias = temperature, bias
        self.seen: list[np.ndarray] = []

    def arrays(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(num_positions, self.temperature, np.float32), np.full(num_positions, self.bias, np.float32)

    def observe(self, confidence: np.ndarray, verify_len: np.ndarray, accepted: np.ndarray) -> None:
        assert len(confidence) == len(verify_len) == len(accepted)
        self.seen.append(confidence)


def test_calibrator_is_told_what_the_head_said() -> None:
    calibrator = Recording(2.0, 0.5)
    one = controller("threshold:0.1", None, calibrator=calibrator)
    plan = one.plan(["a"], caps=np.array([GAMMA]), token_budget=9, depth=0)
    assert plan.temperature is not None
    assert plan.temperature.tolist() == [2.0] * GAMMA
    raw = np.linspace(0.05, 0.95, GAMMA, dtype=np.float32)[None]
    calibrated = 1 / (1 + np.exp(-(np.log(raw / (1 - raw)) / 2.0 + 0.5)))
    lengths = one.verify_lens(plan, ["a"], caps=plan.caps, confidence=calibrated, depth=0)
    one.observe(RoundOutcome(plan, ["a"], 0, lengths, np.array([0]), calibrated, np.array([True])))
    assert calibrator.seen[0] == pytest.approx(raw, abs=1e-5)


def test_rounds_that_nobody_times_are_mostly_speculated() -> None:
    """A plain round that prompts share is not timed; another one right behind it would help no more."""
    one = controller()
    reasons = []
    for _ in range(400):
        plan = one.plan(["a"], caps=np.array([GAMMA]), token_budget=99, depth=0)
        reasons.append(plan.reason)
        confidence = np.full((1, GAMMA), 0.9, np.float32) if plan.drafts else None
        lengths = one.verify_lens(plan, ["a"], caps=plan.caps, confidence=confidence, depth=0)
        one.observe(RoundOutcome(plan, ["a"], 0, lengths, lengths, confidence, plan.caps > 0))
    assert reasons.count("speculate") > 380
    assert reasons.count("measure") >= 400 // 64
