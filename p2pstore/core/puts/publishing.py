"""Publishing values of new keys as a batch: nearly all puts of inference engines.

One look at the index, the SSD, the floors and the table of locations splits a batch. Values of new keys are published
as one, under one stamp; values of other keys are decided one by one (`put_operation`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.replicate import PutAmongMany, ReplicateTogether
from p2pstore.core.operation import PutEnd
from p2pstore.core.own_objects import packed_locations
from p2pstore.core.puts.put_operation import check_put, trailer_of
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.records import writer_of
from p2pstore.memory.entries import ObjectEntry, Reservation, Written
from p2pstore.objects import MAX_OBJECT_BYTES, Version, are_sums_of, check_object_length
from p2pstore.put_facts import PutFacts, PutStatus
from p2pstore.runtime.stepping import Steps

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

PUBLISHED_PER_STEP: Final = 256
"""Values, at some 4 us each."""


def publish_new(
    core: PeerCore, items: Sequence[PutFacts], *, holder: Hashable, namespace: str, now: float
) -> list[PutEnd | PutAmongMany | None]:
    """Publish those values whose keys are known to no peer, and begin to have their copies made. Per item its end, now
    or later, or None: a `PutOperation` decides."""
    ends: list[PutEnd | PutAmongMany | None] = [None] * len(items)
    places = _plain_places(items)
    if not places or not _may_publish(core, now):
        return ends
    try:
        digests = core.digests_of(namespace, [items[place].key for place in places])
    except ValueError:  # one of them is no key
        return ends
    unix = core.unix(now)
    clock, writer = core.clock.tick(unix), writer_of(core.peer_id)
    version = Version(clock, writer)
    new = _new_keys(core, digests)
    new -= core.gossip.cluster_records.floors.forbidden(new, core.namespace_digest(namespace), version)
    if len(new) < len(digests):
        rows = [row for row in zip(places, digests, strict=True) if row[1] in new]
        places, digests = [place for place, _ in rows], [digest for _, digest in rows]
    stamped = partial(tuple.__new__, Version)  # in half the time
    written = [
        Written(
            facts.reservation,
            digest,
            stamped((clock, writer, facts.root)),
            trailer_of(facts, namespace, unix),
            facts.length,
            facts.follows,
        )
        for facts, digest in zip([items[place] for place in places], digests, strict=True)
    ]
    entries = core.segment.commit_new(written, holder=holder, now=unix)
    published = [entry for entry in entries if entry is not None]
    announce_new(core, published, now)
    core.proofs.wrote([entry.digest for entry in published])
    to_copy = [entry for entry in published if entry.replicas > 1]
    copying = ReplicateTogether(core, to_copy) if to_copy else None
    alone = PutEnd(PutStatus.CREATED, 1, 1, version)
    row = 0
    for place, entry in zip(places, entries, strict=True):
        if entry is None:
            continue
        if copying is None or entry.replicas == 1:
            ends[place] = alone
        else:
            ends[place] = PutAmongMany(copying, row, entry.replicas, entry.version)
            row += 1
    if copying is not None:
        core.operations.start(copying, now)
    return ends


def _plain_places(items: Sequence[PutFacts]) -> list[int]:
    """The places of values that are to be new objects in memory, and are what their sums say."""
    return [
        place
        for place, facts in enumerate(items)
        if not (facts.overwrite or facts.durable)
        and ((facts.replicas == 1 and not facts.pin and not facts.ttl_ms) or _may_be_asked(facts))
        and 0 <= facts.length <= MAX_OBJECT_BYTES
        and are_sums_of(facts.sums, facts.length, facts.root)
    ]


def _may_be_asked(facts: PutFacts) -> bool:
    try:
        check_put(length=facts.length, replicas=facts.replicas, pin=facts.pin, ttl_ms=facts.ttl_ms)
    except (P2PStoreError, ValueError):
        return False
    return True


def _may_publish(core: PeerCore, now: float) -> bool:
    """Whether others take what this peer writes now, and it knows of all that there is."""
    timekeeping = core.timekeeping
    return (
        core.gossip.partitions.knows_all
        and not timekeeping.problem(now)
        and not timekeeping.view(now).may_be_behind
    )


def _new_keys(core: PeerCore, digests: Sequence[bytes]) -> set[bytes]:
    """Those that neither this peer nor any other is known to hold, or to have held."""
    here = core.segment.digests()
    new = {digest for digest in digests if digest not in here}
    new -= core.gossip.locations.mentioned(new)
    if core.cold.store is not None:
        new = {digest for digest in new if core.cold.store.find(digest) is None}
    return new


def announce_new(core: PeerCore, entries: Sequence[ObjectEntry], now: float) -> None:
    """Tell the others of what was published, of keys of which this peer held nothing."""
    core.objects.announce_withdrawn(now)
    core.gossip.hold_new(packed_locations(entries), now)
    core.operations.tell_waiting([entry.digest for entry in entries], now)
    core.counters["objects_published"] += len(entries)


RESERVED_PER_STEP: Final = 256
"""Where there is room, at half a microsecond each."""

Reserved = Reservation | P2PStoreError | ValueError


def reserve_many(
    core: PeerCore, sizes: Sequence[tuple[int, int]], *, holder: Hashable, namespace: str, now: float
) -> Steps[list[Reserved]]:
    """Room for each value, by length and trailer length, or why there is none. Closing the steps gives all back."""
    made: list[Reserved] = []
    try:
        while len(made) < len(sizes):
            if made:
                yield
            some = sizes[len(made) : len(made) + RESERVED_PER_STEP]
            free = core.segment.reserve_free(some, holder=holder, namespace=namespace)
            made += free
            if len(free) == len(some):
                continue
            left = sizes[len(made) :]
            try:
                check_object_length(left[0][0])
                reservation = yield from core.objects.reserve(
                    *left[0],
                    holder=holder,
                    namespace=namespace,
                    now=now,
                    alike=sum(1 for _ in takewhile(left[0].__eq__, left)),
                )
            except (P2PStoreError, ValueError) as error:
                made.append(error)
            else:
                made.append(reservation)
    except BaseException:  # the caller never learns of these reservations
        for each in made:
            if isinstance(each, Reservation):
                with suppress(ValueError):  # its holder may have gone meanwhile
                    core.segment.abort(each.number, holder=holder)
        raise
    return made
