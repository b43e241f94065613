"""`serve --drafter`: from the command line to the session of the engine process, and what does not go with it."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from helpers.running_engine import running_engine
from helpers.toy_pair import ToyPair

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.cli import serve
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine_process.__main__ import drafter_of, parse_arguments
from trtllm_dspark.engine_process.opening import SessionOptions, make_lane, open_candidate, open_session
from trtllm_dspark.errors import ConfigError, EngineMismatch, UsageError
from trtllm_dspark.runtime import Request, SamplingParams
from trtllm_dspark.runtime.proposers import OutsideDrafter
from trtllm_dspark.serving.client import EngineClient, is_final


@pytest.fixture(scope="module")
def plain_dir(toy_pair: ToyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an engine of the toy target without a drafter."""
    path = tmp_path_factory.mktemp("plain") / "engine"
    build_engine(BuildConfig(str(toy_pair.target_dir), path, max_batch_size=4, max_seq_len=512, max_num_tokens=64))
    return path


def engine_command(*flags: str) -> list[str]:
    """Return the command that `serve` with these flags starts the engine process with."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(flags)
    args.log_level = "warning"
    return list(serve._engine_command(args, "the.sock", ""))


def test_launcher_flags_reach_the_session(toy_engine_dir: Path, plain_dir: Path) -> None:
    """The toy target drafts for itself, so its own drafter's block does not count any more."""
    flags = [f"--engine_dir={toy_engine_dir}", "--drafter=draft_model", "--draft_len=3"]
    args = parse_arguments(engine_command(*flags, f"--draft_engine_dir={plain_dir}")[3:])
    assert drafter_of(args) == OutsideDrafter("draft_model", plain_dir, 3)
    assert drafter_of(parse_arguments(engine_command(*flags[:1])[3:])) is None
    session = open_session(toy_engine_dir, SessionOptions(1, "fixed", "rejection", drafter=drafter_of(args)))
    try:
        assert session.limits.max_draft_len != 3
        assert session.stats.max_draft_len == 3
        assert make_lane(session, toy_engine_dir).max_draft_len == 3
    finally:
        session.close()


@pytest.mark.parametrize("kind", ["engine+ngram", "ngram", "draft_model"])
def test_session_opens_with_the_defaults_of_the_flags(toy_engine_dir: Path, plain_dir: Path, kind: str) -> None:
    model = [f"--draft_engine_dir={plain_dir}"] if kind == "draft_model" else []
    args = parse_arguments(engine_command(f"--engine_dir={toy_engine_dir}", f"--drafter={kind}", *model)[3:])
    assert (args.speculation, args.calibration) == ("adaptive", "auto")
    options = SessionOptions(
        1, args.speculation, args.acceptance, calibration=args.calibration, drafter=drafter_of(args)
    )
    assert not options.online_calibration
    session = open_session(toy_engine_dir, options)
    try:
        assert session.speculation.mode == "adaptive"
        session.add(Request("1", [97, 98, 99] * 4, SamplingParams(max_tokens=12, ignore_eos=True)))
        tokens: list[int] = []
        while session.has_unfinished():
            tokens += [token for output in session.step() for token in output.new_token_ids]
        assert len(tokens) == 12
    finally:
        session.close()


