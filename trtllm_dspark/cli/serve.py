"""`trtllm-dspark serve`: package a Triton model repository and start the server."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.cli._drafter import add_drafter_arguments, drafter_choice
from trtllm_dspark.cli._trial import add_trial_arguments, trial_options
from trtllm_dspark.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `serve`."""
    add = parser.add_argument
    add("--engine_dir", required=True, type=Path, help="engine directory written by trtllm-dspark build")
    add("--model_repository", type=Path, help="where to write the model repository (default: a temporary directory)")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    add("--http_port", type=int, default=8000, help="HTTP: generate, generate_stream, health")
    add("--grpc_port", type=int, default=8001, help="gRPC")
    add("--metrics_port", type=int, default=8002, help="Prometheus /metrics")
    add("--openai_port", type=int, help="also serve OpenAI's API (/v1/completions, /v1/chat/completions) on this port")
    add(
        "--speculation",
        default="adaptive",
        help="which drafts a round verifies: adaptive, off, fixed[:G], threshold[:C], early_stop or stale_topk[:B]",
    )
    add("--acceptance", default="rejection", choices=("rejection", "coupled"), help="how sampled drafts are accepted")
    add_drafter_arguments(parser)
    add("--num_threads", type=int, default=2, help="threads of the CPU engine")
    add("--kernel_library", type=Path, metavar="F.so", help="TensorRT engines: keeps whole rounds on the GPU")
    add("--model_name", default="", help="name of the model in descriptions (default: the engine directory's name)")
    add("--max_queue_size", type=int, default=256, help="requests that may wait for a slot; further ones are refused")
    add("--max_prompt_bytes", type=int, default=0, help="largest prompt; 0 = 64 bytes for each token of max_seq_len")
    add(
        "--exclude_input_in_output",
        default="true",
        choices=("true", "false"),
        help="whether unary outputs leave the prompt out when a request does not say",
    )
    add("--drain_timeout", type=int, default=30, help="seconds SIGTERM waits for requests in flight")
    add("--engine_start_timeout", type=float, default=600.0, help="seconds the engine may take to load")
    add("--hang_timeout", type=float, default=60.0, help="seconds one round may take before the engine is replaced")
    add_trial_arguments(parser, required=False)
    _add_collect_arguments(parser)
    add(
        "--calibration",
        default="auto",
        choices=("auto", "online", "stored"),
        help="online: the confidence head's calibration follows what is observed; auto: where a seed does not fix the "
        "text anyway (adaptive, early_stop, stale_topk), with the engine's own drafter alone",
    )
    add(
        "--load_monitor",
        default="auto",
        choices=("auto", "on", "off"),
        help="adapt to clocks, other tenants and free memory of the GPU; auto: where the engine runs on one",
    )
    add("--load_device", default="0", metavar="GPU", help="NVML index or UUID of the GPU whose load counts")
    add(
        "--triton_flag",
        action="append",
        default=[],
        help="further flag for tritonserver, e.g. --triton_flag=--log-verbose=1",
    )


