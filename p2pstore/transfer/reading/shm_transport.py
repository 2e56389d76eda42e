"""Reading another peer of the same host straight from its memory segment.

Every process that maps a segment holds a session with the owner: a connection to its local socket, which also tells
when the owner is gone. Objects are copied without a lease and verified on the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from p2pstore.errors import DeadlineExceeded, P2PStoreError
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_messages import ItemError, Lease, Leased, Release
from p2pstore.local.local_protocol import Access, LocalKind
from p2pstore.objects import DEFAULT_NAMESPACE, Announced, Version
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.arriving import Destination, checked_view, watch_of
from p2pstore.transfer.reading.segment_reader import Copied, SegmentReader, Spots, expired
from p2pstore.transfer.transfer_trace import ReadWatch
from p2pstore.transfer.transport import Pulled, RemoteCopy, too_small
from p2pstore.wire import ONE_WAY, Code, encode_frame

MAX_TORN_READS: Final = 3
"""Reads of one object that found it changing, before the owner is asked instead."""
RETRY_CONNECT_SECONDS: Final = 10.0
MAX_PEERS: Final = 64
LOOK_SECONDS: Final = 1.0
RoomsFor = Callable[[Sequence[int], Sequence[int]], Sequence[memoryview]]
"""Gives rooms for the values at these places of a batch, of these lengths. A room shorter than its value gets
nothing."""
NOT_THERE: Final = "the object is not in the holder's memory segment"
ON_SSD: Final = "on its holder's SSD, who is asked for it over tcp"


async def copy_spots(
    driver: Driver,
    reader: SegmentReader,
    spots: Spots,
    rooms: Sequence[memoryview],
    watch: ReadWatch | None = None,
) -> bytearray:
    """`reader.copy_steps`, after the first 4 MiB in steps on a thread, and to be cancelled between them. `watch` hears
    of each step."""
    steps = reader.copy_steps(spots, rooms)
    done: bytearray | None = None

    def step() -> None:
        nonlocal done
        try:
            done_bytes = next(steps)
        except StopIteration as stop:
            done = stop.value
            done_bytes = sum(spots.lengths) if all(stop.value) else 0
        if watch is not None and done_bytes:
            watch.advanced(done_bytes, sum(map(len, rooms)))

    step()
    while done is None:
        await driver.run_in_thread(step)
    return done


async def read_mapped(
    driver: Driver, reader: SegmentReader, digest: bytes, destination: Destination
) -> Copied | None:
    """Copy an object out of a mapped segment into what `destination` prepares for it.

    None when the segment does not have it, or it changed under every attempt. Raises what
    `destination.prepare` raises.
    """
    for _ in range(MAX_TORN_READS):
        found = reader.find(digest)
        if found is None:
            return None
        slot, trailer = found
        if expired(trailer):
            return None
        view = checked_view(destination, slot, trailer)
        spots = Spots()
        spots.add(0, slot, trailer.sums)
        if all(await copy_spots(driver, reader, spots, [view], watch_of(destination))):
            return Copied(slot.length, slot, trailer)
    return None


async def copy_into(
    driver: Driver,
    readers: Sequence[SegmentReader],
    digest: bytes,
    view: memoryview,
    announced: Announced | None = None,
) -> int | None:
    """A verified copy of an object in mapped memory to the beginning of `view`: its length, or None when it is not
    there. Raises `BufferTooSmall`."""
    for reader in readers:
        spots = reader.spots([digest], announced)
        if spots.places:
            length = spots.lengths[0]
            if len(view) < length:
                raise too_small(length, view)
            if (await copy_spots(driver, reader, spots, [view]))[0]:
                return length
    return None


async def copy_many(
    driver: Driver,
    readers: Sequence[SegmentReader],
    digests: Sequence[bytes],
    rooms_for: RoomsFor,
    announced: Announced | None = None,
    versions: Sequence[Version] = (),
) -> list[int]:
    """Verified copies of objects in mapped memory: their lengths, -1 for what is not there. `versions`: those that were
    planned, one a digest; without them, what the holder wrote itself."""
    lengths = [-1] * len(digests)
    for reader in readers:
        spots = reader.spots(digests, announced, versions)
        if not spots.places:
            continue
        rooms = rooms_for(spots.places, spots.lengths)
        good = await copy_spots(driver, reader, spots, rooms)
        if len(spots.places) == len(digests) and all(good):
            return spots.lengths
        for place, length, fine in zip(spots.places, spots.lengths, good, strict=True):
            if fine:
                lengths[place] = length
    return lengths


def _refused(error: ItemError) -> PullFailed:
    """The holder did not bring the object. It is not there any more, or something kept the holder from it."""
    gone = error.code == Code.NO_SUCH_KEY
    return PullFailed(Code.NO_SUCH_KEY if gone else Code.BUSY, error.text)


@dataclass(slots=True)
class _MappedPeer:
    """One peer at one path: an open session, or the time to try it again."""

    connection: LocalConnection | None = None
    readers: list[SegmentReader] = field(default_factory=list)
    retry_at: float = 0.0
    is_opening: bool = False
    ended: list[int] = field(default_factory=list)
    """Leases to give back with the next frame."""

    def give_back(self, leased: Leased) -> None:
        """End leases, with the next frame that is sent."""
        self.ended += [grant.lease for grant in leased.items if not grant.error.code]

    def take_releases(self, frames: list[bytes]) -> None:
        """Add the frame that tells the holder of ended leases, if any."""
        if ended := self.ended[:]:
            frames.append(encode_frame(LocalKind.RELEASE, 0, Release(ended), flags=ONE_WAY))
            del self.ended[: len(ended)]

    def usable(self) -> bool:
        connection = self.connection  # another thread may close it
        return (
            connection is not None
            and all(reader.is_open() for reader in self.readers)
            and not connection.peer_is_gone()
        )

    def is_over(self) -> bool:
        """Whether there was a session, and the holder is gone."""
        return self.connection is not None and not self.is_opening and not self.usable()

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self.readers = []
        self.ended = []


class ShmTransport:
    """The `Transport` for peers of the same host. Keeps one session per peer; `close` ends them."""

    name = "shm"

    def __init__(self, driver: Driver, progress_seconds: float = DEFAULT_PROGRESS_SECONDS) -> None:
        self._driver = driver
        self._progress_seconds = progress_seconds
        self._opening = driver.lock()
        self._state = threading.Lock()  # held for microseconds, never awaited in
        self._peers: dict[tuple[str, bytes], _MappedPeer] = {}

    def why_not(self, copy: RemoteCopy) -> str:
        if copy.on_ssd and copy.data:
            return ON_SSD
        if not copy.same_host:
            return "on another host"
        if not copy.socket:
            return "the holder has no local socket"
        peer = self._peers.get((copy.socket, copy.peer_id))
        if peer is None or peer.connection is not None or time.monotonic() >= peer.retry_at:
            return ""
        return "connecting to the holder's socket failed a moment ago"

    def cost(self, copy: RemoteCopy) -> float:
        """A tenth of a TCP connection."""
        return 0.1

    def mapped(self, copy: RemoteCopy) -> Sequence[SegmentReader]:
        """The memory of a copy's holder, where a session with it is open; else nothing."""
        peer = self._peers.get((copy.socket, copy.peer_id))
        return peer.readers if peer is not None and peer.usable() else ()

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        """Copy the object out of the holder's segment. What the mapping does not show, the holder may still have, and
        is asked for over TCP, where that is used, else here. Raises `PullFailed`: retriable, but for a holder that does
        not answer: its process hangs, and would not answer over TCP either."""
        peer = await self.open(copy)
        watch = watch_of(destination)
        if watch is not None:
            watch.connected()
        if not copy.on_ssd:
            pulled = await self._pull_mapped(peer, digest, destination)
            if pulled is not None:
                return pulled
            if copy.data:
                raise PullFailed(Code.NO_SUCH_KEY, NOT_THERE, retriable=True)
        return await self._pull_brought(peer, copy, digest, destination)

    async def _pull_brought(
        self, peer: _MappedPeer, copy: RemoteCopy, digest: bytes, destination: Destination
    ) -> Pulled:
        """Have the holder bring the object to memory, and keep it there while it is copied."""
        connection = peer.connection
        if connection is None:  # let go of just now
            raise PullFailed(Code.UNAVAILABLE, "the holder is gone", retriable=True)
        seconds = min(self._progress_seconds, copy.answer_seconds)
        ask = Lease(digest, deadline_ms=round(seconds * 1000))
        try:
            leased = await connection.request(
                LocalKind.LEASE, ask, Leased, progress_seconds=seconds, on_late_reply=peer.give_back
            )
        except DeadlineExceeded as error:
            raise PullFailed(Code.DEADLINE_EXCEEDED, str(error)) from error
        except (P2PStoreError, OSError) as error:
            raise PullFailed(Code.UNAVAILABLE, str(error), retriable=True) from error
        try:
            for grant in leased.items:
                if grant.error.code:
                    raise _refused(grant.error)
            pulled = await self._pull_mapped(peer, digest, destination)
            if pulled is None:
                raise PullFailed(Code.NO_SUCH_KEY, NOT_THERE)
            return pulled
        finally:
            peer.give_back(leased)
            with suppress(P2PStoreError, OSError):
                await connection.flush()

    async def _pull_mapped(
        self, peer: _MappedPeer, digest: bytes, destination: Destination
    ) -> Pulled | None:
        for reader in peer.readers:
            copied = await read_mapped(self._driver, reader, digest, destination)
            if copied is not None:
                return Pulled(copied.slot, copied.trailer, copied.length, self.name)
        return None

    async def open(self, copy: RemoteCopy) -> _MappedPeer:
        """The session with a copy's holder: its memory is `mapped` from then on. Raises `PullFailed`."""
        peer = self._peers.get((copy.socket, copy.peer_id))
        if peer is not None and peer.usable():
            return peer
        async with self._opening:
            with self._state:
                peer = self._peers.setdefault((copy.socket, copy.peer_id), _MappedPeer())
                peer.is_opening = True
            try:
                if not peer.usable():
                    if reason := self.why_not(copy):  # found out by the reader before
                        raise PullFailed(Code.UNAVAILABLE, reason, retriable=True)
                    peer.close()
                    await self._open(peer, copy)
            finally:
                peer.is_opening = False
            return peer

    async def _open(self, peer: _MappedPeer, copy: RemoteCopy) -> None:
        self._make_room(peer)
        peer.retry_at = time.monotonic() + RETRY_CONNECT_SECONDS
        try:
            connection = await LocalConnection.open(
                self._driver,
                copy.socket,
                Opening(DEFAULT_NAMESPACE, Access.READ),
                min(self._progress_seconds, copy.answer_seconds),
            )
        except DeadlineExceeded as error:
            raise PullFailed(Code.DEADLINE_EXCEEDED, str(error)) from error
        except (P2PStoreError, OSError) as error:
            raise PullFailed(Code.UNAVAILABLE, str(error), retriable=True) from error
        except BaseException:  # cancelled: that says nothing of the other peer
            peer.retry_at = 0.0
            raise
        if connection.hello.peer_id != copy.peer_id:
            connection.close()
            raise PullFailed(
                Code.UNAVAILABLE, f"another peer serves at {copy.socket} now", retriable=True
            )
        try:
            peer.readers = [SegmentReader(view) for view in connection.segments]
        except P2PStoreError as error:
            connection.close()
            raise PullFailed(Code.UNAVAILABLE, str(error), retriable=True) from error
        connection.collect_one_way = peer.take_releases
        peer.connection = connection

    def _make_room(self, keep: _MappedPeer) -> None:
        """Forget the peer that came first when there are too many."""
        while len(self._peers) > MAX_PEERS:
            with self._state:
                oldest = next(name for name, peer in self._peers.items() if peer is not keep)
                over = self._peers.pop(oldest)
            over.close()

    def let_go_of_the_dead(self) -> None:
        """Unmap the memory of holders that are gone. The host has it back when the last mapping ends."""
        with self._state:
            peers = self._peers  # another thread may close this, and put another one in its place
            gone = [name for name, peer in peers.items() if peer.is_over()]
            dead = [peers.pop(name) for name in gone]
        for peer in dead:
            peer.close()

    @property
    def maps_any(self) -> bool:
        """Whether there is a session."""
        return bool(self._peers)

    async def watch_holders(self) -> None:
        """`let_go_of_the_dead` every second, until cancelled."""
        while True:
            await self._driver.sleep(LOOK_SECONDS)
            self.let_go_of_the_dead()

    def close(self) -> None:
        """End all sessions. Views and copies made stay valid. Takes no lock, which a forked child may have inherited
        locked."""
        peers, self._peers = self._peers, {}
        for peer in list(peers.values()):
            peer.close()
