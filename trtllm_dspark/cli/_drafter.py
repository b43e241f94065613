"""`--drafter`: what proposes drafts."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from trtllm_dspark.engine import load_engine
from trtllm_dspark.errors import UsageError
from trtllm_dspark.runtime.proposers import DraftModelProposer, NgramProposer, ProposerFactory

KINDS = ("engine", "ngram", "draft_model")


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --drafter, --draft_engine_dir and --draft_len."""
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--drafter",
        default="engine",
        choices=KINDS,
        help="engine: the drafter it was built with; ngram: what followed the last tokens before, no model at all; "
        "draft_model: a smaller target",
    )
    group.add_argument(
        "--draft_engine_dir", type=Path, metavar="E", help="engine of the draft model, built without one"
    )
    group.add_argument(
        "--draft_len", type=int, metavar="G", help="drafts of ngram or draft_model a round; the block's length or 7"
    )


def make_drafter(args: argparse.Namespace) -> ProposerFactory | None:
    """Return what makes the session's proposer, None for the engine's own drafter.

    Raises:
        UsageError: flags that do not go together.
        EngineError: the draft model's engine cannot be used.
    """
    if args.drafter != "draft_model" and args.draft_engine_dir is not None:
        raise UsageError("--draft_engine_dir goes with --drafter draft_model")
    if args.drafter == "engine":
        if args.draft_len is not None:
            raise UsageError("--draft_len goes with --drafter ngram or draft_model; use --speculation fixed:G")
        return None
    if args.drafter == "ngram":
        return partial(NgramProposer, max_draft_len=args.draft_len)
    if args.draft_engine_dir is None:
        raise UsageError("--drafter draft_model needs --draft_engine_dir, the engine of a smaller model")
    engine = load_engine(args.draft_engine_dir, num_threads=args.num_threads)
    return partial(DraftModelProposer, engine, max_draft_len=args.draft_len)
