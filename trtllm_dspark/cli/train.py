"""`trtllm-dspark train`: make a drafter for a target from the target alone."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trtllm_dspark.cli._prompts import Prompt, read_prompts
from trtllm_dspark.cli._tables import print_table
from trtllm_dspark.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from trtllm_dspark.train.generate import GenerationConfig
    from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
    from trtllm_dspark.train.responses import Response
    from trtllm_dspark.train.trainer import StepReport

logger = logging.getLogger(__name__)

RESPONSES_FILE = "responses.jsonl"
HEADS = ("vanilla", "gated", "rnn")
_ONE_LAYER = ("num_layers", "markov_head", "markov_rank", "mask_token_id", "confidence_alpha", "include_shared")
UNUSED: dict[str, tuple[str, ...]] = {
    "dspark": (),
    "dflash": ("markov_head", "markov_rank"),
    "eagle3": _ONE_LAYER,
    "mtp": (*_ONE_LAYER, "block_size"),
}
"""Kinds of drafters, and the flags that mean nothing to each."""
_INSTEAD = {"temperature": "temperatures", "max_tokens": "max_response_len", "seed": "seed"}
"""Fields of a request, and the flags that say the same of all answers."""
Stop = Callable[[], bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    paths = parser.add_argument_group("input and output")
    paths.add_argument(
        "--target_checkpoint",
        required=True,
        metavar="PATH",
        help="target: a GGUF file, a Hugging Face directory, or package:NAME",
    )
    paths.add_argument("--output_dir", type=Path, required=True, help="drafter, log, training state and caches")
    paths.add_argument(
        "--prompts_file",
        type=Path,
        action="append",
        default=[],
        metavar="F.jsonl",
        help="prompts the target answers, one object with 'prompt' a line; repeatable",
    )
    paths.add_argument(
        "--responses_file",
        type=Path,
        action="append",
        default=[],
        metavar="F.jsonl",
        help="sequences that the target generated before, in place of prompts; repeatable (docs/training.md)",
    )
    paths.add_argument(
        "--from_traffic",
        type=Path,
        metavar="DIR",
        help="--collect_dir of a server of this target: train on what it recorded, alone or beside the others",
    )
    paths.add_argument(
        "--validation_file",
        type=Path,
        metavar="F.jsonl",
        help="greedy sequences of the target that are not trained on: accepted length before and after",
    )
    paths.add_argument("--init_from", metavar="DIR", help="drafter to go on from; its shape replaces the flags below")
    paths.add_argument(
        "--init_share",
        type=float,
        default=0.0,
        metavar="S",
        help="share of --init_from's weights in the weights that are written",
    )
    paths.add_argument("--resume", action="store_true", help="go on with the run that --output_dir holds")
    paths.add_argument(
        "--include_shared", action="store_true", help="store copies of the target's embedding and head as DeepSpec does"
    )
    _add_length(parser)
    _add_drafter(parser)
    _add_generation(parser)
    _add_loss(parser)


def _add_length(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("length and resources")
    group.add_argument("--steps", type=int, metavar="N", help="steps of the whole run, earlier sittings included")
    group.add_argument(
        "--minutes", type=float, metavar="M", help="stop after M minutes of training; alone, the schedule ends then"
    )
    group.add_argument("--num_threads", type=int, default=2, metavar="N", help="CPU threads")
    group.add_argument("--save_every", type=int, default=20, metavar="N", help="steps between saved states")
    group.add_argument(
        "--feature_cache_gib", type=float, default=8.0, metavar="X", help="disk for captured features at most"
    )
    group.add_argument(
        "--max_seq_len", type=int, default=512, metavar="N", help="tokens of a sequence; longer: left out"
    )
    group.add_argument(
        "--weight_dtype",
        default="float32",
        choices=("float32", "bfloat16", "int8"),
        help="the target's weights while training; bfloat16: of answers only, fast where the CPU multiplies it "
        "(AMX, AVX512-BF16); int8: slower, exactly what an int8 engine serves. Products of a step are bfloat16 where "
        "the CPU has AVX512-BF16, whatever this says; resume on the same kind of CPU",
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="decides every draw")


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--drafter",
        default="dspark",
        choices=tuple(UNUSED),
        help="dflash: without a sequential head; eagle3: one layer that drafts token after token from its own hidden "
        "state; mtp: one layer that drafts one token",
    )
    group.add_argument("--num_layers", type=int, metavar="N", help="layers of the parallel block; 2 when left out")
    group.add_argument("--block_size", type=int, metavar="G", help="gamma, draft tokens of a block; 7 when left out")
    group.add_argument("--markov_head", choices=HEADS, help="kind of sequential head; vanilla when left out")
    group.add_argument("--markov_rank", type=int, metavar="R", help="its rank; 64 when left out")
    group.add_argument(
        "--target_layer_ids",
        metavar="I,J,...",
        help="layers whose outputs are the features; default: five, spread; eagle3: three; mtp: the last one",
    )
    group.add_argument("--mask_token_id", type=int, metavar="ID", help="default: a special token that nothing uses")
    group.add_argument(
        "--draft_vocab_size", type=int, metavar="N", help="train on the N most frequent tokens only; others get zeros"
    )
    group.add_argument("--draft_vocab_counts", type=Path, metavar="F.json", help="token counts that choose them")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--temperatures", default="0:2,0.7:1,1:2", metavar="T:SHARE,...", help="temperatures of the responses"
    )
    group.add_argument("--responses_per_prompt", type=int, default=1, metavar="N", help="responses to each prompt")
    group.add_argument(
        "--num_self_made", type=int, default=0, metavar="N", help="user's turns that the target writes itself"
    )
    group.add_argument(
        "--num_continued",
        type=int,
        default=0,
        metavar="N",
        help="user's turns that begin as one of the prompts and that the target ends",
    )
    group.add_argument("--max_response_len", type=int, default=128, metavar="N", help="tokens of a response")
    group.add_argument(
        "--responses_only", action="store_true", help="write responses.jsonl and stop; a later run reads it"
    )
    group.add_argument("--batch_size", type=int, default=64, metavar="B", help="responses generated at once")


def _add_loss(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--num_sequences", type=int, default=24, metavar="N", help="sequences of a step")
    group.add_argument("--anchors_per_sequence", type=int, default=32, metavar="N", help="blocks of each")
    group.add_argument("--lr_scale", type=float, default=1.0, metavar="X", help="factor of all learning rates")
    group.add_argument("--warmup_steps", type=int, default=10, metavar="N", help="steps of the rise")
    group.add_argument("--decay_share", type=float, default=0.6, metavar="X", help="part of the run that falls to 0")
    group.add_argument("--ce_alpha", type=float, default=0.1, metavar="X", help="share of the cross-entropy")
    group.add_argument("--l1_alpha", type=float, default=0.9, metavar="X", help="share of the distance")
    group.add_argument("--confidence_alpha", type=float, metavar="X", help="share of the confidence; 1 when left out")
    group.add_argument(
        "--position_decay", type=float, default=4.0, metavar="X", help="position k weighs exp(-(k - 1) / X)"
    )
    group.add_argument(
        "--sample_positions", action="store_true", help="draw positions with their weights instead: fewer products"
    )
    group.add_argument(
        "--target_temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of the target's distribution that is learned; below 1 favours greedy acceptance",
    )
    group.add_argument("--top_k", type=int, default=128, metavar="K", help="the target's probabilities kept a token")


def run(args: argparse.Namespace) -> int:
    """Generate what is missing, train, write the drafter."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs PyTorch; install it with pip install '.[train]' in a checkout")
    from trtllm_dspark.train.pipeline import Preparation, Run

    if args.prompts_file and args.responses_file:
        raise ConfigError("give --prompts_file or --responses_file, not both: what to answer, or what was answered")
    if not (args.prompts_file or args.responses_file or args.from_traffic or args.num_self_made):
        raise ConfigError("give something to train on: --prompts_file, --responses_file or --from_traffic")
    if args.responses_only and not (args.prompts_file or args.num_self_made):
        raise ConfigError("--responses_only has nothing to answer; give --prompts_file or --num_self_made")
    if args.responses_only and (args.responses_file or args.from_traffic):
        raise ConfigError("--responses_only writes answers to prompts; leave out --responses_file and --from_traffic")
    if args.num_continued and not args.prompts_file:
        raise ConfigError("--num_continued begins as prompts do; give --prompts_file")
    turns = [prompt for path in args.prompts_file for prompt in _read_prompts(path)]
    generation, config = _generation_config(args), _train_config(args)
    with _stop_on_signals() as stop:
        preparation = Preparation(config)
        responses = _read(args.responses_file, preparation)
        validation = [] if args.responses_only else _validation(args, preparation)
        answering = bool(turns or args.num_self_made)
        if answering:
            responses += _generate(args, preparation, turns, generation, stop)
        if args.responses_only:
            tokens = sum(len(response.token_ids) - response.response_start for response in responses)
            facts = [("responses", str(args.output_dir / RESPONSES_FILE)), ("number", str(len(responses)))]
            print_table([*facts, ("tokens", str(tokens))])
        if answering and stop():
            # Whoever waits for all of them must not go on with some, and a state saved now would hold to those.
            logger.warning("stopped before all were answered; --resume goes on")
            return 1
        if args.responses_only:
            return 0
        run = Run(preparation, responses, traffic=args.from_traffic)
        try:
            return _train(run, validation, stop)
        finally:
            run.close()


