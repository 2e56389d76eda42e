"""ZeroMQ's protocol with consumers that keep to it, and that do not. With libzmq: `test_event_stream.py`."""

import pytest
from trio.testing import memory_stream_pair

from p2pstore.errors import ProtocolError
from p2pstore.peer.event_stream import COMMAND, GREETING, LONG, MORE, READY, ZeroMQConnection, frame

HELLO = GREETING + frame(COMMAND, READY + b"\x0bSocket-Type\0\0\0\x06DEALER")


async def heard(sent: bytes, count: int) -> tuple[list[list[bytes]], bytes]:
    """`count` messages that a connection gets of the consumer's bytes, and its answer."""
    near, far = memory_stream_pair()
    await far.send_all(sent)
    await far.send_eof()
    connection = ZeroMQConnection(near)
    await connection.open("ROUTER")
    messages = [await connection.receive() for _ in range(count)]
    await connection.send(b"", bytes(300))
    await near.send_eof()
    return messages, b"".join([bytes(each) async for each in far])


async def test_messages_of_parts_and_pings() -> None:
    sent = HELLO + frame(MORE, b"") + frame(0, b"12345678")
    sent += frame(COMMAND, b"\x04PING\0\x0acontext") + frame(0, bytes(1000))
    messages, answer = await heard(sent, 2)
    assert messages == [[b"", b"12345678"], [bytes(1000)]]
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"
    said = b"\x01\x00\x02" + (300).to_bytes(8) + bytes(300)
    assert answer == GREETING + ready + b"\x04\x0c\x04PONGcontext" + said
    assert len(GREETING) == 64


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(64), "not ZMTP 3"),
        (GREETING.replace(b"NULL", b"PLAI"), "not ZMTP 3"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "not ZMTP 3"),
        (GREETING + frame(0, READY), "no READY"),
        (GREETING + frame(COMMAND, b"\x05ERROR"), "no READY"),
        (HELLO + bytes([LONG]) + (1 << 40).to_bytes(8), "a part of 1099511627776 bytes"),
        (HELLO + frame(0, bytes(1025)), "a part of 1025 bytes"),
        (HELLO + frame(MORE, b"") * 5, "more than 4 parts"),
        (HELLO + frame(MORE, b""), "the connection ended"),
    ],
)
async def test_what_no_consumer_says(sent: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        await heard(sent, 1)
