"""Messages of data connections: round trips, and nonsense that must end as `ProtocolError`; data addresses."""

from __future__ import annotations

from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.addresses import split_address
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.home_messages import Holding
from p2pstore.objects import CHUNK_BYTES, KIB
from p2pstore.transfer.data_messages import (
    MAX_SMALL_BULK_BYTES,
    READ_KINDS,
    REPLIES,
    REQUESTS,
    DataAddress,
    DataKind,
    GetItem,
    ObjectReply,
    Ticket,
    over_tls,
    split_data_address,
)
from p2pstore.transfer.peer_messages import KeyInfo
from p2pstore.transfer.reading.small_reads import MAX_ITEMS, Part, in_parts
from p2pstore.wire import (
    DATA_REQUEST_LIMITS,
    ERROR,
    HEADER,
    REPLY,
    Code,
    Failure,
    FrameBuffer,
    Limits,
    Message,
    decode_body,
    decode_header,
    encode_body,
    encode_failure,
    encode_frame,
)

MESSAGE_TYPES: list[type[Message]] = list(
    dict.fromkeys(
        [*REQUESTS.values(), *REPLIES.values(), Ticket, GetItem, ObjectReply, Holding, KeyInfo]
    )
)
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)


def values_of(annotation: object) -> st.SearchStrategy[object]:
    if get_origin(annotation) is Annotated:
        inner, limits = get_args(annotation)
        if inner is bytes:
            return st.binary(min_size=limits.min_length or 0, max_size=64)
        annotation = inner
    if annotation is int:
        return INTEGERS
    if annotation is bool:
        return st.booleans()
    if annotation is bytes:
        return st.binary(max_size=64)
    if annotation is str:
        return st.text(max_size=20)
    if isinstance(annotation, type) and issubclass(annotation, Message):
        return messages(annotation)
    inner, *more = annotation.__args__  # type: ignore[attr-defined]  # the rest are lists and tuples
    values = st.lists(values_of(inner), max_size=3)
    return values.map(tuple) if more == [...] else values


def messages(message_type: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(message_type, include_extras=True)
    return st.builds(message_type, *[values_of(hints[name]) for name in message_type.__struct_fields__])


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda each: each.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_round_trip(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type))
    assert decode_body(message_type, encode_body(message)) == message


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda each: each.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_fields_of_a_newer_version_are_ignored(message_type: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(message_type))
    fields = msgspec.msgpack.decode(encode_body(message))
    newer = msgspec.msgpack.encode([*fields, "new", {"and": 1}])
    assert decode_body(message_type, newer) == message


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda each: each.__name__)
@settings(max_examples=50)
@given(body=st.binary(max_size=200))
def test_nonsense_is_a_protocol_error_or_a_message(message_type: type[Message], body: bytes) -> None:
    try:
        decoded = decode_body(message_type, body)
    except ProtocolError:
        return
    assert isinstance(decoded, message_type)


def test_every_kind_has_request_and_reply() -> None:
    assert set(REQUESTS) == set(DataKind)
    assert set(REPLIES) == set(DataKind) - {DataKind.PROOF, DataKind.PIECE_TAKEN}
    assert DataKind.GET in READ_KINDS
    assert {DataKind.PUSH, DataKind.REPLICATE, DataKind.SNAPSHOT}.isdisjoint(READ_KINDS)


@given(
    st.lists(
        st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF_FFFF), st.binary(max_size=40)),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_frames_come_out_however_they_were_cut(
    frames: list[tuple[int, int, bytes]], rng: object
) -> None:
    stream = b"".join(encode_frame(kind, request_id, GetItem(body)) for kind, request_id, body in frames)
    buffer = FrameBuffer(DATA_REQUEST_LIMITS)
    found = []
    position = 0
    while position < len(stream):
        step = rng.randrange(1, 30)  # type: ignore[attr-defined]  # hypothesis' Random
        buffer.feed(stream[position : position + step])
        position += step
        while (frame := buffer.next_frame()) is not None:
            header, body = frame
            found.append((header.kind, header.request_id, decode_body(GetItem, body).digest))
    assert found == frames
    assert buffer.pending_bytes == 0


