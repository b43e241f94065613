"""Random device rounds for the kernels between the passes, and plain loops that say what they must leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.kernels.backends import Backend
from helpers.kernels.rounds import launch
from trtllm_dspark import _core
from trtllm_dspark.engine._packing import pack_rows


@dataclass(frozen=True)
class StateShape:
    """What a generated round looks like."""

    num_requests: int = 5
    num_active: int = 3
    block_size: int = 4
    draft_len: int = 3
    padding: int = 3
    vocab: int = 37
    max_banned: int = 2
    seed: int = 0


STATES = {
    "some_ride_along": StateShape(),
    "all_active": StateShape(num_active=5, seed=1),
    "none_active": StateShape(num_active=0, seed=2),
    "one": StateShape(num_requests=1, num_active=1, padding=0, block_size=1, draft_len=1, max_banned=1, seed=3),
    "no_block": StateShape(block_size=0, seed=4),
    "many": StateShape(num_requests=130, num_active=117, block_size=8, draft_len=7, padding=40, seed=5),
}


def check_state(backend: Backend, shape: StateShape) -> None:
    """All four kernels against loops, over one round; what rides along does not move."""
    random = np.random.default_rng(shape.seed)
    rows, gamma = shape.num_requests, shape.draft_len
    active = np.array([shape.num_active], np.int32)
    anchors = random.integers(0, shape.vocab, rows).astype(np.int32)
    positions = random.integers(0, 50, rows).astype(np.int32)
    remaining = random.integers(0, gamma + 3, rows).astype(np.int32)
    max_drafts = random.integers(0, gamma + 1, rows).astype(np.int32)
    live = (np.arange(rows) < shape.num_active) & (remaining > 0)
    state = {"active": active, "anchors": anchors, "positions": positions, "remaining": remaining}

    begun = _run(
        backend, "round_begin", {"num_requests": rows, "block_size": shape.block_size, "mask_token": 36}, state,
        {"starts": ((rows,), np.int64), "block_ids": ((rows, max(shape.block_size, 1)), np.int64)},
    )  # fmt: skip
    draft_status = (random.random(rows) < 0.2).astype(np.int32)
    found = _run(
        backend, "round_caps", {"num_requests": rows},
        state | {"max_drafts": max_drafts, "draft_status": draft_status},
        {"caps": ((rows,), np.int32), "live": ((rows,), np.int32)},
    )  # fmt: skip
    caps = np.where(live & (draft_status == 0), np.minimum(max_drafts, remaining - 1), 0)
    np.testing.assert_array_equal(found["caps"], np.maximum(caps, 0), err_msg=f"{shape=}")
    np.testing.assert_array_equal(found["live"], live, err_msg=f"{shape=}")
    np.testing.assert_array_equal(begun["starts"], positions, err_msg=f"{shape=}")
    if shape.block_size:
        ids = np.full((rows, shape.block_size), 36)
        ids[:, 0] = anchors
        np.testing.assert_array_equal(begun["block_ids"], ids, err_msg=f"{shape=}")

    drafts = random.integers(0, shape.vocab, (rows, gamma))
    lengths = random.integers(0, np.maximum(caps, 0) + 1).astype(np.int64)
    tokens = int(rows + lengths.sum())
    packed = _core.pack_tokens(
        anchors.astype(np.int64), drafts, lengths, positions.astype(np.int64), pad_to=tokens + shape.padding
    )
    found = _run(
        backend, "round_rows", {"num_requests": rows, "num_tokens": tokens + shape.padding, "row_len": gamma + 1},
        {
            "cu_tokens": packed.cu_tokens.astype(np.int32), "token_ids": packed.token_ids.astype(np.int32),
            "token_request": packed.token_request.astype(np.int32),
            "token_position": packed.token_position.astype(np.int32),
        },
        {
            **{name: ((tokens + shape.padding,), np.int64) for name in ("input_ids", "positions", "pack_index")},
            "pad_index": ((rows, gamma + 1), np.int64),
        },
    )  # fmt: skip
    wanted = pack_rows(1 + lengths, positions.astype(np.int64), min_width=gamma + 1)
    ids = packed.token_ids[:tokens]
    for name, values in {"input_ids": ids, "positions": wanted.positions, "pack_index": wanted.pack_index}.items():
        np.testing.assert_array_equal(found[name][:tokens], values, err_msg=f"{name} {shape=}")
        assert not found[name][tokens:].any(), f"padding of {name} is 0 {shape=}"
    np.testing.assert_array_equal(found["pad_index"], wanted.pad_index, err_msg=f"{shape=}")
    _check_ban(backend, shape, random, packed.cu_tokens.astype(np.int32), positions, tokens + shape.padding)
    _check_commit(backend, shape, random, state, live)


def _check_ban(
    backend: Backend, shape: StateShape, random: np.random.Generator, cu_tokens: Any, positions: Any, tokens: int
) -> None:
    rows = shape.num_requests
    logits = random.normal(size=(tokens, shape.vocab)).astype(np.float32)
    banned = random.integers(-1, shape.vocab, (rows, shape.max_banned)).astype(np.int32)
    until = np.where(random.random(rows) < 0.6, positions + random.integers(0, 5, rows), 0).astype(np.int32)
    expected = logits.copy()
    for row in range(rows):
        for k in range(cu_tokens[row + 1] - cu_tokens[row]):
            if positions[row] + k + 1 < until[row]:
                expected[cu_tokens[row] + k, banned[row][banned[row] >= 0]] = -np.inf
    scalars = {"num_requests": rows, "num_tokens": tokens, "vocab": shape.vocab, "max_banned": shape.max_banned}
    inputs = {"cu_tokens": cu_tokens, "positions": positions, "ban_until": until, "banned": banned}
    after = _in_place(backend, "round_ban", scalars, inputs, {"logits": logits})
    np.testing.assert_array_equal(after["logits"], expected, err_msg=f"{shape=}")


def _check_commit(
    backend: Backend, shape: StateShape, random: np.random.Generator, state: dict[str, Any], live: Any
) -> None:
    rows, gamma = shape.num_requests, shape.draft_len
    emitted = random.integers(0, gamma + 2, rows).astype(np.int32)
    out = random.integers(0, shape.vocab, (rows, gamma + 1)).astype(np.int32)
    expected = {name: state[name].copy() for name in ("anchors", "positions", "remaining")}
    for row in np.flatnonzero(live & (emitted > 0)):
        expected["anchors"][row] = out[row, emitted[row] - 1]
        expected["positions"][row] += emitted[row]
        expected["remaining"][row] -= emitted[row]
    inputs = {"active": state["active"], "out_tokens": out, "emitted_len": emitted}
    moving = {name: state[name] for name in expected}
    after = _in_place(backend, "round_commit", {"num_requests": rows, "draft_len": gamma}, inputs, moving)
    for name, values in expected.items():
        np.testing.assert_array_equal(after[name], values, err_msg=f"{name} {shape=}")


def _run(backend: Backend, op: str, scalars: Any, inputs: Any, outputs: Any) -> dict[str, Any]:
    names = backend.library.fields(op)
    return launch(backend, op, scalars, {name: inputs[name] for name in names if name in inputs}, outputs)


def _in_place(backend: Backend, op: str, scalars: Any, inputs: Any, moving: dict[str, Any]) -> dict[str, Any]:
    placed = {name: backend.put(np.ascontiguousarray(array)) for name, array in (inputs | moving).items()}
    backend.library.launch(op, **scalars, **{name: buffer.address for name, buffer in placed.items()})
    backend.synchronize()
    return {name: placed[name].read() for name in moving}
