"""Command line of the engine process; `trtllm-dspark serve` starts it, a person may for another front."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_dspark.engine_process.requests import RequestLimits
from trtllm_dspark.engine_process.runner import ProcessOptions, serve_session
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.errors import DsparkError, EngineError, UsageError
from trtllm_dspark.runtime.session import Session

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
    parser.add_argument("--max_queue_size", type=int, default=256)
    parser.add_argument("--max_prompt_bytes", type=int, default=0, help="0 = 64 bytes for each token of max_seq_len")
    parser.add_argument("--model_name", default="", help="name clients see; default: the engine directory's name")
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
    session = Session.open(
        args.engine_dir, num_threads=args.num_threads, speculation=args.speculation, acceptance=args.acceptance
    )
    try:
        tokenizer = session.tokenizer
        if tokenizer is None:
            raise EngineError(f"{args.engine_dir} has no tokenizer; build it again from a checkpoint that has one")
        engine = session.limits
        limits = RequestLimits(
            max_seq_len=engine.max_seq_len,
            vocab_size=engine.vocab_size,
            max_draft_len=engine.max_draft_len,
            max_prompt_bytes=args.max_prompt_bytes or BYTES_PER_TOKEN * engine.max_seq_len,
        )
        options = ProcessOptions(
            socket_path=args.socket,
            num_slots=engine.max_batch_size,
            max_queue_size=args.max_queue_size,
            parent_pid=args.parent_pid,
        )
        info = {
            "name": args.model_name or args.engine_dir.resolve().name,
            "speculation": str(session.speculation),
            "max_batch_size": engine.max_batch_size,
            "max_seq_len": engine.max_seq_len,
            "max_draft_len": engine.max_draft_len,
            "vocab_size": engine.vocab_size,
            "has_chat_template": tokenizer.has_chat_template,
        }
        serve_session(session, make_session_request, tokenizer, limits, options, info)
    finally:
        session.close()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Native thread pools may outlive a normal exit; the session is closed and every answer is written.
    os._exit(code)