def _read_prompts(path: Path) -> list[Prompt]:
    """Read prompts that set nothing about their answers: the run's flags decide those.

    Raises:
        UsageError: the file is malformed, or a line has a field of a request.
    """
    prompts = read_prompts(path)
    for prompt in prompts:
        for name in prompt.sampling:
            flag = _INSTEAD.get(name)
            instead = "take it out" if flag is None else f"take it out and give --{flag}"
            raise UsageError(
                f"--prompts_file {path} line {prompt.index + 1} sets '{name}', which train does not follow; {instead}"
            )
    return prompts


def _validation(args: argparse.Namespace, preparation: Preparation) -> list[Response]:
    """Read --validation_file, before anything takes long."""
    from trtllm_dspark.train.responses import fitting

    if args.validation_file is None:
        return []
    found = _read([args.validation_file], preparation)
    return fitting(found, args.max_seq_len, f"sequences of --validation_file {args.validation_file}")


def _train(run: Run, validation: Sequence[Response], stop: Stop) -> int:
    before = run.validate(validation)
    run.restart_clock()
    with _bar() as bar:
        told = _progress(bar, run)
        directory = run.train(stop=stop, told=told)
    after = run.validate(validation)
    rows = [("drafter", str(directory)), ("steps", str(run.trainer.steps_done))]
    for domain in after:
        rows.append((f"accepted length {domain}", _lengths(before[domain], after[domain])))
    print_table(rows)
    return 0


