"""The unary text model."""

from trtllm_dspark.serving.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
