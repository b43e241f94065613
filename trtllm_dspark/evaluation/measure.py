"""Run prompts with every block drafted and verified in full, so that nothing about it is hidden by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.runtime import Request, Session, Tokenizer
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.runtime.proposers import AcceptanceMode, ProposerFactory, own_proposer
from trtllm_dspark.runtime.stats import SessionStats
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation import AcceptanceStatistics, ConfidenceRecorder
from trtllm_dspark.speculation.calibration import Observations


@dataclass(slots=True)
class EvaluationRun:
    """What was seen on the prompts of one domain at one temperature.

    Attributes:
        acceptance: counters of each request.
        blocks: confidences and accepted lengths of every block; None without a confidence head.
    """

    acceptance: list[AcceptanceStatistics] = field(default_factory=list)
    blocks: Observations | None = None


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What a drafter can do: drafts of a block, and whether it says how likely they are accepted."""

    draft_len: int
    has_confidence: bool


def drafter_traits(engine: Engine, drafter: ProposerFactory | None) -> DrafterTraits:
    """Return what the drafter of a session over `engine` can do.

    Raises:
        ConfigError: there is no drafter.
    """
    make = drafter or own_proposer(engine.limits)
    if make is None:
        raise ConfigError(
            "this engine has no drafter; there is nothing to evaluate; build with --draft_checkpoint or name a "
            "--drafter"
        )
    proposer = make(engine, "rejection", PassTimer(SessionStats(0)))
    return DrafterTraits(proposer.draft_len, proposer.has_confidence)


def run_domain(
    engine: Engine,
    tokenizer: Tokenizer | None,
    requests: Sequence[Request],
    *,
    batch_size: int,
    acceptance: AcceptanceMode = "rejection",
    drafter: ProposerFactory | None = None,
    finished: Callable[[], None] = lambda: None,
) -> EvaluationRun:
    """Generate from every request, blocks verified in full and confidences uncalibrated.

    Args:
        engine: an idle engine.
        tokenizer: the engine's.
        requests: of one domain.
        batch_size: requests in flight; `batch_size * (gamma + 1)` tokens must fit a pass, or blocks are cut.
        acceptance: how sampled drafts are accepted.
        drafter: makes what proposes drafts; None = the engine's drafter.
        finished: called after each request.

    Raises:
        ConfigError: the engine cannot speculate.
        DeviceError: a request failed.
    """
    traits = drafter_traits(engine, drafter)
    recorder = ConfidenceRecorder(traits.draft_len) if traits.has_confidence else None
    session = Session(engine, tokenizer, speculation="fixed", acceptance=acceptance, drafter=drafter, recorder=recorder)
    run = EvaluationRun()
    for output in run_closed_loop(session, requests, batch_size=batch_size):
        if output.error is not None:
            raise DeviceError(f"prompt {output.request_id} failed: {output.error}")
        if output.finished:
            run.acceptance.append(output.stats.acceptance)
            finished()
    if recorder is not None:
        run.blocks = recorder.observations()
    return run
