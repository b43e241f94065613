"""Requests of a load over gRPC: one stream each on a shared channel, by tritonclient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.serving.contract import TEXT_INPUTS

_DTYPES: dict[str, Any] = {
    "STRING": np.object_,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
}
_WIRE = {"STRING": "BYTES"}
_INPUTS = {entry.name: entry for entry in TEXT_INPUTS if entry.dtype in _DTYPES}


class GrpcChannel:
    """A channel to a server; open and use it within one event loop.

    Args:
        address: HOST:PORT.

    Raises:
        ConfigError: tritonclient is not installed.
    """

    def __init__(self, address: str) -> None:
        try:
            import grpc
            import tritonclient.grpc
            import tritonclient.grpc.aio
            import tritonclient.utils
        except ImportError as error:
            raise ConfigError(
                "a grpc:// address needs tritonclient; pip install '.[triton]' in a checkout, or load the server over "
                "http://"
            ) from error
        self._address = address
        self._make_input: Any = tritonclient.grpc.InferInput
        self._refused: type[Exception] = tritonclient.utils.InferenceServerException
        self._failed: type[Exception] = grpc.RpcError
        self._client: Any = tritonclient.grpc.aio.InferenceServerClient(address)

    async def close(self) -> None:
        """Close the channel."""
        await self._client.close()

    async def events(self, model: str, fields: Mapping[str, Any], *, timeout_s: float) -> AsyncIterator[dict[str, Any]]:
        """Yield `num_output_tokens` of every response of one request; one `error` event when the server refuses.

        Args:
            model: name of the model.
            fields: inputs by name, without the batch dimension.
            timeout_s: seconds of silence after which `TimeoutError` is raised.

        Raises:
            DeviceError: nothing listens there.
        """
        inputs = [self._input(name, value) for name, value in fields.items()]

        async def one() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs}

        responses = self._client.stream_infer(one())
        try:
            while True:
                try:
                    result, error = await asyncio.wait_for(anext(responses), timeout_s)
                except StopAsyncIteration:
                    return
                if error is not None:
                    yield {"error": str(error.message())}
                    return
                count = result.as_numpy("num_output_tokens")
                yield {"num_output_tokens": 0 if count is None else int(count.reshape(-1)[0])}
        except (self._refused, self._failed) as error:
            if "StatusCode.UNAVAILABLE" in str(error):
                raise DeviceError(f"nothing listens on {self._address}; start trtllm-dspark serve first") from error
            yield {"error": (str(error).splitlines() or ["gRPC"])[0]}
        finally:
            responses.cancel()

    def _input(self, name: str, value: object) -> Any:
        declared = _INPUTS.get(name)
        if declared is None:
            raise ConfigError(f"the server takes no input '{name}'; see docs/serving.md")
        dtype = _DTYPES[declared.dtype]
        items = value if isinstance(value, list) else [value]
        if dtype is np.object_:
            items = [str(item).encode() for item in items]
        array = np.array([items], dtype)
        tensor = self._make_input(name, list(array.shape), _WIRE.get(declared.dtype, declared.dtype))
        tensor.set_data_from_numpy(array)
        return tensor
