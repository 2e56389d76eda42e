"""TCP as a transport. A large object is read over several connections at once: to several holders, or two to one.

The first answer decides the version and the memory, as for any read. Then other readers join, each in a task (or
thread) with a connection of its own, and take slice after slice. A reader that fails leaves its slices to the others,
and the next holder joins instead; a reader that is far slower than an idle one is stopped. When the value has arrived,
or no reader is left, nothing of the read runs any more.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Final

from p2pstore.addresses import is_loopback
from p2pstore.errors import ConfigError
from p2pstore.objects import CHUNK_BYTES, MIB
from p2pstore.runtime.streams import Event, HelperTask, StartHelper
from p2pstore.transfer.data_messages import split_data_address
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.arriving import (
    AHEAD_CHUNKS,
    ALONE,
    ONLY_READER,
    Arriving,
    Destination,
    ResumableDestination,
    Sharing,
    Step,
)
from p2pstore.transfer.reading.connection_pool import MAX_READERS, ConnectionPool
from p2pstore.transfer.reading.data_connection import DataConnection
from p2pstore.transfer.reading.data_requests import is_damage
from p2pstore.transfer.reading.span_reads import TRANSPORT_NAME
from p2pstore.transfer.transport import SLICED_BYTES, Helpers, Pulled, RemoteCopy, with_alternatives
from p2pstore.wire import Code

SLICE_CHUNKS: Final = 16 * MIB // CHUNK_BYTES
RECHECK_SECONDS: Final = 1.0


def may_use_two(copy: RemoteCopy) -> bool:
    """Whether a second connection to one holder may bring more. Over loopback it does not: one fills it. Between
    hosts, one flow takes one link of a bond and one path of many, clouds cap it (5 Gb/s and less), and each end
    serves it with one core."""
    return not copy.same_host and not all(_is_loopback(address) for address in copy.data)


def _is_loopback(address: str) -> bool:
    try:
        return is_loopback(split_data_address(address).host)
    except ConfigError:  # a form that is not known
        return False


class _Reader:
    """One connection's worth of a team. Those that help the first one have a `task`."""

    def __init__(self, team: TeamRead, number: int, copy: RemoteCopy, *, second: bool) -> None:
        self.number = number
        self.copy = copy
        self.second = second
        """Whether another one reads from the same holder."""
        self.task: HelperTask | None = None
        self.told = False
        """Whether its outcome was told."""
        self._team = team
        self._connection: DataConnection | None = None

    def began(self, connection: DataConnection) -> None:
        """It has a connection; as `connection_pool.Using`."""
        with self._team.lock:
            self._connection = connection
            if self._team.is_abandoned:
                connection.abandon()
            if self.task is not None:
                self.task.connected()

    def ended(self) -> None:
        """It has none any more."""
        with self._team.lock:
            self._connection = None

    def abandon(self) -> None:
        """End its use of a connection, if it has one. The caller holds the lock."""
        if self._connection is not None:
            self._connection.abandon()

    def stop_connecting(self) -> None:
        """End its wait for a connection. The caller holds the lock."""
        if self._connection is None and self.task is not None:
            self.task.cancel()


