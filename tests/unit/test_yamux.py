"""The yamux protocol: whole streams under any splitting, windows that hold, and frames that break the rules."""

import struct
from random import Random

import pytest

from p2pstore.errors import ProtocolError
from p2pstore.gossip.links.yamux import GOODBYE, INITIAL_WINDOW_BYTES, Session, StreamState

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


def frame(kind: int, flags: int, stream: int, length: int, payload: bytes = b"") -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream, length) + payload


def dialled() -> Session:
    return Session(initiator=True, max_incoming=4)


def listening() -> Session:
    return Session(initiator=False, max_incoming=4)


def opened_by_other(session: Session, number: int = 1) -> StreamState:
    session.feed(frame(WINDOW, SYN, number, 0))
    return session.streams[number]


def test_the_bytes_of_each_frame() -> None:
    session = dialled()
    first, opening = session.open()
    second, _ = session.open()
    assert opening == bytes.fromhex("00 01 0001 00000001 00000000")
    assert (first.number, second.number) == (1, 3)
    assert first.data_frame(memoryview(b"abc")) == bytes.fromhex("00 00 0000 00000001 00000003 616263")
    assert first.widen(INITIAL_WINDOW_BYTES + 5) == bytes.fromhex("00 01 0000 00000001 00000005")
    session.feed(frame(PING, SYN, 0, 77))
    assert session.replies == bytes.fromhex("00 02 0002 00000000 0000004d")
    assert session.close(first) == bytes.fromhex("00 01 0008 00000001 00000000")
    assert bytes.fromhex("00 03 0000 00000000 00000000") == GOODBYE
    assert listening().open()[0].number == 2


def test_a_stream_that_the_other_side_opens() -> None:
    session = listening()
    session.feed(frame(DATA, SYN, 1, 3, b"abc") + frame(DATA, 0, 1, 2, b"de"))
    [state] = session.opened
    assert session.replies == frame(WINDOW, ACK, 1, 0)
    assert session.changed == {1}
    assert state.take(2) == b"ab"
    assert state.take() == b"cde"
    assert state.take() == b""
    assert state.ended is None


@pytest.mark.parametrize("seed", range(20))
def test_streams_arrive_whole_however_they_are_split(seed: int) -> None:
    """Two sessions, several streams both ways, pieces of any size on the wire, readers that lag."""
    rng = Random(seed)
    sessions = (dialled(), listening())
    wires = [bytearray(), bytearray()]  # towards each
    states: list[dict[int, StreamState]] = [{}, {}]
    to_send: list[dict[int, memoryview]] = [{}, {}]
    received: list[dict[int, bytearray]] = [{}, {}]
    wanted: list[dict[int, bytes]] = [{}, {}]
    for side in (0, 1):
        for _ in range(3):
            state, opening = sessions[side].open()
            states[side][state.number] = state
            wires[1 - side] += opening

    def step() -> None:
        side = rng.randrange(2)
        session = sessions[side]
        count = rng.choice([1, 3, 11, 12, 13, 500, 70_000])
        piece, wires[side][:] = bytes(wires[side][:count]), wires[side][count:]
        session.feed(piece)
        for state in session.opened:
            states[side][state.number] = state
        session.opened.clear()
        wires[1 - side] += session.replies
        session.replies.clear()
        for number, state in states[side].items():
            if number not in wanted[side]:
                data = rng.randbytes(rng.choice([0, 1, 5_000, 900_000]))
                wanted[side][number], to_send[side][number] = data, memoryview(data)
            rest = to_send[side][number]
            while rest and (chunk := state.data_frame(rest)):
                rest = rest[len(chunk) - 12 :]
                wires[1 - side] += chunk
            to_send[side][number] = rest
            assert len(state._buffer) <= INITIAL_WINDOW_BYTES
            if rng.random() < 0.3:
                received[side].setdefault(number, bytearray()).extend(
                    state.take(rng.choice([None, 1_000]))
                )
                wires[1 - side] += state.window_update()

    for _ in range(100_000):
        step()
        if len(wanted[0]) == len(wanted[1]) == 6 and all(
            received[side].get(number, b"") == data
            for side in (0, 1)
            for number, data in wanted[1 - side].items()
        ):
            return
    raise AssertionError("not everything arrived")


