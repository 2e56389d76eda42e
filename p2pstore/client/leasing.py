"""Leases of objects in local memory: shared, asked for, and fetched first where need be."""

from __future__ import annotations

from p2pstore.client import answers
from p2pstore.client.fetch import FETCH_SECONDS, Fetcher, deadline_ms
from p2pstore.client.link import PeerLink
from p2pstore.errors import ProtocolError
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.objects import Version
from p2pstore.transfer.shm import expired
from p2pstore.wire import Code


class Leaser:
    """Takes leases for one client; its `LeaseBook` keeps them."""

    def __init__(self, link: PeerLink, fetcher: Fetcher) -> None:
        self._link = link
        self._fetcher = fetcher

    async def take(self, key: str, digest: bytes, wait_seconds: float) -> memoryview:
        """A read-only view of the object in place. Raises `NoSuchKey` when it does not come within
        `wait_seconds`, and `LeaseLimitExceeded` when this client holds too much."""
        link = self._link
        shared = self._share(digest)
        if shared is not None:
            return shared
        grant = await self._ask(key, digest)
        if grant.error.code == Code.NO_SUCH_KEY:
            grant = await self._ask(key, digest, fetch=True, wait_seconds=wait_seconds)
        if grant.error.code == Code.LEASE_LIMIT_EXCEEDED and link.make_room():
            grant = await self._ask(key, digest)
        answers.raise_for(key, grant.error)
        view = link.leases.view(
            grant.lease,
            digest,
            link.connection.segment(grant.segment),
            (grant.offset, grant.length, Version(grant.clock, grant.writer, grant.root)),
        )
        link.stir()
        return view

    def _share(self, digest: bytes) -> memoryview | None:
        """A view under a lease that this client has already."""
        link = self._link
        if link.leases.covers(digest):
            for reader in link.readers:
                found = reader.find(digest)
                if found is not None and not expired(found[1]):
                    shared = link.leases.share(digest, found[0])
                    if shared is not None:
                        link.note_read(digest, found[0].length)
                        link.stir()
                        return shared
        return None

    async def _ask(
        self, key: str, digest: bytes, *, fetch: bool = False, wait_seconds: float = 0.0
    ) -> local.LeaseGrant:
        """Ask for a lease. Only with `fetch` may the answer take its time: the object is brought."""
        link = self._link
        reply = await link.request(
            LocalKind.LEASE,
            local.Lease(
                digest, fetch, round(wait_seconds * 1000), deadline_ms(link.timeout_seconds), key
            ),
            local.Leased,
            extra_seconds=wait_seconds + FETCH_SECONDS if fetch else 0.0,
            on_late_reply=self._fetcher.give_back,
        )
        if len(reply.items) != 1:
            raise ProtocolError(f"{len(reply.items)} answers about one lease")
        return reply.items[0]
