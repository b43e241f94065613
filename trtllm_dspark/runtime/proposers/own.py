"""The proposer of the drafter that an engine was built with."""

from __future__ import annotations

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.runtime.proposers.autoregressive import AutoregressiveProposer
from trtllm_dspark.runtime.proposers.base import ProposerFactory
from trtllm_dspark.runtime.proposers.block import BlockProposer
from trtllm_dspark.runtime.proposers.engine_ngram import EngineNgramProposer


def own_proposer(limits: EngineLimits) -> ProposerFactory | None:
    """Return what makes the proposer of an engine's own drafter, None where it has none."""
    if not limits.has_drafter:
        return None
    return AutoregressiveProposer if limits.autoregressive else BlockProposer


def keeps_tables(drafter: ProposerFactory | None) -> bool:
    """Return whether an engine directory's times and calibration, those of its own drafter, hold for this one too."""
    return drafter is None or drafter is EngineNgramProposer
