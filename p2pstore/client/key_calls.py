"""The calls of a client about keys: finding, listing, removing, pinning and copying objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from p2pstore import arguments
from p2pstore.client import answers
from p2pstore.client.answers import plain_error
from p2pstore.client.fetcher import FETCH_SECONDS, deadline_ms
from p2pstore.client.open_session import OpenSession
from p2pstore.errors import AnswerTooLarge, NoSuchKey, P2PStoreError, ProtocolError, StoreClosed
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import MOST_ITEMS, Cuts, text_bytes
from p2pstore.objects import encode_key
from p2pstore.results import (
    FetchEstimate,
    ItemResult,
    KeyPage,
    Location,
    PeerInfo,
    PinName,
    PinResult,
    PrefixHolder,
    PutResult,
)
from p2pstore.wire import Empty

REMOVE_SECONDS: Final = 5.0
"""Additional time for removing and listing, which ask other peers."""


_ListKeys = local.ListKeys  # `list_keys` has a parameter named `local`, as its users call it
_Keys = local.Keys


class AskCalls(OpenSession):
    """Questions of one client."""

    async def contains(self, key: str) -> bool:
        """Whether some live peer is known to hold the key. May lag behind by a moment."""
        return await self._live.presence.contains(self._digest(key))

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys, in at most one request per 4,096."""
        return await self._live.presence.contains_many(arguments.key_list(keys))

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold."""
        return await self._live.presence.match_prefix(arguments.key_list(keys))

    async def match_prefix_by_peer(self, keys: Sequence[str]) -> list[PrefixHolder]:
        """For each live peer that holds the first of these keys, how many it holds from there on; the longest run
        first. May lag behind by a moment."""
        known = arguments.key_list(keys)[: await self.match_prefix(keys)]
        runs = answers.PrefixRuns()
        cuts = Cuts(LocalKind.LOCATE, len(known))
        for some in cuts:
            request = local.Locate(b"".join(self._digests(known[some.start : some.stop])))
            try:
                reply = await self._link.request(LocalKind.LOCATE, request, local.Located)
            except AnswerTooLarge as error:
                cuts.ask_again(some, error)
                continue
            if not runs.go_on(reply.items):
                break
        return runs.holders()

    async def estimate(self, keys: Sequence[str]) -> FetchEstimate:
        """Expected time to bring these objects here in one batch; those that no peer holds are left out."""
        self._link.check()
        digests, places = arguments.possible_keys(arguments.key_list(keys), self._digests)
        replies = []
        for some in Cuts(LocalKind.ESTIMATE, len(digests)):
            request = local.Locate(b"".join(digests[some.start : some.stop]))
            replies.append(await self._link.request(LocalKind.ESTIMATE, request, local.Estimated))
        estimate = answers.fetch_estimate(replies)
        if places is None:
            return estimate
        by_key = [-1] * len(keys)
        for place, number in zip(places, estimate.by_key, strict=True):
            by_key[place] = number
        return replace(estimate, by_key=by_key)

    async def locate(self, key: str) -> list[Location]:
        """The known copies of an object, after asking its home peers."""
        request = local.Locate(self._digest(key))
        reply = await self._link.request(LocalKind.LOCATE, request, local.Located)
        return [answers.location(copy) for copy in reply.items[0]] if reply.items else []

    async def list_keys(
        self,
        prefix: str = "",
        *,
        after: str = "",
        limit: int = 1000,
        local: bool = False,
        pinned: bool = False,
    ) -> KeyPage:
        """A page of this namespace's keys in order, of all peers or of the local one.

        The peer answers in pages of at most 2,000 keys; this one is made of as many as it takes.
        """
        prefix, after = arguments.text("prefix", prefix), arguments.text("after", after)
        limit = arguments.whole_number("limit", limit)
        local, pinned = arguments.flag("local", local), arguments.flag("pinned", pinned)
        whole = KeyPage([], True)
        most = MOST_ITEMS[LocalKind.LIST]
        while whole.more and len(whole.keys) < limit:
            request = _ListKeys(
                self.namespace,
                prefix,
                whole.keys[-1].key if whole.keys else after,
                min(most, limit - len(whole.keys)),
                local,
                pinned,
                deadline_ms(self.timeout),
            )
            try:
                reply = await self._link.request(
                    LocalKind.LIST, request, _Keys, extra_seconds=REMOVE_SECONDS
                )
            except AnswerTooLarge:
                if most == 1:
                    raise
                most //= 2
                continue
            page = answers.key_page(reply)
            whole = KeyPage(
                whole.keys + page.keys,
                page.more and bool(page.keys),
                sorted({*whole.silent_peers, *page.silent_peers}),
            )
        return whole

    async def peers(self, *, everyone: bool = False) -> list[PeerInfo]:
        """The members of the cluster; with `everyone` also those that died or left within the last 24 hours."""
        request = local.Peers(arguments.flag("everyone", everyone))
        reply = await self._link.request(LocalKind.PEERS, request, local.PeersReply)
        return answers.peer_infos(reply)

    async def statistics(self, *, cluster: bool = True) -> dict[str, Any]:
        """What the peer counts: `{"peer": {...}, "cluster": {...}}`."""
        request = local.Statistics(arguments.flag("cluster", cluster))
        reply = await self._link.request(LocalKind.STATISTICS, request, local.StatisticsReply)
        document: dict[str, Any] = json.loads(reply.document)
        return document


class ChangeCalls(OpenSession):
    """Changes by one client, of what is stored already."""

    async def remove(self, key: str) -> bool:
        """Remove the object everywhere. Whether any copy of it was known."""
        encode_key(key)
        return (await self.remove_many([key]))[0].unwrap()

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult[bool]]:
        """`remove` for many keys; one result per key, in order. Where a request fails, its keys and those after it
        carry the error; raises `StoreClosed` once the peer is gone."""
        keys = arguments.key_list(keys)
        self._link.check()
        results: dict[int, ItemResult[bool]] = {}
        for index, key in enumerate(keys):
            try:
                encode_key(key)
            except (ValueError, TypeError) as error:
                results[index] = ItemResult(key, error=plain_error(error))
        good = [index for index in range(len(keys)) if index not in results]
        for some in Cuts(LocalKind.REMOVE, len(good), [text_bytes(keys[index]) for index in good]):
            numbers = good[some.start : some.stop]
            try:
                removed = await self._remove([keys[number] for number in numbers])
            except StoreClosed:
                raise
            except P2PStoreError as error:
                failed = plain_error(error)
                left = good[some.start :]
                results.update({number: ItemResult(keys[number], error=failed) for number in left})
                break
            for number, existed in zip(numbers, removed.existed, strict=True):
                results[number] = ItemResult(keys[number], existed)
        return [results[index] for index in range(len(keys))]

    async def _remove(self, keys: list[str]) -> local.Removed:
        request = local.Remove(self.namespace, keys, deadline_ms(self.timeout))
        reply = await self._link.request(
            LocalKind.REMOVE, request, local.Removed, extra_seconds=REMOVE_SECONDS
        )
        if len(reply.existed) != len(keys):
            raise ProtocolError("the local peer answered for another number of keys")
        return reply

    async def pin(
        self, key: str, pin: PinName = "soft", *, ttl: float | None = None, fetch: bool = True
    ) -> PinResult:
        """Keep an object in the local peer's memory, and in that of all that hold it as far as they can be told: a
        soft pin (30 minutes unless `ttl` says otherwise) is evicted last, a hard one not at all. An object that only
        other peers hold is brought here first; without `fetch` it is pinned where it is. Raises `NoSuchKey`, and
        what a lease raises when it cannot be brought here."""
        fetch = arguments.flag("fetch", fetch) and pin != "none"
        request = local.SetPin(
            self._digest(key), arguments.pin_number(pin), arguments.milliseconds("ttl", ttl)
        )
        reply = await self._set_pin(request)
        if fetch and not _is_done(reply):
            # The view keeps it here until it is pinned.
            view = await self._live.leaser.take(key, self._digest(key), 0.0, here=True)
            try:
                reply = await self._set_pin(request)
            finally:
                del view
        if not (_is_done(reply) or (not fetch and any(reply.copies))):
            for error in reply.items:
                answers.raise_for(key, error)
        return PinResult(key, pin, sum(reply.copies) or 1, sum(reply.known) or 1)

    async def _set_pin(self, request: local.SetPin) -> local.Pinned:
        return await self._link.request(
            LocalKind.PIN, request, local.Pinned, extra_seconds=REMOVE_SECONDS
        )

    async def unpin(self, key: str) -> PinResult:
        """Undo `pin`, wherever the object is. Raises `NoSuchKey`."""
        return await self.pin(key, "none")

    async def replicate(self, key: str, copies: int) -> PutResult:
        """Have `copies` copies of the object, as far as there are peers. Raises `NoSuchKey`."""
        copies = arguments.whole_number("copies", copies)
        request = local.Replicate(self._digest(key), copies, deadline_ms(self.timeout))
        try:
            outcome = await self._link.request(
                LocalKind.REPLICATE, request, local.PutOutcome, extra_seconds=FETCH_SECONDS
            )
        except NoSuchKey as error:
            raise answers.name_key(key, error) from None
        return answers.put_result(key, outcome, self.peer_name)

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Have the peer bring these objects into local memory; does not wait for them."""
        digests, _ = arguments.possible_keys(arguments.key_list(keys), self._digests)
        self._link.check()
        for some in Cuts(LocalKind.PREFETCH, len(digests)):
            request = local.Prefetch(b"".join(digests[some.start : some.stop]))
            await self._link.request(LocalKind.PREFETCH, request, Empty)

    async def flush(self) -> None:
        """Remove everything in this namespace, everywhere."""
        request = local.Flush(self.namespace, deadline_ms(self.timeout))
        await self._link.request(LocalKind.FLUSH, request, local.Flushed, extra_seconds=REMOVE_SECONDS)

    async def leave(self, *, drain: float = 0.0) -> None:
        """Ask the peer to leave the cluster, after up to `drain` seconds in which it hands over to others what it
        alone holds. Does not wait for it: as long as the peer is there, `statistics()` says under `leaving` how far
        that is."""
        request = local.Leave(arguments.seconds("drain", drain))
        await self._link.request(LocalKind.LEAVE, request, Empty)


def _is_done(reply: local.Pinned) -> bool:
    return not any(error.code for error in reply.items)