def _add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--collect_dir", type=Path, help="record features and outcomes of live traffic there, for train --from_traffic")
    add("--collect_max_gb", type=float, default=1.0, help="size of all records; the oldest go first")
    add("--collect_share", type=float, default=0.1, help="fraction of the requests that is recorded")
    add("--collect_prompts", default="hash", choices=("hash", "drop"), help="what is kept of a prompt")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    from trtllm_dspark.engine_dir import open_engine_dir
    from trtllm_dspark.serving.launcher import Launcher, ServeOptions
    from trtllm_dspark.serving.tritonserver import ServerAddress
    from trtllm_dspark.speculation.config import SpeculationConfig

    if args.drain_timeout < 0 or not (args.hang_timeout > 0 and args.engine_start_timeout > 0):  # NaN is not
        raise UsageError("--drain_timeout must not be negative, --hang_timeout and --engine_start_timeout positive")
    if args.calibration == "online" and not SpeculationConfig.parse(args.speculation).needs_confidence:
        raise UsageError(
            "--calibration online needs a mode that reads confidences; use --speculation adaptive, threshold, "
            "early_stop or stale_topk"
        )
    open_engine_dir(args.engine_dir)
    _check_drafter(args)
    if args.candidate_engine_dir is not None:
        open_engine_dir(args.candidate_engine_dir, verify_hashes=False)
    address = ServerAddress(args.host, args.http_port, args.grpc_port, args.metrics_port)
    options = ServeOptions(
        address=address,
        model_repository=args.model_repository,
        exclude_input_in_output=args.exclude_input_in_output == "true",
        drain_timeout_s=args.drain_timeout,
        engine_start_timeout_s=args.engine_start_timeout,
        hang_timeout_s=args.hang_timeout,
        openai_port=args.openai_port,
        triton_flags=tuple(args.triton_flag),
        verbose=args.log_level == "debug",
    )

    def announce() -> None:
        print(
            f"ready: http://{address.http_target}:{address.http_port}/v2/models/ensemble/generate_stream "
            f"(gRPC {address.grpc_port}, metrics {address.metrics_port})",
            flush=True,
        )

    return Launcher(options, functools.partial(_engine_command, args), on_ready=announce).run()


def _check_drafter(args: argparse.Namespace) -> None:
    """Refuse what does not go with a drafter outside the engine, or with the engine that was given."""
    from trtllm_dspark.engine_dir import open_engine_dir

    choice = drafter_choice(args)
    if choice is None:
        return
    if choice.engine_dir is not None:
        open_engine_dir(choice.engine_dir)
    for flag, given in (
        ("--candidate_engine_dir", args.candidate_engine_dir is not None),
        ("--collect_dir", args.collect_dir is not None),
        ("--calibration online", args.calibration == "online"),
    ):
        if given:
            raise UsageError(f"{flag} is about the engine's own drafter; leave it or --drafter {choice.kind} out")


def _drafter_flags(args: argparse.Namespace) -> list[str]:
    choice = drafter_choice(args)
    if choice is None:
        return []
    model = [] if choice.engine_dir is None else [f"--draft_engine_dir={choice.engine_dir.resolve()}"]
    length = [] if choice.draft_len is None else [f"--draft_len={choice.draft_len}"]
    return [f"--drafter={choice.kind}", *model, *length]


def _engine_command(args: argparse.Namespace, socket: str, engine_dir: str) -> Sequence[str]:
    candidate = []
    if not engine_dir and args.candidate_engine_dir is not None:
        candidate = [
            f"--candidate_engine_dir={args.candidate_engine_dir}",
            f"--candidate_trial={json.dumps(trial_options(args))}",
        ]
    collect = []
    if args.collect_dir is not None:
        collect = [
            f"--{name}={getattr(args, name)}"
            for name in ("collect_dir", "collect_max_gb", "collect_share", "collect_prompts")
        ]
    return [
        sys.executable,
        "-m",
        "trtllm_dspark.engine_process",
        f"--engine_dir={engine_dir or args.engine_dir}",
        *candidate,
        *collect,
        f"--socket={socket}",
        f"--speculation={args.speculation}",
        f"--acceptance={args.acceptance}",
        *_drafter_flags(args),
        f"--num_threads={args.num_threads}",
        *([] if args.kernel_library is None else [f"--kernel_library={args.kernel_library.resolve()}"]),
        f"--max_queue_size={args.max_queue_size}",
        f"--max_prompt_bytes={args.max_prompt_bytes}",
        f"--model_name={args.model_name}",
        f"--calibration={args.calibration}",
        f"--load_monitor={args.load_monitor}",
        f"--load_device={args.load_device}",
        f"--parent_pid={os.getpid()}",
        f"--log_level={args.log_level}",
    ]
