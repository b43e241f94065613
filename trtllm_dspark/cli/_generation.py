"""What `run` and `bench` share: flags of an engine and of sampling, requests from prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_dspark.cli._prompts import Prompt, encode_prompt
from trtllm_dspark.errors import ConfigError, RequestError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.request import check_request

SPECULATION_HELP = (
    "drafts verified a round: adaptive (what pays by confidence, acceptance and the cost table; plain decoding where "
    "nothing does), off, fixed[:G] (G of every request), threshold[:C] (while the running product of confidences is at "
    "least C), early_stop or stale_topk[:B] (by what a pass costs)"
)


def add_engine_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare --engine_dir, --num_threads, --kernel_library, --batch_size and --acceptance."""
    parser.add_argument("--engine_dir", type=Path, required=required, help="the --output_dir of a build")
    parser.add_argument("--num_threads", type=int, default=2, metavar="N", help="CPU threads of a pass")
    parser.add_argument(
        "--kernel_library",
        type=Path,
        metavar="F.so",
        help="TensorRT engines: libtrtllm_dspark_kernels.so of build_plugins, which keeps whole rounds on the GPU; "
        "libtrtllm_dspark_plugins.so where plans have plugins",
    )
    parser.add_argument("--batch_size", type=int, default=1, metavar="B", help="requests in flight at once")
    parser.add_argument(
        "--acceptance",
        default="rejection",
        choices=("rejection", "coupled"),
        help="how sampled drafts are accepted; coupled gives a seed the same text in any batch",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sampling flags; a prompts file may replace each for one prompt."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max_tokens", type=int, default=128, metavar="N", help="output tokens of a request at most")
    group.add_argument("--min_tokens", type=int, default=0, metavar="N", help="output tokens of a request at least")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token")
    group.add_argument("--top_k", type=int, default=0, metavar="K", help="sample among the K likeliest; 0 = all")
    group.add_argument("--top_p", type=float, default=1.0, metavar="P", help="sample among the likeliest up to P")
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="same seed, same text with --acceptance coupled (in rejection mode if no schedule goes by the clock); "
        "a new one each time when left out",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore_eos", action="store_true", help="go on past the model's end of sequence")
    group.add_argument("--raw", action="store_true", help="take prompts as they are, without the chat template")


def check_batch_size(batch_size: int, session: Session) -> None:
    """Refuse a batch that the engine cannot hold.

    Raises:
        ConfigError: out of range.
    """
    if not 1 <= batch_size <= session.limits.max_batch_size:
        raise ConfigError(
            f"--batch_size must be from 1 to the engine's {session.limits.max_batch_size}, got {batch_size}"
        )


def make_requests(prompts: Sequence[Prompt], args: argparse.Namespace, session: Session) -> list[Request]:
    """Encode and check all prompts, so that a bad one is known before the first token.

    Raises:
        RequestError: a prompt or its sampling parameters cannot be served; the message names the line.
    """
    requests = []
    for prompt in prompts:
        try:
            params = SamplingParams(**_sampling(args) | prompt.sampling)
            if session.tokenizer is None:
                raise RequestError("the engine has no tokenizer; build it again")
            ids = encode_prompt(prompt, session.tokenizer, raw=args.raw)
            request = Request(str(prompt.index), ids, params)
            check_request(request, session.limits)
        except RequestError as error:
            where = f"prompt on line {prompt.index + 1}: " if len(prompts) > 1 else ""
            raise RequestError(f"{where}{error}", code=error.code) from error
        requests.append(request)
    return requests


def make_measured_requests(
    prompts: Sequence[Prompt], args: argparse.Namespace, session: Session, *, file: int = 0
) -> list[Request]:
    """Do as `make_requests`, with a seed of its own for every line where --seed is given.

    Draws depend on the seed and the position alone: with one seed for all, every prompt of a measurement would meet the
    same luck, and so would the prompts that judge it.

    Args:
        prompts: lines of one file.
        args: the flags; a seed that a line sets stays.
        session: of the engine.
        file: number of the file among those of the command.

    Raises:
        RequestError: as `make_requests`.
    """
    requests = make_requests(prompts, args, session)
    if args.seed is None:
        return requests
    return [
        request
        if "seed" in prompt.sampling
        else replace(request, params=replace(request.params, seed=_mixed(args.seed, file, prompt.index)))
        for prompt, request in zip(prompts, requests, strict=True)
    ]


def _mixed(seed: int, file: int, line: int) -> int:
    return int(np.random.SeedSequence([seed, file, line]).generate_state(1, np.uint64)[0])


def check_sampling(args: argparse.Namespace) -> None:
    """Refuse bad sampling flags before anything is loaded.

    Raises:
        RequestError: a value is out of range.
    """
    SamplingParams(**_sampling(args))


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos")
    return {name: getattr(args, name) for name in names}
