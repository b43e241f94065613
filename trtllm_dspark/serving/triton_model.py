"""The Python model behind every published name: convert, hand over, answer from the reader thread.

Runs inside Triton's stub process. The stub is kept thin: no tokenizer, no engine, one socket.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtllm_dspark.errors import RequestError
from trtllm_dspark.serving.cancel_checks import is_due
from trtllm_dspark.serving.client import ENGINE_UNAVAILABLE, EngineClient, EngineUnavailable, is_final
from trtllm_dspark.serving.contract import ModelSpec
from trtllm_dspark.serving.framing import Message, UnsendableMessage
from trtllm_dspark.serving.metric_families import MetricPublisher
from trtllm_dspark.serving.request_fields import ModelRequest, Wanted, parse_tensors
from trtllm_dspark.serving.responses import Arrays, merge_rows, response_arrays
from trtllm_dspark.serving.watchdog import exit_with_parent

logger = logging.getLogger(__name__)

STALL_LIMIT_S = 10.0
_IDLE_WAIT_S = 0.5
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def check_interpreter() -> None:
    """Refuse an interpreter whose numpy this stub would corrupt silently."""
    if int(np.__version__.split(".")[0]) >= 2:
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__} is installed and Triton's Python stub needs numpy < 2; install 'numpy<2'"
        )


def parameter(config: dict[str, Any], name: str, default: str) -> str:
    """Return a model parameter; an unset one and a literal placeholder count as absent."""
    value = str(config.get("parameters", {}).get(name, {}).get("string_value", ""))
    return default if not value or value.startswith("${") else value


def _error(code: str, message: str) -> Any:
    kinds = {
        "cancelled": pb_utils.TritonError.CANCELLED,
        "engine_failure": pb_utils.TritonError.INTERNAL,
        "internal_error": pb_utils.TritonError.INTERNAL,
    }
    unavailable = ("queue_full", ENGINE_UNAVAILABLE, "shutting_down", "deadline_exceeded")
    kind = pb_utils.TritonError.UNAVAILABLE if code in unavailable else pb_utils.TritonError.INVALID_ARG
    return pb_utils.TritonError(f"[{code}] {message}", kinds.get(code, kind))


def _response(arrays: Arrays) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays])


class _OpenRequest:
    """A Triton request with rows in flight; its sender is used by one thread at a time, under its lock.

    Attributes:
        handles: its rows' numbers at the engine process.
        heard_at: monotonic seconds of its arrival or of the last item.
        asked_at: monotonic seconds when Triton was last asked whether it is cancelled.
    """

    def __init__(self, sender: Any, spec: ModelSpec, request: ModelRequest) -> None:
        self._sender = sender
        self._spec = spec
        self._request = request
        self._lock = threading.Lock()
        self._left = set(range(len(request.rows)))
        self._arrays: dict[int, Arrays] = {}
        self.handles: list[int] = []
        self.heard_at = self.asked_at = time.monotonic()

    def on_item(self, row: int, item: Message) -> None:
        """Send what one row produced; the last one carries the final flag."""
        self.heard_at = time.monotonic()
        with self._lock:
            if row not in self._left:
                return
            if is_final(item):
                self._left.discard(row)
            if "code" in item:
                self._fail(item["code"], item["message"])
                return
            several = len(self._request.rows) > 1
            arrays = response_arrays(
                item,
                self._request.wanted,
                token_level=self._spec.token_level,
                row=row if several and self._spec.decoupled else None,
            )
            if self._spec.decoupled:
                self._send(_response(arrays))
                return
            self._arrays[row] = arrays
            if not self._left:
                self._send(_response(merge_rows([self._arrays[index] for index in sorted(self._arrays)])))

    def fail(self, code: str, message: str) -> None:
        """End the whole request with an error."""
        with self._lock:
            if self._left:
                self._left.clear()
                self._fail(code, message)

    @property
    def finished(self) -> bool:
        """Whether the final flag has been sent."""
        return not self._left

    def is_cancelled(self) -> bool:
        """Whether Triton knows that the client has gone or cancelled."""
        with self._lock:
            return bool(self._left) and bool(self._sender.is_cancelled())

    def _fail(self, code: str, message: str) -> None:
        if not self._spec.decoupled:
            self._left.clear()  # one response in all
        self._send(pb_utils.InferenceResponse(error=_error(code, message)))

    def _send(self, response: Any) -> None:
        try:
            self._sender.send(response, flags=0 if self._left else FINAL)
        except Exception as error:  # a stream whose client is gone refuses responses; the cancel poll ends it
            logger.debug("a response could not be sent: %s", error)


class TritonPythonModel:
    """One published model (see `contract.MODELS`)."""

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine process; a missing one is no error here, requests are refused until it is there."""
        check_interpreter()
        exit_with_parent(stall_limit_s=STALL_LIMIT_S)
        config = json.loads(args["model_config"])
        names = {tensor["name"] for tensor in config["input"]}
        self._spec = ModelSpec(
            args["model_name"],
            token_level="input_ids" in names,
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            publishes_metrics=parameter(config, "publish_metrics", "false") == "true",
        )
        self._exclude_input = parameter(config, "exclude_input_in_output", "true").lower() == "true"
        self._cancel_period_s = float(parameter(config, "cancellation_check_period_ms", "20")) / 1000.0
        self._metrics = (
            MetricPublisher(args["model_name"], args["model_version"]) if self._spec.publishes_metrics else None
        )
        self._open: dict[int, _OpenRequest] = {}
        self._has_open = threading.Event()
        self._stopping = threading.Event()
        self._client = EngineClient(
            parameter(config, "engine_socket", ""),
            name=args["model_name"],
            on_reply=None if self._metrics is None else self._metrics.receive,
        )
        self._client.start()
        self._client.wait_connected(2.0)
        self._threads = [threading.Thread(target=self._poll_cancellations, name="cancel-poll", daemon=True)]
        if self._metrics is not None:
            self._threads.append(
                threading.Thread(
                    target=self._metrics.run, args=(self._client, self._stopping), name="metrics", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand every request over; answers come from the client's reader thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except RequestError as error:
                self._client.post({"type": "rejected", "code": error.code})
                self._refuse(sender, error.code, str(error))
            except EngineUnavailable as error:
                self._refuse(sender, ENGINE_UNAVAILABLE, f"{error}; retry in a few seconds")
            except Exception:
                logger.exception("a request could not be handed over")
                self._refuse(sender, "internal_error", "the request could not be read")

    def finalize(self) -> None:
        """Disconnect; open requests end with an error."""
        self._stopping.set()
        self._client.close()

    def _start(self, request: Any, sender: Any) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parsed = parse_tensors(
            self._spec,
            tensors,
            json.loads(request.parameters() or "{}"),
            timeout_us=int(request.timeout() or 0),
            exclude_input=self._exclude_input,
        )
        request_id = request.request_id()
        if parsed.stop:
            self._stop(request_id, sender)
            return
        opened = _OpenRequest(sender, self._spec, parsed)
        handles = [self._client.reserve_handle() for _ in parsed.rows]
        opened.handles = handles
        self._open[handles[0]] = opened
        self._has_open.set()
        try:
            for row, (handle, fields) in enumerate(zip(handles, parsed.rows, strict=True)):
                self._client.add(
                    fields,
                    functools.partial(self._on_item, opened, row),
                    handle=handle,
                    request_id=request_id,
                    group=handles[0],
                )
        except (EngineUnavailable, UnsendableMessage) as error:
            self._open.pop(handles[0], None)
            opened.fail(error.code if isinstance(error, UnsendableMessage) else ENGINE_UNAVAILABLE, f"{error}")
            for handle in handles:
                self._client.cancel(handle)

    def _on_item(self, opened: _OpenRequest, row: int, item: Message) -> None:
        try:
            opened.on_item(row, item)
        except Exception:
            logger.exception("a response could not be made")
            opened.fail("internal_error", "the response could not be made; the log says more")
            for handle in opened.handles:
                self._client.cancel(handle)
        if opened.finished:
            self._open.pop(opened.handles[0], None)

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise RequestError(
                "stop is set and the request has no id; send it with the id of the request to stop",
                code="missing_request_id",
            )
        if not self._client.post({"type": "stop", "id": 0, "request_id": request_id}):
            raise EngineUnavailable("the engine process is not running")
        item: Message = {"text": "", "tokens": [], "finish_reason": "cancelled"}
        request = ModelRequest(rows=({},), wanted=Wanted(), stream=False, stop=True)
        _OpenRequest(sender, self._spec, request).on_item(0, item)

    def _refuse(self, sender: Any, code: str, message: str) -> None:
        try:
            sender.send(pb_utils.InferenceResponse(error=_error(code, message)), flags=FINAL)
        except Exception as error:  # nothing is left to tell this client
            logger.debug("a refusal could not be sent: %s", error)

    def _poll_cancellations(self) -> None:
        while not self._stopping.is_set():
            if not self._open:
                self._has_open.clear()
                if not self._open:
                    self._has_open.wait(_IDLE_WAIT_S)
            time.sleep(self._cancel_period_s)
            now = time.monotonic()
            for opened in list(self._open.values()):
                if not is_due(now, heard_at=opened.heard_at, asked_at=opened.asked_at):
                    continue
                opened.asked_at = now
                if opened.is_cancelled():
                    for handle in opened.handles:
                        self._client.cancel(handle)
