"""What a drafter is worth on a user's prompts: acceptance, confidence quality and thresholds, by domain."""

from trtllm_dspark.evaluation.measure import EvaluationRun, drafter_traits, run_domain
from trtllm_dspark.evaluation.results import DomainResult, ThresholdPoint, summarise

__all__ = ["DomainResult", "EvaluationRun", "ThresholdPoint", "drafter_traits", "run_domain", "summarise"]
