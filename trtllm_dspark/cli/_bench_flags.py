"""What the three uses of `bench` do not read: a flag that is given and would be ignored is refused by name."""

from __future__ import annotations

import argparse

from trtllm_dspark.errors import UsageError

DRAFTER = ("drafter", "draft_engine_dir", "draft_len")
SERVER = ("api", "model", "traffic", "requests", "label")
REPORT = ("report", "sla", "measured")
UNUSED: dict[str, tuple[str, ...]] = {
    "url": ("num_threads", "kernel_library", "batch_size", "acceptance", "speculation", "repeats", *DRAFTER),
    "acceptance_output": ("batch_size", "speculation", "repeats", "json", *DRAFTER, *SERVER, *REPORT),
    "engine_dir": (*SERVER, *REPORT),
}
"""The flag that decides the use, and flags it does not read."""


def hold_defaults(parser: argparse.ArgumentParser) -> None:
    """Let flags of `UNUSED` be None where they are not given; --help shows their defaults all the same."""
    names = {name for unused in UNUSED.values() for name in unused}
    held = {}
    for action in parser._actions:
        if action.dest in names and action.default not in (None, False):
            held[action.dest], action.default = action.default, None
            action.help = f"{action.help} (default: {held[action.dest]})" if held[action.dest] else action.help
    parser.set_defaults(held_defaults=held)


def settle(args: argparse.Namespace) -> None:
    """Refuse what this use does not read and put defaults where nothing was given.

    Raises:
        UsageError: such a flag was given.
    """
    if args.url is not None and args.acceptance_output is not None:
        raise UsageError("--acceptance_output needs --engine_dir; a server does not tell confidences")
    use = next(name for name in UNUSED if getattr(args, name) is not None)
    for name in UNUSED[use]:
        value = getattr(args, name)
        if value is not None and value is not False:
            raise UsageError(_refusal(name, use))
    for name, default in args.held_defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _refusal(name: str, use: str) -> str:
    if name in REPORT:
        return f"--{name} is one of the reports, which belong to --url; leave it out, or use --json without --url"
    if name in SERVER:
        return f"--{name} is about a running server; leave it out, or give --url in place of --engine_dir"
    if use == "url":
        return f"--{name} is the server's own, set where it was started; leave it out, or give --engine_dir"
    return (
        f"--{name} means nothing to --acceptance_output, which records one request at a time with the engine's own "
        "drafter and prints one line; leave it out"
    )
