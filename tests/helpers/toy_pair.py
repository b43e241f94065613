"""A target and a drafter whose every token and acceptance can be worked out by hand.

The target maps token t to pi(t), whatever came before: its layers add nothing to the residual stream, token t
is embedded as row t of a Hadamard matrix, and the output head holds row t at pi(t). The drafter's base logits
are zero, and its Markov factors encode pi', which differs from pi on a known set of tokens. All weights are
+-constant, so int8 storage is exact; the logit of the mapped token is `target_logit` (`draft_logit`), all
others are zero, so every distribution at any temperature is known too.

pi runs round the loop LOOP_TEXT. It also leads from "!" over "?" and "." to the end token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.tiny_models import drafter_config, layer_tensors, write_directory
from helpers.toy_tokenizer import CHAT_TEMPLATE, EOS, MASK, PAD, VOCAB_SIZE, encode, tokenizer_json
from trtllm_dspark.build import BuildConfig, build_engine

LOOP_TEXT = "abcdefghé ijklmnop€qrstuvwxyz😀ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
"""No byte occurs twice; three of its characters have two, three and four bytes."""
END_TEXT = "!?."
CONFIDENT, DOUBTFUL = 0.9, 0.2
"""Confidence of a draft whose previous token pi' maps rightly, and wrongly."""
_SIZE = VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class ToyRound:
    """One round, by hand."""

    verified: int
    """Draft tokens verified."""
    accepted: int
    """Draft tokens accepted."""


@dataclass(frozen=True, slots=True)
class ToyPair:
    """The pair on disk and what it computes."""

    target_dir: Path
    drafter_dir: Path
    block_size: int
    successor: npt.NDArray[np.int64]
    """pi, [V]."""
    draft_successor: npt.NDArray[np.int64]
    """pi', [V]."""
    target_logit: float
    draft_logit: float

    def continuation(self, token: int, count: int) -> list[int]:
        """Return the `count` tokens the target emits greedily after `token`."""
        emitted = []
        for _ in range(count):
            token = int(self.successor[token])
            emitted.append(token)
        return emitted

    def drafts(self, anchor: int, count: int) -> tuple[list[int], list[float]]:
        """Return the greedy draft chain after `anchor` and the confidence of each draft."""
        tokens, confidences = [], []
        for _ in range(count):
            right = self.draft_successor[anchor] == self.successor[anchor]
            confidences.append(CONFIDENT if right else DOUBTFUL)
            anchor = int(self.draft_successor[anchor])
            tokens.append(anchor)
        return tokens, confidences

    def rounds(
        self, last_prompt_token: int, max_tokens: int, max_draft_len: int, threshold: float | None = None
    ) -> list[ToyRound]:
        """Return the rounds of a greedy generation of `max_tokens` tokens (which must not reach the end token).

        The first token comes from the prefill. A round never verifies more drafts than tokens are left
        after its anchor's successor. With a threshold only the leading drafts whose running product of
        confidences is at least `threshold` are verified.
        """
        output = self.continuation(last_prompt_token, max_tokens)
        emitted, rounds = 1, []
        while emitted < max_tokens:
            tokens, confidences = self.drafts(output[emitted - 1], max_draft_len)
            verified = min(max_draft_len, max_tokens - emitted - 1)
            if threshold is not None:
                survivals = np.cumprod(confidences)
                verified = min(verified, int((survivals >= threshold).sum()))
            accepted = 0
            while accepted < verified and tokens[accepted] == output[emitted + accepted]:
                accepted += 1
            rounds.append(ToyRound(verified, accepted))
            emitted += accepted + 1
        return rounds

    def probabilities(self, token: int, temperature: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the target's and the drafter's distribution after `token`, [V] each."""
        rows = []
        for mapped, logit in ((self.successor, self.target_logit), (self.draft_successor, self.draft_logit)):
            weights = np.ones(VOCAB_SIZE)
            weights[mapped[token]] = np.exp(logit / temperature)
            rows.append(weights / weights.sum())
        return rows[0], rows[1]


def accepted_len(rounds: list[ToyRound]) -> float:
    """Return tokens emitted by the rounds over rounds, each round's own token included."""
    return sum(entry.accepted + 1 for entry in rounds) / len(rounds)


def per_position(rounds: list[ToyRound], max_draft_len: int) -> tuple[list[int], list[int]]:
    """Return how often each draft position was verified, and accepted."""
    verified = [sum(entry.verified > k for entry in rounds) for k in range(max_draft_len)]
    accepted = [sum(entry.accepted > k for entry in rounds) for k in range(max_draft_len)]
    return verified, accepted


def write_toy_pair(
    directory: Path,
    *,
    mistake_every: int | None = 5,
    block_size: int = 7,
    target_logit: float = 24.0,
    draft_logit: float = 24.0,
    own_lm_head: bool = False,
    num_layers: int = 3,
    num_heads: int = 4,
) -> ToyPair:
    """Write the pair below `directory` and return it.

    Args:
        directory: gets `target` and `drafter`.
        mistake_every: the drafter is wrong after every so-many-th token of the loop; None = never.
        block_size: gamma of the drafter.
        target_logit: logit of pi(t); the others are zero.
        draft_logit: logit of pi'(t); the others are zero.
        own_lm_head: store a zero output head with the drafter instead of sharing the target's.
        num_layers: decoder layers of the target, at least 2; the drafter has one less, but at most 2.
        num_heads: attention heads of both, two a KV head where they are even.
    """
    loop = encode(LOOP_TEXT)
    successor = _successor(loop)
    draft_successor = successor.copy()
    if mistake_every is not None:
        for token in loop[mistake_every - 1 :: mistake_every]:
            draft_successor[token] = successor[successor[token]]
    codes = _hadamard(_SIZE)
    target = _write_target(directory / "target", codes, successor, target_logit, _shape(num_heads), num_layers)
    wrong = successor != draft_successor
    config = _drafter_config(_shape(num_heads), block_size, num_layers)
    tensors = _drafter_tensors(config, codes, draft_successor, draft_logit, wrong)
    if own_lm_head:
        tensors["lm_head.weight"] = np.zeros((VOCAB_SIZE, _SIZE), np.float32)
    drafter = write_directory(directory / "drafter", config, tensors)
    return ToyPair(target, drafter, block_size, successor, draft_successor, target_logit, draft_logit)


def _successor(loop: list[int]) -> npt.NDArray[np.int64]:
    """Return pi as a permutation: the loop, and one cycle of all other tokens that begins with END_TEXT and EOS."""
    ending = [*encode(END_TEXT), EOS]
    rest = [token for token in range(VOCAB_SIZE) if token not in loop and token not in ending]
    successor = np.empty(VOCAB_SIZE, np.int64)
    for cycle in (loop, [*ending, *rest]):
        successor[cycle] = np.roll(cycle, -1)
    return successor


def _hadamard(size: int) -> npt.NDArray[np.float32]:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _encode_map(codes: npt.NDArray[np.float32], mapped: npt.NDArray[np.int64], logit: float) -> npt.NDArray[np.float32]:
    """Return W [V, size] with codes[t] . W[v] = logit where v = mapped[t], else 0."""
    rows = np.zeros_like(codes)
    np.add.at(rows, mapped, codes)
    return (rows * (logit / _SIZE)).astype(np.float32)


_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": 128,
    "head_dim": 64,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def _shape(num_heads: int) -> dict[str, Any]:
    num_kv_heads = num_heads // 2 if num_heads % 2 == 0 else num_heads
    return _SHAPE | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}


