"""Sessions over plans with plugins emit what the CPU engine's sessions emit, on a late and on an early device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny_tensorrt
from helpers.plugin_engine import open_plugins, write_plugin_pair
from helpers.recording_device import RecordingDevice
from helpers.tiny_tensorrt import Written
from helpers.trt_fixtures import AnyOpened
from helpers.trt_sessions import Outputs, make, requests, run, table, take

from trtllm_dspark.engine.tensorrt import _plugin_round
from trtllm_dspark.engine.tensorrt._caches import SlotCache
from trtllm_dspark.engine.tensorrt._plugin_round import PluginRound
from trtllm_dspark.errors import ConfigError, DeviceError, RequestError
from trtllm_dspark.graph import RoundOptions
from trtllm_dspark.runtime import Request, SamplingParams, Session


def wanted(pair: Written, count: int, *, sampled: bool = True) -> list[Request]:
    return requests(pair, count, longest=12, min_tokens=False, sampled=sampled)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_session_random_pair_equals_cpu(random_weights: Written, opened_plugins: AnyOpened, late: bool) -> None:
    """Prompts of several chunks, more requests than slots: requests come, go and move."""
    todo = requests(random_weights, 7, longest=40, min_tokens=False)
    expected = run(make(random_weights.cpu, random_weights, "off"), todo)
    engine, _ = opened_plugins("random", late=late)
    session = make(engine, random_weights, "fixed")
    assert run(session, todo) == expected
    assert session.stats.slot_copies > 0
    assert session.stats.acceptance.verified > 0


@pytest.mark.parametrize(
    ("acceptance", "speculation"),
    [("rejection", "off"), ("rejection", "fixed:3"), ("rejection", "threshold:0.4"), ("coupled", "threshold:0.4")],
)
def test_session_draws_as_the_cpu_does(
    toy_weights: Written, opened_plugins: AnyOpened, acceptance: str, speculation: str
) -> None:
    """Equal seeds, equal verify lengths: drafts, acceptance, residual and bonus tokens are the same draws."""
    todo = wanted(toy_weights, 4)
    reference = make(toy_weights.cpu, toy_weights, speculation, acceptance=acceptance)
    expected = run(reference, todo)
    engine, _ = opened_plugins("toy", acceptance)
    session = make(engine, toy_weights, speculation, acceptance=acceptance)
    assert run(session, todo) == expected
    assert session.stats.acceptance.accepted == reference.stats.acceptance.accepted
    if speculation != "off":
        assert session.stats.acceptance.accepted > session.stats.acceptance.verified / 3
        assert engine.graph_stats.replays > engine.graph_stats.misses


def test_session_of_a_greedy_engine_equals_cpu(toy_weights: Written, opened_plugins: AnyOpened) -> None:
    todo = wanted(toy_weights, 4, sampled=False)
    expected = run(make(toy_weights.cpu, toy_weights, "off"), todo)
    engine, _ = opened_plugins("toy", "greedy")
    session = make(engine, toy_weights, "threshold:0.3", acceptance="rejection")
    assert run(session, todo) == expected
    assert session.stats.acceptance.accepted > 0
    with pytest.raises(RequestError, match="built with --acceptance greedy and serves requests of temperature 0 only"):
        session.add(Request("s", [4], SamplingParams(max_tokens=4, temperature=0.5)))


@pytest.mark.parametrize(
    ("acceptance", "draft_us", "reason"),
    [("rejection", 10.0, "speculate"), ("coupled", 10.0, "speculate"), ("coupled", 900.0, "bypass")],
)
def test_session_adaptive_equals_cpu(
    toy_weights: Written, opened_plugins: AnyOpened, acceptance: str, draft_us: float, reason: str
) -> None:
    """The controller's plans and thresholds run on the device; greedy rows and coupled ones cannot differ by them."""
    coupled = acceptance == "coupled"
    todo = wanted(toy_weights, 6, sampled=coupled)
    expected = run(make(toy_weights.cpu, toy_weights, "off"), todo)
    engine, _ = opened_plugins("toy", acceptance)
    take(engine, draft_us)
    costs = table(toy_weights.limits.max_draft_len, draft_us)
    session = make(engine, toy_weights, "adaptive", acceptance=acceptance, cost_table=costs)
    assert run(session, todo) == expected
    assert session.stats.plans[reason] > 0
    assert session.stats.acceptance.verified > 0


