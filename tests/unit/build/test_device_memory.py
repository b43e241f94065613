"""Profiles, checked extents and device memory of GPU engines, from configurations alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.qwen3_shapes import DRAFTER, TARGET

from trtllm_dspark.build import BuildConfig
from trtllm_dspark.build.estimate import DrafterParts
from trtllm_dspark.build.gpu_options import GpuOptions
from trtllm_dspark.build.tensorrt import DeviceMemory, MemoryModel, cache_len, check_device_memory, engine_profiles
from trtllm_dspark.build.tensorrt.profiles import check_volumes
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

LIMITS = BuildLimits(max_batch_size=8, max_seq_len=2048, max_num_tokens=256, max_draft_len=7)
QWEN3_8B = replace(TARGET, num_layers=36, vocab_size=151936)
PARTS = DrafterParts(replace(DRAFTER, draft_vocab_size=151936), own_embedding=False, own_head=False)


def estimate(*arguments: Any, **options: Any) -> DeviceMemory:
    return MemoryModel(*arguments, **options).estimate()


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
    memory = estimate(LIMITS, QWEN3_8B, PARTS)
    layers = 36 * (4096 * 128 * (32 + 2 * 8) + 4096 * 4096 + 3 * 4096 * 12288)
    assert memory.target_weight_bytes == 2 * (layers + 2 * 151936 * 4096 + 2048 * 128)
    assert memory.target_kv_bytes == 8 * 2304 * 36 * 2 * 8 * 128 * 2
    assert memory.drafter_kv_bytes == memory.target_kv_bytes // 18
    assert memory.total_bytes > memory.kv_bytes + memory.target_weight_bytes
    own = estimate(LIMITS, QWEN3_8B, replace(PARTS, own_embedding=True, own_head=True))
    # Each plan holds its weights, so sharing saves nothing on the device.
    assert own == memory
    assert estimate(LIMITS, QWEN3_8B, None).drafter_weight_bytes == 0


def test_estimate_counts_what_the_block_gives_the_heads() -> None:
    memory = estimate(LIMITS, QWEN3_8B, PARTS)
    small = replace(PARTS, config=replace(PARTS.config, draft_vocab_size=1000))
    # Base logits and draft logits, float32 for each draft of each request.
    logits = 2 * 8 * 7 * (151936 - 1000) * 4
    assert memory.activation_bytes - estimate(LIMITS, QWEN3_8B, small).activation_bytes == logits
    features = estimate(LIMITS, QWEN3_8B, None).activation_bytes + 256 * PARTS.config.feature_size * (2 + 4)
    hidden = 8 * 7 * PARTS.config.backbone.hidden_size * 4
    assert memory.activation_bytes == features + 2 * 8 * 7 * 151936 * 4 + hidden


def test_table_of_a_tied_target_is_counted_once_in_the_block() -> None:
    tied = replace(QWEN3_8B, tie_word_embeddings=True)
    table = 2 * 151936 * 4096
    shared = estimate(LIMITS, tied, PARTS).drafter_weight_bytes
    assert estimate(LIMITS, QWEN3_8B, PARTS).drafter_weight_bytes == shared + table
    assert estimate(LIMITS, tied, replace(PARTS, own_head=True)).drafter_weight_bytes == shared + table


def test_engine_that_does_not_fit_is_refused_with_the_flag_to_lower() -> None:
    memory = estimate(LIMITS, QWEN3_8B, PARTS)
    check_device_memory(memory, 80 << 30, 0.9)
    with pytest.raises(ConfigError, match="weights, activations and graphs take"):
        check_device_memory(memory, 16 << 30, 0.9)
    tight = memory.total_bytes + 1
    check_device_memory(memory, tight, 1.0)
    with pytest.raises(ConfigError, match="caches take .* lower --max_batch_size or --max_seq_len"):
        check_device_memory(memory, tight, 0.9)


def config(**fields: Any) -> BuildConfig:
    names = set(GpuOptions.__dataclass_fields__)
    options = {"gpu_architectures": ("sm89",), **{name: value for name, value in fields.items() if name in names}}
    rest = {name: value for name, value in fields.items() if name not in names}
    return BuildConfig("x", Path("e"), **{"backend": "tensorrt_rtx", **rest}, gpu=GpuOptions(**options))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float32"}, "--dtype must be one of float16, bfloat16, got 'float32'"),
        ({"weight_dtype": "float16"}, "--weight_dtype float16 is what --dtype is for"),
        ({"weight_dtype": "w8a8"}, "--weight_dtype w8a8 is not for --backend tensorrt_rtx; use int8, int4, fp8"),
        ({"gpu_architectures": ()}, "needs --gpu NAME, or --gpu_architecture with some of sm80"),
        ({"gpu_architectures": ("sm90",)}, "--backend tensorrt_rtx has no sm90, only sm80"),
        ({"gpu_architectures": ("sm89", "sm89")}, "names one twice"),
        ({"gpu": "RTX 4090"}, "--gpu gives the architecture; leave out --gpu_architecture"),
        ({"gpu": "H100", "gpu_architectures": ()}, "--backend tensorrt_rtx has no sm90"),
        ({"gpu": "RTX 4091", "gpu_architectures": ()}, "did you mean RTX 4090"),
        ({"gpu_memory_gib": 0.0}, "--gpu_memory_gib must be above 0"),
        ({"gpu_memory_gib": float("nan")}, "--gpu_memory_gib must be above 0"),
        ({"kv_cache_free_gpu_mem_fraction": 0.0}, "above 0 and at most 1"),
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "above 0 and at most 1"),
        ({"kv_cache_free_gpu_mem_fraction": 0.5}, "is of a GPU's memory; add --gpu or --gpu_memory_gib"),
        ({"opt_num_tokens": 257}, "--opt_num_tokens 257 exceeds --max_num_tokens 256"),
        ({"opt_num_tokens": 0}, "--opt_num_tokens must be an integer from 1"),
        ({"workers": 0}, "--workers must be an integer from 1 to 64"),
        ({"profiling_verbosity": "none"}, "hides the layers that every build checks; use detailed"),
        ({"weight_dtype": "fp8", "gpu_architectures": ("sm86",)}, "fp8 needs sm89 or .*; sm86 has int8"),
        ({"weight_dtype": "fp8", "gpu_architectures": (), "gpu": "A10"}, "fp8 needs sm89"),
        ({"draft_dtype": "float16"}, "--draft_dtype needs a drafter"),
        ({"strip_plan": True}, "--strip_plan is not for tensorrt_rtx: its builder needs a GPU to strip a plan"),
        ({"fast_build": True}, "--fast_build is not for tensorrt_rtx: it times no kernels"),
        ({"input_timing_cache": Path("x")}, "--input_timing_cache is not for tensorrt_rtx"),
        ({"output_timing_cache": Path("x")}, "--output_timing_cache is not for tensorrt_rtx"),
        ({"dspark_plugin": "enable"}, "--dspark_plugin enable needs --backend tensorrt"),
        ({"dspark_plugin_library": Path("x")}, "--dspark_plugin_library is not for tensorrt_rtx: .* takes no plugins"),
        (
            {"backend": "tensorrt", "dspark_plugin": "enable"},
            "--dspark_plugin enable needs --dspark_plugin_library FILE; make it with",
        ),
        ({"backend": "tensorrt", "acceptance": "greedy"}, "--acceptance is for plugin engines; add --dspark_plugin"),
        ({"backend": "tensorrt", "dspark_plugin": "yes"}, "--dspark_plugin must be one of enable, disable"),
        (
            {"backend": "tensorrt", "dspark_plugin": "disable", "dspark_plugin_library": Path("x")},
            "--dspark_plugin_library is for plugin engines; add --dspark_plugin enable, or leave it out",
        ),
        (
            {"backend": "tensorrt", "dspark_plugin": "disable", "gpu_architectures": ("sm90", "sm80")},
            "TensorRT compiles for the GPU it runs on; name one",
        ),
        (
            {"backend": "tensorrt", "dspark_plugin": "disable", "input_timing_cache": Path("no/such")},
            "--input_timing_cache no/such is no file",
        ),
        (
            {"backend": "onnxruntime", "weight_dtype": "int4"},
            "int4 is not for --backend onnxruntime; use int8, float32",
        ),
        ({"backend": "onnxruntime", "weight_dtype": "float16"}, "--weight_dtype must be one of int8, float32, w8a8"),
    ],
)
def test_contradicting_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    "option",
    [
        *({"dtype": "float16"}, {"gpu": "L4"}, {"gpu_architectures": ("sm89",)}, {"gpu_memory_gib": 8.0}),
        *({"strip_plan": True}, {"weight_streaming": True}, {"fast_build": True}, {"workers": 2}),
        *({"opt_num_tokens": 4}, {"dspark_plugin": "disable"}, {"kv_cache_free_gpu_mem_fraction": 0.5}),
        *({"output_timing_cache": Path("x")}, {"profiling_verbosity": "detailed"}),
    ],
    ids=lambda option: next(iter(option)),
)
def test_gpu_option_without_a_gpu_backend_is_refused_by_name(option: dict[str, Any]) -> None:
    flag = next(iter(option)).replace("architectures", "architecture")
    with pytest.raises(ConfigError, match=f"--{flag} is for GPU engines; add --backend tensorrt or tensorrt_rtx"):
        BuildConfig("x", Path("e"), gpu=GpuOptions(**option))


def test_consistent_fields_are_accepted() -> None:
    assert config(gpu_memory_gib=24.0).gpu.gpu_architectures == ("sm89",)
    config(backend="tensorrt", gpu_architectures=(), strip_plan=True, fast_build=True)


@pytest.mark.parametrize(
    ("fields", "target", "drafter"),
    [
        ({}, ("float16", "float16"), ("float16", "float16")),
        ({"dtype": "bfloat16"}, ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        ({"draft_dtype": "bfloat16"}, ("float16", "float16"), ("bfloat16", "bfloat16")),
        ({"weight_dtype": "int8"}, ("float16", "int8"), ("float16", "int8")),
        ({"weight_dtype": "int8", "draft_dtype": "bfloat16"}, ("float16", "int8"), ("bfloat16", "bfloat16")),
        ({"draft_weight_dtype": "int4"}, ("float16", "float16"), ("float16", "int4")),
        ({"weight_dtype": "int4", "draft_weight_dtype": "fp8"}, ("float16", "int4"), ("float16", "fp8")),
    ],
)
def test_drafter_has_a_precision_of_its_own(
    fields: dict[str, Any], target: tuple[str, str], drafter: tuple[str, str]
) -> None:
    built = config(draft_checkpoint="y", **fields)
    assert (built.precision.dtype, built.precision.weight_dtype) == target
    assert (built.draft_precision.dtype, built.draft_precision.weight_dtype) == drafter
