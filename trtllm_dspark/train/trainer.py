"""The training loop: capture, draw, differentiate, update, save.

A step is divided into shares that threads work on one each, single-threaded inside: on a busy machine a thread then
waits once a step and not once an operation. Gradients are added in a fixed order, so the result does not depend on the
number of threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.errors import CheckpointError, ConfigError, DeviceError, DsparkError
from trtllm_dspark.train.data import BatchConfig, Sampler, Share, collate
from trtllm_dspark.train.features import Captured, Capturer, FeatureCache
from trtllm_dspark.train.layers import Frozen
from trtllm_dspark.train.loss import Alphas, losses
from trtllm_dspark.train.model import predict
from trtllm_dspark.train.optim import Optimizer, OptimizerConfig
from trtllm_dspark.train.responses import Response
from trtllm_dspark.train.saved_state import SavedState, save_state
from trtllm_dspark.train.schedule import Schedule

DRAWING = 2
"""How steps draw their blocks: a saved run that drew them otherwise would go on with others than it announced."""
MEASURED_STEPS = 10
"""Steps whose mean time decides how many fit into --minutes."""


class TrainingFailed(DsparkError):
    """The loss is not a number any more; the last saved state is from before."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """What a run does; saved with its state, and a resumed run must have the same.

    Attributes:
        batch: blocks of a step.
        alphas: shares of the losses.
        optimizer: step sizes.
        num_shares: parts of a step.
        bfloat16: matrix products in bfloat16.
    """

    batch: BatchConfig
    alphas: Alphas = field(default_factory=Alphas)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_shares: int = 8
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step measured.

    Attributes:
        step: from 1.
        loss: the sum that was differentiated.
        cross_entropy: part without its share; `l1` and `confidence` alike.
        l1: see cross_entropy.
        confidence: see cross_entropy.
        accept: [gamma] mean of 1 - L1 / 2 at each position: acceptance at temperature 1.
        tau: tokens a round that this gives, bonus included.
        lr_scale: of the schedule.
        num_blocks: blocks of the step, those included that only fill a sequence's row up.
        num_rows: predictions with a loss.
        seconds: time of the step; `capture_seconds` of it for new features.
        capture_seconds: see seconds.
    """

    step: int
    loss: float
    cross_entropy: float
    l1: float
    confidence: float
    accept: tuple[float, ...]
    tau: float
    lr_scale: float
    num_blocks: int
    num_rows: int
    seconds: float
    capture_seconds: float


@dataclass(slots=True)
class _ShareResult:
    grads: dict[str, Tensor]
    total: float
    parts: NDArray[np.float64]
    accept_sum: NDArray[np.float64]
    accept_count: NDArray[np.int64]


