"""The peer's answers as the results that callers see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final, TypeVar

from p2pstore.arguments import PIN_NAMES
from p2pstore.errors import KeyExists, NoSuchKey, P2PStoreError, ProtocolError
from p2pstore.local.local_messages import (
    Copy,
    Estimated,
    ExpectedFetch,
    ItemError,
    Keys,
    PeersReply,
    PutOutcome,
)
from p2pstore.objects import format_peer_id
from p2pstore.results import (
    SOURCE_KINDS,
    FetchEstimate,
    FetchSource,
    ItemResult,
    KeyPage,
    ListedKey,
    Location,
    OnConflict,
    PeerInfo,
    PinName,
    PrefixHolder,
    PutResult,
    PutStatusName,
    total_time,
)
from p2pstore.wire import error_of

T = TypeVar("T")

STATUS_NAMES: Final[tuple[PutStatusName, ...]] = ("created", "unchanged", "kept_existing")
TIER_NAMES: Final = ("dram", "ssd", "both")


def pin_name(number: int) -> PinName:
    """The name of a pin; one that a newer peer invented counts as hard."""
    return PIN_NAMES[min(number, len(PIN_NAMES) - 1)]


def tier_name(number: int) -> str:
    """The name of a tier; one that a newer peer invented counts as both."""
    return TIER_NAMES[number] if 0 <= number < len(TIER_NAMES) else "both"


def put_results(keys: Sequence[str], outcome: PutOutcome, peer_name: str) -> list[PutResult]:
    """The results of puts that ended alike. Raises the error that they ended with."""
    raise_for(keys[0], outcome.error)
    if not 0 <= outcome.status < len(STATUS_NAMES):
        raise ProtocolError(f"the local peer answered a put with status {outcome.status}")
    status, copies, wanted = STATUS_NAMES[outcome.status], outcome.copies, outcome.wanted
    version = outcome.clock, outcome.writer
    alike = status, copies, wanted, peer_name, version
    return list(map(PutResult, keys, *map(repeat, alike)))


def accepted(result: PutResult, policy: OnConflict) -> PutResult:
    """The result of a put. Raises `KeyExists` where a kept key is to be an error."""
    if policy == "error" and result.status == "kept_existing":
        raise KeyExists(
            f"{result.key!r} already exists with other bytes, dtype or shape, and was kept: put with "
            'on_conflict="overwrite" to replace it, or under another key',
            result.key,
        )
    return result


def accepted_items(results: list[ItemResult], policy: OnConflict) -> list[ItemResult]:
    """`accepted` for the results of a batch, each with its own error."""
    if policy != "error":
        return results
    checked: list[ItemResult] = []
    for each in results:
        try:
            if each.value is not None:
                accepted(each.value, policy)
            checked.append(each)
        except KeyExists as error:
            checked.append(ItemResult(each.key, error=plain_error(error)))
    return checked


def error_in(key: str, error: ItemError) -> P2PStoreError | ValueError:
    """The error that one item ended with, naming its key where that says more."""
    return name_key(key, error_of(error.code, error.text, error.detail))


def raise_for(key: str, error: ItemError) -> None:
    """Raise the error that one item ended with, if it did."""
    if error.code:
        raise error_in(key, error)


def name_key(key: str, error: P2PStoreError | ValueError) -> P2PStoreError | ValueError:
    """A `NoSuchKey` that names the key; other errors as they are."""
    if isinstance(error, NoSuchKey) and repr(key) not in str(error):
        return NoSuchKey(f"{key!r}: {error}")
    return error


def plain_error(error: Exception) -> P2PStoreError | ValueError:
    """An error as the result of an item carries it: without tracebacks, whose frames keep all that the batch works
    with, buffers and views, for as long as the result is kept."""
    plain = error if isinstance(error, P2PStoreError | ValueError) else ValueError(str(error))
    each: BaseException | None = plain
    while each is not None:
        each.__traceback__ = each.__context__ = None
        each = each.__cause__
    return plain


class PrefixRuns:
    """The runs of a chain's blocks that peers hold, as answers about the next blocks come."""

    def __init__(self) -> None:
        self._copies: dict[bytes, Copy] = {}
        self._blocks: dict[bytes, int] = {}
        self._in_memory: dict[bytes, int] = {}
        self._length = 0

    def go_on(self, blocks: Sequence[Sequence[Copy]]) -> bool:
        """The copies of each of the next blocks. False: no run goes on."""
        for copies in blocks:
            goes_on = False
            for copy in copies:
                peer_id = copy.peer_id
                if not copy.reachable or self._blocks.get(peer_id, 0) != self._length:
                    continue
                self._copies.setdefault(peer_id, copy)
                self._blocks[peer_id] = self._length + 1
                self._in_memory[peer_id] = self._in_memory.get(peer_id, 0) + (
                    tier_name(copy.tier) != "ssd"
                )
                goes_on = True
            if not goes_on:
                return False
            self._length += 1
        return True

    def holders(self) -> list[PrefixHolder]:
        """The longest run first."""
        found = [
            PrefixHolder(
                format_peer_id(peer_id),
                copy.name,
                self._blocks[peer_id],
                self._in_memory[peer_id],
                copy.local,
            )
            for peer_id, copy in self._copies.items()
        ]
        return sorted(found, key=lambda each: (-each.blocks, -each.memory_blocks, each.peer_id))


