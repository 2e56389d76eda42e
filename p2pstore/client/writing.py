"""Putting objects: reserve, copy into the mapped segment, commit; elsewhere what has no room here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from p2pstore.client import answers, arguments
from p2pstore.client.device_memory import GpuCopyFailed
from p2pstore.client.elsewhere import ElsewhereWriter
from p2pstore.client.fetch import deadline_ms
from p2pstore.client.gathered import Source, value_of
from p2pstore.client.link import PeerLink
from p2pstore.client.prefix_chains import PrefixChains
from p2pstore.client.puts import fill, groups, trailer_bound
from p2pstore.errors import (
    CapacityExceeded,
    ObjectTooLarge,
    P2PStoreError,
    StoreClosed,
)
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.objects import (
    check_object_length,
    encode_key,
    encode_namespace,
    key_digest,
    root_checksum,
)
from p2pstore.put_facts import PutFacts
from p2pstore.results import Buffer, ItemResult, OnConflict, PutResult
from p2pstore.transfer.trace import Progress
from p2pstore.wire import Code

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A copy on another peer may take this long before a put stops waiting for it."""
ITEM_SECONDS: Final = 0.005
"""What each item of a batch, and each further copy of it, may take besides: other peers are asked about it."""

_NO_MEMORY: Final = local.ItemError(
    int(Code.CAPACITY_EXCEEDED), "the local peer offers no memory: it was started with memory 0"
)

PutOptions = dict[str, Any]
"""Fields of a `PutFacts` that are the caller's choice."""


def put_options(
    replicas: int, pin: str, ttl: float | None, policy: OnConflict, durable: bool
) -> PutOptions:
    """The options of one put, checked. `ttl` in seconds. Raises `TypeError` or `ValueError`."""
    return {
        "replicas": arguments.whole_number("replicas", replicas),
        "pin": arguments.pin_number(pin),
        "ttl_ms": arguments.milliseconds("ttl", ttl),
        "overwrite": policy == "overwrite",
        "durable": arguments.flag("durable", durable),
    }


