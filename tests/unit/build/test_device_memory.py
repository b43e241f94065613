"""Profiles, checked extents and device memory of GPU engines, from configurations alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.qwen3_shapes import DRAFTER, TARGET

from trtllm_dspark.build import BuildConfig
from trtllm_dspark.build.estimate import DrafterParts
from trtllm_dspark.build.tensorrt_rtx import cache_len, check_device_memory, engine_profiles, estimate_device_memory
from trtllm_dspark.build.tensorrt_rtx.memory import GIB
from trtllm_dspark.build.tensorrt_rtx.profiles import check_volumes
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

LIMITS = BuildLimits(max_batch_size=8, max_seq_len=2048, max_num_tokens=256, max_draft_len=7)
QWEN3_8B = replace(TARGET, num_layers=36, vocab_size=151936)
PARTS = DrafterParts(replace(DRAFTER, draft_vocab_size=151936), own_embedding=False, own_head=False)


def test_profiles_follow_the_limits() -> None:
    decode, prefill = engine_profiles(LIMITS)
    assert (decode.num_rows, decode.row_len, decode.num_tokens, decode.num_logits) == (8, 8, 64, 64)
    assert (prefill.num_rows, prefill.row_len, prefill.num_tokens, prefill.num_logits) == (8, 256, 256, 8)
    small = engine_profiles(replace(LIMITS, max_num_tokens=20, max_draft_len=0))
    assert (small[0].row_len, small[0].num_tokens) == (1, 8)
    assert (small[1].row_len, small[1].num_tokens) == (20, 20)


@pytest.mark.parametrize(("num_tokens", "draft_len", "block"), [(256, 7, 7), (8, 7, 16), (8, 7, 7), (1, 0, 0)])
def test_cache_holds_the_longest_request_and_the_widest_row(num_tokens: int, draft_len: int, block: int) -> None:
    limits = replace(LIMITS, max_num_tokens=num_tokens, max_draft_len=draft_len)
    widest = max(num_tokens, draft_len + 1, block)
    length = cache_len(limits, block)
    assert length % 64 == 0
    assert 0 <= length - (limits.max_seq_len + widest - 1) < 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 2048, "max_seq_len": 40960}, "a cache would have .* --max_seq_len"),
        ({"max_batch_size": 128, "max_num_tokens": 8192, "max_seq_len": 2048}, "padded queries of the prefill"),
        ({"max_batch_size": 1, "max_num_tokens": 100_000, "max_seq_len": 2048}, "inner activations of the prefill"),
    ],
)
def test_too_large_profile_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_volumes(replace(LIMITS, **changes), QWEN3_8B, DRAFTER)


def test_limits_that_fit_pass() -> None:
    check_volumes(LIMITS, QWEN3_8B, DRAFTER)


def test_estimate_counts_every_part_of_qwen3_8b() -> None:
    memory = estimate_device_memory(LIMITS, QWEN3_8B, PARTS)
    layers = 36 * (4096 * 128 * (32 + 2 * 8) + 4096 * 4096 + 3 * 4096 * 12288)
    assert memory.target_weight_bytes == 2 * (layers + 2 * 151936 * 4096 + 2048 * 128)
    assert memory.target_kv_bytes == 8 * 2304 * 36 * 2 * 8 * 128 * 2
    assert memory.drafter_kv_bytes == memory.target_kv_bytes // 18
    assert memory.total_bytes > memory.kv_bytes + memory.target_weight_bytes
    own = estimate_device_memory(LIMITS, QWEN3_8B, replace(PARTS, own_embedding=True, own_head=True))
    # Each plan holds its weights, so sharing saves nothing on the device.
    assert own == memory
    assert estimate_device_memory(LIMITS, QWEN3_8B, None).drafter_weight_bytes == 0


def test_table_of_a_tied_target_is_counted_once_in_the_block() -> None:
    tied = replace(QWEN3_8B, tie_word_embeddings=True)
    table = 2 * 151936 * 4096
    shared = estimate_device_memory(LIMITS, tied, PARTS).drafter_weight_bytes
    assert estimate_device_memory(LIMITS, QWEN3_8B, PARTS).drafter_weight_bytes == shared + table
    assert estimate_device_memory(LIMITS, tied, replace(PARTS, own_head=True)).drafter_weight_bytes == shared + table


def test_engine_that_does_not_fit_is_refused_with_the_flag_to_lower() -> None:
    memory = estimate_device_memory(LIMITS, QWEN3_8B, PARTS)
    check_device_memory(memory, 80, 0.9)
    with pytest.raises(ConfigError, match="weights and activations take .* the GPU has 16; lower --max_num_tokens"):
        check_device_memory(memory, 16, 0.9)
    tight = (memory.total_bytes + 1) / GIB
    check_device_memory(memory, tight, 1.0)
    with pytest.raises(ConfigError, match="caches take .* lower --max_batch_size or --max_seq_len"):
        check_device_memory(memory, tight, 0.9)


def config(**fields: object) -> BuildConfig:
    given = {"backend": "tensorrt_rtx", "weight_dtype": "float16", "gpu_architectures": ("sm89",), **fields}
    return BuildConfig("x", Path("e"), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_dtype": "int8"}, "--dtype must be one of float16, bfloat16, got 'int8'"),
        ({"gpu_architectures": ()}, "needs --gpu_architecture, some of sm80"),
        ({"gpu_architectures": ("sm90",)}, "--gpu_architecture must be one of .* got 'sm90'"),
        ({"gpu_architectures": ("sm89", "sm89")}, "names one twice"),
        ({"gpu_memory_gib": 0.0}, "--gpu_memory_gib must be above 0"),
        ({"gpu_memory_gib": float("nan")}, "--gpu_memory_gib must be above 0"),
        ({"kv_cache_free_gpu_mem_fraction": 0.0}, "above 0 and at most 1"),
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "above 0 and at most 1"),
        ({"draft_checkpoint": "y", "draft_weight_dtype": "int8"}, "builds both models in --dtype"),
        ({"backend": "onnxruntime"}, "--weight_dtype must be one of"),
        ({"backend": "onnxruntime", "weight_dtype": "int8"}, "need a GPU backend"),
    ],
)
def test_contradicting_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_consistent_fields_are_accepted() -> None:
    assert config(gpu_memory_gib=24.0).gpu_architectures == ("sm89",)