class Trainer:
    """Trains one drafter.

    Args:
        config: of the drafter.
        trainer: what a step does.
        parameters: canonical name -> float32 tensor, updated in place.
        frozen: embedding, head, rotary tables.
        responses: sequences to train on.
        capturers: one a thread.
        cache: of captured sequences.
        draft_token_ids: [Vd] target ids, or None for all.
        given: caches of sequences that came with their features.
    """

    def __init__(
        self,
        config: DrafterConfig,
        trainer: TrainerConfig,
        parameters: dict[str, Tensor],
        frozen: Frozen,
        responses: Sequence[Response],
        capturers: Sequence[Capturer],
        cache: FeatureCache,
        draft_token_ids: NDArray[np.int64] | None,
        given: Sequence[FeatureCache] = (),
    ) -> None:
        if trainer.batch.sample_positions and config.markov_head == "rnn":
            raise ConfigError("an rnn head needs every position of a block; leave out --sample_positions")
        self.config, self.trainer, self.parameters, self.frozen = config, trainer, parameters, frozen
        self.steps_done = 0
        self._responses = [response for response in responses if response.num_anchors > 0]
        if not self._responses:
            raise ConfigError("no response is long enough to train on; generate longer ones")
        self._sampler = Sampler(self._responses, trainer.batch, trainer.num_shares)
        self._capturers, self._cache, self._given = list(capturers), cache, given
        self._draft_ids = None
        if draft_token_ids is not None:
            self._draft_ids = np.full(config.backbone.vocab_size, -1, np.int64)
            self._draft_ids[draft_token_ids] = np.arange(len(draft_token_ids))
        self._pool = ThreadPoolExecutor(len(self._capturers), initializer=_single_threaded)
        self._cache_lock = threading.Lock()
        self._optimizer = Optimizer(parameters, trainer.optimizer, self._pool)
        # What products read is cast once, and not in every share.
        self._lent = replace(frozen, head=frozen.head.bfloat16()) if trainer.bfloat16 else frozen

    def close(self) -> None:
        """Release the threads."""
        self._pool.shutdown()

    def step(self, scale: float) -> StepReport:
        """Train one step with the learning rates times `scale`.

        Raises:
            TrainingFailed: the loss is not finite; the parameters are as before the step.
        """
        started = time.perf_counter()
        number = self.steps_done + 1
        shares = self._sampler.step(number)
        captured = self._captured(shares)
        capture_seconds = time.perf_counter() - started
        total_weight = float(sum(share.weights.sum(dtype=np.float64) for share in shares))
        weights = self._weights()
        # The last shares have the longest contexts; begun first, none of them is waited for at the end.
        jobs = [
            self._pool.submit(self._share, share, [captured[int(i)] for i in share.indices], total_weight, weights)
            for share in reversed(shares)
        ]
        results = [job.result() for job in reversed(jobs)]
        loss = math.fsum(result.total for result in results)
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss of step {number} is {loss}; the saved state is from before: lower the learning rate "
                "(--lr_scale) and go on with --resume"
            )
        self._optimizer.step([result.grads for result in results], number, scale)
        self.steps_done = number
        parts = np.sum([result.parts for result in results], 0)
        counts = np.sum([result.accept_count for result in results], 0)
        accept = np.sum([result.accept_sum for result in results], 0) / np.maximum(counts, 1)
        return StepReport(
            step=number,
            loss=loss,
            cross_entropy=float(parts[0]),
            l1=float(parts[1]),
            confidence=float(parts[2]),
            accept=tuple(map(float, accept)),
            tau=1.0 + float(np.cumprod(accept).sum()),
            lr_scale=scale,
            num_blocks=int(sum(share.anchors.size for share in shares)),
            num_rows=int(counts.sum()),
            seconds=time.perf_counter() - started,
            capture_seconds=capture_seconds,
        )

    def capture(self, responses: Sequence[Response]) -> list[Captured]:
        """Return features and targets of sequences, from the cache where it has them."""
        queue: list[Capturer] = list(self._capturers)

        def one(response: Response) -> Captured:
            known = next((had for cache in (*self._given, self._cache) if (had := cache.get(response))), None)
            if known is not None:
                return known
            if response.first_position:
                raise DeviceError("the features of a traffic record are gone; start again in another --output_dir")
            capturer = queue.pop()
            try:
                new = capturer.capture(response)
            finally:
                queue.append(capturer)
            with self._cache_lock:
                self._cache.put(response, new)
            return new

        return list(self._pool.map(one, responses))

    def _captured(self, shares: Sequence[Share]) -> dict[int, Captured]:
        # Once each, though a step may visit a short epoch's sequence twice.
        indices = list(dict.fromkeys(int(index) for share in shares for index in share.indices))
        return dict(zip(indices, self.capture([self._responses[index] for index in indices]), strict=True))

    def _weights(self) -> dict[str, Tensor]:
        """Return the parameters as a step's products read them; rows of W1 are only looked up."""
        if not self.trainer.bfloat16:
            return self.parameters
        return {
            name: value if value.ndim < 2 or name == "markov.w1.weight" else value.bfloat16()
            for name, value in self.parameters.items()
        }

    def _share(
        self, share: Share, captured: list[Captured], total_weight: float, weights: Mapping[str, Tensor]
    ) -> _ShareResult:
        batch, gamma = self.trainer.batch, self.config.block_size
        dtype = self._lent.head.dtype
        blocks, targets = collate(share, self._responses, captured, batch, self._draft_ids, total_weight, dtype)
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        predictions = predict(leaves, self._lent, self.config, blocks)
        result = losses(predictions, targets, self.trainer.alphas)
        grads = torch.autograd.grad(result.total, list(leaves.values()))
        weighed = targets.weights > 0
        slots = targets.slots[weighed].numpy()
        accept = result.accept[weighed].double().numpy()
        return _ShareResult(
            dict(zip(leaves, grads, strict=True)),
            float(result.total.detach()),
            np.array([float(result.cross_entropy), float(result.l1), float(result.confidence)]),
            np.asarray(np.bincount(slots, accept, gamma), np.float64),
            np.bincount(slots, minlength=gamma).astype(np.int64),
        )

    def save(self, directory: Path, facts: dict[str, Any]) -> None:
        """Write everything a resumed run needs.

        Raises:
            DeviceError: the disk is full or fails; the state before is intact.
        """
        own = {"steps_done": self.steps_done, "trainer": asdict(self.trainer), "drawing": DRAWING}
        tensors = {f"parameter/{name}": value.numpy() for name, value in self.parameters.items()}
        tensors |= {f"optimizer/{name}": value.numpy() for name, value in self._optimizer.state.items()}
        save_state(directory, {**facts, **own}, tensors)

    def restore(self, state: SavedState) -> None:
        """Go on from a saved state.

        Raises:
            CheckpointError: it belongs to another drafter or another configuration.
        """
        if state.facts.get("drawing") != DRAWING:
            raise CheckpointError(
                "the saved run drew its blocks as another version does; start another --output_dir, with --init_from "
                "its drafter"
            )
        mine = _plain(asdict(self.trainer))
        # The CPU decides it, and no flag. A state without it goes on as this CPU does.
        if state.facts["trainer"].get("bfloat16", mine["bfloat16"]) != mine["bfloat16"]:
            has = "has not" if state.facts["trainer"]["bfloat16"] else "has"
            raise CheckpointError(
                f"the saved run stepped on another kind of CPU (this one {has} AVX512-BF16, and its products would "
                "round otherwise); resume on one of that kind, or start another --output_dir, with --init_from its "
                "drafter"
            )
        for name, value in state.facts["trainer"].items():
            if mine.get(name) != value:
                raise CheckpointError(
                    f"the saved run has {name} = {value}, this command {mine.get(name)}; resume with the same flags or "
                    "start another --output_dir"
                )
        wanted = {f"parameter/{name}": value for name, value in self.parameters.items()}
        wanted |= {f"optimizer/{name}": value for name, value in self._optimizer.state.items()}
        if {name: tuple(value.shape) for name, value in wanted.items()} != {
            name: value.shape for name, value in state.tensors.items()
        }:
            raise CheckpointError("the saved run trains a drafter of another shape; start another --output_dir")
        for name, value in wanted.items():
            value.copy_(torch.from_numpy(np.array(state.tensors[name])))
        self.steps_done = int(state.facts["steps_done"])


