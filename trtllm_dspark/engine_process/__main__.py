"""Command line of the engine process; `trtllm-dspark serve` starts it, a person may for another front."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.opening import (
    SessionOptions,
    make_lane,
    open_candidate,
    open_load_control,
    open_session,
)
from trtllm_dspark.engine_process.requests import RequestLimits
from trtllm_dspark.engine_process.runner import ProcessOptions, serve_lane
from trtllm_dspark.engine_process.swap import TrialOptions
from trtllm_dspark.errors import DsparkError, EngineError, UsageError
from trtllm_dspark.runtime.proposers import OutsideDrafter
from trtllm_dspark.traffic.recorder import CollectOptions, TrafficRecorder

BYTES_PER_TOKEN = 64
"""Default prompt limit in bytes per token of max_seq_len: above every tokenizer's longest tokens in real text."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the process's flags."""
    parser = argparse.ArgumentParser(prog="trtllm_dspark.engine_process", allow_abbrev=False)
    parser.add_argument("--engine_dir", required=True, type=Path)
    parser.add_argument("--socket", required=True, help="Unix socket to listen on")
    parser.add_argument(
        "--speculation", default="adaptive", help="which drafts a round verifies, as in trtllm-dspark serve"
    )
    parser.add_argument("--acceptance", default="rejection", choices=("rejection", "coupled"))
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--kernel_library", type=Path, help="libtrtllm_dspark_kernels.so, for TensorRT engines")
    parser.add_argument(
        "--drafter", default="engine", help="as in trtllm-dspark serve: engine, ngram, engine+ngram or draft_model"
    )
    parser.add_argument("--draft_engine_dir", type=Path, help="engine of the draft model")
    parser.add_argument("--draft_len", type=int, help="drafts of ngram or draft_model a round")
    parser.add_argument("--max_queue_size", type=int, default=256)
    parser.add_argument("--max_prompt_bytes", type=int, default=0, help="0 = 64 bytes for each token of max_seq_len")
    parser.add_argument("--model_name", default="", help="name clients see; default: the engine directory's name")
    parser.add_argument("--candidate_engine_dir", default="", help="engine whose drafter is tried from the start")
    parser.add_argument("--candidate_trial", default="{}", help="JSON of engine_process.swap.TrialOptions")
    parser.add_argument("--collect_dir", type=Path, help="record a part of the traffic there")
    parser.add_argument("--collect_max_gb", type=float, default=1.0)
    parser.add_argument("--collect_share", type=float, default=0.1)
    parser.add_argument("--collect_prompts", default="hash")
    parser.add_argument("--calibration", default="auto", choices=("auto", "online", "stored"))
    parser.add_argument("--load_monitor", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--load_device", default="0", help="NVML index or UUID of the GPU whose load counts")
    parser.add_argument("--parent_pid", type=int, help="end when this parent is gone")
    parser.add_argument("--log_level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Open the engine and serve it; return the exit code of `trtllm_dspark.errors`."""
    args = parse_arguments(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        _serve(args)
    except DsparkError as error:
        print(f"trtllm-dspark engine process: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _serve(args: argparse.Namespace) -> None:
    if args.num_threads < 1 or args.max_queue_size < 0 or args.max_prompt_bytes < 0:
        raise UsageError("--num_threads must be at least 1, --max_queue_size and --max_prompt_bytes at least 0")
    try:
        trial = TrialOptions(**json.loads(args.candidate_trial))
    except (TypeError, ValueError) as error:
        raise UsageError(f"--candidate_trial is not JSON of trial options ({error})") from error
    trial.check()
    metrics = EngineMetrics()
    recorder = _recorder(args, metrics)
    # However this ends: what is recorded is written, and another server may use the directory.
    with contextlib.nullcontext() if recorder is None else contextlib.closing(recorder):
        _serve_engine(args, trial, metrics, recorder)


def _serve_engine(
    args: argparse.Namespace, trial: TrialOptions, metrics: EngineMetrics, recorder: TrafficRecorder | None
) -> None:
    device = int(args.load_device) if args.load_device.isdecimal() else args.load_device
    load = open_load_control(args.engine_dir, args.load_monitor, device)
    options = SessionOptions(
        args.num_threads,
        args.speculation,
        args.acceptance,
        recorder,
        load=load,
        calibration=args.calibration,
        kernel_library=args.kernel_library,
        drafter=drafter_of(args),
    )
    session = open_session(args.engine_dir, options)
    tokenizer, engine = session.tokenizer, session.limits
    if tokenizer is None:
        raise EngineError(f"{args.engine_dir} has no tokenizer; build it again from a checkpoint that has one")
    limits = RequestLimits(
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.vocab_size,
        max_draft_len=session.stats.max_draft_len,
        max_prompt_bytes=args.max_prompt_bytes or BYTES_PER_TOKEN * engine.max_seq_len,
    )
    process = ProcessOptions(
        socket_path=args.socket,
        max_queue_size=args.max_queue_size,
        parent_pid=args.parent_pid,
        candidate_engine_dir=args.candidate_engine_dir,
        trial=trial,
    )
    info = {
        "name": args.model_name or args.engine_dir.resolve().name,
        "speculation": str(session.speculation),
        "max_seq_len": engine.max_seq_len,
        "vocab_size": engine.vocab_size,
        "has_chat_template": tokenizer.has_chat_template,
    }

    def open_beside(serving: str, candidate: str) -> Lane:
        return open_candidate(serving, candidate, options)

    lane = make_lane(session, args.engine_dir, load)
    # The engine holds its memory now: what is free is what others may take.
    with load or contextlib.nullcontext():
        serve_lane(lane, open_beside, tokenizer, limits, process, info, metrics, load)


def drafter_of(args: argparse.Namespace) -> OutsideDrafter | None:
    """Return what the flags say drafts in place of the engine's own drafter, None for that one.

    Raises:
        UsageError: flags that do not go together.
    """
    if args.drafter != "engine":
        return OutsideDrafter(args.drafter, args.draft_engine_dir, args.draft_len)
    if args.draft_engine_dir is not None or args.draft_len is not None:
        raise UsageError("--draft_engine_dir and --draft_len go with --drafter ngram or draft_model")
    return None


def _recorder(args: argparse.Namespace, metrics: EngineMetrics) -> TrafficRecorder | None:
    if args.collect_dir is None:
        return None
    if not 0.0 < args.collect_max_gb < 1e6:  # NaN is not
        raise UsageError(f"--collect_max_gb is {args.collect_max_gb}; give gigabytes, more than 0")
    options = CollectOptions(
        args.collect_dir, int(args.collect_max_gb * 1e9), share=args.collect_share, prompts=args.collect_prompts
    )
    return TrafficRecorder(
        open_engine_dir(args.engine_dir, verify_hashes=False).manifest,
        options,
        count=lambda outcome: metrics.add("dspark_collect_requests", outcome=outcome),
        size=lambda num_bytes: metrics.set("dspark_collect_bytes", float(num_bytes)),
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Native thread pools may outlive a normal exit; the session is closed and every answer is written.
    os._exit(code)
