from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.random_model import random_arrays

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig, RopeScaling
from trtllm_dspark.reference._layers import rope_frequencies, rotate
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_target_longer_sequence_leaves_earlier_logits_unchanged(
    name: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    config: ModelConfig = request.getfixturevalue(name)
    arrays = random_arrays(config, rng)
    whole, part = target_forward(config, arrays, TOKENS).logits, target_forward(config, arrays, TOKENS[:5]).logits
    assert np.abs(whole[:5] - part).max() < 1e-12
    changed = target_forward(config, arrays, [7, *TOKENS[1:]]).logits
    assert np.abs(whole[-1] - changed[-1]).max() > 1e-3, "the last row does not see the first token"


def test_target_feature_ids_are_outputs_of_those_layers(qwen3: ModelConfig, rng: np.random.Generator) -> None:
    arrays = random_arrays(qwen3, rng)
    features = target_forward(qwen3, arrays, TOKENS, feature_layer_ids=(-1, 1)).features
    assert np.array_equal(features[:, :12], arrays["embed.weight"][TOKENS])
    shallow = replace(qwen3, num_layers=2)  # its last layer is layer 1, its head sees norm(output of layer 1)
    rows = features[:, 12:]
    normed = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-6) * arrays["norm.weight"]
    logits = target_forward(shallow, arrays, TOKENS).logits
    assert np.abs(normed @ arrays["lm_head.weight"].T - logits).max() < 1e-12


def test_target_equal_kv_heads_make_grouped_attention_plain(llama: ModelConfig, rng: np.random.Generator) -> None:
    arrays = random_arrays(llama, rng)
    full = dict(arrays)
    for layer in range(llama.num_layers):
        for kind in ("k", "v"):
            for part in ("weight", "bias"):
                key = f"layers.{layer}.{kind}.{part}"
                heads = arrays[key].reshape(2, 6, -1)
                full[key] = np.repeat(heads, 2, axis=0).reshape(24, *arrays[key].shape[1:])
    grouped = target_forward(llama, arrays, TOKENS).logits
    plain = target_forward(replace(llama, num_kv_heads=4), full, TOKENS).logits
    assert np.abs(grouped - plain).max() < 1e-12


def test_rope_pairs_halves_as_complex_rotation(qwen3: ModelConfig, rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, 2, 6))
    positions = np.array([0, 1, 2, 7, 40])
    angles = positions[:, None, None] * np.array([1e6 ** (-2 * i / 6) for i in range(3)])
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)
    assert np.abs(rotate(qwen3, x, positions) - np.concatenate([turned.real, turned.imag], -1)).max() < 1e-5


def test_rope_llama3_scaling_slows_long_waves_only(llama: ModelConfig) -> None:
    config = replace(llama, head_dim=64, rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    plain, scaled = rope_frequencies(replace(config, rope_scaling=None)), rope_frequencies(config)
    turns = 8192 * plain / (2 * math.pi)
    assert np.array_equal(scaled[turns > 4], plain[turns > 4])
    assert np.allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    assert np.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))


def test_drafter_context_ignores_input_norm_and_applies_k_norm(
    drafter: DrafterConfig, drafter_arrays: Arrays, rng: np.random.Generator
) -> None:
    features = rng.normal(size=(6, drafter.feature_size))
    base = drafter_context(drafter, drafter_arrays, features)
    other = drafter_arrays | {"layers.0.attn_norm.weight": np.full(12, 3.0, np.float32)}
    assert np.array_equal(base[0].keys, drafter_context(drafter, other, features)[0].keys)
    scaled = drafter_arrays | {"layers.0.k_norm.weight": 2 * drafter_arrays["layers.0.k_norm.weight"]}
    assert np.allclose(2 * base[0].keys, drafter_context(drafter, scaled, features)[0].keys, rtol=1e-12)
    assert np.array_equal(base[0].values, drafter_context(drafter, scaled, features)[0].values)


