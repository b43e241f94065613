"""`trtllm-dspark run`: generate text from prompts."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_dspark.cli._drafter import add_drafter_arguments, make_drafter
from trtllm_dspark.cli._generation import (
    SPECULATION_HELP,
    add_engine_arguments,
    add_sampling_arguments,
    check_batch_size,
    check_sampling,
    make_requests,
)
from trtllm_dspark.cli._prompts import Prompt, read_prompts
from trtllm_dspark.runtime import RequestOutput, RequestStats, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.speculation import DEFAULT_SPECULATION, SpeculationConfig

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_engine_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one user message")
    source.add_argument("--prompts_file", type=Path, metavar="F.jsonl", help="one object with 'prompt' a line")
    parser.add_argument("--speculation", default=DEFAULT_SPECULATION, metavar="MODE", help=SPECULATION_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object a request instead of the text")
    add_drafter_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; return 4 when a request ended with an error of its own."""
    check_sampling(args)
    speculation = SpeculationConfig.parse(args.speculation)
    prompts = [Prompt(0, args.prompt)] if args.prompts_file is None else read_prompts(args.prompts_file)
    session = Session.open(
        args.engine_dir,
        num_threads=args.num_threads,
        speculation=speculation,
        acceptance=args.acceptance,
        drafter=make_drafter(args),
        kernel_library=args.kernel_library,
    )
    try:
        check_batch_size(args.batch_size, session)
        requests = make_requests(prompts, args, session)
        printer = _Printer(prompts, as_json=args.json)
        for output in run_closed_loop(session, requests, batch_size=args.batch_size):
            printer.take(output)
    finally:
        session.close()
    return 4 if printer.failed else 0


class _Printer:
    """Print results in the order of the prompts: the first unfinished one streams, later ones wait their turn.

    Args:
        prompts: all prompts, in order.
        as_json: one object a request instead of its text.
    """

    def __init__(self, prompts: Sequence[Prompt], *, as_json: bool) -> None:
        self.failed = False
        self._as_json = as_json
        self._results = {str(prompt.index): _Result(prompt) for prompt in prompts}
        self._order = list(self._results.values())
        self._current = 0

    def take(self, output: RequestOutput) -> None:
        """Add one output and print what is due."""
        result = self._results[output.request_id]
        result.take(output)
        if output.finished:
            _log_end(result, output)
            self.failed |= output.finish_reason == "error"
        while self._current < len(self._order):
            result = self._order[self._current]
            self._print(result)
            if not result.finished:
                return
            self._current += 1

    def _print(self, result: _Result) -> None:
        if self._as_json:
            if result.finished:
                print(json.dumps(result.as_json(), ensure_ascii=False), flush=True)
            return
        if len(self._order) > 1 and not result.printed:
            label = "" if result.prompt.domain is None else f" ({result.prompt.domain})"
            print(f"--- prompt {result.prompt.index}{label} ---")
        result.printed = True
        sys.stdout.write("".join(result.unprinted) + ("\n" if result.finished else ""))
        sys.stdout.flush()
        result.unprinted.clear()


class _Result:
    """What one prompt has given so far."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.unprinted: list[str] = []
        self.printed = False
        self.finish_reason: str | None = None
        self.stats: RequestStats | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, output: RequestOutput) -> None:
        self.token_ids += output.new_token_ids
        self.text.append(output.text_delta)
        self.unprinted.append(output.text_delta)
        self.finish_reason = output.finish_reason
        self.stats = output.stats

    def as_json(self) -> dict[str, Any]:
        return {
            "index": self.prompt.index,
            "text": "".join(self.text),
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **({} if self.stats is None else self.stats.as_json()),
        }


def _log_end(result: _Result, output: RequestOutput) -> None:
    if output.error is not None:
        logger.error("prompt %d: %s", result.prompt.index, output.error)
        return
    accepted_len = output.stats.acceptance.accepted_len
    logger.info(
        "prompt %d: %d tokens in %.2f s, %.1f tokens/s, accepted length %s",
        result.prompt.index,
        output.stats.num_output_tokens,
        output.stats.elapsed_s,
        output.stats.tokens_per_s or 0.0,
        "none" if accepted_len is None else f"{accepted_len:.2f}",
    )
