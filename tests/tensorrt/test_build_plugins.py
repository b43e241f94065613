"""`trtllm-dspark build_plugins`: what it prints, and what it says when something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.kernels.build import ROOT

from trtllm_dspark.cli.main import main
from trtllm_dspark.plugins.build import KERNELS_NAME, PLUGINS_NAME
from trtllm_dspark.plugins.resources import kernel_name


def _fake_nvcc(folder: Path, text: str) -> Path:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho '{text}'\n")
    nvcc.chmod(0o755)
    return nvcc


def _fails(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main(["build_plugins", "--output_dir", "/nonexistent/out", *flags])
    captured = capsys.readouterr()
    assert not captured.out
    return code, captured.err


def test_build_plugins_prints_libraries_contract_and_registers(
    built_plugins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--output_dir", str(tmp_path), "--source_dir", str(ROOT), "--build_dir", str(ROOT / "build/tensorrt")]
    assert main(["build_plugins", *flags]) == 0
    out = capsys.readouterr().out
    assert f"kernels         {tmp_path / KERNELS_NAME}" in out
    assert f"plugins         {tmp_path / PLUGINS_NAME}" in out
    assert (tmp_path / PLUGINS_NAME).read_bytes() == built_plugins.read_bytes()
    assert "contract        " in out
    assert "acceptKernel" in out or "pip install nvidia-cuda-cuobjdump" in out


def test_build_plugins_named_compiler_missing_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = _fails(capsys, "--source_dir", str(ROOT), "--nvcc", "/nonexistent/nvcc")
    assert code == 4
    assert "no usable CUDA 13 compiler: /nonexistent/nvcc does not run" in err
    assert "pip install nvidia-cuda-{nvcc,crt,runtime,cccl}==13.0.*" in err


def test_build_plugins_other_cuda_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc = _fake_nvcc(tmp_path, "Cuda compilation tools, release 12.4, V12.4.99")
    code, err = _fails(capsys, "--source_dir", str(ROOT), "--nvcc", str(nvcc))
    assert code == 4
    assert f"{nvcc} is CUDA 12.4, expected 13" in err


def test_build_plugins_compiler_without_runtime_headers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = _fake_nvcc(tmp_path, "Cuda compilation tools, release 13.0, V13.0.88")
    code, err = _fails(capsys, "--source_dir", str(ROOT), "--nvcc", str(nvcc))
    assert code == 4
    assert "include/cuda_runtime.h is missing beside" in err


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--source_dir", "is not a checkout of trtllm_dspark"), ("--tensorrt_include_dir", "has no NvInferRuntime.h")],
)
def test_build_plugins_wrong_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    flags = [flag, str(tmp_path)] if flag == "--source_dir" else ["--source_dir", str(ROOT), flag, str(tmp_path)]
    code, err = _fails(capsys, *flags)
    assert code == 2
    assert f"{flag} {tmp_path} {message}" in err


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN6dspark12acceptKernelENS_18RaggedAcceptParamsE", "acceptKernel"),
        ("_ZN6dspark18markovLogitsKernelIaLi8EEEvNS_10MarkovStepE", "markovLogitsKernel<int8, 8>"),
        (
            "_ZN6dspark21raggedAttentionKernelI13__nv_bfloat16Li128EEEvNS_21RaggedAttentionParamsE",
            "raggedAttentionKernel<bfloat16, 128>",
        ),
        ("_Z3foov", "_Z3foov"),
    ],
)
def test_kernel_name_is_readable(mangled: str, name: str) -> None:
    assert kernel_name(mangled) == name
