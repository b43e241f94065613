"""`trtllm-dspark train` end to end on a tiny target: answers, drafter, engine."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.fake_engine import collect_outputs
from helpers.tiny_models import write_target
from helpers.training import write_prompts, write_responses

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.checkpoint import Checkpoint, load_drafter
from trtllm_dspark.cli import train as train_cli
from trtllm_dspark.cli._prompts import SAMPLING_FIELDS
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine import load_engine
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.train.responses import Response, read_responses

SMALL = (
    "--steps 3 --num_layers 1 --block_size 5 --markov_rank 8 --target_layer_ids 0,2 --num_sequences 4 "
    "--anchors_per_sequence 4 --max_seq_len 64 --max_response_len 12 --batch_size 4"
).split()

REQUEST_FIELDS: dict[str, tuple[object, str]] = {
    "temperature": (0.5, "give --temperatures"),
    "max_tokens": (5, "give --max_response_len"),
    "seed": (5, "give --seed"),
    "min_tokens": (5, "take it out"),
    "top_k": (5, "take it out"),
    "top_p": (0.5, "take it out"),
    "stop": (["."], "take it out"),
    "stop_token_ids": ([5], "take it out"),
    "ignore_eos": (True, "take it out"),
    "max_draft_len": (5, "take it out"),
    "speculation": ("off", "take it out"),
    "latency_class": ("batch", "take it out"),
}
"""What a line of a prompts file may set elsewhere: a value, and what `train` says to do."""


def train(target_dir: Path, output_dir: Path, *flags: str) -> int:
    return main(["train", "--target_checkpoint", str(target_dir), "--output_dir", str(output_dir), *SMALL, *flags])


def test_prompts_become_a_drafter_that_an_engine_runs(
    target_dir: Path, target: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(6)])
    out = tmp_path / "out"
    assert train(target_dir, out, "--prompts_file", str(prompts), "--num_self_made", "2") == 0
    assert "drafter" in capsys.readouterr().out
    answers = read_responses(out / "responses.jsonl", 256)
    assert {answer.domain for answer in answers} >= {"d"}
    assert {answer.temperature for answer in answers} <= {0.0, 0.7, 1.0}
    drafter = load_drafter(out / "drafter", target.config)
    assert drafter.shares_embedding
    assert drafter.shares_lm_head
    engine_dir = tmp_path / "engine"
    build_engine(
        BuildConfig(
            target_checkpoint=str(target_dir),
            draft_checkpoint=str(out / "drafter"),
            output_dir=engine_dir,
            weight_dtype="float32",
            max_seq_len=128,
            max_num_tokens=32,
        )
    )
    engine = load_engine(engine_dir)
    texts = []
    for mode in ("off", "fixed:5"):
        session = Session(engine, None, speculation=mode, eos_token_ids=[0])
        session.add(Request("a", list(answers[0].token_ids[:10]), SamplingParams(max_tokens=20)))
        texts.append([token for output in collect_outputs(session)["a"] for token in output.new_token_ids])
    engine.close()
    assert texts[0] == texts[1]


def test_bad_prompt_line_is_named(target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": 3}\n', "utf-8")
    assert train(target_dir, tmp_path / "out", "--prompts_file", str(path)) == 2
    error = capsys.readouterr().err
    assert "line 2" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be an object"),
        ('{"token_ids": [1, 999], "response_start": 1}', "ids below 256"),
        ('{"token_ids": [1, 2], "response_start": 5}', "response_start"),
    ],
)
def test_bad_response_line_is_named(
    target_dir: Path,
    tmp_path: Path,
    responses: list[Response],
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    path = write_responses(tmp_path / "r.jsonl", responses[:2])
    path.write_text(path.read_text("utf-8") + line + "\n", "utf-8")
    assert train(target_dir, tmp_path / "out", "--responses_file", str(path)) == 2
    error = capsys.readouterr().err
    assert "line 3" in error
    assert message in error


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--prompts_file", "a", "--responses_file", "b"),
        ("--responses_file", "r", "--steps", "0"),
        ("--responses_file", "r", "--temperatures", "warm"),
        ("--responses_file", "r", "--target_layer_ids", "x"),
        ("--responses_file", "r", "--draft_vocab_size", "9"),
    ],
)
def test_contradicting_flags_are_refused(
    target_dir: Path, tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target_dir, tmp_path / "out", *flags) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", "-1"), "seed must be at least 0, got -1"),
        (("--warmup_steps", "-1"), "--warmup_steps must be at least 0, got -1"),
        (("--decay_share", "1.5"), "--decay_share must be from 0 to 1, got 1.5"),
        (("--mask_token_id", "256"), "--mask_token_id must be from 0 to 255, got 256"),
    ],
)
def test_values_out_of_range_are_refused_at_once(
    target_dir: Path, tmp_path: Path, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["question"])
    assert train(target_dir, tmp_path / "out", "--prompts_file", str(prompts), *flags) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out" / "responses.jsonl").exists()


def test_validation_is_read_before_prompts_are_answered(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompts_file", str(write_prompts(tmp_path / "p.jsonl", ["question"]))]
    flags += ["--validation_file", str(tmp_path / "gone.jsonl")]
    assert train(target_dir, tmp_path / "out", *flags) == 2
    assert "gone.jsonl cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out" / "responses.jsonl").exists()
    # A file that is to be split off the answers cannot be there before them.
    assert train(target_dir, tmp_path / "out", *flags, "--responses_only") == 0


def test_validation_leaves_out_what_it_cannot_walk(
    target_dir: Path,
    tmp_path: Path,
    responses: list[Response],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = write_responses(tmp_path / "r.jsonl", responses)
    walked = [
        Response("long", 0.0, 9, tuple(range(10, 80))),
        Response("short", 0.0, 9, tuple(range(10, 22))),  # three tokens, where a block has five
        Response("nothing", 0.0, 9, tuple(range(10, 19))),
        Response("one", 0.0, 1, (10,)),
        *responses,
    ]
    validation = write_responses(tmp_path / "v.jsonl", walked)
    flags = ["--responses_file", str(given), "--validation_file", str(validation)]
    assert train(target_dir, tmp_path / "out", *flags) == 0
    assert f"1 sequences of --validation_file {validation} exceed --max_seq_len 64" in caplog.text
    table = {line.split()[2]: line.split()[3:] for line in capsys.readouterr().out.splitlines() if "accepted" in line}
    assert set(table) == {"short", "nothing", "one", "x"}
    for domain in ("short", "nothing", "one"):
        assert table[domain][0] == "none:"
    assert table["x"][1:] == ["before,", table["x"][2], "after"]


def test_responses_only_are_what_a_run_from_prompts_answers(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(6)])
    only, whole = tmp_path / "only", tmp_path / "whole"
    assert train(target_dir, only, "--prompts_file", str(prompts), "--responses_only") == 0
    assert "responses.jsonl" in capsys.readouterr().out
    assert not (only / "drafter").exists()
    assert train(target_dir, whole, "--prompts_file", str(prompts)) == 0
    answers, others = (sorted(read_responses(path / "responses.jsonl", 256), key=_index) for path in (only, whole))
    assert answers == others
    assert train(target_dir, tmp_path / "refused", "--responses_only", "--responses_file", str(prompts)) != 0
    assert "--responses_only has nothing to answer" in capsys.readouterr().err
    both = ["--responses_file", str(only / "responses.jsonl"), "--num_self_made", "2"]
    assert train(target_dir, tmp_path / "refused", "--responses_only", *both) != 0
    assert "leave out --responses_file" in capsys.readouterr().err


def test_interrupted_responses_only_is_no_success_and_goes_on(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that waits for all answers must not go on with some."""
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(12)])
    out, flags = tmp_path / "out", ["--prompts_file", str(prompts), "--responses_only"]

    @contextlib.contextmanager
    def stop_when_some_are_there() -> Iterator[Callable[[], bool]]:
        yield lambda: (out / "responses.jsonl").exists() and bool((out / "responses.jsonl").read_text())

    with monkeypatch.context() as patch:
        patch.setattr(train_cli, "_stop_on_signals", stop_when_some_are_there)
        assert train(target_dir, out, *flags) == 1
    assert 0 < len(read_responses(out / "responses.jsonl", 256)) < 12
    assert train(target_dir, out, *flags, "--resume") == 0
    assert train(target_dir, tmp_path / "whole", *flags) == 0
    answers = [sorted(read_responses(path / "responses.jsonl", 256), key=_index) for path in (out, tmp_path / "whole")]
    assert answers[0] == answers[1]


