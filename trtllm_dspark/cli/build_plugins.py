"""`trtllm-dspark build_plugins`: compile the CUDA kernels and the TensorRT 11 plugin library."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_dspark.plugins.build import build_plugins, default_source_dir
from trtllm_dspark.plugins.resources import format_resources, read_resources
from trtllm_dspark.plugins.toolchain import find_cuobjdump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--output_dir", type=Path, required=True, help="folder that receives the two libraries")
    parser.add_argument("--source_dir", type=Path, default=default_source_dir(), help="checkout of trtllm_dspark")
    parser.add_argument("--build_dir", type=Path, help="CMake's folder (default: SOURCE_DIR/build/tensorrt)")
    parser.add_argument("--nvcc", type=Path, help="compiler of CUDA 13 (default: PATH, /usr/local/cuda, PyPI's wheels)")
    parser.add_argument(
        "--tensorrt_include_dir",
        type=Path,
        help="folder of TensorRT 11's NvInferRuntime.h (default: found, else the project's own declarations)",
    )
    parser.add_argument(
        "--cuda_architectures", help="semicolon-separated list, for example 90a-real (default: every supported GPU)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel compilations")


def run(args: argparse.Namespace) -> int:
    """Build, then print where the libraries are and what they were built with."""
    built = build_plugins(
        source_dir=args.source_dir,
        output_dir=args.output_dir,
        build_dir=args.build_dir,
        nvcc=args.nvcc,
        tensorrt_include_dir=args.tensorrt_include_dir,
        cuda_architectures=args.cuda_architectures,
        jobs=args.jobs,
    )
    major, minor = built.toolchain.version
    print(f"kernels         {built.kernels}")
    print(f"plugins         {built.plugins}")
    print(f"contract        {built.contract_hash}")
    print(f"nvcc            {built.toolchain.nvcc} ({major}.{minor})")
    print(f"TensorRT        {built.tensorrt_headers or 'declarations of plugins/tensorrt/abi'}")
    cuobjdump = built.toolchain.cuobjdump or find_cuobjdump()
    if cuobjdump is None:
        print("resource table  needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    else:
        print("\n" + format_resources(read_resources(built.plugins, cuobjdump)))
    return 0
