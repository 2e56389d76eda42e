"""An open client of the local peer, the objects that do its work, and its calls about keys: finding, listing, removing,
pinning and copying objects."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from p2pstore import arguments
from p2pstore.client import answers
from p2pstore.client.answers import plain_error
from p2pstore.client.device_memory import GpuMapping
from p2pstore.client.fetcher import FETCH_SECONDS, Fetcher, deadline_ms
from p2pstore.client.host_neighbours import Neighbours
from p2pstore.client.leasing import Leaser
from p2pstore.client.object_store import ObjectStore
from p2pstore.client.peer_link import PeerLink
from p2pstore.client.presence_calls import PrefixChains, Presence
from p2pstore.client.writing import Writer
from p2pstore.errors import AnswerTooLarge, NoSuchKey, P2PStoreError, ProtocolError, StoreClosed
from p2pstore.local import local_messages as local
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access, LocalKind
from p2pstore.local.local_requests import MAX_ITEMS, Cuts, text_bytes
from p2pstore.local.socket_paths import find_socket
from p2pstore.objects import DEFAULT_NAMESPACE, batch_key_hasher, encode_key, key_hasher
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
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS, Driver
from p2pstore.values import RegisteredBuffer
from p2pstore.wire import Empty


class _Parts:
    """The parts of an open client that share its connection."""

    def __init__(
        self,
        link: PeerLink,
        namespace: str,
        digests_of: Callable[[Sequence[str]], list[bytes]],
        *,
        in_threads: bool,
    ) -> None:
        self.link = link
        chains = PrefixChains()
        self.fetcher = Fetcher(link, namespace, in_threads=in_threads)
        self.writer = Writer(link, namespace, chains)
        self.neighbours = Neighbours(link, namespace)
        self.leaser = Leaser(link, self.fetcher, self.neighbours)
        self.presence = Presence(link, digests_of, chains)
        self.gpus: GpuMapping | None = None
        self.registering = link.driver.lock()

    def close(self) -> None:
        """Close the connections that this process opened; a forked child leaves those of its parent open."""
        self.gpus = None
        self.neighbours.close()
        self.link.close()
        if not self.link.connection.is_inherited:
            self.fetcher.close()
            self.writer.close()


class OpenSession(ObjectStore):
    """The connection of one client to the local peer: `open` it, use it, `close` it. Its subclasses have the methods of
    `ObjectStore`, which says what each of them does."""

    how_to_connect: ClassVar[str] = "open() it first"
    """Hint in the error of a call before `open`."""
    in_threads: ClassVar[bool] = False
    """Whether concurrent work runs in threads, which cannot be cancelled from outside."""

    def __init__(
        self,
        driver: Driver,
        *,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        timeout: float = DEFAULT_PROGRESS_SECONDS,
    ) -> None:
        self.namespace = arguments.text("namespace", namespace)
        self.timeout = arguments.seconds("timeout", timeout, above_zero=True)
        self._driver = driver
        self._wanted_socket = None if socket is None else os.fspath(socket)
        self._digest = key_hasher(namespace)
        self._digests = batch_key_hasher(namespace)
        self._parts: _Parts | None = None
        self._registered: weakref.WeakSet[RegisteredBuffer] = weakref.WeakSet()

    async def open(self) -> None:
        """Connect. Raises `NoLocalPeer`, `AmbiguousLocalPeer`, `ProtocolMismatch`."""
        path = str(find_socket(self._wanted_socket))
        opening = Opening(self.namespace, Access.WRITE, location_table=True, hazards=True)
        link = await PeerLink.open(self._driver, path, opening, self.timeout)
        try:
            self._parts = _Parts(link, self.namespace, self._digests, in_threads=self.in_threads)
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        """Disconnect; may be called twice. Reservations, leases and registrations end with it.

        In a forked child it only lets go: the connection belongs to the parent, which goes on using it.
        """
        for registered in list(self._registered):
            registered.close()
        if self._parts is not None:
            self._parts.close()

    @property
    def socket_path(self) -> str:
        """The socket this client is connected to."""
        return self._link.connection.path

    @property
    def peer_name(self) -> str:
        """The name of the local peer, which `PutResult.location` is where a value is stored there."""
        return self._link.connection.hello.name

    @property
    def _link(self) -> PeerLink:
        """The connection, which may have ended. Raises `RuntimeError` before there was one."""
        if self._parts is None:
            raise RuntimeError(f"this client is not connected: {self.how_to_connect}")
        return self._parts.link

    @property
    def _live(self) -> _Parts:
        """The parts, checked to be usable. Raises `StoreClosed` once the peer is gone, `ClientForked` in a forked
        child."""
        self._link.check()
        assert self._parts is not None
        return self._parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        socket = self._wanted_socket if self._parts is None else self.socket_path
        return _restore, (type(self), socket, self.namespace, self.timeout)


def _restore(kind: type[OpenSession], socket: str | None, namespace: str, timeout: float) -> OpenSession:
    return kind(socket=socket, namespace=namespace, timeout=timeout)  # type: ignore[call-arg]


REMOVE_SECONDS: Final = 5.0
"""Additional time for removing and listing, which ask other peers."""


_ListKeys = local.ListKeys  # `list_keys` has a parameter named `local`, as its users call it
_Keys = local.Keys


class AskCalls(OpenSession):
    """Questions of one client."""

    async def contains(self, key: str) -> bool:
        return await self._live.presence.contains(self._digest(key))

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return await self._live.presence.contains_many(arguments.key_list(keys))

    async def match_prefix(self, keys: Sequence[str]) -> int:
        return await self._live.presence.match_prefix(arguments.key_list(keys))

    async def match_prefix_by_peer(self, keys: Sequence[str]) -> list[PrefixHolder]:
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
        prefix, after = arguments.text("prefix", prefix), arguments.text("after", after)
        limit = arguments.whole_number("limit", limit)
        local, pinned = arguments.flag("local", local), arguments.flag("pinned", pinned)
        whole = KeyPage([], True)  # made of as many pages of at most 2,000 keys as it takes
        most = MAX_ITEMS[LocalKind.LIST]
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
        request = local.Peers(arguments.flag("everyone", everyone))
        reply = await self._link.request(LocalKind.PEERS, request, local.PeersReply)
        return answers.peer_infos(reply)

    async def statistics(self, *, cluster: bool = True) -> dict[str, Any]:
        request = local.Statistics(arguments.flag("cluster", cluster))
        reply = await self._link.request(LocalKind.STATISTICS, request, local.StatisticsReply)
        document: dict[str, Any] = json.loads(reply.document)
        return document


class ChangeCalls(OpenSession):
    """Changes by one client, of what is stored already."""

    async def remove(self, key: str) -> bool:
        encode_key(key)
        return (await self.remove_many([key]))[0].unwrap()

    async def remove_many(self, keys: Sequence[str]) -> list[ItemResult[bool]]:
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
        return await self.pin(key, "none")

    async def replicate(self, key: str, copies: int) -> PutResult:
        copies = arguments.whole_number("copies", copies)
        request = local.Replicate(self._digest(key), copies, deadline_ms(self.timeout))
        try:
            outcome = await self._link.request(
                LocalKind.REPLICATE, request, local.PutOutcome, extra_seconds=FETCH_SECONDS
            )
        except NoSuchKey as error:
            raise answers.name_key(key, error) from None
        return answers.put_results([key], outcome, self.peer_name)[0]

    async def prefetch(self, keys: Sequence[str]) -> None:
        digests, _ = arguments.possible_keys(arguments.key_list(keys), self._digests)
        self._link.check()
        for some in Cuts(LocalKind.PREFETCH, len(digests)):
            request = local.Prefetch(b"".join(digests[some.start : some.stop]))
            await self._link.request(LocalKind.PREFETCH, request, Empty)

    async def flush(self) -> None:
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