def test_drafter_context_in_two_parts_equals_whole(
    drafter: DrafterConfig, drafter_arrays: Arrays, rng: np.random.Generator
) -> None:
    features = rng.normal(size=(6, drafter.feature_size))
    whole = drafter_context(drafter, drafter_arrays, features)
    tail = drafter_context(drafter, drafter_arrays, features[4:], first_position=4)
    for layer in range(2):
        assert np.abs(whole[layer].keys[4:] - tail[layer].keys).max() < 1e-12
        assert np.abs(whole[layer].values[4:] - tail[layer].values).max() < 1e-12


def test_drafter_context_may_be_empty(drafter: DrafterConfig, drafter_arrays: Arrays, rng: np.random.Generator) -> None:
    """Before a request's first features arrive; its first block starts at position 0."""
    features = rng.normal(size=(1, drafter.feature_size))
    empty, full = (drafter_context(drafter, drafter_arrays, rows) for rows in (features[:0], features))
    assert [layer.keys.shape for layer in empty] == [(0, *layer.keys.shape[1:]) for layer in full]
    arrays = random_arrays(replace(drafter.backbone, num_layers=3), rng)
    alone = drafter_block(drafter, drafter_arrays, empty, 5, target_arrays=arrays)
    assert np.isfinite(alone.base_logits).all()
    assert (
        np.abs(alone.hidden - drafter_block(drafter, drafter_arrays, full, 5, target_arrays=arrays).hidden).max() > 1e-3
    )


def test_drafter_block_is_anchor_first_and_bidirectional(
    drafter: DrafterConfig, drafter_arrays: Arrays, rng: np.random.Generator
) -> None:
    target = random_arrays(replace(drafter.backbone, num_layers=3), rng)
    context = drafter_context(drafter, drafter_arrays, rng.normal(size=(6, drafter.feature_size)))

    def hidden(arrays: Arrays, anchor: int) -> np.ndarray:
        return drafter_block(drafter, drafter_arrays, context, anchor, target_arrays=arrays).hidden

    base = hidden(target, 2)
    assert base.shape == (4, 12)
    moved = {name: value.copy() for name, value in target.items()}
    moved["embed.weight"][drafter.mask_token_id] += 1
    changed = np.abs(hidden(moved, 2) - base).max(axis=1)
    assert changed[0] > 1e-6, "slot 0 does not see the masks behind it"
    assert np.abs(hidden(target, 7) - base).max(axis=1).min() > 1e-6, "a slot does not see the anchor"


def test_drafter_block_sees_every_context_token(
    drafter: DrafterConfig, drafter_arrays: Arrays, rng: np.random.Generator
) -> None:
    target = random_arrays(replace(drafter.backbone, num_layers=3), rng)
    features = rng.normal(size=(6, drafter.feature_size))
    base = drafter_block(
        drafter, drafter_arrays, drafter_context(drafter, drafter_arrays, features), 2, target_arrays=target
    )
    for row in range(6):
        other = features.copy()
        other[row] = -other[row]
        context = drafter_context(drafter, drafter_arrays, other)
        moved = drafter_block(drafter, drafter_arrays, context, 2, target_arrays=target)
        assert np.abs(moved.hidden - base.hidden).max(axis=1).min() > 1e-9, f"context row {row}"


def test_drafter_block_reduced_vocabulary_cuts_the_shared_head(
    drafter: DrafterConfig, drafter_arrays: Arrays, rng: np.random.Generator
) -> None:
    target = random_arrays(replace(drafter.backbone, num_layers=3), rng)
    context = drafter_context(drafter, drafter_arrays, rng.normal(size=(3, drafter.feature_size)))
    ids = np.array([4, 0, 19])
    full = drafter_block(drafter, drafter_arrays, context, 2, target_arrays=target)
    cut = drafter_block(drafter, drafter_arrays, context, 2, target_arrays=target, draft_token_ids=ids)
    assert np.allclose(cut.base_logits, full.base_logits[:, ids], rtol=1e-12)
    tied = {name: value for name, value in target.items() if name != "lm_head.weight"}
    from_embedding = drafter_block(drafter, drafter_arrays, context, 2, target_arrays=tied)
    assert np.allclose(from_embedding.base_logits, full.hidden @ target["embed.weight"].T, rtol=1e-12)
