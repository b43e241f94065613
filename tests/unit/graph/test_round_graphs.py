"""The two graphs of a plugin engine, the core in place of the plugins, against the CPU engine and its session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.plugin_graph import PluginGraph
from helpers.plugin_heads import CoreHeads
from helpers.plugin_pair import MAX_SEQ_LEN, MAX_TOKENS, make_pair, requests, session_tokens
from helpers.plugin_rounds import PluginRounds, RoundRequest
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, make_engine, small_drafter

from trtllm_dspark import _core
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph import (
    DrafterSource,
    RoundDrafter,
    RoundOptions,
    WeightDtype,
    write_draft,
    write_target,
    write_verify,
)
from trtllm_dspark.graph.lowering import TrtPluginLowering

TARGETS = {
    "llama": SMALL,
    "qwen3": replace(SMALL, architecture="qwen3", qk_norm=True),
    "bias_tied": replace(SMALL, attention_bias=True, tie_word_embeddings=True),
}
NO_MARKOV: dict[str, Any] = {"markov_head": "none", "markov_rank": 0, "confidence_with_markov": False}
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "none": NO_MARKOV,
    "confidence_without_markov": {"confidence_with_markov": False},
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_passes_equal_the_cpu_engine(target: ModelConfig, head: dict[str, Any], tmp_path: Path) -> None:
    pair = make_pair(tmp_path, target, small_drafter(target, **head))
    wanted = requests()[:2]
    pair.rounds.generate(wanted, chunk=5)
    # What the last draft and the last verify pass saw, computed again by the CPU engine, one request alone.
    last = pair.rounds.verify.seen["DsparkRaggedAccept"]
    tokens = np.concatenate([wanted[0].prompt, wanted[0].tokens])
    logits, features = pair.tiny.target(tokens[: wanted[0].num_cached])
    first = int(last["positions"][0])
    rows = np.arange(first, wanted[0].num_cached)
    assert np.abs(last["target_logits"][: len(rows)] - logits[rows]).max() < 1e-3
    pair.tiny.absorb(features[:first])
    block = pair.tiny.engine.draft_block(tokens[first : first + 1], np.array([first]))
    drafted = pair.rounds.draft.seen["DsparkMarkovDraft"]
    assert np.abs(drafted["base_logits"][0] - block.base_logits[0]).max() < 1e-3
    schedule = pair.rounds.draft.seen["DsparkConfidenceSchedule"]
    assert np.abs(schedule["hidden"][0] - block.hidden[0]).max() < 1e-3


@pytest.mark.parametrize("int8", [False, True])
def test_confidence_reads_the_table_of_the_core(int8: bool, tmp_path: Path) -> None:
    """The folded Markov half has the bits the core computes from W1 itself."""
    pair = make_pair(tmp_path, options=RoundOptions("rejection", "threshold", int8_heads=int8))
    pair.rounds.generate(requests()[:1])
    seen = pair.rounds.draft.seen["DsparkConfidenceSchedule"]
    folded = CoreHeads().confidence(seen, seen["anchors"].astype(np.int64), seen["draft_tokens"].astype(np.int64))
    expected = _core.confidence(
        pair.engine.heads, seen["hidden"], seen["anchors"].astype(np.int64), seen["draft_tokens"].astype(np.int64)
    )
    assert np.array_equal(folded, expected)


ROUNDS = {
    "greedy": ("greedy", "threshold:0.3", 0.0, {}),
    "greedy_fixed": ("greedy", "fixed", 0.0, {}),
    "rejection": ("rejection", "threshold:0.3", 0.8, {}),
    "rejection_candidates": ("rejection", "threshold:0.3", 0.8, {"num_candidates": 12}),
    "rejection_int8": ("rejection", "threshold:0.3", 0.8, {"int8_heads": True}),
    "coupled": ("coupled", "threshold:0.3", 0.8, {}),
    "coupled_early_stop": ("coupled", "early_stop", 0.8, {}),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_give_the_tokens_of_the_cpu_session(name: str, tmp_path: Path) -> None:
    acceptance, speculation, temperature, more = ROUNDS[name]
    options = RoundOptions(acceptance, speculation.partition(":")[0], **more)
    pair = make_pair(tmp_path, options=options)
    wanted, made = requests(temperature), requests(temperature)
    # The session would measure a cost table first; coupled tokens do not depend on what is verified.
    speculation = "off" if speculation == "early_stop" else speculation
    session = pair.session(speculation, "rejection" if acceptance == "greedy" else acceptance)
    assert pair.rounds.generate(made) == session_tokens(session, wanted)
    assert any(any(lens) for lens in pair.rounds.verified)


def test_rounds_of_a_reduced_vocabulary_and_shorter_blocks_give_the_tokens_of_the_cpu_session(tmp_path: Path) -> None:
    kept = np.arange(0, SMALL.vocab_size, 2)
    pair = make_pair(tmp_path, kept=kept, max_draft_len=3)
    wanted, made = requests(1.1), requests(1.1)
    assert pair.rounds.generate(made) == session_tokens(pair.session("threshold:0.3", "rejection"), wanted)
    assert any(any(lens) for lens in pair.rounds.verified)
    assert set(pair.rounds.draft.seen["DsparkConfidenceSchedule"]["draft_tokens"].ravel().tolist()) <= set(
        kept.tolist()
    )


def test_drafter_without_confidence_head_is_drafted_and_accepted(tmp_path: Path) -> None:
    drafter = small_drafter(confidence=False, confidence_with_markov=False)
    pair = make_pair(tmp_path, drafter=drafter, options=RoundOptions("greedy", "fixed"))
    made = requests()
    assert pair.rounds.generate(made) == session_tokens(pair.session("fixed", "rejection"), requests())
    assert not pair.rounds.calibrated


def test_engine_without_drafter_decodes_plainly(tmp_path: Path) -> None:
    tiny = make_engine(tmp_path, max_seq_len=MAX_SEQ_LEN)
    lowering = TrtPluginLowering(128, 2, "float32")
    write_verify(
        tmp_path,
        SMALL,
        tiny.arrays,
        max_seq_len=MAX_SEQ_LEN,
        lowering=lowering,
        options=RoundOptions(),
        weight_dtype="float32",
    )
    graph = PluginGraph(tmp_path / "target.onnx", CoreHeads(), {})
    tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size, 12)
    out = graph.run(single_pass(tokens))
    assert np.abs(out["logits"][0] - tiny.target(tokens)[0][-1]).max() < 1e-3
    assert out["out_tokens"].tolist() == [[int(out["logits"][0].argmax()), -1]]


def single_pass(tokens: np.ndarray, slot: int = 1) -> dict[str, np.ndarray]:
    """Inputs of one request's whole prompt, greedy, no drafts."""
    count, none = len(tokens), np.zeros(1, np.int32)
    return {
        "input_ids": tokens.astype(np.int32),
        "token_request": np.zeros(count, np.int32),
        "token_position": np.arange(count, dtype=np.int32),
        "cu_tokens": np.array([0, count], np.int32),
        "page_table": np.array([[slot]], np.int32),
        "logit_rows": np.array([count - 1], np.int32),
        "cu_logits": np.array([0, 1], np.int32),
        "positions": np.array([count - 1], np.int32),
        "temperature": np.zeros(1, np.float32),
        "top_k": none,
        "top_p": np.ones(1, np.float32),
        "seed": np.zeros(1, np.int64),
    }


