"""Where a simulated server's times and limits come from: an engine directory, a file, or an estimate."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import ConfigError, DeviceError, UsageError
from trtllm_dspark.simulate.estimate import (
    GPUS,
    MAX_GAMMA,
    MODELS,
    Assumptions,
    Roofline,
    estimated_table,
    parse_estimate,
)
from trtllm_dspark.simulate.server import Server
from trtllm_dspark.simulate.times import LookupTable
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape
from trtllm_dspark.speculation.cost_table_file import COST_TABLE_FILE, SCHEMA, SCHEMA_VERSION, read_cost_table

LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_draft_len")
BESIDE = ("host_us", "host_request_us", "host_token_us", "ragged_us", "absorb_us")
"""Times of a server beside those of its table; 0 where a file does not say."""
MEMORY_SHARE = 0.9
"""Of the device memory, what weights and caches may fill."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Limits that replace the table's own; None leaves them."""

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_draft_len: int | None = None
    max_queue_size: int | None = None
    host_us: float | None = None

    def apply(self, server: Server) -> Server:
        """Return the server with these limits."""
        return replace(server, **{name: value for name, value in asdict(self).items() if value is not None})


def load_server(text: str, overrides: Overrides) -> Server:
    """Return the server that `--cost_table` names.

    Args:
        text: an engine directory, a cost table file with limits, or GPU:MODEL for an estimate.
        overrides: limits given by hand.

    Raises:
        UsageError: it is none of these.
        EngineError: the engine directory or its table cannot be used.
    """
    path = Path(text)
    if path.is_dir():
        return _from_engine(path, overrides)
    if path.is_file():
        return _from_file(path, overrides)
    if ":" in text:
        return _from_estimate(text, overrides)
    raise UsageError(f"--cost_table {text} is no engine directory, no file and no estimate such as h100:qwen3-8b")


def _from_engine(path: Path, overrides: Overrides) -> Server:
    directory = open_engine_dir(path, verify_hashes=False)
    stored = read_cost_table(directory)
    if stored is None:
        raise UsageError(f"{path} has no {COST_TABLE_FILE}; run trtllm-dspark profile --engine_dir {path}")
    limits = directory.manifest.limits
    server = Server(
        f"{path.name} on {stored.device}, {stored.num_threads} threads",
        LookupTable.of(stored.table),
        estimated=False,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_draft_len=limits.max_draft_len,
    )
    return overrides.apply(server)


def _from_estimate(text: str, overrides: Overrides) -> Server:
    gpu, model, num_gpus = parse_estimate(text)
    roofline = Roofline(gpu, model, Assumptions(num_gpus=num_gpus))
    gamma = overrides.max_draft_len or model.gamma
    if gamma > MAX_GAMMA:
        raise ConfigError(f"an estimate knows at most {MAX_GAMMA} drafts, {gamma} are asked for")
    max_seq_len = overrides.max_seq_len or 4096
    usable = gpu.memory_bytes * MEMORY_SHARE
    slot_bytes = max_seq_len * model.kv_bytes_per_token * (1 + model.draft_layers / model.layers)
    slots = int((usable * num_gpus - roofline.weight_bytes) // slot_bytes)
    if slots < 1:
        # The next power of two: such a number of GPUs shares every layer evenly.
        enough = 1 << (math.ceil((roofline.weight_bytes + slot_bytes) / usable) - 1).bit_length()
        names = (next(key for key in known if known[key] is one) for known, one in ((GPUS, gpu), (MODELS, model)))
        raise ConfigError(
            f"{model.name} does not fit into {num_gpus} x {gpu.name} with {max_seq_len} tokens a request: its weights "
            f"take {roofline.weight_bytes / 1e9:.0f} GB; use more GPUs, as in {enough}x{':'.join(names)}"
        )
    batch = min(slots, overrides.max_batch_size or 256)
    server = Server(
        f"{model.name} on {f'{num_gpus} x ' if num_gpus > 1 else ''}{gpu.name}",
        LookupTable.of(estimated_table(roofline, max_requests=batch, gamma=gamma)),
        estimated=True,
        max_batch_size=batch,
        max_seq_len=max_seq_len,
        max_num_tokens=max(2048, batch * (gamma + 1)),
        max_draft_len=gamma,
        shared_prefill=True,
        drafters={
            f"mtp{k}": LookupTable.of(estimated_table(roofline, max_requests=batch, gamma=k, mtp=k))
            for k in range(1, MAX_GAMMA + 1)
        },
    )
    return replace(overrides, max_batch_size=None).apply(server)


def write_server(path: Path, server: Server) -> None:
    """Write a server's times and limits as a cost table file; an estimate says in it that it is one.

    Raises:
        DeviceError: the file cannot be written.
    """
    content = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "estimated": server.estimated,
        "device": server.name,
        "num_threads": 0,
        "limits": {name: getattr(server, name) for name in (*LIMITS, "max_queue_size")},
        "shared_prefill": server.shared_prefill,
        **{name: getattr(server, name) for name in BESIDE},
        "prefill_us": server.prefill_us,
        **_times(server.table),
        "drafters": {name: _times(table) for name, table in server.drafters.items()},
    }
    try:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"{path} cannot be written ({error.strerror})") from error


