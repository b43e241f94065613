"""What the target knows of a sequence: its features, and its likeliest tokens where a response stands.

Captured while a prompt is answered (`torch_answer`) or by an engine when a sequence is first needed, and kept in
size-capped caches on disk. An engine gives a token the same bits whatever shares its pass, so a sequence that it
captures again equals the one that was dropped; what was captured while answering cannot be had again bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_dspark.engine.base import Engine, TokenBatch
from trtllm_dspark.errors import DeviceError
from trtllm_dspark.train.responses import Response

logger = logging.getLogger(__name__)

_MIN_PREFIX = 8
"""A common beginning shorter than this is not worth a copy."""
_SCALE = 32768.0


@dataclass(frozen=True, slots=True)
class Captured:
    """One sequence's features and targets; token t of the response is predicted by row t of the targets.

    Attributes:
        features: [L - 1, m d] float16, of every token but the last, which is never a context.
        scales: [L - 1, 1] float32; features times scale are the target's (which exceed float16's range).
        top_ids: [response, K] int32, target ids of the likeliest tokens the drafter can propose, likeliest first.
        top_probs: [response, K] float16, their probabilities out of the whole vocabulary.
    """

    features: NDArray[np.float16]
    scales: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_probs: NDArray[np.float16]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return sum(array.nbytes for array in (self.features, self.scales, self.top_ids, self.top_probs))

    def fits(self, response: Response) -> bool:
        """Whether there is a row for each token that needs one."""
        length = len(response.token_ids)
        return len(self.features) == length - 1 and len(self.top_ids) == length - response.response_start


class Capturer:
    """Runs the target over sequences.

    Args:
        engine: a float or quantised target with features; its slot 1 keeps the sequences' common beginning.
        draft_token_ids: [Vd] target ids the drafter proposes from, or None for all.
        top_k: K.
        prefix: beginning that many sequences share.
    """

    def __init__(
        self, engine: Engine, draft_token_ids: NDArray[np.int64] | None, top_k: int, prefix: Sequence[int] = ()
    ) -> None:
        self._engine = engine
        self._draft_token_ids = None if draft_token_ids is None else torch.from_numpy(np.asarray(draft_token_ids))
        self._top_k = top_k
        self._prefix = tuple(prefix) if len(prefix) >= _MIN_PREFIX and engine.limits.max_batch_size > 1 else ()
        self._prefix_features: NDArray[np.float32] | None = None

    def capture(self, response: Response) -> Captured:
        """Return a sequence's features and targets.

        Raises:
            DeviceError: the engine fails, or the sequence does not fit it.
        """
        ids = np.asarray(response.token_ids[:-1], np.int64)
        first = response.response_start - 1
        done, parts = self._begin(ids, first)
        tops: list[tuple[NDArray[np.int32], NDArray[np.float16]]] = []
        while done < len(ids):
            chunk = ids[done : done + self._engine.limits.max_num_tokens]
            wanted = np.arange(max(0, first - done), len(chunk), dtype=np.int64)
            if wanted.size == 0:
                wanted = np.array([len(chunk) - 1])
            output = self._run(chunk, done, wanted, slot=0)
            parts.append(output.features)
            if done + len(chunk) > first:
                tops.append(likeliest(torch.from_numpy(output.logits), self._draft_token_ids, self._top_k))
            done += len(chunk)
        features, scales = compress(np.concatenate(parts))
        top_ids, top_probs = (np.concatenate(arrays) for arrays in zip(*tops, strict=True))
        captured = Captured(features, scales, top_ids, top_probs)
        assert captured.fits(response)
        return captured

    def _begin(self, ids: NDArray[np.int64], first: int) -> tuple[int, list[NDArray[np.float32]]]:
        """Take over the common beginning where the sequence has it and no target stands in it.

        Args:
            ids: of the sequence.
            first: row of the first target; at least one token is left to run.
        """
        length = len(self._prefix)
        if length == 0 or length > min(first, len(ids) - 1) or tuple(ids[:length]) != self._prefix:
            return 0, []
        if self._prefix_features is None:
            parts = []
            for start in range(0, length, self._engine.limits.max_num_tokens):
                chunk = ids[start : min(start + self._engine.limits.max_num_tokens, length)]
                parts.append(self._run(chunk, start, np.array([len(chunk) - 1]), slot=1).features)
            self._prefix_features = np.concatenate(parts)
        self._engine.copy_slot(1, 0, num_tokens=length, num_context=0)
        return length, [self._prefix_features]

    def _run(self, ids: NDArray[np.int64], start: int, wanted: NDArray[np.int64], *, slot: int):  # type: ignore[no-untyped-def]
        return self._engine.verify(TokenBatch(ids, np.array([len(ids)]), np.array([start]), wanted, first_slot=slot))


def likeliest(
    logits: Tensor, draft_token_ids: Tensor | None, top_k: int
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return ids and probabilities [n, K] of the likeliest tokens that the drafter can propose.

    Args:
        logits: [n, V] float32.
        draft_token_ids: [Vd] int64 target ids, or None for all.
        top_k: K at most.
    """
    total = logits.logsumexp(-1, keepdim=True)
    if draft_token_ids is not None:
        logits = logits.index_select(1, draft_token_ids)
    values, chosen = logits.topk(min(top_k, logits.shape[1]), -1)
    ids = chosen if draft_token_ids is None else draft_token_ids[chosen]
    return ids.numpy().astype(np.int32), (values - total).exp_().numpy().astype(np.float16)


