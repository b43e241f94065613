"""Whole rounds through the two graphs of a plugin engine, with the little host code that a round needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from helpers.plugin_graph import Arrays, Heads, PluginGraph


@dataclass
class RoundRequest:
    """A request on its way; `slot` is its place in every cache."""

    prompt: np.ndarray
    max_tokens: int
    slot: int
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    first_round: int = 0
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.max_tokens


def _ints(values: object) -> np.ndarray:
    return np.array(values, np.int32)


class PluginRounds:
    """Drives rounds as a runtime does: rows of the draft graph go on as they are, chunks of prompts join them."""

    def __init__(self, directory: Path, heads: Heads, *, terms: tuple[float, float, float] = (0.3, 1.0, 0.0)) -> None:
        # One memory: the drafter's caches are written by both graphs.
        self.caches: Arrays = {}
        self.verify = PluginGraph(directory / "target.onnx", heads, self.caches)
        self.draft = PluginGraph(directory / "drafter.onnx", heads, self.caches)
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in self.draft.inputs}
        self.shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in self.verify.inputs}
        self.gamma, self.table_len = self.shapes["draft_tokens"][1], shapes["step_time_us"][0]
        self.terms = np.array(terms, np.float32)
        self.has_thresholds, self.has_live = "thresholds" in shapes, "live" in shapes
        self.limits = _ints([self.gamma, 0, -1, 0])
        self.calibrated = "inv_temperature" in shapes
        self.verified: list[list[int]] = []

    def generate(self, requests: list[RoundRequest], *, chunk: int = 7) -> list[list[int]]:
        """Run until every request has its tokens; a chunk of a prompt has at most `chunk` tokens."""
        turn = 0
        while not all(request.finished for request in requests):
            present = [r for r in requests if r.first_round <= turn and not r.finished]
            self._round([r for r in present if r.tokens], [r for r in present if not r.tokens], chunk)
            turn += 1
        return [request.tokens for request in requests]

    def _round(self, decoding: list[RoundRequest], prefilling: list[RoundRequest], chunk: int) -> None:
        rows, drafted = self._draft_rows(decoding)
        lengths = [min(chunk, len(r.prompt) - r.num_cached) for r in prefilling]
        for index, (request, length) in enumerate(zip(prefilling, lengths, strict=True)):
            start = request.num_cached
            span = np.arange(start, start + length)
            rows["input_ids"] = np.append(rows["input_ids"], _ints(request.prompt[span]))
            rows["token_position"] = np.append(rows["token_position"], _ints(span))
            rows["token_request"] = np.append(rows["token_request"], _ints([len(decoding) + index] * length))
            rows["cu_tokens"] = np.append(rows["cu_tokens"], _ints([rows["cu_tokens"][-1] + length]))
        # Rows with logits: all of a decoding request, the last of a chunk.
        used = int(rows["cu_tokens"][len(decoding)])
        rows["logit_rows"] = np.append(np.arange(used, dtype=np.int32), rows["cu_tokens"][len(decoding) + 1 :] - 1)
        ends = used + 1 + np.arange(len(prefilling), dtype=np.int32)
        rows["cu_logits"] = np.append(rows["cu_tokens"][: len(decoding) + 1], ends.astype(np.int32))
        requests = decoding + prefilling
        positions = [r.num_cached for r in decoding]
        positions += [r.num_cached + length - 1 for r, length in zip(prefilling, lengths, strict=True)]
        out = self.verify.run(
            rows | self._padded(drafted, len(requests)) | self.sampling(requests) | {"positions": _ints(positions)}
        )
        assert not out["status"].any()
        for row, request in enumerate(requests):
            emitted = out["out_tokens"][row, : out["emitted_len"][row]].tolist()
            if row >= len(decoding):
                request.num_cached += lengths[row - len(decoding)]
                emitted = emitted if request.num_cached == len(request.prompt) else []
            else:
                request.num_cached += len(emitted)
            request.tokens += emitted[: request.max_tokens - len(request.tokens)]

    def _draft_rows(self, decoding: list[RoundRequest]) -> tuple[Arrays, Arrays]:
        if not decoding:
            none = np.zeros(0, np.int32)
            return {"input_ids": none, "token_request": none, "token_position": none, "cu_tokens": _ints([0])}, {}
        inputs = self.sampling(decoding) | {
            "anchors": _ints([r.tokens[-1] for r in decoding]),
            "positions": _ints([r.num_cached for r in decoding]),
            "caps": _ints([min(self.gamma, r.max_tokens - len(r.tokens) - 1) for r in decoding]),
            "limits": self.limits,
            "terms": self.terms,
            "step_time_us": (100 + 4.0 * np.arange(self.table_len)).astype(np.float32),
        }
        if self.has_thresholds:
            inputs["thresholds"] = np.full(len(decoding), self.terms[0], np.float32)
        if self.has_live:
            inputs["live"] = np.ones(len(decoding), np.int32)
        if self.calibrated:
            inputs["inv_temperature"] = np.ones(self.gamma, np.float32)
            inputs["position_bias"] = np.zeros(self.gamma, np.float32)
        drafted = self.draft.run(inputs)
        self.verified.append(drafted["verify_len"].tolist())
        used = int(drafted["cu_tokens"][-1])
        rows = {name: drafted[name][:used] for name in ("token_request", "token_position")}
        return rows | {"input_ids": drafted["token_ids"][:used], "cu_tokens": drafted["cu_tokens"]}, drafted

    def _padded(self, drafted: Arrays, num_requests: int) -> Arrays:
        """What was drafted, with rows of zeros for requests that did not draft."""
        result = {}
        for value in self.verify.inputs:
            if value.name.startswith("draft_") or value.name == "candidates":
                given = drafted.get(value.name)
                dtype = np.float32 if given is None and value.name in ("draft_laws", "draft_logits") else np.int32
                dtype = np.int64 if value.name == "draft_totals" else dtype
                full = np.zeros((num_requests, *self.shapes[value.name][1:]), dtype if given is None else given.dtype)
                if given is not None:
                    full[: len(given)] = given
                result[value.name] = full
        return result

    @staticmethod
    def sampling(requests: list[RoundRequest]) -> Arrays:
        return {
            "page_table": _ints([[r.slot] for r in requests]),
            "temperature": np.array([r.temperature for r in requests], np.float32),
            "top_k": _ints([r.top_k for r in requests]),
            "top_p": np.array([r.top_p for r in requests], np.float32),
            "seed": np.array([r.seed for r in requests], np.int64),
        }
