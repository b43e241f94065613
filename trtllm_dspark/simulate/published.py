"""Acceptance that others published, as profiles; what they did not publish is an assumption, said in `source`."""

from __future__ import annotations

import numpy as np

from trtllm_dspark.simulate.acceptance import AcceptanceProfile, level_of

# DSpark paper, Table 1: accepted length at temperature 1 with 7 drafts, bonus included.
_BENCHMARKS = ("gsm8k", "math", "aime25", "mbpp", "humaneval", "livecodebench", "mt_bench", "alpaca", "arena_hard")
_ACCEPTED_LEN = {
    "qwen3-4b": (6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29),
    "qwen3-8b": (6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
    "qwen3-14b": (6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13),
    "gemma4-12b": (6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92),
}
# Share of blocks whose first k drafts were accepted, as a drafter's authors or a pull request printed it.
_SURVIVAL = {
    "glm-5.2": ("mean", (0.829, 0.723, 0.646, 0.587, 0.539, 0.500, 0.464), "model card of GLM-5.2-speculator.dspark"),
    "qwen3.8": ("gsm8k", (0.901, 0.795, 0.667, 0.550, 0.436, 0.327, 0.225), "vLLM pull request 52197"),
}
_GAMMA = 7

PUBLISHED = (*_ACCEPTED_LEN, *_SURVIVAL)


def published(name: str) -> AcceptanceProfile:
    """Return a published profile by its name in `PUBLISHED`."""
    if name in _ACCEPTED_LEN:
        conditional = {
            benchmark: (level_of(length, _GAMMA),) * _GAMMA
            for benchmark, length in zip(_BENCHMARKS, _ACCEPTED_LEN[name], strict=True)
        }
        source = (
            "accepted lengths of the DSpark paper, Table 1 (temperature 1, 7 drafts); "
            "assumed: the same conditional acceptance at every position, and the spread of confidences"
        )
        return AcceptanceProfile(name, source, conditional)
    domain, survival, where = _SURVIVAL[name]
    values = np.array(survival) / np.array([1.0, *survival[:-1]])
    source = f"{where}; assumed: the spread of confidences"
    return AcceptanceProfile(name, source, {domain: tuple(values.tolist())})
