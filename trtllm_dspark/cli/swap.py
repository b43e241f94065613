"""`trtllm-dspark swap`: try another drafter in a running server and let the better one stay."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from trtllm_dspark.cli._trial import add_trial_arguments, trial_options
from trtllm_dspark.errors import UsageError

NOT_PROMOTED = 1
_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `swap`."""
    add_trial_arguments(parser, required=False)
    add = parser.add_argument
    add("--launcher_pid", type=int, help="pid of the trtllm-dspark serve to talk to, where several run")
    add("--socket", help="socket of an engine process that runs without a launcher")
    add("--status", action="store_true", help="print how the current or the last swap stands")
    add("--abort", action="store_true", help="end the current trial; the drafter that serves stays")
    add("--no_wait", action="store_true", help="return once the candidate is being loaded")


def run(args: argparse.Namespace) -> int:
    """Start, end or describe a swap; 0 promoted (or nothing to wait for), 1 not promoted."""
    from trtllm_dspark.serving.control import EngineControl, find_socket

    if sum((args.status, args.abort, args.candidate_engine_dir is not None)) != 1:
        raise UsageError("give one of --candidate_engine_dir, --status and --abort")
    options = trial_options(args)
    control = EngineControl(args.socket or find_socket(args.launcher_pid))
    try:
        if args.status or args.abort:
            _print(control.ask({"type": "swap_abort" if args.abort else "swap_status"}))
            return 0
        directory = str(args.candidate_engine_dir.resolve())
        status = control.ask({"type": "swap", "engine_dir": directory, "options": options})
        if args.no_wait:
            _print(status)
            return 0
        return _wait(control, directory)
    finally:
        control.close()


def _wait(control: Any, directory: str) -> int:
    said = ""
    while True:
        status = control.ask({"type": "swap_status"})
        if status["candidate_engine_dir"] != directory:
            raise UsageError("another swap has begun in the meantime; see --status")
        if "outcome" in status:
            _print(status)
            if status["outcome"] == "promoted":
                print(f"the next server should be started with --engine_dir {directory}", file=sys.stderr)
            return 0 if status["outcome"] == "promoted" else NOT_PROMOTED
        sentence = f"{status['state']}: {status['requests']}"
        if sentence != said:
            print(sentence, file=sys.stderr)
            said = sentence
        time.sleep(_POLL_S)


def _print(status: dict[str, Any]) -> None:
    print(json.dumps({name: value for name, value in status.items() if name != "type"}))
