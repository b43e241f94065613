"""Passes that do not fit the engine are refused before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from helpers.tiny_engine import SMALL, TinyEngine, make_engine, small_drafter

from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine._cache import KvCache
from trtllm_dspark.engine.base import ContextBatch, TokenBatch
from trtllm_dspark.errors import ConfigError, DeviceError, EngineError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    directory = tmp_path_factory.mktemp("engine")
    return make_engine(directory, SMALL, small_drafter(), max_seq_len=100, max_num_tokens=50)


def batch(rows: Sequence[int], starts: Sequence[int], num_tokens: int | None = None, slot: int = 0) -> TokenBatch:
    count = sum(rows) if num_tokens is None else num_tokens
    return TokenBatch(np.zeros(count, np.int64), np.array(rows), np.array(starts), np.zeros(1, np.int64), slot)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (batch([3, 2], [0, 0], num_tokens=6), "do not add up"),
        (batch([3, 0], [0, 0]), "do not add up"),
        (batch([3], [0, 0]), "do not add up"),
        (batch([1] * 5, [0] * 5), "exceeds the engine's 4 slots"),
        (batch([1], [0], slot=4), "exceeds the engine's 4 slots"),
        (batch([1], [0], slot=-1), "exceeds the engine's 4 slots"),
        (batch([51], [0]), "or 50 tokens"),
        (batch([2], [99]), "beyond the engine's 100 tokens"),
        (batch([1], [-1]), "beyond the engine's 100 tokens"),
    ],
)
def test_pass_outside_the_limits_is_refused(tiny: TinyEngine, case: TokenBatch, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        tiny.engine.verify(case)


def test_last_position_of_every_slot_is_usable(tiny: TinyEngine) -> None:
    out = tiny.engine.verify(batch([1, 40], [99, 0], slot=2))
    assert np.isfinite(out.logits).all()


def test_token_outside_the_vocabulary_is_a_device_error(tiny: TinyEngine) -> None:
    ids = np.array([SMALL.vocab_size])
    with pytest.raises(DeviceError, match="ONNX Runtime failed"):
        tiny.engine.verify(TokenBatch(ids, np.array([1]), np.array([0]), np.array([0])))
    assert np.isfinite(tiny.target(np.array([1, 2]))[0]).all()


def test_context_outside_the_limits_is_refused(tiny: TinyEngine) -> None:
    assert tiny.drafter is not None
    features = np.zeros((2, tiny.drafter.feature_size), np.float32)
    with pytest.raises(DeviceError, match="beyond the engine's"):
        tiny.engine.absorb(ContextBatch(features, np.array([2]), np.array([99])))
    with pytest.raises(DeviceError, match="do not add up"):
        tiny.engine.absorb(ContextBatch(features, np.array([3]), np.array([0])))


def test_block_outside_the_slots_is_refused(tiny: TinyEngine) -> None:
    with pytest.raises(DeviceError, match="does not fit the engine's slots"):
        tiny.engine.draft_block(np.zeros(5, np.int64), np.zeros(5, np.int64))


def test_engine_without_drafter_refuses_to_draft(tmp_path: Path) -> None:
    plain = make_engine(tmp_path)
    with pytest.raises(DeviceError, match="--draft_checkpoint"):
        plain.engine.draft_block(np.zeros(1, np.int64), np.zeros(1, np.int64))


def test_closed_engine_refuses_and_closes_again(tmp_path: Path) -> None:
    plain = make_engine(tmp_path)
    plain.engine.close()
    plain.engine.close()
    with pytest.raises(DeviceError, match="closed"):
        plain.target(np.array([1]))


def test_damaged_graph_is_an_engine_error(tmp_path: Path) -> None:
    tiny = make_engine(tmp_path)
    (tmp_path / "target.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match="cannot load"):
        type(tiny.engine)(tmp_path, SMALL, None, tiny.engine.limits)


def test_caches_beyond_memory_are_a_device_error() -> None:
    with pytest.raises(DeviceError, match=r"not enough memory for caches of \d+\.\d GB; build with a smaller"):
        KvCache(num_layers=1, num_slots=4096, num_kv_heads=8, head_dim=64, length=2**31)


def test_graph_beyond_memory_is_a_device_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*args: object, **options: object) -> None:
        raise RuntimeError(
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: std::bad_alloc"
        )

    monkeypatch.setattr(onnxruntime, "InferenceSession", exhaust)
    with pytest.raises(DeviceError, match="not enough memory to load .*target.onnx"):
        make_engine(tmp_path)


def test_load_engine_needs_a_thread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        load_engine(tmp_path, num_threads=0)
