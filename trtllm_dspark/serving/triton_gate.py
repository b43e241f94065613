"""The readiness gate: a model that only loads while the engine process answers.

With strict readiness (Triton's default) a model that failed to load keeps /v2/health/ready red, so the launcher unloads
and loads this one when the engine process ends and comes back. Its one output describes the engine.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtllm_dspark.serving.client import EngineClient
from trtllm_dspark.serving.triton_model import STALL_LIMIT_S, check_interpreter, parameter
from trtllm_dspark.serving.watchdog import exit_with_parent


class TritonPythonModel:
    """Model `dspark_engine`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Fail unless the engine process answers and the launcher, where there is one, says that all is well."""
        check_interpreter()
        exit_with_parent(stall_limit_s=STALL_LIMIT_S)
        config = json.loads(args["model_config"])
        ready_file = parameter(config, "ready_file", "")
        if ready_file and not os.path.exists(ready_file):
            raise pb_utils.TritonModelException("the engine process is not ready")
        self._client = EngineClient(parameter(config, "engine_socket", ""), name=args["model_name"])
        self._client.start()
        if not self._client.wait_connected(1.0):
            raise pb_utils.TritonModelException("the engine process is not ready")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer with a JSON description of the engine."""
        text = json.dumps({**self._client.engine, "connected": self._client.connected})
        tensor = pb_utils.Tensor("engine", np.array([text.encode()], dtype=object))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]

    def finalize(self) -> None:
        """Disconnect."""
        self._client.close()
