"""The DSpark algorithms, native. One definition for CPU and GPU: docs/core_numerics.md; contracts: docs/core.md.

Rules of every function here: arrays are C-contiguous NumPy arrays of exactly the dtype written (int64 for ids, positions
and counts, float32 for reals, uint64 for seeds and masses); anything else raises `ShapeError` naming the argument, what
was expected and what came. Values out of range raise `NativeError` with `.op` and `.code`. The GIL is released while
computing; one call uses one core. Results are new arrays. Row r of every argument belongs to request r.

What mode adaptive and simulations use stands in `_core_adaptive.pyi` and `_core_simulation.pyi`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark._core_adaptive import BlockStatistics as BlockStatistics
from trtllm_dspark._core_adaptive import CostDrift as CostDrift
from trtllm_dspark._core_adaptive import RoundVerdict as RoundVerdict
from trtllm_dspark._core_adaptive import Standings as Standings
from trtllm_dspark._core_simulation import SimulatedRows as SimulatedRows

Int = NDArray[np.int64]
Float = NDArray[np.float32]
UInt = NDArray[np.uint64]

AcceptanceMode = Literal["greedy", "rejection", "coupled"]
ScheduleMode = Literal["fixed", "threshold", "early_stop", "stale_topk"]
HeadKind = Literal["none", "vanilla", "gated", "rnn"]
SimdLevel = Literal["portable", "avx2", "avx512"]

STATUS_OK: int
"""Row status 0."""
STATUS_NAN_LOGITS: int
"""Row status 1: a logit the request needed is NaN or +inf."""
STATUS_NO_FINITE_LOGITS: int
"""Row status 2: every logit of a row is -inf."""

class Sampling:
    """Sampling parameters of R requests, validated once; build it anew when the batch changes.

    Args:
        temperature: [R] float32, finite and >= 0; below 1e-5 the request is greedy.
        seed: [R] uint64, key of the request's random streams; requests of one batch need different seeds.
        top_k: [R] int64 >= 0, 0 = off; None = off for all.
        top_p: [R] float32 in (0, 1], 1 = off; None = off for all.

    Raises:
        ShapeError: wrong shape or dtype.
        NativeError: a value is out of range; the message names the request.
    """

    def __init__(
        self, temperature: Float, seed: UInt, top_k: Int | None = None, top_p: Float | None = None
    ) -> None: ...
    @property
    def num_requests(self) -> int: ...

class DraftHeads:
    """Weights of the sequential (Markov) and confidence heads. Immutable and safe to share between threads.

    Args:
        vocab_size: V of the target.
        draft_vocab_size: Vd; equal to V without `d2t`.
        kind: `none` (no sequential head), `vanilla`, `gated` or `rnn`.
        w1: [V, r] float32 or int8, indexed by target ids. int8 needs `w1_scale` [V] float32 (value = int * scale).
        w2: [Vd, r], same dtype as w1, indexed by draft ids. int8 needs `w2_scale` [Vd] float32.
        gate_weight: [r, d + r] float32, columns ordered [h ; W1[x]]; `gate_bias` [r] optional. Only `gated`.
        rnn_weight: [3r, 2r + d] float32, rows gate, candidate, output; columns ordered [state ; W1[x] ; h];
            `rnn_bias` [3r] optional. Only `rnn`.
        confidence_weight: [d + r] float32, columns ordered [h ; W1[x]], or [d] when not `confidence_with_markov`;
            None = no confidence head.
        confidence_bias: [1] float32 or None.
        confidence_with_markov: whether the confidence head reads W1[x] too (`kind` must not be `none` then).
        d2t: [Vd] int64, absolute target id of each draft id, all different; None = identity.

    Raises:
        ShapeError: shapes contradict each other.
        NativeError: an id is outside the vocabulary, or a weight is not finite.

    Source: DSpark paper, section 3.1, equations 4-7.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        draft_vocab_size: int,
        kind: HeadKind = "vanilla",
        w1: Float | NDArray[np.int8] | None = None,
        w2: Float | NDArray[np.int8] | None = None,
        w1_scale: Float | None = None,
        w2_scale: Float | None = None,
        gate_weight: Float | None = None,
        gate_bias: Float | None = None,
        rnn_weight: Float | None = None,
        rnn_bias: Float | None = None,
        confidence_weight: Float | None = None,
        confidence_bias: Float | None = None,
        confidence_with_markov: bool = True,
        d2t: Int | None = None,
    ) -> None: ...
    @property
    def kind(self) -> HeadKind: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def rank(self) -> int:
        """Markov rank r; 0 when kind is `none`."""
    @property
    def hidden_size(self) -> int:
        """d as the gate, rnn or confidence weights imply it; 0 when none of them is there."""
    @property
    def has_confidence(self) -> bool: ...
    @property
    def weight_dtype(self) -> Literal["none", "float32", "int8"]: ...
    @property
    def num_bytes(self) -> int:
        """Bytes of native memory held, packed copies included."""

