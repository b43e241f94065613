"""Every declared tensor with a right value, a wrong dtype, a wrong shape and values out of range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from helpers.triton_server import Server
from tritonclient.utils import InferenceServerException

from trtllm_dspark.serving.contract import TEXT_INPUTS, TOKEN_INPUTS, Input, Use

NUMPY = {
    "STRING": np.object_, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "UINT8": np.uint8,
    "FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_,
}  # fmt: skip
# A value that means something, where 1 does not.
RIGHT: dict[str, Any] = {
    "text_input": b"a",
    "stop_words": b"zz",
    "input_ids": 70,
    "end_id": 5,
    "top_p": 0.5,
    "runtime_top_p": 0.5,
    "stop": False,
    "stream": False,
    "streaming": False,
    "min_tokens": 1,
    "timeout_ms": 60_000,
    "min_length": 1,
    "stop_words_list": [[5], [1]],
    "latency_class": b"batch",
}
# name -> values that must be refused, and the code.
WRONG: dict[str, tuple[str, list[Any]]] = {
    "max_tokens": ("out_of_range", [0, -1, -(2**31)]),
    "request_output_len": ("out_of_range", [0, -5]),
    "input_lengths": ("out_of_range", [0, -1, 9]),
    "input_ids": ("token_id_out_of_range", [-1, 256, 2**31 - 1]),
    "end_id": ("token_id_out_of_range", [256, -2]),
    "temperature": ("out_of_range", [-0.1, 1000.0]),
    "top_k": ("out_of_range", [-1]),
    "runtime_top_k": ("out_of_range", [-7]),
    "top_p": ("out_of_range", [-0.5, 1.5]),
    "runtime_top_p": ("out_of_range", [1.01]),
    "min_tokens": ("out_of_range", [-1, 100]),
    "min_length": ("out_of_range", [-1]),
    "priority": ("out_of_range", [0, 11]),
    "timeout_ms": ("out_of_range", [0, -1]),
    "num_draft_tokens": ("out_of_range", [-1, 8]),
    "latency_class": ("out_of_range", [b"fast", b""]),
    "beam_width": ("unsupported_feature", [0, 2, -1]),
    "num_return_sequences": ("unsupported_feature", [2]),
    "repetition_penalty": ("unsupported_feature", [1.1, 0.0]),
    "presence_penalty": ("unsupported_feature", [0.5]),
    "frequency_penalty": ("unsupported_feature", [-0.5]),
    "length_penalty": ("unsupported_feature", [2.0]),
    "len_penalty": ("unsupported_feature", [2.0]),
    "beam_search_diversity_rate": ("unsupported_feature", [0.5]),
    "return_context_logits": ("unsupported_feature", [True]),
    "return_generation_logits": ("unsupported_feature", [True]),
    "use_draft_logits": ("unsupported_feature", [True]),
    "bad_words": ("unsupported_feature", [b"x"]),
    "stop": ("missing_request_id", [True]),
    "stream": ("stream_not_supported", [True]),
    "streaming": ("stream_not_supported", [True]),
    "text_input": ("empty_prompt", [b""]),
    "stop_words": ("stop_word_too_long", [b"x" * 1025]),
}
NOT_FINITE = ("temperature", "top_p", "runtime_top_p")
CASES = [("ensemble_unary", declared) for declared in TEXT_INPUTS]
CASES += [("tensorrt_llm_unary", declared) for declared in TOKEN_INPUTS]
IDS = [f"{model}-{declared.name}" for model, declared in CASES]


@pytest.fixture(scope="module")
def client(shared_server: Server) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(shared_server.grpc_url) as opened:
        yield opened


def base(model: str) -> dict[str, np.ndarray[Any, Any]]:
    if model == "ensemble_unary":
        return {"text_input": np.array([[b"a"]], dtype=object), "max_tokens": np.array([[4]], dtype=np.int32)}
    return {name: np.array([[value]], dtype=np.int32) for name, value in TOKEN_BASE.items()}


TOKEN_BASE = {"input_ids": 70, "input_lengths": 1, "request_output_len": 4}


def tensor(name: str, array: np.ndarray[Any, Any], kind: str) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, list(array.shape), "BYTES" if kind == "STRING" else kind)
    made.set_data_from_numpy(array)
    return made


def value_array(declared: Input, value: Any) -> np.ndarray[Any, Any]:
    """Return one row of the declared rank: batch dimension, then every unknown dimension 1 (an explicit one as is)."""
    if isinstance(value, list):
        return np.array([value], dtype=NUMPY[declared.dtype])
    shape = [1, *(max(1, size) for size in declared.dims)]
    return np.full(shape, value, dtype=NUMPY[declared.dtype])


def infer(client: grpcclient.InferenceServerClient, model: str, name: str, array: Any, kind: str) -> Any:
    tensors = {key: (part, "STRING" if part.dtype == object else "INT32") for key, part in base(model).items()}
    tensors[name] = (array, kind)
    return client.infer(model, [tensor(key, part, part_kind) for key, (part, part_kind) in tensors.items()])


@pytest.mark.parametrize(("model", "declared"), CASES, ids=IDS)
def test_declared_input_right_value_works_or_is_refused_by_name(
    client: grpcclient.InferenceServerClient, model: str, declared: Input
) -> None:
    value = RIGHT.get(declared.name, declared.neutral[0] if declared.neutral else 1)
    array = value_array(declared, b"x" if declared.dtype == "STRING" and value == 1 else value)
    if declared.use is Use.REFUSED:
        with pytest.raises(InferenceServerException, match=rf"\[unsupported_feature\] {declared.name} "):
            infer(client, model, declared.name, array, declared.dtype)
    else:
        result = infer(client, model, declared.name, array, declared.dtype)
        assert result.as_numpy("finish_reason")[0] in (b"length", b"stop")


@pytest.mark.parametrize(("model", "declared"), CASES, ids=IDS)
def test_declared_input_wrong_dtype_or_shape_is_refused(
    client: grpcclient.InferenceServerClient, model: str, declared: Input
) -> None:
    wrong = "INT32" if declared.dtype != "INT32" else "FP32"
    shape = [1, *(max(1, size) for size in declared.dims)]
    with pytest.raises(InferenceServerException, match=declared.name):
        infer(client, model, declared.name, np.ones(shape, NUMPY[wrong]), wrong)
    value = RIGHT.get(declared.name, 1)
    filler = b"x" if declared.dtype == "STRING" else 0 if isinstance(value, list) else value
    with pytest.raises(InferenceServerException, match=declared.name):
        infer(client, model, declared.name, np.full([*shape, 3, 3], filler, NUMPY[declared.dtype]), declared.dtype)


@pytest.mark.parametrize(
    ("model", "declared", "value"),
    [(model, declared, value) for model, declared in CASES for value in WRONG.get(declared.name, ("", []))[1]],
    ids=lambda value: value.name if isinstance(value, Input) else str(value)[:20],
)
def test_declared_input_out_of_range_is_refused_with_code(
    client: grpcclient.InferenceServerClient, model: str, declared: Input, value: Any
) -> None:
    with pytest.raises(InferenceServerException, match=rf"\[{WRONG[declared.name][0]}\]") as refused:
        infer(client, model, declared.name, value_array(declared, value), declared.dtype)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_declared_float_not_finite_is_refused(
    client: grpcclient.InferenceServerClient, name: str, value: float
) -> None:
    model = "tensorrt_llm_unary" if name.startswith("runtime") else "ensemble_unary"
    with pytest.raises(InferenceServerException, match=r"\[not_finite\]"):
        infer(client, model, name, np.array([[value]], np.float32), "FP32")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_required_input_missing_is_named_although_triton_only_counts(shared_server: Server, model: str) -> None:
    fields: dict[str, Any] = {"text_input": "a", "temperature": 0.5}
    if model == "tensorrt_llm":
        fields = {"input_lengths": 1, "request_output_len": 3}
    missing = "max_tokens" if model == "ensemble" else "input_ids"
    status, answer = shared_server.generate(model, **fields)
    assert status == 400
    assert answer["error"] == f"[missing_field] {missing} is missing; give it"
