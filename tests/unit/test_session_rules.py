"""The states of a data connection at its holder, which requests it takes, how many large answers are on their way, and
values that arrive in parts."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.access.keyring import Role
from p2pstore.errors import BufferTooSmall, ProtocolError
from p2pstore.objects import CHUNK_BYTES, DIGEST_BYTES, chunk_sums
from p2pstore.transfer.data_messages import (
    DataKind,
    Get,
    GetItem,
    GetSmall,
    Hello,
    Ping,
    Refused,
    StorePart,
    Ticket,
)
from p2pstore.transfer.peer_messages import ClusterRecords, Remove
from p2pstore.transfer.read_tickets import Rights, Scope, TicketClaims
from p2pstore.transfer.serving.other_requests import IncomingValue
from p2pstore.transfer.serving.serving_limits import Uploads
from p2pstore.transfer.serving.session_rules import (
    TRANSITIONS,
    Event,
    Lifecycle,
    Refusal,
    RequestRules,
    State,
    failure_frame,
    reply_frame,
)
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    ERROR,
    HEADER_BYTES,
    REPLY,
    Code,
    Failure,
    FrameHeader,
    Message,
    decode_body,
    decode_header,
    encode_body,
)

DIGEST = bytes(DIGEST_BYTES)


def test_every_state_but_the_last_can_end_and_none_goes_on_after_it() -> None:
    for state, transitions in TRANSITIONS.items():
        assert (Event.END in transitions) is (state is not State.ENDED)
    assert TRANSITIONS[State.ENDED] == {}


def test_every_state_and_every_event_is_reached() -> None:
    reached = {state for transitions in TRANSITIONS.values() for state in transitions.values()}
    assert reached == set(State)
    assert {event for transitions in TRANSITIONS.values() for event in transitions} == set(Event)


def test_only_a_quiet_connection_is_idle() -> None:
    life = Lifecycle()
    assert (life.state, life.since, life.retiring) == (State.ANSWERING, 0.0, False)
    assert life.quiet_since is None, "it answers what came along with the hello"
    life.happened(Event.ANSWERED, 3.0)
    assert life.quiet_since == 3.0
    life.happened(Event.RECEIVED)
    assert life.quiet_since is None
    life.happened(Event.CUT)
    assert life.quiet_since is None, "half a request is there"


def test_a_connection_that_retires_has_its_pause_from_then_on() -> None:
    life = Lifecycle()
    life.happened(Event.ANSWERED, 3.0)
    life.retire(8.0)
    assert (life.retiring, life.quiet_since) == (True, 8.0)
    life.happened(Event.RECEIVED)
    life.retire(9.0)
    assert (life.quiet_since, life.since) == (None, 0.0), "the pause has not begun"


@pytest.mark.parametrize(
    ("state", "event"),
    [(State.LENT, Event.RECEIVED), (State.TAKING_IN, Event.LENT), (State.LINKED, Event.RECEIVED)],
)
def test_while_another_has_the_connection_the_event_loop_takes_nothing(
    state: State, event: Event
) -> None:
    life = Lifecycle()
    life.state = state
    with pytest.raises(KeyError):
        life.happened(event)


# --- requests ------------------------------------------------------------------------------------


def rules(scope: Scope, *, stores: bool = True, namespace: str = "") -> RequestRules:
    claims = TicketClaims(1, b"key", b"issuer", b"audience", 1, b"ticket", int(scope), namespace)
    return RequestRules(Rights(claims, Role.MEMBER), stores=stores)


def header_of(kind: int, flags: int = 0) -> FrameHeader:
    return FrameHeader(kind, flags, 7, 0, 0)


def decode(
    kind: int, message: Message, *, flags: int = 0, on: RequestRules | None = None
) -> Message | Refusal:
    every = Scope.READ | Scope.WRITE | Scope.PEER
    return (on or rules(every)).decode(header_of(kind, flags), encode_body(message))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DataKind.GET, Get([GetItem(DIGEST)])),
        (DataKind.GET_SMALL, GetSmall(2 * DIGEST)),
        (DataKind.PING, Ping()),
    ],
)
def test_a_request_is_what_its_frame_says(kind: DataKind, message: Message) -> None:
    assert decode(kind, message) == message


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        (DataKind.GET, Get([]), "without items"),
        (DataKind.GET_SMALL, GetSmall(DIGEST + b"x"), "16 bytes each"),
        (DataKind.GET_SMALL, Ping(), "malformed"),
        (DataKind.STORE_PART, StorePart(0), "no STORE"),
    ],
)
def test_a_malformed_request_ends_the_connection(kind: DataKind, message: Message, text: str) -> None:
    with pytest.raises(Refused, match=text) as refused:
        decode(kind, message)
    header = decode_header(refused.value.frame, DATA_REPLY_LIMITS)
    assert (header.kind, header.request_id, header.flags) == (kind, 7, REPLY | ERROR)
    assert decode_body(Failure, refused.value.frame[HEADER_BYTES:]).code == Code.MALFORMED


@pytest.mark.parametrize(
    ("kind", "flags"), [(DataKind.HELLO, 0), (DataKind.PROOF, 0), (DataKind.PING, REPLY)]
)
def test_no_request_is_nonsense(kind: DataKind, flags: int) -> None:
    hello = Hello(1, 1, Ticket(b"", b""), b"")
    with pytest.raises(ProtocolError, match="not a request"):
        decode(kind, hello if kind == DataKind.HELLO else Ping(), flags=flags)


@pytest.mark.parametrize(
    ("kind", "on", "code"),
    [
        (DataKind.CLUSTER_RECORDS, rules(Scope.READ), Code.AUTHENTICATION_FAILED),
        (DataKind.REMOVE, rules(Scope.READ), Code.AUTHENTICATION_FAILED),
        (DataKind.REMOVE, rules(Scope.WRITE, namespace="mine"), Code.AUTHENTICATION_FAILED),
        (DataKind.REMOVE, rules(Scope.WRITE, stores=False), Code.UNSUPPORTED),
        (99, rules(Scope.READ), Code.UNSUPPORTED),
    ],
)
def test_a_request_that_is_not_for_here_is_refused(kind: int, on: RequestRules, code: Code) -> None:
    refusal = decode(kind, Remove("other", ["k"]), on=on)
    assert isinstance(refusal, Refusal)
    assert refusal.code is code
    assert refusal.text


def test_a_write_within_the_ticket_is_taken_by_a_peer_that_stores() -> None:
    message = Remove("mine", ["k"])
    assert decode(DataKind.REMOVE, message, on=rules(Scope.WRITE, namespace="mine")) == message
    of_peers = ClusterRecords([], [])
    peer = rules(Scope.PEER, stores=False)
    assert decode(DataKind.CLUSTER_RECORDS, of_peers, on=peer) == of_peers


# --- answers -------------------------------------------------------------------------------------


def test_an_answer_has_the_kind_and_number_of_its_request() -> None:
    header = decode_header(reply_frame(header_of(DataKind.PING), Ping()), DATA_REPLY_LIMITS)
    assert (header.kind, header.flags, header.request_id) == (DataKind.PING, REPLY, 7)
    assert header.bulk_length == 0
    frame = reply_frame(header_of(DataKind.GET), Ping(), 5)
    assert decode_header(frame, DATA_REPLY_LIMITS).bulk_length == 5


@pytest.mark.parametrize(
    ("error", "code", "detail", "text"),
    [
        (BufferTooSmall("too small", 77), Code.BUFFER_TOO_SMALL, 77, "too small"),
        (ValueError("a bad key"), Code.INVALID_ARGUMENT, 0, "a bad key"),
        (RuntimeError("secret"), Code.INTERNAL, 0, "internal error of the other peer"),
    ],
)
def test_a_failure_is_told_and_an_internal_one_only_logged(
    error: Exception, code: Code, detail: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame = failure_frame(header_of(DataKind.PING), error)
    failure = decode_body(Failure, frame[HEADER_BYTES:])
    assert (failure.code, failure.detail) == (code, detail)
    assert text in failure.text
    assert "secret" not in failure.text
    assert ("PING" in caplog.text) == (code is Code.INTERNAL)


def test_only_who_knows_other_holders_is_refused() -> None:
    uploads = Uploads(2)
    assert uploads.begin(1.0, may_refuse=True)
    assert uploads.begin(2.0)
    assert not uploads.begin(3.0, may_refuse=True)
    assert uploads.begin(3.0)
    assert uploads.taken == 3
    for began in (1.0, 2.0):
        uploads.end(began, 4.0)
    assert uploads.begin(4.0, may_refuse=True)


def test_seconds_are_of_those_that_ended_and_of_those_on_their_way() -> None:
    uploads = Uploads(16)
    assert uploads.seconds(5.0) == 0.0
    uploads.begin(10.0)
    uploads.begin(11.0)
    assert uploads.seconds(12.0) == pytest.approx(3.0)
    uploads.end(10.0, 14.0)
    assert uploads.seconds(14.0) == pytest.approx(7.0)
    uploads.end(11.0, 15.0)
    assert uploads.seconds(99.0) == pytest.approx(8.0)


def test_any_thread_may_count() -> None:
    uploads = Uploads(16)

    def use(number: int) -> None:
        for moment in range(2000):
            uploads.begin(float(moment))
            uploads.end(float(moment), moment + 1.0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert uploads.taken == 0
    assert uploads.seconds(0.0) == pytest.approx(8000.0)


LONG = Random(1).randbytes(5 * CHUNK_BYTES + 77)


def feed(incoming: IncomingValue, value: bytes, start: int, end: int) -> None:
    position = start
    for chunk in incoming.part(start, end - start):
        chunk[:] = value[position : position + len(chunk)]
        position += len(chunk)
    assert position == end


@settings(max_examples=30, deadline=None)
@given(st.integers(0, len(LONG)), st.lists(st.integers(1, 6), max_size=6))
def test_parts_of_any_number_of_chunks_make_the_value(length: int, counts: list[int]) -> None:
    value, target, position = LONG[:length], bytearray(length), 0
    incoming = IncomingValue(memoryview(target), chunk_sums(value))
    for count in [*counts, 6]:
        if position < length:
            assert not incoming.complete
            end = min(length, position + count * CHUNK_BYTES)
            feed(incoming, value, position, end)
            position = end
    if not length:
        feed(incoming, value, 0, 0)
    assert incoming.complete
    assert target == value


@pytest.mark.parametrize(
    ("offset", "length", "words"),
    [
        (CHUNK_BYTES, CHUNK_BYTES, "from byte 1,048,576"),
        (-CHUNK_BYTES, 2 * CHUNK_BYTES, "from byte -1,048,576"),
        (0, len(LONG) + 1, "to 5,242,958"),
        (0, 0, "ends within a chunk"),
        (0, CHUNK_BYTES + 1, "ends within a chunk"),
        (0, 77, "ends within a chunk"),
    ],
)
def test_parts_that_cannot_be(offset: int, length: int, words: str) -> None:
    incoming = IncomingValue(memoryview(bytearray(len(LONG))), chunk_sums(LONG))
    with pytest.raises(ProtocolError, match=words):
        incoming.part(offset, length)


def test_nothing_comes_after_the_end() -> None:
    incoming = IncomingValue(memoryview(bytearray(len(LONG))), chunk_sums(LONG))
    feed(incoming, LONG, 0, len(LONG))
    with pytest.raises(ProtocolError, match="have arrived"):
        incoming.part(0, CHUNK_BYTES)


@pytest.mark.parametrize("position", [0, 2 * CHUNK_BYTES + 5, len(LONG) - 1])
def test_one_wrong_byte_is_found_in_its_chunk(position: int) -> None:
    spoilt = bytearray(LONG)
    spoilt[position] ^= 1
    incoming = IncomingValue(memoryview(bytearray(len(LONG))), chunk_sums(LONG))
    with pytest.raises(ValueError, match=f"chunk {position // CHUNK_BYTES} is not"):
        feed(incoming, bytes(spoilt), 0, len(LONG))
    assert not incoming.complete


@pytest.mark.parametrize("sums", [b"", chunk_sums(LONG)[:-8], chunk_sums(LONG) + bytes(8), b"x"])
def test_one_sum_per_chunk(sums: bytes) -> None:
    with pytest.raises(ProtocolError, match="chunk sums"):
        IncomingValue(memoryview(bytearray(len(LONG))), sums)
