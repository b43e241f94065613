"""Confidence-scheduled speculative decoding (DSpark) from compiled engines."""

__version__ = "0.1.0"