def test_a_byte_beyond_the_window_is_refused_before_it_is_kept() -> None:
    session = listening()
    state = opened_by_other(session)
    for _ in range(4):
        session.feed(frame(DATA, 0, 1, 65_536, bytes(65_536)))
    assert len(state._buffer) == INITIAL_WINDOW_BYTES
    with pytest.raises(ProtocolError, match="more than its window"):
        session.feed(frame(DATA, 0, 1, 1))
    assert len(state._buffer) == INITIAL_WINDOW_BYTES

    announced = listening()
    with pytest.raises(ProtocolError, match="more than its window"):
        announced.feed(frame(DATA, SYN, 1, 16 * 1024 * 1024))


def test_what_was_read_may_be_sent_again() -> None:
    session = listening()
    state = opened_by_other(session)
    assert state.window_update() == b""
    session.feed(frame(DATA, 0, 1, 200_000, bytes(200_000)))
    state.take(100_000)
    assert state.window_update() == b"", "less than half of a window is not worth a frame"
    state.take(50_000)
    assert state.window_update() == frame(WINDOW, 0, 1, 150_000)
    assert state.window_update() == b""
    room = INITIAL_WINDOW_BYTES - 50_000
    session.feed(frame(DATA, 0, 1, room, bytes(room)))
    with pytest.raises(ProtocolError, match="window"):
        session.feed(frame(DATA, 0, 1, 1, b"x"))


def test_writing_stops_when_the_other_sides_window_is_full() -> None:
    session = dialled()
    state, _ = session.open()
    data = memoryview(bytes(INITIAL_WINDOW_BYTES + 1))
    while chunk := state.data_frame(data):
        data = data[len(chunk) - 12 :]
    assert len(data) == 1
    session.feed(frame(WINDOW, 0, 1, 10))
    assert state.data_frame(data) == frame(DATA, 0, 1, 1, b"\0")
    assert state.send_window == 9
    for _ in range(3):
        session.feed(frame(WINDOW, 0, 1, 0xFFFF_FFFF))
    assert state.send_window <= 1 << 32


def test_the_ways_in_which_a_stream_ends() -> None:
    session = listening()
    state = opened_by_other(session)
    session.feed(frame(DATA, 0, 1, 2, b"ab") + frame(WINDOW, FIN, 1, 0))
    assert (state.ended, state.reset) == ("the other side closed it", False)
    assert state.take() == b"ab"
    with pytest.raises(ProtocolError, match="after its end"):
        session.feed(frame(DATA, 0, 1, 1, b"x"))

    session = listening()
    state = opened_by_other(session)
    session.feed(frame(WINDOW, RST, 1, 0))
    assert (state.ended, state.reset) == ("the other side reset it", True)
    session.feed(frame(DATA, 0, 1, 3, b"abc") + frame(PING, SYN, 0, 1))  # was under way
    assert state.take() == b""
    assert session.close(state) == b"", "the other side knows"
    assert not session.streams


def test_a_closed_stream_is_forgotten_and_what_was_under_way_for_it_skipped() -> None:
    session = listening()
    state = opened_by_other(session)
    assert session.close(state) == frame(WINDOW, RST, 1, 0)
    assert session.close(state) == b""
    for chunk in (b"abcdef", b"ghi"):
        session.feed(frame(DATA, 0, 1, len(chunk)) + chunk[:2])
        session.feed(chunk[2:])
    session.feed(frame(WINDOW, 0, 1, 5) + frame(WINDOW, SYN, 1, 0))
    assert list(session.streams) == [1], "its number may be used again"
    assert session.close(state) == b""
    assert list(session.streams) == [1]


def test_streams_beyond_the_limit_are_reset_until_one_is_closed_here() -> None:
    session = listening()
    for number in (1, 3, 5, 7, 9):
        session.feed(frame(WINDOW, SYN, number, 0))
    assert list(session.streams) == [1, 3, 5, 7]
    assert session.replies.endswith(frame(WINDOW, RST, 9, 0))
    session.feed(frame(WINDOW, RST, 1, 0) + frame(WINDOW, SYN, 11, 0))
    assert 11 not in session.streams, "what the other side gave up still has a task here"
    session.close(session.streams[1])
    session.feed(frame(WINDOW, SYN, 13, 0))
    assert 13 in session.streams
    session.open()
    assert len(session.streams) == 5, "this side's own do not count"


