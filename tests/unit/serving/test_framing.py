"""Frames: whole messages out of any slicing, refusals of everything else."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dspark.serving.framing import (
    PROTOCOL_VERSION,
    FrameDecoder,
    ProtocolError,
    UnsendableMessage,
    check_hello,
    pack,
)

MESSAGES = st.fixed_dictionaries(
    {"type": st.text(max_size=8)},
    optional={"text": st.text(), "tokens": st.lists(st.integers(0, 2**31)), "number": st.floats(allow_nan=False)},
)


@given(st.lists(MESSAGES, max_size=5), st.integers(1, 17))
def test_frames_in_any_slicing_give_the_same_messages(messages: list[dict[str, object]], size: int) -> None:
    data = b"".join(map(pack, messages))
    decoder = FrameDecoder()
    received = [m for start in range(0, len(data), size) for m in decoder.feed(data[start : start + size])]
    assert received == messages


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 2**31),
        struct.pack(">I", 1) + b"\xc1",  # a byte msgpack never uses
        struct.pack(">I", 3) + msgpack.packb([1, 2]),
        struct.pack(">I", 1) + msgpack.packb({}),
        struct.pack(">I", len(msgpack.packb({"type": 1}))) + msgpack.packb({"type": 1}),
        struct.pack(">I", 0),
    ],
)
def test_feed_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(data))


def test_feed_oversized_header_is_refused_before_its_body() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit of 10 bytes"):
        list(FrameDecoder(max_bytes=10).feed(struct.pack(">I", 11)))


def test_pack_oversized_message_is_refused() -> None:
    with pytest.raises(UnsendableMessage, match="exceeds the frame limit") as refused:
        pack({"type": "add", "text": "x" * 100}, max_bytes=50)
    assert refused.value.code == "prompt_too_large"


@pytest.mark.parametrize("value", [2**64, "\ud800", {1, 2}])
def test_pack_value_without_a_binary_form_is_refused(value: object) -> None:
    with pytest.raises(UnsendableMessage, match="has no binary form") as refused:
        pack({"type": "add", "value": value})
    assert refused.value.code == "invalid_value"


@pytest.mark.parametrize(
    "hello", [{"type": "add"}, {"type": "hello"}, {"type": "hello", "protocol": PROTOCOL_VERSION + 1}]
)
def test_check_hello_other_version_names_both(hello: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        check_hello(hello, peer="a client")
