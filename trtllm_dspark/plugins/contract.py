"""The contract between an engine and the plugin library: names, versions, fields and tensors of every plugin.

The library tells it as text, one line a fact; engine manifests hold the text's SHA-256:

    plugin <namespace>::<name> version <version>
      field <name> int32|float32 [<low>, <high>] [default <value>]
      input|output <name> [<dims>] <type>[|<type>] [(same for group <letter>)] [when <condition> [and <condition>]]
          [aliases <input>]                                                     (on the same line)
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_dspark.errors import EngineError

_FIELD = re.compile(r"  field (\w+) (int32|float32) \[(\S+), (\S+)\](?: default (\S+))?")
_TENSOR = re.compile(
    r"  (input|output) (\w+) \[([^\]]*)\] ([\w|]+)(?: \(same for group (\w)\))?(?: when (.+?))?(?: aliases (\w+))?"
)
_CONDITION = re.compile(r"(\w+) is (not 0|\d+(?: or \d+)*)")


@dataclass(frozen=True)
class PluginField:
    """One attribute of a plugin node."""

    name: str
    dtype: str
    low: float
    high: float
    default: float | None


@dataclass(frozen=True)
class PluginTensor:
    """One input or output: symbolic dims, accepted types, the fields it depends on."""

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    group: str | None
    conditions: tuple[tuple[str, str], ...]
    aliases: str | None

    def is_present(self, fields: Mapping[str, float]) -> bool:
        """Whether a node with these field values has this tensor."""
        return all(
            fields[name] != 0 if values == "not 0" else str(int(fields[name])) in values.split(" or ")
            for name, values in self.conditions
        )


@dataclass
class PluginSpec:
    """Everything an engine may rely on about one plugin."""

    name: str
    namespace: str
    version: str
    fields: list[PluginField] = field(default_factory=list)
    all_inputs: list[PluginTensor] = field(default_factory=list)
    all_outputs: list[PluginTensor] = field(default_factory=list)

    def complete(self, fields: Mapping[str, float]) -> dict[str, float]:
        """Return the values of all fields, defaults filled in."""
        defaults = {item.name: item.default for item in self.fields if item.default is not None}
        return defaults | dict(fields)

    def inputs(self, fields: Mapping[str, float]) -> list[PluginTensor]:
        """Return the inputs of a node with these field values, in their order."""
        values = self.complete(fields)
        return [tensor for tensor in self.all_inputs if tensor.is_present(values)]

    def outputs(self, fields: Mapping[str, float]) -> list[PluginTensor]:
        """Return the outputs of a node with these field values, in their order."""
        values = self.complete(fields)
        return [tensor for tensor in self.all_outputs if tensor.is_present(values)]


def plugin_contract(path: str | Path) -> str:
    """Return the contract text of a plugin library.

    Raises:
        EngineError: the file is not a plugin library of this project.
    """
    try:
        function = ctypes.CDLL(str(path)).dspark_plugin_contract
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path} is not the trtllm_dspark plugin library: {error}") from error
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()


def expected_contract() -> str:
    """Return the contract text that this package's graphs are written for."""
    return (Path(__file__).parent / "contract.txt").read_text(encoding="utf-8")


def contract_hash(contract: str) -> str:
    """Return the SHA-256 of a contract text, as engine manifests hold it."""
    return hashlib.sha256(contract.encode()).hexdigest()


def parse_contract(contract: str) -> dict[str, PluginSpec]:
    """Read a contract text into plugin name -> specification.

    Raises:
        EngineError: a line has another form.
    """
    plugins: dict[str, PluginSpec] = {}
    spec: PluginSpec | None = None
    for line in contract.splitlines():
        if match := re.fullmatch(r"plugin (\w+)::(\w+) version (\w+)", line):
            spec = plugins[match[2]] = PluginSpec(name=match[2], namespace=match[1], version=match[3])
        elif spec and (match := _FIELD.fullmatch(line)):
            default = None if match[5] is None else float(match[5])
            spec.fields.append(PluginField(match[1], match[2], float(match[3]), float(match[4]), default))
        elif spec and (match := _TENSOR.fullmatch(line)):
            (spec.all_inputs if match[1] == "input" else spec.all_outputs).append(_tensor(match))
        else:
            raise EngineError(f"plugin contract: cannot read '{line.strip()}'")
    return plugins


def _tensor(match: re.Match[str]) -> PluginTensor:
    return PluginTensor(
        name=match[2],
        dims=tuple(match[3].split(", ")),
        dtypes=tuple(match[4].split("|")),
        group=match[5],
        conditions=tuple(_CONDITION.findall(match[6] or "")),
        aliases=match[7],
    )
