"""How busy, throttled or short of memory the device is, and what the next round should make of it."""

from trtllm_dspark.load.metrics import load_metrics, metric_names
from trtllm_dspark.load.monitor import LoadMonitor
from trtllm_dspark.load.nvml_reader import NvmlReader
from trtllm_dspark.load.policy import LoadPolicy
from trtllm_dspark.load.policy_config import PolicyConfig
from trtllm_dspark.load.sample import Sample
from trtllm_dspark.load.state import REASONS, LoadState, Reason

__all__ = [
    "REASONS",
    "LoadMonitor",
    "LoadPolicy",
    "LoadState",
    "NvmlReader",
    "PolicyConfig",
    "Reason",
    "Sample",
    "load_metrics",
    "metric_names",
]
