"""A build whose engine computes something else than its checkpoint is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_dspark.build import BuildConfig, build_engine, emit, verify
from trtllm_dspark.checkpoint.arrays import LazyArrays
from trtllm_dspark.errors import EngineError

TARGET_TENSOR, DRAFTER_TENSOR = "layers.2.down.weight", "layers.1.o.weight"


def spoil(monkeypatch: pytest.MonkeyPatch, writer: str, tensor: str, change: Any) -> None:
    """Let `writer` store a changed tensor, as a mistake in a graph or a lost write would."""
    original = getattr(emit, writer)

    def write(directory: Path, *arguments: Any, **options: Any) -> Any:
        read = LazyArrays.__getitem__

        def get(self: LazyArrays, name: str) -> Any:
            values = read(self, name)
            return change(values) if name == tensor else values

        with monkeypatch.context() as patch:
            patch.setattr(LazyArrays, "__getitem__", get)
            return original(directory, *arguments, **options)

    monkeypatch.setattr(emit, writer, write)


@pytest.mark.parametrize("weight_dtype", ["float32", "int8", "w8a8"])
def test_verify_sound_build_reports_small_errors(tiny_config: BuildConfig, weight_dtype: Any) -> None:
    errors = build_engine(replace(tiny_config, weight_dtype=weight_dtype)).errors
    assert errors.features is not None
    assert errors.draft_logits is not None
    for value in (errors.logits, errors.features, errors.draft_logits):
        assert 0 <= value < verify.TOLERANCE[weight_dtype] / 2


@pytest.mark.parametrize("weight_dtype", ["float32", "int8"])
@pytest.mark.parametrize("change", [np.zeros_like, np.negative, lambda values: values[::-1]])
def test_verify_wrong_target_weight_is_refused_and_leaves_nothing(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch, weight_dtype: Any, change: Any
) -> None:
    spoil(monkeypatch, "write_target", TARGET_TENSOR, change)
    with pytest.raises(EngineError, match="the engine's target logits differ from the checkpoint's by"):
        build_engine(replace(tiny_config, weight_dtype=weight_dtype))
    assert os.listdir(tiny_config.output_dir.parent) == []


@pytest.mark.parametrize("limits", [{"max_seq_len": 2}, {"max_num_tokens": 2, "max_draft_len": 1}])
def test_verify_engine_smaller_than_the_check_is_built(tiny_config: BuildConfig, limits: dict[str, int]) -> None:
    assert build_engine(replace(tiny_config, **limits)).errors.logits < verify.TOLERANCE["int8"]


def test_verify_wrong_drafter_weight_is_refused(tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "write_drafter", DRAFTER_TENSOR, np.negative)
    with pytest.raises(EngineError, match="the engine's draft logits differ from the checkpoint's by"):
        build_engine(tiny_config)


def test_verify_output_that_is_not_finite_is_refused(tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "write_target", TARGET_TENSOR, lambda values: np.full_like(values, 1e30))
    with pytest.raises(EngineError, match="the engine's target logits differ"):
        build_engine(replace(tiny_config, weight_dtype="float32"))
