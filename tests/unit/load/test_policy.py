"""The pure policy on made-up samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.load import LoadPolicy, LoadState, PolicyConfig, Sample
from trtllm_dspark.load.sample import Failure

GB = 10**9
CALM = Sample(
    0.0,
    sm_utilization=0.9,
    sm_clock_mhz=2000,
    sm_clock_max_mhz=2000,
    throttle_reasons=0,
    memory_total_bytes=80 * GB,
    memory_free_bytes=20 * GB,
    others_sm_utilization=0.0,
    ecc_uncorrected=0,
)
HOT = replace(CALM, throttle_reasons=0x40, sm_clock_mhz=1000)


def feed(policy: LoadPolicy, samples: list[Sample], *, start: int = 0) -> list[LoadState]:
    return [policy.update(replace(sample, time_s=(start + i) * 0.2)) for i, sample in enumerate(samples)]


def test_reference_clock_replaces_the_maximum() -> None:
    policy = LoadPolicy(reference_sm_clock_mhz=1500)
    assert feed(policy, [HOT] * 10)[-1].compute_scale == pytest.approx(1.5)


def test_clock_above_the_reference_never_shrinks_the_table() -> None:
    policy = LoadPolicy(reference_sm_clock_mhz=1500)
    fast = replace(CALM, throttle_reasons=0x4, sm_clock_mhz=1900)
    assert {state.compute_scale for state in feed(policy, [fast] * 10)} == {1.0}


def test_scale_stops_at_its_maximum() -> None:
    assert feed(LoadPolicy(), [replace(HOT, sm_clock_mhz=100)] * 20)[-1].compute_scale == 4.0


def test_idle_gpu_says_nothing_about_the_clocks() -> None:
    idle = replace(CALM, throttle_reasons=0x1, sm_clock_mhz=345, sm_utilization=0.0)
    policy = LoadPolicy()
    assert feed(policy, [idle] * 50)[-1].compute_scale == 1.0
    feed(policy, [HOT] * 10, start=50)
    assert feed(policy, [idle] * 100, start=60)[-1].compute_scale == 2.0


@pytest.mark.parametrize("share", [0.02, 0.2, 0.95])
def test_others_use_takes_its_share_of_the_budget(share: float) -> None:
    state = feed(LoadPolicy(), [replace(CALM, others_sm_utilization=share)] * 20)[-1]
    assert state.budget_scale == pytest.approx({0.02: 1.0, 0.2: 0.8, 0.95: 0.25}[share])
    assert ("co_tenant" in state.reasons) == (share > 0.05)


def test_one_large_allocation_is_no_trend() -> None:
    states = feed(LoadPolicy(), [CALM] * 5 + [replace(CALM, memory_free_bytes=5 * GB)] * 5)
    assert {state.admission_scale for state in states} == {1.0}


def test_memory_that_another_engine_of_ours_took_is_normal_once_said() -> None:
    before, after = (replace(CALM, memory_free_bytes=free * GB) for free in (8, 1))
    policy = LoadPolicy()
    assert feed(policy, [before, after])[-1].admission_closed
    policy.rebase_memory()
    assert feed(policy, [after] * 5, start=2)[-1] == LoadState(available=True)
    assert feed(policy, [replace(CALM, memory_free_bytes=GB // 3)], start=7)[-1].admission_closed


def test_admission_opens_only_after_the_release_time() -> None:
    full = replace(CALM, memory_free_bytes=GB)
    policy = LoadPolicy()
    scales = [state.admission_scale for state in feed(policy, [CALM] * 5 + [full] + [CALM] * 30)]
    assert scales[5:31] == [0.0] * 26
    assert set(scales[31:]) == {1.0}


def test_lost_gpu_stays_closed_when_the_driver_goes_too() -> None:
    lost, gone = Sample(0.0, failure="gpu_lost"), Sample(0.0, failure="no_gpu")
    states = feed(LoadPolicy(), [CALM] * 5 + [lost] + [gone] * 60)
    assert all(state.admission_closed and not state.available for state in states[5:])


def test_fatal_xid_outlives_losing_sight_of_the_device() -> None:
    gone = Sample(0.0, failure="unreadable")
    states = feed(LoadPolicy(), [CALM, replace(CALM, xids=(95,)), *[gone] * 60, CALM])
    assert all(state.admission_closed for state in states[1:])


def test_fatal_xid_ends_when_the_device_was_opened_anew() -> None:
    states = feed(LoadPolicy(), [CALM, replace(CALM, xids=(13, 95)), CALM, replace(CALM, generation=2)])
    assert [state.admission_closed for state in states] == [False, True, True, False]


def test_ecc_errors_from_before_the_start_do_not_count() -> None:
    assert feed(LoadPolicy(), [replace(CALM, ecc_uncorrected=7)] * 5)[-1] == LoadState(available=True)


def test_device_that_tells_nothing_gives_a_neutral_state() -> None:
    assert feed(LoadPolicy(), [Sample(0.0)] * 20)[-1] == LoadState(available=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"release_s": -1.0},
        {"attack_s": float("nan")},
        {"admission_cap": 1.5},
        {"memory_critical": 0.2},
        {"max_compute_scale": 0.5},
    ],
)
def test_impossible_config_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PolicyConfig(**bad)  # type: ignore[arg-type]


FAILURES: list[Failure] = ["gpu_lost", "no_driver", "no_gpu", "unreadable"]
SAMPLES = st.builds(
    replace,
    st.just(CALM),
    failure=st.one_of(st.none(), st.none(), st.sampled_from(FAILURES)),
    sm_clock_mhz=st.one_of(st.none(), st.integers(0, 3000)),
    throttle_reasons=st.one_of(st.none(), st.integers(0, 0x7FF)),
    others_sm_utilization=st.one_of(st.none(), st.floats(0, 1)),
    others_memory_bytes=st.one_of(st.none(), st.integers(0, 80 * GB)),
    memory_free_bytes=st.one_of(st.none(), st.integers(0, 80 * GB)),
    ecc_uncorrected=st.one_of(st.none(), st.integers(0, 3)),
    xids=st.lists(st.sampled_from([13, 31, 79, 95]), max_size=2).map(tuple),
)


@given(st.lists(SAMPLES, max_size=80))
def test_any_samples_give_numbers_in_range_with_a_reason_for_each(samples: list[Sample]) -> None:
    for state in feed(LoadPolicy(), samples):
        assert 1.0 <= state.compute_scale <= 4.0
        assert 0.0 <= state.budget_scale <= 1.0
        assert 0.0 <= state.admission_scale <= 1.0
        neutral = (state.compute_scale, state.budget_scale, state.admission_scale) == (1.0, 1.0, 1.0)
        assert neutral or state.reasons


@given(st.lists(st.integers(1, 20), min_size=2, max_size=20))
def test_flapping_faster_than_the_release_time_never_lowers_a_decision(runs: list[int]) -> None:
    bad = replace(HOT, others_sm_utilization=0.5, memory_free_bytes=GB)
    samples = [sample for i, run in enumerate(runs) for sample in [bad if i % 2 else CALM] * run]
    states = feed(LoadPolicy(), samples)
    for before, after in zip(states, states[1:], strict=False):
        assert after.compute_scale >= before.compute_scale
        assert after.budget_scale <= before.budget_scale
        assert after.admission_scale <= before.admission_scale


def test_policy_without_averaging_takes_every_sample_as_it_is() -> None:
    policy = LoadPolicy(PolicyConfig(window_s=0.0))
    assert feed(policy, [HOT] * 10)[-1].compute_scale == pytest.approx(2.0)
