"""Parsing and linting the builder's layer list, in its own wording; needs no builder."""

from __future__ import annotations

import pytest

from trtllm_dspark.build.tensorrt.layers import Expectation, lint_layers, parse_layers, weight_bytes
from trtllm_dspark.errors import EngineError

EXPECTED = Expectation((640, 64), frozenset({"present_k.0", "present_v.0"}), num_attention=1, weight_bytes=70_000_000)
FORMAT = "Strides: [1], StrideOrder: [0], Datatype: Half, Format: (Linear) Row major linear format"


def layer(name: str, outputs: list[tuple[str, str]], nodes: str = "", kind: str = "kgen") -> str:
    listed = ", ".join(f"{{ Name: {tensor}, Dimensions: [{dims}], {FORMAT} }}" for tensor, dims in outputs)
    read = f"Inputs: [ {{ Name: x, Dimensions: [-1,3,640,64], {FORMAT} }}], Constants: []"
    return (
        f"Name: {name}, LayerType: {kind}, {read}, Outputs: [ {listed}], TacticName: t, StreamId: 0, Metadata: {nodes}"
    )


SCATTER = layer(
    "__myl_ScatGath_myl1_1",
    [("present_k.0 [profile 1]", "-1,3,640,64"), ("present_v.0", "-1,3,640,64"), ("rotated_q.0", "-1,9,-1,64")],
    "[ONNX Layer: present_k.0][ONNX Layer: present_v.0]",
)
ATTENTION = layer("_gemm_mha_v2_myl1_2", [("__mye1", "-1,9,-1,64")], "[ONNX Layer: TRT_Attention_1]")
LOGITS = layer("__myl_FcCast_myl1_3", [("logits", "-1,49152")], kind="runtime_fusion")
GOOD = (SCATTER, ATTENTION, LOGITS)


def messages(*lines: str) -> list[str]:
    tail = ["", "I/O Tensors:", " Name: past_k.0, IOMode: Input, Dimensions: [-1,3,640,64]"]
    return ["\n".join(["Layers:", *lines, *tail]), "Total Weights Memory: 70850432 bytes"]


def lint(*lines: str, weights: int = 70_850_432, num_profiles: int = 1) -> None:
    layers = parse_layers(messages(*lines))
    lint_layers(layers, EXPECTED, num_profiles=num_profiles, found_weight_bytes=weights)


def test_in_place_updates_and_fused_attention_pass() -> None:
    lint(*GOOD)
    layers = parse_layers(messages(*GOOD))
    assert [found.name for found in layers] == ["__myl_ScatGath_myl1_1", "_gemm_mha_v2_myl1_2", "__myl_FcCast_myl1_3"]
    assert layers[0].nodes == ("present_k.0", "present_v.0")
    assert layers[0].outputs[0].dims == (-1, 3, 640, 64)
    assert weight_bytes(messages(*GOOD)) == 70_850_432


@pytest.mark.parametrize("dims", ["-1,3,640,64", "-1,64,640", "-1,9,64,640", "-1,640,3,64"])
def test_cache_shaped_output_is_refused(dims: str) -> None:
    copy = layer("__myl_TranRepl_myl1_4", [("__myln_k_arg", dims)], "[ONNX Layer: present_k.0]")
    with pytest.raises(EngineError, match="__myl_TranRepl_myl1_4.*copy of a whole cache each pass"):
        lint(*GOOD, copy)


def test_cache_written_by_another_kernel_than_its_update_is_refused() -> None:
    copy = layer("__myl_Move_myl1_4", [("present_k.0", "-1,3,640,64")], "[ONNX Layer: Add_3]")
    with pytest.raises(EngineError, match="copy of a whole cache"):
        lint(*GOOD, copy)


def test_mask_over_the_cache_is_no_copy() -> None:
    lint(*GOOD, layer("__myl_Lte_myl1_4", [("mask", "-1,1,-1,640")]))


def test_missing_fused_attention_is_refused() -> None:
    with pytest.raises(EngineError, match="0 of 1 attention layers are fused"):
        lint(SCATTER, LOGITS)
    with pytest.raises(EngineError, match="1 of 2 attention layers are fused"):
        lint(*GOOD, num_profiles=2)


def test_duplicated_weights_are_refused() -> None:
    with pytest.raises(EngineError, match="holds 127.5 MB of weights, its graph 70.0"):
        lint(*GOOD, weights=70_850_432 + 49152 * 576 * 2)


def test_unreadable_lists_are_refused() -> None:
    with pytest.raises(EngineError, match="printed no layer list"):
        parse_layers(["Total Weights Memory: 1 bytes"])
    with pytest.raises(EngineError, match="empty or of another form"):
        parse_layers(messages("layer 0: something"))
    with pytest.raises(EngineError, match="cannot be read"):
        parse_layers(messages("Name: x, Kind: y"))
    with pytest.raises(EngineError, match="no size of the weights"):
        weight_bytes(["Layers:"])
