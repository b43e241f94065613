"""TensorRT-RTX plans: profiles, compilation without a GPU, the lint of what the builder fused, device memory."""

from trtllm_dspark.build.tensorrt_rtx.compiler import CompiledPlan, compile_plan, import_tensorrt_rtx
from trtllm_dspark.build.tensorrt_rtx.layers import FusedLayer, expect_of, lint_layers, parse_layers
from trtllm_dspark.build.tensorrt_rtx.memory import DeviceMemory, check_device_memory, estimate_device_memory
from trtllm_dspark.build.tensorrt_rtx.profiles import Profile, cache_len, engine_profiles

__all__ = [
    "CompiledPlan",
    "DeviceMemory",
    "FusedLayer",
    "Profile",
    "cache_len",
    "check_device_memory",
    "compile_plan",
    "engine_profiles",
    "estimate_device_memory",
    "expect_of",
    "import_tensorrt_rtx",
    "lint_layers",
    "parse_layers",
]