def _lengths(*walks: tuple[int, int]) -> str:
    if not all(rounds for _, rounds in walks):
        return "none: no sequence holds a whole block"
    return "{:.2f} before, {:.2f} after".format(*(emitted / rounds for emitted, rounds in walks))


def _generate(
    args: argparse.Namespace, preparation: Preparation, prompts: Sequence[Any], config: GenerationConfig, stop: Stop
) -> list[Response]:
    from trtllm_dspark.train.generate import FLAGS_FILE, TURNS_FILE, UserTurn, generate
    from trtllm_dspark.train.pipeline import GENERATED_DIR, STATE_DIR
    from trtllm_dspark.train.responses import read_responses
    from trtllm_dspark.train.saved_state import STATE_FILE

    turns = [UserTurn(prompt.text, prompt.domain or "", prompt.index + 1) for prompt in prompts]
    path = args.output_dir / RESPONSES_FILE
    if not args.resume:
        for name in (RESPONSES_FILE, TURNS_FILE, FLAGS_FILE, f"{STATE_DIR}/{STATE_FILE}"):
            (args.output_dir / name).unlink(missing_ok=True)
        shutil.rmtree(args.output_dir / GENERATED_DIR, ignore_errors=True)
    answerer = preparation.answerer(config.batch_size)
    total = (len(turns) + config.num_self_made + config.num_continued) * config.responses_per_prompt
    try:
        with _bar() as bar:
            task = bar.add_task("generating", total=total, facts="")
            done = 0

            def told(response: Response) -> None:
                nonlocal done
                done += len(response.token_ids) - response.response_start
                bar.update(task, advance=1, facts=f"{done / max(bar.tasks[task].elapsed or 0, 1e-9):.0f} tokens/s")

            source = preparation.answered_by
            features = preparation.generated_features()
            generate(answerer, turns, config, path, source=source, features=features, told=told, stop=stop)
    finally:
        answerer.close()
    responses = read_responses(path, preparation.target.config.vocab_size)
    if not responses and not stop():
        raise UsageError(
            "nothing was answered: no prompt fits --max_seq_len, and no turn that the target wrote came to an end; "
            "raise it, or give other prompts"
        )
    # Whatever order they ended in: a resumed run must see the same sequence.
    return sorted((one for one in responses if one.num_anchors > 0), key=lambda response: response.index)


