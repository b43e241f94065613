"""Tensors of one Triton request -> fields of the engine's requests, one a batch row. No Triton import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import RequestError, shown
from trtllm_dspark.serving.contract import KNOWN_PARAMETER_PREFIXES, KNOWN_PARAMETERS, Input, ModelSpec, Use

Tensor = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which optional outputs the client asked for."""

    perf_metrics: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    log_probs: bool = False


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One Triton request.

    Attributes:
        rows: fields for the engine process, one map a batch row.
        wanted: optional outputs.
        stream: one response a round instead of one in all.
        stop: end the request with this request's id instead of generating.
    """

    rows: tuple[dict[str, Any], ...]
    wanted: Wanted
    stream: bool
    stop: bool


def parse_tensors(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Any],
    *,
    timeout_us: int = 0,
    exclude_input: bool = True,
) -> ModelRequest:
    """Translate the tensors of one request.

    Args:
        spec: the model's declaration.
        tensors: present inputs by name, batch dimension first.
        parameters: request parameters.
        timeout_us: Triton's own request timeout, 0 = none.
        exclude_input: whether the prompt is left out of the output when the request does not say.

    Raises:
        RequestError: an input is missing, refused, malformed or contradicts another; the message names it.
    """
    _check_parameters(parameters)
    for declared in spec.inputs:
        if declared.required and declared.name not in tensors:
            # Triton compares the number of inputs with the number required, not their names.
            raise RequestError(f"{declared.name} is missing; give it", code="missing_field")
    num_rows = len(next(iter(tensors.values())))
    stream = _flag(tensors, spec.stream_input)
    if stream and not spec.decoupled:
        raise RequestError(
            f"{spec.stream_input} is set on a unary model; use the model without the _unary suffix",
            code="stream_not_supported",
        )
    wanted = Wanted(
        perf_metrics=_flag(tensors, "return_perf_metrics"),
        num_input_tokens=_flag(tensors, "return_num_input_tokens"),
        num_output_tokens=_flag(tensors, "return_num_output_tokens"),
        log_probs=_flag(tensors, "return_log_probs"),
    )
    common: dict[str, Any] = {
        "stream": stream,
        "echo": not _flag(tensors, "exclude_input_in_output", default=exclude_input),
        "return_tokens": spec.token_level,
        "return_stats": wanted.perf_metrics,
    }
    limits = _limits(parameters, timeout_us)
    rows = tuple({**common, **_with_limits(_row(spec, tensors, row), limits)} for row in range(num_rows))
    return ModelRequest(rows=rows, wanted=wanted, stream=stream, stop=_flag(tensors, "stop"))


def _row(spec: ModelSpec, tensors: Mapping[str, Tensor], row: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    source: dict[str, str] = {}
    for declared in spec.inputs:
        tensor = tensors.get(declared.name)
        if tensor is None:
            continue
        if len(tensor) <= row:
            raise RequestError(f"{declared.name} has fewer rows than the other inputs", code="invalid_shape")
        values = np.asarray(tensor[row])
        if declared.use is Use.FIELD:
            value = _value(declared, values)
            if declared.field in source and fields[declared.field] != value:
                raise RequestError(
                    f"{source[declared.field]} and {declared.name} mean the same and differ; give one of them",
                    code="conflicting_fields",
                )
            fields[declared.field], source[declared.field] = value, declared.name
        elif declared.use is Use.REFUSED:
            _check_refused(declared, values)
        elif declared.use is Use.NEUTRAL:
            _check_neutral(declared, values)
    if spec.token_level:
        _token_fields(tensors, row, fields)
    _end_id(fields)
    return fields


def _value(declared: Input, values: Tensor) -> Any:
    flat = values.reshape(-1)
    if declared.dtype == "STRING":
        texts = [_text(declared.name, item) for item in flat]
        return texts if declared.dims == (-1,) else _single(declared, texts)
    if declared.dims == (-1,):
        return [int(item) for item in flat]
    item = _single(declared, list(flat))
    if declared.dtype == "BOOL":
        return bool(item)
    # Through the shortest decimal, so that the client's 0.7 is 0.7 here and not its float32 neighbour.
    return float(str(item)) if declared.dtype == "FP32" else int(item)


def _single(declared: Input, values: list[Any]) -> Any:
    if len(values) != 1:
        raise RequestError(f"{declared.name} has {len(values)} values and takes one a row", code="invalid_shape")
    return values[0]


def _text(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8; encode it as UTF-8", code="invalid_utf8") from error


def _check_refused(declared: Input, values: Tensor) -> None:
    flat = values.reshape(-1)
    if declared.dtype == "STRING" and all(item in (b"", "") for item in flat):
        return
    if flat.size:
        raise RequestError(f"{declared.name} is not supported: {declared.reason}", code="unsupported_feature")


def _check_neutral(declared: Input, values: Tensor) -> None:
    for item in values.reshape(-1):
        if float(item) not in declared.neutral:
            allowed = " or ".join(f"{value:g}" for value in declared.neutral)
            if declared.dtype == "BOOL":
                allowed = "false"
            raise RequestError(f"{declared.name} must be {allowed}: {declared.reason}", code="unsupported_feature")


def _token_fields(tensors: Mapping[str, Tensor], row: int, fields: dict[str, Any]) -> None:
    token_ids = fields.get("prompt_token_ids")
    if token_ids is None:
        raise RequestError("input_ids is missing; give it", code="missing_field")
    length = int(np.asarray(tensors["input_lengths"][row]).reshape(-1)[0])
    if not 1 <= length <= len(token_ids):
        raise RequestError(
            f"input_lengths is {length} and input_ids has {len(token_ids)} tokens; give 1..{len(token_ids)}",
            code="out_of_range",
        )
    fields["prompt_token_ids"] = token_ids[:length]
    if "stop_words_list" in tensors:
        fields["stop_sequences"] = _word_list(np.asarray(tensors["stop_words_list"][row]))


def _word_list(values: Tensor) -> list[list[int]]:
    """Read upstream's word list: row 0 flat token ids, row 1 cumulative end offsets padded with -1."""
    if values.ndim != 2 or values.shape[0] != 2:
        raise RequestError("stop_words_list must have shape [2, n] a row", code="invalid_shape")
    ids, offsets = values
    words: list[list[int]] = []
    start = 0
    for end in (int(offset) for offset in offsets):
        if end == -1 or end == 0:
            continue
        if not start < end <= len(ids):
            raise RequestError("stop_words_list has offsets that do not ascend within its ids", code="out_of_range")
        words.append([int(item) for item in ids[start:end]])
        start = end
    return words


