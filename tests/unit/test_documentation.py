"""README.md and docs/ name every flag and every code of a refused request, and no link of theirs leads nowhere."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_dspark.cli.main import COMMANDS
from trtllm_dspark.serving.openai_front import errors as front_errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
# Commands whose flags are all on one page; those of the others are spread.
OWN_PAGE = {"serve": "serving.md", "swap": "serving.md", "train": "training.md", "simulate": "simulation.md"}
# Where a client's request is read, refused or fails.
REQUEST_SOURCES = ("serving/**/*.py", "engine_process/*.py", "runtime/device_rounds.py")
CODES = re.compile(r'(?:code=|\.fail\(|error_body\(|wanted, code = "[^"]*", )"(\w+)"')
# A field that only a client of the engine's own socket can misspell.
OF_THE_SOCKET = {"unknown_field"}
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OUR_PATH = re.compile(
    r"`((?:benchmarks|build_scripts|deploy|docs|plugins|tests|triton_server_repo|trtllm_dspark)/[\w./-]+)`"
)


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    return parser


def long_options(command: str) -> set[str]:
    """Return the long options of a command but those that only tell what has replaced them."""
    shown = (action for action in parser_of(command)._actions if action.help != argparse.SUPPRESS)
    return {option for action in shown for option in action.option_strings if option.startswith("--")}


def names(text: str, option: str) -> bool:
    return re.search(re.escape(option) + r"(?![\w-])", text) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_long_option_is_documented(command: str) -> None:
    pages = (DOCS / OWN_PAGE[command],) if command in OWN_PAGE else PAGES
    text = "\n".join(page.read_text() for page in pages)
    options = long_options(command)
    assert options
    assert {option for option in options if not names(text, option)} == set()


def test_commands_of_the_readme_parse() -> None:
    blocks = "\n".join(FENCED.findall((ROOT / "README.md").read_text())).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in blocks.splitlines() if line.startswith("trtllm-dspark ")]
    assert {line[1] for line in lines} >= {"build", "run", "serve", "swap", "train", "simulate"}
    for line in lines:
        _, unknown = parser_of(line[1]).parse_known_args(line[2:])
        assert unknown == [], shlex.join(line)


def test_named_extras_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    sources = [*PAGES, ROOT / "deploy" / "Dockerfile", *(ROOT / "trtllm_dspark").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    named = re.findall(r"'\.\[([\w,-]+)\]'|EXTRAS=([\w,-]+)", text)
    found = {extra for pair in named for part in pair if part for extra in part.split(",")}
    assert found > {"triton", "tensorrt", "train"}
    assert found - extras == set()
    # There is no such package in an index: `pip install` takes a checkout.
    assert "trtllm-dspark[" not in text


def test_dockerfile_copies_what_exists() -> None:
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    assert copied >= {"pyproject.toml", "plugins", "trtllm_dspark"}
    assert {name for name in copied if not (ROOT / name).exists()} == set()


def request_codes() -> set[str]:
    package = ROOT / "trtllm_dspark"
    sources = [path for pattern in REQUEST_SOURCES for path in package.glob(pattern)]
    given = {code for path in sources for code in CODES.findall(path.read_text())}
    return given.union(front_errors._STATUS) - OF_THE_SOCKET


def test_every_code_of_a_request_is_documented() -> None:
    text = (DOCS / "serving.md").read_text()
    codes = request_codes()
    assert codes > {"out_of_range", "no_min_tokens", "engine_failure", "not_found"}
    assert {code for code in codes if f"`{code}`" not in text} == set()


def test_every_status_of_the_openai_front_is_documented() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", (DOCS / "serving.md").read_text(), re.MULTILINE)
    told = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert told.pop("not_found") == 404  # of the router, not of a request
    assert told == front_errors._STATUS


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        assert anchor not in anchors, f"{page.name} has two headings {heading!r}"
        anchors.add(anchor)
    return anchors


def links(page: Path) -> Iterator[tuple[Path, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            yield (page.parent / path if path else page).resolve(), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    found = list(links(page))
    assert {path for path, _ in found if not path.exists()} == set()
    assert {(path.name, anchor) for path, anchor in found if anchor and anchor not in headings(path)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    assert {path for path in OUR_PATH.findall(page.read_text()) if not (ROOT / path).exists()} == set()


def test_every_page_is_in_the_index() -> None:
    linked = {path for path, _ in links(DOCS / "index.md")}
    assert {page.name for page in PAGES if page != DOCS / "index.md" and page not in linked} == set()