def draft_inputs(rounds: PluginRounds, slots: list[int], anchors: list[int], positions: list[int]) -> Any:
    made = [RoundRequest(np.zeros(1, np.int64), 9, slot) for slot in slots]
    own = {"thresholds": np.full(len(slots), rounds.terms[0])} if rounds.has_thresholds else {}
    return (
        PluginRounds.sampling(made)
        | own
        | {
            "anchors": np.array(anchors, np.int32),
            "positions": np.array(positions, np.int32),
            "caps": np.full(len(slots), rounds.gamma, np.int32),
            "limits": rounds.limits,
            "terms": rounds.terms,
            "step_time_us": np.ones(rounds.table_len, np.float32),
            "inv_temperature": np.ones(rounds.gamma, np.float32),
            "position_bias": np.zeros(rounds.gamma, np.float32),
        }
    )


def test_failed_draft_is_not_verified_in_any_schedule(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, options=RoundOptions("rejection", "fixed"))
    caches = pair.rounds.caches
    for name in caches:
        if name.startswith("drafter."):
            caches[name][1] = np.nan
    out = pair.rounds.draft.run(draft_inputs(pair.rounds, [0, 1], [5, 6], [8, 9]))
    assert out["draft_status"].tolist()[0] == 0 != out["draft_status"].tolist()[1]
    assert out["draft_tokens"][1].tolist() == [-1] * 5
    assert out["verify_len"].tolist() == [5, 0]
    assert out["token_ids"][:7].tolist() == [5, *out["draft_tokens"][0].tolist(), 6]