@pytest.mark.parametrize(
    ("schedule", "speculation"),
    [("fixed", "fixed:2"), ("early_stop", "early_stop"), ("early_stop", "fixed:3"), ("stale_topk", "stale_topk:6")]
    + [("stale_topk", "fixed:3")],
)
def test_session_of_every_schedule_equals_cpu(
    toy_weights: Written, opened_plugins: AnyOpened, schedule: str, speculation: str
) -> None:
    todo = wanted(toy_weights, 3)
    expected = run(make(toy_weights.cpu, toy_weights, "off"), todo)
    engine, _ = opened_plugins("toy", "coupled", schedule)
    costs = table(toy_weights.limits.max_draft_len, 10.0)
    session = make(engine, toy_weights, speculation, cost_table=costs)
    assert run(session, todo) == expected
    counts = session.stats.acceptance
    assert counts.accepted > 0
    if speculation.startswith("fixed"):
        reference = make(toy_weights.cpu, toy_weights, speculation)
        run(reference, todo)
        assert counts.verified == reference.stats.acceptance.verified


@pytest.mark.parametrize(
    ("changes", "options", "speculation"),
    [
        ({"markov_head": "gated"}, RoundOptions("rejection", "threshold"), "threshold:0.3"),
        ({"confidence": False}, RoundOptions("rejection", "fixed"), "fixed:3"),
    ],
    ids=["reduced_vocabulary", "no_confidence_head"],
)
def test_session_of_other_drafters_equals_cpu(
    tmp_path: Path, changes: dict[str, Any], options: RoundOptions, speculation: str
) -> None:
    kept = np.arange(0, 90, 3) if "markov_head" in changes else None
    (tmp_path / "plugins").mkdir()
    pair = tiny_tensorrt.random_pair(tmp_path, draft_token_ids=kept, **changes)
    weights = tiny_tensorrt.random_weights(**changes)
    written = write_plugin_pair(tmp_path / "plugins", pair, weights, options, draft_token_ids=kept)
    engine = open_plugins(RecordingDevice(heads=pair.heads), written)
    assert engine.heads.has_confidence is pair.drafter.confidence
    todo = wanted(pair, 3)
    reference, session = (make(each, pair, speculation, acceptance="rejection") for each in (pair.cpu, engine))
    assert run(session, todo) == run(reference, todo)
    assert session.stats.acceptance.verified == reference.stats.acceptance.verified > 0
    engine.close()


def test_session_of_candidates_equals_cpu(
    tmp_path: Path, random_weights: Written, toy_weights: Written, opened_plugins: AnyOpened
) -> None:
    """Drafts come from the largest base logits only; whatever is drafted, coupled texts are the target's."""
    weights = tiny_tensorrt.random_weights()
    written = write_plugin_pair(tmp_path, random_weights, weights, RoundOptions("coupled", "threshold", 12))
    engine = open_plugins(RecordingDevice(heads=random_weights.heads), written)
    todo = wanted(random_weights, 3)
    session = make(engine, random_weights, "fixed")
    assert run(session, todo) == run(make(random_weights.cpu, random_weights, "off"), todo)
    assert session.stats.acceptance.verified > 0
    engine.close()


def test_session_without_a_drafter_equals_cpu(tmp_path: Path, random_weights: Written) -> None:
    nothing = {"max_draft_len": 0, "draft_vocab_size": 0, "feature_size": 0, "has_drafter": False}
    pair = replace(random_weights, limits=replace(random_weights.limits, **nothing))
    options = RoundOptions("rejection", "threshold")
    written = write_plugin_pair(tmp_path, pair, tiny_tensorrt.random_weights(), options, alone=True)
    engine = open_plugins(RecordingDevice(heads=pair.heads), written)
    todo = wanted(pair, 4)
    expected = run(make(random_weights.cpu, random_weights, "off", acceptance="rejection"), todo)
    assert run(make(engine, pair, "off", acceptance="rejection"), todo) == expected
    engine.close()


def test_session_that_was_not_compiled_is_refused(toy_weights: Written, opened_plugins: AnyOpened) -> None:
    engine, _ = opened_plugins("toy", "rejection")
    costs = table(toy_weights.limits.max_draft_len, 10.0)
    with pytest.raises(ConfigError, match="schedule threshold, speculation early_stop needs early_stop; build it with"):
        Session(engine, None, speculation="early_stop", cost_table=costs)
    with pytest.raises(ConfigError, match="built for acceptance rejection, the session wants coupled; build it with"):
        Session(engine, None, speculation="fixed", acceptance="coupled")
    with pytest.raises(ConfigError, match="whole rounds on its device only; .* built with --dspark_plugin disable"):
        Session(engine, None, speculation="fixed", rounds_in_flight=1)
    session = make(engine, toy_weights, "fixed", acceptance="rejection")
    for params, what in (
        (SamplingParams(max_tokens=4, logprobs=True), "log-probabilities"),
        (SamplingParams(max_tokens=4, min_tokens=2), "min_tokens with end tokens"),
    ):
        with pytest.raises(RequestError, match=f"{what} need an engine that was built with --dspark_plugin disable"):
            session.add(Request("a", [4], params))
    assert not session.has_unfinished()