def test_a_run_stopped_while_answering_goes_on_to_train(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(6)])
    out, flags = tmp_path / "out", ["--prompts_file", str(prompts)]
    assert train(target_dir, out, *flags, "--responses_only") == 0
    answers = read_responses(out / "responses.jsonl", 256)
    (out / "responses.jsonl").write_text("".join(one.to_json() + "\n" for one in answers[:2]), "utf-8")
    command = ["train", "--target_checkpoint", str(target_dir), "--output_dir", str(out), *SMALL[2:], *flags]
    assert main([*command, "--resume"]) == 2
    assert "say how long to train" in capsys.readouterr().err
    assert train(target_dir, out, *flags, "--resume") == 0
    assert sorted(read_responses(out / "responses.jsonl", 256), key=_index) == sorted(answers, key=_index)
    drafter = (out / "drafter" / "model.safetensors").read_bytes()
    # The same sequences and features without a break: answering again would round in another way.
    answers = sorted(read_responses(out / "responses.jsonl", 256), key=_index)
    given = write_responses(tmp_path / "given.jsonl", answers)
    assert train(target_dir, out, "--responses_file", str(given)) == 0
    assert (out / "drafter" / "model.safetensors").read_bytes() == drafter


@contextlib.contextmanager
def _stopping_when(found: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    yield found


def test_a_stop_while_answering_neither_trains_nor_saves(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of some of the answers could not be resumed with all of them."""
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(12)])
    out, flags = tmp_path / "out", ["--prompts_file", str(prompts)]
    answers = out / "responses.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(
            train_cli,
            "_stop_on_signals",
            lambda: _stopping_when(lambda: answers.exists() and bool(answers.read_text())),
        )
        assert train(target_dir, out, *flags, "--batch_size", "1") == 1
    assert 0 < len(read_responses(answers, 256)) < 12
    assert not (out / "drafter").exists()
    assert train(target_dir, out, *flags, "--resume") == 0
    assert len(read_responses(answers, 256)) == 12
    assert (out / "drafter").exists()


def test_a_run_begun_anew_leaves_no_state_of_the_one_before(target_dir: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(6)])
    out, flags = tmp_path / "out", ["--prompts_file", str(prompts)]
    assert train(target_dir, out, *flags) == 0
    assert train(target_dir, out, *flags, "--seed", "7", "--responses_only") == 0
    assert train(target_dir, out, *flags, "--seed", "7", "--resume") == 0
    assert len((out / "training_log.csv").read_text("utf-8").splitlines()) == 1 + 3


def test_prompts_that_are_all_too_long_leave_nothing_to_train_on(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["long " * 40])
    assert train(target_dir, tmp_path / "out", "--prompts_file", str(prompts)) == 2
    assert "no prompt fits --max_seq_len" in capsys.readouterr().err


@pytest.mark.parametrize("field", [*REQUEST_FIELDS, "id"])
def test_a_prompt_with_the_fields_of_a_request_is_refused_by_name(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    value, instead = REQUEST_FIELDS.get(field, ("q1", "has the unknown field"))
    prompts = tmp_path / "p.jsonl"
    rows = [{"prompt": "question", "domain": "d"}, {"prompt": "another", "domain": "d", field: value}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(target_dir, tmp_path / "out", "--prompts_file", str(prompts)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "p.jsonl line 2 " in error
    assert f"'{field}'" in error
    assert instead in error
    assert not (tmp_path / "out").exists()


def test_every_field_of_a_request_is_tried() -> None:
    assert set(REQUEST_FIELDS) == set(SAMPLING_FIELDS)


def test_a_stop_while_turns_are_written_answers_none(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices count all turns: those of some of them belong to others."""
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(6)])
    out, turns = tmp_path / "out", tmp_path / "out" / "self_made_turns.jsonl"
    flags = ["--prompts_file", str(prompts), "--num_self_made", "40", "--responses_only", "--max_response_len", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(
            train_cli, "_stop_on_signals", lambda: _stopping_when(lambda: turns.exists() and bool(turns.read_text()))
        )
        assert train(target_dir, out, *flags) == 1
    assert read_responses(out / "responses.jsonl", 256) == []
    assert train(target_dir, out, *flags, "--resume") == 0
    assert train(target_dir, tmp_path / "whole", *flags) == 0
    asked = [
        {one.index: one.token_ids[: one.response_start] for one in read_responses(path / "responses.jsonl", 256)}
        for path in (out, tmp_path / "whole")
    ]
    assert asked[0] == asked[1]


def test_captured_answers_outlive_a_refused_resume_and_not_their_generation(target_dir: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(6)])
    out, flags = tmp_path / "out", ["--prompts_file", str(prompts), "--temperatures", "1:1"]

    def kept() -> set[str]:
        return {path.name for path in (out / "generated_features").glob("*.npz")}

    assert train(target_dir, out, *flags, "--responses_only") == 0
    before = kept()
    assert before
    assert train(target_dir, out, *flags, "--resume", "--weight_dtype", "bfloat16") != 0
    assert kept() == before
    assert train(target_dir, out, *flags, "--responses_only", "--seed", "7") == 0
    assert len(kept()) <= 6
    assert train(target_dir, out, *flags, "--resume", "--seed", "7") == 0
    assert train(target_dir, out, *flags, "--resume", "--seed", "7", "--top_k", "5", "--steps", "4") == 3