def _end_id(fields: dict[str, Any]) -> None:
    """`end_id` replaces the model's own end-of-sequence tokens; -1 means none."""
    end_id = fields.pop("end_id", None)
    if end_id is None:
        return
    fields["ignore_eos"] = True
    if end_id != -1:
        fields["stop_token_ids"] = [end_id]


def _limits(parameters: Mapping[str, Any], timeout_us: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    timeout = parameters.get("timeout") or timeout_us
    if timeout:
        if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
            raise RequestError("timeout must be a positive number of microseconds", code="out_of_range")
        fields["timeout_ms"] = max(1, math.ceil(timeout / 1000))
    if parameters.get("priority"):
        fields["priority"] = parameters["priority"]
    return fields


def _with_limits(fields: dict[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Add what request parameters say to a row; an input that says something else is a contradiction."""
    names = {"timeout_ms": "timeout (microseconds)", "priority": "priority"}
    for field, value in limits.items():
        if fields.setdefault(field, value) != value:
            raise RequestError(
                f"the input {field} and the request parameter {names[field]} differ; give one of them",
                code="conflicting_fields",
            )
    return fields


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    for name in parameters:
        if name not in KNOWN_PARAMETERS and not name.startswith(KNOWN_PARAMETER_PREFIXES):
            raise RequestError(
                f"{shown(name)} is neither an input of this model nor a known parameter; check its spelling",
                code="unknown_parameter",
            )


def _flag(tensors: Mapping[str, Tensor], name: str, *, default: bool = False) -> bool:
    tensor = tensors.get(name)
    if tensor is None:
        return default
    values = {bool(item) for item in np.asarray(tensor).reshape(-1)}
    if len(values) != 1:
        raise RequestError(f"{name} must be the same in all rows of a request", code="invalid_shape")
    return values.pop()
