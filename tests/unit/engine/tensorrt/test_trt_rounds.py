"""Rounds on a recording device: order, bindings, aliasing, ownership of host memory, graphs."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from helpers.tiny_tensorrt import Written
from helpers.trt_fixtures import AnyOpened, Opened
from helpers.trt_rounds import decode, fields, names, prompts, run, sampling

from trtllm_dspark.engine.rounds import DecodeRows, DeviceSchedule, PromptRows, RoundBatch, RowSampling
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.speculation import measure_cost_table

ROUND = [
    "round_begin", "drafter_block", "markov_draft", "round_caps", "confidence_schedule", "round_rows", "target",
    "ragged_accept", "round_commit", "drafter_context",
]  # fmt: skip


def test_decode_round_is_one_graph_between_two_copies(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(2), decode(2)])
    before = len(device.ops)
    ticket = engine.submit_round(decode(2))
    ops = device.ops[before:]
    assert [op.kind for op in ops] == ["record", "to_device", "record", "graph", "to_host", "record"]
    assert names(ops) == ROUND
    engine.collect_round(ticket)


def test_plain_round_leaves_the_block_out(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(2), decode(2, drafts=0)])
    before = len(device.ops)
    (result,) = run(engine, [decode(2, drafts=0, ban_until=99)])
    wanted = ["round_begin", "confidence_schedule", "round_rows", "target", "round_ban", "ragged_accept"]
    assert names(device.ops[before:])[-8:] == [*wanted, "round_commit", "drafter_context"]
    assert result.verify_len.tolist() == [0, 0]
    assert result.decode.emitted_len.tolist() == [1, 1]


def test_host_waits_for_nothing_between_verify_and_next_draft(opened_toy: AnyOpened) -> None:
    """While round n runs, submitting n + 1 waits at most for work that was enqueued before round n began."""
    engine, device = opened_toy(acceptance="rejection")
    run(engine, [prompts(3), decode(3)])
    started = len(device.ops)
    flying = engine.submit_round(decode(3))
    for _ in range(6):
        device.waits.clear()
        begin = len(device.ops)
        following = engine.submit_round(decode(3))
        assert all(wait.at < started for wait in device.waits)
        engine.collect_round(flying)
        # That round is what is waited for, and no later one.
        assert started < max(wait.at for wait in device.waits) < begin
        started, flying = begin, following
    engine.collect_round(flying)
    assert all(ring.waits == 0 for ring in engine._rounds._results.values())  # type: ignore[union-attr]


def test_target_pass_of_next_round_is_enqueued_before_results_are_read(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(2), decode(2)])
    first = engine.submit_round(decode(2))
    second = engine.submit_round(decode(2))
    order = names(device.ops)
    assert order[-2 * len(ROUND) :] == ROUND * 2
    one, two = engine.collect_round(first), engine.collect_round(second)
    # Round n + 1 went on from round n's tokens, though nobody on the host knew them.
    last = one.decode.tokens[0, one.decode.emitted_len[0] - 1]
    assert two.decode.tokens[0, 0] != last or one.decode.emitted_len[0] == 1


def test_passes_update_caches_in_place(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(1), prompts(1, first_slot=2), decode(1)])
    passes = [op for op in device.ops if op.kind == "pass"]
    for op in passes:
        addresses = op.detail["addresses"]
        past = {name: address for name, address in addresses.items() if name.startswith("past_")}
        assert past
        for name, address in past.items():
            assert addresses[name.replace("past_", "present_")] == address
        # Nothing else lies where a cache does.
        others = [a for name, a in addresses.items() if not name.startswith(("past_", "present_"))]
        assert not set(others) & set(past.values())
    first, second = [op for op in passes if op.name == "target"][:2]
    slot = engine._model.cache.slot_bytes
    for name, address in first.detail["addresses"].items():
        if name.startswith("past_"):
            assert second.detail["addresses"][name] == address + 2 * slot


def test_rotated_queries_have_memory_of_their_own(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(1)])
    (op,) = [op for op in device.ops if op.name == "target"]
    queries = [address for name, address in op.detail["addresses"].items() if name.startswith("query.")]
    assert len(queries) == toy_weights.target.num_layers
    assert len(set(queries)) == len(queries)


def test_round_is_captured_once_a_key_and_misses_are_logged(
    toy_weights: Written, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    engine, device = opened(toy_weights)
    with caplog.at_level(logging.DEBUG, logger="trtllm_dspark.engine.tensorrt"):
        run(engine, [prompts(3), decode(1), decode(3), decode(1), decode(3, drafts=2), decode(3)])
    stats = engine.graph_stats
    assert stats is not None
    assert (stats.misses, stats.replays, stats.eager_rounds) == (3, 5, 0)
    logged = [record.getMessage() for record in caplog.records if "captured a round" in record.getMessage()]
    assert len(logged) == 3
    assert "num_requests=1" in logged[0]


def test_first_use_of_a_key_moves_no_row(toy_weights: Written, opened: Opened) -> None:
    """A key's passes run once before they are captured: that round must not count, whatever ran before it."""
    engine, _ = opened(toy_weights)
    fresh, _ = opened(toy_weights, cuda_graphs=False)
    batches = [prompts(3), decode(3), decode(3, drafts=0), decode(2), decode(3, ban_until=8), decode(3, drafts=1)]
    for one, other in zip(run(engine, batches), run(fresh, batches), strict=True):
        for name in ("decode", "prompts"):
            rows, expected = getattr(one, name), getattr(other, name)
            if expected is not None:
                np.testing.assert_array_equal(rows.tokens, expected.tokens)
    model = engine._model
    state = {n: engine._device.read(model.memory[n], (4,), np.int32) for n in ("anchors", "positions", "remaining")}
    wanted = {n: fresh._device.read(fresh._model.memory[n], (4,), np.int32) for n in state}
    for name, values in wanted.items():
        np.testing.assert_array_equal(state[name], values)