def _write_target(
    directory: Path,
    codes: npt.NDArray[np.float32],
    successor: npt.NDArray[np.int64],
    logit: float,
    shape: dict[str, Any],
    num_layers: int,
) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": codes, "model.norm.weight": np.ones(_SIZE, np.float32)}
    tensors["lm_head.weight"] = _encode_map(codes, successor, logit)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= layer_tensors(rng, config, prefix, qk_norm=False)
        # The two projections that write to the residual stream.
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            tensors[prefix + name] = np.zeros_like(tensors[prefix + name])
    write_directory(directory, config, tensors)
    (directory / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    return directory


def _drafter_config(shape: dict[str, Any], block_size: int, num_target_layers: int) -> dict[str, Any]:
    num_layers = min(2, num_target_layers - 1)
    overrides = {
        "num_target_layers": num_target_layers,
        "target_layer_ids": list(range(num_layers)),
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "block_size": block_size,
    }
    return drafter_config(**shape, **overrides, mask_token_id=MASK, markov_rank=_SIZE)


def _drafter_tensors(
    config: dict[str, Any],
    codes: npt.NDArray[np.float32],
    draft_successor: npt.NDArray[np.int64],
    logit: float,
    wrong: npt.NDArray[np.bool_],
) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    num_layers = config["num_hidden_layers"]
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for layer in range(num_layers):
        tensors |= layer_tensors(rng, config, f"layers.{layer}.", qk_norm=True)
    confidence = np.where(wrong, DOUBTFUL, CONFIDENT)
    # The codes are orthogonal, so this vector has the wanted logit with each of them.
    weight = np.log(confidence / (1 - confidence)) @ codes / _SIZE
    return tensors | {
        "fc.weight": (rng.standard_normal((_SIZE, num_layers * _SIZE)) / 16).astype(np.float32),
        "hidden_norm.weight": np.ones(_SIZE, np.float32),
        # Hidden states of zero: no base logits, no part in the confidence.
        "norm.weight": np.zeros(_SIZE, np.float32),
        "markov_head.markov_w1.weight": codes,
        "markov_head.markov_w2.weight": _encode_map(codes, draft_successor, logit),
        "confidence_head.proj.weight": np.concatenate([np.zeros(_SIZE), weight])[None].astype(np.float32),
        "confidence_head.proj.bias": np.zeros(1, np.float32),
    }


def build_toy_engine(pair: ToyPair, path: Path, *, max_batch_size: int = 4) -> Path:
    """Build an engine of the pair for requests of 512 tokens, 64 tokens a pass, and return its directory."""
    build_engine(
        BuildConfig(
            target_checkpoint=str(pair.target_dir),
            draft_checkpoint=str(pair.drafter_dir),
            output_dir=path,
            max_batch_size=max_batch_size,
            max_seq_len=512,
            max_num_tokens=64,
        )
    )
    return path
