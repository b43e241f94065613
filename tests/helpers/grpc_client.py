"""tritonclient over gRPC in the shapes clients of this contract use."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

DTYPES: dict[str, Any] = {
    "text_input": np.object_,
    "stop_words": np.object_,
    "temperature": np.float32,
    "top_p": np.float32,
    "stream": np.bool_,
    "streaming": np.bool_,
    "stop": np.bool_,
    "return_perf_metrics": np.bool_,
    "seed": np.uint64,
}
TRITON_TYPES = {np.object_: "BYTES", np.float32: "FP32", np.bool_: "BOOL", np.uint64: "UINT64", np.int32: "INT32"}


def inputs(rows: int = 1, **fields: Any) -> list[grpcclient.InferInput]:
    """Return input tensors; a list value is one row's vector, a tuple gives one value a row."""
    made = []
    for name, value in fields.items():
        dtype = DTYPES.get(name, np.int32)
        if isinstance(value, tuple):
            array = np.array([[item] for item in value], dtype=dtype)
        else:
            array = np.array([value if isinstance(value, list) else [value]] * rows, dtype=dtype)
        if dtype is np.object_:
            encode = np.vectorize(lambda item: item.encode() if isinstance(item, str) else item, otypes=[object])
            array = encode(array)
        tensor = grpcclient.InferInput(name, list(array.shape), TRITON_TYPES[dtype])
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


class GrpcStream:
    """One bidirectional stream; responses of all its requests arrive in one queue."""

    def __init__(self, url: str) -> None:
        self.client = grpcclient.InferenceServerClient(url)
        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self._responses.put((result, error)))

    def send(
        self, model: str, fields: Mapping[str, Any], *, request_id: str = "", rows: int = 1, **options: Any
    ) -> None:
        self.client.async_stream_infer(
            model, inputs(rows, **fields), request_id=request_id, enable_empty_final_response=True, **options
        )

    def receive(self, *, timeout_s: float = 20.0) -> tuple[Any, bool]:
        """Return the next result or error and whether it is the request's last."""
        result, error = self._responses.get(timeout=timeout_s)
        if error is not None:
            return error, True
        return result, bool(result.get_response().parameters["triton_final_response"].bool_param)

    def until_final(self) -> Iterator[Any]:
        """Yield results up to the final one of the only open request."""
        final = False
        while not final:
            result, final = self.receive()
            yield result

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self.client.close()


def text(result: Any) -> str:
    """Return text_output as old clients index it."""
    return str(result.as_numpy("text_output")[0].decode())
