"""Shape ranges a plan is compiled for: a decode profile of short rows, a prefill profile of long ones."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.graph.lowering import plugin_cache_length

# TensorRT indexes the elements of a tensor with 32 bits.
MAX_VOLUME = 2**31 - 1
_CACHE_STEP = 64


@dataclass(frozen=True, slots=True)
class Profile:
    """Largest extents of one profile; the smallest of each is 1.

    Attributes:
        num_rows: R.
        row_len: S, tokens of the widest row.
        num_tokens: T over all rows.
        num_logits: L, rows whose logits a pass of the target returns.
        tuned_tokens: T that kernels are chosen for; the largest when 0.
    """

    name: str
    num_rows: int
    row_len: int
    num_tokens: int
    num_logits: int
    tuned_tokens: int = 0

    def largest(self, symbol: str) -> int:
        """Return the largest extent of a symbolic dimension of the graphs; `R+1` is one more than R."""
        name, _, more = symbol.partition("+")
        extents = {"R": self.num_rows, "S": self.row_len, "T": self.num_tokens, "L": self.num_logits}
        return extents[name] + int(more or 0)

    def smallest(self, symbol: str) -> int:
        """Return the smallest extent of a symbolic dimension."""
        return 1 + int(symbol.partition("+")[2] or 0)

    def tuned(self, symbol: str) -> int:
        """Return the extent that kernels are chosen for: a pass of `tuned_tokens` is no wider in any other."""
        largest = self.largest(symbol)
        return min(largest, self.tuned_tokens) if self.tuned_tokens and symbol in ("T", "S", "L") else largest


def engine_profiles(limits: BuildLimits, opt_num_tokens: int | None = None) -> tuple[Profile, ...]:
    """Return the decode and prefill profiles of all graphs of an engine.

    Decoding rows hold the anchor and its drafts; a prompt chunk is a pass of its own, wants one row's logits a request
    and may fill the whole budget of tokens.

    Args:
        limits: shapes of the engine.
        opt_num_tokens: tokens of a pass that kernels are tuned for; None = the largest.
    """
    row = limits.max_draft_len + 1
    tokens = min(limits.max_num_tokens, limits.max_batch_size * row)
    prefill_logits = min(limits.max_batch_size, limits.max_num_tokens)
    return (
        Profile("decode", limits.max_batch_size, row, tokens, tokens, min(opt_num_tokens or 0, tokens)),
        Profile(
            *("prefill", limits.max_batch_size, limits.max_num_tokens, limits.max_num_tokens, prefill_logits),
            tuned_tokens=opt_num_tokens or 0,
        ),
    )


def cache_len(limits: BuildLimits, block_size: int = 0, plugins: bool = False) -> int:
    """Return the fixed positions of a cache: the longest request and what its last pass writes behind it.

    Plugins write packed rows, so only a drafter's block reaches further; a padded view writes its widest row.
    """
    if plugins:
        return plugin_cache_length(limits.max_seq_len, block_size)
    widest = max(limits.max_num_tokens, limits.max_draft_len + 1, block_size)
    return -(-(limits.max_seq_len + widest - 1) // _CACHE_STEP) * _CACHE_STEP


def check_volumes(
    limits: BuildLimits, target: ModelConfig, drafter: DrafterConfig | None, plugins: bool = False
) -> None:
    """Refuse limits whose tensors TensorRT cannot index.

    Raises:
        ConfigError: a tensor has 2^31 elements or more; names the flags to lower.
    """
    block = 0 if drafter is None else drafter.block_size
    length = cache_len(limits, block, plugins)
    models = [target] if drafter is None else [target, drafter.backbone]
    for model in models:
        _check("a cache", limits.max_batch_size * length * model.num_kv_heads * model.head_dim, "--max_seq_len")
        for profile in engine_profiles(limits):
            rows = profile.num_tokens if plugins else profile.num_rows * profile.row_len
            padded = rows * model.num_heads * model.head_dim
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
