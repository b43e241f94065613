"""Reports that stand alone: SVG plots, HTML, JSON and CSV, without a network or a plotting library."""

from trtllm_dspark.reports.svg import Series, line_plot

__all__ = ["Series", "line_plot"]
