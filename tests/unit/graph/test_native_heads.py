"""The drafter's heads as standard operators: the greedy chain and the confidences of the core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from helpers.trt_on_ort import TrtOnOrt

from trtllm_dspark import _core
from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.graph import DrafterSource, write_drafter, write_heads, write_target
from trtllm_dspark.graph.lowering import TrtNativeLowering

HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "none": {"markov_head": "none", "markov_rank": 0, "confidence_with_markov": False},
    "confidence_without_markov": {"confidence_with_markov": False},
    "no_confidence": {"confidence": False},
}


@pytest.mark.parametrize("kept", [None, np.arange(1, SMALL.vocab_size, 3)], ids=["dense", "reduced"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_native_chain_and_confidence_equal_the_core(
    head: dict[str, Any], kept: np.ndarray | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    config, arrays = small_drafter(**head), random_arrays(SMALL, rng)
    own = drafter_arrays(config, rng)
    # Strong enough to overrule the base logits.
    own["markov.w2.weight"] *= 4
    lowering = TrtNativeLowering(96, "float32", native_heads=True)
    target = write_target(tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype="float32", lowering=lowering)
    write_drafter(
        tmp_path,
        DrafterSource(config, own, SMALL, arrays, target),
        max_seq_len=80,
        max_draft_len=4,
        weight_dtype="float32",
        lowering=lowering,
        draft_token_ids=kept,
    )
    path = write_heads(tmp_path, config, own, vocab_size=SMALL.vocab_size, draft_token_ids=kept, weight_dtype="float32")
    graph = TrtOnOrt(tmp_path / "drafter_block.onnx", 3)
    anchors = np.array([6, 7, 96])
    ids = np.full((3, 5), config.mask_token_id)
    ids[:, 0] = anchors
    calibration = {
        "inv_temperature": np.array([1, 0.5, 2, 1], np.float32),
        "position_bias": np.array([0, 0.25, -1, 0.5], np.float32),
    }
    out = graph.run(
        {"input_ids": ids, "write_indices": np.zeros(3, np.int64)} | (calibration if config.confidence else {})
    )

    vocab = SMALL.vocab_size if kept is None else len(kept)
    heads = load_heads(path, replace(config, draft_vocab_size=vocab), SMALL.vocab_size)
    greedy = _core.Sampling(np.zeros(3, np.float32), np.arange(3, dtype=np.uint64))
    draft = _core.draft_chain(
        heads, out["base_logits"], anchors, np.zeros(3, np.int64), greedy, hidden=out["hidden"], acceptance="greedy"
    )
    assert out["draft_tokens"].tolist() == draft.tokens.tolist()
    parallel = out["base_logits"].argmax(axis=2)
    parallel = parallel if kept is None else kept[parallel]
    assert (draft.tokens == parallel).all() == (config.markov_head == "none")
    assert ("confidence" in out) == config.confidence
    if config.confidence:
        expected = _core.confidence(
            heads,
            out["hidden"],
            anchors,
            draft.tokens,
            temperature=1 / calibration["inv_temperature"],
            bias=calibration["position_bias"],
        )
        assert np.abs(out["confidence"] - expected).max() < 1e-5


def test_heads_stay_out_of_the_graph_unless_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config, arrays = small_drafter(), random_arrays(SMALL, rng)
    lowering = TrtNativeLowering(96, "float32")
    target = write_target(tmp_path, SMALL, arrays, max_seq_len=80, weight_dtype="float32", lowering=lowering)
    source = DrafterSource(config, drafter_arrays(config, rng), SMALL, arrays, target)
    write_drafter(tmp_path, source, max_seq_len=80, max_draft_len=5, weight_dtype="float32", lowering=lowering)
    graph = onnx.load(tmp_path / "drafter_block.onnx", load_external_data=False).graph
    assert not any("markov" in tensor.name for tensor in graph.initializer)
    assert {"draft_tokens", "confidence"}.isdisjoint(value.name for value in graph.output)
