"""What clients get wrong or break on purpose: one refused request, a code, no leak, and the next request is right."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.triton_server import Server, error_code, wait_for

GENERATE = "/v2/models/ensemble/generate"


@pytest.fixture(autouse=True)
def _next_request_is_right(server: Server) -> Iterator[None]:
    yield
    assert server.generate_text("a", 6) == "bcdefg"


def fields(**changes: Any) -> dict[str, Any]:
    return {"text_input": "a", "max_tokens": 4, **changes}


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        (fields(max_tokens=0), "out_of_range"),
        (fields(max_tokens=2**31), "out_of_range"),  # Triton wraps it to a negative number
        (fields(text_input=""), "empty_prompt"),
        (fields(text_input="a" * 2048), "prompt_too_long"),
        (fields(text_input="a" * 140_000), "prompt_too_large"),
        (fields(text_input="a" * 10_000_000), "prompt_too_large"),
        (fields(temprature=0.5), "unknown_parameter"),
        (fields(parameters={"max_tokens_": 5}), "unknown_parameter"),
        (fields(stop_words=["x"] * 33), "too_many_stop_words"),
        (fields(stop_words=["x" * 2000]), "stop_word_too_long"),
        (fields(bad_words=["x"]), "unsupported_feature"),
        (fields(lora_task_id=3), "unsupported_feature"),
        (fields(guided_decoding_guide_type="json"), "unsupported_feature"),
        (fields(min_tokens=5), "out_of_range"),
        (fields(seed=1, random_seed=2), "conflicting_fields"),
        (fields(stop=True), "missing_request_id"),
        (fields(timeout=-5), "out_of_range"),
        (fields(priority=99), "out_of_range"),
        (fields(id="x" * 300), "out_of_range"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_generate_bad_field_is_refused_with_code(server: Server, request_fields: dict[str, Any], code: str) -> None:
    status, text = server.post(GENERATE, json.dumps(request_fields).encode())
    assert status == 400
    assert error_code(json.loads(text)) == code
    assert "Traceback" not in text
    assert "/" not in text.replace("</", "")


def test_generate_integer_beyond_32_bits_keeps_its_low_ones(server: Server) -> None:
    # Triton cuts it before a model sees it, which docs/serving.md says; gRPC cannot carry such a number.
    assert server.generate_text("a", 2**32 + 4) == "bcde"


def test_generate_nan_literal_is_refused(server: Server) -> None:
    status, text = server.post(GENERATE, b'{"text_input":"a","max_tokens":4,"temperature":NaN}')
    assert (status, error_code(json.loads(text))) == (400, "not_finite")


def test_generate_invalid_utf8_is_refused_and_nul_is_a_character(server: Server) -> None:
    status, text = server.post(GENERATE, b'{"text_input":"a\xff\xfe","max_tokens":4}')
    assert (status, error_code(json.loads(text))) == (400, "invalid_utf8")
    status, text = server.post(GENERATE, b'{"text_input":"\\u0000a","max_tokens":2}')
    # The toy tokenizer has no token for NUL and drops it; what counts is that the answer is a normal one.
    assert (status, json.loads(text)["text_output"]) == (200, "bc")


def test_generate_empty_word_lists_count_as_absent(server: Server) -> None:
    assert server.generate_text("a", 4, bad_words="", stop_words="") == "bcde"
    assert server.generate_text("a", 4, bad_words=[""], stop_words=[""]) == "bcde"


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"{", b'{"text_input":', b'{"text_input":"a","text_input":"b","max_tokens":1}',
     b'{"text_input":{"a":1},"max_tokens":1}', b'{"text_input":"a","max_tokens":"many"}',
     b'{"text_input":"a","max_tokens":1e999}', b'{"text_input":"\\ud800","max_tokens":1}',
     b"[" * 2000 + b"]" * 2000, b'{"a":' * 2000 + b"1" + b"}" * 2000],
)  # fmt: skip
def test_generate_malformed_json_is_an_error_without_a_path(server: Server, body: bytes) -> None:
    status, text = server.post(GENERATE, body)
    assert status >= 400
    assert "error" in json.loads(text)
    assert "Traceback" not in text
    assert ".py" not in text


def test_generate_random_bodies_leave_the_server_alive(server: Server) -> None:
    generator = random.Random(5)
    valid = json.dumps(fields(stop_words=["q"], stream=False)).encode()
    for index in range(1000):
        if index % 2:
            body = generator.randbytes(generator.randrange(200))
        else:
            broken = bytearray(valid)
            for _ in range(generator.randrange(1, 4)):
                broken[generator.randrange(len(broken))] = generator.randrange(256)
            body = bytes(broken)
        status = (
            server._request("POST", GENERATE, body, server.http_port, 60.0)[0] if index % 2 else post_raw(server, body)
        )
        assert status in (200, 400, 500, 501)


def post_raw(server: Server, body: bytes) -> int:
    """Post a body whose answer may echo bytes that are not UTF-8."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60.0)
    connection.request("POST", GENERATE, body)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_generate_duplicate_request_id_is_refused_while_the_first_runs(server: Server) -> None:
    first = server.events(text_input="a", max_tokens=500, stream=True, id="twice")
    next(first)
    status, answer = server.generate(text_input="a", max_tokens=4, id="twice")
    assert (status, error_code(answer)) == (400, "duplicate_request_id")
    assert len(list(first)) > 10
    assert server.generate(text_input="a", max_tokens=4, id="twice")[0] == 200


def test_generate_queue_full_is_refused_and_counted(server: Server) -> None:
    """The server has 4 slots and room for 64 waiting requests."""
    before = server.metric("dspark_requests_rejected", reason="queue_full")
    codes: list[str] = []

    def ask() -> None:
        status, text = server.post(GENERATE, json.dumps(fields(max_tokens=200)).encode(), timeout_s=240.0)
        codes.append("ok" if status == 200 else error_code(json.loads(text)))

    threads = [threading.Thread(target=ask) for _ in range(90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {"ok", "queue_full"}
    assert codes.count("ok") >= 68
    wait_for(
        lambda: server.metric("dspark_requests_rejected", reason="queue_full") == before + codes.count("queue_full")
    )
