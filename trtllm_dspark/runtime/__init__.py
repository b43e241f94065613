"""Requests in, tokens and text out: in-flight batching around the speculative round."""

from trtllm_dspark.runtime.outputs import FinishReason, RequestOutput
from trtllm_dspark.runtime.request import Request
from trtllm_dspark.runtime.sampling_params import SamplingParams
from trtllm_dspark.runtime.session import Session
from trtllm_dspark.runtime.stats import RequestStats, SessionStats
from trtllm_dspark.runtime.tokenizer import Tokenizer

__all__ = [
    "FinishReason",
    "Request",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "Session",
    "SessionStats",
    "Tokenizer",
]
