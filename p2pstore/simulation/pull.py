"""Pulling an object from another simulated peer, without any lock on its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from p2pstore.core.copy_destination import CopyDestination
from p2pstore.core.effects import (
    PullFailure,
    PullObject,
    PullOutcome,
)
from p2pstore.errors import NoSuchKey, P2PStoreError
from p2pstore.objects import chunk_sums
from p2pstore.transfer.layout import (
    decode_slot,
    decode_trailer,
    trailer_matches,
)
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.simulation.peer import SimulatedPeer

PULL_TIMEOUT_SECONDS: Final = 1.0


class SimulatedPull:
    """One `PullObject`: tries its copies in order, reading each holder's memory without a lock."""

    def __init__(self, peer: SimulatedPeer, effect: PullObject) -> None:
        self.peer = peer
        self.effect = effect
        self.life = peer.life
        self.failures: list[PullFailure] = []
        self.copies = list(effect.copies)
        self.attempt = 0
        self.destination: CopyDestination | None = None
        self.error: Exception | None = None

    @property
    def _alive(self) -> bool:
        return self.life == self.peer.life and self.peer.core is not None

    def start(self) -> None:
        """Begin with the first copy."""
        assert self.peer.core is not None
        try:
            self.destination = self.peer.core.copy_destination(
                self.effect.operation, self.peer.cluster.kernel.now
            )
        except NoSuchKey:
            return
        self._next()

    def _next(self) -> None:
        if not self.copies or self.error is not None:
            self._end(delivered=False)
            return
        copy = self.copies.pop(0)
        self.attempt += 1
        attempt, cluster = self.attempt, self.peer.cluster

        def failed(code: int, incarnation: int = 0, sequence: int = 0) -> None:
            if self._alive and attempt == self.attempt:
                self.attempt += 1
                self.failures.append(PullFailure(copy.member, code, "", incarnation, sequence))
                self._next()
                self.peer.settle()

        def read_first() -> None:
            holder = cluster.by_peer_id[copy.peer_id]
            core = holder.core
            if core is None or not self._alive or attempt != self.attempt:
                return
            entry = core.find(self.effect.digest, cluster.kernel.now)
            if entry is None:
                log = core.gossip.log.sequence
                cluster.network.send(
                    holder.number,
                    self.peer.number,
                    64,
                    lambda: failed(int(Code.NO_SUCH_KEY), core.incarnation, log),
                )
                return
            slot_bytes, trailer_bytes = (
                core.segment.slot_bytes(entry),
                core.segment.trailer_bytes(entry),
            )
            half = entry.length // 2
            memory = holder.memory[entry.offset : entry.offset + entry.length]
            first = bytes(memory[:half])
            life = holder.life

            def read_second() -> None:
                if holder.life != life:
                    return  # the process is gone and its memory with it
                second = bytes(memory[half:])
                cluster.network.send(
                    holder.number,
                    self.peer.number,
                    len(memory),
                    lambda: self._deliver(
                        attempt, slot_bytes, trailer_bytes, first + second, failed
                    ),
                )

            cluster.kernel.after(cluster.pull_seconds, read_second)

        holder = cluster.by_peer_id[copy.peer_id]
        cluster.network.send(self.peer.number, holder.number, 64, read_first)
        cluster.kernel.after(PULL_TIMEOUT_SECONDS, lambda: failed(int(Code.DEADLINE_EXCEEDED)))

    def _deliver(
        self,
        attempt: int,
        slot_bytes: bytes,
        trailer_bytes: bytes,
        payload: bytes,
        failed: Callable[[int], None],
    ) -> None:
        if not self._alive or attempt != self.attempt:
            return
        slot, trailer = decode_slot(slot_bytes), decode_trailer(trailer_bytes)
        if (
            slot is None
            or trailer is None
            or slot.digest != self.effect.digest
            or not trailer_matches(trailer, slot)
            or chunk_sums(payload) != trailer.sums
        ):
            self.peer.cluster.refused_copies += 1
            failed(int(Code.STALE))
            return
        assert self.destination is not None
        try:
            self.destination.prepare(slot, trailer)[: len(payload)] = payload
        except NoSuchKey:
            failed(int(Code.STALE))
            return
        except P2PStoreError as error:
            self.error = error
            self._end(delivered=False)
            self.peer.settle()
            return
        self.attempt += 1
        delivered = self.destination.commit(self.peer.cluster.kernel.now) is not None
        self._end(delivered=delivered)
        self.peer.settle()

    def _end(self, *, delivered: bool) -> None:
        assert self.peer.core is not None
        assert self.destination is not None
        if not delivered:
            self.destination.abort()
        self.peer.core.pulled(
            self.effect.operation,
            PullOutcome(delivered, tuple(self.failures), self.error),
            self.peer.cluster.kernel.now,
        )