def test_auto_learns_with_the_engines_own_drafter_alone() -> None:
    for speculation, learns in (("adaptive", True), ("early_stop", True), ("stale_topk", True), ("threshold", False)):
        assert SessionOptions(1, speculation, "rejection").online_calibration == learns
        for kind in ("engine+ngram", "ngram"):
            drafter = OutsideDrafter(kind)
            assert not SessionOptions(1, speculation, "rejection", drafter=drafter).online_calibration
    asked = SessionOptions(1, "adaptive", "rejection", calibration="online", drafter=OutsideDrafter("ngram"))
    assert asked.online_calibration  # which a session refuses


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter", "draft_model"], "--drafter draft_model needs --draft_engine_dir"),
        (["--drafter", "ngram", "--draft_engine_dir", "x"], "--draft_engine_dir goes with --drafter draft_model"),
        (["--draft_len", "3"], "--draft_len goes with --drafter ngram or draft_model"),
        (["--drafter", "ngram", "--calibration", "online"], "--calibration online is about the engine's own drafter"),
        (["--drafter", "engine+ngram", "--calibration", "online"], "leave it or --drafter engine+ngram out"),
        (["--drafter", "ngram", "--collect_dir", "x"], "--collect_dir is about the engine's own drafter"),
        (["--drafter", "ngram", "--candidate_engine_dir", "x"], "--candidate_engine_dir is about the engine's own"),
    ],
)
def test_serve_refuses_what_does_not_go_together(
    toy_engine_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["serve", "--engine_dir", str(toy_engine_dir), "--log_level", "error", *flags]) == 2
    assert message in capsys.readouterr().err


def test_drafter_outside_the_engine_is_not_swapped(toy_engine_dir: Path) -> None:
    options = SessionOptions(1, "fixed", "rejection", drafter=OutsideDrafter("ngram"))
    with pytest.raises(EngineMismatch, match="drafts by --drafter ngram, .* there is nothing to swap"):
        open_candidate(str(toy_engine_dir), str(toy_engine_dir), options)


def test_process_refuses_to_learn_of_another_drafter(toy_engine_dir: Path) -> None:
    options = SessionOptions(1, "adaptive", "rejection", calibration="online", drafter=OutsideDrafter("engine+ngram"))
    with pytest.raises(ConfigError, match="online calibration is of the engine's own drafter alone"):
        open_session(toy_engine_dir, options)


def test_process_refuses_what_the_engine_or_nobody_knows(toy_engine_dir: Path) -> None:
    with pytest.raises(UsageError, match="--drafter magic is not known"):
        OutsideDrafter("magic")
    options = SessionOptions(1, "fixed", "rejection", drafter=OutsideDrafter("ngram", draft_len=900))
    with pytest.raises(ConfigError, match="900 drafts a request do not fit"):
        open_session(toy_engine_dir, options)


def engine_process(socket: Path, *flags: str) -> AbstractContextManager[EngineClient]:
    """Start the process that `serve` with these flags starts."""
    command = engine_command(*flags)
    command[command.index("--socket=the.sock")] = f"--socket={socket}"
    return running_engine(command, socket, role="launcher")


def generate(client: EngineClient, **fields: Any) -> dict[str, Any]:
    """Return the one answer to a request that does not stream."""
    items: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client.add({"prompt": "abcabc", "max_tokens": 40, "ignore_eos": True, **fields}, items.put)
    item = items.get(timeout=60.0)
    assert is_final(item)
    return item


def test_engine_process_drafts_with_it_and_says_the_same(toy_engine_dir: Path, plain_dir: Path, tmp_path: Path) -> None:
    flags = ["--speculation=fixed", "--num_threads=1"]
    model = ["--drafter=draft_model", f"--draft_engine_dir={plain_dir}", "--draft_len=3"]
    with engine_process(tmp_path / "a", f"--engine_dir={toy_engine_dir}", *flags) as client:
        own = generate(client)
    # No drafter in this engine: without the flag it could not speculate.
    with engine_process(tmp_path / "b", f"--engine_dir={plain_dir}", *flags, *model) as client:
        other = generate(client)
        assert client.engine["max_draft_len"] == 3
        refused = generate(client, max_draft_len=4)
    with engine_process(tmp_path / "c", f"--engine_dir={toy_engine_dir}", *flags, "--drafter=engine+ngram") as client:
        both = generate(client)
    assert other["text"] == own["text"] == both["text"]
    assert both["stats"]["verified"] > 0
    # The toy target drafts for itself: every draft is right.
    assert other["stats"]["accepted"] == other["stats"]["verified"] > 20
    assert len(other["stats"]["verified_per_position"]) == 3
    assert own["stats"]["accepted"] < own["stats"]["verified"]
    assert "max_draft_len" in refused["message"]
