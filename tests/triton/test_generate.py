"""HTTP generate and generate_stream against the toy pair, whose every token and acceptance is known by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import toy_pair as toy
from helpers.toy_tokenizer import encode
from helpers.triton_server import Server

from trtllm_dspark.runtime import Request, SamplingParams, Session

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
MULTI_BYTE = "bcdefghé ijklmnop€qrstuvwxyz😀AB"


def continuation(pair: toy.ToyPair, prompt: str, count: int) -> list[int]:
    return pair.continuation(encode(prompt)[-1], count)


@pytest.mark.parametrize("model", [*TEXT_MODELS, *(f"{name}_unary" for name in TEXT_MODELS)])
def test_generate_greedy_equals_loop_text(server: Server, model: str) -> None:
    assert server.generate_text("a", len(MULTI_BYTE.encode()), model) == MULTI_BYTE


def test_generate_greedy_equals_in_process_session(server: Server, toy_engine_dir: Path) -> None:
    prompts = ["a", "xyz", "0", "hello € ", "A!", "Z" * 100]
    session = Session.open(toy_engine_dir, num_threads=1, speculation="off")
    assert session.tokenizer is not None
    for index, prompt in enumerate(prompts):
        ids = session.tokenizer.encode(prompt)
        session.add(Request(str(index), ids, SamplingParams(max_tokens=60)))
    texts = dict.fromkeys(map(str, range(len(prompts))), "")
    while session.has_unfinished():
        for output in session.step():
            texts[output.request_id] += output.text_delta
    session.close()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.generate_text(prompt, 60), prompts))
    assert answers == list(texts.values())


def test_generate_perf_metrics_equal_hand_computed_acceptance(server: Server, toy_pair: toy.ToyPair) -> None:
    rounds = toy_pair.rounds(encode("a")[-1], 80, toy_pair.block_size)
    status, answer = server.generate(text_input="a", max_tokens=80, return_perf_metrics=True)
    verified, accepted = toy.per_position(rounds, toy_pair.block_size)
    assert status == 200
    assert answer["accepted_len"] == pytest.approx(toy.accepted_len(rounds), rel=1e-6)
    assert answer["num_rounds"] == len(rounds)
    assert answer["verified_per_position"] == verified
    assert answer["accepted_per_position"] == accepted
    assert answer["total_draft_tokens"] == sum(verified)
    assert answer["total_accepted_draft_tokens"] == sum(accepted)
    assert answer["acceptance_rate"] == pytest.approx(sum(accepted) / sum(verified), rel=1e-6)
    times = [answer[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 1_600_000_000_000_000_000


def test_generate_stream_one_event_per_round_with_all_its_tokens(server: Server, toy_pair: toy.ToyPair) -> None:
    rounds = toy_pair.rounds(encode("a")[-1], 80, toy_pair.block_size)
    events = list(
        server.events(
            text_input="a", max_tokens=80, stream=True, return_num_output_tokens=True, return_num_input_tokens=True
        )
    )
    # The first token comes from the prefill.
    assert [event["num_output_tokens"] for event in events] == [1, *(entry.accepted + 1 for entry in rounds)]
    assert ["finish_reason" in event for event in events] == [False] * len(rounds) + [True]
    assert events[-1]["finish_reason"] == "length"
    assert events[-1]["num_input_tokens"] == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_generate_stream_with_curl(server: Server) -> None:
    body = json.dumps({"text_input": "a", "max_tokens": 40, "stream": True})
    url = f"http://127.0.0.1:{server.http_port}/v2/models/ensemble/generate_stream"
    result = subprocess.run(["curl", "-sN", url, "-d", body], capture_output=True, timeout=60, check=True)
    events = [json.loads(line[6:]) for line in result.stdout.decode().splitlines() if line]
    assert "".join(event["text_output"] for event in events) == server.generate_text("a", 40)
    assert events[-1]["finish_reason"] == "length"


def test_generate_stream_multi_byte_characters_are_whole_and_concatenate(server: Server) -> None:
    unary = server.generate_text("a", 200)
    events = [event["text_output"] for event in server.events(text_input="a", max_tokens=200, stream=True)]
    assert "".join(events) == unary
    assert all("\ufffd" not in text for text in events)
    assert {"é", "€", "😀"} <= set(unary)


@pytest.mark.parametrize("stop", ["p€q", "€", "é i", "y", "z😀A"])
def test_generate_stream_stop_word_ends_before_it_across_rounds(server: Server, stop: str) -> None:
    whole = server.generate_text("a", 200)
    events = list(server.events(text_input="a", max_tokens=200, stream=True, stop_words=[stop, "never seen"]))
    assert "".join(event["text_output"] for event in events) == whole[: whole.index(stop)]
    assert events[-1]["finish_reason"] == "stop"
    assert events[-1]["stop_reason"] == stop
    assert server.generate_text("a", 200, stop_words=[stop]) == whole[: whole.index(stop)]


def test_generate_end_token_first_gives_empty_text(server: Server) -> None:
    status, answer = server.generate(text_input="a.", max_tokens=10)
    assert status == 200
    assert answer["text_output"] == ""
    assert answer["finish_reason"] == "stop"


def test_generate_end_id_replaces_the_models_own(server: Server) -> None:
    newline = encode("\n")[0]
    assert server.generate_text("a!", 20, end_id=encode(".")[0]) == "?"
    assert server.generate_text("a!", 4, end_id=-1).startswith("?.")
    status, answer = server.generate(text_input="a!", max_tokens=20, end_id=newline)
    assert status == 200
    assert answer["finish_reason"] == "stop"
    assert answer["text_output"] == "?.\t"


def test_generate_min_tokens_holds_back_the_end(server: Server, toy_pair: toy.ToyPair) -> None:
    for name in ("min_tokens", "min_length"):
        fields = {"text_input": "a.", "max_tokens": 12, name: 5, "return_num_output_tokens": True}
        status, answer = server.generate(**fields)
        assert status == 200
        assert answer["num_output_tokens"] >= 5


def test_generate_echo_only_on_request(server: Server) -> None:
    assert server.generate_text("ab", 3) == "cde"
    assert server.generate_text("ab", 3, exclude_input_in_output=False) == "abcde"
    assert server.generate_text("ab", 3, "ensemble_unary", exclude_input_in_output=True) == "cde"


def test_generate_seed_repeats_and_unset_seed_varies(server: Server) -> None:
    # A temperature at which the toy pair's distribution is nearly uniform.
    fields = {"temperature": 50.0, "end_id": -1}
    same = {server.generate_text("a", 24, seed=7, **fields) for _ in range(3)}
    alias = server.generate_text("a", 24, random_seed=7, **fields)
    assert same == {alias}
    assert len({server.generate_text("a", 24, **fields) for _ in range(4)}) > 1


def test_generate_num_draft_tokens_bounds_the_block(server: Server) -> None:
    plain = server.generate(text_input="a", max_tokens=40, num_draft_tokens=0, return_perf_metrics=True)[1]
    two = server.generate(text_input="a", max_tokens=40, num_draft_tokens=2, return_perf_metrics=True)[1]
    assert plain["total_draft_tokens"] == 0
    assert plain["text_output"] == two["text_output"] == server.generate_text("a", 40)
    assert sum(two["verified_per_position"][2:]) == 0 < two["verified_per_position"][1]


def test_generate_log_probs_one_a_token(server: Server) -> None:
    answer = server.generate(text_input="a", max_tokens=9, return_log_probs=True)[1]
    assert len(answer["output_log_probs"]) == 9
    assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]), abs=1e-5)


def test_generate_chat_template_is_applied_on_request(server: Server) -> None:
    # The toy template is the message itself.
    assert server.generate_text("ab", 3, apply_chat_template=True) == "cde"


def test_token_model_ids_equal_the_loop(server: Server, toy_pair: toy.ToyPair) -> None:
    ids = encode("xa")
    fields = {"input_ids": [*ids, 0, 0], "input_lengths": len(ids), "request_output_len": 21}
    expected = continuation(toy_pair, "xa", 21)
    for model in ("tensorrt_llm", "tensorrt_llm_unary"):
        status, answer = server.generate(model, **fields)
        assert status == 200
        assert answer["output_ids"] == expected
        assert answer["sequence_length"] == 21
    assert (
        server.generate("tensorrt_llm_unary", **fields, exclude_input_in_output=False)[1]["output_ids"]
        == ids + expected
    )
    events = list(server.events("tensorrt_llm", **fields, streaming=True))
    streamed = [event["output_ids"] for event in events]
    assert sum((item if isinstance(item, list) else [item] for item in streamed), []) == expected


def test_engine_model_describes_the_engine(server: Server) -> None:
    status, answer = server.generate("dspark_engine")
    assert status == 200
    assert '"speculation": "fixed' in answer["engine"]
