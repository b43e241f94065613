"""`run` and `bench` on the toy pair: output, numbers, and one sentence for every mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_pair import LOOP_TEXT, ToyPair, accepted_len, per_position
from helpers.toy_tokenizer import encode

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.cli import _acceptance_output
from trtllm_dspark.cli.main import main
from trtllm_dspark.runtime import Request, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop

JSON_FIELDS = [
    "index",
    "text",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "rounds",
    "drafted",
    "verified",
    "accepted",
    "verified_per_position",
    "accepted_per_position",
    "accepted_len",
    "ttft_ms",
    "elapsed_s",
    "tokens_per_s",
]


class Command:
    """Run the command line on an engine and look at what it printed."""

    def __init__(self, engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.engine_dir = engine_dir
        self._capsys = capsys

    def __call__(self, name: str, *flags: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        try:
            code = main([name, "--engine_dir", str(self.engine_dir), "--log_level", "warning", *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def refused(self, name: str, *flags: str) -> str:
        """Return the one sentence of a refusal with exit code 2."""
        code, out, err = self(name, *flags)
        assert (code, out) == (2, ""), err
        lines = err.splitlines()
        assert len(lines) == 1, err
        return lines[0].removeprefix(f"trtllm-dspark {name}: ")


@pytest.fixture
def command(toy_engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(toy_engine_dir, capsys)


def write_prompts(path: Path, *rows: dict[str, Any] | str) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), "utf-8")
    return str(path)


def test_run_text_goes_to_stdout_alone(command: Command) -> None:
    code, out, err = command("run", "--prompt", "abc", "--max_tokens", "20", "--speculation", "fixed:3")
    assert (code, err) == (0, "")
    assert out == "defghé ijklmnop€q"[:17] + "\n"


def test_run_json_counts_equal_those_by_hand(command: Command, toy_pair: ToyPair) -> None:
    code, out, _ = command("run", "--prompt", "abc", "--max_tokens", "40", "--speculation", "threshold:0.5", "--json")
    result = json.loads(out)
    rounds = toy_pair.rounds(encode("c")[0], 40, 7, 0.5)
    assert code == 0
    assert list(result) == JSON_FIELDS
    assert result["accepted_len"] == accepted_len(rounds)
    assert (result["verified_per_position"], result["accepted_per_position"]) == per_position(rounds, 7)
    assert result["token_ids"] == toy_pair.continuation(encode("c")[0], 40)
    assert result["text"] == (LOOP_TEXT * 2).encode()[3:43].decode("utf-8", "ignore")
    assert (result["rounds"], result["num_output_tokens"], result["finish_reason"]) == (len(rounds), 40, "length")


def test_run_prompts_file_lines_override_flags_and_keep_their_order(command: Command, tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "p.jsonl",
        {"prompt": "a", "max_tokens": 30},
        "",
        {"prompt": "b", "domain": "chat", "max_tokens": 2, "speculation": "off"},
        {"prompt": "a!"},
    )
    flags = ("--prompts_file", path, "--max_tokens", "4", "--speculation", "fixed", "--batch_size", "3")
    code, out, _ = command("run", *flags, "--json")
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["index"], row["num_output_tokens"], row["finish_reason"]) for row in results] == [
        (0, 30, "length"),
        (2, 2, "length"),
        (3, 3, "stop"),
    ]
    assert results[1]["drafted"] == 0
    code, out, _ = command("run", *flags)
    assert out.splitlines()[0::2] == ["--- prompt 0 ---", "--- prompt 2 (chat) ---", "--- prompt 3 ---"]
    assert out.splitlines()[3] == "cd"


def test_run_stop_flag_cuts_the_text(command: Command) -> None:
    _, out, _ = command("run", "--prompt", "a", "--stop", "gh", "--stop", "zzz")
    assert out == "bcdef\n"


@pytest.mark.parametrize("mode", [("--acceptance", "coupled"), ("--speculation", "threshold")])
def test_run_same_seed_prints_the_same_text(command: Command, mode: tuple[str, str]) -> None:
    """In rejection mode a schedule that goes by the clock keeps the law, not the text."""
    flags = ("run", "--prompt", "abc", "--temperature", "6", "--max_tokens", "30", "--json", "--ignore_eos", *mode)
    texts = [json.loads(command(*flags, "--seed", seed)[1])["token_ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


PROMPT = ("--prompt", "abc")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of the arguments --prompt --prompts_file is required"),
        ((*PROMPT, "--prompts_file", "x"), "not allowed with argument"),
        ((*PROMPT, "--spedulation", "off"), "unrecognized arguments: --spedulation off"),
        ((*PROMPT, "--temperature", "nan"), "temperature must be a number of at least 0 within 32 bits, got nan"),
        ((*PROMPT, "--temperature", "-1"), "temperature must be"),
        ((*PROMPT, "--temperature", "warm"), "invalid float value: 'warm'"),
        ((*PROMPT, "--max_tokens", "0"), "max_tokens must be an integer from 1"),
        ((*PROMPT, "--top_p", "0"), "top_p must be above 0"),
        ((*PROMPT, "--top_k", "-1"), "top_k must be"),
        ((*PROMPT, "--seed", "-1"), "seed must be"),
        ((*PROMPT, "--stop", ""), "stop must hold non-empty strings"),
        ((*PROMPT, "--batch_size", "0"), "--batch_size must be from 1 to the engine's 4, got 0"),
        ((*PROMPT, "--batch_size", "5"), "--batch_size must be from 1 to the engine's 4, got 5"),
        ((*PROMPT, "--num_threads", "0"), "num_threads is 0"),
        ((*PROMPT, "--speculation", "fixed:8"), "asks for 8 drafts, the engine verifies at most 7"),
        ((*PROMPT, "--speculation", "treshold"), "speculation 'treshold' is not known"),
        ((*PROMPT, "--acceptance", "typical"), "invalid choice: 'typical'"),
        (("--prompt", ""), "the prompt has no tokens"),
        (("--prompt", "a" * 512), "the prompt has 512 tokens, the engine takes at most 511"),
        (
            ("--prompts_file", "/no/such/file"),
            "--prompts_file /no/such/file cannot be read (No such file or directory)",
        ),
        (("--prompts_file", "/tmp"), "cannot be read (Is a directory)"),
    ],
)
def test_run_bad_flag_is_one_sentence(command: Command, flags: tuple[str, ...], message: str) -> None:
    assert message in command.refused("run", *flags)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2 must be an object"),
        ('{"text": "a"}', "line 2 has no 'prompt' text"),
        ('{"prompt": 3}', "line 2 has no 'prompt' text"),
        ('{"prompt": "a", "max_token": 3}', "line 2 has the unknown field 'max_token'"),
        ('{"prompt": "a", "domain": 3}', "line 2 has a 'domain' that is not text"),
        ('{"prompt": "a", "speculation": "fixed"}', "line 2: 'speculation' of one prompt can only be \"off\""),
        ('{"prompt": "a", "max_tokens": 0}', "prompt on line 2: max_tokens must be"),
        ('{"prompt": "a", "temperature": NaN}', "prompt on line 2: temperature must be"),
        ('{"prompt": "a", "stop_token_ids": [999]}', "prompt on line 2: stop_token_ids holds token id 999"),
        (json.dumps({"prompt": "a" * 600}), "prompt on line 2: the prompt has 600 tokens"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ('{"prompt": "\\ud800"}', "prompt on line 2: the prompt is not valid Unicode"),
        ('{"prompt": "a", "domain": "\\ud800"}', "line 2: the domain is not valid Unicode"),
        ('{"prompt": "a", "stop": null}', "prompt on line 2: stop must be a list"),
    ],
)
@pytest.mark.parametrize("name", ["run", "bench"])
def test_prompts_file_bad_line_is_named(command: Command, tmp_path: Path, name: str, line: str, message: str) -> None:
    path = write_prompts(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    assert message in command.refused(name, "--prompts_file", path)


def test_prompts_file_byte_order_mark_and_separators_inside_a_string_are_text(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "x\u2028\u0085a"}\r\n{"prompt": "b"}\r\n', "utf-8", newline="")
    code, out, _ = command("run", "--prompts_file", str(path), "--max_tokens", "2", "--json", "--raw")
    assert code == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["bc", "cd"]


def test_prompts_file_without_prompts_or_not_text_is_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n")
    assert "holds no prompts" in command.refused("run", "--prompts_file", str(path))
    path.write_bytes(b'{"prompt": "\xff"}')
    assert "is not UTF-8" in command.refused("run", "--prompts_file", str(path))


def test_run_missing_engine_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = Command(tmp_path / "nothing", capsys)("run", *PROMPT)
    assert (code, out) == (3, "")
    assert "does not exist; make it with: trtllm-dspark build" in err


def test_run_engine_without_drafter_only_decodes_plainly(
    toy_pair: ToyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(BuildConfig(str(toy_pair.target_dir), tmp_path / "plain", max_batch_size=1, max_seq_len=64))
    command = Command(tmp_path / "plain", capsys)
    assert "needs a drafter and this engine has none" in command.refused("run", *PROMPT, "--speculation", "fixed")
    code, out, _ = command("run", *PROMPT, "--speculation", "off", "--max_tokens", "3", "--json")
    assert code == 0
    assert json.loads(out)["verified_per_position"] == []


def test_bench_json_is_one_object_with_every_mode(command: Command, tmp_path: Path, toy_pair: ToyPair) -> None:
    path = write_prompts(tmp_path / "p.jsonl", {"prompt": "abc"}, {"prompt": "ABC", "domain": "math"})
    flags = ("--prompts_file", path, "--max_tokens", "30", "--repeats", "2", "--json")
    code, out, err = command("bench", *flags, "--speculation", "fixed:3,threshold:0.5")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert list(report) == ["engine_dir", "batch_size", "modes"]
    assert report["batch_size"] == 1
    assert [mode["speculation"] for mode in report["modes"]] == ["off", "fixed:3", "threshold:0.5"]
    off, fixed, _ = report["modes"]
    assert list(off) == ["speculation", "tokens_per_s", "accepted_len", "ratio_to_off", "ttft_ms", "rounds"]
    assert (off["ratio_to_off"], off["accepted_len"], off["rounds"]) == (1.0, 1.0, 58)
    rounds = [entry for token in "cC" for entry in toy_pair.rounds(encode(token)[0], 30, 3)]
    assert fixed["accepted_len"] == accepted_len(rounds)
    assert fixed["rounds"] == len(rounds)
    assert all(mode["tokens_per_s"] > 0 and mode["ttft_ms"] > 0 for mode in report["modes"])


def test_bench_table_names_every_mode(command: Command, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", *[{"prompt": "abc"}] * 5)
    flags = ("--prompts_file", path, "--max_tokens", "8", "--batch_size", "4", "--repeats", "1")
    code, out, _ = command("bench", *flags)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        "off",
        "fixed:3",
        "fixed:7",
        "threshold:0.3",
        "adaptive",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--speculation", "off,,fixed"), "speculation '' is not known"),
        (("--batch_size", "9"), "--batch_size must be from 1"),
        (("--max_tokens", "0"), "max_tokens must be"),
    ],
)
def test_bench_bad_flag_is_one_sentence(command: Command, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    path = write_prompts(tmp_path / "p.jsonl", {"prompt": "abc"})
    assert message in command.refused("bench", "--prompts_file", path, *flags)


def test_recorded_prompts_share_no_random_draws(
    toy_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int | None] = []

    def run(session: Session, requests: Sequence[Request], **options: Any) -> Iterator[Any]:
        seeds.extend(request.params.seed for request in requests)
        return run_closed_loop(session, requests, **options)

    monkeypatch.setattr(_acceptance_output, "run_closed_loop", run)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "abc", "domain": domain}) + "\n" for domain in "xxy"))
    flags = ("--acceptance_output", str(tmp_path / "a.json"), "--seed", "0", "--temperature", "1", "--ignore_eos")
    code, _, err = Command(toy_engine_dir, capsys)("bench", "--prompts_file", str(prompts), *flags)
    assert code == 0, err
    assert len(seeds) == len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("name", "flags"),
    [("run", ()), ("bench", ()), ("bench", ("--acceptance_output", "a.json")), ("calibrate", ()), ("eval", ())],
)
def test_kernel_library_for_a_cpu_engine_is_refused(
    toy_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, flags: tuple[str, ...]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    command = Command(toy_engine_dir, capsys)
    message = command.refused(name, "--prompts_file", str(prompts), "--kernel_library", "k.so", *flags)
    assert message.endswith("runs on a CPU, which has no use for a kernel library; leave it out")