class FeatureCache:
    """Captured sequences in one file each; at the cap the oldest are dropped, or new ones not kept.

    Args:
        directory: created where needed; files of another target or setting are removed, with `drop_oldest` False kept
            and counted.
        max_bytes: cap.
        key: everything that decides what is captured, as plain JSON values.
        drop_oldest: whether a new sequence drops the oldest ones.
        private: whether directory and files are this user's alone (0700, 0600).
    """

    def __init__(
        self, directory: Path, max_bytes: int, key: object, *, drop_oldest: bool = True, private: bool = False
    ) -> None:
        directory.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        self._directory, self._max_bytes, self._drop_oldest = directory, max_bytes, drop_oldest
        self._mode = 0o600 if private else 0o666
        if private:
            # Written by a version that left them open.
            directory.chmod(0o700)
            for path in directory.glob("*.npz"):
                path.chmod(0o600)
        self._key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self._sizes: dict[Path, int] = {}
        self.num_bytes = 0
        for path in sorted(directory.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns):
            size = path.stat().st_size
            if path.name.startswith(self._key):
                self._sizes[path] = size
            elif drop_oldest:
                path.unlink()
                continue
            self.num_bytes += size
        for path in directory.glob("*.part"):
            path.unlink()
        if drop_oldest:
            self._make_room(0)

    def get(self, response: Response) -> Captured | None:
        """Return a sequence, or None where it is not kept."""
        path = self._path(response)
        if path not in self._sizes:
            return None
        try:
            with np.load(path) as arrays:
                found = Captured(arrays["features"], arrays["scales"], arrays["top_ids"], arrays["top_probs"])
            if not found.fits(response):
                # Of a version that began targets behind a common beginning that reached into the response.
                raise ValueError("rows are missing")
            return found
        except FileNotFoundError:
            # Another thread's `put` dropped it.
            return None
        except (EOFError, ValueError, KeyError, BadZipFile):
            # A power cut leaves a file that was never written out.
            logger.warning("%s is damaged; the sequence is captured anew", path)
            return None

    def __contains__(self, response: Response) -> bool:
        return self._path(response) in self._sizes

    def put(self, response: Response, captured: Captured) -> None:
        """Keep a sequence; a sequence larger than the whole cache is not kept.

        Raises:
            DeviceError: the disk is full or fails.
        """
        path = self._path(response)
        self.num_bytes -= self._sizes.pop(path, 0)  # replaced
        if captured.num_bytes > (self._max_bytes if self._drop_oldest else self._max_bytes - self.num_bytes):
            return
        self._make_room(captured.num_bytes)
        part = path.with_suffix(".part")
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, self._mode)
            with os.fdopen(handle, "wb") as stream:
                np.savez(
                    stream,
                    features=captured.features,
                    scales=captured.scales,
                    top_ids=captured.top_ids,
                    top_probs=captured.top_probs,
                )
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DeviceError(
                f"the feature cache {self._directory} cannot be written ({error.strerror}); free space or lower "
                "--feature_cache_gib"
            ) from error
        self.num_bytes += captured.num_bytes
        self._sizes[path] = captured.num_bytes

    def keep_only(self, responses: Sequence[Response]) -> None:
        """Drop every sequence that is not one of these."""
        wanted = {self._path(response) for response in responses}
        for path in [path for path in self._sizes if path not in wanted]:
            path.unlink(missing_ok=True)
            self.num_bytes -= self._sizes.pop(path)

    def _make_room(self, num_bytes: int) -> None:
        """Drop the oldest until so much fits."""
        while self._sizes and self.num_bytes + num_bytes > self._max_bytes:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            self.num_bytes -= self._sizes.pop(oldest)

    def _path(self, response: Response) -> Path:
        facts = [response.response_start, *response.token_ids]
        if response.first_position:
            # Equal answers to other prompts have other features.
            facts += [response.first_position, response.index]
        digest = hashlib.sha256(np.asarray(facts, np.int64).tobytes())
        return self._directory / f"{self._key}.{digest.hexdigest()[:24]}.npz"


def common_prefix(responses: Sequence[Response], num_probed: int = 64) -> tuple[int, ...]:
    """Return the longest beginning that most of the first sequences share, shorter than every prompt among them."""
    probed = [response.token_ids[: response.response_start - 1] for response in responses[:num_probed]]
    if not probed:
        return ()
    heads: dict[tuple[int, ...], int] = {}
    for ids in probed:
        heads[ids[:_MIN_PREFIX]] = heads.get(ids[:_MIN_PREFIX], 0) + 1
    head = max(heads, key=lambda ids: heads[ids])
    alike = [ids for ids in probed if ids[: len(head)] == head]
    length = 0
    for column in zip(*alike, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return alike[0][:length]


def expand(captured: Captured) -> NDArray[np.float32]:
    """Return the features [L - 1, m d] in float32."""
    return captured.features.astype(np.float32) * captured.scales


def compress(features: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Return float16 features and the scale of each row."""
    scales = np.maximum(np.abs(features).max(-1, keepdims=True), 1e-20) / np.float32(_SCALE)
    return (features / scales).astype(np.float16), scales
