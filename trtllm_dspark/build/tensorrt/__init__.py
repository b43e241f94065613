"""TensorRT plans, for TensorRT and TensorRT-RTX: profiles, compilation, the lint of what was fused, device memory."""

from trtllm_dspark.build.tensorrt.compiler import CompiledPlan, CompilerJob, CompilerOptions, compile_plan
from trtllm_dspark.build.tensorrt.layers import FusedLayer, expect_of, lint_layers, parse_layers
from trtllm_dspark.build.tensorrt.memory import DeviceMemory, MemoryModel, check_device_memory
from trtllm_dspark.build.tensorrt.profiles import Profile, cache_len, engine_profiles
from trtllm_dspark.build.tensorrt.toolkit import TENSORRT, Toolkit

__all__ = [
    "TENSORRT",
    "CompiledPlan",
    "CompilerJob",
    "CompilerOptions",
    "DeviceMemory",
    "FusedLayer",
    "MemoryModel",
    "Profile",
    "Toolkit",
    "cache_len",
    "check_device_memory",
    "compile_plan",
    "engine_profiles",
    "expect_of",
    "lint_layers",
    "parse_layers",
]
