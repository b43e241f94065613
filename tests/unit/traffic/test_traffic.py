"""Traffic records: what was recorded is what the target computed, and the directory survives what can happen to it."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine, collect_outputs, greedy, next_token, token_ids

from trtllm_dspark.cli.main import main
from trtllm_dspark.engine_dir import Manifest, open_engine_dir
from trtllm_dspark.errors import EngineMismatch, UsageError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.traffic import shards
from trtllm_dspark.traffic.layout import TrafficInfo, TrafficRecord, read_info, to_bfloat16
from trtllm_dspark.traffic.recorder import CollectOptions, TrafficRecorder, _Pending, likeliest
from trtllm_dspark.traffic.shards import ShardWriter, read_shard, shard_bytes, shard_numbers


@pytest.fixture
def manifest(toy_engine_dir: Path) -> Manifest:
    """Return the manifest of an engine with the widths of the engine in NumPy."""
    real = open_engine_dir(toy_engine_dir).manifest
    assert real.drafter_config is not None
    drafter = dataclasses.replace(real.drafter_config, target_layer_ids=(0,), target_hidden_size=2)
    target = dataclasses.replace(real.target_config, vocab_size=64)
    return dataclasses.replace(real, drafter_config=drafter, target_config=target)


def options(directory: Path, **changes: Any) -> CollectOptions:
    return CollectOptions(directory, **{"max_bytes": 1 << 30, "share": 1.0, "top_k": 4, **changes})


def serve(recorder: TrafficRecorder, manifest: Manifest, requests: list[Request], **engine: Any) -> dict[str, Any]:
    session = Session(
        FakeEngine(max_seq_len=200, **engine), None, speculation="fixed", listener=recorder.listener(manifest)
    )
    for request in requests:
        session.add(request)
    return collect_outputs(session)


def request(index: int, prompt: list[int], **params: Any) -> Request:
    return Request(str(index), tuple(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params}))


def records(directory: Path) -> list[TrafficRecord]:
    info = read_info(directory)
    return [record for number in shard_numbers(directory) for record in read_shard(directory, number, info)]


def test_recorded_rows_are_the_targets_of_every_output_token(manifest: Manifest, tmp_path: Path) -> None:
    counts: list[str] = []
    recorder = TrafficRecorder(manifest, options(tmp_path / "t"), count=counts.append)
    prompts = [[index + 1, 7, index] for index in range(9)]  # more than there are slots
    stop = greedy(prompts[8], 20)[9]
    requests = [request(index, prompt, max_tokens=11 + index) for index, prompt in enumerate(prompts[:8])]
    requests.append(request(8, prompts[8], stop_token_ids=(stop,)))
    outputs = serve(recorder, manifest, requests)
    recorder.close()
    found = records(tmp_path / "t")
    assert counts == ["recorded"] * 9
    assert len(found) == 9
    for record in found:
        (index,) = (i for i, out in outputs.items() if token_ids(out) == record.token_ids.tolist())
        prompt, tokens = prompts[int(index)], record.token_ids.tolist()
        assert tokens == greedy(prompt, len(tokens))
        assert record.start_position == len(prompt)
        # The features of the engine in NumPy are a token and its position.
        assert record.features.tolist() == [[token, len(prompt) + i] for i, token in enumerate(tokens[:-1])]
        assert record.top_ids[:, 0].tolist() == tokens[1:]
        assert record.top_probs[:, 0] == pytest.approx(1.0, abs=1e-3)
        anchors, verified, accepted = record.rounds.T.tolist()
        assert anchors == np.cumsum([0, *(count + 1 for count in accepted[:-1])]).tolist()
        assert all(0 <= a <= v <= 4 for a, v in zip(accepted, verified, strict=True))
        assert record.meta["num_prompt_tokens"] == 3
        assert record.meta["engine_hash"] == manifest.engine_hash
    (stopped,) = (record for record in found if record.meta["finish_reason"] == "stop")
    assert stopped.token_ids[-1] == stop


def test_recorded_share_and_what_is_left_out(manifest: Manifest, tmp_path: Path) -> None:
    recorder = TrafficRecorder(manifest, options(tmp_path / "t", share=0.3))
    recorder._random.seed(1)
    serve(recorder, manifest, [request(index, [index % 60, index // 60]) for index in range(200)])
    serve(recorder, manifest, [request(index, [index], max_tokens=1) for index in range(20)])  # nothing to learn from
    recorder.close()
    assert 30 <= len(records(tmp_path / "t")) <= 90


def test_cancelled_and_failed_requests_are_not_recorded(manifest: Manifest, tmp_path: Path) -> None:
    recorder = TrafficRecorder(manifest, options(tmp_path / "t"))
    session = Session(FakeEngine(), None, speculation="fixed", listener=recorder.listener(manifest))
    session.add(request(1, [1], max_tokens=60))
    for _ in range(3):
        session.step()
    session.cancel("1")
    collect_outputs(session)
    serve(recorder, manifest, [request(2, [2], max_tokens=60)], fail_after=4)
    assert recorder._pending == {}
    recorder.close()
    assert shard_numbers(tmp_path / "t") == []


def test_prompt_is_a_keyed_hash_or_nothing_and_files_are_private(manifest: Manifest, tmp_path: Path) -> None:
    for mode in ("hash", "drop"):
        recorder = TrafficRecorder(manifest, options(tmp_path / mode, prompts=mode))
        serve(recorder, manifest, [request(0, [5, 6, 7])])
        recorder.close()
    (record,) = records(tmp_path / "hash")
    key = (tmp_path / "hash" / "hash_key").read_bytes()
    expected = hmac.digest(key, np.array([5, 6, 7], "<i4").tobytes(), hashlib.sha256)[:16].hex()
    assert record.meta["prompt_hash"] == expected
    assert "prompt_hash" not in records(tmp_path / "drop")[0].meta
    assert not (tmp_path / "drop" / "hash_key").exists()
    for mode in ("hash", "drop"):
        assert stat.S_IMODE((tmp_path / mode).stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / mode).iterdir()} == {0o600}


def test_size_cap_drops_the_oldest_shards_and_a_restart_goes_on(manifest: Manifest, tmp_path: Path) -> None:
    directory, info = tmp_path / "t", TrafficInfo.of_engine(manifest, top_k=4, prompts="drop")

    def record(token: int) -> TrafficRecord:
        rows = 2000
        return TrafficRecord(
            np.full(rows + 1, token, np.int32), 3, np.full((rows, 2), 0x3F80, np.uint16),
            np.zeros((rows, 4), np.int32), np.ones((rows, 4), np.float16), np.array([[0, 2, 1]], np.int32), {},
        )  # fmt: skip

    for start in (0, 10):
        writer = ShardWriter(directory, info, max_bytes=300_000)
        for token in range(start, start + 10):
            writer.write([record(token)])
            assert sum(shard_bytes(directory, number) for number in shard_numbers(directory)) <= 300_000
        writer.close()
    numbers = shard_numbers(directory)
    assert numbers == list(range(21 - len(numbers), 21))
    assert len(numbers) == 4
    found = records(directory)
    assert [entry.token_ids[0] for entry in found] == [16, 17, 18, 19]
    assert (found[0].features == 1.0).all()
    writer = ShardWriter(directory, info, max_bytes=1)
    writer.write([record(99)])  # one that is larger than the cap is kept alone
    writer.close()
    assert [entry.token_ids[0] for entry in records(directory)] == [99]


def test_leftovers_of_a_killed_writer_are_removed_and_a_second_writer_is_refused(
    manifest: Manifest, tmp_path: Path
) -> None:
    directory = tmp_path / "t"
    recorder = TrafficRecorder(manifest, options(directory))
    with pytest.raises(UsageError, match="another server collects"):
        TrafficRecorder(manifest, options(directory))
    serve(recorder, manifest, [request(0, [1])])
    recorder.close()
    (directory / ".tmp_tensors").write_bytes(b"half")
    (directory / "shard_00000002.safetensors").write_bytes(b"without its lines")
    TrafficRecorder(manifest, options(directory)).close()
    assert shard_numbers(directory) == [1]
    assert not list(directory.glob(".tmp_*"))
    assert not (directory / "shard_00000002.safetensors").exists()
    other = dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, weight_dtype="float32"))
    with pytest.raises(EngineMismatch, match="target_weight_dtype"):
        TrafficRecorder(other, options(directory))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(UsageError, match="holds no traffic records"):
        TrafficRecorder(manifest, options(tmp_path / "mine"))


def test_recorder_keeps_the_cap_where_it_is_below_a_usual_shard(
    manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts: list[str] = []
    sizes: list[int] = []
    cap = 1 << 20
    recorder = TrafficRecorder(manifest, options(tmp_path / "t", max_bytes=cap), count=counts.append, size=sizes.append)

    def finish(num_bytes: int, index: int) -> None:
        rows = num_bytes // 32
        pending = _Pending(
            tokens=[index] * (rows + 1),
            rounds=[(0, 2, 1)],
            features=[np.zeros((rows, 2), np.uint16)],
            tops=[(np.zeros((rows, 4), np.int32), np.ones((rows, 4), np.float16))],
        )
        recorder._queue.put(lambda: recorder._finish(pending, 3, {}))

    for index in range(30):
        finish(100_000, index)
    finish(700_000, 30)
    finish(200_000, 31)
    for _ in range(2):
        finish(2 * cap, 99)
    recorder.close()
    assert max(sizes) <= cap
    kept = [int(record.token_ids[0]) for record in records(tmp_path / "t")]
    assert kept[-2:] == [30, 31]
    assert counts.count("recorded") == 32
    assert counts.count("dropped") == 2
    assert caplog.text.count("it exceeds --collect_max_gb") == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("planted")])
def test_write_that_fails_loses_records_and_nothing_else(
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    counts: list[str] = []
    recorder = TrafficRecorder(manifest, options(tmp_path / "t", shard_bytes=1), count=counts.append)

    def full(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_file", full)
        outputs = serve(recorder, manifest, [request(i, [i]) for i in range(5)])
        while len(counts) < 5:
            os.sched_yield()
    assert all(token_ids(out) == greedy([int(i)], 20) for i, out in outputs.items())
    serve(recorder, manifest, [request(9, [9])])
    recorder.close()
    assert counts == ["dropped"] * 5 + ["recorded"]
    assert len([entry for entry in caplog.records if "cannot be written" in entry.message]) == 1
    assert [record.token_ids[0] for record in records(tmp_path / "t")] == [next_token([9])]


def test_copies_that_wait_are_bounded(manifest: Manifest, tmp_path: Path) -> None:
    counts: list[str] = []
    recorder = TrafficRecorder(manifest, options(tmp_path / "t", max_waiting_bytes=10), count=counts.append)
    serve(recorder, manifest, [request(0, [1])])
    recorder.close()
    assert counts == ["dropped"]


def test_collect_reports_verifies_and_purges(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "t"
    recorder = TrafficRecorder(manifest, options(directory))
    serve(recorder, manifest, [request(i, [i]) for i in range(3)])
    recorder.close()
    flag = f"--collect_dir={directory}"
    assert main(["collect", flag, "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["output_tokens"], report["shards"]) == (3, 60, 1)
    assert report["accepted_len"] > 1
    tensors = directory / "shard_00000001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    assert main(["collect", flag]) == 0
    assert main(["collect", flag, "--verify"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["collect", flag, "--purge"]) == 0
    assert not directory.exists()
    assert main(["collect", flag]) == 2
    assert "holds no traffic records" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"max_bytes": 10}, {"share": 0.0}, {"share": 1.5}, {"prompts": "keep"}])
def test_options_out_of_range_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        options(tmp_path, **changes).check()


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.1415927, 3e38, np.inf, np.nan], np.float32)
    back = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back[:4].tolist() == [1.0, 1.0, 1.015625, -3.140625]
    assert back[4] == pytest.approx(3e38, rel=1 / 256)
    assert np.isinf(back[5])
    assert np.isnan(back[6])


def test_likeliest_equals_a_full_sort() -> None:
    logits = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32) * 3
    ids, probs = likeliest(logits, 6)
    order = np.argsort(-logits, -1)[:, :6]
    full = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert (ids == order).all()
    assert probs == pytest.approx(np.take_along_axis(full, order, -1), abs=1e-3)