def _times(table: CostTable) -> dict[str, Any]:
    return {
        "token_sizes": list(table.token_sizes),
        "verify_us": [[*shape, round(us, 2)] for shape, us in sorted(table.verify_us.items())],
        "draft_us": [[*shape, round(us, 2)] for shape, us in sorted(table.draft_us.items())],
    }


def _from_file(path: Path, overrides: Overrides) -> Server:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("schema") != SCHEMA or raw.get("schema_version") != SCHEMA_VERSION:
            raise UsageError(f"{path} is no cost table of schema {SCHEMA} version {SCHEMA_VERSION}")
        given = raw.get("limits")
        limits: dict[str, Any] = dict(_asked(path, overrides)) if given is None else {n: int(given[n]) for n in LIMITS}
        # Files of before these were written have none of them.
        if given is not None and "max_queue_size" in given:
            limits["max_queue_size"] = int(given["max_queue_size"])
        beside: dict[str, Any] = {name: _micros(raw[name], least=0.0) for name in BESIDE if name in raw}
        if raw.get("prefill_us") is not None:
            first, rest = raw["prefill_us"]
            beside["prefill_us"] = _micros(first, least=0.0), _micros(rest, least=0.0)
        server = Server(
            str(raw["device"]),
            _table(raw),
            # What does not say that it was measured was not.
            estimated=bool(raw.get("estimated", "engine_hash" not in raw)),
            shared_prefill=bool(raw.get("shared_prefill", False)),
            drafters={name: _table(times) for name, times in raw.get("drafters", {}).items()},
            **limits,
            **beside,
        )
    except OSError as error:
        raise UsageError(f"cost table {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cost table {path} is malformed ({error}); see docs/file_formats.md") from error
    return overrides.apply(server)


def _asked(path: Path, overrides: Overrides) -> dict[str, int]:
    limits = {name: getattr(overrides, name) for name in LIMITS}
    if None in limits.values():
        raise UsageError(
            f"{path} holds no limits; give {', '.join(f'--{name}' for name in LIMITS)}, or the engine directory"
        )
    return limits


def _table(raw: Mapping[str, Any]) -> LookupTable:
    verify = {VerifyShape(*map(int, row[:-1])): _micros(row[-1]) for row in raw["verify_us"]}
    draft = {DraftShape(*map(int, row[:-1])): _micros(row[-1]) for row in raw["draft_us"]}
    if not verify:
        raise ValueError("it has no verify times")
    sizes = raw.get("token_sizes", [])
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes != sorted(set(sizes)):
        raise ValueError("its token sizes are no ascending whole numbers")
    return LookupTable.of(CostTable(verify, draft, tuple(sizes)))


def _micros(value: object, *, least: float = 1e-9) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise ValueError(f"{value!r} is no time")
    return float(value)