def test_graphs_over_capacity_are_released_behind_their_last_round(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights, num_graphs=1)
    run(engine, [prompts(3)])
    flying = engine.submit_round(decode(1))
    for count in (2, 3, 1, 2, 3):
        # The recording device refuses to release a graph or a context that is still queued.
        following = engine.submit_round(decode(count))
        engine.collect_round(flying)
        flying = following
    engine.collect_round(flying)
    stats = engine.graph_stats
    assert stats is not None
    assert (stats.misses, stats.evictions) == (6, 5)
    assert len(device._graphs) == 1
    open_contexts = [c for plan in device.plans.values() for c in plan.contexts if not c.closed]
    # One graph's three contexts, and the prompts' one of target and drafter context.
    assert len(open_contexts) == 5


def test_plan_that_cannot_be_captured_runs_launch_by_launch(
    toy_weights: Written, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    engine, device = opened(toy_weights)
    device.fail_capture = "target"
    (_, result, _) = run(engine, [prompts(2), decode(2), decode(2)])
    assert result.decode.emitted_len.min() >= 1
    stats = engine.graph_stats
    assert stats is not None
    assert (stats.misses, stats.replays, stats.eager_rounds) == (1, 0, 2)
    assert [r.levelname for r in caplog.records if "without a CUDA graph" in r.getMessage()] == ["WARNING"]


def test_queue_takes_two_rounds_and_gives_them_back_in_order(toy_weights: Written, opened: Opened) -> None:
    engine, _ = opened(toy_weights)
    run(engine, [prompts(1)])
    first, second = engine.submit_round(decode(1)), engine.submit_round(decode(1))
    with pytest.raises(RuntimeError, match="2 rounds are in flight"):
        engine.submit_round(decode(1))
    with pytest.raises(RuntimeError, match="is not the oldest one"):
        engine.collect_round(second)
    engine.collect_round(first)
    engine.collect_round(second)


def test_round_beyond_the_limits_is_refused(toy_weights: Written, opened: Opened) -> None:
    engine, _ = opened(toy_weights)
    with pytest.raises(DeviceError, match="a round of 5 requests .* exceeds the engine's 4 requests"):
        engine.submit_round(decode(5))
    too_long = prompts(1, length=3)
    assert too_long.prompts is not None
    rows = PromptRows(**{**fields(too_long.prompts), "write_indices": np.array([95])})
    with pytest.raises(DeviceError, match="ends beyond the engine's limits"):
        engine.submit_round(RoundBatch(None, rows, "rejection"))


def test_refused_round_leaves_the_engine_as_it_was(toy_weights: Written, opened: Opened) -> None:
    """Nothing of it is enqueued, though what is refused comes last: more rounds of them than there are buffers."""
    engine, device = opened(toy_weights)
    fresh, _ = opened(toy_weights)
    run(engine, [prompts(2), decode(2)])
    run(fresh, [prompts(2), decode(2)])
    more = prompts(1, first_slot=2).prompts
    assert more is not None
    beyond = PromptRows(**{**fields(more), "write_indices": np.array([95])})
    banned = RowSampling(**{**fields(sampling(1, ban_until=9)), "banned": (tuple(range(17)),)})
    before = len(device.ops)
    for rows, message in (
        (beyond, "ends beyond the engine's limits"),
        (PromptRows(**{**fields(more), "sampling": banned}), "bans 17 tokens, the engine at most 16"),
    ) * 3:
        with pytest.raises(DeviceError, match=message):
            engine.submit_round(RoundBatch(decode(2).decode, rows, "rejection"))
    assert len(device.ops) == before
    batches = [decode(2)] * 4
    for one, other in zip(run(engine, batches), run(fresh, batches), strict=True):
        np.testing.assert_array_equal(one.decode.tokens, other.decode.tokens)


@pytest.mark.parametrize("plan", ["drafter_block", "target", "drafter_context"])
def test_engine_whose_first_round_fails_still_closes(toy_weights: Written, opened: Opened, plan: str) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(2)])
    device.fail_pass = plan
    with pytest.raises(DeviceError, match="planted failure"):
        engine.submit_round(decode(2))
    device.fail_pass = None
    # The recording device refuses to release a plan before its contexts, and a context whose passes are queued.
    engine.close()


