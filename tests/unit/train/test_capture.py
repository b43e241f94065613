"""What is captured of the target, and which blocks are drawn from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.training import make_run

from trtllm_dspark.checkpoint import Checkpoint
from trtllm_dspark.reference.models import target_forward
from trtllm_dspark.train import target_engine
from trtllm_dspark.train.data import BatchConfig, Sampler, _sharpen
from trtllm_dspark.train.features import Captured, Capturer, FeatureCache, common_prefix, expand
from trtllm_dspark.train.pipeline import Preparation, TrainConfig
from trtllm_dspark.train.responses import Response


def test_feature_target_templates_see_the_special_tokens_of_the_checkpoint(target: Checkpoint, tmp_path: Path) -> None:
    assert target.tokenizer is not None
    template = "{{ bos_token }}|{{ eos_token }}"
    for said, rendered in (({}, "<|mask|>|<|end|>"), ({"bos_token": None, "eos_token": "<|pad|>"}, "|<|pad|>")):
        assets = replace(target.tokenizer, chat_template=template, special_tokens=said)
        checkpoint = replace(target, tokenizer=assets)
        written = target_engine.FeatureTarget(tmp_path, "x", checkpoint, (0,), 64)
        assert written.tokenizer().render_chat([]) == rendered


@pytest.mark.parametrize("draft_ids", [None, np.arange(1, 256, 3)])
def test_captured_equals_the_reference(
    config: TrainConfig, responses: list[Response], target: Checkpoint, draft_ids: np.ndarray | None
) -> None:
    prefix = common_prefix(responses)
    assert len(prefix) == 9
    engine = Preparation(config).feature_target.open(max_batch_size=2, num_threads=1)
    capturer = Capturer(engine, draft_ids, 10, prefix)
    for response in responses[:3]:
        captured = capturer.capture(response)
        ids = response.token_ids[:-1]
        out = target_forward(target.config, target.arrays, ids, feature_layer_ids=(0, 2))
        np.testing.assert_allclose(expand(captured), out.features, rtol=2e-3, atol=1e-3)
        logits = out.logits[response.response_start - 1 :]
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        allowed = np.arange(256) if draft_ids is None else draft_ids
        for row, (got_ids, got_probs) in enumerate(zip(captured.top_ids, captured.top_probs, strict=True)):
            best = allowed[np.argsort(-probs[row, allowed], kind="stable")[:10]]
            np.testing.assert_array_equal(got_ids, best)
            np.testing.assert_allclose(got_probs, probs[row, best], rtol=2e-3, atol=1e-6)
    engine.close()


def assert_prefix_changes_nothing(config: TrainConfig, prefix: tuple[int, ...], responses: list[Response]) -> None:
    """Capture with and without the common beginning and compare bit for bit."""
    written = Preparation(config).feature_target
    engines = [written.open(max_batch_size=2, num_threads=1) for _ in range(2)]
    shared = Capturer(engines[0], None, 10, prefix)
    alone = Capturer(engines[1], None, 10)
    for response in responses:
        one, other = shared.capture(response), alone.capture(response)
        assert len(one.top_ids) == len(response.token_ids) - response.response_start
        for name in ("features", "scales", "top_ids", "top_probs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for engine in engines:
        engine.close()


def test_a_shared_beginning_changes_no_bit(config: TrainConfig, responses: list[Response]) -> None:
    assert_prefix_changes_nothing(config, common_prefix(responses), responses)


def test_a_shared_beginning_may_be_longer_than_a_pass(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_engine, "MAX_PASS_TOKENS", 16)
    ids = tuple(range(20, 62))
    longer = [Response("x", 0.0, 28, (*ids[:26], token, *ids[26:])) for token in (70, 71)]
    prefix = common_prefix(longer)
    assert len(prefix) == target_engine.MAX_PASS_TOKENS + 10
    assert_prefix_changes_nothing(config, prefix, longer)


@pytest.mark.parametrize("start", [1, 9, 12, 13, 14])
def test_a_response_may_begin_inside_the_shared_beginning(config: TrainConfig, start: int) -> None:
    prefix = tuple(range(20, 33))
    assert_prefix_changes_nothing(config, prefix, [Response("x", 0.0, start, (*prefix, 40, 41, 42))])


def test_cached_targets_of_another_number_are_captured_anew(
    responses: list[Response], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier version left the first targets out where the common beginning reached into the response."""
    response = responses[0]
    length, answered = len(response.token_ids) - 1, len(response.token_ids) - response.response_start
    whole = Captured(
        np.ones((length, 6), np.float16),
        np.ones((length, 1), np.float32),
        np.ones((answered, 3), np.int32),
        np.ones((answered, 3), np.float16),
    )
    cache = FeatureCache(tmp_path / "cache", 1 << 20, "a")
    cache.put(response, whole)
    assert cache.get(response) is not None
    cache.put(response, replace(whole, top_ids=whole.top_ids[2:], top_probs=whole.top_probs[2:]))
    assert cache.get(response) is None
    assert "captured anew" in caplog.text


