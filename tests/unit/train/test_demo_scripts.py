"""The scripts that made the demo's drafter: flags that the command has, responses set aside by prompt, a whole log."""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_dspark.cli import train

DEMO = Path(__file__).parents[3] / "build_scripts" / "demo"


def commands() -> list[argparse.Namespace]:
    """Return what every `train` line of the script asks for."""
    text = (DEMO / "train_drafter.sh").read_text("utf-8").replace("\\\n", " ")
    shared = dict(re.findall(r"^(answers|steps|bfloat16|mixed|longer)=\(([^)]*)\)$", text, re.MULTILINE))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    found = []
    for line in re.findall(r'^train ("\$work/\w+" .*)$', text, re.MULTILINE):
        for name, flags in shared.items():
            line = line.replace(f'"${{{name}[@]}}"', " ".join(flags.split()))
        line = line.removesuffix("&")
        output, *flags = shlex.split(line)
        found.append(parser.parse_args(["--target_checkpoint", "T", "--output_dir", output, *flags]))
    return found


def test_script_asks_for_what_the_command_knows() -> None:
    generations = [command for command in commands() if command.responses_only]
    assert len({command.seed for command in generations}) == 4
    assert [(command.temperatures, len(command.prompts_file)) for command in generations] == [
        ("0:1", 3),
        ("0.7:1,1:1", 2),
        ("0:3,0.7:1,1:1", 3),
        ("0:3,0.7:1,1:1", 2),
    ]
    found = runs()
    begins = ["$work/$demo/smollm2-135m-drafter", *(f"$work/packed_{number}" for number in (1, 2, 3))]
    assert [run.init_from for run in found] == begins
    for number, run in enumerate(found, 1):
        assert str(run.responses_file[0]) == f"$work/train_{number}.jsonl"
        assert str(run.validation_file) == f"$work/validation_{number}.jsonl"
        assert run.draft_vocab_size == 4096
    assert [(run.steps, run.lr_scale) for run in found] == [(450, 1.0), (450, 0.4), (1900, 0.7), (1600, 0.7)]
    # The features of their answers are in the last two runs' directories, under the same settings.
    for answers, run in zip(generations[-2:], found[-2:], strict=True):
        for name in ("output_dir", "weight_dtype", "top_k", "init_from", "draft_vocab_size", "draft_vocab_counts"):
            assert getattr(answers, name) == getattr(run, name)


def runs() -> list[argparse.Namespace]:
    return [command for command in commands() if not command.responses_only]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_logs_are_of_the_whole_runs(number: int) -> None:
    run = runs()[number - 1]
    with (DEMO / f"training_log_{number}.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows] == list(range(1, run.steps + 1))
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    assert float(rows[-1]["lr_scale"]) < 0.01


def test_split_keeps_a_prompts_responses_together(tmp_path: Path) -> None:
    records = [
        {"domain": domain, "temperature": temperature, "response_start": 2, "token_ids": [prompt, 7, 8, sample]}
        for prompt in range(200)
        for domain, temperature, sample in (("math", 0.0, 1), ("math", 1.0, 2), ("self_made", 0.0, 3))
    ]
    source, kept, greedy = (tmp_path / name for name in ("r.jsonl", "t.jsonl", "g.jsonl"))
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(DEMO / "split_responses.py"), str(source), "--train", str(kept)]
    subprocess.run([*command, "--validation", str(greedy), "--one_in", "5"], check=True)
    trained, aside = ([json.loads(line) for line in path.read_text().splitlines()] for path in (kept, greedy))
    assert 20 < len(aside) < 60
    assert {record["temperature"] for record in aside} == {0.0}
    assert {record["domain"] for record in aside} == {"math"}
    prompts = {record["token_ids"][0] for record in aside}
    assert len(prompts) == len(aside)
    assert {r["token_ids"][0] for r in trained if r["domain"] == "math"} == set(range(200)) - prompts
    assert sum(record["domain"] == "self_made" for record in trained) == 200