class Writer:
    """Puts into one namespace over one link. A put that ends early, by an error or by cancellation,
    gives its room back."""

    def __init__(self, link: PeerLink, namespace: str, chains: PrefixChains) -> None:
        self._link = link
        self._namespace = namespace
        self._chains = chains
        self._elsewhere = ElsewhereWriter(link, namespace)
        self._peer_has_memory = any(reader.geometry.data_bytes for reader in link.readers)

    def close(self) -> None:
        """Close the connections to other peers."""
        self._elsewhere.close()

    async def put(
        self,
        key: str,
        source: Source,
        options: PutOptions,
        progress: Progress | None = None,
        follows: bytes | None = None,
    ) -> PutResult:
        """Store one value: one round trip when the room was reserved by an earlier put. On another peer
        when the local one has no room. `follows` is the digest of the block before it (empty: none); None for what
        `match_prefix` was asked about."""
        link = self._link
        item = self._reserve_item(key, source, options)
        try:
            reservation = await self._room_for(key, item)
        except (CapacityExceeded, ObjectTooLarge) as refusal:
            seconds = _replication_seconds(len(source), options["replicas"])
            whole = source
            if not isinstance(whole, memoryview):
                whole = await link.driver.run_in_thread(whole.joined)
            return await self._elsewhere.put(key, whole, options, refusal, seconds, progress)
        try:
            if follows is None:
                follows = self._chains.before(key_digest(key, self._namespace))
            commit = await self._fill(key, source, reservation, options, follows, progress)
            again = link.ahead.wanted(item)
            reply = await self._commit([commit], again)
            self._keep(again, reply)
            return answers.put_result(key, reply.items[0], link.connection.hello.name)
        except BaseException:
            link.abort([reservation.reservation])  # harmless when the commit got through
            raise

    async def _room_for(self, key: str, item: local.ReserveItem) -> local.Reservation:
        """Room in the local peer's memory. Raises `CapacityExceeded` or `ObjectTooLarge`."""
        link = self._link
        reservation = link.ahead.take(item)
        if reservation is not None:
            return reservation
        if link.ahead.held:
            link.abort(link.ahead.drop_others(item))
        reservation = (await self._reserve([item]))[0]
        if reservation.error.code == Code.CAPACITY_EXCEEDED and link.make_room():
            reservation = (await self._reserve([item]))[0]
        answers.raise_for(key, reservation.error)
        return reservation

    async def put_many(
        self, items: Sequence[tuple[str, Buffer]], options: PutOptions
    ) -> list[ItemResult]:
        """Store many values; one result per item. Each follows the one before it, as far as eviction is concerned:
        a batch is a chain of prefix blocks, or it does not matter which of it goes first."""
        results: list[ItemResult] = [ItemResult(key) for key, _ in items]
        sources: dict[int, Source] = {}
        for index, (key, value) in enumerate(items):
            try:
                encode_key(key)
                source = value_of(value)
                check_object_length(len(source))
            except (P2PStoreError, ValueError, TypeError) as error:
                results[index] = ItemResult(key, error=answers.plain_error(error))
            else:
                sources[index] = source
        good = list(sources)
        follows = self._chain([items[index][0] for index in good])
        if len(items) == 1 and good:  # one round trip, where room was reserved by the put before
            await self._put_alone(0, sources[0], follows[0], options, results)
            return results
        for group in groups([len(source) for source in sources.values()]):
            some = {good[position]: sources[good[position]] for position in group}
            before = {good[position]: follows[position] for position in group}
            await self._put_group(some, before, options, results)
        return results

    def _chain(self, keys: Sequence[str]) -> list[bytes]:
        """What each block of a batch follows: the one before it, and the first what it was missing behind."""
        digests = [key_digest(key, self._namespace) for key in keys]
        return [self._chains.before(digest) for digest in digests[:1]] + digests[:-1]

    async def _put_group(
        self,
        sources: dict[int, Source],
        follows: dict[int, bytes],
        options: PutOptions,
        results: list[ItemResult],
    ) -> None:
        """Put what one pair of requests can, then the others one by one: what the group reserved may have
        been in their way. `results` has the keys and gets the results."""
        keys = {index: results[index].key for index in sources}
        reserved = await self._reserve(
            [self._reserve_item(keys[index], sources[index], options) for index in sources]
        )
        reservations: dict[int, local.Reservation] = {}
        alone: list[int] = []
        for index, reservation in zip(sources, reserved, strict=True):
            if reservation.error.code in (Code.CAPACITY_EXCEEDED, Code.OBJECT_TOO_LARGE):
                alone.append(index)
            elif reservation.error.code:
                error = answers.error_in(keys[index], reservation.error)
                results[index] = ItemResult(keys[index], error=error)
            else:
                reservations[index] = reservation
        if reservations:
            await self._put_reserved(sources, follows, reservations, options, results)
        for index in alone:
            await self._put_alone(index, sources[index], follows[index], options, results)

    async def _put_alone(
        self,
        index: int,
        source: Source,
        follows: bytes,
        options: PutOptions,
        results: list[ItemResult],
    ) -> None:
        key = results[index].key
        try:
            result = await self.put(key, source, options, follows=follows)
        except StoreClosed:  # the local peer is gone: not this value's fault
            raise
        except (P2PStoreError, ValueError) as problem:
            results[index] = ItemResult(key, error=answers.plain_error(problem))
        else:
            results[index] = ItemResult(key, result)

    async def _put_reserved(
        self,
        sources: dict[int, Source],
        follows: dict[int, bytes],
        reservations: dict[int, local.Reservation],
        options: PutOptions,
        results: list[ItemResult],
    ) -> None:
        """Fill what was reserved, and commit it as one."""
        keys = {index: results[index].key for index in reservations}
        commits: dict[int, PutFacts] = {}
        try:
            for index, reservation in reservations.items():
                try:
                    commits[index] = await self._fill(
                        keys[index], sources[index], reservation, options, follows[index]
                    )
                except GpuCopyFailed as error:
                    self._link.abort([reservation.reservation])
                    results[index] = ItemResult(keys[index], error=answers.plain_error(error))
            if not commits:
                return
            reply = await self._commit(list(commits.values()), [])
        except BaseException:
            self._link.abort(_numbers(reservations.values()))
            raise
        for index, outcome in zip(commits, reply.items, strict=True):
            try:
                result = answers.put_result(keys[index], outcome, self._link.connection.hello.name)
            except (P2PStoreError, ValueError) as error:
                self._link.abort([reservations[index].reservation])
                results[index] = ItemResult(keys[index], error=answers.plain_error(error))
            else:
                results[index] = ItemResult(keys[index], result)

    def _reserve_item(self, key: str, source: Source, options: PutOptions) -> local.ReserveItem:
        check_object_length(len(source))
        return local.ReserveItem(
            len(source),
            trailer_bound(
                encode_key(key),
                encode_namespace(self._namespace),
                len(source),
                options.get("dtype", ""),
                len(options.get("shape", ())),
            ),
        )

    async def _reserve(self, items: list[local.ReserveItem]) -> list[local.Reservation]:
        if not self._peer_has_memory:  # its mapping tells, so it need not be asked
            return [local.Reservation(0, 0, 0, 0, _NO_MEMORY)] * len(items)
        reply = await self._link.request(
            LocalKind.RESERVE,
            local.Reserve(items, self._namespace),
            local.Reserved,
            on_late_reply=lambda late: self._link.abort(_numbers(late.items)),
        )
        if len(reply.items) != len(items):
            raise P2PStoreError("the local peer reserved room for another number of values")
        return reply.items

    async def _fill(
        self,
        key: str,
        source: Source,
        reservation: local.Reservation,
        options: PutOptions,
        follows: bytes,
        progress: Progress | None = None,
    ) -> PutFacts:
        segment = self._link.connection.segment(reservation.segment)
        target = segment[reservation.offset : reservation.offset + len(source)]
        # Closed by another task or thread, the peer gives this room to somebody else.
        check = self._link.connection.check_usable
        sums = await fill(self._link.driver, target, source, check, progress)
        root = root_checksum(len(source), sums)
        return PutFacts(
            reservation.reservation, key, len(source), sums, root, **options, follows=follows
        )

    async def _commit(
        self, items: list[PutFacts], again: list[local.ReserveItem]
    ) -> local.Committed:
        reply = await self._link.request(
            LocalKind.COMMIT,
            local.Commit(self._namespace, items, deadline_ms(self._link.timeout_seconds), again),
            local.Committed,
            extra_seconds=sum(_replication_seconds(item.length, item.replicas) for item in items),
            on_late_reply=lambda late: self._link.abort(_numbers(late.again)),
        )
        if len(reply.items) != len(items):
            raise P2PStoreError("the local peer answered for another number of puts")
        return reply

    def _keep(self, again: list[local.ReserveItem], reply: local.Committed) -> None:
        if again:
            self._link.abort(self._link.ahead.granted(again[0], reply.again))


def _replication_seconds(length: int, replicas: int) -> float:
    """What making the copies may take."""
    return length * (replicas - 1) / REPLICATE_BYTES_PER_SECOND + ITEM_SECONDS * replicas


def _numbers(reservations: Iterable[local.Reservation]) -> list[int]:
    """The numbers of those that were granted."""
    return [each.reservation for each in reservations if not each.error.code]
