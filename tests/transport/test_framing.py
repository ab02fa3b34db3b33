"""Messages survive the wire unchanged; anything else is refused."""

from __future__ import annotations

import contextlib
import types
from typing import Literal, NewType, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.framing import BadMessage, decode_header, encode_header, read_tokens, token_frame
from transport.ids import RequestId
from transport.messages.any import ANY_MESSAGE, AnyMessage
from transport.messages.base import Message
from transport.messages.from_daemon import TO_CLIENT, WORKER_NOTICES
from transport.messages.generate import Encode
from transport.messages.to_daemon import TO_DAEMON
from transport.messages.to_frontend import TO_FRONTEND
from transport.messages.to_tokenizer import TO_TOKENIZER
from transport.messages.to_worker import TO_WORKER

KINDS = get_args(AnyMessage)
SIMPLE = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
}


def values_of(kind: object) -> st.SearchStrategy:
    """Values of a field's type."""
    if isinstance(kind, NewType):
        return values_of(kind.__supertype__)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs_of(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    assert origin is tuple, f"teach this test about {kind}"
    return st.tuples(*map(values_of, arguments))


def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy:
    return st.builds(kind, **{f.name: values_of(f.type) for f in msgspec.structs.fields(kind)})


def test_every_message_is_in_the_union():
    assert set(KINDS) == set(Message.__subclasses__())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_messages_come_back_as_they_went(kind):
    @settings(max_examples=30, deadline=None)
    @given(structs_of(kind))
    def check(message):
        header = encode_header(message)
        for frame in (header, bytearray(header), memoryview(header), zmq.Frame(header)):
            found = decode_header(frame, ANY_MESSAGE)
            assert type(found) is kind
            assert found == message

    check()


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_is_a_message(data):
    try:
        assert isinstance(decode_header(data, ANY_MESSAGE), Message)
    except BadMessage as error:
        assert "protocol version" in str(error)


@settings(max_examples=300)
@given(st.sampled_from(KINDS).flatmap(structs_of), st.data())
def test_damaged_messages_are_refused_or_are_messages(message, data):
    header = bytearray(encode_header(message))
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(header)))
    with contextlib.suppress(BadMessage):
        assert isinstance(decode_header(bytes(header[:length]), ANY_MESSAGE), Message)


@pytest.mark.parametrize(
    "value",
    [None, 5, [], ["Nobody"], ["Hello"], ["Hello", 1, "king", "a", 1, "h"], {"type": "Hello"}],
)
def test_what_is_no_message_is_refused(value):
    with pytest.raises(BadMessage):
        decode_header(msgspec.msgpack.encode(value), ANY_MESSAGE)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fields_that_a_newer_peer_appends_do_not_disturb(kind):
    @settings(max_examples=5, deadline=None)
    @given(structs_of(kind))
    def check(message):
        values = [getattr(message, f.name) for f in msgspec.structs.fields(kind)]
        newer = msgspec.msgpack.encode([kind.__name__, *values, "something new"])
        assert decode_header(newer, ANY_MESSAGE) == message

    check()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_tokens_come_back_as_they_went(ids):
    frame = bytes(token_frame(ids))
    assert len(frame) == 4 * len(ids)
    assert read_tokens(frame).tolist() == ids
    assert read_tokens(zmq.Frame(frame)).tolist() == ids
    assert bytes(token_frame(np.array(ids, dtype=np.int32))) == frame


def test_tokens_of_a_view_with_gaps_are_packed():
    ids = np.arange(10, dtype=np.int32)
    assert read_tokens(token_frame(ids[::3])).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_half_a_token_is_refused(size):
    with pytest.raises(BadMessage, match=f"{size} bytes"):
        read_tokens(b"x" * size)


def test_a_receiver_takes_only_what_is_meant_for_it():
    header = encode_header(Encode(RequestId("a"), "text"))
    assert decode_header(header, TO_TOKENIZER) == Encode(RequestId("a"), "text")
    for decoder in (TO_WORKER, TO_FRONTEND, TO_DAEMON, TO_CLIENT, WORKER_NOTICES):
        with pytest.raises(BadMessage):
            decode_header(header, decoder)
