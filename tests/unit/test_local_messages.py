"""Messages of the local socket survive the wire, and what is no message is refused."""

import random
from contextlib import suppress
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore import errors
from p2pstore.checkpoint import checkpoint_messages
from p2pstore.errors import P2PStoreError, ProtocolError
from p2pstore.local.local_messages import ContainsReply
from p2pstore.local.local_protocol import REPLIES, REQUESTS, LocalKind
from p2pstore.local.local_requests import Frame, ReplyPieces
from p2pstore.wire import (
    LOCAL_LIMITS,
    REPLY,
    Code,
    Failure,
    FrameBuffer,
    Message,
    code_of,
    decode_body,
    encode_body,
    encode_failure,
    encode_frame,
    error_of,
)

TYPES = sorted(
    {
        *REQUESTS.values(),
        *REPLIES.values(),
        *checkpoint_messages.REQUESTS.values(),
        *checkpoint_messages.REPLIES.values(),
    },
    key=lambda each: each.__name__,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotated field, all fields of messages within given."""
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is tuple and get_args(hint)[-1] is not ...:
        return st.tuples(*map(values, get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([values(each) for each in get_args(hint)])
    if hint is type(None):
        return st.none()
    if isinstance(hint, type) and issubclass(hint, Message):
        fields = get_type_hints(hint)
        return st.builds(hint, **{field: values(each) for field, each in fields.items()})
    return SCALARS[hint]


SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
}
MESSAGES = {kind: values(kind) for kind in TYPES}
ANY_MESSAGE = st.one_of(list(MESSAGES.values()))


@given(ANY_MESSAGE)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode_body(type(message), encode_body(message)) == message


@given(st.lists(st.tuples(ANY_MESSAGE, st.integers(0, 2**32 - 1)), max_size=4), st.randoms())
def test_frames_are_cut_wherever_they_were_split(
    sent: list[tuple[Message, int]], rng: random.Random
) -> None:
    stream = b"".join(
        encode_frame(number, request_id, message, flags=REPLY)
        for number, (message, request_id) in enumerate(sent)
    )
    frames, received = FrameBuffer(LOCAL_LIMITS), []
    while stream:
        size = rng.randint(1, len(stream))
        frames.feed(stream[:size])
        stream = stream[size:]
        while (frame := frames.next_frame()) is not None:
            received.append(frame)
    assert frames.pending_bytes == 0
    assert [
        (header.kind, header.request_id, decode_body(type(sent[header.kind][0]), body))
        for header, body in received
    ] == [(number, each[1], each[0]) for number, each in enumerate(sent)]


@given(st.sampled_from(TYPES), st.binary(max_size=64))
def test_noise_is_a_protocol_error_or_a_message(kind: type[Message], noise: bytes) -> None:
    try:
        message = decode_body(kind, noise)
    except ProtocolError:
        return
    assert isinstance(message, kind)


@pytest.mark.parametrize("kind", TYPES)
def test_fields_of_a_newer_version_are_ignored(kind: type[Message]) -> None:
    @settings(max_examples=20)
    @given(MESSAGES[kind])
    def check(message: Message) -> None:
        body = encode_body(message)
        newer = _longer_array(body)
        assert decode_body(kind, newer) == message

    check()


def _longer_array(body: bytes) -> bytes:
    """The same msgpack array with one more element."""
    first = body[0]
    if 0x90 <= first < 0x9F:
        return bytes((first + 1,)) + body[1:] + b"\x2a"
    if first == 0x9F:
        return b"\xdc\x00\x10" + body[1:] + b"\x2a"
    assert first == 0xDC
    count = int.from_bytes(body[1:3], "big") + 1
    return b"\xdc" + count.to_bytes(2, "big") + body[3:] + b"\x2a"


def test_every_kind_has_its_messages() -> None:
    assert set(REQUESTS) | set(checkpoint_messages.REQUESTS) == set(LocalKind)
    assert set(REPLIES) | set(checkpoint_messages.REPLIES) == set(LocalKind) - {
        LocalKind.RELEASE,
        LocalKind.REPORT,
    }


RAISED = [
    errors.AuthenticationFailed("text"),
    errors.BufferTooSmall("text", 77),
    errors.CapacityExceeded("text"),
    errors.DeadlineExceeded("text"),
    errors.DuplicateIdentity("text"),
    errors.LeaseLimitExceeded("text"),
    errors.NoSuchKey("text"),
    errors.ObjectTooLarge("text"),
    errors.ProtocolError("text"),
    errors.ProtocolMismatch("text"),
    errors.StoreClosed("text"),
    errors.Unavailable("text"),
    ValueError("text"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_errors_arrive_as_what_they_were(error: Exception) -> None:
    needed = getattr(error, "needed", 0)
    frames = FrameBuffer(LOCAL_LIMITS)
    frames.feed(encode_failure(16, 5, code_of(error), str(error), needed))
    frame = frames.next_frame()
    assert frame is not None
    failure = decode_body(Failure, frame[1])
    arrived = error_of(failure.code, failure.text, failure.detail)
    assert (type(arrived), str(arrived)) == (type(error), "text")
    assert getattr(arrived, "needed", 0) == needed


def test_errors_that_were_not_meant() -> None:
    assert code_of(ZeroDivisionError()) is Code.INTERNAL
    assert code_of(UnicodeError("a kind of ValueError")) is Code.INVALID_ARGUMENT
    assert type(error_of(Code.INTERNAL, "text")) is P2PStoreError
    assert type(error_of(60_000, "from the future")) is P2PStoreError
    assert type(error_of(Code.BUSY, "text")) is errors.Unavailable


@pytest.mark.parametrize("seed", range(20))
def test_an_interrupted_receiver_loses_no_reply(seed: int) -> None:
    """Pieces of any length, and a delivery that is interrupted now and then: none is lost, and their order stays."""
    rng = random.Random(seed)
    bodies = [rng.randbytes(rng.choice((0, 1, 20, 5000))) for _ in range(30)]
    most = (10, 100, 9000)[seed % 3]
    sent = b"".join(
        encode_frame(LocalKind.CONTAINS, number, ContainsReply(body), flags=REPLY)
        for number, body in enumerate(bodies)
    )
    received = ReplyPieces([])
    delivered: list[int] = []

    def deliver(frame: Frame) -> None:
        header, body = frame
        if rng.random() < 0.3:
            raise KeyboardInterrupt
        assert decode_body(ContainsReply, body).present == bodies[header.request_id]
        delivered.append(header.request_id)

    while sent or received.pieces:
        length = rng.randint(1, most)
        if sent:
            received.pieces.append(sent[:length])
            sent = sent[length:]
        with suppress(KeyboardInterrupt):
            received.deliver(deliver)
    assert list(dict.fromkeys(delivered)) == list(range(len(bodies)))
