"""Record a part of the live requests beside the rounds: copies on the session's thread, all work on another one."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.engine_dir import Manifest
from trtllm_dspark.errors import UsageError
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.outputs import RequestOutput
from trtllm_dspark.runtime.round import Choice, DecodePass
from trtllm_dspark.traffic.layout import KEY_NAME, PROMPT_MODES, TrafficInfo, TrafficRecord, to_bfloat16
from trtllm_dspark.traffic.shards import ShardWriter, write_private

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_NICENESS = 10
_PROMPT_HASH_BYTES = 16
_FRAME_BYTES = 64 << 10
"""More than a shard of one record takes beside the record's arrays."""


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """What is recorded.

    Attributes:
        directory: of the shards.
        max_bytes: of all shards.
        share: fraction of the requests.
        prompts: `hash` or `drop`.
        top_k: likeliest tokens kept of every distribution.
        shard_bytes: a shard is written when it is so large, or a quarter of `max_bytes`: the oldest go shard by shard,
        flush_s: or so old.
        max_waiting_bytes: copies that wait for the worker; a request that would exceed them is not recorded.
    """

    directory: Path
    max_bytes: int
    share: float = 0.1
    prompts: str = "hash"
    top_k: int = 32
    shard_bytes: int = 32 << 20
    flush_s: float = 300.0
    max_waiting_bytes: int = 256 << 20

    @property
    def full_shard_bytes(self) -> int:
        """Size from which a shard is written."""
        return min(self.shard_bytes, self.max_bytes // 4)

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the flag.
        """
        if self.max_bytes < 1 << 20:
            raise UsageError("--collect_max_gb must leave room for a megabyte at least")
        if not 0.0 < self.share <= 1.0:
            raise UsageError(f"--collect_share is {self.share}; give a fraction above 0 and at most 1")
        if self.prompts not in PROMPT_MODES:
            raise UsageError(f"--collect_prompts is {self.prompts!r}; use {' or '.join(PROMPT_MODES)}")


@dataclass(eq=False, slots=True)
class _Pending:
    """A request that is being recorded; the lists belong to the worker, the rest to the session's thread."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    dropped: bool = False
    features: list[NDArray[np.uint16]] = field(default_factory=list)
    tops: list[tuple[NDArray[np.int32], NDArray[np.float16]]] = field(default_factory=list)


class TrafficRecorder:
    """A `runtime.listener.RoundListener` that fills a directory.

    Args:
        manifest: of the engine.
        options: see `CollectOptions`.
        count: told "recorded" or "dropped" for every sampled request.
        size: told the bytes of all shards after each write.

    Raises:
        UsageError: the directory cannot be used.
        EngineMismatch: it holds records of another target.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: CollectOptions,
        *,
        count: Callable[[str], None] = lambda outcome: None,
        size: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        options.check()
        self._options = options
        self._info = TrafficInfo.of_engine(manifest, top_k=options.top_k, prompts=options.prompts)
        self._writer = ShardWriter(options.directory, self._info, max_bytes=options.max_bytes)
        self._key = _hash_key(options.directory) if options.prompts == "hash" else b""
        self._count, self._size = count, size
        self._random = random.Random()
        self._pending: dict[ActiveRequest, _Pending | None] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()
        self._finished: list[TrafficRecord] = []
        self._finished_bytes = 0
        self._oldest = 0.0
        self._failing = False
        self._said_too_large = False
        size(self._writer.total_bytes)
        self._worker = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._worker.start()

    def listener(self, manifest: Manifest) -> _EngineListener | None:
        """Return what a session of this engine reports to; None where its records would not fit the directory."""
        info = TrafficInfo.of_engine(manifest, top_k=self._options.top_k, prompts=self._options.prompts)
        return _EngineListener(self, manifest.engine_hash) if info == self._info else None

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Write what is complete and let another server use the directory; what takes longer is lost."""
        self._queue.put(None)
        self._worker.join(timeout_s)
        if self._worker.is_alive():
            logger.warning("traffic records of the last requests are lost: the worker is %.0f s behind", timeout_s)
        else:
            self._writer.close()

    # The session's thread.

    def _see_round(self, decode: DecodePass, chosen: Sequence[tuple[ActiveRequest, Choice]]) -> None:
        start = 0
        for (request, choice), verified in zip(chosen, decode.verify_len.tolist(), strict=True):
            pending, count = self._pending.get(request), len(choice.tokens)
            if pending is not None and not pending.dropped and count:
                pending.rounds.append((request.num_output - 1, verified, count - 1))
                rows = slice(start, start + count)
                self._hand_over(pending, decode.output.features[rows].copy(), decode.output.logits[rows].copy())
            start += 1 + verified

    def _see_output(self, request: ActiveRequest, output: RequestOutput, engine_hash: str) -> None:
        if request not in self._pending:
            self._pending[request] = _Pending() if self._random.random() < self._options.share else None
        pending = self._pending[request]
        if pending is not None:
            pending.tokens.extend(output.new_token_ids)
        if not output.finished:
            return
        del self._pending[request]
        if pending is None:
            return
        if pending.dropped:
            self._count("dropped")
        elif output.finish_reason in ("stop", "length") and len(pending.tokens) > 1:
            meta = self._describe(request, output, engine_hash)
            self._queue.put(lambda: self._finish(pending, len(request.prompt), meta))

    def _hand_over(self, pending: _Pending, features: Floats, logits: Floats) -> None:
        size = features.nbytes + logits.nbytes
        with self._waiting_lock:
            if self._waiting_bytes + size > self._options.max_waiting_bytes:
                pending.dropped = True
                return
            self._waiting_bytes += size
        self._queue.put(lambda: self._take_rows(pending, features, logits, size))

    def _describe(self, request: ActiveRequest, output: RequestOutput, engine_hash: str) -> dict[str, Any]:
        params = request.params
        meta: dict[str, Any] = {
            "num_prompt_tokens": len(request.prompt),
            "num_output_tokens": request.num_output,
            "finish_reason": output.finish_reason,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "engine_hash": engine_hash,
            "hour": int(time.time()) // 3600 * 3600,
        }
        if self._key:
            digest = hmac.digest(self._key, request.prompt.astype("<i4").tobytes(), hashlib.sha256)
            meta["prompt_hash"] = digest[:_PROMPT_HASH_BYTES].hex()
        return meta

    # The worker's thread.

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            try:
                work = self._queue.get(timeout=1.0)
            except queue.Empty:
                work = _nothing
            try:
                if work is not None:
                    work()
                self._flush(force=work is None)
            except Exception:
                logger.exception("a traffic record could not be made")
            if work is None:
                return

    def _take_rows(self, pending: _Pending, features: Floats, logits: Floats, size: int) -> None:
        try:
            pending.features.append(to_bfloat16(features))
            pending.tops.append(likeliest(logits, self._info.top_k))
        finally:
            with self._waiting_lock:
                self._waiting_bytes -= size

    def _finish(self, pending: _Pending, start_position: int, meta: dict[str, Any]) -> None:
        rows = len(pending.tokens) - 1
        features = np.concatenate(pending.features) if pending.features else np.zeros((0, 0), np.uint16)
        if len(features) < rows:
            self._count("dropped")
            return
        # Rows behind a stop that cut a block are left out, and so are rounds that begin there.
        record = TrafficRecord(
            token_ids=np.array(pending.tokens, np.int32),
            start_position=start_position,
            features=features[:rows],
            top_ids=np.concatenate([ids for ids, _ in pending.tops])[:rows],
            top_probs=np.concatenate([probs for _, probs in pending.tops])[:rows],
            rounds=np.array(pending.rounds, np.int32).reshape(-1, 3),
            meta=meta,
        )
        if record.num_bytes > self._options.max_bytes - _FRAME_BYTES:
            self._count("dropped")
            if not self._said_too_large:
                self._said_too_large = True
                logger.warning("a record of %d bytes is lost: it exceeds --collect_max_gb", record.num_bytes)
            return
        if self._finished and self._finished_bytes + record.num_bytes > self._options.full_shard_bytes:
            # Else a large record would make a shard of more than the records may take together.
            self._flush(force=True)
        if not self._finished:
            self._oldest = time.monotonic()
        self._finished.append(record)
        self._finished_bytes += record.num_bytes

    def _flush(self, *, force: bool) -> None:
        options = self._options
        old = time.monotonic() - self._oldest > options.flush_s
        if not self._finished or not (force or old or self._finished_bytes >= options.full_shard_bytes):
            return
        records, self._finished, self._finished_bytes = self._finished, [], 0
        try:
            self._writer.write(records)
            outcome, self._failing = "recorded", False
        except Exception as error:
            # Whatever it is, records of later requests may be written again.
            if not self._failing:
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                logger.warning("traffic records are lost: %s cannot be written (%s)", options.directory, reason)
            outcome, self._failing = "dropped", True
        for _ in records:
            self._count(outcome)
        self._size(self._writer.total_bytes)


class _EngineListener:
    """A recorder as one engine's session sees it."""

    def __init__(self, recorder: TrafficRecorder, engine_hash: str) -> None:
        self._recorder = recorder
        self._engine_hash = engine_hash

    def round(self, decode: DecodePass, chosen: Sequence[tuple[ActiveRequest, Choice]]) -> None:
        """Copy the rows of recorded requests."""
        self._recorder._see_round(decode, chosen)

    def committed(self, request: ActiveRequest, output: RequestOutput) -> None:
        """Decide at its first token whether a request is recorded; finish it at its last one."""
        self._recorder._see_output(request, output, self._engine_hash)


def _nothing() -> None:
    """Work of a second in which there was none."""


def likeliest(logits: Floats, count: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return ids and probabilities of the `count` likeliest tokens of each row, likeliest first.

    Args:
        logits: [n, V] float32.
        count: K.
    """
    largest = logits.max(-1, keepdims=True)
    total = np.exp(logits - largest).sum(-1, keepdims=True)
    chosen = np.argpartition(logits, -count, -1)[:, -count:]
    values = np.take_along_axis(logits, chosen, -1)
    order = np.argsort(-values, -1, kind="stable")
    chosen, values = np.take_along_axis(chosen, order, -1), np.take_along_axis(values, order, -1)
    return chosen.astype(np.int32), (np.exp(values - largest) / total).astype(np.float16)


def _hash_key(directory: Path) -> bytes:
    path = directory / KEY_NAME
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()
