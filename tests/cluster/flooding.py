"""Many connections at once from many addresses of this machine. Imports little: a process of its own begins with it."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from p2pstore.addresses import split_address


def flood(address: str, count: int, hosts: int, beginning: bytes) -> Iterator[socket.socket]:
    """Connections from `hosts` addresses of this machine, none of them 127.0.0.1, each with the beginning of
    something."""
    target = split_address(address, "target")
    for number in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
        sock.bind((f"127.0.9.{1 + number % hosts}", 0))
        sock.settimeout(5)
        with suppress(OSError):  # the backlog is full, or it was turned away
            sock.connect(target)
            sock.send(beginning[: number % (len(beginning) + 1)])
        yield sock


FLOOD = """
import resource, sys
from tests.cluster.flooding import flood
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address, count, hosts, beginning = sys.argv[1:]
held = list(flood(address, min(int(count), hard - 100), int(hosts), bytes.fromhex(beginning)))
print(len(held), flush=True)
sys.stdin.read()
"""


@contextmanager
def flooded(address: str, count: int, hosts: int, beginning: bytes) -> Iterator[Callable[[float], bool]]:
    """A process of its own that opens `count` connections and holds them. The function given tells whether all are
    open; its argument is the longest wait in seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD, address, str(count), str(hosts), beginning.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        out, said = process.stdout, b""
        os.set_blocking(out.fileno(), False)

        def done(seconds: float) -> bool:
            nonlocal said
            select.select([out], [], [], seconds)
            said += out.read() or b""
            assert process.poll() is None
            return said.endswith(b"\n")

        try:
            yield done
            assert int(said) >= min(count, 1000), "the flood was none"
        finally:
            process.stdin.close()
            process.wait(30)
