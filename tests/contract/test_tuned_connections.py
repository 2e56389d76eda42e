"""Options of the TCP connections that peers and clients make."""

import socket

import trio

from p2pstore.runtime.streams import UNSENT_BYTES, tune_tcp
from tests.contract.sides import Side

TCP_NOTSENT_LOWAT = 25
"""Of Linux' tcp.h."""


def options_of(sock: socket.socket) -> tuple[int, int, bytes]:
    level = socket.IPPROTO_TCP
    return (
        sock.getsockopt(level, socket.TCP_NODELAY),
        sock.getsockopt(level, TCP_NOTSENT_LOWAT),
        sock.getsockopt(level, socket.TCP_CONGESTION, 16).rstrip(b"\0"),
    )


async def test_they_do_not_pace_and_keep_little_unsent(side: Side) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stream = await side.run(lambda: side.driver.connect_tcp("127.0.0.1", port, 5.0))
        accepted, _ = await trio.to_thread.run_sync(listener.accept)
        with accepted, socket.socket(fileno=socket.dup(stream.fileno())) as made:
            tune_tcp(accepted)
            for each in (made, accepted):
                no_delay, unsent_bytes, congestion_control = options_of(each)
                assert no_delay
                assert unsent_bytes == UNSENT_BYTES
                assert congestion_control in {b"cubic", b"reno"}
        stream.close()
