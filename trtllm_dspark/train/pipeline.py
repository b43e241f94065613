"""From a target and its responses to a drafter: what `trtllm-dspark train` does after the flags are read."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_dspark.build.draft_vocab import choose_draft_vocab, read_token_counts
from trtllm_dspark.checkpoint import DrafterConfig, autoregressive_config, load_target
from trtllm_dspark.checkpoint.config import DrafterKind
from trtllm_dspark.errors import CheckpointError, ConfigError
from trtllm_dspark.train.answer import Answerer, SessionAnswerer
from trtllm_dspark.train.data import BatchConfig
from trtllm_dspark.train.export import write_drafter
from trtllm_dspark.train.features import Capturer, FeatureCache, common_prefix
from trtllm_dspark.train.generate import FLAGS_FILE
from trtllm_dspark.train.layers import Parameters
from trtllm_dspark.train.log import StepLog
from trtllm_dspark.train.loss import Alphas
from trtllm_dspark.train.optim import OptimizerConfig
from trtllm_dspark.train.parameters import default_layer_ids, drafter_config, eagle3_layer_ids, unused_token
from trtllm_dspark.train.responses import Response, fitting
from trtllm_dspark.train.saved_state import STATE_FILE, load_state
from trtllm_dspark.train.schedule import Schedule
from trtllm_dspark.train.start import Start, load_source, own_vocab, source_digest
from trtllm_dspark.train.target_engine import FeatureTarget, write_feature_target
from trtllm_dspark.train.torch_answer import TorchAnswerer
from trtllm_dspark.train.torch_target import TorchTarget
from trtllm_dspark.train.traffic import read_traffic
from trtllm_dspark.train.trainer import StepReport, Steps, Trainer, TrainerConfig, run
from trtllm_dspark.train.walk import accepted_len

logger = logging.getLogger(__name__)

LOG_FILE = "training_log.csv"
STATE_DIR = "state"
DRAFTER_DIR = "drafter"
TARGET_DIR = "target"
CACHE_DIR = "features"
GENERATED_DIR = "generated_features"
TRAFFIC_DIR = "traffic_features"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A training run; the flags of `trtllm-dspark train` with the same names say what the fields mean."""

    target_checkpoint: str
    output_dir: Path
    steps: int | None = None
    minutes: float | None = None
    init_from: str | None = None
    init_share: float = 0.0
    num_layers: int = 2
    block_size: int = 7
    kind: DrafterKind = "block"
    markov_head: Literal["none", "vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 64
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    draft_vocab_counts: Path | None = None
    num_sequences: int = 24
    anchors_per_sequence: int = 32
    position_decay: float = 4.0
    sample_positions: bool = False
    target_temperature: float = 1.0
    alphas: Alphas = field(default_factory=Alphas)
    lr_scale: float = 1.0
    warmup_steps: int = 10
    decay_share: float = 0.6
    top_k: int = 128
    weight_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    feature_cache_gib: float = 8.0
    max_seq_len: int = 512
    num_threads: int = 2
    save_every: int = 20
    seed: int = 0
    resume: bool = False
    include_shared: bool = False

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None and not self.resume:
            raise ConfigError("say how long to train: --steps, --minutes or both")
        positive = ("num_layers", "block_size", "num_sequences", "anchors_per_sequence", "top_k", "num_threads")
        for name in (*positive, "save_every", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("position_decay", "target_temperature", "lr_scale", "feature_cache_gib"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"--{name} must be above 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.decay_share <= 1:
            raise ConfigError(f"--decay_share must be from 0 to 1, got {self.decay_share}")
        if self.steps is not None and self.steps < 1 or self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ConfigError("--steps must be at least 1 and --minutes above 0")
        if not 0 <= self.init_share < 1:
            raise ConfigError(f"--init_share must be at least 0 and below 1, got {self.init_share}")
        if self.init_share and self.init_from is None:
            raise ConfigError("--init_share is a share of the --init_from drafter; give both or leave it out")
        if (self.draft_vocab_size is None) != (self.draft_vocab_counts is None):
            raise ConfigError("--draft_vocab_size and --draft_vocab_counts belong together; give both or neither")


class Preparation:
    """The target and the drafter's shape: what generation needs before there is anything to train on."""

    def __init__(self, config: TrainConfig) -> None:
        """Read headers and write the target's graph.

        Raises:
            ConfigError: flags do not fit the target.
            CheckpointError: a checkpoint cannot be read or does not fit the target.
            DeviceError: the disk is full or fails.
        """
        # Threads share the work by sequences, each single-threaded inside.
        torch.set_num_threads(1)
        self.config = config
        if (
            config.resume
            and config.steps is None
            and config.minutes is None
            and stopped_while_answering(config.output_dir)
        ):
            raise ConfigError(
                "the run was stopped before it trained; say how long to train: --steps, --minutes or both"
            )
        self.target = load_target(config.target_checkpoint)
        self.source = None if config.init_from is None else load_source(config.init_from, self.target)
        self.drafter = self._new_config() if self.source is None else self.source.config
        if self.drafter.kind != config.kind:
            raise ConfigError(
                f"--init_from {config.init_from} is a drafter of kind {self.drafter.kind}, not {config.kind}; "
                "give the --drafter that it is"
            )
        if config.max_seq_len > self.target.config.max_position_embeddings:
            raise ConfigError(
                f"--max_seq_len {config.max_seq_len} exceeds the target's "
                f"{self.target.config.max_position_embeddings} positions; lower it"
            )
        self.draft_token_ids = self._draft_token_ids()
        config.output_dir.mkdir(parents=True, exist_ok=True)
        self.feature_target: FeatureTarget = write_feature_target(
            config.output_dir / TARGET_DIR,
            self.target,
            self.drafter.target_layer_ids,
            max_seq_len=config.max_seq_len,
            weight_dtype="int8" if config.weight_dtype == "int8" else "float32",
        )

    def answerer(self, batch_size: int) -> Answerer:
        """Load what answers prompts; `close` it before training.

        Raises:
            ConfigError: the target comes without a tokenizer or chat template.
        """
        config, target = self.config, self.feature_target
        if config.weight_dtype == "int8":
            return SessionAnswerer(target.session(max_batch_size=batch_size, num_threads=config.num_threads))

        def load() -> TorchTarget:
            bfloat16 = config.weight_dtype == "bfloat16"
            model, arrays = self.target.config, self.target.arrays
            return TorchTarget(model, arrays, target.layer_ids, config.max_seq_len, bfloat16=bfloat16)

        return TorchAnswerer(
            load,
            target.tokenizer(),
            target.limits(batch_size),
            num_threads=config.num_threads,
            draft_token_ids=self.draft_token_ids,
            top_k=config.top_k,
        )

    @property
    def answered_by(self) -> str:
        """Name of what decides an answer besides flags: the target's contents and the type it computes in."""
        return f"{self.feature_target.files}.{self.config.weight_dtype}"

    def generated_features(self) -> FeatureCache:
        """Open the cache of what was captured while prompts were answered.

        Up to the cap they stay: captured again, a sequence's features would round in another way, and a resumed run
        would train on others than before.
        """
        directory = self.config.output_dir / GENERATED_DIR
        return FeatureCache(directory, self._max_bytes, self._generated_key(), drop_oldest=False)

    def captured_features(self, num_bytes_taken: int) -> FeatureCache:
        """Open the cache of what is captured when a step needs it, for what others leave of the cap."""
        return FeatureCache(
            self.config.output_dir / CACHE_DIR, max(self._max_bytes - num_bytes_taken, 0), self._feature_key()
        )

    @property
    def _max_bytes(self) -> int:
        return int(self.config.feature_cache_gib * 2**30)

    @property
    def features_digest(self) -> str:
        """Digest of what decides features and targets besides the responses."""
        return hashlib.sha256(json.dumps(self._generated_key(), sort_keys=True).encode()).hexdigest()

    def _generated_key(self) -> dict[str, Any]:
        return {**self._feature_key(), "while_answering": self.config.weight_dtype}

    def _feature_key(self) -> dict[str, Any]:
        ids = self.draft_token_ids
        return {
            "target": [file.sha256 for file in self.target.files],
            "layers": self.drafter.target_layer_ids,
            "weight_dtype": "int8" if self.config.weight_dtype == "int8" else "float32",
            "top_k": self.config.top_k,
            "draft_vocab": None if ids is None else hashlib.sha256(ids.tobytes()).hexdigest(),
        }

    def _new_config(self) -> DrafterConfig:
        config, target = self.config, self.target.config
        if config.kind != "block":
            layers = eagle3_layer_ids(target.num_layers) if config.kind == "eagle3" else (target.num_layers - 1,)
            if config.kind == "mtp" and len(config.target_layer_ids) > 1:
                raise ConfigError("an mtp drafter reads one layer; give one number as --target_layer_ids")
            return autoregressive_config(
                config.kind,
                target,
                block_size=1 if config.kind == "mtp" else config.block_size,
                target_layer_ids=config.target_layer_ids or layers,
                draft_vocab_size=config.draft_vocab_size or target.vocab_size,
            )
        mask = config.mask_token_id
        if mask is None:
            mask = unused_token(self.target)
        if not 0 <= mask < target.vocab_size:
            raise ConfigError(f"--mask_token_id must be from 0 to {target.vocab_size - 1}, got {mask}")
        return drafter_config(
            target,
            num_layers=config.num_layers,
            block_size=config.block_size,
            target_layer_ids=config.target_layer_ids or default_layer_ids(target.num_layers),
            mask_token_id=mask,
            markov_head=config.markov_head,
            markov_rank=config.markov_rank,
            draft_vocab_size=config.draft_vocab_size or target.vocab_size,
        )

    def _draft_token_ids(self) -> NDArray[np.int64] | None:
        config, target, own = self.config, self.target.config, own_vocab(self.source)
        if config.draft_vocab_size is None or config.draft_vocab_counts is None:
            return own
        if own is not None:
            raise ConfigError(
                f"--init_from {config.init_from} has a draft vocabulary of {own.size} tokens of its own; leave out "
                "--draft_vocab_size and --draft_vocab_counts"
            )
        counts = read_token_counts(config.draft_vocab_counts, target.vocab_size)
        specials = [i for i in (target.bos_token_id, target.pad_token_id, *target.eos_token_ids) if i is not None]
        return choose_draft_vocab(counts, config.draft_vocab_size, specials)


class Run:
    """One run, loaded and ready to train.

    Args:
        preparation: target and drafter.
        responses: sequences to train on; longer ones than `max_seq_len` are left out.
        traffic: directory of traffic records to train on as well.
    """

    def __init__(self, preparation: Preparation, responses: Sequence[Response], *, traffic: Path | None = None) -> None:
        config = preparation.config
        self.config, self.target, self.drafter = config, preparation.target, preparation.drafter
        self.draft_token_ids = preparation.draft_token_ids
        given = [preparation.generated_features()]
        if traffic is not None:
            directory = config.output_dir / TRAFFIC_DIR
            given.append(FeatureCache(directory, sys.maxsize, str(traffic.resolve()), private=True))
            responses = [*responses, *read_traffic(traffic, self.target, self.drafter, given[-1])]
        kept = fitting(responses, config.max_seq_len, "responses")
        self._digest, self._features_digest = _digest(kept), preparation.features_digest
        self._num_generated = sum(response in given[0] for response in kept)
        self._start = Start.of(
            self.drafter,
            self.target,
            preparation.source,
            self.draft_token_ids,
            seed=config.seed,
            num_positions=config.max_seq_len + self.drafter.block_size,
        )
        parameters = self._start.parameters
        self._decided = {
            "warmup_steps": config.warmup_steps,
            "decay_share": config.decay_share,
            "init_from": source_digest(preparation.source),
        }
        self._initial = {name: value.clone() for name, value in parameters.items()} if config.init_share else {}
        prefix = common_prefix(kept)
        capturers = [
            Capturer(
                preparation.feature_target.open(max_batch_size=2, num_threads=1),
                self.draft_token_ids,
                config.top_k,
                prefix,
            )
            for _ in range(config.num_threads)
        ]
        self.trainer = Trainer(
            self.drafter,
            self._trainer_config(),
            parameters,
            self._start.frozen,
            kept,
            capturers,
            preparation.captured_features(given[0].num_bytes),
            self.draft_token_ids,
            given,
        )
        self._saved_schedule: Schedule | None = None
        self.restart_clock()
        self._log = StepLog(config.output_dir / LOG_FILE, self.drafter.block_size)
        (config.output_dir / STATE_DIR).mkdir(exist_ok=True)
        if config.resume and not stopped_while_answering(config.output_dir):
            self._resume()
        else:
            # --resume must not find the state of the run before.
            (config.output_dir / STATE_DIR / STATE_FILE).unlink(missing_ok=True)
            self._log.restart()

    def restart_clock(self) -> None:
        """Let `minutes` begin now."""
        config = self.config
        self._steps = Steps(config.steps, config.minutes, config.warmup_steps, config.decay_share)
        if self._saved_schedule is not None:
            self._steps.schedule = self._saved_schedule

    def train(self, *, stop: Callable[[], bool], told: Callable[[StepReport, int | None], None]) -> Path:
        """Train to the end or until `stop`, write the drafter and return its directory.

        Raises:
            TrainingFailed: the loss is not finite any more.
            DeviceError: the disk is full or fails; the last saved state is intact.
        """

        def log(report: StepReport, num_steps: int | None) -> None:
            self._log.write(report)
            told(report, num_steps)

        run(self.trainer, self._steps, stop=stop, told=log, saved=self.save, save_every=self.config.save_every)
        directory = self.config.output_dir / DRAFTER_DIR
        self.export(directory)
        return directory

    def close(self) -> None:
        """Release the threads and the log."""
        self.trainer.close()
        self._log.close()

    def save(self, schedule: Schedule | None) -> None:
        """Write the state a resumed run needs."""
        facts = {
            "responses": self._digest,
            "features": self._features_digest,
            "num_generated": self._num_generated,
            "schedule": None if schedule is None else schedule.as_json(),
            **self._decided,
        }
        self.trainer.save(self.config.output_dir / STATE_DIR, facts)

    def validate(self, responses: Sequence[Response]) -> dict[str, tuple[int, int]]:
        """Return tokens and rounds of greedy walks along the responses, by domain, of the drafter `export` writes."""
        result: dict[str, tuple[int, int]] = {}
        parameters = self._exported()
        for domain in sorted({response.domain for response in responses}):
            mine = [one for one in responses if one.domain == domain and one.num_anchors > 0]
            result[domain] = accepted_len(
                parameters,
                self.trainer.frozen,
                self.drafter,
                mine,
                self.trainer.capture(mine),
                self.draft_token_ids,
            )
        return result

    def export(self, directory: Path) -> None:
        """Write the drafter: the trained weights, averaged with those it went on from where `init_share` says so."""
        shared = None
        if self.config.include_shared:
            head = "embed.weight" if self.target.config.tie_word_embeddings else "lm_head.weight"
            names = {"embed.weight": "embed.weight", "lm_head.weight": head}
            shared = {name: self.target.arrays[names[name]] for name in names if name not in self._start.tables}
        drafter, arrays = self._start.whole(self._exported())
        write_drafter(
            directory,
            drafter,
            self.target.config,
            arrays,
            num_anchors=self.config.anchors_per_sequence,
            shared=shared,
        )

    def _exported(self) -> Parameters:
        share = self.config.init_share
        trained = self.trainer.parameters
        return {name: trained[name].lerp(value, share) for name, value in self._initial.items()} or trained

    def _resume(self) -> None:
        state = load_state(self.config.output_dir / STATE_DIR)
        if state.facts.get("responses") != self._digest:
            raise CheckpointError("the saved run trained on other responses; resume with the same ones")
        # A state of a version that did not write it is taken as it is.
        if state.facts.get("features", self._features_digest) != self._features_digest:
            raise CheckpointError(
                "the saved run read other features; resume with its target, --weight_dtype, --top_k, "
                "--target_layer_ids and --draft_vocab_counts"
            )
        for name, mine in self._decided.items():
            saved = state.facts.get(name, mine)
            if saved == mine:
                continue
            if name == "init_from":
                begun = "without --init_from" if saved is None else "with another drafter"
                raise CheckpointError(
                    f"the saved run began {begun}; resume with the same --init_from, or without one where it had none, "
                    "or start another --output_dir"
                )
            raise CheckpointError(
                f"the saved run has --{name} {saved}, this command {mine}; resume with the same or start another "
                "--output_dir"
            )
        missing = state.facts.get("num_generated", self._num_generated) - self._num_generated
        if missing > 0:
            logger.warning(
                "%d sequences have lost the features that were captured while answering; they are captured anew, and "
                "rounding makes the run another one than it would have been",
                missing,
            )
        self.trainer.restore(state)
        schedule = state.facts.get("schedule")
        if self.config.steps is None and schedule is not None:
            self._saved_schedule = Schedule(**schedule)
            self.restart_clock()
        elif self.config.steps is None and self.config.minutes is None:
            raise ConfigError("the saved run stopped before its length was known; give --steps or --minutes")
        self._log.cut(self.trainer.steps_done)

    def _trainer_config(self) -> TrainerConfig:
        config, base = self.config, OptimizerConfig()
        return TrainerConfig(
            BatchConfig(
                num_sequences=config.num_sequences,
                anchors_per_sequence=config.anchors_per_sequence,
                block_size=self.drafter.block_size,
                mask_token_id=self.drafter.mask_token_id,
                decay=config.position_decay,
                sample_positions=config.sample_positions,
                target_temperature=config.target_temperature,
                seed=config.seed,
            ),
            config.alphas,
            OptimizerConfig(
                base.matrix_lr * config.lr_scale, base.vector_lr * config.lr_scale, base.head_lr * config.lr_scale
            ),
            bfloat16=bool(torch.cpu._is_avx512_bf16_supported()),
        )


def stopped_while_answering(output_dir: Path) -> bool:
    """Whether the run that stands there has answered prompts and has not come to train."""
    return (output_dir / FLAGS_FILE).exists() and not (output_dir / STATE_DIR / STATE_FILE).exists()


def _digest(responses: Sequence[Response]) -> str:
    digest = hashlib.sha256()
    for response in responses:
        digest.update(f"{response.first_position}:{response.response_start}:{response.token_ids}\n".encode())
    return digest.hexdigest()
