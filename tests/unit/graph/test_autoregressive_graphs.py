"""Graphs of the autoregressive drafters against the NumPy reference, whatever shares a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.autoregressive import KINDS, write_autoregressive_drafter
from helpers.tiny_models import write_target

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.checkpoint import load_drafter, load_target
from trtllm_dspark.checkpoint.config import DrafterKind
from trtllm_dspark.engine import OnnxRuntimeEngine, load_engine
from trtllm_dspark.engine.base import ContextBatch, PairBatch
from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.reference.autoregressive import autoregressive_drafts

VOCAB = 192


def build(tmp_path: Path, kind: DrafterKind, **target_shape: int) -> tuple[Path, Path, Path]:
    target_dir = write_target(tmp_path / "target", **target_shape)
    drafter_dir = write_autoregressive_drafter(tmp_path / "drafter", kind, **target_shape)
    # The build compares the graphs with the reference itself, in float32.
    build_engine(
        BuildConfig(
            str(target_dir),
            tmp_path / "engine",
            draft_checkpoint=str(drafter_dir),
            weight_dtype="float32",
            max_batch_size=3,
            max_seq_len=128,
            max_num_tokens=32,
        )
    )
    return target_dir, drafter_dir, tmp_path / "engine"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_ragged_passes_equal_the_reference_row_by_row(tmp_path: Path, kind: DrafterKind, num_kv_heads: int) -> None:
    target_dir, drafter_dir, engine_dir = build(tmp_path, kind, num_key_value_heads=num_kv_heads)
    target = load_target(target_dir)
    drafter = load_drafter(drafter_dir, target.config)
    engine = load_engine(engine_dir)
    assert isinstance(engine, OnnxRuntimeEngine)
    head, rng = engine.draft_head, np.random.default_rng(0)
    counts, steps = [5, 1, 9], drafter.config.block_size
    features = [rng.standard_normal((n, drafter.config.feature_size)).astype(np.float32) for n in counts]
    tokens = [rng.integers(0, VOCAB, n - 1 + steps) for n in counts]
    # In two passes, the first of which leaves out the second request.
    first = np.array([3, 0, 4])
    state = np.zeros((3, target.config.hidden_size), np.float32)
    for begin, lengths in ((np.zeros(3, np.int64), first), (first, np.array(counts) - first)):
        parts = [(row, slice(b, b + n)) for row, (b, n) in enumerate(zip(begin, lengths, strict=True)) if n]
        batch = PairBatch(
            np.concatenate([features[row][part] for row, part in parts]),
            np.concatenate([tokens[row][part] for row, part in parts]),
            lengths,
            begin,
        )
        states = np.split(head.absorb(batch), np.cumsum(lengths)[:-1])
        for row, part in enumerate(states):
            if len(part):
                state[row] = part[-1]
    logits = []
    for step in range(steps):
        rows = np.array(counts) - 1 + step
        out = head.step(state, np.array([t[row] for t, row in zip(tokens, rows, strict=True)]), rows)
        alone = head.step(state[1:2], tokens[1][rows[1] : rows[1] + 1], rows[1:2], first_slot=1)
        np.testing.assert_array_equal(alone.logits[0], out.logits[1])
        state = out.state
        logits.append(out.logits)
    for row in range(3):
        expected = autoregressive_drafts(
            drafter.config, drafter.arrays, features[row], tokens[row].tolist(), target_arrays=target.arrays
        )
        np.testing.assert_allclose(np.stack([x[row] for x in logits]), expected.base_logits, rtol=1e-4, atol=2e-5)
    engine.close()


def test_passes_of_another_drafter_are_refused(tmp_path: Path) -> None:
    engine = load_engine(build(tmp_path, "mtp")[2])
    assert engine.limits.autoregressive
    one = np.ones(1, np.int64)
    with pytest.raises(DeviceError, match="no block drafter"):
        engine.draft_block(one, one)
    with pytest.raises(DeviceError, match="no block drafter"):
        engine.absorb(ContextBatch(np.zeros((1, 64), np.float32), one, one))
    assert isinstance(engine, OnnxRuntimeEngine)
    with pytest.raises(DeviceError, match="does not fit the engine's slots"):
        engine.draft_head.step(np.zeros((4, 64), np.float32), np.zeros(4, np.int64), np.zeros(4, np.int64))
    engine.close()
    with pytest.raises(DeviceError, match="no autoregressive drafter"):
        _ = engine.draft_head


def test_gpu_backends_refuse_them_by_name(tmp_path: Path) -> None:
    config = BuildConfig(
        str(write_target(tmp_path / "target")),
        tmp_path / "engine",
        draft_checkpoint=str(write_autoregressive_drafter(tmp_path / "drafter", "eagle3")),
        backend="tensorrt_rtx",
        gpu=GpuOptions(gpu_architectures=("sm89",)),
    )
    with pytest.raises(ConfigError, match="a drafter of kind eagle3 runs on --backend onnxruntime only"):
        build_engine(config)
