"""Keep Triton's readiness in step with the engine process by loading and unloading the gate model."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from pathlib import Path

from trtllm_dspark.serving.contract import GATE_MODEL

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MISSING_S = 3.0


class ReadinessGate:
    """Drive `/v2/health/ready`: red from the moment the engine ends until it answers again.

    Args:
        host: where the HTTP endpoint listens.
        port: its port.
        control_key: header value that unlocks the model control API.
        ready_file: the gate model loads only while this file exists.
    """

    def __init__(self, host: str, port: int, control_key: str, ready_file: Path) -> None:
        self._host, self._port = host, port
        self._headers = {"dspark-control": control_key}
        self._wanted = threading.Condition()
        self._ready_file = ready_file
        self._open = False
        self._dirty = False
        self._loaded = True
        self._missing_since: float | None = None
        threading.Thread(target=self._run, name="readiness-gate", daemon=True).start()

    def set(self, is_open: bool) -> None:
        """Ask for ready (True) or not ready; returns at once."""
        with self._wanted:
            if self._open == is_open:
                return
            self._open, self._dirty = is_open, True
            if is_open:
                self._ready_file.touch()
            else:
                self._ready_file.unlink(missing_ok=True)
            self._wanted.notify()

    def note_stub(self, is_alive: bool) -> None:
        """Take in whether the gate's stub answers; one that is gone while the gate is open is replaced."""
        with self._wanted:
            if is_alive or not (self._open and self._loaded):
                self._missing_since = None
            elif self._missing_since is None:
                self._missing_since = time.monotonic()
            elif time.monotonic() - self._missing_since > _MISSING_S:
                logger.warning("the stub of model %s ended; it is loaded again", GATE_MODEL)
                self._missing_since, self._loaded, self._dirty = None, False, True
                self._wanted.notify()

    def is_ready(self, *, timeout_s: float = 1.0) -> bool:
        """Return what /v2/health/ready says."""
        return self._request("GET", "/v2/health/ready", timeout_s) == 200

    def _run(self) -> None:
        while True:
            with self._wanted:
                if not self._dirty:
                    # A load that failed although all is well (its stub was killed, say) is tried again.
                    self._wanted.wait(_RETRY_S if self._open and not self._loaded else None)
                retry = self._open and not self._loaded
                if not self._dirty and not retry:
                    continue
                self._dirty = False
                if self._open and self._loaded:
                    continue  # opened before the server started, or again while the gate was being loaded
            # A model that is loaded again at once fails to load while the engine is gone, and a model that failed to
            # load keeps the server "not ready"; an unloaded one would not.
            self._request("POST", f"/v2/repository/models/{GATE_MODEL}/unload", 10.0)
            self._loaded = self._request("POST", f"/v2/repository/models/{GATE_MODEL}/load", 30.0) == 200

    def _request(self, method: str, path: str, timeout_s: float) -> int:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
