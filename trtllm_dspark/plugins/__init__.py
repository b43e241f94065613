"""The native libraries with CUDA in them: how to build them, what they promise, how to launch their kernels."""

from trtllm_dspark.plugins.contract import (
    PluginSpec,
    contract_hash,
    expected_contract,
    parse_contract,
    plugin_contract,
)
from trtllm_dspark.plugins.library import ELEMENT_TYPES, KernelLibrary
from trtllm_dspark.plugins.registration import check_plugin_library, register_plugins
from trtllm_dspark.plugins.toolchain import Toolchain, find_toolchain

__all__ = [
    "ELEMENT_TYPES",
    "KernelLibrary",
    "PluginSpec",
    "Toolchain",
    "check_plugin_library",
    "contract_hash",
    "expected_contract",
    "find_toolchain",
    "parse_contract",
    "plugin_contract",
    "register_plugins",
]