def test_what_cannot_be_continued_is_refused(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--responses_file", str(tmp_path / "r.jsonl"), "--num_continued", "3"]
    assert train(target_dir, tmp_path / "out", *flags) == 2
    assert "give --prompts_file" in capsys.readouterr().err


def test_turns_the_target_wrote_are_kept_for_a_resumed_generation(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", ["--num_self_made", "3", "--responses_only"]
    prompts = ["--prompts_file", str(write_prompts(tmp_path / "p.jsonl", ["question"]))]

    def prompts_of_self_made(*more: str) -> set[tuple[int, ...]]:
        assert train(target_dir, out, *prompts, *flags, *more) == 0
        answers = read_responses(out / "responses.jsonl", 256)
        return {answer.token_ids[: answer.response_start] for answer in answers if answer.domain == "self_made"}

    written = prompts_of_self_made()
    turns = out / "self_made_turns.jsonl"
    rows = [json.loads(line) for line in turns.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == [0, 1, 2]
    # What stands in the file is what is asked, so it was not drawn again; a cut last line is.
    lines = [json.dumps({**row, "text": f"kept {row['index']}"}) + "\n" for row in rows[:2]]
    turns.write_text("".join(lines) + lines[0][:20])
    (out / "responses.jsonl").unlink()
    kept = prompts_of_self_made("--resume")
    assert len(kept - written) == 2
    assert len(turns.read_text().splitlines()) == 3
    # A run that begins anew keeps nothing.
    assert prompts_of_self_made() == written
    turns.write_text("[]\n")
    assert train(target_dir, out, *prompts, *flags, "--resume") == 2
    assert "self_made_turns.jsonl is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--seed", "5"), "seed"),
        (("--temperatures", "0:1"), "temperature_shares and temperatures"),
        (("--num_self_made", "2"), "num_self_made"),
        (("--prompts_file", "OTHER"), "prompts"),
    ],
)
def test_a_generation_goes_on_with_its_own_flags_only(
    target_dir: Path, tmp_path: Path, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompts_file", str(write_prompts(tmp_path / "p.jsonl", ["question"])), "--responses_only"]
    other = str(write_prompts(tmp_path / "other.jsonl", ["another"]))
    changed = [other if flag == "OTHER" else flag for flag in flags]
    assert train(target_dir, tmp_path / "out", *prompts) == 0
    answers = (tmp_path / "out" / "responses.jsonl").read_bytes()
    assert train(target_dir, tmp_path / "out", *prompts, "--resume", "--batch_size", "2") == 0
    assert train(target_dir, tmp_path / "out", *prompts, "--resume", *changed) == 2
    assert f"were drawn with other {named}; resume with the same" in capsys.readouterr().err
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == answers
    assert train(target_dir, tmp_path / "out", *prompts, *changed) == 0


def test_an_output_directory_of_another_target_is_not_read(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Graphs of the target are kept there for the next run: they must be that target's."""
    other = write_target(tmp_path / "other", vocab_size=256, eos_token_id=0, pad_token_id=2, seed=5)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(target_dir / name, other)
    flags = ["--prompts_file", str(write_prompts(tmp_path / "p.jsonl", ["question"])), "--responses_only"]
    answers = []
    for target, out in ((target_dir, "both"), (other, "both"), (other, "alone")):
        assert train(target, tmp_path / out, *flags) == 0
        answers.append((tmp_path / out / "responses.jsonl").read_text())
    assert answers[0] != answers[1] == answers[2]
    assert train(target_dir, tmp_path / "both", *flags, "--resume") == 2
    assert "were drawn with other target" in capsys.readouterr().err


def _index(response: Response) -> int:
    return response.index
