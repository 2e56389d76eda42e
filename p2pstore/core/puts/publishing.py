"""Publishing values of new keys as a batch: nearly all puts of inference engines.

One look at the index, the SSD, the floors and the table of locations splits a batch. Values of new keys are published
as one, under one stamp; values of other keys are decided one by one (`put_operation`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, count, groupby, repeat
from operator import attrgetter
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
"""Values, at some 3 us each."""

_version: Final = partial(tuple.__new__, Version)
"""Of clock, writer and root; the constructor takes twice as long."""
_RESERVATION: Final = attrgetter("reservation")
_KEY: Final = attrgetter("key")
_DIGEST: Final = attrgetter("digest")
_LENGTH: Final = attrgetter("length")
_SUMS: Final = attrgetter("sums")
_ROOT: Final = attrgetter("root")
_OPTIONS: Final = attrgetter("options")
_FOLLOWS: Final = attrgetter("follows")


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
    new = new_here(core, map(_DIGEST, values))
    new -= core.gossip.directory.mentioned(new)
    new -= core.gossip.cluster_records.floors.forbidden(new, core.namespace_digest(namespace), version)
    wanted = [is_plain and facts.digest in new for is_plain, facts in zip(plain, values, strict=True)]
    written = _written(list(compress(values, wanted)), version, namespace, unix)
    keep = core.books.keep
    entries = core.segment.commit_new(written, session=session, now=unix, keep=keep)
    published = list(filter(None, entries))
    keep(partial(announce_new, core, published, now, are_own=True))
    to_copy = [entry for entry in published if entry.replicas > 1]
    copying = ReplicateTogether(core, to_copy) if to_copy else None
    alone = PutEnd(PutStatus.CREATED, 1, 1, version)
    if copying is None and len(published) == len(values):  # nearly always
        return [alone] * len(values)
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


def _written(values: Sequence[PutFacts], stamp: Version, namespace: str, unix: float) -> list[Written]:
    roots, clocks, writers = map(_ROOT, values), repeat(stamp.clock), repeat(stamp.writer)
    versions = map(_version, zip(clocks, writers, roots, strict=False))
    trailers = _trailers_of(values, namespace, unix)
    places, digests, lengths = map(_RESERVATION, values), map(_DIGEST, values), map(_LENGTH, values)
    return list(map(Written, places, digests, versions, trailers, lengths, map(_FOLLOWS, values)))


def trailer_of(facts: PutFacts, namespace: str, unix: float) -> TrailerBody:
    """The object's trailer when it is put at this wall-clock time."""
    return _trailers_of([facts], namespace, unix)[0]


def _trailers_of(values: Iterable[PutFacts], namespace: str, unix: float) -> list[TrailerBody]:
    """The trailer of each; most have the same options."""
    trailers: list[TrailerBody] = []
    for options, some in groupby(values, _OPTIONS):
        alike = list(some)
        end = int((unix + options.ttl_ms / 1000) * 1000) if options.ttl_ms else 0
        rest = end, options.replicas, options.pin, options.dtype, options.shape
        named = repeat(namespace), map(_KEY, alike), map(_SUMS, alike)
        trailers += map(TrailerBody, *named, *map(repeat, rest))
    return trailers


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
    new = set(digests)
    if not here.isdisjoint(new):
        new = {digest for digest in new if digest not in here}
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
    core: PeerCore,
    rooms: Iterable[tuple[int, int, int]],
    *,
    session: Hashable,
    namespace: str,
    now: float,
) -> Steps[list[Reserved]]:
    """Room for each value, or why there is none. `rooms`: length, trailer length, and how many are alike. Closing the
    steps gives all back."""
    made: list[Reserved] = []
    step_ends = RESERVED_PER_STEP
    try:
        for length, trailer_length, left in rooms:
            while left:
                if len(made) >= step_ends:
                    yield
                    step_ends = len(made) + RESERVED_PER_STEP
                size, wanted = (length, trailer_length), min(left, step_ends - len(made))
                free = core.segment.reserve_free(*size, wanted, session=session, namespace=namespace)
                made += free
                left -= len(free)
                if len(free) == wanted:
                    continue
                try:
                    check_object_length(length)
                    reservation = yield from core.objects.reserve(
                        *size, session=session, namespace=namespace, now=now, alike=left
                    )
                    made.append(reservation)
                except (P2PStoreError, ValueError) as error:
                    made.append(error)
                left -= 1
                step_ends = len(made)
    except BaseException:  # the caller never learns of these reservations
        for each in made:
            if isinstance(each, Reservation):
                with suppress(ValueError):  # its session may have ended meanwhile
                    core.segment.abort(each.number, session=session)
        raise
    return made