class Draft:
    """Draft tokens of R requests and, for sampled ones, the distribution each was sampled from (q, exactly)."""

    @property
    def tokens(self) -> Int:
        """[R, gamma] target ids; every entry of a request with a status other than 0 is -1."""
    @property
    def status(self) -> Int:
        """[R] 0 = ok, else STATUS_*; such a request should be verified with verify_len 0 this round."""
    @property
    def num_requests(self) -> int: ...
    @property
    def num_steps(self) -> int:
        """gamma of this draft."""
    def masses(self, request: int, step: int) -> UInt:
        """Return q of one draft token as [V] uint64 integer masses in target ids (a point mass for a greedy request)."""

def draft_chain(
    heads: DraftHeads,
    base_logits: Float,
    anchors: Int,
    positions: Int,
    sampling: Sampling,
    *,
    hidden: Float | None = None,
    acceptance: AcceptanceMode = "rejection",
    num_candidates: int = 0,
    num_steps: int = 0,
) -> Draft:
    """Sample the draft tokens of each request left to right.

    Args:
        heads: sequential head.
        base_logits: [R, gamma, Vd] float32; slot j predicts draft token j + 1.
        anchors: [R] int64 target ids, the token before the first draft token.
        positions: [R] int64 absolute position of each anchor, in [0, 2**55).
        sampling: parameters of the R requests; greedy requests get the argmax.
        hidden: [R, gamma, d] float32, needed by `gated` and `rnn` heads.
        acceptance: how the tokens will be accepted. `greedy` drafts argmax for every request, `coupled` draws with the
            noise the target will use, `rejection` with the draft stream.
        num_candidates: C > 0 restricts every step to the C largest entries of U (q is truncated to them exactly).
        num_steps: draft only the first num_steps tokens; 0 = gamma.

    Raises:
        ShapeError: wrong shape or dtype.
        NativeError: an anchor is outside the vocabulary, a position is negative, or `hidden` is missing.

    Source: DSpark paper, section 3.1, equations 4-6.
    """

def confidence(
    heads: DraftHeads,
    hidden: Float,
    anchors: Int,
    draft_tokens: Int,
    *,
    temperature: Float | None = None,
    bias: Float | None = None,
) -> Float:
    """Return [R, n] float32 calibrated probabilities that draft token k is accepted given all before it were.

    Args:
        heads: must have a confidence head.
        hidden: [R, gamma, d] float32.
        anchors: [R] int64.
        draft_tokens: [R, n] int64 target ids, n <= gamma; -1 (a request without a draft) gives confidence 0.
        temperature: [n] float32 > 0, per position; None = 1.
        bias: [n] float32, added after the temperature; None = 0.

    Source: DSpark paper, equation 7; temperatures: section 3.2.1.
    """

class Schedule:
    """How many draft tokens of each request to verify this round.

    Attributes:
        verify_len: [R] int64, 0..cap.
        warnings: subset of `missing_cost_table`, `bad_cost_table`, `flat_cost_table`, `nan_confidence`,
            `confidence_out_of_range`; empty when all was well. With `missing_cost_table` or `bad_cost_table` a
            cost-based mode verifies every draft token up to cap and budget, because nothing says what it costs.
        num_candidates: draft tokens with survival > 0.
    """

    @property
    def verify_len(self) -> Int: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...
    @property
    def num_candidates(self) -> int: ...

