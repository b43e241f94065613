"""Small shared libraries compiled by tests: a plugin library that tells a contract, a CUDA driver that tells a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest


def compile_library(path: Path, source: str) -> Path:
    """Compile C source into a shared library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source.encode(), check=True)
    return path


def plugin_library(path: Path, contract: str) -> Path:
    """Return a library that tells this contract and has nothing else."""
    return compile_library(path, f"char const* dspark_plugin_contract(void) {{ return {json.dumps(contract)}; }}")


def cuda_driver(path: Path, *, major: int, minor: int, memory: int, name: str = "Stub GPU", error: int = 0) -> Path:
    """Return a CUDA driver with one GPU; `error` is what cuInit returns."""
    source = f"""
    #include <string.h>
    #include <stddef.h>
    int cuInit(unsigned flags) {{ return {error}; }}
    int cuDeviceGet(int* device, int ordinal) {{ *device = 7; return ordinal; }}
    int cuDeviceGetAttribute(int* value, int attribute, int device) {{
        if (device != 7) return 101;
        *value = attribute == 75 ? {major} : attribute == 76 ? {minor} : -1;
        return 0;
    }}
    int cuDeviceTotalMem_v2(size_t* bytes, int device) {{ *bytes = {memory}ull; return 0; }}
    int cuDeviceGetName(char* name, int length, int device) {{ strncpy(name, "{name}", length); return 0; }}
    """
    return compile_library(path, source)
