"""TensorRT engines of tiny pairs over a recording device, and the CPU engine of the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from helpers.random_model import random_arrays
from helpers.recording_device import GraphPlan, RecordingDevice
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from helpers.toy_pair import ToyPair
from helpers.trt_on_ort import attention_function
from trtllm_dspark.build.tensorrt.profiles import cache_len, engine_profiles
from trtllm_dspark.checkpoint import load_drafter, load_target
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.engine.tensorrt import TensorRtEngine
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.graph import HEADS_FILE, DrafterSource, read_heads, write_drafter, write_heads, write_target
from trtllm_dspark.graph.lowering import ORT, Lowering, TrtNativeLowering


class _Unchecked(TrtNativeLowering):
    """Takes the toy pair, whose layers hold the same zeros."""

    def check(self, model: onnx.ModelProto, directory: Path) -> None:
        """Refuse nothing."""


Arrays = Mapping[str, np.ndarray]
PairArrays = tuple[ModelConfig, Arrays, DrafterConfig, Arrays]
"""Target, its weights, drafter, its weights."""
PLANS = ("target", "drafter_context", "drafter_block")
TINY_LIMITS = BuildLimits(max_batch_size=4, max_seq_len=96, max_num_tokens=32, max_draft_len=5)


@dataclass(frozen=True)
class Written:
    """Graphs of one pair in both lowerings, in float32; `directory` holds the heads."""

    directory: Path
    target: ModelConfig
    drafter: DrafterConfig
    limits: EngineLimits
    sessions: dict[str, Any]
    profiles: list[dict[str, tuple[int, int]]]
    heads: Any
    head_tensors: dict[str, np.ndarray]
    cpu: OnnxRuntimeEngine


def random_pair(
    directory: Path, *, draft_token_ids: np.ndarray | None = None, limits: BuildLimits = TINY_LIMITS, **changes: Any
) -> Written:
    """Write a random pair: every logit counts, hardly a draft is right. `changes` are the drafter's."""
    return write_pair(directory, *random_weights(**changes), limits=limits, draft_token_ids=draft_token_ids)


def random_weights(**changes: Any) -> PairArrays:
    """Return the weights of the random pair."""
    rng = np.random.default_rng(0)
    target, drafter = SMALL, small_drafter(SMALL, **changes)
    arrays = random_arrays(target, rng)
    return target, arrays, drafter, drafter_arrays(drafter, rng)


def toy_pair(directory: Path, pair: ToyPair, *, limits: BuildLimits = TINY_LIMITS) -> Written:
    """Write the closed-form pair: four drafts of five are right."""
    weights = toy_weights(pair)
    limits = replace(limits, max_draft_len=weights[2].block_size)
    return write_pair(directory, *weights, limits=limits)


def toy_weights(pair: ToyPair) -> PairArrays:
    """Return the weights of the closed-form pair."""
    target = load_target(str(pair.target_dir))
    drafter = load_drafter(str(pair.drafter_dir), target.config)
    return target.config, target.arrays, drafter.config, drafter.arrays


def write_pair(
    directory: Path,
    target: ModelConfig,
    arrays: Arrays,
    drafter: DrafterConfig,
    own: Arrays,
    *,
    limits: BuildLimits,
    draft_token_ids: np.ndarray | None = None,
) -> Written:
    """Write a pair for ONNX Runtime and for TensorRT."""
    lowerings: dict[str, Lowering] = {
        "cpu": ORT,
        "trt": _Unchecked(cache_len(limits, drafter.block_size), "float32"),
    }
    for name, lowering in lowerings.items():
        (directory / name).mkdir()
        written = write_target(
            directory / name, target, arrays, max_seq_len=limits.max_seq_len,
            feature_layer_ids=drafter.target_layer_ids, weight_dtype="float32", lowering=lowering,
        )  # fmt: skip
        write_drafter(
            directory / name, DrafterSource(drafter, own, target, arrays, written), max_seq_len=limits.max_seq_len,
            max_draft_len=limits.max_draft_len, draft_token_ids=draft_token_ids, weight_dtype="float32",
            lowering=lowering,
        )  # fmt: skip
    write_heads(
        directory, drafter, own, vocab_size=target.vocab_size, draft_token_ids=draft_token_ids, weight_dtype="float32"
    )
    if draft_token_ids is not None:
        drafter = replace(drafter, draft_vocab_size=len(draft_token_ids))
    heads = load_heads(directory / HEADS_FILE, drafter, target.vocab_size)
    shapes = EngineLimits(
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_draft_len=limits.max_draft_len,
        vocab_size=target.vocab_size,
        draft_vocab_size=drafter.draft_vocab_size,
        feature_size=drafter.feature_size,
        mask_token_id=drafter.mask_token_id,
        has_drafter=True,
    )
    return Written(
        directory=directory,
        target=target,
        drafter=drafter,
        limits=shapes,
        sessions={name: _session(directory / "trt" / f"{name}.onnx") for name in PLANS},
        profiles=[{symbol: (1, profile.largest(symbol)) for symbol in "RSTL"} for profile in engine_profiles(limits)],
        heads=heads,
        head_tensors=read_heads(directory / HEADS_FILE),
        cpu=OnnxRuntimeEngine(directory / "cpu", target, drafter, shapes, heads, num_threads=1),
    )


def open_on(device: RecordingDevice, pair: Written, **options: Any) -> TensorRtEngine:
    """Return an engine of a pair on a device; `device.plans` are its plans."""
    device.plans = {
        name: GraphPlan(device, name, session, pair.profiles[:1] if name == "drafter_block" else pair.profiles)
        for name, session in pair.sessions.items()
    }
    return TensorRtEngine(
        device, device.plans, pair.target, pair.drafter, pair.limits, heads=pair.heads,
        head_tensors=pair.head_tensors, **options,
    )  # fmt: skip


def _session(path: Path) -> Any:
    model = onnx.load(path, load_external_data=False)
    kinds = {a.s.decode() for node in model.graph.node if node.domain == "trt" for a in node.attribute}
    for kind in kinds:
        model.functions.append(attention_function(kind))
    runnable = path.with_suffix(".ort.onnx")
    onnx.save(model, runnable)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    # It warns that caches are copied, which is how plans run here.
    options.log_severity_level = 3
    return ort.InferenceSession(runnable, options, providers=["CPUExecutionProvider"])
