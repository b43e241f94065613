"""Train drafters for a target from the target alone: its own responses, its own features, its own probabilities."""
