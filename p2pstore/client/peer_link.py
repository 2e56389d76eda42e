"""An open connection to the local peer with its mapped segments and leases, and what the peer is told one way:
releases, aborts, reads that it did not see, and holders that failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from p2pstore.client.known_holders import MappedLocations
from p2pstore.client.lease_book import LeaseBook
from p2pstore.client.puts import AHEAD_MAX_BYTES, AHEAD_SHARE, GrantedAhead
from p2pstore.client.read_ledger import ReadLedger
from p2pstore.errors import ProtocolMismatch
from p2pstore.local.local_connection import LocalConnection, Request
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_messages import Abort, Leased, Release
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import Cuts
from p2pstore.runtime.streams import Driver
from p2pstore.transfer.reading.segment_reader import SegmentReader
from p2pstore.wire import ONE_WAY, Message, encode_frame

if TYPE_CHECKING:
    from p2pstore.client.host_neighbours import Neighbours
    from p2pstore.transfer.reading.shm_transport import ShmTransport

M = TypeVar("M", bound=Message)

TIDY_SECONDS: Final = 0.05
REPORT_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 1.0
AHEAD_IDLE_SECONDS: Final = 1.0
ALIVE_CHECK_SECONDS: Final = 0.1


class PeerLink:
    """The client's side of one session with the local peer. Make one with `PeerLink.open`.

    `on_busy` is called when there is something to tidy up. The janitor that set it then calls `tidy` every 50 ms while
    `needs_tidying`, and `rest` afterwards; and `let_go_of_the_dead` every second while `maps_others`.
    """

    def __init__(self, driver: Driver, connection: LocalConnection, timeout_seconds: float) -> None:
        self.driver = driver
        self.connection = connection
        self.timeout_seconds = timeout_seconds
        self.readers = [SegmentReader(view) for view in connection.segments]
        self.elsewhere: MappedLocations | None = None
        if connection.location_table is not None:
            with suppress(ProtocolMismatch):  # another version's: the peer is asked
                self.elsewhere = MappedLocations(connection.location_table)
        self.leases = LeaseBook(connection.hazards, connection.hello.max_leased_bytes)
        self.companions: Neighbours | None = None
        """The links to other peers of this host, where there are any."""
        self.mapped: list[Neighbours | ShmTransport] = []
        """Objects that map memory of other peers of this host."""
        total_bytes = sum(len(view) for view in connection.segments)
        self.ahead = GrantedAhead(min(AHEAD_MAX_BYTES, total_bytes // AHEAD_SHARE))
        self.on_busy: Callable[[], None] = lambda: None
        self._busy = False
        self._ended: list[int] = []
        """Leases that are being given back."""
        self._aborts: deque[int] = deque()
        self._give_all_back = False
        self.ledger = ReadLedger(self.wake_janitor)
        self._reported_at = 0.0
        self._ahead_checked_at = 0.0
        self._alive_at = 0.0
        connection.collect_one_way = self._collect_one_way

    @classmethod
    async def open(cls, driver: Driver, path: str, opening: Opening, timeout_seconds: float) -> PeerLink:
        """Connect to the peer at `path`. Raises as `LocalConnection.open`."""
        connection = await LocalConnection.open(driver, path, opening, timeout_seconds)
        try:
            return cls(driver, connection, timeout_seconds)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """End the session. Views that callers still hold stay readable; their leases have ended, so
        the peer may reuse the memory for something else."""
        if self.ledger:
            self.connection.say_last(_one_way(LocalKind.REPORT, self.ledger.take()))
        self.connection.close()
        self.readers.clear()
        self.leases.forget()
        self.elsewhere = None

    def check(self) -> None:
        """Raises `StoreClosed` once the peer is gone, `ClientForked` in a forked child. Costs a
        system call at most every 100 ms, for what is answered from the mapping alone."""
        self.connection.check_usable()
        now = time.monotonic()
        if now - self._alive_at > ALIVE_CHECK_SECONDS:
            self._alive_at = now
            if self.connection.peer_is_gone():
                self.connection.check_usable()

    def ask_ahead(
        self,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        *,
        extra_seconds: float = 0.0,
        on_late_reply: Callable[[M], None] | None = None,
    ) -> Request[M]:
        """`request`, which the caller sends, and whose reply it receives later."""
        seconds = self.timeout_seconds + extra_seconds
        return Request(self.connection, kind, message, reply_type, seconds, on_late_reply)

    async def request(
        self,
        kind: LocalKind,
        message: Message,
        reply_type: type[M],
        *,
        extra_seconds: float = 0.0,
        on_late_reply: Callable[[M], None] | None = None,
    ) -> M:
        """One request with this link's deadline, plus `extra_seconds` for its work."""
        try:
            return await self.connection.request(
                kind,
                message,
                reply_type,
                progress_seconds=self.timeout_seconds + extra_seconds,
                on_late_reply=on_late_reply,
            )
        except BaseException:
            if on_late_reply is not None:
                self.wake_janitor()
            raise

    # --- what the peer is told ---------------------------------------------------------------

    def abort(self, reservations: Iterable[int]) -> None:
        """Give reservations back, with what is sent next."""
        self._aborts.extend(reservations)
        self.wake_janitor()

    def give_back_idle(self) -> bool:
        """Have idle leases and reservations given back before the next request. True when there are any: then a
        refused request is worth repeating."""
        self._give_all_back = self.leases.keeps
        spare = self.ahead.drop()
        if spare:
            self.abort(spare)
        return self._give_all_back or bool(spare)

    def give_back(self, reply: Leased) -> None:
        """End leases without views."""
        for grant in reply.items:
            if not grant.error.code:
                self.leases.give_back(grant.lease)
        self.wake_janitor()

    def seems_here(self, digest: bytes) -> bool:
        """Whether the local peer's memory seems to have the object now. A key may be missed for the moment in which its
        entry moves."""
        for reader in self.readers:  # noqa: SIM110 - `any` takes as long as two looks
            if reader.contains(digest):
                return True
        return False

    def _collect_one_way(self, frames: list[bytes]) -> None:
        if not (self.leases.keeps or self._ended or self._aborts or self.ledger or self._give_all_back):
            return
        ended = self._ended
        self.leases.take_ended(ended, everything=self._give_all_back)
        for some in Cuts(LocalKind.RELEASE, len(ended)):
            frames.append(_one_way(LocalKind.RELEASE, Release(ended[some.start : some.stop])))
        ended.clear()
        self._give_all_back = False
        aborted = list(self._aborts)
        for some in Cuts(LocalKind.ABORT, len(aborted)):
            frames.append(_one_way(LocalKind.ABORT, Abort(aborted[some.start : some.stop])))
        for _ in aborted:
            self._aborts.popleft()
        if self.ledger:
            now = time.monotonic()
            if self.ledger.is_urgent or now - self._reported_at >= REPORT_SECONDS:
                self._reported_at = now
                frames.append(_one_way(LocalKind.REPORT, self.ledger.take()))

    # --- tidying up --------------------------------------------------------------------------

    def wake_janitor(self) -> None:
        """Have the janitor tidy up soon. Not for finalizers."""
        if not self._busy:
            self._busy = True
            try:
                self.on_busy()
            except BaseException:  # interrupted: the next call tries again
                self._busy = False
                raise

    @property
    def needs_tidying(self) -> bool:
        return bool(
            self.leases.outstanding
            or self._ended
            or self._aborts
            or self.ledger
            or self.ahead.held
            or self.connection.awaits_late_replies
            or (self.companions is not None and self.companions.needs_tidying)
        )

    @property
    def maps_others(self) -> bool:
        """Whether memory of other peers is mapped."""
        return any(each.maps_any for each in self.mapped)

    def let_go_of_the_dead(self) -> None:
        """Unmap the memory of other peers that are gone. Never waits."""
        for each in self.mapped:
            each.let_go_of_the_dead()

    async def tidy(self) -> None:
        """Send what is due, drop unused reservations, receive late replies."""
        now = time.monotonic()
        if now - self._ahead_checked_at >= AHEAD_IDLE_SECONDS:
            self._ahead_checked_at = now
            self._aborts.extend(self.ahead.drop_unused())
        await self.connection.flush()
        if self.connection.awaits_late_replies:
            await self.connection.receive_late_replies(TIDY_SECONDS)
        if self.companions is not None:
            await self.companions.tidy()

    def end_tidying(self) -> None:
        """Nothing is left to tidy up, unless something came just now."""
        self._busy = False
        if self.companions is not None:
            self.companions.end_tidying()
        if self.needs_tidying:
            self.wake_janitor()


def _one_way(kind: LocalKind, message: Message) -> bytes:
    return encode_frame(kind, 0, message, flags=ONE_WAY)
