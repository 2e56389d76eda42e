"""Publishing values of new keys as a batch: nearly all puts of inference engines.

One look at the index, the SSD, the floors and the table of locations splits a batch. Values of new keys are published
as one, under one stamp; values of other keys are decided one by one (`put_operation`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, count, takewhile
from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.replicate import PutAmongMany, ReplicateTogether
from p2pstore.core.operation import PutEnd
from p2pstore.core.own_objects import packed_locations
from p2pstore.errors import P2PStoreError
from p2pstore.memory.entries import ObjectEntry, Reservation, Written
from p2pstore.memory.segment_layout import TrailerBody
from p2pstore.objects import Version, check_object_length
from p2pstore.put_facts import PutFacts, PutOptions, PutStatus
from p2pstore.runtime.stepping import Steps

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

PUBLISHED_PER_STEP: Final = 256
"""Values, at some 4 us each."""


def publish_new(
    core: PeerCore, values: Sequence[PutFacts], *, session: Hashable, namespace: str, now: float
) -> list[PutEnd | PutAmongMany | None]:
    """Publish those values whose keys are known to no peer, and begin to have their copies made. For each its end, now
    or later, or None: a `PutOperation` decides."""
    ends: list[PutEnd | PutAmongMany | None] = [None] * len(values)
    plain = _are_plain(values)
    knows_all = core.gossip.partitions.mode.knows_all
    if not (any(plain) and knows_all and core.timekeeping.may_write_all(now)):
        return ends
    unix = core.unix(now)
    version = Version(core.clock.tick(unix), core.writer)
    new = new_here(core, [facts.digest for facts in values])
    new -= core.gossip.directory.mentioned(new)
    new -= core.gossip.cluster_records.floors.forbidden(new, core.namespace_digest(namespace), version)
    wanted = [is_plain and facts.digest in new for is_plain, facts in zip(plain, values, strict=True)]
    clock, writer, _ = version
    written = [
        Written(
            facts.reservation,
            facts.digest,
            Version(clock, writer, facts.root),
            trailer_of(facts, namespace, unix),
            facts.length,
            facts.follows,
        )
        for facts in compress(values, wanted)
    ]
    keep = core.books.keep
    entries = core.segment.commit_new(written, session=session, now=unix, keep=keep)
    published = [entry for entry in entries if entry is not None]
    keep(partial(announce_new, core, published, now, are_own=True))
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


def trailer_of(facts: PutFacts, namespace: str, unix: float) -> TrailerBody:
    """The object's trailer when it is put at this wall-clock time."""
    options = facts.options
    end = int((unix + options.ttl_ms / 1000) * 1000) if options.ttl_ms else 0
    return TrailerBody(
        namespace,
        facts.key,
        facts.sums,
        end,
        options.replicas,
        options.pin,
        options.dtype,
        options.shape,
    )


def _are_plain(values: Sequence[PutFacts]) -> list[bool]:
    """Whether each value is to be a new object in memory. One look at options that many share."""
    plain: list[bool] = []
    seen, is_plain = None, False
    for facts in values:
        if facts.options is not seen:
            seen = facts.options
            is_plain = _is_plain(seen)
        plain.append(is_plain)
    return plain


def _is_plain(options: PutOptions) -> bool:
    try:
        options.check()
    except ValueError:
        return False
    return not (options.overwrite or options.durable)


def new_here(core: PeerCore, digests: Iterable[bytes]) -> set[bytes]:
    """Those of which this peer holds no version, in memory or on its SSD."""
    here, cold = core.segment.digests(), core.cold.store
    new = {digest for digest in digests if digest not in here}
    return new if cold is None else {digest for digest in new if cold.find(digest) is None}


def announce_new(
    core: PeerCore, entries: Sequence[ObjectEntry], now: float, *, are_own: bool = False
) -> None:
    """Tell the others of what was published, of keys of which this peer held nothing. `are_own`: it wrote them."""
    digests = [entry.digest for entry in entries]
    core.objects.announce_withdrawn(now)
    core.gossip.hold_new(packed_locations(entries), now)
    core.operations.tell_waiting(digests, now)
    core.counters["objects_published"] += len(entries)
    if are_own:
        core.proofs.wrote(digests)


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
