"""Ready while the engine is."""

from trtllm_dspark.serving.triton_gate import TritonPythonModel

__all__ = ["TritonPythonModel"]
