"""The one declaration of every metric this project publishes on Triton's /metrics.

Python models of Triton cannot set histogram buckets in bulk, so a histogram is published as the three counter series
Prometheus makes of one anyway (`_bucket` with label `le`, `_sum`, `_count`): `histogram_quantile` works as usual.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_dspark.load.metrics import metric_names as load_metric_names


class Kind(enum.Enum):
    """How a family behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family.

    Attributes:
        name: its name on /metrics.
        labels: label names besides `model` and `version`.
        buckets: upper bounds of a histogram, without +Inf.
        values: label values of a family with one label that exist (at 0) from the start, so that rates are right
            from the first event on.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKENS = (10.0, 50.0, 100.0, 500.0, 1000.0)
_REJECTED = ("queue_full", "shutting_down", "out_of_range", "prompt_too_long", "unsupported_feature")
_CANCELLED = ("client", "deadline", "disconnected", "stop_request")
_FAILED = ("engine_failure", "request_failure")
_SWAP_STATES = ("idle", "loading", "trial", "draining")
_SWAP_OUTCOMES = ("promoted", "rolled_back", "failed", "aborted")
_DRAFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_REASONS = ("off", "idle", "load", "bypass", "probe", "speculate")
LOAD_COUNTERS = tuple(f"dspark_load_{name}" for name in ("samples", "failures", "xids", "changes"))
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

