"""What is captured of the target, and which blocks are drawn from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.training import make_run

from trtllm_dspark.checkpoint import Checkpoint
from trtllm_dspark.reference.models import target_forward
from trtllm_dspark.train.data import BatchConfig, Sampler, _sharpen
from trtllm_dspark.train.features import Capturer, FeatureCache, common_prefix, expand
from trtllm_dspark.train.pipeline import Preparation, TrainConfig
from trtllm_dspark.train.responses import Response


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


def test_a_shared_beginning_changes_no_bit(config: TrainConfig, responses: list[Response]) -> None:
    written = Preparation(config).feature_target
    engines = [written.open(max_batch_size=2, num_threads=1) for _ in range(2)]
    shared = Capturer(engines[0], None, 10, common_prefix(responses))
    alone = Capturer(engines[1], None, 10)
    for response in responses:
        one, other = shared.capture(response), alone.capture(response)
        for name in ("features", "scales", "top_ids", "top_probs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for engine in engines:
        engine.close()


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


def test_long_responses_are_left_out(
    config: TrainConfig, responses: list[Response], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(config, responses, max_seq_len=30)
    run.close()
    assert "1 responses exceed --max_seq_len 30" in caplog.text
