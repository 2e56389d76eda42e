"""Leases of objects in place: shared, asked for, taken at a neighbour, and fetched first where need be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from p2pstore.client.answers import error_in, plain_error
from p2pstore.client.fetcher import FETCH_SECONDS, Fetcher, deadline_ms
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.read_plan import SSD
from p2pstore.errors import DeadlineExceeded, P2PStoreError, ProtocolError
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import Holder, LeaseGrant
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import MAX_ITEMS
from p2pstore.objects import Announced, Version
from p2pstore.transfer.reading.shm_transport import ShmTransport
from p2pstore.transfer.transport import HOLDER_ANSWER_SECONDS
from p2pstore.wire import Code

T = TypeVar("T")
LEASES_PER_REQUEST: Final = MAX_ITEMS[LocalKind.LEASE]
LEASES_PER_TURN: Final = 256
"""Taken without a request, before others of this program's event loop have their turn: 4 ms."""
FETCHED_AT_ONCE: Final = 16
"""Objects that the local peer brings concurrently for one request."""
View = memoryview | P2PStoreError | ValueError
"""A view, or why there is none."""


class Leaser:
    """Takes leases for one client; the `LeaseBook` of the link to the granting peer keeps them."""

    def __init__(self, link: PeerLink, fetcher: Fetcher, neighbours: Neighbours) -> None:
        self.link = link
        self.fetcher = fetcher
        self.neighbours = neighbours

    async def take(
        self, key: str, digest: bytes, wait_seconds: float, *, here: bool = False
    ) -> memoryview:
        """A read-only view of the object in place; with `here`, in the local peer's memory. Raises `NoSuchKey`
        when it does not come within `wait_seconds`, and `LeaseLimitExceeded` when this client holds
        too much."""
        shared = share(self.link, digest)
        if shared is not None:
            return shared
        batch = _Batch(self, [key], {0: digest}, wait_seconds)
        await batch.lease(here=here)
        return batch.only_view()

    async def take_many(
        self, keys: Sequence[str], digests_of: Callable[[Sequence[str]], list[bytes]], *, here: bool
    ) -> list[View]:
        """A read-only view of each object in place, or why there is none; with `here`, in the local peer's memory."""
        batch = _Batch(self, keys, {})
        batch.prepare(digests_of)
        await batch.share()
        await batch.lease(here=here)
        return batch.views()


def note_viewed(link: PeerLink, holder: Holder, views: Sequence[memoryview]) -> None:
    """Have the local peer count views at a neighbour, which needed no request."""
    if views:
        length_bytes = sum(map(len, views))
        link.ledger.count(
            holder.member, ShmTransport.name, objects=len(views), length_bytes=length_bytes, failures=0
        )


def neighbours_in(holders: Sequence[Holder]) -> list[Holder]:
    """The holders of a plan on this host that have the newest version: in memory, or on an SSD when none has it in
    memory."""
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


def share(link: PeerLink, digest: bytes, announced: Announced | None = None) -> memoryview | None:
    """A view that needs no request: under a lease that this client has already, or one that it takes by itself. None
    when there is none, or only one of a version that this neighbour may not give."""
    view = shared_view(link, digest, announced)
    if view is not None:
        link.ledger.read(digest, len(view), is_view=True)
    return view


def shared_view(link: PeerLink, digest: bytes, announced: Announced | None = None) -> memoryview | None:
    """`share`, but not counted as a view."""
    view = None
    try:
        if link.leases.covers(digest):
            view = link.leases.share_again(digest, announced)
        if view is None:  # a view of no bytes is one, too
            view = _share_seen(link, digest, announced)
        if view is not None:
            link.wake_janitor()
    except BaseException:  # interrupted: a taken lease is to be given back
        link.wake_janitor()
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


def give_back_unused(link: PeerLink, grant: local.LeaseGrant | None) -> None:
    """Give back a lease, if it is one, of which no view was made."""
    if grant is not None and not grant.error.code:
        link.leases.forsake(grant.lease)
        link.wake_janitor()


def view_under(link: PeerLink, digest: bytes, grant: local.LeaseGrant) -> memoryview:
    """The view that was granted."""
    view = link.leases.view(
        grant.lease,
        digest,
        link.connection.segment(grant.segment),
        (grant.offset, grant.length, version_of(grant)),
    )
    link.wake_janitor()
    return view


def announced(holder: Holder) -> Announced:
    """The version that a holder has by the plan, and those that it may give instead."""
    return Announced(holder.member & 0xFFFF, Version(holder.clock, holder.writer, holder.root))


