"""The toy pair does what its hand computations say, by an independent forward pass."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers.toy_pair import (
    CONFIDENT,
    DOUBTFUL,
    END_TEXT,
    LOOP_TEXT,
    ToyPair,
    accepted_len,
    per_position,
    write_toy_pair,
)
from helpers.toy_tokenizer import EOS, MASK, VOCAB_SIZE, encode
from tokenizers import Tokenizer

from trtllm_dspark.checkpoint import Checkpoint, DrafterCheckpoint, load_drafter, load_target
from trtllm_dspark.checkpoint.int8_rows import quantise_rows
from trtllm_dspark.reference.models import drafter_block, drafter_context, target_forward


@pytest.fixture(scope="module", params=[{}, {"num_layers": 2, "num_heads": 1}], ids=["usual", "small"])
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ToyPair:
    return write_toy_pair(tmp_path_factory.mktemp("toy"), **request.param)


@pytest.fixture(scope="module")
def target(pair: ToyPair) -> Checkpoint:
    return load_target(pair.target_dir)


@pytest.fixture(scope="module")
def drafter(pair: ToyPair, target: Checkpoint) -> DrafterCheckpoint:
    return load_drafter(pair.drafter_dir, target.config)


def _int8_columns(values: npt.NDArray[np.float32], block: int) -> npt.NDArray[np.float32]:
    """Round a matrix to int8 with one scale for every `block` columns of a row."""
    rows = values.reshape(-1, block)
    rounded, scales = quantise_rows(rows)
    return (rounded * scales[:, None]).reshape(values.shape)


@pytest.mark.parametrize("int8", [False, True])
def test_toy_target_logits_are_the_stated_ones(pair: ToyPair, target: Checkpoint, int8: bool) -> None:
    arrays = dict(target.arrays)
    if int8:
        arrays = {name: _int8_columns(v, 64) if v.ndim == 2 else v for name, v in arrays.items()}
    tokens = np.arange(VOCAB_SIZE)

    logits = target_forward(target.config, arrays, tokens).logits

    expected = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    expected[tokens, pair.successor] = pair.target_logit
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_toy_drafter_chain_and_confidence_are_the_stated_ones(
    pair: ToyPair, target: Checkpoint, drafter: DrafterCheckpoint
) -> None:
    config, arrays = drafter.config, drafter.arrays
    features = target_forward(
        target.config, target.arrays, encode("abc"), feature_layer_ids=config.target_layer_ids
    ).features
    context = drafter_context(config, arrays, features)
    block = drafter_block(config, arrays, context, encode("d")[0], target_arrays=target.arrays)
    np.testing.assert_array_equal(block.base_logits, np.zeros((7, VOCAB_SIZE)))
    np.testing.assert_array_equal(block.hidden, np.zeros((7, 256)))

    previous = arrays["markov.w1.weight"]
    bias = previous @ arrays["markov.w2.weight"].T
    confidence = 1 / (1 + np.exp(-(previous @ arrays["confidence.weight"][256:] + arrays["confidence.bias"])))
    for token in range(VOCAB_SIZE):
        drafts, confidences = pair.drafts(token, 1)
        assert bias[token].argmax() == drafts[0]
        assert confidence[token] == pytest.approx(confidences[0], abs=1e-5)
        np.testing.assert_allclose(np.sort(bias[token])[:-1], 0, atol=1e-4)


def test_toy_rounds_counted_by_hand(pair: ToyPair) -> None:
    # Mistakes follow the 5th, 10th, ... byte of the loop: "e", "j"... The prompt "a" makes "b" the first anchor.
    # Drafts after "b": c d e and then a wrong one, so 3 of 7 are accepted and "f" comes from the target.
    tokens, confidences = pair.drafts(encode("b")[0], 5)
    assert tokens == encode("cdegh")  # the wrong successor of "e" is "g", and "h" follows it
    assert confidences == [CONFIDENT, CONFIDENT, CONFIDENT, DOUBTFUL, CONFIDENT]
    rounds = pair.rounds(encode("a")[0], max_tokens=12, max_draft_len=7)
    assert [(entry.verified, entry.accepted) for entry in rounds] == [(7, 3), (6, 4), (1, 1)]
    # b | cdef | gh,C3,A9,blank | ij: eleven tokens in three rounds.
    assert accepted_len(rounds) == pytest.approx(11 / 3)
    assert per_position(rounds, 7) == ([3, 2, 2, 2, 2, 2, 1], [3, 2, 2, 1, 0, 0, 0])
    cut = pair.rounds(encode("a")[0], max_tokens=12, max_draft_len=7, threshold=0.5)
    # 0.9 ** 3 = 0.73 is above the threshold, 0.73 * 0.2 is not: no rejected draft is verified.
    assert [(entry.verified, entry.accepted) for entry in cut] == [(3, 3), (4, 4), (1, 1)]


def test_toy_without_mistakes_accepts_every_draft(tmp_path: Path) -> None:
    pair = write_toy_pair(tmp_path, mistake_every=None)
    rounds = pair.rounds(encode("a")[0], max_tokens=1 + 8 * 5, max_draft_len=7)
    assert accepted_len(rounds) == 8.0
    assert per_position(rounds, 7) == ([5] * 7, [5] * 7)


def test_toy_text_goes_round_the_loop_and_ends_where_told(pair: ToyPair, target: Checkpoint) -> None:
    assert target.tokenizer is not None
    tokenizer = Tokenizer.from_str(target.tokenizer.tokenizer_json)
    assert tokenizer.encode(LOOP_TEXT).ids == encode(LOOP_TEXT)
    loop = encode(LOOP_TEXT)
    assert len(set(loop)) == len(loop) > len(LOOP_TEXT)
    assert tokenizer.decode(pair.continuation(loop[-1], len(loop))) == LOOP_TEXT
    assert pair.continuation(encode("!")[0], 3) == [*encode(END_TEXT[1:]), EOS]
    assert sorted(pair.successor) == list(range(VOCAB_SIZE))
    assert target.config.eos_token_ids == (EOS,)
    assert json.loads((pair.drafter_dir / "config.json").read_text())["mask_token_id"] == MASK
    # A character of three bytes is not text until its last token is there.
    assert tokenizer.decode(encode("€")[:2]) == "\ufffd"


def test_toy_probabilities_follow_from_logits(tmp_path: Path) -> None:
    pair = write_toy_pair(tmp_path, target_logit=5.0, draft_logit=3.0)
    wrong = encode("e")[0]
    target, draft = pair.probabilities(wrong, temperature=2.0)
    assert target[encode("f")[0]] == pytest.approx(np.exp(2.5) / (np.exp(2.5) + 255))
    assert draft[encode("g")[0]] == pytest.approx(np.exp(1.5) / (np.exp(1.5) + 255))
    assert target.sum() == pytest.approx(1)
    arrays = load_drafter(pair.drafter_dir, load_target(pair.target_dir).config).arrays
    logits = arrays["markov.w2.weight"] @ arrays["markov.w1.weight"][wrong]
    weights = np.exp(logits.astype(np.float64) / 2)
    np.testing.assert_allclose(weights / weights.sum(), draft, atol=1e-9)


def test_toy_own_lm_head_is_zero(tmp_path: Path) -> None:
    pair = write_toy_pair(tmp_path, own_lm_head=True)
    drafter = load_drafter(pair.drafter_dir, load_target(pair.target_dir).config)
    assert not drafter.arrays["lm_head.weight"].any()