def schedule_prefixes(
    mode: ScheduleMode,
    *,
    num_requests: int,
    max_draft_len: int,
    confidence: Float | None = None,
    caps: Int | None = None,
    draft_len: int | None = None,
    threshold: float | None = None,
    step_time_us: Float | None = None,
    budget: int | None = None,
    token_budget: int | None = None,
    load_scale: float = 1.0,
    extra_tokens: int = 0,
    fixed_time_us: float = 0.0,
) -> Schedule:
    """Choose how many draft tokens of each request to verify.

    Args:
        mode: `fixed` (needs draft_len), `threshold` (needs confidence, threshold), `early_stop` = Algorithm 1 (needs
            confidence, step_time_us), `stale_topk` = section 5.2 (needs confidence, budget from `verify_budget`).
        num_requests: R, may be 0.
        max_draft_len: gamma.
        confidence: [R, gamma] float32 in [0, 1], as `confidence` returns it.
        caps: [R] int64, most draft tokens of each request (0 = do not speculate); None = gamma.
        draft_len: draft tokens of every request in `fixed` mode.
        threshold: in [0, 1]; a prefix is verified while the running product of confidences is >= threshold.
        step_time_us: [> R + extra_tokens + min(sum of caps, token_budget)] float32, microseconds of a verify pass over B
            tokens; entry 0 unused.
        budget: draft tokens to verify in total in `stale_topk` mode.
        token_budget: upper limit of admitted draft tokens for any mode (room in the pass); None = no limit.
        load_scale: factor on the marginal cost t(B) - t(R + extra_tokens); 1 = as measured.
        extra_tokens: tokens of other rows (prefill) in the same pass.
        fixed_time_us: time of the round that does not depend on the choice (drafting).

    Raises:
        ShapeError: a shape is wrong or step_time_us is too short.
        NativeError: a number is out of range or an argument the mode needs is missing.

    Source: DSpark paper, Algorithm 1 and section 5.2. Which modes are lossless where: docs/losslessness.md.
    """

def verify_budget(
    confidence: Float,
    *,
    step_time_us: Float | None,
    caps: Int | None = None,
    token_budget: int | None = None,
    load_scale: float = 1.0,
    extra_tokens: int = 0,
    fixed_time_us: float = 0.0,
) -> tuple[int, tuple[str, ...]]:
    """Return (budget, warnings): how many draft tokens maximise throughput, by a global search.

    Only for `stale_topk`, with confidences of two rounds ago: used on the current round's it loses losslessness in
    rejection mode (Appendix A). Arguments as in `schedule_prefixes`.

    Source: DSpark paper, section 5.2.
    """

class Accepted:
    """Tokens each request emits this round.

    Attributes:
        tokens: [R, gamma + 1] int64, accepted draft tokens then the corrected or bonus token; unused tail -1.
        emitted_len: [R] int64, 1..verify_len + 1; 0 when status is not 0.
        accepted_len: [R] int64, draft tokens accepted: emitted_len - 1, or 0 on error.
        status: [R] int64, 0 = ok, else STATUS_*.
        logprobs: [R, gamma + 1] float32 natural log-probability of each emitted token under the target's softmax at
            temperature 1, no filter; NaN in the unused tail. None unless asked for.
    """

    @property
    def tokens(self) -> Int: ...
    @property
    def emitted_len(self) -> Int: ...
    @property
    def accepted_len(self) -> Int: ...
    @property
    def status(self) -> Int: ...
    @property
    def logprobs(self) -> Float | None: ...

def accept_ragged(
    target_logits: Float,
    verify_len: Int,
    positions: Int,
    sampling: Sampling,
    *,
    draft: Draft | None = None,
    draft_rows: Int | None = None,
    draft_tokens: Int | None = None,
    acceptance: AcceptanceMode = "rejection",
    logprobs: bool = False,
) -> Accepted:
    """Accept the longest valid prefix of each request's draft and emit one more token.

    Args:
        target_logits: [T, V] float32, T = sum(1 + verify_len); request r owns 1 + verify_len[r] consecutive rows, the
            first being the anchor's.
        verify_len: [R] int64 >= 0; 0 = plain sampling of one token.
        positions: [R] int64 absolute position of each anchor.
        sampling: parameters of the R requests.
        draft: result of `draft_chain` (q comes from it). Request r uses row draft_rows[r], or r when that is None.
        draft_rows: [R] int64 row in `draft`, -1 for a request without one (its verify_len must be 0).
        draft_tokens: [R, n] int64 instead of `draft`: tokens that were not sampled (q is a point mass).
        acceptance: `greedy` compares argmaxes for every request; `rejection` is standard speculative sampling (greedy
            for greedy requests); `coupled` emits what the target would have emitted without any draft.
        logprobs: also return log-probabilities (one more pass over each emitted row).

    Raises:
        ShapeError: wrong shape or dtype, or T does not match verify_len.
        NativeError: verify_len exceeds the draft, a draft token is outside the vocabulary, or the draft was made for
            another acceptance mode.

    Source: Leviathan et al. 2023, Algorithm 1; coupled: Daliri et al. 2024.
    """

