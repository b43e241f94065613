"""`cost_table.json` of an engine directory (docs/file_formats.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.engine_dir import EngineDirectory, read_side_table, write_side_table
from trtllm_dspark.errors import EngineError
from trtllm_dspark.speculation.cost_table import CostTable, DraftShape, VerifyShape

COST_TABLE_FILE = "cost_table.json"
SCHEMA = "trtllm_dspark.cost_table"
SCHEMA_VERSION = 1
REMEDY = "run trtllm-dspark profile again, or delete the file"


@dataclass(frozen=True)
class StoredCostTable:
    """A cost table and what it was measured on.

    Attributes:
        table: the times.
        device: what the passes ran on, in words.
        num_threads: CPU threads of a pass.
        sm_clock_mhz: SM clock of the GPU while it was measured; None on a CPU.
        device_rounds: whole rounds were timed on the device, which decides them; else passes that the host waits for.
    """

    table: CostTable
    device: str
    num_threads: int
    sm_clock_mhz: int | None = None
    device_rounds: bool = False


def write_cost_table(directory: EngineDirectory, stored: StoredCostTable) -> Path:
    """Write the table into the engine directory and return its path.

    Raises:
        DeviceError: the directory cannot be written or the disk is full.
    """
    content = {
        "device": stored.device,
        "num_threads": stored.num_threads,
        "sm_clock_mhz": stored.sm_clock_mhz,
        "device_rounds": stored.device_rounds,
        "token_sizes": list(stored.table.token_sizes),
        "verify_us": [[*shape, round(us, 2)] for shape, us in sorted(stored.table.verify_us.items())],
        "draft_us": [[*shape, round(us, 2)] for shape, us in sorted(stored.table.draft_us.items())],
    }
    return write_side_table(directory, COST_TABLE_FILE, schema=SCHEMA, version=SCHEMA_VERSION, content=content)


def read_cost_table(directory: EngineDirectory) -> StoredCostTable | None:
    """Read the engine's table; None where it has none.

    Raises:
        EngineError: the file is damaged or of another version.
        EngineMismatch: it was measured on another engine.
    """
    fields = read_side_table(directory, COST_TABLE_FILE, schema=SCHEMA, version=SCHEMA_VERSION, remedy=REMEDY)
    if fields is None:
        return None
    verify = {VerifyShape(*key): us for key, us in _rows(fields.raw.get("verify_us"), 4, fields.where)}
    draft = {DraftShape(*key): us for key, us in _rows(fields.raw.get("draft_us"), 2, fields.where)}
    if not verify:
        raise EngineError(f"{fields.where} holds no verify times; {REMEDY}")
    sizes = _sizes(fields.raw.get("token_sizes", []), fields.where)
    clock = fields.raw.get("sm_clock_mhz")
    return StoredCostTable(
        CostTable(verify, draft, sizes),
        fields.string("device"),
        fields.integer("num_threads"),
        None if clock is None else fields.integer("sm_clock_mhz"),
        # Files of before the field timed passes.
        "device_rounds" in fields.raw and fields.boolean("device_rounds"),
    )


def _sizes(values: object, where: str) -> tuple[int, ...]:
    """Check ascending sizes."""
    if not isinstance(values, list) or not all(isinstance(value, int) and value > 0 for value in values):
        raise EngineError(f"{where} has token sizes that are no list of whole numbers; {REMEDY}")
    if values != sorted(set(values)):
        raise EngineError(f"{where} has token sizes that do not ascend; {REMEDY}")
    return tuple(values)


def _rows(rows: object, num_keys: int, where: str) -> list[tuple[tuple[int, ...], float]]:
    """Check [keys..., microseconds] rows."""
    if not isinstance(rows, list):
        raise EngineError(f"{where} has no list of times; {REMEDY}")
    checked = []
    for row in rows:
        numbers = isinstance(row, list) and len(row) == num_keys + 1
        if not numbers or not all(isinstance(value, int) and value >= 0 for value in row[:-1]) or not _time(row[-1]):
            raise EngineError(f"{where} has a row that is no shape with a time: {row!r}; {REMEDY}")
        checked.append((tuple(row[:-1]), float(row[-1])))
    return checked


def _time(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0
