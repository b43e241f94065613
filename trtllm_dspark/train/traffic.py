"""Train on what a server recorded (docs/file_formats.md, Traffic records)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtllm_dspark.checkpoint import Checkpoint, DrafterConfig
from trtllm_dspark.errors import CheckpointError
from trtllm_dspark.traffic.layout import TrafficRecord, read_info
from trtllm_dspark.traffic.shards import read_shard, shard_numbers
from trtllm_dspark.train.features import Captured, FeatureCache, compress
from trtllm_dspark.train.responses import Response

DOMAIN = "traffic"


def read_traffic(directory: Path, target: Checkpoint, drafter: DrafterConfig, features: FeatureCache) -> list[Response]:
    """Return the records as sequences; `features` then holds what the server captured of them, and of no others.

    A record holds the output only, so the context of its blocks begins with the output's first token, at its own
    position, and the first block starts at the second.

    Raises:
        UsageError: the directory holds no records or damaged ones.
        CheckpointError: they are of another target or of other layers.
    """
    info = read_info(directory)
    if info.target_checkpoint != tuple(sorted(file.sha256 for file in target.files)):
        raise CheckpointError(f"{directory} was recorded with another target; train for the one that was served")
    if info.target_layer_ids != drafter.target_layer_ids:
        layers = ",".join(map(str, info.target_layer_ids))
        raise CheckpointError(f"{directory} holds features of layers {layers}; add --target_layer_ids {layers}")
    responses: list[Response] = []
    for number in shard_numbers(directory):
        for record in read_shard(directory, number, info):
            response = _response(record, len(responses))
            if response.num_anchors < 1:
                continue
            if response not in features:
                features.put(response, Captured(*compress(record.features), record.top_ids, record.top_probs))
            responses.append(response)
    # Records that the server has dropped or purged live on nowhere.
    features.keep_only(responses)
    return responses


def _response(record: TrafficRecord, index: int) -> Response:
    tokens = tuple(int(token) for token in np.asarray(record.token_ids))
    temperature = float(record.meta.get("temperature", 0.0))
    return Response(DOMAIN, temperature, 1, tokens, index, record.start_position)
