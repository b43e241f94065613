"""The native libraries with CUDA in them: how to build them, what they promise, how to launch their kernels."""

from trtllm_dspark.plugins.contract import contract_hash, plugin_contract
from trtllm_dspark.plugins.library import ELEMENT_TYPES, KernelLibrary
from trtllm_dspark.plugins.toolchain import Toolchain, find_toolchain

__all__ = ["ELEMENT_TYPES", "KernelLibrary", "Toolchain", "contract_hash", "find_toolchain", "plugin_contract"]
