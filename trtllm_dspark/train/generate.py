"""Let the target answer prompts, and write prompts of its own: the only data a drafter needs."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import ConfigError, RequestError, UsageError
from trtllm_dspark.runtime import Request, SamplingParams, Tokenizer
from trtllm_dspark.runtime.request import check_request
from trtllm_dspark.train.answer import Answerer, Stop
from trtllm_dspark.train.features import FeatureCache
from trtllm_dspark.train.responses import Response, read_responses

logger = logging.getLogger(__name__)

SELF_MADE = "self_made"
TURNS_FILE = "self_made_turns.jsonl"
"""Turns the target wrote, beside the responses: a generation that goes on need not write them again."""
FLAGS_FILE = "generation.json"
"""What decides the responses beside it: a generation that goes on must not mix two kinds."""
Told = Callable[[Response], None]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user's message and the label it is counted under; `line` of the prompts file, from 1."""

    text: str
    domain: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How responses are drawn.

    Attributes:
        temperatures: drawn for each response with the probability of the same place in `temperature_shares`.
        temperature_shares: positive, any scale.
        responses_per_prompt: responses drawn for each prompt.
        max_response_len: tokens of a response at most.
        num_self_made: user's turns the target writes itself, at temperature 1.
        num_continued: user's turns that begin as one of the prompts, drawn from all domains alike, and that the target
            ends, at temperature 1.
        max_turn_len: tokens that the target writes of such turns; those it does not end are dropped.
        batch_size: requests in flight.
        seed: decides every draw.

    Raises:
        ConfigError: a value is out of range.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    temperature_shares: tuple[float, ...] = (0.4, 0.2, 0.4)
    responses_per_prompt: int = 1
    max_response_len: int = 128
    num_self_made: int = 0
    num_continued: int = 0
    max_turn_len: int = 64
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.temperatures) != len(self.temperature_shares) or not self.temperatures:
            raise ConfigError("temperatures and their shares must be as many; give one share a temperature")
        for name in ("num_self_made", "num_continued", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        if min(self.temperatures) < 0 or min(self.temperature_shares) <= 0:
            raise ConfigError("temperatures must be at least 0 and their shares above 0")
        for name in ("responses_per_prompt", "max_response_len", "max_turn_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


def generate(
    answerer: Answerer,
    turns: Sequence[UserTurn],
    config: GenerationConfig,
    path: Path,
    *,
    source: str = "",
    features: FeatureCache | None = None,
    told: Told = lambda response: None,
    stop: Stop = lambda: False,
) -> None:
    """Append responses to `path`; those it holds already are not drawn again.

    A response's draws depend on the seed and its index alone, so an interrupted generation goes on where it was. Those
    too short to train on are written as well: answered again, they might round to longer ones.

    Args:
        answerer: idle.
        turns: user's turns; order decides the index.
        config: how responses are drawn.
        path: responses file.
        source: names the target.
        features: keeps what the answerer captures on the way.
        told: called with each response after it is written.
        stop: asked after every round; true ends the generation.

    Raises:
        RequestError: a prompt does not fit the target's sequences, or there is no tokenizer or chat template.
        ConfigError: an earlier generation that stands there had another target, prompts or `config`.
        UsageError: a file of an earlier generation is damaged.
    """
    tokenizer = answerer.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise RequestError("generating responses needs a tokenizer with a chat template; give --responses_file instead")
    _check_same(path.with_name(FLAGS_FILE), source, answerer.limits.max_seq_len, turns, config)
    vocab = answerer.limits.vocab_size
    done = {response.index for response in read_responses(path, vocab, unfinished=True)} if path.exists() else set()
    _drop_cut_line(path)
    rng = np.random.default_rng(config.seed)
    own = _own_turns(answerer, tokenizer, turns, config, path, stop)
    everyone = _spread([*turns, *own]) * config.responses_per_prompt
    shares = np.asarray(config.temperature_shares) / sum(config.temperature_shares)
    temperatures = rng.choice(config.temperatures, len(everyone), p=shares)
    # After a stop some turns may be missing, and indices would be other ones.
    requests = [] if stop() else _requests(answerer, tokenizer, everyone, temperatures, config, done)
    with path.open("a", encoding="utf-8") as stream:
        for answer in answerer.answers(requests, config.batch_size, stop=stop, keep_features=features is not None):
            index, prompt = answer.index, answer.request.prompt_token_ids
            ids = (*map(int, prompt), *answer.token_ids)
            response = Response(everyone[index].domain, float(temperatures[index]), len(prompt), ids, index)
            if features is not None and answer.captured is not None and response.num_anchors > 0:
                # Before the response: whoever finds it finds its features.
                features.put(response, answer.captured)
            stream.write(response.to_json() + "\n")
            stream.flush()
            told(response)


def _requests(
    answerer: Answerer,
    tokenizer: Tokenizer,
    turns: Sequence[UserTurn],
    temperatures: NDArray[np.float64],
    config: GenerationConfig,
    done: set[int],
) -> list[Request]:
    requests, too_long = [], []
    for index, (turn, temperature) in enumerate(zip(turns, temperatures, strict=True)):
        if index in done:
            continue
        params = SamplingParams(
            temperature=float(temperature), seed=_seed(config.seed, index, 0), max_tokens=config.max_response_len
        )
        request = Request(str(index), tokenizer.encode_chat([{"role": "user", "content": turn.text}]), params)
        try:
            check_request(request, answerer.limits)
        except RequestError as error:
            if error.code != "prompt_too_long":
                raise RequestError(f"prompt on line {turn.line}: {error}", code=error.code) from error
            too_long.append(turn.line)
            continue
        requests.append(request)
    if too_long:
        logger.warning(
            "%d prompts are longer than the %d tokens of a sequence and are left out (the first is on line %d); "
            "--max_seq_len takes them",
            len(too_long),
            answerer.limits.max_seq_len,
            too_long[0],
        )
    return requests


def _own_turns(
    answerer: Answerer,
    tokenizer: Tokenizer,
    turns: Sequence[UserTurn],
    config: GenerationConfig,
    path: Path,
    stop: Stop,
) -> list[UserTurn]:
    """Let the target write user's turns from the template's beginning of one, or from the beginning of a prompt.

    Turns kept from before are taken over.
    """
    begun = [UserTurn("", SELF_MADE)] * config.num_self_made + _beginnings(turns, config)
    if not begun:
        return []
    mark = "\u2063turn\u2063"
    before = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)[0]
    if not tokenizer.encode(before, add_special_tokens=False):
        raise RequestError(
            "the chat template puts nothing before a user's turn to start from; leave out --num_self_made and "
            "--num_continued"
        )
    kept = path.with_name(TURNS_FILE)
    texts = _kept_turns(kept)
    requests, too_long = [], 0
    for index, turn in enumerate(begun):
        if index in texts:
            continue
        params = SamplingParams(temperature=1.0, seed=_seed(config.seed, index, 1), max_tokens=config.max_turn_len)
        request = Request(str(index), tokenizer.encode(before + turn.text, add_special_tokens=False), params)
        if len(request.prompt_token_ids) < answerer.limits.max_seq_len:
            requests.append(request)
        else:
            too_long += 1
    if too_long:
        logger.warning(
            "%d turns begin with more than the %d tokens of a sequence and are left out; --max_seq_len takes them",
            too_long,
            answerer.limits.max_seq_len,
        )
    with kept.open("a", encoding="utf-8") as stream:
        for answer in answerer.answers(requests, config.batch_size, stop=stop, keep_features=False):
            ids, index = answer.token_ids, answer.index
            ended = ids[-1] in tokenizer.eos_token_ids
            prompt = list(answer.request.prompt_token_ids)
            # Decoded with what is before it: alone, some tokenizers drop its leading space.
            whole, head = tokenizer.decode([*prompt, *ids[:-1]]), tokenizer.decode(prompt)
            texts[index] = (begun[index].text + whole[len(head) :]).strip() if ended else ""
            stream.write(json.dumps({"index": index, "text": texts[index]}) + "\n")
            stream.flush()
    return [UserTurn(texts[index], turn.domain, turn.line) for index, turn in enumerate(begun) if texts.get(index)]


def _beginnings(turns: Sequence[UserTurn], config: GenerationConfig) -> list[UserTurn]:
    """Return the first fifth to three fifths of the words of prompts, the domains by turns."""
    domains: dict[str, list[UserTurn]] = {}
    for turn in turns:
        domains.setdefault(turn.domain, []).append(turn)
    names = sorted(domains)
    if config.num_continued and not names:
        raise ConfigError("--num_continued begins as prompts do; give --prompts_file")
    begun = []
    for number in range(config.num_continued):
        rng = np.random.default_rng([config.seed, number, 2])
        mine = domains[names[number % len(names)]]
        turn = mine[rng.integers(len(mine))]
        words = re.findall(r"\s*\S+", turn.text)
        text = "".join(words[: max(1, round(len(words) * rng.uniform(0.2, 0.6)))])
        begun.append(UserTurn(text, turn.domain, turn.line))
    return begun


def _kept_turns(path: Path) -> dict[int, str]:
    """Return index and text of each turn in the file; a turn that the target did not end is empty."""
    if not path.exists():
        return {}
    _drop_cut_line(path)
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return {int(row["index"]): str(row["text"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error}); remove it, its turns are written again") from error


def _check_same(path: Path, source: str, max_seq_len: int, turns: Sequence[UserTurn], config: GenerationConfig) -> None:
    """Compare with the generation that stands there, or write down what this one is."""
    texts = json.dumps([(turn.domain, turn.text) for turn in turns])
    facts: dict[str, object] = json.loads(json.dumps(asdict(config)))
    del facts["batch_size"]  # changes no draw
    digest = hashlib.sha256(texts.encode()).hexdigest()
    facts |= {"prompts": digest, "target": source, "max_seq_len": max_seq_len}
    if not path.exists():
        path.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        return
    try:
        before = dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error}); start again without --resume") from error
    # What an older version did not write had its default, or could not be another.
    older = {**facts, **asdict(GenerationConfig())}
    changed = sorted(name for name in facts if before.get(name, older[name]) != facts[name])
    if changed:
        raise ConfigError(
            f"the responses in {path.parent} were drawn with other {' and '.join(changed)}; resume with the same, or "
            "leave out --resume to begin anew"
        )


def _spread(turns: Sequence[UserTurn]) -> list[UserTurn]:
    """Mix the domains evenly, so that a generation cut short has seen all of them in proportion."""
    groups: dict[str, list[UserTurn]] = {}
    for turn in turns:
        groups.setdefault(turn.domain, []).append(turn)
    placed = [
        ((place + 0.5) / len(group), number, turn)
        for number, group in enumerate(groups.values())
        for place, turn in enumerate(group)
    ]
    return [turn for _, _, turn in sorted(placed, key=lambda entry: entry[:2])]


def _seed(seed: int, index: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, index, stream]).generate_state(1, np.uint64)[0])


def _drop_cut_line(path: Path) -> None:
    """Remove what a killed writer left after the last whole line."""
    if not path.exists():
        return
    with path.open("rb+") as stream:
        content = stream.read()
        stream.truncate(content.rfind(b"\n") + 1)
