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
    ("Engine restarts", "short", [("increase(dspark_engine_restarts[1h])", "{{instance}}")]),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels = []
    for index, (title, unit, targets) in enumerate(PANELS):
        panels.append(
            {
                "id": index + 1,
                "title": title,
                "type": "timeseries",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
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
