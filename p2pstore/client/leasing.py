"""Leases of objects in place: shared, asked for, taken at a neighbour, and fetched first where need be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from p2pstore.client import answers
from p2pstore.client.fetcher import FETCH_SECONDS, Fetcher, deadline_ms
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.client.known_holders import SSD
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import Holder
from p2pstore.local.local_protocol import LocalKind
from p2pstore.objects import Version
from p2pstore.transfer.reading.arriving import Announced
from p2pstore.transfer.reading.shm import ShmTransport
from p2pstore.transfer.transport import HURRIED_ANSWER_SECONDS
from p2pstore.wire import Code


class Leaser:
    """Takes leases for one client; the `LeaseBook` of the link to whoever gave one keeps it."""

    def __init__(self, link: PeerLink, fetcher: Fetcher, neighbours: Neighbours) -> None:
        self._link = link
        self._fetcher = fetcher
        self._neighbours = neighbours

    async def take(
        self, key: str, digest: bytes, wait_seconds: float, *, here: bool = False
    ) -> memoryview:
        """A read-only view of the object in place; with `here`, in the local peer's memory. Raises `NoSuchKey`
        when it does not come within `wait_seconds`, and `LeaseLimitExceeded` when this client holds
        too much."""
        link = self._link
        shared = share(link, digest)
        if shared is not None:
            return shared
        wait_until = time.monotonic() + wait_seconds
        is_here = any(reader.contains(digest) for reader in link.readers)
        if not is_here and not here:
            nearby = await self._take_nearby(key, digest, wait_seconds)
            if nearby is not None:
                return nearby
        grant = None
        try:
            if is_here:
                [grant] = await ask(link, key, [digest])
            if grant is None or grant.error.code == Code.NO_SUCH_KEY:
                left_seconds = max(0.0, wait_until - time.monotonic())
                [grant] = await ask(link, key, [digest], fetch=True, wait_seconds=left_seconds)
            if grant.error.code == Code.LEASE_LIMIT_EXCEEDED and link.make_room():
                [grant] = await ask(link, key, [digest])
            answers.raise_for(key, grant.error)
            if grant.transport == "ssd":
                await self._fetcher.read_ahead(digest)
            return view_under(link, digest, grant)
        except BaseException:  # Ctrl-C, too, at any moment
            forsake(link, grant)
            raise

    async def _take_nearby(self, key: str, digest: bytes, wait_seconds: float) -> memoryview | None:
        """A view in the memory of another peer of this host. None when none has it, or gives it. Raises
        `NoSuchKey`."""
        (plan,) = await self._fetcher.plan(key, [digest], wait_seconds)
        if plan.error.code == Code.NO_SUCH_KEY:
            error = answers.error_in(key, plan.error)
            self._fetcher.ended(error)
            raise error
        near = neighbours_in(plan.holders)
        for holder in near:
            with self._neighbours.linked(holder) as link:
                shared = None if link is None else share(link, digest, announced(holder))
            if shared is not None:
                return self._viewed(holder, shared)
        give_up_at = time.monotonic() + HURRIED_ANSWER_SECONDS
        for holder in near:
            view = await self._neighbours.call(holder, partial(_lease_at, holder, key, digest))
            if view is not None:
                return self._viewed(holder, view)
            if time.monotonic() >= give_up_at:  # one that hangs is enough
                break
        return None

    def _viewed(self, holder: Holder, view: memoryview) -> memoryview:
        note_viewed(self._link, holder, [view])
        return view


def note_viewed(link: PeerLink, holder: Holder, views: Sequence[memoryview]) -> None:
    """Have the local peer count views at a neighbour: no request of these reads came by there."""
    if views:
        length_bytes = sum(map(len, views))
        link.note_pulls(
            holder.member,
            ShmTransport.name,
            objects=len(views),
            length_bytes=length_bytes,
            failures=0,
        )


def neighbours_in(holders: Sequence[Holder]) -> list[Holder]:
    """Of a plan's holders, those of this host that have the newest version: in memory, or on an SSD when nobody has it
    in memory."""
    only_cold = all(holder.tier == SSD for holder in holders)
    newest = max(((holder.clock, holder.writer, holder.root) for holder in holders), default=None)
    return [
        holder
        for holder in holders
        if holder.same_host
        and holder.socket
        and (only_cold or holder.tier != SSD)
        and (holder.clock, holder.writer, holder.root) == newest
    ]


async def _lease_at(holder: Holder, key: str, digest: bytes, link: PeerLink) -> memoryview | None:
    """A view by a link to a neighbour. None when it does not have what it was said to have, or this client
    holds too much there."""
    grant = None
    cold = holder.tier == SSD
    try:
        [grant] = await ask(link, key, [digest], fetch=cold, fetch_seconds=0.0)
        if grant.error.code == Code.LEASE_LIMIT_EXCEEDED and link.make_room():
            [grant] = await ask(link, key, [digest])
        if not grant.error.code and announced(holder).allows(version_of(grant)):
            return view_under(link, digest, grant)
    except DeadlineExceeded:
        if not cold:
            raise
        return None  # its SSD takes long: that says nothing of what it has in memory
    except BaseException:
        forsake(link, grant)
        raise
    forsake(link, grant)  # an older one may be forbidden, and another one wrong
    return None


def share(link: PeerLink, digest: bytes, announced: Announced | None = None) -> memoryview | None:
    """A view that needs no request: under a lease that this client has already, or one that it takes by itself. None
    when there is none, or only one of a version that this neighbour may not give."""
    view = shared_view(link, digest, announced)
    if view is not None:
        link.note_read(digest, len(view), is_view=True)
    return view


def shared_view(
    link: PeerLink, digest: bytes, announced: Announced | None = None
) -> memoryview | None:
    """`share`, but not counted as a view."""
    view = None
    try:
        if link.leases.covers(digest):
            view = link.leases.share_again(digest, announced)
        if view is None:  # a view of no bytes is one, too
            view = _share_seen(link, digest, announced)
        if view is not None:
            link.stir()
    except BaseException:  # interrupted: what was taken is to be given back
        link.stir()
        raise
    return view


def _share_seen(link: PeerLink, digest: bytes, announced: Announced | None) -> memoryview | None:
    for number, reader in enumerate(link.readers):
        seen = reader.sight(digest)
        if seen is None or seen.expired:
            continue
        if announced is not None and not announced.allows(seen.slot.version):
            continue
        view = link.leases.share(digest, seen)
        if view is None and number == 0:  # hazards are numbers of its slots
            view = link.leases.take(digest, seen, link.connection.segment(0))
        if view is not None:
            return view
    return None


async def ask(
    link: PeerLink,
    key: str,
    digests: Sequence[bytes],
    *,
    fetch: bool = False,
    wait_seconds: float = 0.0,
    fetch_seconds: float = FETCH_SECONDS,
) -> list[local.LeaseGrant]:
    """Ask for leases, `key` being the text of the first. Only with `fetch` may the answer take its time: the objects
    are brought."""
    reply = None
    try:
        reply = await link.request(
            LocalKind.LEASE,
            local.Lease(
                b"".join(digests),
                fetch,
                round(wait_seconds * 1000),
                deadline_ms(link.timeout_seconds),
                key,
            ),
            local.Leased,
            extra_seconds=wait_seconds + fetch_seconds if fetch else 0.0,
            on_late_reply=link.give_back,
        )
        if len(reply.items) != len(digests):
            raise ProtocolError(f"{len(reply.items)} answers about {len(digests)} leases")
        return reply.items
    except BaseException:
        if reply is not None:
            link.give_back(reply)
        raise


def forsake(link: PeerLink, grant: local.LeaseGrant | None) -> None:
    """Give back a lease, if it is one, of which no view was made."""
    if grant is not None and not grant.error.code:
        link.leases.forsake(grant.lease)
        link.stir()


def view_under(link: PeerLink, digest: bytes, grant: local.LeaseGrant) -> memoryview:
    """The view that was granted."""
    view = link.leases.view(
        grant.lease,
        digest,
        link.connection.segment(grant.segment),
        (grant.offset, grant.length, version_of(grant)),
    )
    link.stir()
    return view


def announced(holder: Holder) -> Announced:
    """What a plan says that a holder has, and what it may give instead."""
    return Announced(holder.member & 0xFFFF, Version(holder.clock, holder.writer, holder.root))


def version_of(grant: local.LeaseGrant) -> Version:
    """What was granted."""
    return Version(grant.clock, grant.writer, grant.root)
