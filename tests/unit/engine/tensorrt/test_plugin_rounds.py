"""Rounds over plans with plugins on a recording device: order, bindings, aliasing, graph keys, state."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.recording_device import Op
from helpers.tiny_tensorrt import Written
from helpers.trt_fixtures import AnyOpened
from helpers.trt_rounds import decode, fields, names, prompts, run, sampling

from trtllm_dspark.engine.rounds import DecodeRows, DeviceSchedule, RoundBatch, RowSampling
from trtllm_dspark.engine.tensorrt._buckets import RoundKey
from trtllm_dspark.errors import DeviceError

ROUND = ["round_caps", "drafter", "target", "round_commit"]
PLAIN = ["target", "round_commit"]


@pytest.fixture
def rejection(opened_plugins: AnyOpened) -> AnyOpened:
    """Engines of the toy pair whose plans accept as the rounds of these tests say."""
    return lambda **options: opened_plugins("toy", "rejection", **options)


def test_decode_round_is_one_graph_of_two_enqueues(rejection: AnyOpened) -> None:
    engine, device = rejection()
    run(engine, [prompts(2), decode(2), decode(2, drafts=0)])
    for drafts, wanted in ((5, ROUND), (0, PLAIN)):
        before = len(device.ops)
        run(engine, [decode(2, drafts=drafts)])
        ops = device.ops[before:]
        assert [op.kind for op in ops] == ["record", "to_device", "record", "graph", "to_host", "record"]
        assert names(ops) == wanted
    assert [part.kind for part in ops[3].parts] == ["clear", "pass", "launch"], "nobody verified anything"


def test_next_draft_is_enqueued_before_results_are_read(rejection: AnyOpened) -> None:
    engine, device = rejection()
    run(engine, [prompts(2), decode(2)])
    first, second = engine.submit_round(decode(2)), engine.submit_round(decode(2))
    assert names(device.ops)[-2 * len(ROUND) :] == ROUND * 2
    one, two = engine.collect_round(first), engine.collect_round(second)
    # Round n + 1 went on from round n's tokens, though nobody on the host knew them.
    last = one.decode.tokens[0, one.decode.emitted_len[0] - 1]
    assert two.decode.tokens[0, 0] != last or one.decode.emitted_len[0] == 1


def passes(ops: list[Op]) -> list[Op]:
    return [part for op in ops for part in (op.parts or (op,)) if part.kind == "pass"]


def test_passes_update_whole_caches_in_place(rejection: AnyOpened) -> None:
    """Both plans see all slots at one address; besides, no output overlaps anything (the recording device looks)."""
    engine, device = rejection()
    run(engine, [prompts(1), prompts(1, first_slot=2), decode(1), decode(3), decode(2, drafts=0)])
    seen: dict[str, set[int]] = {}
    for op in passes(device.ops):
        addresses, shapes = op.detail["addresses"], op.detail["shapes"]
        for name, address in addresses.items():
            if name.startswith("past_"):
                assert addresses[name.replace("past_", "present_")] == address
                assert shapes[name][0] == 4
                seen.setdefault(name, set()).add(address)
            # TensorRT wants tensors at such addresses.
            assert address % 256 == 0, name
    assert all(len(found) == 1 for found in seen.values())
    assert len(set.union(*seen.values())) == len(seen)
    assert {name.partition(".")[0] for name in seen} == {"past_k", "past_v", "past_drafter"}


def test_verify_plan_reads_the_rows_where_the_draft_plan_leaves_them(rejection: AnyOpened) -> None:
    engine, device = rejection()
    run(engine, [prompts(2), decode(2)])
    draft, verify = passes(device.ops)[-2:]
    assert (draft.name, verify.name) == ("drafter", "target")
    of, to = draft.detail["addresses"], verify.detail["addresses"]
    assert to["input_ids"] == of["token_ids"]
    assert to["cu_logits"] == of["cu_tokens"]
    shared = ["token_request", "token_position", "cu_tokens", "page_table", "positions", "seed"]
    shared += ["draft_tokens", "draft_entries", "draft_laws", "draft_totals", "draft_logits"]
    assert {name: to[name] for name in shared} == {name: of[name] for name in shared}
    state = engine._model.memory
    assert (of["anchors"], of["positions"]) == (state["anchors"], state["positions"])


def test_contexts_of_every_key_are_its_own(rejection: AnyOpened) -> None:
    """Shapes and addresses a graph is captured with are a function of its key, and no two keys share them."""
    engine, device = rejection()
    bound: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for requests, drafts in itertools.product(range(1, 5), (0, 7)):
        for tokens in range(requests, requests * (drafts + 1) + 1):
            key = RoundKey(requests, tokens, drafts, 1 if drafts else 0, 1, bans=False)
            contexts = engine._rounds._round.contexts(key)
            assert [context.plan.name for context in contexts] == ["target", "drafter"][: 2 if drafts else 1]
            found = tuple((tuple(sorted(c.shapes.items())), tuple(sorted(c.addresses.items()))) for c in contexts)
            own = (requests, tokens, drafts)
            assert bound.setdefault(found, own) == own
            for context in contexts:
                assert context.profile == 0
                context.close()
    assert len(bound) == 4 + sum(requests * 7 + 1 for requests in range(1, 5))


def test_first_use_of_a_key_moves_no_row(rejection: AnyOpened) -> None:
    """A key's passes run once before they are captured: that round must not count, whatever ran before it."""
    engine, device = rejection()
    fresh, other_device = rejection(cuda_graphs=False)
    batches = [prompts(3), decode(3), decode(3, drafts=0), decode(2), decode(3, drafts=1), decode(3)]
    for one, other in zip(run(engine, batches), run(fresh, batches), strict=True):
        for name in ("decode", "prompts"):
            rows, expected = getattr(one, name), getattr(other, name)
            if expected is not None:
                np.testing.assert_array_equal(rows.tokens, expected.tokens)
    for name in ("anchors", "positions", "remaining"):
        values = [d.read(e._model.memory[name], (4,), np.int32) for e, d in ((engine, device), (fresh, other_device))]
        np.testing.assert_array_equal(*values)
    assert (engine.graph_stats.eager_rounds, fresh.graph_stats.replays) == (0, 0)


