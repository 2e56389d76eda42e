"""The core's results as the local socket's messages."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final

from p2pstore.core.core_effects import KnownCopy
from p2pstore.core.operation import PutEnd
from p2pstore.core.peer_core import PeerCore
from p2pstore.errors import (
    DeadlineExceeded,
    ProtocolError,
)
from p2pstore.gossip.homes.directory_mode import kept_name
from p2pstore.gossip.records import PeerRecord, member_of
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.memory.segment import ObjectEntry
from p2pstore.status.traffic import Traffic
from p2pstore.wire import Code, Message, code_of

MAX_WAIT_SECONDS: Final = 24 * 3600.0
"""What a client may have the peer wait at most."""
SIZE_UNIT_BYTES: Final = 4096
"""What a location record counts lengths in."""

Answer = Message | None | Awaitable[Message | None]
"""At once, or something to await."""


def check_batch(items: Sequence[Any]) -> Sequence[Any]:
    """Raise `ProtocolError` for a batch that is too long; else return it."""
    if len(items) > MAX_BATCH:
        raise ProtocolError(f"a batch of {len(items):,} items; at most {MAX_BATCH:,} are allowed")
    return items


def item_error(error: Exception) -> local.ItemError:
    """An error as one item of a batch carries it."""
    return local.ItemError(int(code_of(error)), str(error), getattr(error, "needed", 0))


def no_such_key() -> local.ItemError:
    return local.ItemError(int(Code.NO_SUCH_KEY), "no live peer holds this key")


def failed_put(error: Exception) -> local.PutOutcome:
    return local.PutOutcome(0, 0, 0, 0, 0, item_error(error))


def put_outcome(result: Any) -> local.PutOutcome:
    """A put's end as it travels."""
    if isinstance(result, PutEnd):
        return local.PutOutcome(
            int(result.status),
            result.copies,
            result.wanted,
            result.version.clock,
            result.version.writer,
        )
    return failed_put(result if isinstance(result, Exception) else DeadlineExceeded("cancelled"))


def lease_grant(number: int, entry: ObjectEntry) -> local.LeaseGrant:
    """Where the client finds the object."""
    return local.LeaseGrant(
        number,
        0,
        entry.offset,
        entry.length,
        entry.trailer_length,
        entry.version.clock,
        entry.version.writer,
        entry.version.root,
    )


def known_copy(core: PeerCore, copy: KnownCopy) -> local.Copy:
    """A copy as clients see it."""
    record = copy.record
    return local.Copy(
        copy.peer_id,
        core.name_of(copy.peer_id),
        int(record.tier),
        record.size_units * SIZE_UNIT_BYTES,
        record.version.clock,
        record.version.writer,
        record.soft,
        record.pin,
        copy.local,
        copy.reachable,
    )


def peer_entry(
    record: PeerRecord,
    status: str,
    *,
    me: bool,
    leaving: bool,
    heard_seconds_ago: float,
    traffic: Traffic,
) -> local.PeerEntry:
    """A member as clients see it."""
    round_trip_seconds = traffic.round_trip_seconds(record.peer_id)
    return local.PeerEntry(
        record.peer_id,
        record.name,
        status,
        record.incarnation,
        list(record.control),
        list(record.data),
        record.memory_capacity,
        record.memory_used,
        record.head.count,
        me,
        record.software,
        round(heard_seconds_ago, 3),
        -1.0 if round_trip_seconds is None else round(round_trip_seconds, 6),
        [
            local.TransportUse(
                name,
                use.objects,
                use.bytes,
                use.failures,
                median_microseconds=use.durations.quantile(0.5),
                p99_microseconds=use.durations.quantile(0.99),
            )
            for name, use in sorted(traffic.used(member_of(record.peer_id)).items())
        ],
        kept_name(record.directory),
        record.load_permille,
        record.leaving or leaving,
    )
