"""Run a finished engine once and compare it with the NumPy reference of the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.build._choices import WeightDtype
from trtllm_dspark.build.plan import BuildPlan
from trtllm_dspark.build.report import VerifyErrors
from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import (
    AutoregressiveEngine,
    ContextBatch,
    Engine,
    FloatArray,
    IntArray,
    PairBatch,
    TokenBatch,
)
from trtllm_dspark.errors import EngineError
from trtllm_dspark.reference.autoregressive import autoregressive_drafts
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward

MAX_TOKENS = 8
# Relative root-mean-square error that storage explains, with a margin. Wrong wiring gives errors around 1.
TOLERANCE: dict[WeightDtype, float] = {"float32": 1e-4, "int8": 0.15, "w8a8": 0.35}


def verify_engine(directory: Path, plan: BuildPlan) -> VerifyErrors:
    """Compare one pass of every graph with the reference, in float32.

    The drafter is given the reference's features, so that its error is its own.

    Args:
        directory: a complete engine directory.
        plan: what it was built from.

    Raises:
        EngineError: an output is not finite or further from the reference than its weights' storage explains.
    """
    engine = load_engine(directory)
    try:
        return _compare(engine, plan)
    finally:
        engine.close()


def _compare(engine: Engine, plan: BuildPlan) -> VerifyErrors:
    drafter = plan.drafter_config
    layers = () if drafter is None else drafter.target_layer_ids
    # Any tokens will do; spread over the vocabulary they reach different rows of the embedding.
    num_tokens = min(MAX_TOKENS, plan.limits.max_seq_len - 1, plan.limits.max_num_tokens)
    tokens = np.linspace(0, plan.target.config.vocab_size - 1, num_tokens).astype(np.int64)
    expected = target_forward(
        plan.target.config, plan.target.arrays, tokens, feature_layer_ids=layers, dtype=np.float32
    )
    zero = np.zeros(1, np.int64)
    got = engine.verify(TokenBatch(tokens, np.array([num_tokens]), zero, np.arange(num_tokens)))
    logits = _check("target logits", got.logits, expected.logits, plan.weight_dtype)
    if drafter is None or plan.drafter is None:
        return VerifyErrors(logits)
    features = _check("target features", got.features, expected.features, plan.weight_dtype)
    if drafter.autoregressive:
        return VerifyErrors(
            logits, features, _compare_steps(engine, plan, drafter, plan.drafter.arrays, tokens, expected.features)
        )
    arrays = plan.drafter.arrays
    context = drafter_context(drafter, arrays, expected.features, dtype=np.float32)
    block = drafter_block(
        drafter,
        arrays,
        context,
        int(tokens[0]),
        target_arrays=plan.target.arrays,
        draft_token_ids=plan.draft_vocab,
        dtype=np.float32,
    )
    engine.absorb(ContextBatch(expected.features, np.array([num_tokens]), zero))
    drafted = engine.draft_block(tokens[:1], np.array([num_tokens]))
    kept = block.base_logits[: plan.limits.max_draft_len]
    # Embedding and head may be the target's, in its storage.
    dtypes = (plan.draft_weight_dtype, plan.weight_dtype)
    base = _check("draft logits", drafted.base_logits[0], kept, *dtypes)
    return VerifyErrors(logits, features, base)


def _compare_steps(
    engine: Engine,
    plan: BuildPlan,
    drafter: DrafterConfig,
    arrays: Mapping[str, FloatArray],
    tokens: IntArray,
    features: FloatArray,
) -> float:
    """Unroll an autoregressive drafter along `tokens`, over and over where they are too few."""
    count, num_steps = len(features), plan.limits.max_draft_len
    following = np.resize(np.roll(tokens, -1), count - 1 + num_steps)
    expected = autoregressive_drafts(
        drafter,
        arrays,
        features,
        following.tolist(),
        target_arrays=plan.target.arrays,
        draft_token_ids=plan.draft_vocab,
        dtype=np.float32,
    )
    head = cast(AutoregressiveEngine, engine).draft_head
    zero = np.zeros(1, np.int64)
    state = head.absorb(PairBatch(features, following[:count], np.array([count]), zero))[-1:]
    logits = []
    for row in range(count - 1, count - 1 + num_steps):
        step = head.step(state, following[row : row + 1], np.array([row]))
        state = step.state
        logits.append(step.logits)
    dtypes = (plan.draft_weight_dtype, plan.weight_dtype)
    return _check("draft logits", np.concatenate(logits), expected.base_logits, *dtypes)


def _check(what: str, got: NDArray[np.float32], expected: NDArray[np.float32], *dtypes: WeightDtype) -> float:
    """Return the relative error; `dtypes` are those of the weights that the output went through."""
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    scale = float(np.sqrt(np.mean(np.square(expected)))) or 1.0
    error = float(np.sqrt(np.mean(np.square(got - expected)))) / scale
    # A comparison with NaN is false, so this order also refuses outputs that are not finite.
    if not error <= tolerance:
        raise EngineError(
            f"the engine's {what} differ from the checkpoint's by {error:.3g} (relative), storage explains at most "
            f"{tolerance}; build with --weight_dtype float32, and report this"
        )
    return error