def fetch_estimate(replies: Sequence[Estimated]) -> FetchEstimate:
    """The estimate of a batch, whose parts were asked one after the other."""
    sources: dict[tuple[bytes, int], list[ExpectedFetch]] = {}
    by_key: list[int] = []
    for reply in replies:
        for each in reply.sources:
            sources.setdefault((each.peer_id, each.kind), []).append(each)
        places = {name: place for place, name in enumerate(sources)}
        numbers = [places[each.peer_id, each.kind] for each in reply.sources]
        by_key += [numbers[number] if 0 <= number < len(numbers) else -1 for number in reply.by_key]
    return FetchEstimate.of([_fetch_source(some) for some in sources.values()], by_key)


def _fetch_source(parts: Sequence[ExpectedFetch]) -> FetchSource:
    return FetchSource(
        format_peer_id(parts[0].peer_id),
        parts[0].name,
        SOURCE_KINDS[max(0, min(parts[0].kind, len(SOURCE_KINDS) - 1))],
        sum(each.objects for each in parts),
        sum(each.length_bytes for each in parts),
        *total_time([(each.seconds, each.spread) for each in parts]),
    )


def location(copy: Copy) -> Location:
    """One known copy."""
    return Location(
        peer_id=format_peer_id(copy.peer_id),
        peer=copy.name,
        tier=tier_name(copy.tier),
        size_hint=copy.length_hint,
        version=(copy.clock, copy.writer),
        soft=copy.soft,
        pin=pin_name(copy.pin),
        local=copy.local,
        reachable=copy.reachable,
    )


def key_page(reply: Keys) -> KeyPage:
    """A page of keys."""
    return KeyPage(
        [
            ListedKey(
                key=entry.key,
                length=entry.length,
                copies=entry.copies,
                peers=list(entry.peers),
                pin=pin_name(entry.pin),
                soft=entry.soft,
                expires_unix=entry.expires_unix_ms / 1000 if entry.expires_unix_ms else None,
            )
            for entry in reply.items
        ],
        reply.more,
        list(reply.silent_peers),
    )


def peer_infos(reply: PeersReply) -> list[PeerInfo]:
    """The members of the cluster."""
    return [
        PeerInfo(
            peer_id=format_peer_id(entry.peer_id),
            name=entry.name,
            status=entry.status,
            incarnation=entry.incarnation,
            control=list(entry.control),
            data=list(entry.data),
            memory_capacity=entry.memory_capacity,
            memory_used=entry.memory_used,
            objects=entry.objects,
            me=entry.me,
            software=entry.software,
            heard_seconds_ago=entry.heard_seconds_ago,
            round_trip_seconds=(entry.round_trip_seconds if entry.round_trip_seconds >= 0 else None),
            transports={
                use.name: {
                    "objects": use.objects,
                    "bytes": use.bytes,
                    "failures": use.failures,
                    "median_microseconds": use.median_microseconds,
                    "p99_microseconds": use.p99_microseconds,
                }
                for use in entry.transports
            },
            directory=entry.directory,
            load=entry.load_permille / 1000,
            leaving=entry.leaving and entry.status in ("alive", "suspect"),
        )
        for entry in reply.items
    ]


def item_results(
    keys: Sequence[str], outcomes: Sequence[T | P2PStoreError | ValueError]
) -> list[ItemResult[T]]:
    """The results of a batch: per key what came of it, or why nothing did."""
    if not any(issubclass(kind, Exception) for kind in set(map(type, outcomes))):
        # A call of `ItemResult` for each would take twice as long.
        rows = zip(keys, outcomes, repeat(None), strict=False)
        return list(map(tuple.__new__, repeat(ItemResult), rows))
    return [
        ItemResult(key, None, outcome)
        if isinstance(outcome, (P2PStoreError, ValueError))
        else ItemResult(key, outcome)
        for key, outcome in zip(keys, outcomes, strict=True)
    ]
