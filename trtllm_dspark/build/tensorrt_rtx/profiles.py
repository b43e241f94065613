"""Shape ranges a plan is compiled for: a decode profile of short rows, a prefill profile of long ones."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError

# TensorRT indexes the elements of a tensor with 32 bits.
MAX_VOLUME = 2**31 - 1
_CACHE_STEP = 64


@dataclass(frozen=True, slots=True)
class Profile:
    """Largest extents of one profile, which are also what it is tuned for; the smallest of each is 1.

    Attributes:
        num_rows: R.
        row_len: S, tokens of the widest row.
        num_tokens: T over all rows.
        num_logits: L, rows whose logits a pass of the target returns.
    """

    name: str
    num_rows: int
    row_len: int
    num_tokens: int
    num_logits: int

    def largest(self, symbol: str) -> int:
        """Return the extent of a symbolic dimension of the graphs."""
        return {"R": self.num_rows, "S": self.row_len, "T": self.num_tokens, "L": self.num_logits}[symbol]


def engine_profiles(limits: BuildLimits) -> tuple[Profile, ...]:
    """Return the decode and prefill profiles of all graphs of an engine.

    Decoding rows hold the anchor and its drafts; a prompt chunk is a pass of its own, wants one row's logits a request
    and may fill the whole budget of tokens.
    """
    row = limits.max_draft_len + 1
    tokens = min(limits.max_num_tokens, limits.max_batch_size * row)
    prefill_logits = min(limits.max_batch_size, limits.max_num_tokens)
    return (
        Profile("decode", limits.max_batch_size, row, tokens, tokens),
        Profile("prefill", limits.max_batch_size, limits.max_num_tokens, limits.max_num_tokens, prefill_logits),
    )


def cache_len(limits: BuildLimits, block_size: int = 0) -> int:
    """Return the fixed positions of a cache: the longest request and the padding its last pass writes behind it."""
    widest = max(limits.max_num_tokens, limits.max_draft_len + 1, block_size)
    return -(-(limits.max_seq_len + widest - 1) // _CACHE_STEP) * _CACHE_STEP


def check_volumes(limits: BuildLimits, target: ModelConfig, drafter: DrafterConfig | None) -> None:
    """Refuse limits whose tensors TensorRT cannot index.

    Raises:
        ConfigError: a tensor has 2^31 elements or more; names the flags to lower.
    """
    block = 0 if drafter is None else drafter.block_size
    length = cache_len(limits, block)
    models = [target] if drafter is None else [target, drafter.backbone]
    for model in models:
        _check("a cache", limits.max_batch_size * length * model.num_kv_heads * model.head_dim, "--max_seq_len")
        for profile in engine_profiles(limits):
            padded = profile.num_rows * profile.row_len * model.num_heads * model.head_dim
            _check(f"the padded queries of the {profile.name} profile", padded, "--max_num_tokens")
            inner = profile.num_tokens * 2 * model.intermediate_size
            _check(f"the inner activations of the {profile.name} profile", inner, "--max_num_tokens")
    for profile in engine_profiles(limits):
        _check(f"the logits of the {profile.name} profile", profile.num_logits * target.vocab_size, "--max_num_tokens")
    if drafter is not None:
        _check("the draft logits", limits.max_batch_size * block * drafter.draft_vocab_size, "--max_draft_len")


def _check(what: str, elements: int, flag: str) -> None:
    if elements > MAX_VOLUME:
        raise ConfigError(
            f"{what} would have {elements} elements, TensorRT indexes at most {MAX_VOLUME}; "
            f"lower --max_batch_size or {flag}"
        )
