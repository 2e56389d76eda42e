"""Leases of many objects: taken without a request, or with one to each peer that gives some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from p2pstore.client.answers import error_in, plain_error
from p2pstore.client.fetcher import FETCH_SECONDS, Fetcher
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.client.known_holders import SSD
from p2pstore.client.leasing import (
    announced,
    ask,
    forsake,
    neighbours_in,
    note_viewed,
    share,
    version_of,
    view_under,
)
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import DeadlineExceeded, P2PStoreError
from p2pstore.local.local_messages import Holder, LeaseGrant
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import MOST_ITEMS
from p2pstore.wire import Code

T = TypeVar("T")

LEASES_PER_REQUEST: Final = MOST_ITEMS[LocalKind.LEASE]
LEASES_PER_TURN: Final = 256
"""Taken without a request, before others of this program's event loop have their turn: 4 ms."""
FETCHED_AT_ONCE: Final = 16
"""So many objects the local peer brings side by side."""

View = memoryview | P2PStoreError | ValueError
"""A view, or why there is none."""


async def take_many(
    link: PeerLink,
    fetcher: Fetcher,
    neighbours: Neighbours,
    keys: Sequence[str],
    digests_of: Callable[[Sequence[str]], list[bytes]],
    *,
    here: bool,
) -> list[View]:
    """A read-only view of each object in place, or why there is none; with `here`, in the local peer's memory."""
    batch = _Batch(link, fetcher, neighbours, keys)
    batch.prepare(digests_of)
    await batch.share()
    await batch.lease_here()
    if not here:
        await batch.lease_nearby()
    await batch.lease_fetched()
    return batch.views()


class _Batch:
    """Many leases at once. Each step settles some of the items, which are known by their numbers."""

    def __init__(
        self, link: PeerLink, fetcher: Fetcher, neighbours: Neighbours, keys: Sequence[str]
    ) -> None:
        self._link = link
        self._fetcher = fetcher
        self._neighbours = neighbours
        self._keys = keys
        self._wanted: dict[int, bytes] = {}
        """The digest of each item that is not settled."""
        self._first: dict[int, int] = {}
        """Of an item whose object is asked for before in the batch, that item."""
        self._views: dict[int, View] = {}

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
        """What needs no request."""
        for some in _slices(list(self._wanted.items()), LEASES_PER_TURN):
            for number, digest in some:
                view = share(self._link, digest)
                if view is not None:
                    self._settle(number, view)
            if len(self._keys) > LEASES_PER_TURN:
                await self._link.driver.sleep(0)

    async def lease_here(self) -> None:
        """What the local peer holds."""
        wanted = list(self._wanted)
        here = self._fetcher.which_are_here(list(self._wanted.values()))
        numbers = [wanted[place] for place in here]
        for some in _slices(numbers, LEASES_PER_REQUEST):
            await self._lease(self._link, some)

    async def lease_nearby(self) -> None:
        """What other peers of this host hold."""
        if not self._wanted:
            return
        numbers = list(self._wanted)
        plans = await self._fetcher.plan(self._keys[numbers[0]], list(self._wanted.values()))
        batches: dict[tuple[int, bool], list[tuple[int, Holder]]] = {}
        for number, plan in zip(numbers, plans, strict=True):
            if plan.error.code == Code.NO_SUCH_KEY:
                error = error_in(self._keys[number], plan.error)
                self._fetcher.ended(error)
                self._settle(number, error)
            elif near := neighbours_in(plan.holders):
                batches.setdefault((near[0].member, near[0].tier == SSD), []).append(
                    (number, near[0])
                )
        for (_, is_cold), batch in batches.items():
            for some in _slices(batch, FETCHED_AT_ONCE if is_cold else LEASES_PER_REQUEST):
                _, holder = some[0]
                if not await self._neighbours.call(holder, partial(self._lease_at, some)):
                    break  # one that hangs is enough

    async def lease_fetched(self) -> None:
        """The rest, which the local peer is to bring: side by side, and those that do not fit so, one by one."""
        try:
            for some in _slices(list(self._wanted), FETCHED_AT_ONCE):
                await self._lease(self._link, some, fetch=True)
                for number in [each for each in some if each in self._wanted]:
                    await self._lease(self._link, [number], fetch=True)
        except DeadlineExceeded as error:  # what there is stays of use
            for number in list(self._wanted):
                self._settle(number, plain_error(error))

    async def _lease(
        self, link: PeerLink, numbers: Sequence[int], *, fetch: bool = False, again: bool = False
    ) -> None:
        """Have the local peer lease these: with `fetch` all of them are settled then, but for what may fit alone;
        otherwise what it had."""
        grants = await ask(
            link,
            self._keys[numbers[0]],
            [self._wanted[number] for number in numbers],
            fetch=fetch,
            fetch_seconds=FETCH_SECONDS * len(numbers),
        )
        refused = []
        try:
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
        if refused and link.make_room():
            await self._lease(link, [number for number, _ in refused], fetch=fetch, again=True)
        else:
            for number, grant in refused:
                self._settle(number, error_in(self._keys[number], grant.error))

    async def _lease_at(
        self, some: Sequence[tuple[int, Holder]], link: PeerLink, *, again: bool = False
    ) -> bool:
        """Lease what a neighbour has; whether it answered. What it does not have, or not in that version, stays to be
        fetched, and what this client holds too much for."""
        left = [each for each in some if not self._shared_at(link, *each)]
        if not left:
            return True
        number, holder = left[0]
        is_cold = holder.tier == SSD
        try:
            grants = await ask(
                link,
                self._keys[number],
                [self._wanted[number] for number, _ in left],
                fetch=is_cold,
                fetch_seconds=0.0,
            )
        except DeadlineExceeded:
            if is_cold:  # its SSD takes long: that says nothing of what it has in memory
                return False
            raise
        refused, viewed = [], []
        try:
            for (number, holder), grant in zip(left, grants, strict=True):
                code = grant.error.code
                if not code and announced(holder).allows(version_of(grant)):
                    view = view_under(link, self._wanted[number], grant)
                    self._settle(number, view)
                    viewed.append(view)
                elif code == Code.LEASE_LIMIT_EXCEEDED:
                    refused.append((number, holder))
                else:  # an older one may be forbidden
                    forsake(link, grant)
        except BaseException:
            _forsake_all(link, grants)
            raise
        note_viewed(self._link, holder, viewed)
        if refused and not again and link.make_room():
            return await self._lease_at(refused, link, again=True)
        return True

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
        forsake(link, grant)


def _slices(some: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(some), count):
        yield some[start : start + count]
