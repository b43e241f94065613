"""Which drafts are worth verifying, and what came of it."""

from trtllm_dspark.speculation.config import SpeculationConfig
from trtllm_dspark.speculation.cost_table import CostTable
from trtllm_dspark.speculation.measure import measure_cost_table
from trtllm_dspark.speculation.scheduler import PrefixScheduler
from trtllm_dspark.speculation.statistics import AcceptanceStatistics

__all__ = ["AcceptanceStatistics", "CostTable", "PrefixScheduler", "SpeculationConfig", "measure_cost_table"]
