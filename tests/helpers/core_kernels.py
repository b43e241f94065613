"""The kernels of a round, carried out by the core on a recording device's memory: quick, where the sources are not the
point. `tests/simt` shows that the kernels' sources give the core's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine._packing import pack_rows
from trtllm_dspark.plugins import ELEMENT_TYPES

Params = dict[str, Any]
_ACCEPTANCES = ("greedy", "rejection", "coupled")
_MODES = ("fixed", "threshold", "early_stop", "stale_topk")


class CoreKernels:
    """Launches by name; `memory(address, shape, dtype)` returns a writable view of the device's memory.

    Args:
        heads: of the drafter.
        memory: see above.
    """

    def __init__(self, heads: Any, memory: Callable[[int, tuple[int, ...], Any], np.ndarray]) -> None:
        self._heads, self._memory = heads, memory
        self._drafts: dict[int, _core.Draft] = {}

    def workspace_bytes(self, op: str, **params: int | float | None) -> int:
        return 64

    def launch(self, op: str, **params: Any) -> None:
        getattr(self, f"_{op}")(params)

    def _array(self, p: Params, name: str, *shape: int, dtype: Any = np.int32) -> np.ndarray:
        return self._memory(p[name], shape, dtype)

    def _sampling(self, p: Params) -> _core.Sampling:
        rows = p["num_requests"]
        return _core.Sampling(
            self._array(p, "temperature", rows, dtype=np.float32).copy(),
            self._array(p, "seed", rows, dtype=np.int64).view(np.uint64).copy(),
            self._array(p, "top_k", rows).astype(np.int64),
            self._array(p, "top_p", rows, dtype=np.float32).copy(),
        )

    def _round_begin(self, p: Params) -> None:
        rows, width = p["num_requests"], p["block_size"]
        self._array(p, "starts", rows, dtype=np.int64)[:] = self._array(p, "positions", rows)
        if width:
            ids = self._array(p, "block_ids", rows, width, dtype=np.int64)
            ids[:] = p["mask_token"]
            ids[:, 0] = self._array(p, "anchors", rows)

    def _live(self, p: Params) -> np.ndarray:
        rows = p["num_requests"]
        return (np.arange(rows) < self._array(p, "active", 1)[0]) & (self._array(p, "remaining", rows) > 0)

    def _round_caps(self, p: Params) -> None:
        rows = p["num_requests"]
        usable = self._live(p) & (self._array(p, "draft_status", rows) == 0)
        most = np.minimum(self._array(p, "max_drafts", rows), self._array(p, "remaining", rows) - 1)
        self._array(p, "caps", rows)[:] = np.where(usable, np.maximum(most, 0), 0)
        self._array(p, "live", rows)[:] = self._live(p)

    def _markov_draft(self, p: Params) -> None:
        assert p["logits_type"] == p["hidden_type"] == ELEMENT_TYPES["float32"]
        rows, gamma = p["num_requests"], p["draft_len"]
        base = self._array(p, "base_logits", rows, gamma, p["draft_vocab"], dtype=np.float32)
        hidden = None
        if p["hidden_size"]:
            hidden = self._array(p, "hidden", rows, gamma, p["hidden_size"], dtype=np.float32).copy()
        draft = _core.draft_chain(
            self._heads,
            base.copy(),
            self._array(p, "anchors", rows).astype(np.int64),
            self._array(p, "positions", rows).astype(np.int64),
            self._sampling(p),
            hidden=hidden,
            acceptance=_ACCEPTANCES[p["acceptance"]],  # type: ignore[arg-type]
        )
        self._array(p, "draft_tokens", rows, gamma)[:] = draft.tokens
        self._array(p, "status", rows)[:] = draft.status
        self._drafts[p["draft_tokens"]] = draft

    def _confidence_schedule(self, p: Params) -> None:
        rows, gamma = p["num_requests"], p["draft_len"]
        tokens = self._array(p, "draft_tokens", rows, gamma).astype(np.int64)
        anchors = self._array(p, "anchors", rows).astype(np.int64)
        caps = self._array(p, "caps", rows).astype(np.int64)
        limits, terms = self._array(p, "limits", 4).tolist(), self._array(p, "terms", 3, dtype=np.float32).tolist()
        mode, confidence = _MODES[p["mode"]], None
        if p["hidden_weight"] is not None:
            confidence = _core.confidence(
                self._heads,
                self._array(p, "hidden", rows, gamma, p["hidden_size"], dtype=np.float32).copy(),
                anchors,
                tokens,
                temperature=np.float32(1) / self._array(p, "inv_temperature", gamma, dtype=np.float32),
                bias=self._array(p, "position_bias", gamma, dtype=np.float32).copy(),
            )
            self._array(p, "confidence", rows, gamma, dtype=np.float32)[:] = confidence
        table = self._array(p, "step_time_us", p["table_len"], dtype=np.float32).copy()
        live = np.ones(rows, bool) if p["live"] is None else self._array(p, "live", rows) != 0
        lengths, _ = schedule_live(
            mode,
            confidence if mode != "fixed" else None,
            caps,
            live,
            max_draft_len=gamma,
            extra_tokens=limits[3],
            draft_len=limits[0] if mode == "fixed" else None,
            threshold=0.0 if mode == "threshold" else None,
            step_time_us=table if mode == "early_stop" else None,
            budget=limits[1] if mode == "stale_topk" else None,
            token_budget=limits[2] if limits[2] >= 0 else None,
            load_scale=terms[1],
            fixed_time_us=terms[2],
        )
        if mode == "threshold" and confidence is not None:
            # No budget here: rounds of these tests never need one.
            assert caps.sum() <= limits[2]
            own = self._array(p, "thresholds", rows, dtype=np.float32).tolist()
            lengths = threshold_lens(confidence, caps, own)
        positions = self._array(p, "positions", rows).astype(np.int64)
        packed = _core.pack_tokens(anchors, tokens, lengths, positions, pad_to=p["num_rows"])
        self._array(p, "verify_len", rows)[:] = lengths
        self._array(p, "cu_tokens", rows + 1)[:] = packed.cu_tokens
        for name in ("token_ids", "token_request", "token_position"):
            self._array(p, name, p["num_rows"])[:] = getattr(packed, name)

    def _round_rows(self, p: Params) -> None:
        rows, tokens, width = p["num_requests"], p["num_tokens"], p["row_len"]
        cu_tokens = self._array(p, "cu_tokens", rows + 1).astype(np.int64)
        used = int(cu_tokens[-1])
        assert used <= tokens
        lengths = np.diff(cu_tokens)
        assert lengths.max() <= width
        packed = pack_rows(lengths, np.zeros(rows, np.int64), min_width=width)
        for name, source in (("input_ids", "token_ids"), ("positions", "token_position")):
            target = self._array(p, name, tokens, dtype=np.int64)
            target[:] = 0
            target[:used] = self._array(p, source, used)
        pack = self._array(p, "pack_index", tokens, dtype=np.int64)
        pack[:] = 0
        pack[:used] = packed.pack_index
        self._array(p, "pad_index", rows, width, dtype=np.int64)[:] = packed.pad_index

    def _round_ban(self, p: Params) -> None:
        rows = p["num_requests"]
        cu_tokens, positions = self._array(p, "cu_tokens", rows + 1), self._array(p, "positions", rows)
        logits = self._array(p, "logits", p["num_tokens"], p["vocab"], dtype=np.float32)
        banned = self._array(p, "banned", rows, p["max_banned"])
        for row, until in enumerate(self._array(p, "ban_until", rows).tolist()):
            length = cu_tokens[row + 1] - cu_tokens[row]
            count = min(max(0, until - positions[row] - 1), length)
            ids = banned[row][banned[row] >= 0]
            logits[cu_tokens[row] : cu_tokens[row] + count, ids] = -np.inf

    def _ragged_accept(self, p: Params) -> None:
        rows, gamma = p["num_requests"], p["draft_len"]
        cu_tokens = self._array(p, "cu_tokens", rows + 1).astype(np.int64)
        logits = self._array(p, "target_logits", int(cu_tokens[-1]), p["logits_stride"], dtype=np.float32)
        lengths = np.diff(cu_tokens) - 1
        draft = self._drafts.get(p["draft_tokens"]) if lengths.any() else None
        accepted = _core.accept_ragged(
            np.ascontiguousarray(logits),
            lengths,
            self._array(p, "positions", rows).astype(np.int64),
            self._sampling(p),
            draft=draft,
            acceptance=_ACCEPTANCES[p["acceptance"]],  # type: ignore[arg-type]
        )
        tokens = self._array(p, "out_tokens", rows, gamma + 1)
        tokens[:] = -1
        tokens[:, : accepted.tokens.shape[1]] = accepted.tokens
        self._array(p, "emitted_len", rows)[:] = accepted.emitted_len
        self._array(p, "status", rows)[:] = accepted.status

    def _round_commit(self, p: Params) -> None:
        rows, gamma = p["num_requests"], p["draft_len"]
        emitted = self._array(p, "emitted_len", rows)
        out = self._array(p, "out_tokens", rows, gamma + 1)
        for row in np.flatnonzero(self._live(p) & (emitted > 0)).tolist():
            self._array(p, "anchors", rows)[row] = out[row, emitted[row] - 1]
            self._array(p, "positions", rows)[row] += emitted[row]
            self._array(p, "remaining", rows)[row] -= emitted[row]


def schedule_live(
    mode: str,
    confidence: np.ndarray | None,
    caps: np.ndarray,
    live: np.ndarray,
    *,
    max_draft_len: int,
    extra_tokens: int = 0,
    **options: Any,
) -> tuple[np.ndarray, _core.Schedule]:
    """The schedule of the live rows alone, and every row's length: those that ride along are tokens of others."""
    assert not caps[~live].any()
    schedule = _core.schedule_prefixes(
        mode,  # type: ignore[arg-type]
        num_requests=int(live.sum()),
        max_draft_len=max_draft_len,
        confidence=None if confidence is None else confidence[live],
        caps=caps[live],
        extra_tokens=extra_tokens + int((~live).sum()),
        **options,
    )
    lengths = np.zeros(len(caps), np.int64)
    lengths[live] = schedule.verify_len
    return lengths, schedule


def threshold_lens(confidence: np.ndarray, caps: np.ndarray, thresholds: list[float]) -> np.ndarray:
    """Verify lengths [R] under a threshold for each request, no budget."""
    rows = enumerate(thresholds)
    return np.array([_alone(confidence[row : row + 1], caps[row : row + 1], own) for row, own in rows], np.int64)


def _alone(confidence: np.ndarray, caps: np.ndarray, threshold: float) -> int:
    """Verify length of one request under its own threshold."""
    if threshold > 1:
        return 0
    schedule = _core.schedule_prefixes(
        "threshold",
        num_requests=1,
        max_draft_len=confidence.shape[1],
        confidence=np.ascontiguousarray(confidence),
        caps=caps,
        threshold=threshold,
    )
    return int(schedule.verify_len[0])
