"""Putting objects: reserve, copy into the mapped segment, commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from p2pstore.client import answers
from p2pstore.client.fetch import deadline_ms
from p2pstore.client.link import PeerLink
from p2pstore.client.puts import fill, groups, trailer_bound
from p2pstore.client.values import source_view
from p2pstore.errors import P2PStoreError
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.objects import check_object_length, encode_key, encode_namespace, root_checksum
from p2pstore.results import Buffer, ItemResult, PutResult
from p2pstore.wire import Code

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A copy on another peer may take this long before a put stops waiting for it."""

PutOptions = dict[str, Any]
"""Fields of a `CommitItem` that are the caller's choice."""


def put_options(
    replicas: int, pin: str, ttl: float | None, overwrite: bool, durable: bool
) -> PutOptions:
    """The options of one put, checked. `ttl` in seconds. Raises `ValueError`."""
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, not {replicas}")
    if ttl is not None and not ttl > 0:
        raise ValueError(f"the time to live must be above 0 seconds, not {ttl}")
    return {
        "replicas": replicas,
        "pin": answers.pin_number(pin),
        "ttl_ms": 0 if ttl is None else max(1, round(ttl * 1000)),
        "overwrite": overwrite,
        "durable": durable,
    }


class Writer:
    """Puts into one namespace over one link. A put that ends early, by an error or by cancellation,
    gives its room back."""

    def __init__(self, link: PeerLink, namespace: str) -> None:
        self._link = link
        self._namespace = namespace

    async def put(self, key: str, source: memoryview, options: PutOptions) -> PutResult:
        """Store one value: one round trip when the room was reserved by an earlier put."""
        link = self._link
        item = self._reserve_item(key, source, options)
        reservation = link.ahead.take(item)
        if reservation is None:
            if link.ahead.held:
                link.abort(link.ahead.drop_others(item))
            reservation = (await self._reserve([item]))[0]
            if reservation.error.code == Code.CAPACITY_EXCEEDED and link.make_room():
                reservation = (await self._reserve([item]))[0]
            answers.raise_for(key, reservation.error)
        try:
            commit = await self._fill(key, source, reservation, options)
            again = link.ahead.wanted(item)
            reply = await self._commit([commit], again)
            self._keep(again, reply)
            return answers.put_result(key, reply.items[0], link.connection.hello.name)
        except BaseException:
            link.abort([reservation.reservation])  # harmless when the commit got through
            raise

    async def put_many(
        self, items: Sequence[tuple[str, Buffer]], options: PutOptions
    ) -> list[ItemResult]:
        """Store many values; one result per item."""
        results: list[ItemResult] = [ItemResult(key) for key, _ in items]
        sources: dict[int, memoryview] = {}
        for index, (key, value) in enumerate(items):
            try:
                encode_key(key)
                source = source_view(value)
                check_object_length(len(source))
            except (P2PStoreError, ValueError, TypeError) as error:
                results[index] = ItemResult(key, error=answers.plain_error(error))
            else:
                sources[index] = source
        good = list(sources)
        for group in groups([len(source) for source in sources.values()]):
            some = {good[position]: sources[good[position]] for position in group}
            await self._put_group(some, options, results)
        return results

    async def _put_group(
        self, sources: dict[int, memoryview], options: PutOptions, results: list[ItemResult]
    ) -> None:
        """Put what one pair of requests can; `results` has the keys and gets the results."""
        keys = {index: results[index].key for index in sources}
        reserved = await self._reserve(
            [self._reserve_item(keys[index], sources[index], options) for index in sources]
        )
        reservations: dict[int, local.Reservation] = {}
        for index, reservation in zip(sources, reserved, strict=True):
            if reservation.error.code:
                error = answers.error_in(keys[index], reservation.error)
                results[index] = ItemResult(keys[index], error=error)
            else:
                reservations[index] = reservation
        if not reservations:
            return
        try:
            commits = [
                await self._fill(keys[index], sources[index], reservation, options)
                for index, reservation in reservations.items()
            ]
            reply = await self._commit(commits, [])
        except BaseException:
            self._link.abort(_numbers(reservations.values()))
            raise
        for index, outcome in zip(reservations, reply.items, strict=True):
            try:
                result = answers.put_result(keys[index], outcome, self._link.connection.hello.name)
            except (P2PStoreError, ValueError) as error:
                self._link.abort([reservations[index].reservation])
                results[index] = ItemResult(keys[index], error=error)
            else:
                results[index] = ItemResult(keys[index], result)

    def _reserve_item(self, key: str, source: memoryview, options: PutOptions) -> local.ReserveItem:
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
        reply = await self._link.request(
            LocalKind.RESERVE,
            local.Reserve(items),
            local.Reserved,
            on_late_reply=lambda late: self._link.abort(_numbers(late.items)),
        )
        if len(reply.items) != len(items):
            raise P2PStoreError("the local peer reserved room for another number of values")
        return reply.items

    async def _fill(
        self, key: str, source: memoryview, reservation: local.Reservation, options: PutOptions
    ) -> local.CommitItem:
        segment = self._link.connection.segments[reservation.segment]
        target = segment[reservation.offset : reservation.offset + len(source)]
        sums = await fill(self._link.driver, target, source)
        root = root_checksum(len(source), sums)
        return local.CommitItem(reservation.reservation, key, len(source), sums, root, **options)

    async def _commit(
        self, items: list[local.CommitItem], again: list[local.ReserveItem]
    ) -> local.Committed:
        copied_elsewhere = sum(item.length * (item.replicas - 1) for item in items)
        reply = await self._link.request(
            LocalKind.COMMIT,
            local.Commit(self._namespace, items, deadline_ms(self._link.timeout_seconds), again),
            local.Committed,
            extra_seconds=copied_elsewhere / REPLICATE_BYTES_PER_SECOND,
            on_late_reply=lambda late: self._link.abort(_numbers(late.again)),
        )
        if len(reply.items) != len(items):
            raise P2PStoreError("the local peer answered for another number of puts")
        return reply

    def _keep(self, again: list[local.ReserveItem], reply: local.Committed) -> None:
        if again:
            self._link.abort(self._link.ahead.granted(again[0], reply.again))


def _numbers(reservations: Iterable[local.Reservation]) -> list[int]:
    """The numbers of those that were granted."""
    return [each.reservation for each in reservations if not each.error.code]
