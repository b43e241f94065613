"""Training on recorded traffic equals training on the same sequences, as far as the record goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_models import write_drafter

from trtllm_dspark.checkpoint import Checkpoint, load_drafter
from trtllm_dspark.errors import CheckpointError, UsageError
from trtllm_dspark.reference._layers import decoder_layer, rms_norm, weight
from trtllm_dspark.reference.models import drafter_context, target_forward
from trtllm_dspark.traffic.layout import TrafficInfo, TrafficRecord, to_bfloat16
from trtllm_dspark.traffic.shards import ShardWriter, purge
from trtllm_dspark.train.data import collate
from trtllm_dspark.train.model import backbone
from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response


def record(target: Checkpoint, response: Response) -> TrafficRecord:
    """Return what a server would have recorded of a sequence."""
    ids, start = response.token_ids, response.response_start
    out = target_forward(target.config, target.arrays, ids[:-1], feature_layer_ids=(0, 2))
    logits = out.logits[start:]
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    top = np.argsort(-probs, -1)[:, :8]
    return TrafficRecord(
        token_ids=np.array(ids[start:], np.int32),
        start_position=start,
        features=to_bfloat16(out.features[start:].astype(np.float32)),
        top_ids=top.astype(np.int32),
        top_probs=np.take_along_axis(probs, top, -1).astype(np.float16),
        rounds=np.zeros((0, 3), np.int32),
        meta={"temperature": 0.7, "num_output_tokens": len(ids) - start, "engine_hash": "x"},
    )


@pytest.fixture
def info(target: Checkpoint) -> TrafficInfo:
    return TrafficInfo(
        target_checkpoint=tuple(sorted(file.sha256 for file in target.files)),
        target_weight_dtype="float32",
        target_layer_ids=(0, 2),
        hidden_size=64,
        vocab_size=256,
        top_k=8,
        prompts="drop",
    )


def write_traffic(directory: Path, info: TrafficInfo, target: Checkpoint, responses: list[Response]) -> Path:
    """Record sequences, three a shard."""
    writer = ShardWriter(directory, info, max_bytes=1 << 30)
    for part in (responses[:3], responses[3:]):
        writer.write([record(target, response) for response in part])
    writer.close()
    return directory


@pytest.fixture
def traffic(target: Checkpoint, info: TrafficInfo, responses: list[Response], tmp_path: Path) -> Path:
    return write_traffic(tmp_path / "traffic", info, target, responses)


def test_blocks_stand_at_their_own_positions(
    config: TrainConfig, target: Checkpoint, traffic: Path, responses: list[Response], tmp_path: Path
) -> None:
    drafter_dir = write_drafter(tmp_path / "drafter", vocab_size=256)
    run = Run(Preparation(replace(config, init_from=str(drafter_dir))), [], traffic=traffic)
    trainer = run.trainer
    share = trainer._sampler.step(1)[0]
    captured = trainer.capture([trainer._responses[i] for i in share.indices])
    blocks, targets = collate(share, trainer._responses, captured, trainer.trainer.batch, None, 1.0)
    hidden = backbone(trainer.parameters, trainer.frozen, run.drafter, blocks)
    arrays = load_drafter(drafter_dir, target.config).arrays
    slot = 0
    for index, anchors in zip(share.indices, share.anchors, strict=True):
        known = trainer._responses[index]
        (whole,) = (r for r in responses if r.token_ids[r.response_start :] == known.token_ids)
        out = target_forward(target.config, target.arrays, whole.token_ids, feature_layer_ids=(0, 2))
        for anchor in anchors:
            first, at = whole.response_start, whole.response_start + int(anchor)
            context = drafter_context(run.drafter, arrays, out.features[first:at], first_position=first)
            block = reference_block(run.drafter, arrays, context, known.token_ids[anchor], at, target)
            np.testing.assert_allclose(hidden[slot : slot + 5].detach(), block, rtol=0.05, atol=0.05)
            slot += 5
    best = targets.top_ids[:, 0][targets.weights > 0]
    assert len(best) > 0
    run.close()


def reference_block(config, arrays, context, anchor: int, position: int, target: Checkpoint) -> np.ndarray:
    """Return the hidden rows of a block whose context lacks the first tokens."""
    ids = np.array([anchor] + [config.mask_token_id] * (config.block_size - 1))
    x = weight(target.arrays, "embed.weight", np.float64)[ids]
    positions = np.arange(position, position + config.block_size)
    everything = np.ones((config.block_size, len(context[0].keys) + config.block_size), np.bool_)
    for layer in range(config.backbone.num_layers):
        x = decoder_layer(config.backbone, arrays, layer, x, positions, everything, context[layer])
    return rms_norm(arrays, "norm", x, config.backbone.rms_norm_eps)


def test_traffic_alone_trains_and_resumes(config: TrainConfig, traffic: Path, tmp_path: Path) -> None:
    def sitting(output_dir: Path, until: int, *, resume: bool) -> list[float]:
        found: list[float] = []
        run = Run(Preparation(replace(config, output_dir=output_dir, resume=resume)), [], traffic=traffic)
        run.train(stop=lambda: run.trainer.steps_done == until, told=lambda report, _: found.append(report.loss))
        run.close()
        return found

    whole = sitting(tmp_path / "whole", 6, resume=False)
    first = sitting(tmp_path / "parts", 3, resume=False)
    assert len(whole) == 6
    assert first + sitting(tmp_path / "parts", 6, resume=True) == whole


def test_copies_of_records_are_private_and_go_when_the_records_went(
    config: TrainConfig, target: Checkpoint, info: TrafficInfo, traffic: Path, responses: list[Response]
) -> None:
    copies = config.output_dir / "traffic_features"

    def kept() -> set[str]:
        Run(Preparation(config), [], traffic=traffic).close()
        assert copies.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in copies.iterdir()} == {0o600}
        return {path.name for path in copies.iterdir()}

    before = kept()
    assert len(before) == 5  # one record is too short for a block
    # Files of a version that left them open.
    copies.chmod(0o755)
    for path in copies.iterdir():
        path.chmod(0o644)
    assert kept() == before
    purge(traffic, info)
    write_traffic(traffic, info, target, [responses[number] for number in (5, 3, 4, 1)])
    after = kept()
    assert len(after) == 4
    assert not after & before


def test_traffic_of_other_layers_or_another_target_is_refused(config: TrainConfig, traffic: Path) -> None:
    with pytest.raises(CheckpointError, match="add --target_layer_ids 0,2"):
        Run(Preparation(replace(config, target_layer_ids=(0, 1))), [], traffic=traffic)
    path = traffic / "traffic.json"
    path.write_text(path.read_text("utf-8").replace('"target_checkpoint": [', '"target_checkpoint": ["0", '), "utf-8")
    with pytest.raises(CheckpointError, match="another target"):
        Run(Preparation(config), [], traffic=traffic)


def test_a_directory_without_records_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no traffic records"):
        Run(Preparation(config), [], traffic=tmp_path)
