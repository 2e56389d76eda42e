"""The way to a peer on the same host: its socket, and its memory mapped. Shell (trio)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import trio

from p2pstore.errors import P2PStoreError
from p2pstore.gossip.records import PeerId
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access
from p2pstore.objects import DEFAULT_NAMESPACE, MIB
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.status.doctor import way_rules
from p2pstore.status.doctor.finding import Finding, warning

COPY_BYTES: Final = 64 * MIB
NAME: Final = "shm from it"


async def examine_shared_memory(
    socket: str,
    peer_id: PeerId,
    seconds: float,
    timeout_seconds: float,
    report: Callable[[Finding], None],
) -> None:
    """Map the peer's memory as a reader does, and copy from it. Peers only read each other's memory, so there
    is no other direction."""
    reason = f"no answer within {timeout_seconds:g} s"
    driver = TrioDriver()
    with trio.move_on_after(timeout_seconds + seconds):
        try:
            connection = await LocalConnection.open(
                driver, socket, Opening(DEFAULT_NAMESPACE, Access.READ), timeout_seconds
            )
        except (P2PStoreError, OSError) as error:
            reason = str(error)
        else:
            try:
                if connection.hello.peer_id == peer_id:
                    moved, elapsed = await driver.run_in_thread(
                        partial(_copy, connection.segments[0], seconds)
                    )
                    report(way_rules.judge_rate(NAME, moved, elapsed, "one thread"))
                    return
                reason = f"another peer serves at {socket} now"
            finally:
                connection.close()
    report(
        warning(
            NAME,
            socket,
            f"the peer is on this machine, but its memory cannot be mapped: {reason}",
            "run as the peer's user, or give its socket a mode and group (--socket-mode, --socket-group)",
        )
    )


def _copy(segment: memoryview, seconds: float) -> tuple[int, float]:
    """(bytes, seconds) of copies out of the segment into memory of our own."""
    source = np.frombuffer(segment, dtype=np.uint8)[:COPY_BYTES]
    target = np.ones(len(source), dtype=np.uint8)
    np.copyto(target, source)  # both sides are paged in afterwards
    moved, begin = 0, time.monotonic()
    while True:
        np.copyto(target, source)
        moved += len(source)
        elapsed = time.monotonic() - begin
        if elapsed >= seconds:
            return moved, elapsed
