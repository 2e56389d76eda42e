"""Many objects in few GETs, each with a message and a trailer of its own. Over any `ByteStream`.

See `p2pstore.transfer.small_reads` for objects of one chunk that go into buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from p2pstore.errors import P2PStoreError, ProtocolError
from p2pstore.objects import CHUNK_BYTES, chunk_count, chunk_sum
from p2pstore.transfer.arriving import ONLY_READER, Arriving, check_sum
from p2pstore.transfer.data_requests import DataRequests, is_damage
from p2pstore.transfer.get_requests import (
    SMALL_BYTES,
    TRANSPORT_NAME,
    Asked,
    check_reply,
    deliver,
    receive_answer,
    receive_chunks,
)
from p2pstore.transfer.layout import is_only_chunk, slot_version
from p2pstore.transfer.messages import DataKind, Get, GetItem, Keeps, ObjectReply
from p2pstore.transfer.transport import (
    BufferDestination,
    Destination,
    Pulled,
    checked_view,
    watch_of,
)

ItemOutcome = Pulled | int | P2PStoreError | ValueError
"""One item of a batch: pulled, just the length of what was (an object of one chunk that went into a plain buffer), or
why not."""
BatchItem = tuple[bytes, Destination]
"""A digest, and where the object goes."""

MIN_BATCH_ITEMS: Final = 32
MAX_BATCH_ITEMS: Final = 256
"""Objects in one request."""
BATCHES_AHEAD: Final = 2
"""So many are asked for at once: the other side works on one while this side takes in the other."""


def batch_items(count: int) -> int:
    """How many of `count` objects one request asks for: a quarter, so that both sides have work all the time."""
    return max(MIN_BATCH_ITEMS, min(MAX_BATCH_ITEMS, -(-count // 4)))


async def pull_batches(
    connection: DataRequests,
    items: Sequence[BatchItem],
    results: list[ItemOutcome],
    keeps: Keeps,
) -> None:
    """Read these objects; adds to `results` what became of each, in order. What does not fit into an answer with others
    is `PullFailed` (OBJECT_TOO_LARGE). Raises as every operation, for all that is left."""
    size = batch_items(len(items))
    batches = deque(items[at : at + size] for at in range(0, len(items), size))
    under_way: deque[tuple[Asked, Sequence[BatchItem]]] = deque()
    while batches or under_way:
        frames: list[bytes] = []
        while batches and len(under_way) < BATCHES_AHEAD:
            batch = batches.popleft()
            items_asked = tuple([GetItem(digest) for digest, _ in batch])
            get = Get(list(items_asked), keeps=int(keeps))
            number, frame = connection.frame(DataKind.GET, get)
            frames.append(frame)
            under_way.append((Asked(number, items_asked), batch))
        if frames:  # together: each would wake the other side
            await connection.stream.send(*frames)
        asked, batch = under_way.popleft()
        replies = await receive_answer(connection, asked)
        for reply, item, (_, destination) in zip(replies, asked.items, batch, strict=True):
            if 0 < reply.bulk_bytes <= SMALL_BYTES:
                payload = connection.inbox.held(reply.bulk_bytes)
                if payload is None:
                    payload = await connection.inbox.take(reply.bulk_bytes)
                connection.bulk_left -= reply.bulk_bytes
                results.append(_deliver_small(connection, reply, item, destination, payload))
            else:
                results.append(await _receive_item(connection, reply, item, destination))


def _deliver_small(
    connection: DataRequests,
    reply: ObjectReply,
    asked: GetItem,
    destination: Destination,
    payload: memoryview,
) -> ItemOutcome:
    """An item whose payload is here."""
    if (
        type(destination) is BufferDestination
        and not reply.status
        and is_only_chunk(reply.slot, asked.digest, len(payload), chunk_sum(payload))
        and (
            destination.announced is None or destination.announced.allows(slot_version(reply.slot))
        )
        and destination.take_in(payload)
    ):
        return len(payload)
    try:
        slot, trailer = check_reply(reply, asked)
        view = checked_view(destination, slot, trailer)
        deliver(payload, view, trailer, watch_of(destination))
    except (P2PStoreError, ValueError) as error:
        return _outcome_of(connection, error)
    return Pulled(slot, trailer, slot.length, TRANSPORT_NAME)


async def _receive_item(
    connection: DataRequests, reply: ObjectReply, asked: GetItem, destination: Destination
) -> ItemOutcome:
    """An item whose payload is received in place. What does not verify is its result; the next item's bytes follow
    anyway."""
    left_after = connection.bulk_left - reply.bulk_bytes
    try:
        slot, trailer = check_reply(reply, asked)
        view = checked_view(destination, slot, trailer)
        watch = watch_of(destination)
        if watch is None and 0 < slot.length <= CHUNK_BYTES:
            # What keeps account of chunks would take as long as a small one.
            value_sum = await connection.inbox.read_summed(view)
            connection.bulk_left -= slot.length
            check_sum(value_sum, int.from_bytes(trailer.sums, "little"), 0)
        elif slot.length:
            arriving = Arriving(slot, trailer, view, watch)
            run = arriving.claim(ONLY_READER, 0, chunk_count(slot.length))
            await receive_chunks(connection, arriving, ONLY_READER, run)
    except (P2PStoreError, ValueError) as error:
        outcome = _outcome_of(connection, error)
        await connection.inbox.discard(connection.bulk_left - left_after)
        connection.bulk_left = left_after
        return outcome
    return Pulled(slot, trailer, slot.length, TRANSPORT_NAME)


def _outcome_of(
    connection: DataRequests, error: P2PStoreError | ValueError
) -> P2PStoreError | ValueError:
    """An error as one item's result. Raises one that is the whole connection's."""
    if isinstance(error, (ProtocolError, OSError)):
        raise error
    connection.damaged = connection.damaged or is_damage(error)
    return error
