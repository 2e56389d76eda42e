"""Redis behind as much of Mooncake's API as `scripts/mooncake_workload.py` calls, over blocking connections.

Each thread has one. Replies are received into the caller's memory, so that it is Redis that is measured and not a
client library.
"""

from __future__ import annotations

import ctypes
import re
import socket
import threading
from collections.abc import Sequence
from typing import Any


class ReplicateConfig:
    """Redis itself makes no copies here."""

    replica_num = 1


class MooncakeDistributedStore:
    """The calls of the workload. Any thread may make them."""

    def __init__(self) -> None:
        self._port = 0
        self._local = threading.local()

    def setup(self, port: int) -> int:
        """Use the server at this port of loopback."""
        self._port = port
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def put_from(self, key: str, address: int, size: int, config: Any = None) -> int:
        """SET ... NX: the first value stays."""
        name = key.encode()
        head = b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
        self._connection.sendmsg_all([head, _view(address, size), b"\r\n$2\r\nNX\r\n"])
        return 0 if self._connection.line() in (b"+OK", b"$-1") else -1

    def get_into(self, key: str, address: int, size: int) -> int:
        self._connection.command(b"GET", key)
        return self._connection.bulk_into(_view(address, size))

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """MGET, to new memory."""
        self._connection.command(b"MGET", *keys)
        assert self._connection.line() == b"*%d" % len(keys)
        return [self._connection.bulk() for _ in keys]

    def batch_get_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """MGET."""
        self._connection.command(b"MGET", *keys)
        assert self._connection.line() == b"*%d" % len(keys)
        return [
            self._connection.bulk_into(_view(address, size))
            for address, size in zip(addresses, sizes, strict=True)
        ]

    def is_exist(self, key: str) -> int:
        self._connection.command(b"EXISTS", key)
        return int(self._connection.line()[1:])

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """EXISTS for each, sent at once."""
        for key in keys:
            self._connection.queue(b"EXISTS", key)
        self._connection.flush()
        return [int(self._connection.line()[1:]) for _ in keys]

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        """KEYS and DEL."""
        self._connection.command(b"KEYS", "*")
        names = [self._connection.bulk() for _ in range(int(self._connection.line()[1:]))]
        found = [name.decode() for name in names if re.search(pattern, name.decode())]
        if not found:
            return 0
        self._connection.command(b"DEL", *found)
        return int(self._connection.line()[1:])

    def close(self) -> int:
        """Connections end with their threads."""
        return 0

    @property
    def _connection(self) -> _Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = _Connection(self._port)
        connection: _Connection = self._local.connection
        return connection


class _Connection:
    """Commands and replies of Redis' protocol."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        self._have = bytearray()
        self._queued: list[bytes] = []

    def queue(self, *words: bytes | str) -> None:
        """Add a command to what `flush` sends."""
        encoded = [word.encode() if isinstance(word, str) else word for word in words]
        parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(w), w) for w in encoded)]
        self._queued.append(b"".join(parts))

    def flush(self) -> None:
        self._socket.sendall(b"".join(self._queued))
        self._queued.clear()

    def command(self, *words: bytes | str) -> None:
        self.queue(*words)
        self.flush()

    def sendmsg_all(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send parts one after the other; large ones without being copied."""
        left = [memoryview(part).cast("B") for part in parts]
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def line(self) -> bytes:
        while (end := self._have.find(b"\r\n")) < 0:
            piece = self._socket.recv(65536)
            if not piece:
                raise ConnectionError("Redis closed the connection")
            self._have += piece
        line = bytes(self._have[:end])
        del self._have[: end + 2]
        return line

    def bulk_into(self, target: memoryview) -> int:
        """Receive a value; its length, or -704 for none."""
        length = int(self.line()[1:])
        if length < 0:
            return -704
        assert length <= len(target)
        self._receive(target[:length])
        return length

    def bulk(self) -> bytes:
        """Receive a value to new memory; nothing for none."""
        room = bytearray(max(0, int(self.line()[1:])))
        self._receive(memoryview(room))
        return bytes(room)

    def _receive(self, target: memoryview) -> None:
        length = len(target)
        have = min(length, len(self._have))
        target[:have] = self._have[:have]
        del self._have[:have]
        while have < length:
            have += self._socket.recv_into(target[have:])
        while len(self._have) < 2:
            self._have += self._socket.recv(2 - len(self._have))
        del self._have[:2]


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
