"""A candidate's trial over two sessions with engines in NumPy: the better drafter stays and no stream notices."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FakeEngine, greedy

from trtllm_dspark.engine_dir import GpuBuild, Manifest, open_engine_dir
from trtllm_dspark.engine_process import runner, swap
from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.loop import EngineLoop
from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.opening import check_interchangeable
from trtllm_dspark.engine_process.queue import RequestQueue
from trtllm_dspark.engine_process.requests import GenerationRequest, RequestLimits
from trtllm_dspark.engine_process.sequential import RatioSums, difference_interval
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.engine_process.streams import Stream
from trtllm_dspark.engine_process.swap import DrafterSwap, TrialOptions
from trtllm_dspark.errors import EngineError, EngineMismatch, UsageError
from trtllm_dspark.load import LoadMonitor, Sample
from trtllm_dspark.runtime import Session
from trtllm_dspark.runtime.load_control import LoadControl


def lane(engine: FakeEngine, name: str, load: LoadControl | None = None) -> Lane:
    limit = None if load is None else load.request_limit
    session = Session(engine, None, speculation="fixed")
    return Lane(session, make_session_request, engine.max_batch_size, name, request_limit=limit)


class Memory:
    """A device of 80 GB on which 8 are free beside the first engine, and a second one takes 7."""

    def __init__(self) -> None:
        self.engines = 1
        self.others = 0.0

    def read(self) -> Sample:
        free = 8.0 - 7.0 * (self.engines - 1) - self.others
        return Sample(time.monotonic(), memory_total_bytes=80 * 10**9, memory_free_bytes=int(free * 1e9))

    def close(self) -> None:
        pass


class Server:
    """A loop on a thread of its own, and what may be swapped in."""

    def __init__(self, candidate: FakeEngine | Exception, memory: Memory | None = None) -> None:
        self.memory = memory
        self.load = None
        if memory is not None:
            self.load = LoadControl(LoadMonitor(memory, interval_s=0.005), max_requests=4, max_drafts=16)
            self.load.start()
        self.incumbent = FakeEngine(max_seq_len=400, mistake_every=2)
        self.candidate = candidate
        self.metrics = EngineMetrics()
        self.promoted: list[str] = []
        self.answers: dict[int, list[dict[str, Any]]] = {}
        self.loop = EngineLoop(
            lane(self.incumbent, "old", self.load), queue=RequestQueue(max_waiting=10_000), metrics=self.metrics
        )
        self.loop.swap = self.swap = DrafterSwap(
            self.loop.lanes,
            self.open,
            self.metrics,
            wake=self.loop.wake,
            on_promoted=lambda new: self.promoted.append(new.engine_dir),
            on_memory_changed=self.memory_changed,
        )
        self._thread = threading.Thread(target=self.loop.run, daemon=True)  # a failed test ends
        self._thread.start()

    def open(self, engine_dir: str) -> Lane:
        if isinstance(self.candidate, Exception):
            raise self.candidate
        if self.memory is not None:
            self.memory.engines = 2
        return lane(self.candidate, engine_dir, self.load)

    def memory_changed(self) -> None:
        if self.memory is not None and self.load is not None:
            closed = [e for e in (self.incumbent, self.candidate) if isinstance(e, FakeEngine) and "close" in e.passes]
            self.memory.engines = 2 - len(closed)
            self.load.rebase_memory()

    def submit(self, handle: int, *, max_tokens: int = 24) -> None:
        fields: dict[str, Any] = {
            "prompt_token_ids": (handle % 60, handle // 60), "prompt_text": "", "max_tokens": max_tokens,
            "min_tokens": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None, "stop": (),
            "stop_token_ids": (), "ignore_eos": True, "max_draft_len": None, "priority": 5, "timeout_s": None,
            "stream": True, "echo": False, "return_tokens": True, "return_stats": False, "return_token_texts": False,
            "logprobs": False,
        }  # fmt: skip
        items: list[dict[str, Any]] = []
        self.answers[handle] = items
        stream = Stream(
            send=lambda frame: items.extend(frame.get("items", [frame])), connection_id=handle, handle=handle,
            session_id=str(handle), request_id="", arrival=time.monotonic(),
        )  # fmt: skip
        stream.request = GenerationRequest(**fields)
        self.loop.submit(stream)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline, self.swap.status()
            time.sleep(0.005)

    def sampled(self) -> None:
        """Wait until what the memory is now has been read from the beginning."""
        assert self.load is not None
        count = self.load.metrics()["dspark_load_samples"]
        self.wait(lambda: self.load.metrics()["dspark_load_samples"] >= count + 3)

    def state(self, name: str) -> bool:
        return bool(self.swap.status()["state"] == name)

    def finished(self, handle: int) -> bool:
        return any("finish_reason" in item or "code" in item for item in self.answers[handle])

    def run_until_decided(self, first: int = 0) -> None:
        """Keep the lanes busy with requests until the swap has an outcome."""
        handle = first
        while "outcome" not in self.swap.status():
            self.submit(handle)
            handle += 1
            self.wait(lambda: self.loop.num_waiting < 8 or "outcome" in self.swap.status())
        self.wait(lambda: self.state("idle"))

    def stop(self) -> None:
        self.wait(lambda: all(self.finished(handle) for handle in self.answers))
        self.loop.request_stop()
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        if self.load is not None:
            self.load.stop()

    def assert_every_answer_is_right(self, *, except_codes: tuple[str, ...] = ()) -> None:
        assert self.answers
        for handle, items in self.answers.items():
            if items[-1].get("code") in except_codes:
                continue
            tokens = [token for item in items for token in item["tokens"]]
            assert tokens == greedy([handle % 60, handle // 60], len(tokens))
            assert items[-1]["finish_reason"] == "length"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(candidate: FakeEngine | Exception, memory: Memory | None = None) -> Server:
        started.append(Server(candidate, memory))
        return started[-1]

    yield start
    for server in started:
        server.stop()


OPTIONS = TrialOptions(min_requests=5, max_requests=400)


def test_better_candidate_takes_over_and_the_old_engine_is_closed_when_empty(serve: Callable[..., Server]) -> None:
    server = serve(FakeEngine(max_seq_len=400, mistake_every=0))
    server.submit(59, max_tokens=300)  # begins in the old lane and outlives the decision
    server.wait(lambda: bool(server.answers[59]))
    server.swap.start("new", OPTIONS)
    server.run_until_decided(60)
    status = server.swap.status()
    assert (status["outcome"], status["serving_engine_dir"], server.promoted) == ("promoted", "new", ["new"])
    assert status["accepted_len"]["candidate"] > status["accepted_len"]["incumbent"]
    assert status["difference_low"] > 0
    assert server.incumbent.passes[-1] == "close"
    passes = len(server.incumbent.passes)
    server.submit(1)
    server.wait(lambda: server.finished(1))
    assert len(server.incumbent.passes) == passes
    server.stop()
    server.assert_every_answer_is_right()
    series = server.metrics.snapshot()
    assert series["dspark_swaps"]["outcome=promoted"] == 1.0
    assert series["dspark_swap_state"] == {
        "state=idle": 1.0, "state=loading": 0.0, "state=trial": 0.0, "state=draining": 0.0,
    }  # fmt: skip


def test_worse_candidate_is_rolled_back_and_its_streams_finish(serve: Callable[..., Server]) -> None:
    candidate = FakeEngine(max_seq_len=400, mistake_every=1)
    server = serve(candidate)
    server.swap.start("new", OPTIONS)
    server.run_until_decided()
    status = server.swap.status()
    assert (status["outcome"], status["serving_engine_dir"], server.promoted) == ("rolled_back", "old", [])
    assert status["difference_high"] < 0
    assert candidate.passes[-1] == "close"
    server.stop()
    server.assert_every_answer_is_right()


def test_candidate_that_is_no_better_is_rolled_back_and_within_a_margin_promoted(serve: Callable[..., Server]) -> None:
    server = serve(FakeEngine(max_seq_len=400, mistake_every=2))
    server.swap.start("new", dataclasses.replace(OPTIONS, max_requests=60))
    server.run_until_decided()
    assert server.swap.status()["outcome"] == "rolled_back"
    assert "no difference" in server.swap.status()["reason"]
    server.candidate = FakeEngine(max_seq_len=400, mistake_every=2)
    server.swap.start("newer", dataclasses.replace(OPTIONS, margin=1.0))
    server.run_until_decided(1000)
    assert server.swap.status()["outcome"] == "promoted"
    server.stop()
    server.assert_every_answer_is_right()


def test_candidate_whose_engine_fails_is_taken_out(serve: Callable[..., Server]) -> None:
    server = serve(FakeEngine(max_seq_len=400, mistake_every=0, fail_after=30))
    server.swap.start("new", dataclasses.replace(OPTIONS, min_requests=300))
    server.run_until_decided()
    assert server.swap.status()["outcome"] == "failed"
    for handle in range(3000, 3010):
        server.submit(handle)
    server.wait(lambda: all(server.finished(handle) for handle in range(3000, 3010)))
    server.stop()
    failed = [items for items in server.answers.values() if items[-1].get("code") == "engine_failure"]
    assert 1 <= len(failed) <= 4
    assert all(len(items) > 1 for items in failed)  # one that had answered nothing began again in the other lane
    server.assert_every_answer_is_right(except_codes=("engine_failure",))


def test_candidate_whose_first_pass_fails_costs_no_stream(serve: Callable[..., Server]) -> None:
    server = serve(FakeEngine(max_seq_len=400, fail_after=1))
    server.swap.start("new", OPTIONS)
    server.run_until_decided()
    server.stop()
    assert server.swap.status()["outcome"] == "failed"
    server.assert_every_answer_is_right()


def test_candidate_that_cannot_be_loaded_changes_nothing(serve: Callable[..., Server]) -> None:
    server = serve(EngineError("no such engine"))
    server.swap.start("new", OPTIONS)
    server.wait(lambda: "outcome" in server.swap.status())
    assert server.swap.status()["reason"] == "no such engine"
    server.wait(lambda: server.state("idle"))


def test_memory_of_the_candidate_does_not_close_admission(serve: Callable[..., Server]) -> None:
    memory = Memory()
    server = serve(FakeEngine(max_seq_len=400, mistake_every=0), memory)
    server.sampled()
    server.swap.start("new", OPTIONS)
    server.run_until_decided()
    assert server.swap.status()["outcome"] == "promoted"
    # Once the old engine is closed, 8 GB are normal again and 1 GB is too little.
    server.sampled()
    memory.others = 7.0
    server.wait(lambda: server.load.request_limit() == 0)
    memory.others = 0.0
    server.load.rebase_memory()


def test_served_lane_tells_the_load_when_its_memory_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Socket:
        def __init__(self, path: str, service: Any) -> None:
            told.append(service.swap)

        def start(self) -> None:
            pass

        stop = start

    monkeypatch.setattr(runner, "ConnectionServer", Socket)
    monkeypatch.setattr(runner.signal, "signal", lambda *args: None)
    monkeypatch.setattr(EngineLoop, "run", lambda self: None)
    load = LoadControl(LoadMonitor(Memory()), max_requests=4, max_drafts=16)
    options = runner.ProcessOptions("socket", 8)
    served = lane(FakeEngine(), "old", load)
    limits = RequestLimits(max_seq_len=96, vocab_size=64, max_draft_len=4, max_prompt_bytes=100)
    encoder: Any = SimpleNamespace(token_text=None)
    runner.serve_lane(served, lambda now, then: served, encoder, limits, options, {}, EngineMetrics(), load)
    assert told[0]._on_memory_changed == load.rebase_memory


def test_trial_that_nobody_may_enter_fails_and_gives_its_memory_back(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "STARVED_S", 0.1)
    memory = Memory()
    server = serve(FakeEngine(max_seq_len=400, mistake_every=0), memory)
    server.sampled()
    server.swap.start("new", OPTIONS)
    server.wait(lambda: server.state("trial"))
    server.sampled()
    memory.others = 0.6
    server.wait(lambda: "outcome" in server.swap.status())
    assert server.swap.status()["outcome"] == "failed"
    assert "let no request start for 0.1 s" in server.swap.status()["reason"]
    server.wait(lambda: server.state("idle"))
    server.submit(0)
    server.wait(lambda: server.finished(0))


def test_abort_keeps_the_incumbent_and_a_second_swap_waits_its_turn(serve: Callable[..., Server]) -> None:
    candidate = FakeEngine(max_seq_len=400)
    server = serve(candidate)
    server.swap.start("new", OPTIONS)
    with pytest.raises(UsageError, match="under way"):
        server.swap.start("newer", OPTIONS)
    server.swap.abort()
    server.wait(lambda: server.state("idle"))
    assert server.swap.status()["outcome"] == "aborted"
    assert candidate.passes[-1] == "close"


@pytest.mark.parametrize(
    "changes",
    [{"share": 0.0}, {"share": 1.0}, {"alpha": 0.0}, {"margin": -1.0}, {"min_requests": 1}, {"max_requests": 3}],
)
def test_trial_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(TrialOptions(), **changes).check()


def arm(rng: np.random.Generator, mean: float, count: int) -> list[tuple[int, int]]:
    """Return (emitted, rounds) of requests whose drafters differ from prompt to prompt."""
    rounds = rng.integers(5, 60, count)
    own = mean + 0.4 * rng.standard_normal(count)
    return [(int(max(r, round(r * m))), int(r)) for r, m in zip(rounds, own, strict=True)]


def decisions(mean: float, other: float, *, runs: int, count: int) -> list[int]:
    """Return of each run what looking after every pair of requests decides: -1, 0 (nothing) or 1."""
    rng = np.random.default_rng(7)
    made = []
    for _ in range(runs):
        sums = RatioSums(), RatioSums()
        decided = 0
        for pair in zip(arm(rng, mean, count), arm(rng, other, count), strict=True):
            for each, (emitted, rounds) in zip(sums, pair, strict=True):
                each.add(emitted, rounds)
            interval = difference_interval(*sums, alpha=0.05) if sums[0].requests >= 20 else None
            if interval is not None and (interval[0] > 0 or interval[1] < 0):
                decided = 1 if interval[0] > 0 else -1
                break
        made.append(decided)
    return made


def test_interval_of_equal_drafters_rarely_excludes_zero_however_often_one_looks() -> None:
    made = decisions(2.2, 2.2, runs=200, count=200)
    # 0.05 are allowed; with 200 runs, 0.085 is more than two standard deviations above.
    assert sum(entry != 0 for entry in made) / len(made) <= 0.085


def test_interval_finds_the_better_drafter() -> None:
    assert decisions(2.2, 2.5, runs=40, count=300).count(1) >= 38
    assert decisions(2.5, 2.2, runs=40, count=300).count(-1) >= 38


def test_interval_of_one_request_is_none_and_of_equal_requests_a_point() -> None:
    one, other = RatioSums(), RatioSums()
    one.add(20, 10)
    other.add(30, 10)
    assert difference_interval(one, other, alpha=0.05) is None
    one.add(20, 10)
    other.add(30, 10)
    assert difference_interval(one, other, alpha=0.05) == (1.0, 1.0)


@pytest.fixture
def manifest(toy_engine_dir: Path) -> Manifest:
    return open_engine_dir(toy_engine_dir).manifest


def test_check_interchangeable_wants_rounds_that_take_the_same_requests(manifest: Manifest) -> None:
    manifest = dataclasses.replace(manifest, drafter=manifest.target)
    native = GpuBuild("trt_native", 512)
    plugins = {
        acceptance: GpuBuild("trt_plugin", 512, "ab" * 32, acceptance=acceptance, schedule="threshold")
        for acceptance in ("greedy", "rejection", "coupled")
    }
    builds = {"native": native, **plugins}
    for now, serving in builds.items():
        for then, candidate in builds.items():
            pair = (dataclasses.replace(manifest, gpu=gpu) for gpu in (serving, candidate))
            if now == then:
                check_interchangeable(*pair, "new")
                continue
            words = f"--acceptance {now}$"
            if "native" in (now, then):
                words = f"--dspark_plugin {'disable' if now == 'native' else 'enable'}$"
            with pytest.raises(EngineMismatch, match=words):
                check_interchangeable(*pair, "new")


def test_check_interchangeable_takes_another_drafter_and_names_what_else_differs(manifest: Manifest) -> None:
    check_interchangeable(manifest, dataclasses.replace(manifest, drafter=manifest.target), "new")
    shorter = dataclasses.replace(manifest.limits, max_seq_len=manifest.limits.max_seq_len - 1)
    other = dataclasses.replace(manifest.target, weight_dtype="float32")
    files = tuple(
        dataclasses.replace(entry, sha256="0" * 64) if entry.name == "tokenizer.json" else entry
        for entry in manifest.files
    )
    for changes, words in (
        ({"drafter": None}, "no drafter"),
        ({"backend": "tensorrt"}, "backend"),
        ({"target": other}, "target's weights"),
        ({"files": files}, "tokenizer.json"),
        ({"limits": shorter}, "--max_seq_len"),
    ):
        with pytest.raises(EngineMismatch, match=words):
            check_interchangeable(manifest, dataclasses.replace(manifest, **changes), "new")


def test_check_interchangeable_wants_the_same_special_tokens(manifest: Manifest) -> None:
    manifest = dataclasses.replace(manifest, drafter=manifest.target)
    entry = dataclasses.replace(manifest.files[0], name="special_tokens.json")
    newer = dataclasses.replace(manifest, files=(*manifest.files, entry))
    other = dataclasses.replace(manifest, files=(*manifest.files, dataclasses.replace(entry, sha256="0" * 64)))
    check_interchangeable(newer, newer, "new")
    with pytest.raises(EngineMismatch, match="build the serving engine again too"):
        check_interchangeable(manifest, newer, "new")
    for candidate in (manifest, other):
        with pytest.raises(EngineMismatch, match=r"special_tokens\.json of new is not that of the serving engine"):
            check_interchangeable(newer, candidate, "new")
