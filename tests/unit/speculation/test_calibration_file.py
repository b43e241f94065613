from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.errors import DeviceError, EngineError, EngineMismatch
from trtllm_dspark.speculation import Calibration
from trtllm_dspark.speculation.calibration_file import read_calibration, write_calibration, write_sts_temperatures

CALIBRATION = Calibration((0.5, 1.0, 1.25, 2.0, 0.75, 1.5, 3.0), (0.0, -0.5, 0.25, 1.0, 2.0, -3.0, 0.125))


@pytest.fixture
def directory(toy_engine_dir: Path, tmp_path: Path) -> EngineDirectory:
    """Return the toy engine's manifest in a folder of its own."""
    shutil.copy(toy_engine_dir / "manifest.json", tmp_path)
    return EngineDirectory(tmp_path, open_engine_dir(toy_engine_dir, verify_hashes=False).manifest)


def test_calibration_is_read_back_as_it_was_written(directory: EngineDirectory) -> None:
    assert read_calibration(directory) is None
    path = write_calibration(directory, CALIBRATION, {"blocks": 700})
    assert read_calibration(directory) == CALIBRATION
    raw = json.loads(path.read_text())
    assert (raw["schema"], raw["schema_version"]) == ("trtllm_dspark.calibration", 1)
    assert raw["engine_hash"] == directory.manifest.engine_hash
    assert raw["fit"] == {"blocks": 700}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"engine_hash": "0" * 64}, EngineMismatch, "belongs to another engine"),
        ({"schema_version": 0}, EngineError, "schema version 0, this version reads 1"),
        ({"schema": "trtllm_dspark.cost_table"}, EngineError, "is not a trtllm_dspark.calibration file"),
        ({"temperature": [1.0] * 6, "bias": [0.0] * 6}, EngineError, "6 temperatures for 7 positions"),
        ({"bias": [0.0] * 6}, EngineError, "7 temperatures and 6 biases"),
        ({"temperature": [0.0] * 7}, EngineError, "temperatures above 0"),
        ({"temperature": ["1"] * 7}, EngineError, "'temperature' must be a list of numbers"),
        ({"bias": None}, EngineError, "'bias' must be a list of numbers"),
        ({"bias": [float("inf")] * 7}, EngineError, "finite numbers"),
    ],
)
def test_read_bad_calibration_says_what_to_do(
    directory: EngineDirectory, change: dict[str, Any], error: type[EngineError], message: str
) -> None:
    path = write_calibration(directory, CALIBRATION, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=message) as caught:
        read_calibration(directory)
    assert "again" in str(caught.value)


def test_sts_temperatures_have_the_layout_of_other_servers(tmp_path: Path) -> None:
    write_sts_temperatures(tmp_path / "sts.json", CALIBRATION)
    assert json.loads((tmp_path / "sts.json").read_text()) == {"sts_temperatures": list(CALIBRATION.temperature)}
    with pytest.raises(DeviceError, match="cannot be written"):
        write_sts_temperatures(tmp_path / "nowhere" / "sts.json", CALIBRATION)