def test_rows_that_ride_along_move_nothing(rejection: AnyOpened) -> None:
    """A bucket of four rows with one live row: the others, a prompt half read among them, go on as if alone."""
    engine, device = rejection()
    alone, _ = rejection()
    half = prompts(1, 5, first_slot=1).prompts
    assert half is not None
    unfinished = RoundBatch(
        None, type(half)(**{**fields(half), "max_new_tokens": np.zeros(0, np.int64), "sampling": sampling(0)}),
        "rejection",
    )  # fmt: skip
    rest = type(half)(**{**fields(half), "write_indices": np.array([5])})
    key = RoundKey(4, 9, 5, 1, 1, bans=False)
    run(engine, [prompts(1), unfinished])
    engine._rounds.key = lambda decode, acceptance: key
    run(engine, [decode(1), decode(1)])
    del engine._rounds.key
    run(alone, [unfinished])
    finished = RoundBatch(None, rest, "rejection")
    (one,), (other,) = run(engine, [finished]), run(alone, [finished])
    np.testing.assert_array_equal(one.prompts.tokens, other.prompts.tokens)
    cache = engine._model.cache
    for name, address in cache.bindings(1).items():
        size = 10 * cache.head_dim * 4
        expected = alone._device.read(alone._model.cache.bindings(1)[name], (size,), np.uint8)
        np.testing.assert_array_equal(device.read(address, (size,), np.uint8), expected)


def test_moved_slot_keeps_its_caches_and_state(rejection: AnyOpened) -> None:
    engine, device = rejection()
    run(engine, [prompts(3), decode(3)])
    model = engine._model
    device.finish()
    before = {n: device.read(model.memory[n], (4,), np.int32) for n in ("anchors", "positions", "remaining")}
    engine.copy_slot(2, 0, num_tokens=1000, num_context=1000)
    device.finish()
    for name, values in before.items():
        assert device.read(model.memory[name], (4,), np.int32)[0] == values[2]
    for cache in (model.cache, model.drafter_cache):
        size = cache.slot_bytes
        for name, address in cache.bindings(0).items():
            of, to = (device.read(address + slot * size, (size,), np.uint8) for slot in (2, 0))
            np.testing.assert_array_equal(of, to, err_msg=name)