class TeamRead:
    """One read. `lock` guards all that several readers touch; it is held for microseconds."""

    def __init__(
        self, pool: ConnectionPool, digest: bytes, destination: ResumableDestination, helpers: Helpers
    ) -> None:
        self.lock = threading.RLock()
        self._pool = pool
        self._driver = pool.driver
        self._digest = digest
        self._destination = destination
        self._helpers = helpers
        self._arriving: Arriving | None = None
        self._readers: list[_Reader] = []
        self._waiting: list[Event] = []
        self._helping = 0
        self._over = False
        self.is_abandoned = False
        self._error: Exception | None = None
        self._of_same_holder: PullFailed | None = None
        """How a second connection to the holder failed, where that says nothing of the holder."""

    async def run(self, copy: RemoteCopy) -> Pulled:
        """Read the object, from this holder first. Raises `PullFailed` when this holder failed and the others did
        not bring the rest, and what the destination or its watch raises. `helpers` were told the outcome of every
        other reader."""
        self._destination.share(Sharing(SLICE_CHUNKS, AHEAD_CHUNKS, self.lock, time.monotonic))
        try:
            async with self._driver.helpers() as start:
                return await self._lead(copy, start)
        finally:
            self._destination.share(ALONE)

    async def _lead(self, copy: RemoteCopy, start: StartHelper) -> Pulled:
        leader = self._add(copy)
        pulled: Pulled | None = None
        failure: PullFailed | None = None
        self._destination.when_begun = lambda arriving: self._call_helpers(arriving, copy, start)
        try:
            try:
                pulled = await self._pool.pull(
                    copy, self._digest, self._destination, copy.slot, using=leader
                )
                self._notify()
                await self._read_on(leader)
            except PullFailed as error:
                failure = error
                self._notify()
            await self._wait_for_helpers()
        except BaseException:
            self._abandon_all()
            raise
        finally:
            self._destination.when_begun = lambda arriving: None
            self._dismiss()
        return self._result(leader, pulled, failure)

    def _result(self, leader: _Reader, pulled: Pulled | None, failure: PullFailed | None) -> Pulled:
        with self.lock:
            if self._error is not None:
                raise self._error
            arriving = self._arriving
            if arriving is None:  # nothing came, or it was too small for all this
                if pulled is None:
                    assert failure is not None
                    raise failure
                self._tell(leader, None)
                return pulled
            slow = PullFailed(Code.BUSY, "others were faster: it may be asked again")
            if not arriving.complete:
                for reader in self._readers[1:]:
                    self._tell(reader, slow if self._is_overtaken(reader) else None)
                if self._is_overtaken(leader):  # its failure is this side's doing
                    raise self._of_same_holder or slow
                assert failure is not None
                raise failure
            for reader in self._readers:
                blamed = reader is leader and not self._is_overtaken(reader)
                self._tell(reader, failure if blamed else None)
            slot, trailer = arriving.slot, arriving.trailer
            return Pulled(slot, trailer, slot.length, TRANSPORT_NAME)

    def _is_overtaken(self, reader: _Reader) -> bool:
        return self._arriving is not None and self._arriving.is_overtaken(reader.number)

    # --- those that help ---------------------------------------------------------------------

    def _call_helpers(self, arriving: Arriving, copy: RemoteCopy, start: StartHelper) -> None:
        """The version is known: have other readers bring parts of a large value."""
        with self.lock:
            self._arriving = arriving
            if arriving.slot.length < SLICED_BYTES:
                return
            wanted = min(MAX_READERS, -(-arriving.left_chunks // SLICE_CHUNKS))
            while len(self._readers) < wanted and (other := self._helpers.next()) is not None:
                self._start(self._add(with_alternatives(other, [copy.peer_id])), start)
            if len(self._readers) == 1 < wanted and may_use_two(copy):
                self._start(self._add(copy, second=True), start)

    def _add(self, copy: RemoteCopy, *, second: bool = False) -> _Reader:
        reader = _Reader(self, ONLY_READER + len(self._readers), copy, second=second)
        self._readers.append(reader)
        return reader

    def _start(self, reader: _Reader, start: StartHelper) -> None:
        self._helping += 1
        try:
            start(partial(self._help, reader))
        except RuntimeError:  # no more threads: the others go on alone
            self._helping -= 1
            self._tell(reader, None)

    async def _help(self, reader: _Reader, task: HelperTask) -> None:
        """The life of a helper: with one holder, and when that fails with the next."""
        helping: _Reader | None = reader
        try:
            while helping is not None:
                helping.task = task
                try:
                    await self._read_on(helping)
                    return
                except PullFailed as failure:
                    helping = self._replaced(helping, failure)
        except Exception as error:  # such as what a progress callback raises
            with self.lock:
                self._error = self._error or error
            self._abandon_all()
        finally:
            with self.lock:
                self._helping -= 1
            self._notify()

    def _replaced(self, reader: _Reader, failure: PullFailed) -> _Reader | None:
        """A helper failed, unless it was made to: the next one, if there is any."""
        with self.lock:
            if self._over or self._is_overtaken(reader):
                return None
            self._tell(reader, failure)
            if reader.second or (other := self._helpers.next()) is None:
                return None
            return self._add(with_alternatives(other, [self._readers[0].copy.peer_id]))

    def _tell(self, reader: _Reader, failure: PullFailed | None) -> None:
        """Tell the outcome of a reader, once. A second connection that fails says nothing of its holder."""
        if reader.told:
            return
        reader.told = True
        brought = self._arriving.brought_bytes[reader.number] if self._arriving is not None else 0
        if reader.second and failure is not None and not is_damage(failure):
            self._of_same_holder, failure = failure, None
        self._helpers.ended(reader.copy, failure, brought)

    # --- all of them -------------------------------------------------------------------------

    async def _read_on(self, reader: _Reader) -> None:
        """Bring slices until there is nothing left to do for this reader. Raises `PullFailed`."""
        while not (step := self._next_step(reader))[0].done:
            doing, event = step
            if event is not None:
                await self._wait(event, doing.wait_seconds)
            elif doing.read:
                assert self._arriving is not None
                try:
                    await self._pool.pull_slices(
                        reader.copy, self._digest, self._arriving, reader.number, reader
                    )
                finally:
                    self._notify()

    def _next_step(self, reader: _Reader) -> tuple[Step, Event | None]:
        """The next step, and the event to wait for if that is waiting."""
        with self.lock:
            if self._over or self._arriving is None:
                return Step(), None
            step = self._arriving.next_step(reader.number)
            if step.overtake is not None:
                next(each for each in self._readers if each.number == step.overtake).abandon()
            return step, self._new_event() if step.wait_seconds else None

    async def _wait_for_helpers(self) -> None:
        """Return when the value has arrived, or no reader is left."""
        while True:
            with self.lock:
                arriving = self._arriving
                if not self._helping or self._over or arriving is None or arriving.complete:
                    return
                event = self._new_event()
            await self._wait(event, RECHECK_SECONDS)

    def _new_event(self) -> Event:
        event = self._driver.event()
        self._waiting.append(event)
        return event

    async def _wait(self, event: Event, seconds: float) -> None:
        """Wait for the event, at most for this time."""
        try:
            await event.wait(seconds)
        finally:
            with self.lock:
                if event in self._waiting:
                    self._waiting.remove(event)

    def _notify(self) -> None:
        """Wake the waiting readers: chunks may be free, or all there, or a reader gone."""
        with self.lock:
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                event.set()

    def _dismiss(self) -> None:
        """End the readers that have nothing under way."""
        with self.lock:
            self._over = True
            for reader in self._readers:
                reader.stop_connecting()
        self._notify()

    def _abandon_all(self) -> None:
        """End all readers."""
        with self.lock:
            self.is_abandoned = True
            for reader in self._readers:
                reader.abandon()
        self._dismiss()


class TcpTransport:
    """`Transport` over a `ConnectionPool`: reaches every peer that advertises a data address."""

    name = TRANSPORT_NAME

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def why_not(self, copy: RemoteCopy) -> str:
        return "" if copy.data else "the holder advertises no data address"

    def cost(self, copy: RemoteCopy) -> float:
        return 1.0

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        return await self._pool.pull(copy, digest, destination, copy.slot)

    async def pull_together(
        self, copy: RemoteCopy, digest: bytes, destination: ResumableDestination, helpers: Helpers
    ) -> Pulled:
        """`pull` a large object over several connections, where that may be faster."""
        if helpers.left or may_use_two(copy):
            return await TeamRead(self._pool, digest, destination, helpers).run(copy)
        return await self.pull(copy, digest, destination)
