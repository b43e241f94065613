"""What drafts in place of the engine's own drafter alone, chosen by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trtllm_dspark.errors import UsageError
from trtllm_dspark.runtime.proposers.base import ProposerFactory
from trtllm_dspark.runtime.proposers.draft_model import DraftModelProposer
from trtllm_dspark.runtime.proposers.engine_ngram import EngineNgramProposer
from trtllm_dspark.runtime.proposers.ngram import NgramProposer

KINDS = ("ngram", "engine+ngram", "draft_model")


@dataclass(frozen=True, slots=True)
class OutsideDrafter:
    """What drafts in place of the engine's own drafter, or beside it.

    Attributes:
        kind: one of `KINDS`.
        engine_dir: of the draft model.
        draft_len: drafts a round; None = the engine's block, or 7 without one.

    Raises:
        UsageError: parts that do not go together.
    """

    kind: str
    engine_dir: Path | None = None
    draft_len: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--drafter {self.kind} is not known; use one of {', '.join(KINDS)}")
        if self.kind == "draft_model" and self.engine_dir is None:
            raise UsageError("--drafter draft_model needs --draft_engine_dir, the engine of a smaller model")
        if self.kind != "draft_model" and self.engine_dir is not None:
            raise UsageError("--draft_engine_dir goes with --drafter draft_model")
        if self.kind == "engine+ngram" and self.draft_len is not None:
            raise UsageError("--drafter engine+ngram drafts the engine's block; leave --draft_len out")

    def make(self, *, num_threads: int) -> ProposerFactory:
        """Return what makes one session's proposer.

        Raises:
            EngineError: the draft model's engine cannot be used.
        """
        if self.kind == "engine+ngram":
            return EngineNgramProposer
        if self.engine_dir is None:
            return partial(NgramProposer, max_draft_len=self.draft_len)
        from trtllm_dspark.engine import load_engine

        engine = load_engine(self.engine_dir, num_threads=num_threads)
        return partial(DraftModelProposer, engine, max_draft_len=self.draft_len)
