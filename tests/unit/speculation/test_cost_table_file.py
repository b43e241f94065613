from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.errors import DeviceError, EngineError, EngineMismatch
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape
from trtllm_dspark.speculation.cost_table_file import StoredCostTable, read_cost_table, write_cost_table

STORED = StoredCostTable(
    CostTable({VerifyShape(1, 2, 2, 128): 120.5, VerifyShape(2, 4, 2, 0): 130.0}, {DraftShape(1, 128): 30.25}),
    device="a processor",
    num_threads=2,
)


@pytest.fixture
def directory(toy_engine_dir: Path, tmp_path: Path) -> EngineDirectory:
    """Return the toy engine's manifest in a folder of its own."""
    shutil.copy(toy_engine_dir / "manifest.json", tmp_path)
    return EngineDirectory(tmp_path, open_engine_dir(toy_engine_dir, verify_hashes=False).manifest)


def test_table_is_read_back_as_it_was_written(directory: EngineDirectory) -> None:
    assert read_cost_table(directory) is None
    path = write_cost_table(directory, STORED)
    assert read_cost_table(directory) == STORED
    assert sorted(entry.name for entry in directory.path.iterdir()) == [path.name, "manifest.json"]
    assert path.name == "cost_table.json"
    raw = json.loads(path.read_text())
    assert raw["schema"] == "trtllm_dspark.cost_table"
    assert raw["engine_hash"] == directory.manifest.engine_hash
    assert raw["verify_us"] == [[1, 2, 2, 128, 120.5], [2, 4, 2, 0, 130.0]]


def test_clock_and_padded_sizes_are_read_back(directory: EngineDirectory) -> None:
    table = CostTable({VerifyShape(1, 2, 2, 128): 120.5}, {}, token_sizes=(1, 2, 4))
    stored = StoredCostTable(table, "a GPU", 2, sm_clock_mhz=1980, device_rounds=True)
    path = write_cost_table(directory, stored)
    assert read_cost_table(directory) == stored
    newer = ("sm_clock_mhz", "token_sizes", "device_rounds")
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in newer}
    path.write_text(json.dumps(old))
    assert read_cost_table(directory) == StoredCostTable(CostTable(table.verify_us, {}), "a GPU", 2)


def test_engine_with_a_table_is_still_intact(toy_engine_dir: Path) -> None:
    directory = open_engine_dir(toy_engine_dir)
    path = write_cost_table(directory, STORED)
    try:
        assert open_engine_dir(toy_engine_dir).manifest == directory.manifest
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"engine_hash": "0" * 64}, EngineMismatch, "belongs to another engine"),
        ({"schema_version": 2}, EngineError, "schema version 2, this version reads 1"),
        ({"schema": "other"}, EngineError, "is not a trtllm_dspark.cost_table file"),
        ({"verify_us": []}, EngineError, "holds no verify times"),
        ({"verify_us": None}, EngineError, "no list of times"),
        ({"verify_us": [[1, 1, 1, 100.0]]}, EngineError, "no shape with a time"),
        ({"verify_us": [[1, 1, 1, 0, -1.0]]}, EngineError, "no shape with a time"),
        ({"verify_us": [[1, 1.5, 1, 0, 1.0]]}, EngineError, "no shape with a time"),
        ({"draft_us": [[1, 0, "fast"]]}, EngineError, "no shape with a time"),
        ({"token_sizes": [4, 2]}, EngineError, "do not ascend"),
        ({"token_sizes": [0]}, EngineError, "no list of whole numbers"),
        ({"num_threads": None}, EngineError, "'num_threads' must be an integer"),
    ],
)
def test_read_bad_table_says_what_to_do(
    directory: EngineDirectory, change: dict[str, Any], error: type[EngineError], message: str
) -> None:
    path = write_cost_table(directory, STORED)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=message) as caught:
        read_cost_table(directory)
    assert "again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_broken_json_says_what_to_do(directory: EngineDirectory) -> None:
    write_cost_table(directory, STORED).write_text('{"schema"')
    with pytest.raises(EngineError, match="cannot be read .* run trtllm-dspark profile again"):
        read_cost_table(directory)


def test_failed_write_keeps_the_old_table(directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_cost_table(directory, STORED)
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(DeviceError, match="No space left on device"):
        write_cost_table(directory, StoredCostTable(STORED.table, "another", 1))
    assert sorted(entry.name for entry in directory.path.iterdir()) == [path.name, "manifest.json"]
    assert path.read_bytes() == before
