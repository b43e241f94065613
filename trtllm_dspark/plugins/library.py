"""Launching the kernels outside an engine: the C entry points of `plugins/kernels/c_abi.h`."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import NativeError, ShapeError

ELEMENT_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3}
"""Codes of the `*_type` parameters."""

_FORMATS = {"int32": "<i", "int64": "<q", "float32": "<f", "pointer": "<Q"}
_CUDA_ERROR = 1000


@dataclass(frozen=True)
class _Field:
    offset: int
    kind: str


class KernelLibrary:
    """Kernels of `libtrtllm_dspark_kernels.so` (or of the plugin library, which has the same entry points).

    Args:
        path: the shared library.

    Raises:
        NativeError: the library cannot be loaded or lacks the entry points.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            layout = self._library.dspark_params_layout
            self._workspace = self._library.dspark_workspace_bytes
            self._launch = self._library.dspark_launch
        except (OSError, AttributeError) as error:
            raise NativeError(f"{path} is not a kernel library: {error}", op="load") from error
        layout.restype = ctypes.c_char_p
        self._workspace.restype = ctypes.c_int64
        self._workspace.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self._launch.restype = ctypes.c_int32
        self._launch.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64]
        self._ops = _parse_layout(layout().decode())

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the operations."""
        return tuple(self._ops)

    def fields(self, op: str) -> dict[str, str]:
        """Return name -> kind (`int32`, `int64`, `float32`, `pointer`) of the parameters of `op`."""
        return {name: field.kind for name, field in self._op(op)[1].items()}

    def workspace_bytes(self, op: str, **params: int | float | None) -> int:
        """Return the bytes of scratch `op` needs; pointers may be left out."""
        size, fields = self._op(op)
        given = {name: 0 for name, field in fields.items() if field.kind == "pointer"} | params
        return int(self._workspace(op.encode(), self._pack(op, given)))

    def launch(self, op: str, *, stream: int = 0, **params: int | float | None) -> None:
        """Launch `op` on a CUDA stream.

        Args:
            op: one of `ops`.
            stream: the stream's handle (`int(cuda_stream)`); 0 = the default stream.
            params: every field of the op's Params struct; pointers as addresses, None = null.

        Raises:
            ShapeError: a field is missing or unknown.
            NativeError: the launcher refused a value, or CUDA failed.
        """
        message = ctypes.create_string_buffer(512)
        code = self._launch(op.encode(), self._pack(op, params), stream, message, len(message))
        if code:
            raise NativeError(message.value.decode(), op=op, code=code % _CUDA_ERROR)

    def _op(self, op: str) -> tuple[int, dict[str, _Field]]:
        if op not in self._ops:
            raise ShapeError(f"unknown kernel '{op}'; expected one of {', '.join(self._ops)}")
        return self._ops[op]

    def _pack(self, op: str, params: dict[str, int | float | None]) -> ctypes.Array[ctypes.c_char]:
        size, fields = self._op(op)
        wrong = sorted(fields.keys() ^ params.keys())
        if wrong:
            problem = "is missing" if wrong[0] in fields else "is not a parameter"
            raise ShapeError(f"{op}: {wrong[0]} {problem}")
        buffer = ctypes.create_string_buffer(size)
        for name, field in fields.items():
            value = params[name]
            try:
                struct.pack_into(_FORMATS[field.kind], buffer, field.offset, 0 if value is None else value)
            except (struct.error, OverflowError) as error:
                raise ShapeError(f"{op}: {name}: {value!r} is not a {field.kind}") from error
        return buffer


def _parse_layout(text: str) -> dict[str, tuple[int, dict[str, _Field]]]:
    ops: dict[str, tuple[int, dict[str, _Field]]] = {}
    fields: dict[str, _Field] = {}
    for line in text.splitlines():
        words = line.split()
        if line.startswith(" "):
            fields[words[0]] = _Field(offset=int(words[1]), kind=words[3])
        else:
            fields = {}
            ops[words[0]] = (int(words[1]), fields)
    return ops