@pytest.mark.parametrize("by", ["core", "sources"])
def test_schedule_without_times_uses_none_of_other_rounds(random_weights: Written, opened: Opened, by: str) -> None:
    """Their buffers are used in turn: drafts too dear in the rounds before are not so where nothing is known."""
    engine, _ = opened(random_weights, kernels=by)

    def early_stop(step_time_us: np.ndarray | None) -> RoundBatch:
        schedule = DeviceSchedule("early_stop", 5, 0.0, 0, 10, step_time_us=step_time_us)
        return RoundBatch(DecodeRows(np.full(2, 5), sampling(2), schedule), None, "rejection")

    dear = 10.0 ** np.arange(25).astype(np.float32)
    known = run(engine, [prompts(2), *[early_stop(dear)] * 3])[1:]
    assert not any(result.verify_len.any() for result in known)
    (result,) = run(engine, [early_stop(None)])
    assert result.verify_len.tolist() == [5, 5]


def test_moved_slot_keeps_its_caches_and_state(toy_weights: Written, opened: Opened) -> None:
    engine, device = opened(toy_weights)
    run(engine, [prompts(3), decode(3)])
    model = engine._model
    device.finish()
    before = {n: device.read(model.memory[n], (4,), np.int32) for n in ("anchors", "positions", "remaining")}
    engine.copy_slot(2, 0, num_tokens=1000, num_context=1000)
    device.finish()
    for name, values in before.items():
        assert device.read(model.memory[name], (4,), np.int32)[0] == values[2]
    bindings = model.cache.bindings(0)
    size = model.cache.slot_bytes
    for name, address in bindings.items():
        np.testing.assert_array_equal(
            device.read(address, (size,), np.uint8), device.read(address + 2 * size, (size,), np.uint8), err_msg=name
        )


def test_cost_table_is_measured_in_rounds_of_the_device(random_weights: Written, opened: Opened) -> None:
    engine, device = opened(random_weights)
    table = measure_cost_table(engine, quick=True)
    # The recording device's clock counts ops, and a round is one, with drafts or without; drafts take 1 us at least.
    assert set(table.verify_us.values()) == {2.0}
    assert set(table.draft_us.values()) == {1.0}
    assert table.token_sizes[-1] == 4 * (random_weights.limits.max_draft_len + 1)
    assert not [op for op in device.ops if op.kind == "to_host"], "no logits travel"
    # An engine that was timed serves as before: slots are as if nothing had run.
    fresh, _ = opened(random_weights)
    batches = [prompts(3), decode(3), decode(3)]
    for one, other in zip(run(engine, batches), run(fresh, batches), strict=True):
        rows, expected = one.decode or one.prompts, other.decode or other.prompts
        np.testing.assert_array_equal(rows.tokens, expected.tokens)


def test_rounds_are_not_timed_under_a_running_one(toy_weights: Written, opened: Opened) -> None:
    engine, _ = opened(toy_weights)
    run(engine, [prompts(1)])
    ticket = engine.submit_round(decode(1))
    assert engine.pass_timer is not None
    with pytest.raises(RuntimeError, match="on an idle engine only"):
        engine.pass_timer.draft_us(1, 4)
    engine.collect_round(ticket)


def test_kernel_sources_and_core_give_the_same_round(random_weights: Written, opened: Opened) -> None:
    """Confidences, lengths and tokens have the same bits whether the CUDA sources or the core decide them."""
    count = 3
    schedule = DeviceSchedule("threshold", 5, np.array([0.0, 0.3, 1.5], np.float32), 0, 15, bias=np.ones(5, np.float32))
    sampled = RowSampling(**{**fields(sampling(count)), "temperature": np.array([0.0, 1.0, 0.7], np.float32)})
    batches = [
        prompts(count),
        RoundBatch(DecodeRows(np.array([5, 3, 5]), sampled, schedule), None, "rejection"),
        RoundBatch(DecodeRows(np.array([5, 3, 5]), sampled, schedule), None, "rejection"),
    ]
    results = [run(opened(random_weights, kernels=kernels)[0], batches) for kernels in ("sources", "core")]
    for one, other in zip(*results, strict=True):
        for rows, expected in ((one.decode, other.decode), (one.prompts, other.prompts)):
            if expected is not None:
                for name in ("tokens", "emitted_len", "status"):
                    np.testing.assert_array_equal(getattr(rows, name), getattr(expected, name), err_msg=name)
        for name in ("verify_len", "draft_failed", "confidence"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert results[0][1].verify_len.tolist()[2] == 0, "a threshold above 1 admits nothing"
    assert results[0][1].verify_len.tolist()[0] > 0
