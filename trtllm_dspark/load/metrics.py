"""Every input and decision as a number with a name; docs/load.md lists them."""

from __future__ import annotations

from dataclasses import fields

from trtllm_dspark.load.sample import Sample
from trtllm_dspark.load.state import REASONS, LoadState

PREFIX = "dspark_load_"
_NOT_NUMBERS = ("time_s", "failure", "message", "generation", "xids", "mig")
INPUTS = tuple(field.name for field in fields(Sample) if field.name not in _NOT_NUMBERS)
DECISIONS = ("available", "compute_scale", "budget_scale", "admission_scale")


def metric_names() -> tuple[str, ...]:
    """Return every name that `load_metrics` can give."""
    names = (*INPUTS, "mig", "xid_last", *DECISIONS, *(f"reason_{reason}" for reason in REASONS))
    return tuple(PREFIX + name for name in names)


def load_metrics(sample: Sample | None, state: LoadState) -> dict[str, float]:
    """Return the last sample and the decision as gauges.

    An input that the device does not tell is left out; a reason is 1 while it holds, else 0.
    """
    values: dict[str, float] = {}
    if sample is not None and sample.failure is None:
        inputs = {name: getattr(sample, name) for name in INPUTS}
        values |= {name: float(value) for name, value in inputs.items() if value is not None}
        values["mig"] = float(sample.mig != "off")
        if sample.xids:
            values["xid_last"] = float(sample.xids[-1])
    values |= {name: float(getattr(state, name)) for name in DECISIONS}
    values |= {f"reason_{reason}": float(reason in state.reasons) for reason in REASONS}
    return {PREFIX + name: value for name, value in values.items()}