def test_rounds_of_another_kind_are_refused(rejection: AnyOpened) -> None:
    engine, _ = rejection()
    run(engine, [prompts(1)])
    with pytest.raises(DeviceError, match="the plans accept by rejection, not by coupled"):
        engine.submit_round(RoundBatch(decode(1).decode, None, "coupled"))
    schedule = DeviceSchedule("early_stop", 5, 0.0, 0, 5, step_time_us=np.ones(9, np.float32))
    with pytest.raises(DeviceError, match="the plans schedule by threshold, not by early_stop"):
        engine.submit_round(RoundBatch(DecodeRows(np.array([5]), sampling(1), schedule), None, "rejection"))
    with pytest.raises(DeviceError, match="choose tokens themselves and cannot be told to leave some out"):
        engine.submit_round(decode(1, ban_until=9))
    with pytest.raises(DeviceError, match="a round of 5 requests .* exceeds the engine's 4 requests"):
        engine.submit_round(decode(5))


def test_greedy_plans_refuse_rows_that_sample(opened_plugins: AnyOpened) -> None:
    engine, _ = opened_plugins("toy", "greedy")
    run(engine, [prompts(1), decode(1)])
    rows = RowSampling(**{**fields(sampling(1)), "temperature": np.ones(1, np.float32)})
    batch = RoundBatch(DecodeRows(np.zeros(1, np.int64), rows, None), None, "rejection")
    with pytest.raises(DeviceError, match="the plans accept by greedy, which samples nothing"):
        engine.submit_round(batch)


def test_thresholds_are_each_requests_own(rejection: AnyOpened) -> None:
    engine, _ = rejection()
    own = np.array([0.0, 0.1, 1.5], np.float32)
    schedule = DeviceSchedule("threshold", 7, own, 0, 21)
    batch = RoundBatch(DecodeRows(np.full(3, 7), sampling(3), schedule), None, "rejection")
    result = run(engine, [prompts(3), batch])[1]
    survival = np.cumprod(result.confidence.astype(np.float64), axis=1)
    expected = np.minimum.accumulate(survival >= own[:, None], axis=1).sum(axis=1)
    assert result.verify_len.tolist() == expected.tolist()
    assert result.verify_len[0] == 7 > result.verify_len[1] > result.verify_len[2] == 0


def test_rows_differ_in_sampling(toy_weights: Written, rejection: AnyOpened) -> None:
    """Seeds, temperatures and filters are each row's own: rows alone give what they give together."""
    engine, _ = rejection()
    values = {"temperature": np.array([0.0, 1.0, 2.0], np.float32), "seed": np.array([3, 4, 5], np.uint64)}
    values["top_k"] = np.array([0, 0, 3])
    sampled = RowSampling(**{**fields(sampling(3)), **values})
    schedule = DeviceSchedule("fixed", 5, 0.0, 0, 15)
    together = RoundBatch(DecodeRows(np.full(3, 5), sampled, schedule), None, "rejection")
    whole = run(engine, [prompts(3), *[together] * 3])[1:]
    row = prompts(3).prompts
    assert row is not None
    for index in range(3):
        alone, _ = rejection()
        one = RowSampling(**{name: value[index : index + 1] for name, value in fields(sampled).items()})
        own = type(row)(
            **{**fields(row), "token_ids": row.token_ids[3 * index : 3 * index + 3], "row_lens": np.array([3])}
            | {"write_indices": np.zeros(1, np.int64), "max_new_tokens": np.array([30]), "sampling": sampling(1)}
        )
        single = RoundBatch(DecodeRows(np.full(1, 5), one, schedule), None, "rejection")
        for together_result, result in zip(
            whole, run(alone, [RoundBatch(None, own, "rejection"), *[single] * 3])[1:], strict=True
        ):
            count = result.decode.emitted_len[0]
            assert together_result.decode.emitted_len[index] == count
            assert together_result.decode.tokens[index, :count].tolist() == result.decode.tokens[0, :count].tolist()


def test_rounds_are_timed_on_free_slots(rejection: AnyOpened) -> None:
    engine, device = rejection()
    # The recording device's clock counts ops, and a round is one, with drafts or without; drafts take 1 us at least.
    assert engine.pass_timer.verify_us(3, 9, 16) == engine.pass_timer.verify_us(3, 3, 16) == 2.0
    assert engine.pass_timer.draft_us(3, 16) == 1.0
    assert not [op for op in device.ops if op.kind == "to_host"], "no logits travel"
    fresh, _ = rejection()
    batches = [prompts(3), decode(3), decode(3)]
    for one, other in zip(run(engine, batches), run(fresh, batches), strict=True):
        rows, expected = one.decode or one.prompts, other.decode or other.prompts
        np.testing.assert_array_equal(rows.tokens, expected.tokens)
