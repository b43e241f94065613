"""Confidence-scheduled speculative decoding (DSpark) from compiled engines."""
