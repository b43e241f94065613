"""Random ragged attention problems, a float64 answer, and running the cache and attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.kernels.backends import Backend
from helpers.kernels.numbers import decode, encode
from helpers.kernels.rounds import Problem, launch
from trtllm_dspark.plugins import ELEMENT_TYPES

Array = NDArray[Any]


@dataclass(frozen=True)
class AttentionShape:
    """What a generated problem looks like; `tokens` new tokens a request on top of `contexts` cached ones."""

    contexts: tuple[int, ...] = (0, 5, 130)
    tokens: tuple[int, ...] = (1, 3, 2)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 32
    pages_per_request: int = 8
    kv_split: int = 64
    causal: bool = True
    element_type: str = "float16"
    padding: int = 3
    seed: int = 0


@dataclass
class AttentionCase:
    """Arrays of one problem; cache positions that nothing wrote are NaN."""

    shape: AttentionShape
    query: Array
    new_keys: Array
    new_values: Array
    key_cache: Array
    value_cache: Array
    page_table: Array
    cu_tokens: Array
    token_request: Array
    token_position: Array
    keys: list[Array]  # float32 [Hkv, kv_len, D] of each request
    values: list[Array]


def make_attention(shape: AttentionShape) -> AttentionCase:
    """Generate a problem; pages of different requests lie interleaved and unused table entries are absurd."""
    random = np.random.default_rng(shape.seed)
    requests, total = len(shape.tokens), sum(shape.tokens)
    rows = total + shape.padding
    num_pages = requests * shape.pages_per_request + 1
    order = random.permutation(num_pages)[: requests * shape.pages_per_request]
    page_table = order.reshape(requests, shape.pages_per_request).astype(np.int32)
    cache_shape = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    nan = encode(np.array([np.nan], np.float32), shape.element_type)[0]
    caches = [np.full(cache_shape, nan) for _ in range(2)]
    query = encode(random.normal(0, 1, (rows, shape.num_heads, shape.head_dim)), shape.element_type)
    fresh = [
        encode(random.normal(0, 1, (rows, shape.num_kv_heads, shape.head_dim)), shape.element_type) for _ in range(2)
    ]
    token_request = np.full(rows, -1, np.int32)
    token_position = np.full(rows, -1, np.int32)
    cu_tokens = np.concatenate([[0], np.cumsum(shape.tokens)]).astype(np.int32)
    cached: list[list[Array]] = [[], []]
    for request, (context, count) in enumerate(zip(shape.contexts, shape.tokens, strict=True)):
        span = slice(cu_tokens[request], cu_tokens[request + 1])
        token_request[span] = request
        token_position[span] = np.arange(context, context + count)
        used = -(-(context + count) // shape.page_size)
        page_table[request, used:] = 2147480000
        for which in range(2):
            history = encode(random.normal(0, 1, (shape.num_kv_heads, context, shape.head_dim)), shape.element_type)
            for position in range(context):
                page = page_table[request, position // shape.page_size]
                caches[which][page, :, position % shape.page_size] = history[:, position]
            whole = np.concatenate([history, fresh[which][span].transpose(1, 0, 2)], axis=1)
            cached[which].append(decode(np.ascontiguousarray(whole), shape.element_type))
    return AttentionCase(
        shape, query, fresh[0], fresh[1], caches[0], caches[1], page_table, cu_tokens, token_request, token_position,
        cached[0], cached[1],
    )  # fmt: skip


def _geometry(case: AttentionCase) -> dict[str, Any]:
    shape = case.shape
    return {
        "num_tokens": len(case.token_position),
        "num_requests": len(shape.tokens),
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_pages": len(case.key_cache),
        "page_size": shape.page_size,
        "pages_per_request": shape.pages_per_request,
        "type": ELEMENT_TYPES[shape.element_type],
    }


def append_problem(case: AttentionCase) -> Problem:
    """Parameters of `kv_append` but for the caches, which it changes in place."""
    inputs: dict[str, Array | None] = {
        "key": case.new_keys,
        "value": case.new_values,
        "token_request": case.token_request,
        "token_position": case.token_position,
        "page_table": case.page_table,
    }
    return _geometry(case), inputs, {}


def attention_problem(case: AttentionCase, key_cache: Array, value_cache: Array) -> Problem:
    """Parameters of `ragged_attention`."""
    shape = case.shape
    scalars = _geometry(case) | {
        "num_heads": shape.num_heads,
        "kv_split": shape.kv_split,
        "causal": int(shape.causal),
        "scale": 1 / np.sqrt(shape.head_dim),
    }
    inputs: dict[str, Array | None] = {
        "query": case.query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "cu_tokens": case.cu_tokens,
        "token_position": case.token_position,
        "page_table": case.page_table,
    }
    return scalars, inputs, {"output": (case.query.shape, case.query.dtype)}


def run_append(backend: Backend, case: AttentionCase) -> tuple[Array, Array]:
    """Launch `kv_append` on copies of the caches and return them."""
    caches = [backend.put(case.key_cache), backend.put(case.value_cache)]
    scalars, inputs, outputs = append_problem(case)
    addresses = {"key_cache": caches[0].address, "value_cache": caches[1].address}
    launch(backend, "kv_append", scalars | addresses, inputs, outputs)
    return caches[0].read(), caches[1].read()


def run_attention(backend: Backend, case: AttentionCase, key_cache: Array, value_cache: Array) -> Array:
    """Launch `ragged_attention` and return [T, Hq, D] as float32."""
    outputs = launch(backend, "ragged_attention", *attention_problem(case, key_cache, value_cache))
    return decode(outputs["output"], case.shape.element_type)


def exact_attention(case: AttentionCase) -> Array:
    """The answer in float64; padding rows are zero."""
    shape = case.shape
    query = decode(case.query, shape.element_type).astype(np.float64)
    out = np.zeros(query.shape)
    group = shape.num_heads // shape.num_kv_heads
    for token, request in enumerate(case.token_request):
        if request < 0:
            continue
        keys, values = case.keys[request].astype(np.float64), case.values[request].astype(np.float64)
        end = case.token_position[token] + 1 if shape.causal else keys.shape[1]
        for head in range(shape.num_heads):
            score = keys[head // group, :end] @ query[token, head] / np.sqrt(shape.head_dim)
            weight = np.exp(score - score.max())
            out[token, head] = weight @ values[head // group, :end] / weight.sum()
    return out


def tolerance(case: AttentionCase) -> float:
    """Largest absolute error allowed: P and the output are each rounded once to the element type (unit roundoff u), and
    float32 accumulation is far below; |output| <= max |V|, so 2 u max |V|, and half as much again for the rest.
    """
    unit = 2.0**-11 if case.shape.element_type == "float16" else 2.0**-8
    return 3 * unit * max(float(np.abs(values).max()) for values in case.values)