class Steps:
    """How many steps a run has: given, or from its first steps and the minutes it may take.

    Args:
        num_steps: given number, or None.
        minutes: limit of this sitting, or None; with `num_steps` None the schedule is made to end there.
        warmup_steps: of the schedule.
        decay_share: of the schedule.
    """

    def __init__(self, num_steps: int | None, minutes: float | None, warmup_steps: int, decay_share: float) -> None:
        self.schedule = None if num_steps is None else Schedule(num_steps, warmup_steps, decay_share)
        self._deadline = None if minutes is None else time.perf_counter() + 60 * minutes
        self._warmup_steps, self._decay_share = warmup_steps, decay_share
        self._seconds: list[float] = []

    def over(self, steps_done: int) -> bool:
        """Whether the schedule has ended or the time is up."""
        late = self._deadline is not None and time.perf_counter() >= self._deadline
        return late or (self.schedule is not None and steps_done >= self.schedule.num_steps)

    def scale(self, step: int) -> float:
        """Return the factor of the learning rates."""
        if self.schedule is not None:
            return self.schedule.scale(step)
        return min(1.0, step / self._warmup_steps) if self._warmup_steps else 1.0

    def took(self, report: StepReport) -> None:
        """Fix the schedule once `MEASURED_STEPS` steps say how fast they are.

        Captures are left out of the estimate: they stop when every sequence is known.
        """
        if self.schedule is not None or self._deadline is None:
            return
        self._seconds.append(report.seconds - report.capture_seconds)
        if len(self._seconds) == MEASURED_STEPS:
            left = max(self._deadline - time.perf_counter(), 0.0)
            more = int(left / (sum(self._seconds) / MEASURED_STEPS))
            self.schedule = Schedule(report.step + max(more, 1), self._warmup_steps, self._decay_share)


def run(
    trainer: Trainer,
    steps: Steps,
    *,
    stop: Callable[[], bool],
    told: Callable[[StepReport, int | None], None],
    saved: Callable[[Schedule | None], None],
    save_every: int,
) -> None:
    """Train until the steps are over or until `stop`; `saved` is called every `save_every` steps and at the end."""
    while not steps.over(trainer.steps_done) and not stop():
        report = trainer.step(steps.scale(trainer.steps_done + 1))
        steps.took(report)
        told(report, None if steps.schedule is None else steps.schedule.num_steps)
        if trainer.steps_done % save_every == 0:
            saved(steps.schedule)
    saved(steps.schedule)


def _single_threaded() -> None:
    torch.set_num_threads(1)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value
