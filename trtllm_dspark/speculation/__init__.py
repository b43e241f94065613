"""Which drafts are worth verifying, and what came of it."""

from trtllm_dspark.speculation.calibration import Calibration
from trtllm_dspark.speculation.config import DEFAULT_SPECULATION, SpeculationConfig
from trtllm_dspark.speculation.controller import (
    Calibrator,
    LoadLimits,
    LoadSource,
    RoundOutcome,
    RoundPlan,
    SpeculationController,
)
from trtllm_dspark.speculation.cost_table import CostTable
from trtllm_dspark.speculation.measure import measure_cost_table
from trtllm_dspark.speculation.recorder import ConfidenceRecorder
from trtllm_dspark.speculation.scheduler import PrefixScheduler
from trtllm_dspark.speculation.statistics import AcceptanceStatistics

__all__ = [
    "DEFAULT_SPECULATION",
    "AcceptanceStatistics",
    "Calibration",
    "Calibrator",
    "ConfidenceRecorder",
    "CostTable",
    "LoadLimits",
    "LoadSource",
    "PrefixScheduler",
    "RoundOutcome",
    "RoundPlan",
    "SpeculationConfig",
    "SpeculationController",
    "measure_cost_table",
]
