"""Links to other peers of this host, besides the one to the local peer.

Every process that maps a segment holds a lease: to view a neighbour's object in place, a client has a session with
that neighbour, which counts its leases. The link is opened on first use and kept. When it fails, the local peer brings
the object to its own memory instead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import P2PStoreError
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_messages import Holder
from p2pstore.local.local_protocol import Access
from p2pstore.transfer.transport import HOLDER_ANSWER_SECONDS

T = TypeVar("T")

MAX_NEIGHBOURS: Final = 16
"""Open links. Objects of further neighbours come through the local peer."""
RETRY_SECONDS: Final = 10.0
"""After a link could not be opened, or failed."""

Name = tuple[str, bytes]
"""A neighbour: the path of its socket and its peer id."""


class _Companion:
    """An open link, and the number of calls that use it. A retired one takes no new calls, and is closed when no view
    needs it any more."""

    def __init__(self, link: PeerLink) -> None:
        self.link = link
        self.users = 1
        self.retired = False

    @property
    def idle(self) -> bool:
        """Whether no call and no lease needs it: a lease ends with its link."""
        return not self.users and not self.link.leases.outstanding

    @property
    def over(self) -> bool:
        """Whether it can be closed: its neighbour has gone, or it is retired and idle."""
        return self.link.connection.peer_is_gone() or (self.retired and self.idle)


class Neighbours:
    """The links of one client, for any thread or task. `own` is the link to the local peer; these are tidied along with
    it."""

    def __init__(self, own: PeerLink, namespace: str) -> None:
        self._own = own
        self._namespace = namespace
        self._timeout_seconds = min(own.timeout_seconds, HOLDER_ANSWER_SECONDS)
        self._opening = own.driver.lock()
        self._state = threading.Lock()  # held for microseconds, never awaited in
        self._open: dict[Name, _Companion] = {}
        self._retired: list[_Companion] = []
        self._retry_at: dict[Name, float] = {}
        self._closed = False
        own.companions = self
        own.mapped.append(self)

    def close(self) -> None:
        """End all sessions with neighbours. Views stay readable; their leases have ended. Takes no lock, which a
        forked child may have inherited locked."""
        self._closed = True
        for companion in self._all():
            companion.link.close()
        self._open.clear()
        self._retired.clear()

    @contextmanager
    def linked(self, holder: Holder) -> Iterator[PeerLink | None]:
        """The link to this peer, if there is one and the peer was alive a moment ago, for work without a request. It is
        not closed meanwhile."""
        companion = self._take((holder.socket, holder.peer_id))
        if companion is None:
            yield None
            return
        try:
            yield companion.link if _is_usable(companion.link) else None
        finally:
            with self._state:
                companion.users -= 1

    async def call(self, holder: Holder, what: Callable[[PeerLink], Awaitable[T | None]]) -> T | None:
        """Call `what` with a link to this peer of the same host. None when the peer cannot be reached, does not answer
        within 1.5 s, or breaks the protocol: it is not tried again for 10 s."""
        name = holder.socket, holder.peer_id
        companion = await self._enter(name)
        if companion is None:
            return None
        try:
            companion.link.check()
            return await what(companion.link)
        except (P2PStoreError, OSError, ValueError):
            self._retire(name, companion)
            self._leave_alone(name)
            return None
        finally:
            with self._state:
                companion.users -= 1

    async def _enter(self, name: Name) -> _Companion | None:
        companion = self._take(name)
        if companion is None and self._may_try(name):
            async with self._opening:
                companion = self._take(name)  # another one has opened it meanwhile
                if companion is None and self._may_try(name) and len(self._all()) < MAX_NEIGHBOURS:
                    companion = await self._connect(name)
        return companion

    def _take(self, name: Name) -> _Companion | None:
        with self._state:
            companion = self._open.get(name)
            if companion is not None:
                companion.users += 1
                if self._closed:  # just now, and it may not have seen this one
                    companion.link.close()
            return companion

    async def _connect(self, name: Name) -> _Companion | None:
        path, peer_id = name
        # The server shows what it likes, so it must run as a user that is trusted anyway.
        trusted = {os.geteuid(), self._own.connection.peer_user}
        opening = Opening(self._namespace, Access.READ, hazards=True, trusted_users=trusted)
        try:
            link = await PeerLink.open(self._own.driver, path, opening, self._timeout_seconds)
        except (P2PStoreError, OSError):
            self._leave_alone(name)
            return None
        if link.connection.hello.peer_id != peer_id or self._closed:
            link.close()
            self._leave_alone(name)
            return None
        link.connection.silence.patience_seconds = self._own.connection.silence.patience_seconds
        link.on_busy = self._own.wake_janitor
        companion = _Companion(link)
        with self._state:
            self._open[name] = companion
        if self._closed:  # just now, and it may not have seen this one
            link.close()
        return companion

    def _may_try(self, name: Name) -> bool:
        return time.monotonic() >= self._retry_at.get(name, 0.0)

    def _leave_alone(self, name: Name) -> None:
        now = time.monotonic()
        with self._state:
            self._retry_at[name] = now + RETRY_SECONDS
            for each in [each for each, until in self._retry_at.items() if until < now]:
                del self._retry_at[each]

    def _retire(self, name: Name, companion: _Companion) -> None:
        with self._state:
            if self._open.get(name) is companion:
                del self._open[name]
                companion.retired = True
                self._retired.append(companion)
        self._own.wake_janitor()

    # --- tidying up, with the own link -------------------------------------------------------

    def _all(self) -> list[_Companion]:
        return [*self._open.values(), *self._retired]

    @property
    def needs_tidying(self) -> bool:
        return bool(self._retired) or any(each.link.needs_tidying for each in self._all())

    async def tidy(self) -> None:
        """Give ended leases back, and close idle links. Errors of a neighbour show in the next call."""
        for companion in self._all():
            if not companion.over:
                with suppress(P2PStoreError, OSError):
                    await companion.link.tidy()
        self.let_go_of_the_dead()

    @property
    def maps_any(self) -> bool:
        """Whether there is a link."""
        return bool(self._open or self._retired)

    def let_go_of_the_dead(self) -> None:
        """Close the links to neighbours that are gone, and idle retired ones."""
        with self._state:
            over = [each for each in self._all() if each.over and not each.users]
            for name, companion in list(self._open.items()):
                if companion in over:
                    del self._open[name]
            self._retired = [each for each in self._retired if each not in over]
        for companion in over:
            companion.link.close()

    def end_tidying(self) -> None:
        """Nothing is left to tidy up, unless something came just now."""
        for companion in self._all():
            companion.link.end_tidying()


def _is_usable(link: PeerLink) -> bool:
    try:
        link.check()
    except P2PStoreError:
        return False
    return True