@pytest.mark.parametrize(
    "data",
    [
        b"\x01" + frame(DATA, 0, 1, 0)[1:],
        frame(4, 0, 1, 0),
        frame(WINDOW, SYN, 0, 0),
        frame(WINDOW, SYN, 2, 0),
        frame(WINDOW, SYN, 1, 0) * 2,
        frame(DATA, 0, 99, 0xFFFF_FFFF),
        frame(DATA, SYN, 1, 0xFFFF_FFFF),
    ],
)
def test_frames_that_break_the_protocol(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        listening().feed(data)


def test_answers_and_farewells() -> None:
    session = listening()
    session.feed(frame(PING, ACK, 0, 1) + frame(WINDOW, 0, 77, 5) + frame(WINDOW, RST, 77, 0))
    assert not session.replies
    assert not session.said_goodbye
    session.feed(GOODBYE[:5])
    assert not session.said_goodbye
    session.feed(GOODBYE[5:])
    assert session.said_goodbye


def test_a_stream_ends_behind_the_bytes_of_its_last_frame() -> None:
    """Not with that frame's header: a read between the two would miss the bytes."""
    session = listening()
    state = opened_by_other(session)
    session.feed(frame(DATA, FIN, 1, 5, b"ab"))
    assert state.take() == b"ab"
    session.feed(b"c")
    assert not state.ended, "the rest of that frame is still to come"
    session.changed.clear()
    session.feed(b"de" + frame(PING, 0, 0, 1))
    assert session.changed == {1}
    assert (state.take(), state.ended) == (b"cde", "the other side closed it")
    assert not state.reset
    with pytest.raises(ProtocolError, match="after its end"):
        session.feed(frame(DATA, 0, 1, 1, b"f"))


@pytest.mark.parametrize("read", [0, 131_071, 131_072, INITIAL_WINDOW_BYTES])
def test_the_last_frame_may_fill_the_window_and_not_a_byte_more(read: int) -> None:
    for excess in (0, 1):
        session = listening()
        state = opened_by_other(session)
        session.feed(frame(DATA, 0, 1, INITIAL_WINDOW_BYTES - 7, bytes(INITIAL_WINDOW_BYTES - 7)))
        unread = INITIAL_WINDOW_BYTES - 7 - len(state.take(read))
        given_back = int.from_bytes(state.window_update()[8:12], "big")
        last = 7 + given_back + excess
        if excess:
            with pytest.raises(ProtocolError, match="more than its window"):
                session.feed(frame(DATA, FIN, 1, last, bytes(last)))
            assert state.ended is None
        else:
            session.feed(frame(DATA, FIN, 1, last, bytes(last)))
            assert state.ended == "the other side closed it"
            assert len(state.take()) == unread + last
            assert state.window_update() == b"", "nobody would use it"


@pytest.mark.parametrize("kind", [DATA, WINDOW])
def test_an_empty_end_needs_no_window_and_may_be_said_twice(kind: int) -> None:
    session = listening()
    state = opened_by_other(session)
    session.feed(frame(DATA, 0, 1, INITIAL_WINDOW_BYTES, bytes(INITIAL_WINDOW_BYTES)))
    session.feed(frame(kind, FIN, 1, 0))
    assert state.ended == "the other side closed it"
    session.feed(frame(kind, FIN, 1, 0))
    assert len(state.take()) == INITIAL_WINDOW_BYTES
    session.feed(frame(kind, RST, 1, 0))  # libp2p's own closes, then resets, with empty data frames
    assert state.reset
    assert session.replies == frame(WINDOW, ACK, 1, 0)


def test_what_a_frame_that_resets_carries_is_skipped() -> None:
    session = listening()
    state = opened_by_other(session)
    session.feed(frame(DATA, RST, 1, 3, b"abc") + frame(PING, SYN, 0, 9))
    assert (state.take(), state.reset) == (b"", True)
    assert session.replies.endswith(frame(PING, ACK, 0, 9))
    session.feed(frame(DATA, 0, 1, 3, b"abc"))  # it was under way
    assert state.take() == b""
