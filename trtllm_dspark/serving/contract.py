"""The one declaration of every tensor the Triton models accept and send.

`config.pbtxt` files, request parsing and the contract tests are all made from it. The names are those of the
`inflight_batcher_llm` repository (with its older and newer aliases); each input says what happens to it, and nothing is
accepted and then ignored: it works, or only its neutral value is taken, or it is refused by name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Use(enum.Enum):
    """What happens to an input."""

    FIELD = "field"  # becomes a field of the engine's request
    FLAG = "flag"  # read by the model itself
    NEUTRAL = "neutral"  # only values that change nothing are taken
    REFUSED = "refused"  # any value is refused; empty strings count as absent
    HARMLESS = "harmless"  # has no meaning where nothing is padded; any value is right


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor.

    Attributes:
        name: tensor name.
        dtype: Triton type without the TYPE_ prefix.
        dims: shape without the batch dimension.
        use: what happens to it.
        field: the engine's request field, for `Use.FIELD`.
        neutral: values that are taken, for `Use.NEUTRAL`.
        required: Triton refuses a request without it.
        reason: why it is refused, or why only the neutral value is taken.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    use: Use = Use.FLAG
    field: str = ""
    neutral: tuple[float, ...] = ()
    required: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor; `dims` without the batch dimension."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)


def _field(name: str, dtype: str, field: str, dims: tuple[int, ...] = (1,), *, required: bool = False) -> Input:
    return Input(name, dtype, dims, Use.FIELD, field=field, required=required)


def _neutral(name: str, dtype: str, neutral: tuple[float, ...], reason: str) -> Input:
    return Input(name, dtype, (1,), Use.NEUTRAL, neutral=neutral, reason=reason)


def _refused(name: str, dtype: str, dims: tuple[int, ...], reason: str) -> Input:
    return Input(name, dtype, dims, Use.REFUSED, reason=reason)


_NO_PENALTIES = "penalties are not implemented"
_NO_BEAMS = "beam search and several sequences a request are not implemented; send one request for each"
_NO_LOGITS = "logits are not returned"
_NO_LORA = "LoRA is not implemented"
_NO_PROMPT_TABLE = "prompt tuning and multimodal input are not implemented"
_NO_GUIDE = "guided decoding is not implemented"
_NO_BIAS = "embedding bias is not implemented"
_NO_BAD_WORDS = "bad words are not implemented"
_NO_ENCODER = "encoder-decoder models are not implemented"
_NO_RETENTION = "KV cache retention is not implemented"
_NO_DRAFTS = "the engine drafts by itself; drafts of the client are not taken"

# Shared by text and token level.
_COMMON: tuple[Input, ...] = (
    _neutral("num_return_sequences", "INT32", (1,), _NO_BEAMS),
    _neutral("beam_width", "INT32", (1,), _NO_BEAMS),
    _field("end_id", "INT32", "end_id"),
    Input("pad_id", "INT32", use=Use.HARMLESS),
    _field("temperature", "FP32", "temperature"),
    _neutral("repetition_penalty", "FP32", (1.0,), _NO_PENALTIES),
    _neutral("presence_penalty", "FP32", (0.0,), _NO_PENALTIES),
    _neutral("frequency_penalty", "FP32", (0.0,), _NO_PENALTIES),
    _field("min_tokens", "INT32", "min_tokens"),
    _field("min_length", "INT32", "min_tokens"),
    _field("seed", "UINT64", "seed"),
    _field("random_seed", "UINT64", "seed"),
    _field("return_log_probs", "BOOL", "logprobs"),
    _neutral("return_context_logits", "BOOL", (0,), _NO_LOGITS),
    _neutral("return_generation_logits", "BOOL", (0,), _NO_LOGITS),
    Input("return_perf_metrics", "BOOL"),
    Input("return_num_input_tokens", "BOOL"),
    Input("return_num_output_tokens", "BOOL"),
    Input("exclude_input_in_output", "BOOL"),
    Input("stop", "BOOL"),
    _field("num_draft_tokens", "INT32", "max_draft_len"),
    _field("latency_class", "STRING", "latency_class"),
    _field("ignore_eos", "BOOL", "ignore_eos"),
    _field("priority", "INT32", "priority"),
    _field("timeout_ms", "INT32", "timeout_ms"),
    _refused("prompt_embedding_table", "FP16", (-1, -1), _NO_PROMPT_TABLE),
    _refused("prompt_vocab_size", "INT32", (1,), _NO_PROMPT_TABLE),
    _refused("lora_task_id", "UINT64", (1,), _NO_LORA),
    _refused("lora_weights", "FP16", (-1, -1), _NO_LORA),
    _refused("lora_config", "INT32", (-1, 3), _NO_LORA),
    _refused("guided_decoding_guide_type", "STRING", (1,), _NO_GUIDE),
    _refused("guided_decoding_guide", "STRING", (1,), _NO_GUIDE),
)

TEXT_INPUTS: tuple[Input, ...] = (
    _field("text_input", "STRING", "prompt", required=True),
    _field("max_tokens", "INT32", "max_tokens", required=True),
    *_COMMON,
    _field("top_k", "INT32", "top_k"),
    _field("top_p", "FP32", "top_p"),
    _field("stop_words", "STRING", "stop", (-1,)),
    Input("stream", "BOOL"),
    _field("apply_chat_template", "BOOL", "apply_chat_template"),
    _neutral("length_penalty", "FP32", (0.0, 1.0), _NO_BEAMS),
    _neutral("use_draft_logits", "BOOL", (0,), _NO_DRAFTS),
    _refused("bad_words", "STRING", (-1,), _NO_BAD_WORDS),
    _refused("decoder_text_input", "STRING", (1,), _NO_ENCODER),
    _refused("image_input", "FP16", (-1, 3, -1, -1), _NO_PROMPT_TABLE),
    _refused("image_bytes_input", "UINT8", (-1, -1, -1, -1), _NO_PROMPT_TABLE),
    _refused("image_url_input", "STRING", (1,), _NO_PROMPT_TABLE),
    _refused("video_bytes_input", "UINT8", (-1, -1, -1, -1), _NO_PROMPT_TABLE),
    _refused("prompt_table_extra_id", "UINT64", (-1,), _NO_PROMPT_TABLE),
    _refused("embedding_bias_words", "STRING", (-1,), _NO_BIAS),
    _refused("embedding_bias_weights", "FP32", (-1,), _NO_BIAS),
)

TOKEN_INPUTS: tuple[Input, ...] = (
    _field("input_ids", "INT32", "prompt_token_ids", (-1,)),
    Input("input_lengths", "INT32", required=True),
    _field("request_output_len", "INT32", "max_tokens", required=True),
    *_COMMON,
    _field("runtime_top_k", "INT32", "top_k"),
    _field("runtime_top_p", "FP32", "top_p"),
    Input("streaming", "BOOL"),
    Input("stop_words_list", "INT32", (2, -1)),
    _refused("bad_words_list", "INT32", (2, -1), _NO_BAD_WORDS),
    _refused("embedding_bias", "FP32", (-1,), _NO_BIAS),
    _refused("draft_input_ids", "INT32", (-1,), _NO_DRAFTS),
    _refused("draft_logits", "FP32", (-1, -1), _NO_DRAFTS),
    _refused("draft_acceptance_threshold", "FP32", (1,), _NO_DRAFTS),
    _neutral("len_penalty", "FP32", (0.0, 1.0), _NO_BEAMS),
    _neutral("beam_search_diversity_rate", "FP32", (0.0,), _NO_BEAMS),
    _neutral("early_stopping", "BOOL", (0, 1), _NO_BEAMS),
    _refused("runtime_top_p_min", "FP32", (1,), "top-p decay is not implemented"),
    _refused("runtime_top_p_decay", "FP32", (1,), "top-p decay is not implemented"),
    _refused("runtime_top_p_reset_ids", "INT32", (1,), "top-p decay is not implemented"),
    _refused("prompt_table_extra_ids", "UINT64", (-1,), _NO_PROMPT_TABLE),
    _refused("decoder_input_ids", "INT32", (-1,), _NO_ENCODER),
    _refused("decoder_input_lengths", "INT32", (1,), _NO_ENCODER),
    _refused("encoder_input_features", "FP16", (-1, -1), _NO_ENCODER),
    _refused("encoder_output_lengths", "INT32", (1,), _NO_ENCODER),
    _refused("cross_attention_mask", "BOOL", (-1, -1), _NO_ENCODER),
    _refused("skip_cross_attn_blocks", "BOOL", (1,), _NO_ENCODER),
    _refused("mrope_rotary_cos_sin", "FP32", (-1,), _NO_PROMPT_TABLE),
    _refused("mrope_position_deltas", "INT64", (1,), _NO_PROMPT_TABLE),
    _refused("context_phase_params", "UINT8", (-1,), "disaggregated serving is not implemented"),
    *(
        _refused(f"retention_token_range_{name}", "INT32", (-1,), _NO_RETENTION)
        for name in ("starts", "ends", "priorities", "durations_ms")
    ),
    _refused("retention_decode_priority", "INT32", (1,), _NO_RETENTION),
    _refused("retention_decode_duration_ms", "INT32", (1,), _NO_RETENTION),
    *(
        _refused(f"lookahead_{name}", "INT32", (1,), "lookahead decoding is not implemented")
        for name in ("window_size", "ngram_size", "verification_set_size")
    ),
)

# Sent with every response when return_perf_metrics is set: upstream's ten, which belong together, and ours.
PERF_OUTPUTS: tuple[Output, ...] = (
    Output("kv_cache_alloc_new_blocks", "INT32"),
    Output("kv_cache_reused_blocks", "INT32"),
    Output("kv_cache_alloc_total_blocks", "INT32"),
    Output("arrival_time_ns", "INT64"),
    Output("first_scheduled_time_ns", "INT64"),
    Output("first_token_time_ns", "INT64"),
    Output("last_token_time_ns", "INT64"),
    Output("acceptance_rate", "FP32"),
    Output("total_accepted_draft_tokens", "INT32"),
    Output("total_draft_tokens", "INT32"),
    Output("accepted_len", "FP32"),
    Output("num_rounds", "INT32"),
    Output("verified_per_position", "INT32", (-1,)),
    Output("accepted_per_position", "INT32", (-1,)),
)

_COMMON_OUTPUTS: tuple[Output, ...] = (
    Output("finish_reason", "STRING"),
    Output("stop_reason", "STRING"),
    Output("cum_log_probs", "FP32", (-1,)),
    Output("output_log_probs", "FP32", (-1, -1)),
    Output("batch_index", "INT32"),
    Output("sequence_index", "INT32"),
    Output("num_input_tokens", "INT32"),
    Output("num_output_tokens", "INT32"),
    *PERF_OUTPUTS,
)

TEXT_OUTPUTS: tuple[Output, ...] = (Output("text_output", "STRING", (-1,)), *_COMMON_OUTPUTS)
TOKEN_OUTPUTS: tuple[Output, ...] = (
    Output("output_ids", "INT32", (-1, -1)),
    Output("sequence_length", "INT32", (-1,)),
    *_COMMON_OUTPUTS,
)

# Request parameters (JSON keys of /generate that name no tensor, gRPC `parameters`) that are understood or belong to
# Triton itself; every other one is refused, since a misspelt tensor name arrives as one.
KNOWN_PARAMETERS = frozenset(
    {"id", "timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "headers"}
)
KNOWN_PARAMETER_PREFIXES = ("triton_", "header_")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One published model.

    Attributes:
        name: directory and model name.
        token_level: ids in and out instead of text.
        decoupled: streams; a unary twin does not.
        publishes_metrics: its stub owns the metric families (exactly one does).
    """

    name: str
    token_level: bool
    decoupled: bool
    publishes_metrics: bool = False

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Declared inputs."""
        return TOKEN_INPUTS if self.token_level else TEXT_INPUTS

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Declared outputs."""
        return TOKEN_OUTPUTS if self.token_level else TEXT_OUTPUTS

    @property
    def stream_input(self) -> str:
        """Name of the input that asks for streaming."""
        return "streaming" if self.token_level else "stream"


GATE_MODEL = "dspark_engine"
"""Readiness gate: loaded only while the engine process is ready, so that /v2/health/ready tells the truth."""

MODELS: tuple[ModelSpec, ...] = (
    ModelSpec("ensemble", token_level=False, decoupled=True, publishes_metrics=True),
    ModelSpec("ensemble_unary", token_level=False, decoupled=False),
    ModelSpec("tensorrt_llm_bls", token_level=False, decoupled=True),
    ModelSpec("tensorrt_llm_bls_unary", token_level=False, decoupled=False),
    ModelSpec("tensorrt_llm", token_level=True, decoupled=True),
    ModelSpec("tensorrt_llm_unary", token_level=True, decoupled=False),
)
