"""From a target and its responses to a drafter: what `trtllm-dspark train` does."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_dspark.build.draft_vocab import choose_draft_vocab, read_token_counts
from trtllm_dspark.checkpoint import Checkpoint, DrafterConfig, load_drafter, load_target
from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph import write_target
from trtllm_dspark.train.data import BatchConfig
from trtllm_dspark.train.export import write_deepspec
from trtllm_dspark.train.features import Capturer, FeatureCache, common_prefix
from trtllm_dspark.train.loss import Alphas
from trtllm_dspark.train.model import Frozen
from trtllm_dspark.train.optim import OptimizerConfig
from trtllm_dspark.train.parameters import default_layer_ids, drafter_config, from_arrays, from_target
from trtllm_dspark.train.responses import Response
from trtllm_dspark.train.saved_state import load_state
from trtllm_dspark.train.schedule import Schedule
from trtllm_dspark.train.trainer import StepReport, Trainer, TrainerConfig, full_draft_config, run

logger = logging.getLogger(__name__)

LOG_FILE = "training_log.csv"
STATE_DIR = "state"
DRAFTER_DIR = "drafter"
TARGET_DIR = "target"
CACHE_DIR = "features"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A training run; the flags of `trtllm-dspark train` with the same names say what the fields mean."""

    target_checkpoint: str
    output_dir: Path
    steps: int
    init_from: str | None = None
    num_layers: int = 2
    block_size: int = 7
    markov_head: Literal["none", "vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 64
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    draft_vocab_counts: Path | None = None
    num_sequences: int = 32
    anchors_per_sequence: int = 32
    position_decay: float = 4.0
    sample_positions: bool = False
    target_temperature: float = 1.0
    alphas: Alphas = field(default_factory=Alphas)
    lr_scale: float = 1.0
    warmup_steps: int = 20
    decay_share: float = 0.5
    top_k: int = 128
    weight_dtype: Literal["float32", "int8"] = "float32"
    feature_cache_gib: float = 8.0
    max_seq_len: int = 1024
    num_threads: int = 2
    save_every: int = 25
    seed: int = 0
    resume: bool = False
    include_shared: bool = False


class Run:
    """One run: everything loaded, ready to train.

    Args:
        config: what to train.
        responses: sequences to train on.
    """

    def __init__(self, config: TrainConfig, responses: Sequence[Response]) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.target = load_target(config.target_checkpoint)
        source = None if config.init_from is None else load_drafter(config.init_from, self.target.config)
        self.drafter = self._new_config() if source is None else source.config
        self.draft_token_ids = self._draft_token_ids()
        self._w2: NDArray[Any] | None = None
        if source is None:
            parameters = from_target(self.drafter, self.target.config, self.target.arrays, config.seed)
        else:
            parameters = from_arrays(self.drafter, source.arrays, self.draft_token_ids)
            if "markov.w2.weight" in source.arrays:
                self._w2 = np.asarray(source.arrays["markov.w2.weight"], np.float32)
        config.output_dir.mkdir(parents=True, exist_ok=True)
        longest = max(len(response.token_ids) for response in responses)
        self.trainer = Trainer(
            self.drafter,
            self._trainer_config(),
            parameters,
            self._frozen(source, longest + self.drafter.block_size),
            responses,
            self._capturers(responses, longest),
            self._cache(),
            self.draft_token_ids,
            Schedule(config.steps, config.warmup_steps, config.decay_share),
        )
        self._log = config.output_dir / LOG_FILE
        (config.output_dir / STATE_DIR).mkdir(exist_ok=True)
        if config.resume:
            self.trainer.restore(load_state(config.output_dir / STATE_DIR))
            _cut_log(self._log, self.trainer.steps_done)
        else:
            self._log.unlink(missing_ok=True)

    def train(self, *, stop: Callable[[], bool], told: Callable[[StepReport], None]) -> None:
        """Train to the end or until `stop`, then write the drafter."""
        with self._log.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if stream.tell() == 0:
                writer.writerow(_header(self.drafter.block_size))

            def log(report: StepReport) -> None:
                writer.writerow(_row(report))
                stream.flush()
                told(report)

            try:
                run(self.trainer, stop=stop, told=log, saved=self.save, save_every=self.config.save_every)
            finally:
                self.trainer.close()
        self.export(self.config.output_dir / DRAFTER_DIR)

    def save(self) -> None:
        """Write the state a resumed run needs."""
        self.trainer.save(self.config.output_dir / STATE_DIR, {})

    def export(self, directory: Path) -> None:
        """Write the drafter in DeepSpec's layout."""
        shared = None
        if self.config.include_shared:
            head = "embed.weight" if self.target.config.tie_word_embeddings else "lm_head.weight"
            shared = {
                "embed.weight": self.target.arrays["embed.weight"],
                "lm_head.weight": self.target.arrays[head],
            }
        write_deepspec(
            directory,
            full_draft_config(self.drafter),
            self.target.config,
            self.trainer.drafter_arrays(self.draft_token_ids, self._w2),
            num_anchors=self.config.anchors_per_sequence,
            shared=shared,
        )

    def _new_config(self) -> DrafterConfig:
        config, target = self.config, self.target.config
        mask = config.mask_token_id
        if mask is None:
            raise ConfigError("--mask_token_id is needed for a new drafter: a token that no text contains")
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
        config, target = self.config, self.target.config
        if config.draft_vocab_size is None:
            return None
        if config.draft_vocab_counts is None:
            raise ConfigError("--draft_vocab_size needs --draft_vocab_counts, which say which tokens to keep")
        counts = read_token_counts(config.draft_vocab_counts, target.vocab_size)
        specials = [i for i in (target.bos_token_id, target.pad_token_id, *target.eos_token_ids) if i is not None]
        return choose_draft_vocab(counts, config.draft_vocab_size, specials)

    def _trainer_config(self) -> TrainerConfig:
        config = self.config
        base = OptimizerConfig()
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
            bfloat16=torch.cpu._is_avx512_bf16_supported(),
        )

    def _frozen(self, source: Any, num_positions: int) -> Frozen:
        def rows(name: str) -> torch.Tensor:
            own = source is not None and name in source.arrays
            if name == "lm_head.weight" and not own and self.target.config.tie_word_embeddings:
                return rows("embed.weight")
            arrays = source.arrays if own else self.target.arrays
            return torch.from_numpy(np.array(arrays[name], np.float32))

        head = rows("lm_head.weight")
        if self.draft_token_ids is not None:
            head = head[torch.from_numpy(self.draft_token_ids)].contiguous()
        return Frozen.of(rows("embed.weight"), head, self.drafter.backbone, num_positions)

    def _capturers(self, responses: Sequence[Response], longest: int) -> list[Capturer]:
        directory = write_feature_target(
            self.config.output_dir / TARGET_DIR, self.target, self.drafter.target_layer_ids, self.config
        )
        prefix = common_prefix(responses)
        limits = EngineLimits(
            max_batch_size=2,
            max_seq_len=longest,
            max_num_tokens=min(longest, 512),
            max_draft_len=0,
            vocab_size=self.target.config.vocab_size,
            draft_vocab_size=0,
            feature_size=self.drafter.feature_size,
            mask_token_id=0,
            has_drafter=False,
        )
        return [
            Capturer(
                OnnxRuntimeEngine(directory, self.target.config, None, limits, num_threads=1),
                self.draft_token_ids,
                self.config.top_k,
                prefix,
            )
            for _ in range(self.config.num_threads)
        ]

    def _cache(self) -> FeatureCache:
        ids = self.draft_token_ids
        key = {
            "target": [file.sha256 for file in self.target.files],
            "layers": self.drafter.target_layer_ids,
            "weight_dtype": self.config.weight_dtype,
            "top_k": self.config.top_k,
            "draft_vocab": None if ids is None else hashlib.sha256(ids.tobytes()).hexdigest(),
        }
        return FeatureCache(self.config.output_dir / CACHE_DIR, int(self.config.feature_cache_gib * 2**30), key)


