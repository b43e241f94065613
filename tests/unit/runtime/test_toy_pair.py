"""The whole runtime on a pair whose every token, acceptance and probability is worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_engine import collect_outputs, text, token_ids
from helpers.toy_pair import LOOP_TEXT, ToyPair, ToyRound, accepted_len, per_position
from helpers.toy_tokenizer import EOS, encode

from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import Engine
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.runtime import Request, SamplingParams, Session, Tokenizer

LOOP = LOOP_TEXT * 3


@pytest.fixture(scope="module")
def engine(toy_engine_dir: Path) -> Iterator[Engine]:
    engine = load_engine(toy_engine_dir, num_threads=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(toy_engine_dir: Path) -> Tokenizer:
    return Tokenizer.open(open_engine_dir(toy_engine_dir))


@pytest.mark.parametrize(
    ("speculation", "draft_len", "threshold"),
    [(f"fixed:{length}", length, None) for length in range(1, 8)]
    + [(f"threshold:{value}", 7, value) for value in (0.1, 0.15, 0.5, 0.8, 0.95)],
)
@pytest.mark.parametrize("max_tokens", [2, 3, 50])
def test_step_acceptance_equals_the_count_by_hand(
    engine: Engine,
    tokenizer: Tokenizer,
    toy_pair: ToyPair,
    speculation: str,
    draft_len: int,
    threshold: float | None,
    max_tokens: int,
) -> None:
    session = Session(engine, tokenizer, speculation=speculation)
    session.add(Request("a", encode("abc"), SamplingParams(max_tokens=max_tokens)))
    outputs = collect_outputs(session)["a"]
    assert token_ids(outputs) == toy_pair.continuation(encode("c")[0], max_tokens)
    rounds = toy_pair.rounds(encode("c")[0], max_tokens, draft_len, threshold)
    acceptance = outputs[-1].stats.acceptance
    assert acceptance.rounds == len(rounds)
    assert acceptance.accepted_len == accepted_len(rounds)
    verified, accepted = per_position(rounds, draft_len)
    assert acceptance.verified_per_position[:draft_len] == verified
    assert acceptance.accepted_per_position[:draft_len] == accepted
    assert acceptance.drafted == draft_len * drafting_rounds(rounds, max_tokens)


def drafting_rounds(rounds: list[ToyRound], max_tokens: int) -> int:
    """Return how many rounds draft: all but one that may emit its bonus token only."""
    emitted, count = 1, 0
    for entry in rounds:
        count += max_tokens - emitted > 1
        emitted += entry.accepted + 1
    return count


@pytest.mark.parametrize("speculation", ["off", "fixed", "threshold:0.5", "early_stop", "stale_topk"])
def test_step_text_of_many_byte_characters_streams_whole(
    engine: Engine, tokenizer: Tokenizer, speculation: str
) -> None:
    session = Session(engine, tokenizer, speculation=speculation)
    session.add(Request("a", encode("a"), SamplingParams(max_tokens=2 * len(LOOP_TEXT.encode()))))
    outputs = collect_outputs(session)["a"]
    assert text(outputs) == LOOP[1 : 2 * len(LOOP_TEXT) + 1]
    assert all("\ufffd" not in output.text_delta for output in outputs)
    assert text(outputs) == tokenizer.decode(token_ids(outputs))


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_step_output_cut_inside_a_character_drops_its_bytes(
    engine: Engine, tokenizer: Tokenizer, max_tokens: int
) -> None:
    session = Session(engine, tokenizer, speculation="fixed")
    session.add(Request("a", encode("z"), SamplingParams(max_tokens=max_tokens)))
    outputs = collect_outputs(session)["a"]
    expected = "😀ABCDEFGHIJK".encode()[:max_tokens].decode("utf-8", errors="ignore")
    assert text(outputs) == expected
    assert outputs[-1].stats.num_output_tokens == max_tokens


@pytest.mark.parametrize("speculation", ["off", "fixed", "fixed:2", "threshold:0.5"])
@pytest.mark.parametrize("stop", ["d", "defg", "é i", "€qr", "z😀A", "RSTUVWXYZ0123456789a", "9abc"])
def test_step_stop_string_anywhere_in_a_block_cuts_before_it(
    engine: Engine, tokenizer: Tokenizer, speculation: str, stop: str
) -> None:
    session = Session(engine, tokenizer, speculation=speculation)
    session.add(Request("a", encode("abc"), SamplingParams(max_tokens=200, stop=[stop, "never seen"])))
    outputs = collect_outputs(session)["a"]
    assert text(outputs) == LOOP[3 : LOOP.index(stop, 3)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    end = len(LOOP[3 : LOOP.index(stop, 3) + len(stop)].encode())
    assert len(token_ids(outputs)) == end


def test_step_text_that_only_looks_like_a_stop_is_given_out(engine: Engine, tokenizer: Tokenizer) -> None:
    session = Session(engine, tokenizer, speculation="fixed")
    session.add(Request("a", encode("a"), SamplingParams(max_tokens=7, stop=["bcdX", "gh!"])))
    outputs = collect_outputs(session)["a"]
    assert text(outputs) == "bcdefgh"
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("speculation", ["off", "fixed", "threshold:0.1"])
def test_step_end_of_sequence_inside_a_block_leaves_no_text(
    engine: Engine, tokenizer: Tokenizer, speculation: str
) -> None:
    session = Session(engine, tokenizer, speculation=speculation)
    session.add(Request("a", encode("a!"), SamplingParams(max_tokens=50)))
    outputs = collect_outputs(session)["a"]
    assert text(outputs) == "?."
    assert token_ids(outputs) == [*encode("?."), EOS]
    assert outputs[-1].stop_reason == EOS
    assert outputs[-1].stats.acceptance.emitted == 2


def test_step_first_token_is_the_end_gives_empty_text(engine: Engine, tokenizer: Tokenizer) -> None:
    session = Session(engine, tokenizer, speculation="fixed")
    session.add(Request("a", encode("."), SamplingParams(max_tokens=50)))
    (output,) = collect_outputs(session)["a"]
    assert (output.new_token_ids, output.text_delta, output.finish_reason) == ((EOS,), "", "stop")


def test_step_cancelled_request_gives_out_held_text(engine: Engine, tokenizer: Tokenizer) -> None:
    session = Session(engine, tokenizer)
    session.add(Request("a", encode("a"), SamplingParams(max_tokens=50, stop=["bcdX"])))
    session.step()
    session.step()
    session.cancel("a")
    assert session.step()[0].text_delta == "bc"


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_step_same_seed_gives_same_text_and_no_seed_varies(
    engine: Engine, tokenizer: Tokenizer, acceptance: str
) -> None:
    def generate(seed: int | None) -> list[int]:
        session = Session(engine, tokenizer, speculation="fixed", acceptance=acceptance)  # type: ignore[arg-type]
        session.add(Request("a", encode("abc"), SamplingParams(temperature=8.0, seed=seed, max_tokens=40)))
        return token_ids(collect_outputs(session)["a"])

    assert generate(11) == generate(11)
    assert generate(11) != generate(12)
    assert generate(None) != generate(None)


@pytest.mark.parametrize("speculation", ["off", "fixed:3", "fixed", "threshold:0.5", "stale_topk:5", "early_stop"])
def test_step_coupled_seed_gives_same_tokens_whatever_shares_the_batch(
    engine: Engine, tokenizer: Tokenizer, speculation: str
) -> None:
    params = SamplingParams(temperature=8.0, top_k=40, seed=5, max_tokens=40, ignore_eos=True)
    alone = Session(engine, tokenizer, speculation="off", acceptance="coupled")
    alone.add(Request("a", encode("abc"), params))
    expected = token_ids(collect_outputs(alone)["a"])
    session = Session(engine, tokenizer, speculation=speculation, acceptance="coupled")
    for index in range(6):
        others = SamplingParams(temperature=index % 3, top_p=0.9, max_tokens=7 + 5 * index)
        session.add(Request(f"other{index}", encode("ABC" * (index + 1)), others))
        if index == 2:
            session.add(Request("a", encode("abc"), params))
    assert token_ids(collect_outputs(session)["a"]) == expected


def test_step_two_requests_with_one_seed_give_the_same_text(engine: Engine, tokenizer: Tokenizer) -> None:
    session = Session(engine, tokenizer, speculation="fixed", acceptance="coupled")
    for name in "ab":
        session.add(Request(name, encode("abc"), SamplingParams(temperature=8.0, seed=3, max_tokens=30)))
    outputs = collect_outputs(session)
    assert token_ids(outputs["a"]) == token_ids(outputs["b"])


def test_step_logprobs_are_the_target_own(engine: Engine, tokenizer: Tokenizer, toy_pair: ToyPair) -> None:
    session = Session(engine, tokenizer, speculation="fixed")
    session.add(Request("a", encode("abc"), SamplingParams(temperature=4.0, seed=1, max_tokens=30, logprobs=True)))
    outputs = collect_outputs(session)["a"]
    tokens = [encode("c")[0], *token_ids(outputs)]
    logprobs = [value for output in outputs for value in output.logprobs]
    assert len(logprobs) == len(tokens) - 1
    for last, token, logprob in zip(tokens, tokens[1:], logprobs, strict=False):
        expected = np.log(toy_pair.probabilities(last, 1.0)[0][token])
        assert logprob == pytest.approx(expected, abs=1e-3)


def test_step_greedy_mixed_batch_equals_alone_in_every_mode(engine: Engine, tokenizer: Tokenizer) -> None:
    prompts = ["abc", "XYZ0", "mnop", "é", "12345678", "!", "lm", "q" * 100]
    for speculation in ("off", "fixed", "threshold:0.5", "early_stop", "stale_topk", "stale_topk:4"):
        session = Session(engine, tokenizer, speculation=speculation)
        for index, prompt in enumerate(prompts):
            session.add(Request(str(index), encode(prompt), SamplingParams(max_tokens=20 + index)))
        outputs = collect_outputs(session)
        for index, prompt in enumerate(prompts):
            alone = Session(engine, tokenizer, speculation="off")
            alone.add(Request("x", encode(prompt), SamplingParams(max_tokens=20 + index)))
            assert token_ids(outputs[str(index)]) == token_ids(collect_outputs(alone)["x"]), (speculation, prompt)