def test_padding_rows_write_nothing_and_change_nothing(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    alone = pair.rounds.draft.run(draft_inputs(pair.rounds, [2], [5], [8]))
    before = {name: cache.copy() for name, cache in pair.rounds.caches.items()}
    padded = pair.rounds.draft.run(draft_inputs(pair.rounds, [2, -1], [5, 0], [8, 0]))
    for name in ("draft_tokens", "verify_len", "confidence"):
        assert np.array_equal(alone[name][0], padded[name][0])
    assert all(np.array_equal(before[name], cache) for name, cache in pair.rounds.caches.items())


@pytest.mark.parametrize("weight_dtype", ["w8a16", "w4a16", "fp8"])
def test_weight_only_formats_pass_the_checker(weight_dtype: WeightDtype, tmp_path: Path) -> None:
    target = replace(SMALL, head_dim=64)
    drafter, rng = small_drafter(target), np.random.default_rng(0)
    arrays, own, lowering = random_arrays(target, rng), drafter_arrays(drafter, rng), TrtPluginLowering(128, 4)
    written = write_verify(
        tmp_path,
        target,
        arrays,
        max_seq_len=MAX_SEQ_LEN,
        lowering=lowering,
        options=RoundOptions(),
        drafter=RoundDrafter(drafter, own, lowering, 5, weight_dtype),
        weight_dtype=weight_dtype,
    )
    source = DrafterSource(drafter, own, target, arrays, written)
    limits: Any = {"max_seq_len": MAX_SEQ_LEN, "max_draft_len": 5, "max_num_tokens": MAX_TOKENS}
    write_draft(tmp_path, source, lowering=lowering, options=RoundOptions(), weight_dtype=weight_dtype, **limits)
    for stem in ("target", "drafter"):
        nodes = onnx.load(tmp_path / f"{stem}.onnx", load_external_data=False).graph.node
        # Query-key-value, output, gate-up and down of each layer; the drafter's context has key-value of two more.
        count = sum(node.op_type == "DequantizeLinear" for node in nodes)
        assert count == {"target": 4 * 3 + 2, "drafter": 4 * 2}[stem]


def test_drafter_may_compute_in_another_type_than_its_target(tmp_path: Path) -> None:
    target, half = replace(SMALL, head_dim=64), TrtPluginLowering(128, 4, "bfloat16")
    drafter = small_drafter(target)
    own, lowering = drafter_arrays(drafter, np.random.default_rng(0)), TrtPluginLowering(128, 4, "float16")
    arrays = random_arrays(target, np.random.default_rng(1))
    round_drafter = RoundDrafter(drafter, own, lowering, 5, "float16")
    options = RoundOptions()
    written = write_verify(
        tmp_path, target, arrays, max_seq_len=MAX_SEQ_LEN, lowering=half, options=options, drafter=round_drafter
    )
    source = DrafterSource(drafter, own, target, arrays, written)
    write_draft(
        tmp_path,
        source,
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=5,
        max_num_tokens=MAX_TOKENS,
        lowering=lowering,
        options=options,
        weight_dtype="float16",
    )
    for name, kinds in (("target", {"past_k.0": 16, "past_drafter.k.0": 10}), ("drafter", {"past_drafter.k.0": 10})):
        model = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False)
        found = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        assert {key: found[key] for key in kinds} == kinds


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    arrays, lowering = random_arrays(SMALL, np.random.default_rng(0)), TrtPluginLowering(128, 4, "bfloat16")
    with pytest.raises(ConfigError, match="head dimensions 64 and 128, this model has 16"):
        write_verify(tmp_path, SMALL, arrays, max_seq_len=64, lowering=lowering, options=RoundOptions())
    drafter = small_drafter(confidence=False)
    other = RoundDrafter(drafter, {}, replace(lowering, num_slots=5), 5, "bfloat16")
    with pytest.raises(ConfigError, match="4 x 128 and 5 x 128"):
        write_verify(tmp_path, SMALL, arrays, max_seq_len=64, lowering=lowering, options=RoundOptions(), drafter=other)
    single = replace(lowering, dtype_name="float32")
    written = write_target(tmp_path, SMALL, arrays, max_seq_len=64, weight_dtype="float32")
    source = DrafterSource(drafter, {}, SMALL, arrays, written)
    limits: Any = {"max_seq_len": 64, "max_draft_len": 5, "max_num_tokens": 64, "weight_dtype": "float32"}
    with pytest.raises(ConfigError, match="no confidence head.*fixed"):
        write_draft(tmp_path, source, lowering=single, options=RoundOptions(), **limits)
    with pytest.raises(ConfigError, match="acceptance must be one of"):
        RoundOptions(acceptance="typical")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_candidates must be 0 to 256"):
        RoundOptions(num_candidates=257)
