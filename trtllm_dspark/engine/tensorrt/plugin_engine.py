"""Target and drafter as TensorRT plans with this project's plugins on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine.base import BlockOutput, ContextBatch, EngineLimits, IntArray, TargetOutput, TokenBatch
from trtllm_dspark.engine.rounds import RoundBatch, Ticket
from trtllm_dspark.engine.tensorrt._compiled import CompiledRound
from trtllm_dspark.engine.tensorrt._plugin_model import load_plugin_model
from trtllm_dspark.engine.tensorrt._plugin_round import PluginRound
from trtllm_dspark.engine.tensorrt._rounds import RoundQueue
from trtllm_dspark.engine.tensorrt._runner import NUM_GRAPHS, RoundRunner
from trtllm_dspark.engine.tensorrt.device import Device, Plan
from trtllm_dspark.errors import DeviceError


@dataclass(frozen=True, slots=True)
class PluginHeads:
    """What is known of heads that are part of a plan."""

    has_confidence: bool


class TensorRtPluginEngine(RoundRunner):
    """`RoundEngine` over plans of the `trt_plugin` lowering: one enqueue a draft, one a verify.

    Drafting, schedule and acceptance are inside the plans, so there are whole rounds only, compiled for one schedule
    and one acceptance; no logits and no features leave them.

    Args:
        device: runs everything; closed by `close`.
        plans: `target`, and with a drafter `drafter`.
        target: configuration the target was built with.
        drafter: the same for the drafter, or None.
        limits: shapes the engine was built for.
        compiled: what its rounds were compiled for.
        num_graphs: CUDA graphs kept at most.
        cuda_graphs: False runs rounds launch by launch.

    Raises:
        EngineError: plans and configuration do not fit.
        DeviceError: the device has no room.
    """

    def __init__(
        self,
        device: Device,
        plans: Mapping[str, Plan],
        target: ModelConfig,
        drafter: DrafterConfig | None,
        limits: EngineLimits,
        compiled: CompiledRound,
        *,
        num_graphs: int = NUM_GRAPHS,
        cuda_graphs: bool = True,
    ) -> None:
        self._compiled = compiled
        self._model = model = load_plugin_model(device, plans, target, drafter, limits)
        self._heads = None if drafter is None else PluginHeads(model.has_confidence)
        rounds = RoundQueue(model, PluginRound(model), num_graphs=num_graphs, cuda_graphs=cuda_graphs)
        super().__init__(device, limits, model, rounds)

    @property
    def heads(self) -> PluginHeads | None:
        """What is known of the drafter's heads, or None without a drafter."""
        return self._heads

    @property
    def max_banned(self) -> int:
        """None: acceptance follows the logits inside the plan."""
        return 0

    @property
    def greedy_only(self) -> bool:
        """Whether requests must be greedy."""
        return self._compiled.greedy_only

    def check_session(self, mode: str, acceptance: str) -> None:
        """Refuse sessions whose rounds were not compiled; see `CompiledRounds`."""
        self._compiled.check(mode, acceptance)

    def submit_round(self, batch: RoundBatch) -> Ticket:
        """Enqueue a round; see `RoundEngine`."""
        return super().submit_round(self._compiled.play(batch))

    def verify(self, batch: TokenBatch) -> TargetOutput:
        """Refuse: see `Engine`."""
        self._refuse()

    def absorb(self, batch: ContextBatch) -> None:
        """Refuse: see `Engine`."""
        self._refuse()

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        """Refuse: see `Engine`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DeviceError(
            "plans with plugins run whole rounds only, no single passes; build the engine with --dspark_plugin disable"
        )
