"""`--drafter`: what proposes drafts."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import UsageError
from trtllm_dspark.runtime.proposers import OutsideDrafter, ProposerFactory
from trtllm_dspark.runtime.proposers.outside import KINDS as OUTSIDE

OWN = ("dspark", "dflash", "eagle3", "mtp")
"""Kinds of drafters that an engine can be built with."""
KINDS = ("engine", *OWN, *OUTSIDE)


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --drafter, --draft_engine_dir and --draft_len."""
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--drafter",
        default="engine",
        choices=KINDS,
        help="engine: the drafter it was built with, whose kind may be named instead; ngram: what followed the last "
        "tokens before, no model at all; engine+ngram: that where it has been right more often, else the engine's; "
        "draft_model: a smaller target",
    )
    group.add_argument(
        "--draft_engine_dir", type=Path, metavar="E", help="engine of the draft model, built without one"
    )
    group.add_argument(
        "--draft_len", type=int, metavar="G", help="drafts of ngram or draft_model a round; the block's length or 7"
    )


def drafter_choice(args: argparse.Namespace) -> OutsideDrafter | None:
    """Return what drafts in place of the engine's own drafter, None for that one.

    Raises:
        UsageError: flags that do not go together.
    """
    if args.drafter in OUTSIDE:
        return OutsideDrafter(args.drafter, args.draft_engine_dir, args.draft_len)
    if args.draft_engine_dir is not None:
        raise UsageError("--draft_engine_dir goes with --drafter draft_model")
    if args.draft_len is not None:
        raise UsageError("--draft_len goes with --drafter ngram or draft_model; use --speculation fixed:G")
    if args.drafter != "engine":
        _check_kind(args.engine_dir, args.drafter)
    return None


def make_drafter(args: argparse.Namespace) -> ProposerFactory | None:
    """Return what makes the session's proposer, None for the engine's own drafter.

    Raises:
        UsageError: flags that do not go together.
        EngineError: the draft model's engine cannot be used.
    """
    choice = drafter_choice(args)
    return None if choice is None else choice.make(num_threads=args.num_threads)


def _check_kind(engine_dir: Path, wanted: str) -> None:
    """Refuse a name that is not that of the engine's drafter."""
    config = open_engine_dir(engine_dir, verify_hashes=False).manifest.drafter_config
    if config is None:
        raise UsageError(f"{engine_dir} has no drafter; build it with --draft_checkpoint to use --drafter {wanted}")
    kind = drafter_kind(config)
    if kind != wanted:
        raise UsageError(
            f"the drafter of {engine_dir} is {kind}, not {wanted}; leave out --drafter, or build another engine"
        )


def drafter_kind(config: DrafterConfig) -> str:
    """Return the name of a drafter's kind, one of `OWN`."""
    if config.autoregressive:
        return config.kind
    return "dflash" if config.markov_head == "none" else "dspark"
