"""Flags of a drafter's trial, shared by `serve` and `swap`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_trial_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Declare the flags.

    Args:
        parser: of the command.
        required: False makes `--candidate_engine_dir` optional.
    """
    from trtllm_dspark.engine_process.swap import TrialOptions

    defaults = TrialOptions()
    add = parser.add_argument
    add(
        "--candidate_engine_dir",
        type=Path,
        required=required,
        help="engine of the same target with another drafter: it is tried on a share of the requests and takes over "
        "when its accepted length is longer",
    )
    add("--candidate_share", type=float, default=defaults.share, help="fraction of new requests the candidate gets")
    add("--swap_alpha", type=float, default=defaults.alpha, help="probability of a wrong decision")
    add("--swap_margin", type=float, default=defaults.margin, help="tokens a round the candidate may be worse by")
    add("--swap_min_requests", type=int, default=defaults.min_requests, help="finished requests of each arm it takes")
    add(
        "--swap_max_requests",
        type=int,
        default=defaults.max_requests,
        help="finished requests after which an undecided candidate goes",
    )


def trial_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `engine_process.swap.TrialOptions`.

    Raises:
        UsageError: a value is out of range.
    """
    from trtllm_dspark.engine_process.swap import TrialOptions

    options = {
        "share": args.candidate_share,
        "alpha": args.swap_alpha,
        "margin": args.swap_margin,
        "min_requests": args.swap_min_requests,
        "max_requests": args.swap_max_requests,
    }
    TrialOptions(**options).check()
    return options
