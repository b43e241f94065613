"""`calibration.json` of an engine directory, and the layout other servers read (docs/file_formats.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.engine_dir import EngineDirectory, read_side_table, write_json, write_side_table
from trtllm_dspark.errors import ConfigError, EngineError
from trtllm_dspark.speculation.calibration import Calibration

CALIBRATION_FILE = "calibration.json"
SCHEMA = "trtllm_dspark.calibration"
SCHEMA_VERSION = 1
REMEDY = "run trtllm-dspark calibrate again, or delete the file"


def write_calibration(directory: EngineDirectory, calibration: Calibration, fit: Mapping[str, Any]) -> Path:
    """Write the calibration into the engine directory and return its path.

    Args:
        directory: the engine.
        calibration: a temperature and a bias for each of its positions.
        fit: what it was fitted on and how good it is; information only.

    Raises:
        DeviceError: the directory cannot be written or the disk is full.
    """
    content = {"temperature": list(calibration.temperature), "bias": list(calibration.bias), "fit": dict(fit)}
    return write_side_table(directory, CALIBRATION_FILE, schema=SCHEMA, version=SCHEMA_VERSION, content=content)


def read_calibration(directory: EngineDirectory) -> Calibration | None:
    """Read the engine's calibration; None where it has none.

    Raises:
        EngineError: the file is damaged or of another version.
        EngineMismatch: it was fitted on another engine.
    """
    fields = read_side_table(directory, CALIBRATION_FILE, schema=SCHEMA, version=SCHEMA_VERSION, remedy=REMEDY)
    if fields is None:
        return None
    temperature, bias = fields.numbers("temperature"), fields.numbers("bias")
    positions = directory.manifest.limits.max_draft_len
    if len(temperature) != positions:
        raise EngineError(f"{fields.where} has {len(temperature)} temperatures for {positions} positions; {REMEDY}")
    try:
        return Calibration(temperature, bias)
    except ConfigError as error:
        raise EngineError(f"{fields.where}: {error}, or delete the file") from error


def write_sts_temperatures(path: Path, calibration: Calibration) -> None:
    """Write the temperatures alone, in the layout that SGLang and TensorRT-LLM read.

    Raises:
        DeviceError: the file cannot be written.
    """
    write_json(path, {"sts_temperatures": list(calibration.temperature)})
