"""Streaming and unary gRPC with tritonclient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from helpers import toy_pair as toy
from helpers.grpc_client import GrpcStream, inputs, text
from helpers.toy_tokenizer import encode
from helpers.triton_server import Server
from tritonclient.utils import InferenceServerException


@pytest.fixture
def stream(server: Server) -> Iterator[GrpcStream]:
    opened = GrpcStream(server.grpc_url)
    yield opened
    opened.close()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_grpc_stream_one_response_per_round_final_flag_on_the_last(
    server: Server, stream: GrpcStream, toy_pair: toy.ToyPair, model: str
) -> None:
    stream.send(model, {"text_input": "a", "max_tokens": 60, "stream": True, "beam_width": 1, "temperature": 0.0})
    results = list(stream.until_final())
    assert len(results) == 1 + len(toy_pair.rounds(encode("a")[-1], 60, toy_pair.block_size))
    assert "".join(map(text, results)) == server.generate_text("a", 60)
    assert results[-1].as_numpy("finish_reason")[0] == b"length"


def test_grpc_stream_perf_metrics_in_every_response(stream: GrpcStream) -> None:
    names = (
        "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns "
        "first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens "
        "total_draft_tokens"
    ).split()
    stream.send("ensemble", {"text_input": "a", "max_tokens": 30, "stream": True, "return_perf_metrics": True})
    for result in stream.until_final():
        assert all(result.as_numpy(name) is not None for name in names)


def test_grpc_stream_interleaves_many_requests_each_equal_to_itself_alone(server: Server, stream: GrpcStream) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEF"
    for letter in letters:
        fields = {"text_input": letter, "max_tokens": 50, "stream": True}
        stream.send("ensemble", fields, request_id=f"request {letter}")
    texts = dict.fromkeys((f"request {letter}" for letter in letters), "")
    open_requests = set(texts)
    while open_requests:
        result, final = stream.receive()
        texts[result.get_response().id] += text(result)
        if final:
            open_requests.discard(result.get_response().id)
    assert texts == {f"request {letter}": server.generate_text(letter, 50) for letter in letters}


def test_grpc_stream_batch_of_three_rows_is_told_apart_by_batch_index(server: Server, stream: GrpcStream) -> None:
    fields = {"text_input": ("a", "k", "Z"), "max_tokens": (20, 30, 40), "stream": True}
    stream.send("ensemble", fields, rows=3)
    texts = ["", "", ""]
    finals = 0
    while finals < 1:
        result, final = stream.receive()
        texts[int(result.as_numpy("batch_index")[0, 0])] += text(result)
        finals += final
    assert texts == [server.generate_text("a", 20), server.generate_text("k", 30), server.generate_text("Z", 40)]


def test_grpc_unary_twin_batch_of_rows(server: Server) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        fields = {"text_input": ("a", "k"), "max_tokens": (20, 30)}
        result = client.infer("ensemble_unary", inputs(2, **fields))
        texts = [item.decode() for item in result.as_numpy("text_output")]
        assert texts == [server.generate_text("a", 20), server.generate_text("k", 30)]
        ids = {"input_ids": [5, 70], "input_lengths": 2, "request_output_len": (3, 5)}
        result = client.infer("tensorrt_llm_unary", inputs(2, **ids))
        assert result.as_numpy("output_ids").shape == (2, 1, 5)
        assert list(result.as_numpy("sequence_length").reshape(-1)) == [3, 5]
        assert list(result.as_numpy("output_ids")[0, 0, 3:]) == [-1, -1]


def test_http_infer_unary_twin(server: Server) -> None:
    client = httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    try:
        tensors = []
        for name, kind, array in (
            ("text_input", "BYTES", np.array([[b"a"]], dtype=object)),
            ("max_tokens", "INT32", np.array([[25]], dtype=np.int32)),
        ):
            tensor = httpclient.InferInput(name, [1, 1], kind)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        result = client.infer("ensemble_unary", tensors)
        assert result.as_numpy("text_output")[0].decode() == server.generate_text("a", 25)
    finally:
        client.close()


def test_grpc_stream_flag_on_unary_twin_is_refused(server: Server) -> None:
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="stream_not_supported"),
    ):
        client.infer("ensemble_unary", inputs(text_input="a", max_tokens=5, stream=True))


def test_grpc_error_statuses_tell_client_faults_from_unavailability(server: Server) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.infer("ensemble_unary", inputs(text_input="a", max_tokens=-1))
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException) as late:
            client.infer("ensemble_unary", inputs(text_input="a", max_tokens=480, timeout_ms=1))
        assert late.value.status() == "StatusCode.UNAVAILABLE"
        assert "[deadline_exceeded]" in str(late.value)


def test_grpc_model_control_needs_the_launchers_key(server: Server) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException):
        client.unload_model("ensemble")
    assert server.post("/v2/repository/models/ensemble/unload", b"")[0] == 403
    assert server.generate_text("a", 1) == "b"
