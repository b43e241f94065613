"""Types of fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.recording_device import RecordingDevice
from trtllm_dspark.engine.tensorrt import TensorRtEngine

Opened = Callable[..., tuple[TensorRtEngine, RecordingDevice]]
"""Open an engine of a written pair: `late`, `kernels` (`core`, `sources` or None), and options of the engine."""
AnyOpened = Callable[..., tuple[Any, RecordingDevice]]
"""The same of either lowering."""
