"""A small writer of ONNX graphs: nodes by name, weights streamed to one external data file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper

from trtllm_dspark.errors import ShapeError

OPSET = 24
IR_VERSION = 11
MICROSOFT = "com.microsoft"
# Pages are mapped from the file, and a mapping starts at a page.
_ALIGNMENT = 4096
Dim = int | str
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Types a graph may compute in, by name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a weight lies: a file beside the graph, offset and length in bytes, element type and shape."""

    location: str
    offset: int
    length: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def reshaped(self, shape: tuple[int, ...]) -> StoredTensor:
        """View the same bytes under another shape with as many elements."""
        if int(np.prod(shape)) != int(np.prod(self.shape)):
            raise ShapeError(
                f"a stored tensor of shape {self.shape} cannot be viewed as {shape}; element counts differ"
            )
        return StoredTensor(self.location, self.offset, self.length, self.dtype, shape)


def _value_info(name: str, dtype: DTypeLike, shape: Sequence[Dim]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


class WeightFile:
    """Append-only external data file; one tensor is in memory at a time."""

    def __init__(self, path: Path) -> None:
        """Create `path`; fails if its directory does not exist."""
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self._file: BinaryIO = path.open("wb")

    def append(
        self, name: str, chunks: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: DTypeLike
    ) -> StoredTensor:
        """Write a tensor given as consecutive row chunks and remember it under `name`."""
        offset = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(offset)
        for chunk in chunks:
            # As bytes: bfloat16 has no buffer of its own.
            self._file.write(np.ascontiguousarray(chunk, dtype=dtype).reshape(-1).view(np.uint8).data)
        length = self._file.tell() - offset
        kind = np.dtype(dtype)
        if length != int(np.prod(shape)) * kind.itemsize:
            raise ShapeError(
                f"tensor {name!r} has {length} bytes, its shape {shape} needs another number; check the checkpoint"
            )
        stored = StoredTensor(self.path.name, offset, length, kind, shape)
        self.tensors[name] = stored
        return stored

    def flush(self) -> None:
        """Make what was written readable through the file system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


@dataclass
class Network:
    """A graph under construction; values are named by strings, as in ONNX.

    `dtype` is the type of activations and caches; logits, features and hidden rows leave a graph as float32.
    """

    name: str
    weights: WeightFile
    dtype: np.dtype[Any] = FLOAT_DTYPES["float32"]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _stored: dict[str, StoredTensor] = field(default_factory=dict)
    _counter: int = 0

    def input(self, name: str, dtype: DTypeLike, shape: Sequence[Dim]) -> str:
        """Declare a graph input; declaring it again in the same way changes nothing.

        Raises:
            ShapeError: it is declared with another type or shape.
        """
        info = _value_info(name, dtype, shape)
        known = next((value for value in self.inputs if value.name == name), None)
        if known is None:
            self.inputs.append(info)
        elif known != info:
            raise ShapeError(f"graph input {name!r} is declared twice with different types or shapes; use another name")
        return name

    def output(self, value: str, name: str, dtype: DTypeLike, shape: Sequence[Dim]) -> str:
        """Publish `value` as the graph output `name`."""
        if value != name:
            self.nodes.append(helper.make_node("Identity", [value], [name], name=f"output/{name}"))
        self.outputs.append(_value_info(name, dtype, shape))
        return name

    def split(
        self, op: str, inputs: Sequence[str], num_outputs: int, *, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Append a node with several outputs and return their names."""
        self._counter += 1
        stem = f"{op}_{self._counter}"
        names = [f"{stem}:{i}" for i in range(num_outputs)] if num_outputs > 1 else [stem]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=stem, domain=domain, **attributes))
        return names

    def named(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> None:
        """Append a node whose outputs have the names given."""
        self._counter += 1
        self.nodes.append(
            helper.make_node(op, list(inputs), list(outputs), name=f"{op}_{self._counter}", domain=domain, **attributes)
        )

    def node(self, op: str, *inputs: str, domain: str = "", out: str | None = None, **attributes: Any) -> str:
        """Append a node with one output and return its name; `out` fixes that name."""
        if out is None:
            return self.split(op, inputs, 1, domain=domain, **attributes)[0]
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, domain=domain, **attributes))
        return out

    def cast(self, value: str, source: np.dtype[Any], destination: np.dtype[Any]) -> str:
        """Convert a value between float types; appends nothing when they are the same."""
        if source == destination:
            return value
        return self.node("Cast", value, to=helper.np_dtype_to_tensor_dtype(destination))

    def constant(self, value: NDArray[Any]) -> str:
        """Return the name of a small constant kept inside the graph file; equal constants are stored once."""
        digest = hashlib.sha1(value.tobytes(), usedforsecurity=False).hexdigest()[:16]
        name = f"const/{value.dtype}{list(value.shape)}/{digest}"
        if name not in self._known:
            self._known.add(name)
            self.initializers.append(onnx.numpy_helper.from_array(value, name))
        return name

    def ints(self, *values: int) -> str:
        """Return a 1-D int64 constant."""
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float, dtype: DTypeLike = np.float32) -> str:
        """Return a 0-D constant."""
        return self.constant(np.array(value, dtype))

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Store an array in the external data file and return its name."""
        return self.stored(name, self.weights.append(name, [value], value.shape, value.dtype))

    def shared_weight(self, name: str, value: NDArray[Any]) -> str:
        """Store an array once however often it is asked for; its name is `name` and a digest of the values."""
        digest = hashlib.sha1(value.tobytes(), usedforsecurity=False).hexdigest()[:16]
        name = f"{name}/{digest}"
        return name if name in self._known else self.weight(name, value)

    def stored(self, name: str, tensor: StoredTensor) -> str:
        """Reference a tensor that an external data file beside the graph already holds.

        Raises:
            ShapeError: the name stands for another tensor.
        """
        if self._stored.setdefault(name, tensor) != tensor:
            raise ShapeError(f"weight {name!r} is stored twice with different values; give each a name of its own")
        if name in self._known:
            return name
        self._known.add(name)
        proto = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(tensor.dtype),
            dims=tensor.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, entry in (("location", tensor.location), ("offset", tensor.offset), ("length", tensor.length)):
            proto.external_data.add(key=key, value=str(entry))
        self.initializers.append(proto)
        return name

    def model(self) -> onnx.ModelProto:
        """Assemble the model; weights stay references to their file."""
        domains = {node.domain for node in self.nodes} - {""}
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="trtllm_dspark")

    def save(self, path: Path, check: Callable[[onnx.ModelProto, Path], None] | None = None) -> None:
        """Write the graph file after `check` accepted the model and the data files in the same directory."""
        model = self.model()
        if check is not None:
            self.weights.flush()
            check(model, path.parent)
        path.write_bytes(model.SerializeToString())
