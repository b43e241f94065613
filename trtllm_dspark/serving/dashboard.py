"""The Grafana dashboard: `python -m trtllm_dspark.serving.dashboard > deploy/grafana/dashboard.json`."""

from __future__ import annotations

import json
from typing import Any

_RATE = "[$__rate_interval]"


def _sum_rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{_RATE}))"


def _quantiles(name: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({q}, {_sum_rate(f'{name}_bucket', 'le')})", f"p{int(q * 100)}") for q in (0.5, 0.9, 0.99)
    ]


_SIGNED = ("dspark_swap_difference", "dspark_speculation_gain")

# title, unit, [(expression, legend)]
PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    (
        "Requests waiting and running",
        "short",
        [("sum(dspark_requests_waiting)", "waiting"), ("sum(dspark_requests_running)", "running")],
    ),
    ("Engine up", "short", [("dspark_engine_up", "{{instance}}")]),
    (
        "Tokens a second",
        "short",
        [(_sum_rate("dspark_output_tokens"), "output"), (_sum_rate("dspark_input_tokens"), "prompt")],
    ),
    (
        "Requests a second",
        "reqps",
        [
            (_sum_rate("dspark_requests_finished", "reason"), "finished: {{reason}}"),
            (_sum_rate("dspark_requests_rejected", "reason"), "rejected: {{reason}}"),
            (_sum_rate("dspark_requests_cancelled", "reason"), "cancelled: {{reason}}"),
            (_sum_rate("dspark_requests_failed", "reason"), "failed: {{reason}}"),
        ],
    ),
    ("Time to first token", "s", _quantiles("dspark_time_to_first_token_seconds")),
    ("Time per output token", "s", _quantiles("dspark_inter_token_seconds")),
    ("Time in the queue", "s", _quantiles("dspark_queue_seconds")),
    ("Request duration", "s", _quantiles("dspark_request_seconds")),
    ("Round duration", "s", _quantiles("dspark_round_seconds")),
    (
        "Accepted length",
        "short",
        [
            (
                f"{_sum_rate('dspark_verify_emitted_tokens')} / {_sum_rate('dspark_verify_rounds')}",
                "tokens per verify round",
            )
        ],
    ),
    (
        "Acceptance by position in the block",
        "percentunit",
        [
            (
                f"{_sum_rate('dspark_accepted_at_position', 'position')} / "
                f"{_sum_rate('dspark_verified_at_position', 'position')}",
                "draft {{position}}",
            )
        ],
    ),
    (
        "Slots and KV cache in use",
        "percentunit",
        [
            ('sum(dspark_slots{state="used"}) / sum(dspark_slots)', "slots"),
            ('sum(dspark_kv_tokens{state="used"}) / sum(dspark_kv_tokens{state="max"})', "KV tokens"),
        ],
    ),
    (
        "Drafts by stage",
        "short",
        [(_sum_rate("dspark_drafts_at_position", "stage"), "{{stage}}")],
    ),
    (
        "Drafts a round: allowed and verified",
        "short",
        [
            (
                f"{_sum_rate('dspark_round_draft_budget_sum')} / {_sum_rate('dspark_round_draft_budget_count')}",
                "allowed",
            ),
            (
                f"{_sum_rate('dspark_round_drafts_verified_sum')} / {_sum_rate('dspark_round_drafts_verified_count')}",
                "verified",
            ),
        ],
    ),
    ("Share of drafts not verified", "percentunit", [("dspark_trim_ratio", "{{instance}}")]),
    (
        "Decoding rounds by decision",
        "short",
        [(_sum_rate("dspark_speculation_rounds", "reason"), "{{reason}}")],
    ),
    (
        "Gain of speculating, predicted",
        "percentunit",
        [("dspark_speculation_gain", "gain {{instance}}"), ("dspark_speculation_bypassed", "bypassed {{instance}}")],
    ),
    (
        "Time of rounds: measured over planned",
        "short",
        [
            (f"{_sum_rate('dspark_measured_seconds')} / {_sum_rate('dspark_planned_seconds')}", "measured / planned"),
            ("dspark_cost_correction", "correction {{part}} {{instance}}"),
            ("dspark_limit_cost_scale", "load {{instance}}"),
        ],
    ),
    (
        "Calibration error of the confidence head",
        "percentunit",
        [
            ("dspark_calibration_error", "{{calibration}} {{instance}}"),
            ("dspark_calibration_drift", "alarm {{instance}}"),
        ],
    ),
    (
        "Online calibration: changes an hour",
        "short",
        [
            ("increase(dspark_calibration_updates[1h])", "updates {{instance}}"),
            ("increase(dspark_calibration_rollbacks[1h])", "rollbacks {{instance}}"),
        ],
    ),
    (
        "GPU: clock and power against their limits",
        "percentunit",
        [
            ("dspark_load_sm_clock_mhz / dspark_load_sm_clock_max_mhz", "SM clock {{instance}}"),
            ("dspark_load_power_watts / dspark_load_power_limit_watts", "power {{instance}}"),
            ("dspark_load_sm_utilization", "SM use {{instance}}"),
            ("dspark_load_others_sm_utilization", "SM use of others {{instance}}"),
        ],
    ),
    (
        "GPU: what its load allows",
        "short",
        [
            ("dspark_limit_requests", "requests {{instance}}"),
            ("dspark_limit_verify_budget", "drafts a round {{instance}}"),
        ],
    ),
    (
        "GPU: free memory",
        "bytes",
        [
            ("dspark_load_memory_free_bytes", "free {{instance}}"),
            ("dspark_load_others_memory_bytes", "others {{instance}}"),
        ],
    ),
    (
        "Drafter swap: state and outcomes an hour",
        "short",
        [
            ("dspark_swap_state", "{{state}} {{instance}}"),
            ("increase(dspark_swaps[1h])", "{{outcome}} {{instance}}"),
        ],
    ),
    (
        "Drafter swap: accepted length of the arms",
        "short",
        [
            ("dspark_swap_accepted_len", "{{arm}} {{instance}}"),
            ("increase(dspark_swap_requests[5m])", "requests in 5 min: {{arm}} {{instance}}"),
        ],
    ),
    (
        "Drafter swap: candidate's accepted length less the other's",
        "short",
        [("dspark_swap_difference", "{{bound}} {{instance}}")],
    ),
    (
        "Records of the traffic: requests a second",
        "reqps",
        [(_sum_rate("dspark_collect_requests", "outcome"), "{{outcome}}")],
    ),
    ("Records of the traffic: disk", "bytes", [("dspark_collect_bytes", "{{instance}}")]),
    ("Engine restarts", "short", [("increase(dspark_engine_restarts[1h])", "{{instance}}")]),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels = []
    for index, (title, unit, targets) in enumerate(PANELS):
        signed = any(name in expression for expression, _ in targets for name in _SIGNED)
        panels.append(
            {
                "id": index + 1,
                "title": title,
                "type": "timeseries",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "fieldConfig": {"defaults": {"unit": unit} | ({} if signed else {"min": 0}), "overrides": []},
                "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
                "targets": [
                    {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend}
                    for number, (expression, legend) in enumerate(targets)
                ],
            }
        )
    return {
        "title": "trtllm_dspark",
        "uid": "trtllm-dspark",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
