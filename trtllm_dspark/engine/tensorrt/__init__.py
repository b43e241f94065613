"""TensorRT 11 and TensorRT-RTX engines: plans, device-resident rounds, CUDA graphs. Compiled, not executed."""

from trtllm_dspark.engine.tensorrt.device import Device, Plan, PlanContext, PlanTensor
from trtllm_dspark.engine.tensorrt.engine import TensorRtEngine
from trtllm_dspark.engine.tensorrt.plugin_engine import TensorRtPluginEngine

__all__ = ["Device", "Plan", "PlanContext", "PlanTensor", "TensorRtEngine", "TensorRtPluginEngine"]