class PackedTokens:
    """Packed ragged rows of one verify pass.

    Attributes:
        cu_tokens: [R + 1] int64 exclusive prefix sum of 1 + verify_len.
        token_ids: [T_pad] int64, anchor then drafts of each request; padding 0.
        token_request: [T_pad] int64 request of each token; padding -1.
        token_position: [T_pad] int64 absolute position; padding -1.
    """

    @property
    def cu_tokens(self) -> Int: ...
    @property
    def token_ids(self) -> Int: ...
    @property
    def token_request(self) -> Int: ...
    @property
    def token_position(self) -> Int: ...

def pack_tokens(anchors: Int, draft_tokens: Int, verify_len: Int, positions: Int, *, pad_to: int = 0) -> PackedTokens:
    """Pack anchors and the verified drafts of R requests into rows of one pass.

    Args:
        anchors: [R] int64.
        draft_tokens: [R, gamma] int64.
        verify_len: [R] int64, 0..gamma.
        positions: [R] int64 absolute position of each anchor.
        pad_to: number of rows T_pad; 0 = exactly sum(1 + verify_len).

    Raises:
        ShapeError: wrong shape or dtype.
        NativeError: a length is out of range or pad_to is too small.
    """

class RoundCounts:
    """What rounds drafted, were allowed, verified and accepted. Methods keep the GIL: they take microseconds.

    Attributes:
        drafted: blocks drafted.
        admitted: [draft_len] how often each position was allowed, in requests that drafted.
        verified: [draft_len] how often each was verified.
        accepted: [draft_len] how often each was accepted.

    Args:
        draft_len: drafts of one request at most, 0..64.
        most_recent: rounds that are kept for `take_recent`.
    """

    def __init__(self, draft_len: int, *, most_recent: int) -> None: ...
    @property
    def drafted(self) -> int: ...
    @property
    def admitted(self) -> list[int]: ...
    @property
    def verified(self) -> list[int]: ...
    @property
    def accepted(self) -> list[int]: ...
    def add(self, caps: Int, drafted: NDArray[np.bool_], verify_len: Int, accepted: Int, budget: int) -> None:
        """Count a round: [R] drafts that might be verified, who drafted, drafts verified, drafts accepted (a negative
        number where the logits were refused), and drafts of all requests that might be verified."""
    def take_recent(self) -> list[tuple[int, int, int]]:
        """Return drafts admitted, verified and made in each of the latest rounds that drafted, and forget them."""

def philox(seed: int, position: int, stream: int, block: int = 0) -> tuple[int, int, int, int]:
    """Return the four uint32 words of Philox4x32-10 for one (seed, position, stream, block)."""

def philox_raw(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return Philox4x32-10 of a raw counter (4 words) and key (2 words), for known-answer tests."""

# Decision functions, exposed so that proofs can enumerate the law the core really implements.

def row_masses(logits: Float, temperature: float, top_k: int = 0, top_p: float = 1.0) -> UInt:
    """Return the [V] integer masses of one logit row after temperature, top-k, top-p. Raises NativeError on a bad row."""

def residual_masses(target: UInt, draft: UInt) -> UInt:
    """Return the [V] integer residual of two mass rows (all 0 when target <= draft everywhere)."""

def accept_test(bits: int, target_mass: int, target_total: int, draft_mass: int, draft_total: int) -> bool:
    """Return whether a draft token with these masses is accepted by the uniform made of 64 random bits."""

def pick(masses: UInt, bits: int) -> int:
    """Return the id that 64 random bits select from integer masses (two-level inverse CDF), -1 when all are 0."""

def coupled_pick(masses: UInt, seed: int, position: int) -> int:
    """Return the id that coupled noise selects from [V] integer masses, -1 when all are 0."""

def exp2_exact(x: Float) -> Float:
    """Return 2**x of a [n] array, |x| <= 126, with the pinned polynomial."""

def exponential_exact(bits: NDArray[np.uint32]) -> Float:
    """Return the [n] exponential variates (in units of ln 2) made of 32-bit words."""

def sigmoid_exact(x: Float) -> Float:
    """Return the pinned logistic function of a [n] array."""

def tanh_exact(x: Float) -> Float:
    """Return the pinned hyperbolic tangent of a [n] array."""

def simd_level() -> SimdLevel:
    """Return the instruction set in use: the best this machine has unless `set_simd_level` changed it."""

def set_simd_level(level: SimdLevel) -> None:
    """Choose the instruction set, for tests and benchmarks. Raises NativeError when the machine lacks it."""
