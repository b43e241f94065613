"""The contract text: frozen, readable, and hashed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from helpers.kernels.plugin_harness import Harness

from trtllm_dspark.errors import EngineError
from trtllm_dspark.plugins import PluginSpec, contract_hash, expected_contract, parse_contract, plugin_contract


def test_contract_text_is_the_frozen_one(host_plugins: Path) -> None:
    """A plugin whose lines change gets a new version, there and in plugins/contract.txt: built engines rely on it."""
    assert plugin_contract(host_plugins) == expected_contract()


def test_contract_fields_are_what_creators_tell(harness: Harness, specs: dict[str, PluginSpec]) -> None:
    types = {"int32": 5, "float32": 1}
    for line in harness.creators():
        name, version, namespace, *_ = line.split()
        spec = specs[name]
        assert (spec.version, spec.namespace) == (version, namespace)
        assert line.partition("CREATOR_V3ONE:")[2].split() == [f"{f.name}:{types[f.dtype]}" for f in spec.fields]
    assert sorted(specs) == sorted(line.split()[0] for line in harness.creators())


def test_contract_hash_is_sha256_of_the_text() -> None:
    text = expected_contract()
    assert contract_hash(text) == hashlib.sha256(text.encode()).hexdigest()
    assert contract_hash(text) != contract_hash(text.replace("kv_split", "kv_piece"))


def test_parse_contract_conditions_select_tensors(specs: dict[str, PluginSpec]) -> None:
    draft = specs["DsparkMarkovDraft"]
    fields = {"vocab": 8, "head_kind": 3, "acceptance": 1, "num_candidates": 4, "head_bias": 1}
    names = [tensor.name for tensor in draft.inputs(fields)]
    assert {"w1", "hidden", "rnn_weight", "rnn_bias"} <= set(names)
    assert not {"gate_weight", "gate_bias", "w1_scale", "target_of_draft"} & set(names)
    logits = [tensor for tensor in draft.outputs(fields) if tensor.name == "draft_logits"]
    assert [tensor.dims for tensor in logits] == [("R", "gamma", "num_candidates")]
    assert [t.aliases for t in specs["DsparkKvAppend"].outputs({})] == ["key_cache", "value_cache"]


def test_parse_contract_foreign_line_is_refused() -> None:
    with pytest.raises(EngineError, match="cannot read 'field x'"):
        parse_contract("plugin a::B version 1\n  field x\n")


def test_plugin_contract_wrong_file_is_refused() -> None:
    with pytest.raises(EngineError, match="is not the trtllm_dspark plugin library"):
        plugin_contract(Path(__file__))
