"""The OpenAI-compatible front with the official client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from helpers.toy_tokenizer import encode
from helpers.triton_server import Server, wait_for

CHAT = [{"role": "user", "content": "a"}]  # the toy template is the messages' contents
TEXT = "bcdefghé ijklmnop€qrstuvwxyz😀AB"
LENGTH = len(TEXT.encode())


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.openai_port}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_models_lists_the_engine_and_retrieves_it(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "engine"
    assert client.models.retrieve(model.id).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_completion_greedy_text_usage_and_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="engine", prompt="a", max_tokens=LENGTH, temperature=0)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, LENGTH)


def test_completion_several_prompts_echo_and_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="engine", prompt=["a", "kl"], max_tokens=4, temperature=0, echo=True)
    assert [choice.text for choice in answer.choices] == ["abcde", "klmnop"]
    ids = client.completions.create(model="engine", prompt=encode("kl"), max_tokens=4, temperature=0)
    assert ids.choices[0].text == "mnop"


def test_completion_stream_concatenates_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="engine",
            prompt="a",
            max_tokens=LENGTH,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
    assert len(chunks) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == LENGTH
    assert chunks[-2].choices[0].finish_reason == "length"


def test_chat_completion_unary_and_stream_agree(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "engine", "messages": CHAT, "max_tokens": LENGTH, "temperature": 0}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_completion_end_token_and_stop_words_give_reason_stop(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "!"}]}]
    answer = client.chat.completions.create(model="engine", messages=messages, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("?.", "stop")
    stopped = client.chat.completions.create(
        model="engine", messages=CHAT, temperature=0, stop=["p€q", "zz"], max_completion_tokens=LENGTH
    )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (TEXT[: TEXT.index("p€q")], "stop")


def test_completion_seed_repeats(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "engine", "prompt": "a", "max_tokens": 20, "temperature": 50.0, "seed": 3}
    texts = {client.completions.create(**fields).choices[0].text for _ in range(2)}
    assert len(texts) == 1


def test_logprobs_in_both_shapes(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="engine", prompt="a", max_tokens=6, temperature=0, logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("bcdefg")
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs == pytest.approx([0.0] * 6, abs=1e-4)
    chat = client.chat.completions.create(model="engine", messages=CHAT, max_tokens=6, temperature=0, logprobs=True)
    assert chat.choices[0].logprobs is not None
    assert [entry.token for entry in chat.choices[0].logprobs.content or []] == list("bcdefg")


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"n": 2}, "unsupported_feature", "n"),
        ({"presence_penalty": 0.5}, "unsupported_feature", "presence_penalty"),
        ({"max_tokens": 0}, "out_of_range", None),
        ({"temperature": -1}, "out_of_range", None),
        ({"stop": [1]}, "invalid_type", None),
        ({"prompt": "a" * 3000}, "prompt_too_long", None),
        ({"prompt": []}, "invalid_type", "prompt"),
        ({"prompt": [-1]}, "token_id_out_of_range", None),
        ({"logprobs": 5}, "unsupported_feature", "logprobs"),
        ({"extra_body": {"colour": "red"}}, "unknown_parameter", "colour"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_bad_field_is_a_400_with_code(
    client: openai.OpenAI, changes: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    fields = {"model": "engine", "prompt": "a", "max_tokens": 4, "stream": stream, **changes}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b"[" * 200_000, 400),
        ("/v1/completions", b'{"model":"engine","prompt":"a","temperature":NaN}', 400),
        ("/v1/completions", b'{"model":"engine","prompt":"a","seed":%d}' % 2**70, 400),
        ("/v1/completions", b'{"model":"engine","prompt":"\\ud800"}', 400),
        ("/v1/completions", b'{"model":"engine","prompt":"a","top_p":1e-300}', 400),
        ("/v1/completions", b'{"model":"other","prompt":"a"}', 404),
        ("/v1/completions", b"x" * (9 * 1024 * 1024), 413),
        ("/v1/chat/completions", b'{"model":"engine","messages":[]}', 400),
        ("/v1/chat/completions", b'{"model":"engine","messages":[{"role":"user"}]}', 400),
        ("/v1/embeddings", b"{}", 404),
    ],
    ids=lambda value: str(value)[:40],
)
def test_raw_bad_body_is_an_error_in_openais_shape(server: Server, path: str, body: bytes, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.openai_port, timeout=20.0)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (BrokenPipeError, ConnectionResetError):
        assert status == 413  # the server stopped reading
        return
    finally:
        connection.close()
    assert response.status == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_frees_its_slot(server: Server, stream: bool) -> None:
    before = server.metric("dspark_requests_cancelled", reason="client")
    connection = http.client.HTTPConnection("127.0.0.1", server.openai_port, timeout=20.0)
    body = {"model": "engine", "prompt": "a", "max_tokens": 2000, "temperature": 0, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        response = connection.getresponse()
        response.readline()
        response.close()
    else:
        time.sleep(0.2)  # the gauges lag by more than such a request takes
    connection.close()
    wait_for(lambda: server.metric("dspark_requests_cancelled", reason="client") == before + 1)


def test_engine_killed_is_a_503_and_the_front_recovers(start_server: Callable[..., Server]) -> None:
    server = start_server()
    base = f"http://127.0.0.1:{server.openai_port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "engine", "prompt": "a", "temperature": 0}
        stream = client.completions.create(**fields, max_tokens=2000, stream=True)
        next(iter(stream))
        os.kill(server.children()["engine"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine process ended"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**fields, max_tokens=1)
        assert refused.value.status_code == 503
        assert refused.value.code == "engine_unavailable"
        server.wait_ready()
        wait_for(lambda: server.get("/health", port=server.openai_port)[0] == 200)
        assert client.completions.create(**fields, max_tokens=5).choices[0].text == "bcdef"
    os.kill(server.children()["front"], signal.SIGKILL)
    wait_for(lambda: "front" in server.children() and answers(server))


def answers(server: Server) -> bool:
    try:
        return server.get("/health", port=server.openai_port)[0] == 200
    except OSError:
        return False
