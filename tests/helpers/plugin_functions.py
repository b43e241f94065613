"""DsparkKvAppend and DsparkRaggedAttention written out in standard operators, for ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

DOMAIN = "trtllm_dspark"
COMMON = ["plugin_version", "plugin_namespace"]
OPSETS = [helper.make_opsetid("", 24)]


class _Body:
    """Nodes of a function under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, op: str, *inputs: str, out: str = "", **attributes: object) -> str:
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def const(self, value: object, dtype: type = np.int64) -> str:
        return self("Constant", value=numpy_helper.from_array(np.array(value, dtype)))

    def extent(self, value: str, axis: int) -> str:
        """Size of one axis as int64 [1]."""
        return self("Shape", value, start=axis, end=axis + 1)

    def wide(self, value: str) -> str:
        return self("Cast", value, to=onnx.TensorProto.INT64)

    def count(self, size: str) -> str:
        """0, 1, .. size - 1."""
        return self("Range", self.const(0), self("Squeeze", size), self.const(1))


def kv_append() -> onnx.FunctionProto:
    """Rows whose request is negative or whose page lies outside the caches go to a page that is cut off again."""
    b = _Body()
    request, position, table = b.wide("token_request"), b.wide("token_position"), b.wide("page_table")
    size, pages = b.extent("key_cache", 2), b.extent("key_cache", 0)
    per_request = b.extent("page_table", 1)
    slot = b("Div", position, size)
    inside = b("And", b("GreaterOrEqual", request, b.const(0)), b("Less", slot, per_request))
    inside = b("And", inside, b("GreaterOrEqual", position, b.const(0)))
    at = b("Concat", b("Unsqueeze", b("Max", request, b.const(0)), b.const([1])),
           b("Unsqueeze", b("Max", b("Min", slot, b("Sub", per_request, b.const(1))), b.const(0)), b.const([1])),
           axis=1)  # fmt: skip
    page = b("GatherND", table, at)
    inside = b("And", inside, b("And", b("GreaterOrEqual", page, b.const(0)), b("Less", page, pages)))
    page = b("Unsqueeze", b("Where", inside, page, pages), b.const([1]))
    offset = b("Unsqueeze", b("Max", b("Mod", position, size), b.const(0)), b.const([1]))
    where = b("Concat", page, offset, axis=1)
    for name in ("key", "value"):
        turned = b("Transpose", f"{name}_cache", perm=[0, 2, 1, 3])
        first = b("Slice", turned, b.const([0]), b.const([1]), b.const([0]))
        written = b("ScatterND", b("Concat", turned, first, axis=0), where, name)
        kept = b("Slice", written, b.const([0]), pages, b.const([0]))
        b("Transpose", kept, out=f"{name}_cache_out", perm=[0, 2, 1, 3])
    inputs = ["key", "value", "token_request", "token_position", "page_table", "key_cache", "value_cache"]
    outputs = ["key_cache_out", "value_cache_out"]
    return helper.make_function(DOMAIN, "DsparkKvAppend", inputs, outputs, b.nodes, OPSETS, COMMON)


def ragged_attention(*, causal: bool) -> onnx.FunctionProto:
    """Every packed token gathers its request's pages; rows at or beyond cu_tokens[R] become zeros."""
    b = _Body()
    cu, position, table = b.wide("cu_tokens"), b.wide("token_position"), b.wide("page_table")
    tokens = b.count(b.extent("query", 0))
    ends = b("Slice", cu, b.const([1]), b.const([2**31]), b.const([0]))
    passed = b("LessOrEqual", ends, b("Unsqueeze", tokens, b.const([1])))
    request = b("ReduceSum", b.wide(passed), b.const([1]), keepdims=0)
    used = b("Less", request, b("Squeeze", b.extent("page_table", 0)))
    request = b("Min", request, b("Sub", b("Squeeze", b.extent("page_table", 0)), b.const(1)))
    last = b("Gather", position, b("Max", b("Sub", ends, b.const(1)), b.const(0)))
    end = b("Add", position if causal else b("Gather", last, request), b.const(1))
    pages = b("Max", b("Gather", table, request), b.const(0))
    heads = b("Div", b.extent("query", 1), b.extent("key_cache", 1))
    sizes = b("Concat", b.extent("query", 0), b.const([-1]), b.extent("key_cache", 1), b.extent("key_cache", 3), axis=0)
    keys_values = []
    for name in ("key_cache", "value_cache"):
        rows = b("Transpose", b("Gather", name, pages), perm=[0, 1, 3, 2, 4])
        rows = b("Transpose", b("Reshape", rows, sizes), perm=[0, 2, 1, 3])
        spread = b("Expand", b("Unsqueeze", rows, b.const([2])),
                   b("Concat", b.const([1, 1]), heads, b.const([1, 1]), axis=0))  # fmt: skip
        target = b("Concat", b.extent("query", 0), b.extent("query", 1), b.const([-1]), b.extent("query", 2), axis=0)
        keys_values.append(b("Reshape", spread, target))
    keys, values = keys_values
    scores = b("MatMul", b("Unsqueeze", "query", b.const([2])), b("Transpose", keys, perm=[0, 1, 3, 2]))
    b.nodes.append(helper.make_node("Constant", [], ["factor"]))
    reference = AttributeProto(name="value_float", ref_attr_name="scale", type=AttributeProto.FLOAT)
    b.nodes[-1].attribute.append(reference)
    seen = b("Less", b.count(b.extent(keys, 2)), b("Unsqueeze", end, b.const([1, 2, 3])))
    scores = b("Where", seen, b("Mul", scores, "factor"), b.const(-np.inf, np.float32))
    mixed = b("Squeeze", b("MatMul", b("Softmax", scores, axis=-1), values), b.const([2]))
    b("Where", b("Unsqueeze", used, b.const([1, 2])), mixed, b.const(0, np.float32), out="output")
    inputs = ["query", "key_cache", "value_cache", "cu_tokens", "token_position", "page_table"]
    attributes = [*COMMON, "scale", "causal", "kv_split"]
    return helper.make_function(DOMAIN, "DsparkRaggedAttention", inputs, ["output"], b.nodes, OPSETS, attributes)