FAMILIES: tuple[Family, ...] = (
    Family("dspark_engine_up", _G, "1 while the engine process answers"),
    Family("dspark_engine_restarts", _C, "Times the engine process was seen to start again"),
    Family("dspark_requests_waiting", _G, "Requests in the engine's queue"),
    Family("dspark_requests_running", _G, "Requests that hold a slot"),
    Family("dspark_requests_received", _C, "Requests read from clients"),
    Family("dspark_requests_finished", _C, "Requests that ended normally", ("reason",), values=("stop", "length")),
    Family("dspark_requests_rejected", _C, "Requests refused before they ran", ("reason",), values=_REJECTED),
    Family("dspark_requests_cancelled", _C, "Requests ended early", ("reason",), values=_CANCELLED),
    Family("dspark_requests_failed", _C, "Requests the engine failed", ("reason",), values=_FAILED),
    Family("dspark_slots", _G, "Slots by state", ("state",)),
    Family("dspark_kv_tokens", _G, "Tokens of the KV cache by state", ("state",)),
    Family("dspark_input_tokens", _C, "Prompt tokens of admitted requests"),
    Family("dspark_output_tokens", _C, "Tokens generated"),
    Family("dspark_rounds", _C, "Rounds of the engine"),
    Family("dspark_round_seconds", _H, "Duration of a round", buckets=_SECONDS),
    Family("dspark_time_to_first_token_seconds", _H, "From arrival to the first token", buckets=_SECONDS),
    Family("dspark_inter_token_seconds", _H, "Between responses of a request, per token", buckets=_SECONDS),
    Family("dspark_queue_seconds", _H, "From arrival to a slot", buckets=_SECONDS),
    Family("dspark_request_seconds", _H, "From arrival to the last token", buckets=_SECONDS),
    Family("dspark_drafted_tokens", _C, "Tokens drafted by finished requests"),
    Family("dspark_verified_tokens", _C, "Draft tokens verified, of finished requests"),
    Family("dspark_accepted_tokens", _C, "Draft tokens accepted, of finished requests"),
    Family("dspark_verified_at_position", _C, "Draft tokens verified at a position of the block", ("position",)),
    Family("dspark_accepted_at_position", _C, "Draft tokens accepted at a position of the block", ("position",)),
    Family("dspark_verify_rounds", _C, "Verify rounds of finished requests"),
    Family("dspark_verify_emitted_tokens", _C, "Tokens emitted by verify rounds of finished requests, bonus included"),
    Family("dspark_accepted_len", _G, "Tokens per verify round over the last finished requests"),
    # A drafter swap: what it does, and accepted lengths of the two arms of its trial.
    Family("dspark_swap_state", _G, "1 for the state a drafter swap is in", ("state",), values=_SWAP_STATES),
    Family("dspark_swaps", _C, "Drafter swaps by outcome", ("outcome",), values=_SWAP_OUTCOMES),
    Family("dspark_swap_requests", _C, "Finished requests of trials", ("arm",), values=("incumbent", "candidate")),
    Family("dspark_swap_accepted_len", _G, "Tokens per verify round of a trial's arm", ("arm",)),
    Family("dspark_swap_difference", _G, "Interval of the candidate's accepted length less the other's", ("bound",)),
    Family("dspark_collect_requests", _C, "Sampled requests by outcome", ("outcome",), values=("recorded", "dropped")),
    Family("dspark_collect_bytes", _G, "Bytes of traffic records on disk"),
    Family("dspark_drafts_at_position", _C, "Drafts by stage and position of the block", ("stage", "position")),
    Family("dspark_round_draft_budget", _H, "Drafts a round may verify, of rounds that draft", buckets=_DRAFTS),
    Family("dspark_round_drafts_verified", _H, "Drafts a round verifies, of rounds that draft", buckets=_DRAFTS),
    Family("dspark_trim_ratio", _G, "Share of the drafts of recent rounds that was not verified"),
    Family("dspark_speculation_rounds", _C, "Decoding rounds by decision", ("reason",), values=_REASONS),
    Family("dspark_speculation_bypassed", _G, "1 while rounds decode plainly because drafts do not pay"),
    Family("dspark_speculation_gain", _G, "Predicted rate of speculating over that of plain decoding, minus 1"),
    Family("dspark_speculation_threshold", _G, "Mean of the least survivals a draft needs (adaptive)"),
    Family("dspark_speculation_kept_ratio", _G, "Drafts accepted over drafts that confidences promised, recently"),
    Family("dspark_planned_seconds", _C, "Predicted time of the rounds that were timed"),
    Family("dspark_measured_seconds", _C, "Measured time of the same rounds"),
    Family("dspark_cost_correction", _G, "Factor on the cost table", ("part",)),
    Family("dspark_draft_host_seconds", _G, "Work of the host beside the passes that drafting adds to a round"),
    Family("dspark_calibration_error", _G, "Calibration error on recent blocks, less its noise", ("calibration",)),
    Family("dspark_calibration_drift", _G, "1 while the stored calibration does not fit what is observed"),
    Family("dspark_calibration_updates", _C, "Times online calibration let new parameters in"),
    Family("dspark_calibration_rollbacks", _C, "Times online calibration went back to older parameters"),
    Family("dspark_calibration_temperature", _G, "Temperature in force", ("position",)),
    Family("dspark_calibration_bias", _G, "Bias in force", ("position",)),
    Family("dspark_limit_verify_budget", _G, "Drafts of a round that the GPU's load allows"),
    Family("dspark_limit_requests", _G, "Running requests that the GPU's load allows; 0 closes admission"),
    Family("dspark_limit_cost_scale", _G, "Factor the GPU's load puts on what tokens beyond one a request cost"),
    *(
        Family(name, _C if name in LOAD_COUNTERS else _G, "Load of the GPU: docs/load.md")
        for name in (*load_metric_names(), *LOAD_COUNTERS)
    ),
    # Names that dashboards of the removed inflight_batcher_llm repository read; all gauges there.
    Family("nv_trt_llm_request_metrics", _G, "TRT LLM request metrics", ("request_type",)),
    Family("nv_trt_llm_kv_cache_block_metrics", _G, "TRT LLM KV cache block metrics", ("kv_cache_block_type",)),
    Family(
        "nv_trt_llm_inflight_batcher_metrics",
        _G,
        "TRT LLM inflight_batcher-specific metrics",
        ("inflight_batcher_specific_metric",),
    ),
    Family("nv_trt_llm_general_metrics", _G, "General TRT LLM metrics", ("general_type",)),
    Family("nv_llm_input_token_len", _H, "Prompt length in tokens", buckets=_TOKENS),
    Family("nv_llm_output_token_len", _H, "Output length in tokens", buckets=_TOKENS),
)


def series_key(**labels: str) -> str:
    """Serialise labels to a stable string key; "" without labels."""
    return "\x1f".join(f"{name}={labels[name]}" for name in sorted(labels))


def parse_series_key(key: str) -> dict[str, str]:
    """Invert `series_key`."""
    return dict(part.split("=", 1) for part in key.split("\x1f")) if key else {}
