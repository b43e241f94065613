"""Nodes of this project's TensorRT plugins: inputs, outputs and fields in the order and types of the contract.

TensorRT's parser takes an operator it does not know for a plugin: name = operator, version and namespace = attributes,
fields = the other attributes. It drops an attribute that is no field without an error: nothing here is typed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from trtllm_dspark.errors import EngineMismatch
from trtllm_dspark.graph.network import Network
from trtllm_dspark.plugins import PluginSpec, expected_contract, parse_contract

PLUGIN_DOMAIN = "trtllm_dspark"
"""ONNX domain of plugin nodes, and namespace of the plugins."""


@cache
def plugin_specs() -> Mapping[str, PluginSpec]:
    """Return the plugins that graphs are written for, by name."""
    return parse_contract(expected_contract())


def plugin(
    net: Network,
    name: str,
    inputs: Mapping[str, str],
    fields: Mapping[str, float] | None = None,
    *,
    outputs: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Append a plugin node.

    Args:
        net: the graph.
        name: of the plugin.
        inputs: contract's tensor name -> value; exactly those that a node with these fields has.
        fields: values of its fields; what is left out gets the contract's default.
        outputs: contract's tensor name -> name of the value, where it must have a certain one.

    Returns:
        Contract's tensor name -> value of every output.

    Raises:
        EngineMismatch: inputs or fields are not those of the contract.
    """
    spec = plugin_specs()[name]
    values = spec.complete(fields or {})
    if set(values) != {field.name for field in spec.fields}:
        raise EngineMismatch(f"{name} has fields {[f.name for f in spec.fields]}, this graph sets {sorted(values)}")
    wanted = [tensor.name for tensor in spec.inputs(values)]
    if set(wanted) != set(inputs):
        raise EngineMismatch(f"{name} with {values} takes {wanted}, this graph gives {sorted(inputs)}")
    stem = f"{name}_{len(net.nodes)}"
    named = {t.name: (outputs or {}).get(t.name, f"{stem}:{t.name}") for t in spec.outputs(values)}
    attributes: dict[str, Any] = {
        field.name: float(values[field.name]) if field.dtype == "float32" else int(values[field.name])
        for field in spec.fields
    }
    net.named(
        name,
        [inputs[key] for key in wanted],
        list(named.values()),
        domain=PLUGIN_DOMAIN,
        plugin_version=spec.version,
        plugin_namespace=spec.namespace,
        **attributes,
    )
    return named
