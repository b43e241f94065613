"""What a build tells its caller: progress while it runs, a report at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from trtllm_dspark.engine_dir import Manifest

Progress = Callable[[str, float], None]
"""Called with the step's name and the finished fraction of the whole build, 0 to 1."""


@dataclass(frozen=True, slots=True)
class VerifyErrors:
    """Relative root-mean-square error of an engine's outputs against the reference; None without a drafter."""

    logits: float
    features: float | None = None
    draft_logits: float | None = None


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Outcome of a finished build.

    Attributes:
        output_dir: the engine directory.
        manifest: what was written.
        seconds: wall time of every step, in order.
        errors: the finished engine against the reference; None where it was compiled and not executed.
        peak_memory_bytes: largest resident size of the process so far.
        kv_cache_bytes: memory that the engine's caches take at run time, target and drafter together.
    """

    output_dir: Path
    manifest: Manifest
    seconds: dict[str, float]
    errors: VerifyErrors | None
    peak_memory_bytes: int
    kv_cache_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "output_dir": str(self.output_dir),
            "engine_hash": self.manifest.engine_hash,
            "files": {entry.name: entry.size for entry in self.manifest.files},
            "errors": None if self.errors is None else asdict(self.errors),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peak_memory_bytes": self.peak_memory_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
        }


@dataclass(slots=True)
class StepClock:
    """Times the steps of a build and passes them on as progress; `shares` are their expected parts of the whole.

    Steps may overlap, each in a thread of its own.
    """

    shares: dict[str, float]
    progress: Progress | None
    seconds: dict[str, float] = field(default_factory=dict)
    _running: dict[str, float] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def step(self, name: str, num_items: int = 1) -> Iterator[Callable[[str], None]]:
        """Time one step and yield a function to call after each of its items."""
        done = 0

        def advance(_: str) -> None:
            nonlocal done
            done += 1
            self._tell(name, min(1.0, done / num_items))

        self._tell(name, 0.0)
        start = time.monotonic()
        yield advance
        seconds = time.monotonic() - start
        with self._lock:
            self.seconds[name] = seconds
        self._tell(name, 1.0)

    def _tell(self, name: str, fraction: float) -> None:
        with self._lock:
            self._running[name] = fraction
            if self.progress is not None:
                done = sum(self.shares[step] * part for step, part in self._running.items())
                self.progress(name, done / sum(self.shares.values()))