def _read(paths: Sequence[Path], preparation: Preparation) -> list[Response]:
    from trtllm_dspark.train.responses import read_responses

    vocab = preparation.target.config.vocab_size
    return [response for path in paths for response in read_responses(path, vocab)]


def _progress(bar: Progress, run: Run) -> Callable[[StepReport, int | None], None]:
    task = bar.add_task("training", total=None, completed=run.trainer.steps_done, facts="")
    interactive = bar.console.is_terminal

    def told(report: StepReport, num_steps: int | None) -> None:
        speed = report.num_blocks * run.drafter.block_size / max(report.seconds, 1e-9)
        facts = f"loss {report.loss:.3f}  tau {report.tau:.2f}  {speed:.0f} tokens/s"
        bar.update(task, total=num_steps, completed=report.step, facts=facts)
        if not interactive and report.step % 10 == 0:
            logger.info("step %d of %s: %s", report.step, num_steps or "?", facts)

    return told


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


@contextmanager
def _stop_on_signals() -> Iterator[Stop]:
    """Finish the step at hand on SIGINT or SIGTERM; a second SIGINT interrupts at once."""
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        logger.warning("stopping after this step; what there is then is written")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train_config(args: argparse.Namespace) -> TrainConfig:
    from trtllm_dspark.train.loss import Alphas
    from trtllm_dspark.train.pipeline import TrainConfig

    for name in UNUSED[args.drafter]:
        if getattr(args, name) not in (None, False):
            raise ConfigError(f"--{name} means nothing to --drafter {args.drafter}; leave it out")
    names = (
        "target_checkpoint output_dir steps minutes init_from init_share mask_token_id "
        "draft_vocab_size draft_vocab_counts num_sequences anchors_per_sequence position_decay sample_positions "
        "target_temperature lr_scale warmup_steps decay_share top_k weight_dtype feature_cache_gib max_seq_len "
        "num_threads save_every seed resume include_shared"
    ).split()
    shape = {name: getattr(args, name) for name in ("num_layers", "block_size", "markov_head", "markov_rank")}
    given = {name: value for name, value in shape.items() if value is not None}
    if args.drafter == "dflash":
        given["markov_head"] = "none"
    layer_ids = () if args.target_layer_ids is None else _integers("target_layer_ids", args.target_layer_ids)
    values = {name: getattr(args, name) for name in names}
    if args.responses_only and values["steps"] is None:
        values["steps"] = 1
    return TrainConfig(
        **values,
        **given,
        kind=args.drafter if args.drafter in ("eagle3", "mtp") else "block",
        target_layer_ids=layer_ids,
        alphas=Alphas(args.ce_alpha, args.l1_alpha, 1.0 if args.confidence_alpha is None else args.confidence_alpha),
    )


def _generation_config(args: argparse.Namespace) -> GenerationConfig:
    from trtllm_dspark.train.generate import GenerationConfig

    try:
        pairs = [part.split(":") for part in args.temperatures.split(",")]
        temperatures, shares = zip(*((float(value), float(share)) for value, share in pairs), strict=True)
    except ValueError as error:
        raise ConfigError(f"--temperatures must look like 0:2,0.7:1,1:2, got {args.temperatures!r}") from error
    return GenerationConfig(
        temperatures=temperatures,
        temperature_shares=shares,
        responses_per_prompt=args.responses_per_prompt,
        max_response_len=args.max_response_len,
        num_self_made=args.num_self_made,
        num_continued=args.num_continued,
        batch_size=args.batch_size,
        seed=args.seed,
    )


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--{name} must look like 1,8,15, got {text!r}") from error
