"""Python side of tests/tensorrt/harness.cpp: a plugin library driven as TensorRT drives it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.kernels.build import ROOT, SIMT, SIMT_FLAGS, SIMT_SOURCES, compile_shared

PLUGINS = ROOT / "plugins/tensorrt"
HARNESS = ROOT / "tests/tensorrt/harness.cpp"
DTYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bfloat16": 7, "int64": 8}
FIELD_INT32, FIELD_FLOAT32 = 5, 1


class TensorArg(ctypes.Structure):
    """One tensor: type, format, dims (-1 = dynamic), profile maximum, address."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("most", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
    )

    @classmethod
    def make(
        cls, dtype: str, dims: Sequence[int], *, most: Sequence[int] | None = None, form: int = 0, data: int = 0
    ) -> TensorArg:
        tensor = cls(type=DTYPES[dtype], format=form, num_dims=len(dims), data=data)
        tensor.dims[: len(dims)] = dims
        tensor.most[: len(dims)] = most if most is not None else dims
        return tensor


def _array(tensors: Sequence[TensorArg]) -> Any:
    return (TensorArg * len(tensors))(*tensors)


def host_plugin_library() -> Path:
    """The plugin library with its kernels compiled for the host, against plugins/tensorrt/abi."""
    flags = [*SIMT_FLAGS, f"-I{PLUGINS / 'abi'}"]
    sources = [*sorted(PLUGINS.glob("*.cpp")), *SIMT_SOURCES]
    return compile_shared("host_plugins", [(source, flags) for source in sources])


class Plugin:
    """One plugin object; destroyed by `destroy`."""

    def __init__(self, harness: Harness, handle: int) -> None:
        self._harness, self._call, self.handle = harness, harness.call, handle

    def text(self, function: str) -> str:
        value = self._call(function, ctypes.c_char_p, self.handle)
        return "" if value is None else value.decode()

    @property
    def num_outputs(self) -> int:
        return int(self._call("harness_num_outputs", ctypes.c_int32, self.handle))

    def aliased(self, output: int) -> int:
        return int(self._call("harness_aliased", ctypes.c_int32, self.handle, output))

    def derived(self, how: str) -> Plugin:
        """Another plugin made by `clone`, `attach` or `recreate`."""
        arguments = (self._harness.library, self.handle) if how == "recreate" else (self.handle,)
        return Plugin(self._harness, self._call(f"harness_{how}", ctypes.c_void_p, *arguments))

    def destroy(self) -> None:
        self._call("harness_destroy", None, self.handle)

    def output_shapes(self, inputs: Sequence[TensorArg], symbols: Sequence[Sequence[str]]) -> list[str] | None:
        names = (ctypes.c_char_p * (8 * len(inputs)))()
        for index, tensor_symbols in enumerate(symbols):
            for axis, symbol in enumerate(tensor_symbols):
                names[8 * index + axis] = symbol.encode()
        text = self._call("harness_output_shapes", ctypes.c_char_p, self.handle, _array(inputs), len(inputs), names)
        return None if text is None else text.decode().splitlines()

    def output_types(self, inputs: Sequence[str]) -> list[int]:
        given = (ctypes.c_int32 * len(inputs))(*(DTYPES[dtype] for dtype in inputs))
        out = (ctypes.c_int32 * self.num_outputs)()
        code = self._call("harness_output_types", ctypes.c_int32, self.handle, given, len(inputs), out)
        assert code == 0, self._harness.log()
        return list(out)

    def supports(self, position: int, inputs: Sequence[TensorArg], outputs: Sequence[TensorArg]) -> bool:
        arguments = (_array([*inputs, *outputs]), len(inputs), len(outputs))
        return bool(self._call("harness_supports", ctypes.c_int32, self.handle, position, *arguments))

    def configure(self, inputs: Sequence[TensorArg], outputs: Sequence[TensorArg]) -> int:
        arguments = (_array([*inputs, *outputs]), len(inputs), len(outputs))
        return int(self._call("harness_configure", ctypes.c_int32, self.handle, *arguments))

    def workspace(self, inputs: Sequence[TensorArg], outputs: Sequence[TensorArg]) -> int:
        arguments = (_array([*inputs, *outputs]), len(inputs), len(outputs))
        return int(self._call("harness_workspace", ctypes.c_int64, self.handle, *arguments))

    def enqueue(self, inputs: Sequence[TensorArg], outputs: Sequence[TensorArg], workspace: int) -> int:
        arguments = (_array([*inputs, *outputs]), len(inputs), len(outputs), workspace)
        return int(self._call("harness_enqueue", ctypes.c_int32, self.handle, *arguments))


class Harness:
    """A loaded plugin library."""

    def __init__(self, path: Path) -> None:
        flags = [
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{PLUGINS / 'abi'}",
            f"-I{SIMT / 'include'}",
        ]
        self._functions = ctypes.CDLL(str(compile_shared("harness", [(HARNESS, flags)])))
        self.library = self.call("harness_open", ctypes.c_void_p, str(path).encode())
        assert self.library, f"{path} cannot be opened or lacks setLoggerFinder or getCreators"

    def call(self, function: str, result: Any, *arguments: Any) -> Any:
        entry = getattr(self._functions, function)
        entry.restype = result
        # Handles are pointers: an unannotated Python integer would be cut to 32 bits.
        return entry(*(ctypes.c_void_p(a) if isinstance(a, int) and a > 2**31 else a for a in arguments))

    def log(self) -> str:
        return str(self.call("harness_log", ctypes.c_char_p).decode())

    def creators(self) -> list[str]:
        return str(self.call("harness_creators", ctypes.c_char_p, self.library).decode()).splitlines()

    def create_raw(self, name: str, fields: Sequence[tuple[str, int, np.ndarray]]) -> Plugin | None:
        """Create from (name, PluginFieldType, values) triples."""
        count = len(fields)
        names = (ctypes.c_char_p * count)(*(field.encode() for field, _, _ in fields))
        types = (ctypes.c_int32 * count)(*(kind for _, kind, _ in fields))
        lengths = (ctypes.c_int32 * count)(*(len(values) for _, _, values in fields))
        data = (ctypes.c_void_p * count)(*(values.ctypes.data for _, _, values in fields))
        handle = self.call(
            "harness_create", ctypes.c_void_p, self.library, name.encode(), count, names, types, lengths, data
        )
        return Plugin(self, handle) if handle else None

    def create(self, name: str, fields: Mapping[str, float]) -> Plugin:
        """Create from values: integers become int32 fields, floats float32 fields."""
        triples = [
            (key, FIELD_FLOAT32, np.array([value], np.float32))
            if isinstance(value, float)
            else (key, FIELD_INT32, np.array([value], np.int32))
            for key, value in fields.items()
        ]
        plugin = self.create_raw(name, triples)
        assert plugin is not None, self.log()
        return plugin