@given(st.integers(0, 0xFFFF_FFFF), st.integers(0, 0xFFFF_FFFF))
def test_lengths_above_the_cap_are_refused_at_once(body: int, bulk: int) -> None:
    packed = HEADER.pack(16, 0, 1, body, bulk)
    limits = Limits(1000, 2000)
    if body <= 1000 and bulk <= 2000:
        assert decode_header(packed, limits).body_length == body
        return
    with pytest.raises(ProtocolError, match="are allowed"):
        decode_header(packed, limits)


def test_a_failure_is_cut_to_a_bearable_length() -> None:
    frame = encode_failure(DataKind.GET, 5, Code.INTERNAL, "x" * 5000, 7)
    header = decode_header(frame, DATA_REQUEST_LIMITS)
    assert header.flags == REPLY | ERROR
    failure = decode_body(Failure, frame[HEADER.size :])
    assert (failure.code, len(failure.text), failure.detail) == (Code.INTERNAL, 1000, 7)


def test_a_large_frame_that_was_taken_is_not_kept() -> None:
    buffer = FrameBuffer(DATA_REQUEST_LIMITS)
    frame = HEADER.pack(1, 0, 1, 900_000, 0) + bytes(900_000)
    for rest in (b"", b"x"):
        buffer.feed(frame[:500_000])
        assert not buffer.has_frame
        buffer.feed(frame[500_000:] + rest)
        assert buffer.has_frame
        assert buffer.next_frame() is not None
        assert not buffer.has_frame
        assert len(buffer._data) == len(rest)


@pytest.mark.parametrize("lengths", [(2**20 + 1, 0), (0, 2**24 + 1)])
def test_a_frame_that_announces_too_much_is_there_at_once(lengths: tuple[int, int]) -> None:
    buffer = FrameBuffer(DATA_REQUEST_LIMITS)
    buffer.feed(HEADER.pack(1, 0, 1, *lengths))
    assert buffer.has_frame
    with pytest.raises(ProtocolError):
        buffer.next_frame()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:17947", DataAddress("10.0.0.1", 17947)),
        ("tls://10.0.0.1:17947", DataAddress("10.0.0.1", 17947, tls=True)),
        ("tls://[fd00::1]:5", DataAddress("fd00::1", 5, tls=True)),
        ("tls:5", DataAddress("tls", 5)),  # a host of that name
    ],
)
def test_forms_of_addresses(address: str, expected: DataAddress) -> None:
    assert split_data_address(address) == expected


@pytest.mark.parametrize("address", ["quic://a:1", "tls://", "tls://a", "tls://tls://a:1", "TLS://a:1"])
def test_a_form_that_is_not_known(address: str) -> None:
    with pytest.raises(ConfigError, match="data address: "):
        split_data_address(address)


@pytest.mark.parametrize("address", ["10.0.0.1:17947", "node:5", "[fd00::1]:5"])
def test_readers_before_tls_take_the_new_form_for_no_address(address: str) -> None:
    """They pass over what this function refuses."""
    assert over_tls(address).startswith("tls://")  # as in golden bytes: others read it
    with pytest.raises(ConfigError):
        split_address(over_tls(address), "data address")


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    for address in (text, over_tls(text)):
        found, complaint = None, ""
        try:
            found = split_data_address(address)
        except ConfigError as error:
            complaint = str(error)
        assert complaint.startswith("data address: ") if found is None else found.host


ROOM = memoryview(bytearray(CHUNK_BYTES))
SIZES = st.one_of(st.integers(1, CHUNK_BYTES), st.sampled_from((1, 4 * KIB, 64 * KIB, CHUNK_BYTES)))


@given(st.lists(SIZES, max_size=700))
def test_parts_are_all_of_them_in_order_and_fit_into_an_answer(sizes: list[int]) -> None:
    views = [ROOM[:size] for size in sizes]
    most_bytes = max(sizes, default=CHUNK_BYTES)
    digests = [number.to_bytes(16) for number in range(len(sizes))]
    asked = in_parts(Part(digests, views, most_bytes))
    for part in asked:
        assert 0 < len(part.views) <= MAX_ITEMS
        assert sum(map(len, part.views)) <= MAX_SMALL_BULK_BYTES
    assert [digest for part in asked for digest in part.digests] == digests
    assert [len(view) for part in asked for view in part.views] == sizes
    assert {part.most_bytes for part in asked} <= {most_bytes}
