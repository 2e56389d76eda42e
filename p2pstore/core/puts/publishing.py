"""Publishing values of new keys as a batch: nearly all puts of inference engines.

One look at the index, the SSD, the floors and the table of locations splits a batch. Values of new keys are published
as one, under one stamp; values of other keys are decided one by one (`put_operation`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, count, cycle, takewhile
from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.replicate import PutAmongMany, ReplicateTogether
from p2pstore.core.operation import PutEnd
from p2pstore.core.own_objects import packed_locations
from p2pstore.core.puts.put_operation import check_put
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.records import writer_of
from p2pstore.memory.entries import ObjectEntry, Reservation, Written
from p2pstore.memory.segment_layout import TrailerBody
from p2pstore.objects import Version, check_object_length
from p2pstore.put_facts import PutColumns, PutOptions, PutStatus
from p2pstore.runtime.stepping import Steps

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

PUBLISHED_PER_STEP: Final = 256
"""Values, at some 4 us each."""


def publish_new(
    core: PeerCore, columns: PutColumns, *, session: Hashable, namespace: str, now: float
) -> list[PutEnd | PutAmongMany | None]:
    """Publish those values whose keys are known to no peer, and begin to have their copies made. Per row its end, now
    or later, or None: a `PutOperation` decides."""
    ends: list[PutEnd | PutAmongMany | None] = [None] * len(columns.keys)
    plain = [_is_plain(options) for options in columns.options]
    if not any(plain) or not _may_publish(core, now):
        return ends
    digests = columns.digests
    unix = core.unix(now)
    clock, writer = core.clock.tick(unix), writer_of(core.peer_id)
    version = Version(clock, writer)
    new = _new_keys(core, digests)
    new -= core.gossip.cluster_records.floors.forbidden(new, core.namespace_digest(namespace), version)
    wanted = [each in new for each in digests]
    if not all(plain):
        wanted = [each and is_plain for each, is_plain in zip(wanted, cycle(plain), strict=False)]
    written = list(compress(_written(columns, version, namespace, unix), wanted))
    keep = core.books.keep
    entries = core.segment.commit_new(written, session=session, now=unix, keep=keep)
    published = [entry for entry in entries if entry is not None]
    keep(partial(_announce_own, core, published, now))
    to_copy = [entry for entry in published if entry.replicas > 1]
    copying = ReplicateTogether(core, to_copy) if to_copy else None
    alone = PutEnd(PutStatus.CREATED, 1, 1, version)
    row = 0
    for place, entry in zip(compress(count(), wanted), entries, strict=True):
        if entry is None:
            continue
        if copying is None or entry.replicas == 1:
            ends[place] = alone
        else:
            ends[place] = PutAmongMany(copying, row)
            row += 1
    if copying is not None:
        core.books.settle()
        core.operations.start(copying, now)
    return ends


def _written(columns: PutColumns, stamp: Version, namespace: str, unix: float) -> Iterator[Written]:
    clock, writer, _ = stamp
    ends = [int((unix + each.ttl_ms / 1000) * 1000) if each.ttl_ms else 0 for each in columns.options]
    options = [
        (each.replicas, each.pin, each.dtype, each.shape, end)
        for each, end in zip(columns.options, ends, strict=True)
    ]
    for key, digest, reservation, length, sums, root, follows, (replicas, pin, dtype, shape, end) in zip(
        columns.keys,
        columns.digests,
        columns.reservations,
        columns.lengths,
        columns.sums,
        columns.roots,
        columns.follows,
        cycle(options),
        strict=False,
    ):
        trailer = TrailerBody(namespace, key, sums, end, replicas, pin, dtype, shape)
        yield Written(reservation, digest, Version(clock, writer, root), trailer, length, follows)


def _is_plain(options: PutOptions) -> bool:
    """Whether the value is to be a new object in memory."""
    try:
        check_put(length=0, replicas=options.replicas, pin=options.pin, ttl_ms=options.ttl_ms)
    except (P2PStoreError, ValueError):
        return False
    return not (options.overwrite or options.durable)


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
    new = new_here(core, digests)
    return new - core.gossip.directory.mentioned(new)


def new_here(core: PeerCore, digests: Iterable[bytes]) -> set[bytes]:
    """Those of which this peer holds no version, in memory or on its SSD."""
    here, cold = core.segment.digests(), core.cold.store
    new = {digest for digest in digests if digest not in here}
    return new if cold is None else {digest for digest in new if cold.find(digest) is None}


def _announce_own(core: PeerCore, entries: Sequence[ObjectEntry], now: float) -> None:
    announce_new(core, entries, now)
    core.proofs.wrote([entry.digest for entry in entries])


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
    core: PeerCore, sizes: Sequence[tuple[int, int]], *, session: Hashable, namespace: str, now: float
) -> Steps[list[Reserved]]:
    """Room for each value, by length and trailer length, or why there is none. Closing the steps gives all back."""
    made: list[Reserved] = []
    try:
        while len(made) < len(sizes):
            if made:
                yield
            some = sizes[len(made) : len(made) + RESERVED_PER_STEP]
            free = core.segment.reserve_free(some, session=session, namespace=namespace)
            made += free
            if len(free) == len(some):
                continue
            left = sizes[len(made) :]
            try:
                check_object_length(left[0][0])
                reservation = yield from core.objects.reserve(
                    *left[0],
                    session=session,
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
                with suppress(ValueError):  # its session may have ended meanwhile
                    core.segment.abort(each.number, session=session)
        raise
    return made
