"""DsparkMarkovDraft, DsparkConfidenceSchedule and DsparkRaggedAccept computed by the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.core_kernels import schedule_live, threshold_lens
from trtllm_dspark import _core

Arrays = dict[str, np.ndarray]
HEAD_KINDS = ("none", "vanilla", "gated", "rnn")
ACCEPTANCES = ("greedy", "rejection", "coupled")
MODES = ("fixed", "threshold", "early_stop", "stale_topk")


def _long(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.int64)


def _sampling(inputs: Arrays) -> _core.Sampling:
    return _core.Sampling(
        inputs["temperature"], inputs["seed"].view(np.uint64), _long(inputs["top_k"]), inputs["top_p"]
    )


class CoreHeads:
    """The three operations; a draft stays with the object, `draft_totals` carries the number it is kept under."""

    def __init__(self) -> None:
        self._drafts: list[_core.Draft] = []

    def __call__(self, op: str, fields: dict[str, Any], inputs: Arrays) -> Arrays:
        run: Callable[[dict[str, Any], Arrays], Arrays] = {
            "DsparkMarkovDraft": self._draft,
            "DsparkConfidenceSchedule": self._schedule,
            "DsparkRaggedAccept": self._accept,
        }[op]
        return run(fields, inputs)

    def _draft(self, fields: dict[str, Any], inputs: Arrays) -> Arrays:
        weights: Arrays = {}
        for name in ("w1", "w2", "w1_scale", "w2_scale", "gate_weight", "gate_bias", "rnn_weight", "rnn_bias"):
            if name in inputs:
                weights[name] = inputs[name]
        logits = inputs["base_logits"]
        heads = _core.DraftHeads(
            vocab_size=fields["vocab"],
            draft_vocab_size=logits.shape[2],
            kind=HEAD_KINDS[fields["head_kind"]],
            d2t=_long(inputs["target_of_draft"]) if "target_of_draft" in inputs else None,
            **weights,
        )
        draft = _core.draft_chain(
            heads,
            logits,
            _long(inputs["anchors"]),
            _long(inputs["positions"]),
            _sampling(inputs),
            hidden=inputs.get("hidden"),
            acceptance=ACCEPTANCES[fields["acceptance"]],
            num_candidates=fields["num_candidates"],
        )
        self._drafts.append(draft)
        tokens = draft.tokens.astype(np.int32)
        shape, width = tokens.shape, fields["num_candidates"] or logits.shape[2]
        return {
            "draft_tokens": tokens,
            "draft_status": draft.status.astype(np.int32),
            "draft_entries": np.zeros(shape, np.int32),
            "draft_laws": np.zeros((*shape, 4), np.float32),
            "draft_totals": np.full(shape, len(self._drafts) - 1, np.int64),
            "draft_logits": np.zeros((*shape, width), np.float32),
            "candidates": np.zeros((*shape, fields["num_candidates"]), np.int32),
        }

    def _schedule(self, fields: dict[str, Any], inputs: Arrays) -> Arrays:
        tokens, anchors = _long(inputs["draft_tokens"]), _long(inputs["anchors"])
        num_requests, gamma = tokens.shape
        draft_len, budget, token_budget, extra = inputs["limits"].tolist()
        _, load_scale, fixed_time = inputs["terms"].tolist()
        confidence = self.confidence(inputs, anchors, tokens) if fields["confidence_head"] else None
        mode, caps = MODES[fields["schedule_mode"]], _long(inputs["caps"])
        times = inputs["step_time_us"]
        admitted = int(np.minimum(caps, gamma).sum())
        admitted = admitted if token_budget < 0 else min(admitted, token_budget)
        live = inputs["live"] != 0 if "live" in inputs else np.ones(num_requests, bool)
        lengths, schedule = schedule_live(
            mode,
            None if mode == "fixed" else confidence,
            caps,
            live,
            max_draft_len=gamma,
            draft_len=draft_len if mode == "fixed" else None,
            threshold=0.0 if mode == "threshold" else None,
            budget=budget if mode == "stale_topk" else None,
            token_budget=None if token_budget < 0 else token_budget,
            step_time_us=times if mode == "early_stop" and num_requests + extra + admitted < len(times) else None,
            load_scale=load_scale,
            extra_tokens=extra,
            fixed_time_us=fixed_time,
        )
        if mode == "threshold" and confidence is not None:
            # No budget here: rounds of these tests never need one.
            assert token_budget < 0 or caps.sum() <= token_budget
            lengths = threshold_lens(confidence, caps, inputs["thresholds"].tolist())
        rows = num_requests * (gamma + 1)
        packed = _core.pack_tokens(anchors, tokens, lengths, _long(inputs["positions"]), pad_to=rows)
        names = ("cu_tokens", "token_ids", "token_request", "token_position")
        found = {name: getattr(packed, name).astype(np.int32) for name in names}
        found["verify_len"] = lengths.astype(np.int32)
        found["report"] = np.array([0, schedule.num_candidates, found["cu_tokens"][-1], 0], np.int32)
        found["survival"] = np.zeros(tokens.shape, np.int32)
        return found | ({} if confidence is None else {"confidence": confidence})

    @staticmethod
    def confidence(inputs: Arrays, anchors: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The folded Markov half is a head of rank 1 whose weight is 1."""
        weight, table = inputs["hidden_weight"], inputs.get("markov_table")
        width = {} if table is None else {"w1": table[:, None].copy(), "w2": table[:, None].copy()}
        heads = _core.DraftHeads(
            vocab_size=1 + int(max(anchors.max(), tokens.max())) if table is None else len(table),
            draft_vocab_size=1 + int(max(anchors.max(), tokens.max())) if table is None else len(table),
            kind="none" if table is None else "vanilla",
            confidence_weight=weight if table is None else np.append(weight, np.float32(1)),
            confidence_bias=inputs["confidence_bias"],
            confidence_with_markov=table is not None,
            **width,
        )
        return _core.confidence(
            heads,
            inputs["hidden"],
            anchors,
            tokens,
            temperature=(1 / inputs["inv_temperature"]).astype(np.float32),
            bias=inputs["position_bias"],
        )

    def _accept(self, fields: dict[str, Any], inputs: Arrays) -> Arrays:
        cu, tokens = _long(inputs["cu_tokens"]), _long(inputs["draft_tokens"])
        verify_len = np.diff(cu) - 1
        how: dict[str, Any] = {"draft_tokens": np.maximum(tokens, 0)}
        if fields["sampled_draft"] and verify_len.any():
            # Rows that did not draft come last and verify nothing.
            draft = self._drafts[int(inputs["draft_totals"][0, 0])]
            count = draft.num_requests
            assert np.array_equal(draft.tokens, tokens[:count])
            assert (inputs["draft_totals"][:count] == inputs["draft_totals"][0, 0]).all()
            assert not verify_len[count:].any()
            rows = np.arange(len(tokens))
            how = {"draft": draft, "draft_rows": np.where(rows < count, rows, -1)}
        accepted = _core.accept_ragged(
            np.ascontiguousarray(inputs["target_logits"][: cu[-1]]),
            verify_len,
            _long(inputs["positions"]),
            _sampling(inputs),
            acceptance=ACCEPTANCES[fields["acceptance"]],
            **how,
        )
        out = np.full((len(tokens), tokens.shape[1] + 1), -1, np.int32)
        out[:, : accepted.tokens.shape[1]] = accepted.tokens
        return {
            "out_tokens": out,
            "emitted_len": accepted.emitted_len.astype(np.int32),
            "status": accepted.status.astype(np.int32),
        }
