"""Threads that sample one peer each: its process's resources, its counters, the members that it sees."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, Final

from p2pstore.blocking import BlockingClient
from p2pstore.errors import P2PStoreError
from p2pstore.results import KeyPage
from tests.soak.peers import Peer

EVERY_SECONDS: Final = 5.0
KEPT_LIMIT: Final = 2000


@dataclass(frozen=True)
class Sample:
    """One look at a peer. `pid` says in which life; `alive` are the members that it sees alive, by name; `pinned` the
    keys of what it holds pinned hard itself, asked for and answered at these times."""

    peer: int
    pid: int
    at: float
    resources: dict[str, float]
    statistics: dict[str, Any] = field(repr=False)
    alive: frozenset[str]
    pinned: tuple[str, ...]
    asked: float
    answered: float


class Observer:
    """The thread of one peer. What it finds goes to a queue; a peer that does not answer gives no sample."""

    def __init__(self, peer: Peer, samples: Queue[Sample]) -> None:
        self._peer = peer
        self._samples = samples
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"observer {peer.name}", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether it looks on; else no silence of its peer means anything."""
        return self._thread.is_alive()

    def end(self, seconds: float) -> None:
        """Have it end, and wait for it."""
        self._ending.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        client: BlockingClient | None = None
        while not self._ending.wait(EVERY_SECONDS):
            try:
                if client is None:
                    client = self._peer.connect()
                self._samples.put(look_at(self._peer, client))
            except (P2PStoreError, OSError):
                if client is not None:
                    with suppress(P2PStoreError):
                        client.close()
                client = None
        if client is not None:
            client.close()


def pinned_in(page: KeyPage) -> list[str]:
    """The held objects that a peer may not evict. It may evict soft copies, which readers brought, pinned or not."""
    return [each.key for each in page.keys if each.pin == "hard" and not each.soft]


def look_at(peer: Peer, client: BlockingClient) -> Sample:
    """Take one sample. Raises `P2PStoreError` or `OSError` when the peer is not there."""
    pid = peer.pid
    resources = peer.resources()
    statistics = client.statistics(cluster=False)["peer"]
    resources["python_blocks"] = statistics["python_blocks"]
    alive = frozenset(member.name for member in client.peers() if member.status == "alive")
    asked = time.monotonic()
    page = client.list_keys(local=True, pinned=True, limit=KEPT_LIMIT)
    answered = time.monotonic()
    pinned = tuple(pinned_in(page))
    if page.more or peer.pid != pid:
        raise OSError("it was started anew meanwhile")
    return Sample(
        peer.number, pid, time.monotonic(), resources, statistics, alive, pinned, asked, answered
    )
