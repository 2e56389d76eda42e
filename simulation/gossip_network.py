"""The network between simulated gossip machines: what each message and each connection costs.

A message costs CPU on both sides; the first one between two hosts opens a connection, which costs much
more. Connections that are not wanted any more are closed when they have been idle for a while.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import xxhash

from p2pstore.access.crowding import ConnectionLimits, Use, idle, surplus
from simulation.kernel import Kernel
from simulation.network import Faults

MESSAGE_SECONDS: Final = 0.0005
"""CPU that one message takes on either side (measured with libp2p)."""
CONNECTION_SECONDS: Final = 0.020
"""CPU that a new connection takes on either side."""
CONNECTION_ROUND_TRIPS: Final = 4
"""TCP, Noise and yamux, the stream's protocol, admission."""

_TRACED: Final = struct.Struct("<dIIIB")


@dataclass(slots=True)
class Connection:
    """An open connection; `opener` decides how long it is kept."""

    opener: int
    last_used: float


class TraceHash:
    """A hash over everything that was sent: two runs with the same one were the same."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, now: float, source: int, target: int, size_bytes: int, kind: int) -> None:
        self._hash.update(_TRACED.pack(now, source, target, size_bytes, kind))

    def __str__(self) -> str:
        return str(self._hash.hexdigest())


class GossipNetwork:
    """Delivers messages between numbered hosts, late, twice, or not at all.

    A partition is a set of groups, or of single (from, to) pairs: then it may be one-way.
    """

    def __init__(self, kernel: Kernel, faults: Faults) -> None:
        self.kernel = kernel
        self.faults = faults
        self.blocked: set[tuple[int, int]] = set()
        self.messages = 0
        self.limits = ConnectionLimits()
        self.opened = 0
        self.trace = TraceHash()
        self._groups: dict[int, int] = {}
        self._connections: dict[int, dict[int, Connection]] = {}

    # --- reachability ------------------------------------------------------------------------

    def partition(self, *groups: set[int]) -> None:
        """Cut every link between hosts of different groups; hosts in none of them form another."""
        self._groups = {host: number for number, group in enumerate(groups) for host in group}

    def heal(self) -> None:
        self._groups = {}
        self.blocked.clear()

    def reaches(self, source: int, target: int) -> bool:
        groups = self._groups
        if groups and groups.get(source) != groups.get(target):
            return False
        return (source, target) not in self.blocked

    # --- messages ----------------------------------------------------------------------------

    def send(
        self,
        source: int,
        target: int,
        size_bytes: int,
        kind: int,
        leaves_at: float,
        deliver: Callable[[], None],
    ) -> None:
        """Deliver once, more often, or never; partitions are looked at when it arrives."""
        kernel, faults = self.kernel, self.faults
        rng = kernel.rng
        self.messages += 1
        self.trace.add(kernel.now, source, target, size_bytes, kind)
        copies = 2 if faults.duplication and rng.random() < faults.duplication else 1
        for _ in range(copies):
            if faults.loss and rng.random() < faults.loss:
                continue
            latency = self.latency()
            kernel.at(leaves_at + latency, lambda: self._arrive(source, target, deliver))

    def latency(self) -> float:
        rng, faults = self.kernel.rng, self.faults
        if faults.slow and rng.random() < faults.slow:
            return faults.slow_latency * rng.random()
        return rng.uniform(faults.minimum_latency, faults.maximum_latency)

    def _arrive(self, source: int, target: int, deliver: Callable[[], None]) -> None:
        if self.reaches(source, target):
            deliver()

    # --- connections -------------------------------------------------------------------------

    def use_connection(self, source: int, target: int) -> bool:
        """Use the connection between two hosts, opening one where there is none. Whether it is new."""
        mine = self._connections.setdefault(source, {})
        connection = mine.get(target)
        now = self.kernel.now
        if connection is not None:
            connection.last_used = now
            return False
        self.opened += 1
        connection = mine[target] = Connection(source, now)
        self._connections.setdefault(target, {})[source] = connection
        return True

    def connected(self, host: int) -> list[int]:
        return list(self._connections.get(host, ()))

    def close_spare(self, host: int, wanted: set[int]) -> None:
        """Close the connections that the rules of the real host say are spare; `wanted` are neighbours'."""
        mine = self._connections.get(host)
        if not mine:
            return
        others = list(mine)
        uses = [
            Use(other in wanted, each.opener == host, busy=False, used_at=each.last_used)
            for other, each in mine.items()
        ]
        now, limits = self.kernel.now, self.limits
        for place in {*idle(uses, now, limits), *surplus(uses, now, limits)}:
            self.disconnect(host, others[place])

    def disconnect(self, host: int, other: int) -> None:
        """Close a connection; nothing happens when there is none."""
        self._connections.get(host, {}).pop(other, None)
        self._connections.get(other, {}).pop(host, None)

    def disconnect_all(self, host: int) -> list[int]:
        """A host went: its connections are closed. The hosts at the other ends."""
        others = self.connected(host)
        for other in others:
            self.disconnect(host, other)
        return others