def write_feature_target(directory: Path, target: Checkpoint, layer_ids: Sequence[int], config: TrainConfig) -> Path:
    """Write the target's graph with the features a drafter reads; a directory that stands is used as it is."""
    wanted = directory / f"{config.weight_dtype}.{config.max_seq_len}.{'_'.join(map(str, layer_ids))}"
    if wanted.is_dir():
        return wanted
    part = wanted.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write_target(
        part,
        target.config,
        target.arrays,
        max_seq_len=config.max_seq_len,
        feature_layer_ids=layer_ids,
        weight_dtype=config.weight_dtype,
    )
    os.rename(part, wanted)
    return wanted


def _header(gamma: int) -> list[str]:
    names = ["step", "lr_scale", "loss", "cross_entropy", "l1", "confidence", "tau"]
    return [*names, *(f"accept_{k}" for k in range(1, gamma + 1)), "blocks", "rows", "seconds", "capture_seconds"]


def _row(report: StepReport) -> list[str]:
    values = [report.lr_scale, report.loss, report.cross_entropy, report.l1, report.confidence, report.tau]
    numbers = [f"{value:.6g}" for value in (*values, *report.accept)]
    times = [f"{report.seconds:.3f}", f"{report.capture_seconds:.3f}"]
    return [str(report.step), *numbers, str(report.num_blocks), str(report.num_rows), *times]


def _cut_log(path: Path, steps_done: int) -> None:
    """Drop rows of steps that the saved state does not have: they are done again."""
    if not path.exists():
        return
    lines = path.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines[1:] if line.endswith("\n") and int(line.partition(",")[0]) <= steps_done]
    path.write_text("".join(lines[:1] + kept), "utf-8")


__all__ = ["Run", "TrainConfig", "write_feature_target"]
