"""Attention lowerings: what a canonical layer's attention becomes on each target."""

from __future__ import annotations

from trtllm_dspark.graph.lowering.base import ContextCache, Lowering, SelfAttention, check_weight_dtype
from trtllm_dspark.graph.lowering.ort import CACHE_MULTIPLE, OrtLowering
from trtllm_dspark.graph.lowering.trt_native import TENSORRT, TrtNativeLowering
from trtllm_dspark.graph.lowering.trt_plugin import TrtPluginLowering, plugin_cache_length

__all__ = [
    "CACHE_MULTIPLE",
    "ORT",
    "TENSORRT",
    "ContextCache",
    "Lowering",
    "OrtLowering",
    "SelfAttention",
    "TrtNativeLowering",
    "TrtPluginLowering",
    "check_weight_dtype",
    "plugin_cache_length",
]

ORT = OrtLowering()
"""The default: ONNX Runtime on a CPU."""
