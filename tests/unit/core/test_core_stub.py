"""The published interface files name what the extension has, with the same arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trtllm_dspark
from trtllm_dspark import _core

# `_core.pyi` takes over what the files of its parts say.
FILES = sorted(Path(trtllm_dspark.__file__).parent.glob("_core*.pyi"))
BODY = [node for path in FILES for node in ast.parse(path.read_text()).body]
FUNCTIONS = [node for node in BODY if isinstance(node, ast.FunctionDef)]
CLASSES = [node for node in BODY if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("node", FUNCTIONS, ids=lambda node: node.name)
def test_stub_function_has_the_extensions_arguments(node: ast.FunctionDef) -> None:
    # The extension writes its n-th default as a backslash and n.
    text = re.sub(r"\\\d+", "...", getattr(_core, node.name).__nb_signature__[0][0])
    signature = ast.parse(text.split(" -> ")[0] + ": ...").body[0]
    assert isinstance(signature, ast.FunctionDef)
    native = [a.arg for a in (*signature.args.args, *signature.args.kwonlyargs)]
    assert native == [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_stub_class_has_the_extensions_members(node: ast.ClassDef) -> None:
    native = {name for name in vars(getattr(_core, node.name)) if not name.startswith("_")}
    members = {item.name for item in node.body if isinstance(item, ast.FunctionDef) if not item.name.startswith("_")}
    assert native == members


def test_stub_names_everything_public() -> None:
    assigned = {n.target.id for n in BODY if isinstance(n, ast.AnnAssign) if isinstance(n.target, ast.Name)}
    stub = {node.name for node in (*FUNCTIONS, *CLASSES)} | assigned
    assert {name for name in dir(_core) if not name.startswith("_")} == stub