def version_of(grant: local.LeaseGrant) -> Version:
    """The version that was granted."""
    return Version(grant.clock, grant.writer, grant.root)


class _Batch:
    """One lease, or many at once. Each step settles some of the items, which are known by their numbers."""

    def __init__(
        self, leaser: Leaser, keys: Sequence[str], wanted: dict[int, bytes], wait_seconds: float = 0.0
    ) -> None:
        """`wanted`: the digest of each item that is not settled; `prepare` makes it of the keys."""
        self._link = leaser.link
        self._fetcher = leaser.fetcher
        self._neighbours = leaser.neighbours
        self._keys = keys
        self._wanted = wanted
        self._wait_until = time.monotonic() + wait_seconds
        self._first: dict[int, int] = {}
        """Of an item whose object is asked for before in the batch, that item."""
        self._views: dict[int, View] = {}

    async def lease(self, *, here: bool) -> None:
        """Settle all: at the local peer, at others of this host unless it is to be `here`, after fetching."""
        await self._lease_here()
        if not here:
            await self._lease_nearby()
        await self._lease_fetched()

    @property
    def _wait_seconds(self) -> float:
        return max(0.0, self._wait_until - time.monotonic())

    def only_view(self) -> memoryview:
        """The view of the only item. Raises the error that there is instead."""
        view = self._views.pop(0)
        if isinstance(view, memoryview):
            return view
        try:
            raise view
        finally:
            del view  # it refers to this frame by now

    def views(self) -> list[View]:
        """One for each item, once all are settled."""
        for number, first in self._first.items():
            view = self._views[first]
            self._views[number] = memoryview(view) if isinstance(view, memoryview) else view
        return [self._views[number] for number in range(len(self._keys))]

    def prepare(self, digests_of: Callable[[Sequence[str]], list[bytes]]) -> None:
        """Settle what is no key."""
        try:
            self._wanted = dict(enumerate(digests_of(self._keys)))
        except (ValueError, TypeError):
            for number, key in enumerate(self._keys):
                try:
                    self._wanted[number] = digests_of([key])[0]
                except (ValueError, TypeError) as error:
                    self._views[number] = plain_error(error)
        firsts: dict[bytes, int] = {}
        for number, digest in list(self._wanted.items()):
            first = firsts.setdefault(digest, number)
            if first != number:
                self._first[number] = first
                del self._wanted[number]

    async def share(self) -> None:
        """Take the leases that need no request."""
        for some in _slices(list(self._wanted.items()), LEASES_PER_TURN):
            for number, digest in some:
                view = share(self._link, digest)
                if view is not None:
                    self._settle(number, view)
            if len(self._keys) > LEASES_PER_TURN:
                await self._link.driver.sleep(0)

    async def _lease_here(self) -> None:
        """Lease the objects that the local peer holds."""
        wanted = list(self._wanted)
        here = self._fetcher.which_are_here(list(self._wanted.values()))
        numbers = [wanted[place] for place in here]
        for some in _slices(numbers, LEASES_PER_REQUEST):
            await self._lease(self._link, some)

    async def _lease_nearby(self) -> None:
        """Lease the objects that other peers of this host hold: from the first of its holders each, then from the
        next, for as long as one may take that hangs."""
        if not self._wanted:
            return
        numbers = list(self._wanted)
        plans = await self._fetcher.plan(
            self._keys[numbers[0]], list(self._wanted.values()), self._wait_seconds
        )
        left: list[tuple[int, list[Holder]]] = []
        for number, plan in zip(numbers, plans, strict=True):
            if plan.error.code == Code.NO_SUCH_KEY:
                error = error_in(self._keys[number], plan.error)
                self._fetcher.count_miss(error)
                self._settle(number, error)
                continue
            near = neighbours_in(plan.holders)
            if len(near) == 1 or not self._shared_at_any(number, near):
                left.append((number, near))
        give_up_at = time.monotonic() + HOLDER_ANSWER_SECONDS
        while time.monotonic() < give_up_at and (
            left := [(number, near) for number, near in left if near and number in self._wanted]
        ):
            await self._lease_at_each([(number, near.pop(0)) for number, near in left])

    async def _lease_at_each(self, items: Sequence[tuple[int, Holder]]) -> None:
        """Lease each object from its holder, those of one holder together."""
        batches: dict[tuple[int, bool], list[tuple[int, Holder]]] = {}
        for number, holder in items:
            batches.setdefault((holder.member, holder.tier == SSD), []).append((number, holder))
        for (_, is_cold), batch in batches.items():
            for some in _slices(batch, FETCHED_AT_ONCE if is_cold else LEASES_PER_REQUEST):
                _, holder = some[0]
                if not await self._neighbours.call(holder, partial(self._lease_at, some)):
                    break  # one that hangs is enough

    async def _lease_fetched(self) -> None:
        """The rest, which the local peer is to bring: side by side, and those that do not fit so, one by one."""
        try:
            for some in _slices(list(self._wanted), FETCHED_AT_ONCE):
                await self._lease(self._link, some, fetch=True)
                for number in [each for each in some if each in self._wanted]:
                    await self._lease(self._link, [number], fetch=True)
        except DeadlineExceeded as error:  # the leases taken so far stay of use
            for number in list(self._wanted):
                self._settle(number, plain_error(error))

    async def _lease(
        self, link: PeerLink, numbers: Sequence[int], *, fetch: bool = False, again: bool = False
    ) -> None:
        """Have the local peer lease these: with `fetch` all of them are settled then, but for what may fit alone;
        otherwise what it had."""
        grants: list[LeaseGrant] = []
        refused = []
        try:
            grants = await ask(
                link,
                self._keys[numbers[0]],
                [self._wanted[number] for number in numbers],
                fetch=fetch,
                wait_seconds=self._wait_seconds if fetch else 0.0,
                fetch_seconds=FETCH_SECONDS * len(numbers),
            )
            for number, grant in zip(numbers, grants, strict=True):
                code = grant.error.code
                if code == Code.LEASE_LIMIT_EXCEEDED and not again:
                    refused.append((number, grant))
                elif not code:
                    self._settle(number, view_under(link, self._wanted[number], grant))
                elif code == Code.CAPACITY_EXCEEDED and len(numbers) > 1:
                    continue
                elif fetch or code != Code.NO_SUCH_KEY:
                    self._settle(number, error_in(self._keys[number], grant.error))
        except BaseException:  # Ctrl-C, too, at any moment
            _forsake_all(link, grants)
            raise
        if refused and link.give_back_idle():
            await self._lease(link, [number for number, _ in refused], fetch=fetch, again=True)
        else:
            for number, grant in refused:
                self._settle(number, error_in(self._keys[number], grant.error))

    async def _lease_at(
        self, some: Sequence[tuple[int, Holder]], link: PeerLink, *, again: bool = False
    ) -> bool:
        """Lease objects of a neighbour. False when it did not answer. Objects that it lacks, or has in another version,
        stay to be fetched, and so do those beyond this client's lease limit."""
        left = [each for each in some if not self._shared_at(link, *each)]
        if not left:
            return True
        number, holder = left[0]
        is_cold = holder.tier == SSD
        grants: list[LeaseGrant] = []
        refused, viewed = [], []
        try:
            grants = await ask(
                link,
                self._keys[number],
                [self._wanted[number] for number, _ in left],
                fetch=is_cold,
                fetch_seconds=0.0,
            )
            for (number, holder), grant in zip(left, grants, strict=True):
                code = grant.error.code
                if not code and announced(holder).allows(version_of(grant)):
                    view = view_under(link, self._wanted[number], grant)
                    self._settle(number, view)
                    viewed.append(view)
                elif code == Code.LEASE_LIMIT_EXCEEDED:
                    refused.append((number, holder))
                else:  # an older one may be forbidden
                    give_back_unused(link, grant)
        except BaseException as error:  # Ctrl-C, too, at any moment
            _forsake_all(link, grants)
            if is_cold and isinstance(error, DeadlineExceeded):
                return False  # its SSD takes long: that says nothing of what it has in memory
            raise
        note_viewed(self._link, holder, viewed)
        if refused and not again and link.give_back_idle():
            return await self._lease_at(refused, link, again=True)
        return True

    def _shared_at_any(self, number: int, near: Sequence[Holder]) -> bool:
        """Whether it needs no request at one of these, to which there are links."""
        for holder in near:
            with self._neighbours.linked(holder) as link:
                if link is not None and self._shared_at(link, number, holder):
                    return True
        return False

    def _shared_at(self, link: PeerLink, number: int, holder: Holder) -> bool:
        """Whether it needs no request there: that settles it."""
        view = share(link, self._wanted[number], announced(holder))
        if view is None:
            return False
        self._settle(number, view)
        note_viewed(self._link, holder, [view])
        return True

    def _settle(self, number: int, view: View) -> None:
        self._views[number] = view
        del self._wanted[number]


def _forsake_all(link: PeerLink, grants: Sequence[LeaseGrant]) -> None:
    for grant in grants:
        give_back_unused(link, grant)


def _slices(some: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(some), count):
        yield some[start : start + count]