def lose_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PluginRound, "_commit", lambda self, *arguments: None)


def commit_at_slot_0(patch: pytest.MonkeyPatch) -> None:
    original = PluginRound._commit
    patch.setattr(PluginRound, "_commit", lambda self, count, memory, slot: original(self, count, memory, 0))


def keep_old_caps(patch: pytest.MonkeyPatch) -> None:
    original = PluginRound.enqueue

    def enqueue(self: Any, key: Any, contexts: Any) -> None:
        launch = self._device.launch
        self._device.launch = lambda op, *a, **p: None if op == "round_caps" else launch(op, *a, **p)
        try:
            original(self, key, contexts)
        finally:
            del self._device.launch

    patch.setattr(PluginRound, "enqueue", enqueue)


def verify_first(patch: pytest.MonkeyPatch) -> None:
    original = PluginRound.enqueue
    patch.setattr(PluginRound, "enqueue", lambda self, key, contexts: original(self, key, list(contexts)[::-1]))


def prompts_in_slot_0(patch: pytest.MonkeyPatch) -> None:
    original = _plugin_round.stage

    def stage(model: Any, ring: Any, arrays: Any) -> None:
        pages = model.memory["prompt_pages"]
        original(model, ring, {at: value * (at != pages) for at, value in arrays.items()})

    patch.setattr(_plugin_round, "stage", stage)


def first_token_one_position_late(patch: pytest.MonkeyPatch) -> None:
    original = _plugin_round.stage

    def stage(model: Any, ring: Any, arrays: Any) -> None:
        late = model.memory["prompt_positions"]
        original(model, ring, {at: value + (at == late) for at, value in arrays.items()})

    patch.setattr(_plugin_round, "stage", stage)


def move_no_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "copy_slot", lambda *arguments: None)


def move_no_context(patch: pytest.MonkeyPatch) -> None:
    """Texts stay right: only what is accepted tells."""
    original = SlotCache.copy_slot
    first: list[SlotCache] = []

    def copy_slot(self: SlotCache, *arguments: int) -> None:
        first.extend([] if first else [self])
        if self is first[0]:
            original(self, *arguments)

    patch.setattr(SlotCache, "copy_slot", copy_slot)


def caches_elsewhere(patch: pytest.MonkeyPatch) -> None:
    original = SlotCache.bindings

    def bindings(self: SlotCache, first_slot: int) -> dict[str, int]:
        found = original(self, first_slot)
        names = [name for name in found if name.startswith("present_")]
        return found | {names[0]: found[names[1]]}

    patch.setattr(SlotCache, "bindings", bindings)


def one_threshold_for_all(patch: pytest.MonkeyPatch) -> None:
    from trtllm_dspark.engine.tensorrt import _rounds

    original = _rounds._write_decode

    def write(views: Any, decode: Any, key: Any) -> None:
        original(views, decode, key)
        views["thresholds"][:] = 0.0

    patch.setattr(_rounds, "_write_decode", write)


PLANTED = [
    lose_commit, commit_at_slot_0, keep_old_caps, verify_first, prompts_in_slot_0, first_token_one_position_late,
    move_no_cache, move_no_context, caches_elsewhere, one_threshold_for_all,
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(random_weights: Written) -> tuple[Outputs, int]:
    return play(random_weights.cpu, random_weights)


def play(engine: Any, pair: Written) -> tuple[Outputs, int]:
    """Return the tokens of sampled and greedy requests, more than slots, and how many drafts were verified."""
    session = make(engine, pair, "threshold:0.3", acceptance="rejection")
    return run(session, requests(pair, 6, longest=8, min_tokens=False)), session.stats.acceptance.verified


@pytest.mark.parametrize("fault", [None, *PLANTED], ids=lambda fault: "none" if fault is None else fault.__name__)
def test_session_planted_faults_are_noticed(
    random_weights: Written,
    reference: tuple[Outputs, int],
    opened_plugins: AnyOpened,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """Whatever is broken shows in the tokens, in how many drafts were verified, or is refused by the device."""
    engine, _ = opened_plugins("random", "rejection")
    if fault is None:
        assert play(engine, random_weights) == reference
        return
    fault(monkeypatch)
    try:
        found = play(engine, random_weights)
    except (AssertionError, DeviceError):
        # What the device refuses ends the session, which refuses what comes later.
        return
    finally:
        monkeypatch.undo()
    assert found != reference
