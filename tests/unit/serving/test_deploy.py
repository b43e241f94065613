"""Dashboards and rules name only metrics that exist; promtool checks them where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trtllm_dspark.serving.dashboard import dashboard
from trtllm_dspark.serving.metric_schema import FAMILIES, Kind

DEPLOY = Path(__file__).parents[3] / "deploy"
SUFFIXES = ("_bucket", "_sum", "_count")
NAMES = {family.name for family in FAMILIES if family.kind is not Kind.HISTOGRAM}
NAMES |= {family.name + suffix for family in FAMILIES if family.kind is Kind.HISTOGRAM for suffix in SUFFIXES}


def metric_names(text: str) -> set[str]:
    """Return metric names, not the recorded ones (with colons)."""
    return set(re.findall(r"(?<![\w:])dspark_\w+(?![\w:])", text))


def test_dashboard_checked_in_equals_generated() -> None:
    assert json.loads((DEPLOY / "grafana" / "dashboard.json").read_text()) == dashboard()


def test_dashboard_and_rules_name_declared_metrics() -> None:
    for path in ("grafana/dashboard.json", "prometheus/rules.yml"):
        names = metric_names((DEPLOY / path).read_text())
        assert len(names) > 3
        assert names <= NAMES


def test_dashboard_shows_every_family_of_swaps_and_traffic_records() -> None:
    shown = metric_names((DEPLOY / "grafana" / "dashboard.json").read_text())
    families = {name for name in NAMES if name.startswith(("dspark_swap", "dspark_collect"))}
    assert len(families) == 7
    assert families <= shown


def test_dashboard_axes_begin_at_zero_except_for_differences() -> None:
    for panel in dashboard()["panels"]:
        names = {name for target in panel["targets"] for name in metric_names(target["expr"])}
        begins_at_zero = "min" in panel["fieldConfig"]["defaults"]
        assert begins_at_zero == names.isdisjoint({"dspark_swap_difference", "dspark_speculation_gain"})


def test_autoscaling_reads_recorded_series() -> None:
    recorded = set(re.findall(r"record: (\S+)", (DEPLOY / "prometheus" / "rules.yml").read_text()))
    queries = re.findall(r"query: (\S+)", (DEPLOY / "kubernetes" / "autoscaling.yaml").read_text())
    assert queries
    assert set(queries) <= recorded


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
@pytest.mark.parametrize("command", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_rules_pass_promtool(command: tuple[str, ...]) -> None:
    result = subprocess.run(
        ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
