"""How a session runs its rounds: on the host one at a time, or on the engine's device two at a time."""

from __future__ import annotations

from typing import cast

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.engine.rounds import CompiledRounds, RoundEngine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime.device_rounds import DeviceRounds
from trtllm_dspark.runtime.host_rounds import HostRounds
from trtllm_dspark.runtime.listener import RoundListener
from trtllm_dspark.runtime.proposers import AcceptanceMode, Proposer
from trtllm_dspark.runtime.round import RoundSteps
from trtllm_dspark.runtime.timing import PassTimer
from trtllm_dspark.speculation import ConfidenceRecorder, SpeculationController

Rounds = HostRounds | DeviceRounds


def choose_rounds_in_flight(engine: Engine, wanted: int | None, *, own_drafter: bool) -> int:
    """Return how many rounds a session keeps in flight.

    Args:
        engine: of the session.
        wanted: None = as many as the engine runs.
        own_drafter: whether drafts come from the engine's own drafter, or from none.

    Raises:
        ConfigError: the engine runs fewer.
    """
    most = int(getattr(engine, "rounds_in_flight", 0)) if own_drafter else 0
    most = max(1, most)
    if wanted is not None and not 1 <= wanted <= most:
        reason = "this engine runs" if own_drafter else "a drafter outside the engine allows"
        raise ConfigError(f"rounds_in_flight is {wanted}, {reason} {most} at most; use 1..{most}")
    chosen = most if wanted is None else wanted
    if chosen == 1 and isinstance(engine, CompiledRounds):
        raise ConfigError(
            "this engine runs whole rounds on its device only; one round at a time (listeners, drafters outside the "
            "engine) needs one that was built with --dspark_plugin disable"
        )
    return chosen


def make_rounds(
    engine: Engine,
    proposer: Proposer | None,
    controller: SpeculationController,
    acceptance: AcceptanceMode,
    timer: PassTimer,
    *,
    rounds_in_flight: int,
    recorder: ConfidenceRecorder | None = None,
    listener: RoundListener | None = None,
) -> Rounds:
    """Return what runs the rounds of a session."""
    if rounds_in_flight > 1:
        return DeviceRounds(cast(RoundEngine, engine), controller, acceptance, timer, recorder=recorder)
    steps = RoundSteps(engine, proposer, controller, acceptance, timer, recorder=recorder, listener=listener)
    return HostRounds(engine, steps, proposer, timer)