def test_cache_keeps_its_cap_and_drops_files_of_another_key(
    config: TrainConfig, responses: list[Response], tmp_path: Path
) -> None:
    engine = Preparation(config).feature_target.open(max_batch_size=2, num_threads=1)
    captured = [Capturer(engine, None, 10).capture(response) for response in responses]
    engine.close()
    cap = captured[0].num_bytes + captured[1].num_bytes
    cache = FeatureCache(tmp_path / "cache", cap, "a")
    for response, one in zip(responses, captured, strict=True):
        cache.put(response, one)
    assert responses[0] not in cache
    assert responses[-1] in cache
    found = FeatureCache(tmp_path / "cache", cap, "a").get(responses[-1])
    assert found is not None
    np.testing.assert_array_equal(found.features, captured[-1].features)
    assert responses[-1] not in FeatureCache(tmp_path / "cache", cap, "b")
    assert list((tmp_path / "cache").iterdir()) == []


def test_anchors_are_response_tokens_and_rows_end_with_the_sequence(responses: list[Response]) -> None:
    config = BatchConfig(6, 8, 5, 3, decay=4.0, sample_positions=False, seed=1)
    for step in (1, 2):
        for share in Sampler(responses, config, 3).step(step):
            for place, index in enumerate(share.indices):
                response = responses[index]
                anchors = share.anchors[place]
                assert anchors.min() >= response.response_start
                assert anchors.max() <= len(response.token_ids) - 2
                weights = share.weights.reshape(len(share.indices), 8, 5)[place]
                for anchor, row in zip(anchors, weights, strict=True):
                    inside = anchor + np.arange(5) + 1 < len(response.token_ids)
                    assert not row[~inside].any()
                # An anchor that only fills the row up has no weight, so none counts twice.
                counted = anchors[weights.any(-1)]
                assert len(set(counted)) == len(counted)


@pytest.mark.parametrize("sequences", [1, 13])
def test_an_epoch_trains_on_every_anchor_once(responses: list[Response], sequences: int) -> None:
    config = BatchConfig(sequences, 8, 5, 3, decay=4.0, sample_positions=False, seed=1)
    sampler = Sampler(responses, config, 3)
    every = {
        (i, response.response_start + t) for i, response in enumerate(responses) for t in range(response.num_anchors)
    }
    visits = sum(-(-response.num_anchors // 8) for response in responses)
    assert visits % sequences == 0, "an epoch ends with a step"
    orders = []
    for epoch in range(2):
        seen = []
        for step in range(epoch * visits // sequences, (epoch + 1) * visits // sequences):
            for share in sampler.step(step + 1):
                weights = share.weights.reshape(len(share.indices), 8, 5)
                for index, anchors, weight in zip(share.indices, share.anchors, weights, strict=True):
                    seen += [(int(index), int(anchor)) for anchor in anchors[weight.any(-1)]]
        assert len(seen) == len(set(seen))
        assert set(seen) == every
        orders.append(seen)
    assert orders[0] != orders[1]


def test_steps_are_drawn_from_seed_and_number_alone(responses: list[Response]) -> None:
    config = BatchConfig(4, 4, 5, 3, decay=4.0, sample_positions=True, seed=1)
    one, other = Sampler(responses, config, 2), Sampler(responses, config, 2)
    one.step(1)
    for first, second in zip(one.step(7), other.step(7), strict=True):
        np.testing.assert_array_equal(first.anchors, second.anchors)
        np.testing.assert_array_equal(first.rows, second.rows)


def test_lower_temperature_sharpens_and_counts_what_is_left_over() -> None:
    probs = np.array([[0.5, 0.25, 0.05]], np.float32)
    whole = np.array([0.5, 0.25, 0.05, 0.2]) ** 2
    np.testing.assert_allclose(_sharpen(probs, 0.5), (whole / whole.sum())[None, :3], rtol=1e-5)
    assert _sharpen(probs, 1.0) is probs


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.01, 0.05, 0.49])
def test_temperature_near_zero_stays_a_distribution(temperature: float) -> None:
    rows = [[0.02] * 4, [0.35, 0.3, 0.2, 0.15], [0.6, 0.3, 0.05, 0.05], [0.0] * 4]
    sharp = _sharpen(np.array(rows, np.float32), temperature)
    assert np.isfinite(sharp).all()
    assert (sharp.sum(-1) <= 1 + 1e-6).all()
    whole = (np.array([0.6, 0.3, 0.05, 0.05]) / 0.6) ** (1 / temperature)
    # The power of a float32 ratio: its rounding of 6e-8 times an exponent, where what is left is not below 1e-30.
    np.testing.assert_allclose(sharp[2], whole / whole.sum(), rtol=1e-4, atol=1e-30)
    assert not sharp[3].any()


def test_long_responses_are_left_out(
    config: TrainConfig, responses: list[Response], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(config, responses, max_seq_len=30)
    run.close()
    assert "1 responses exceed --max_seq_len 30" in caplog.text
