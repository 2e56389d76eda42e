"""Peers of a replay that are killed and started again, while it goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from mooncake_p2p.local_cluster import LocalCluster, PeerProcess
from p2pstore.trace.outages import PeerChange

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

LEAST_PEERS: Final = 2


@dataclass(frozen=True, slots=True)
class OutagePlan:
    """Every `kill_every_seconds` one peer is killed (0: none), and started again after `down_seconds`."""

    kill_every_seconds: float = 0.0
    down_seconds: float = 5.0
    seed: int = 1


class Outages:
    """Whoever replays says when it is between two requests: only then a peer comes back. It is killed at any moment, by
    a timer. One peer at a time is away; the next one is killed once it is back."""

    def __init__(
        self, cluster: LocalCluster, clients: list[BlockingClient], plan: OutagePlan
    ) -> None:
        self.up = [True] * len(clients)
        self.changes: list[PeerChange] = []
        self._cluster = cluster
        self._clients = clients
        self._plan = plan
        self._rng = Random(plan.seed)
        self._request = 0
        self._away: int | None = None
        self._killed_at = time.monotonic()
        self._starting = False
        self._timer: threading.Timer | None = None
        if plan.kill_every_seconds and len(clients) >= LEAST_PEERS:
            self._arm()

    def between(self, request: int) -> None:
        """Before the request of this number is served: start who has been away for long enough, and take back who is
        ready."""
        self._request = request
        if self._away is None or self.up[self._away]:
            return
        peer = self._cluster.peers[self._away]
        if not self._starting:
            if time.monotonic() >= self._killed_at + self._plan.down_seconds:
                self._cluster.begin(peer, self._living().ready["control"])
                self._starting = True
        elif peer.has_spoken:
            peer.wait_until_ready()
            self._take_back(self._away, peer)

    def close(self) -> None:
        """No peer is killed any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _take_back(self, number: int, peer: PeerProcess) -> None:
        with contextlib.suppress(Exception):  # of a peer that was killed
            self._clients[number].close()
        self._clients[number] = peer.connect()
        self.changes.append(PeerChange(self._request, number, up=True))
        self.up[number] = True
        self._away, self._starting = None, False
        self._arm()

    def _arm(self) -> None:
        due = self._killed_at + self._plan.kill_every_seconds
        self._timer = threading.Timer(max(0.0, due - time.monotonic()), self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        number = self._rng.randrange(len(self.up))
        self._killed_at = time.monotonic()
        self.changes.append(PeerChange(self._request, number, up=False))
        self._away = number
        self.up[number] = False  # before it dies: whoever then fails to reach it knows why
        self._cluster.peers[number].kill()

    def _living(self) -> PeerProcess:
        return self._cluster.peers[self.up.index(True)]
