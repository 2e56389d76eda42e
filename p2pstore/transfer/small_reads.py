"""Many small objects straight into buffers, by GET_SMALL: packed digests there, packed slots and the values back,
without a message or a trailer for each object. Over any `ByteStream`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_digest

from p2pstore.errors import ProtocolError
from p2pstore.objects import KIB, MIB
from p2pstore.transfer.batch_reads import BATCHES_AHEAD, batch_items
from p2pstore.transfer.data_requests import DataRequests
from p2pstore.transfer.layout import SLOT_BYTES, SlotRows
from p2pstore.transfer.messages import (
    SMALL_OBJECT_BYTES,
    SMALL_VERSION,
    DataKind,
    GetSmall,
    SmallObjects,
)
from p2pstore.wire import HEADER_BYTES, encode_body

BATCH_BYTES: Final = 2 * MIB
"""Of room for objects that one request asks for."""
GROUP_BYTES: Final = 256 * KIB
"""Of objects that are received together."""
_HEAD_BYTES: Final = HEADER_BYTES + len(encode_body(SmallObjects(bytes(SLOT_BYTES))))


async def pull_small(
    connection: DataRequests,
    digests: Sequence[bytes],
    views: Sequence[memoryview],
    lengths: list[int],
    answer_seconds: float = math.inf,
) -> None:
    """Read many objects of 1 byte to 64 KiB into the beginnings of these views, none empty: adds the length of each to
    `lengths`, and -1 where `pull_many` is to say more, which costs nothing but a request. Nothing is known of a view
    whose length is not told. The first answer is to begin within `answer_seconds`. Raises as every operation, for all
    that is left."""
    if connection.version < SMALL_VERSION:
        lengths += [-1] * len(digests)
        return
    inbox = connection.inbox
    with connection.operation():
        asked: deque[tuple[int, slice, bytes]] = deque()
        batches = _batches(views)
        try:
            while batches or asked:
                frames: list[bytes] = []
                while batches and len(asked) < BATCHES_AHEAD:
                    some = batches.popleft()
                    packed = b"".join(digests[some])
                    number, frame = connection.frame(DataKind.GET_SMALL, GetSmall(packed))
                    frames.append(frame)
                    asked.append((number, some, packed))
                if frames:  # together: each would wake the other side
                    await connection.stream.send(*frames)
                number, some, packed = asked.popleft()
                inbox.expect_head(_HEAD_BYTES + SLOT_BYTES * (some.stop - some.start))
                if not lengths:
                    await connection.wait_for_answer(answer_seconds)
                lengths += await _receive(connection, number, packed, views[some])
        finally:
            inbox.expect(0)


def _batches(views: Sequence[memoryview]) -> deque[slice]:
    """Which of them one request asks for: a quarter, so that both sides have work all the time, and not too much."""
    size = batch_items(len(views))
    if size * max(map(len, views), default=0) <= BATCH_BYTES:
        return deque(slice(at, min(at + size, len(views))) for at in range(0, len(views), size))
    batches: deque[slice] = deque()
    first = room_bytes = 0
    for place, view in enumerate(views):
        room_bytes += len(view)
        if place + 1 - first == size or room_bytes >= BATCH_BYTES:
            batches.append(slice(first, place + 1))
            first, room_bytes = place + 1, 0
    if first < len(views):
        batches.append(slice(first, len(views)))
    return batches


async def _receive(
    connection: DataRequests, number: int, digests: bytes, views: Sequence[memoryview]
) -> list[int]:
    """One answer: the lengths, as `pull_small` tells them."""
    answer = await connection.receive(DataKind.GET_SMALL, number, SmallObjects)
    if len(answer.slots) != SLOT_BYTES * len(views):
        raise ProtocolError("the reply to GET_SMALL has another number of slots than digests")
    slots = SlotRows(answer.slots)
    lengths, room = slots.lengths, list(map(len, views))
    if sum(lengths) != connection.bulk_left or max(lengths) > SMALL_OBJECT_BYTES:
        raise ProtocolError("the slots of a reply do not add up to its bulk bytes")
    targets = views if lengths == room else list(map(_room, views, lengths))
    sums = await _receive_values(connection, targets)
    good = slots.are_only_chunks(digests, b"".join(sums))
    if lengths == room and good.all():
        return lengths
    return [
        length if fine and length <= size else -1
        for length, size, fine in zip(lengths, room, good.tolist(), strict=True)
    ]


async def _receive_values(connection: DataRequests, targets: Sequence[memoryview]) -> list[bytes]:
    """The values that come next, and the checksum of each, made of what is still in the cache."""
    sums: list[bytes] = []
    first = 0
    while first < len(targets):
        last, group_bytes = first, 0
        while last < len(targets) and group_bytes < GROUP_BYTES:
            group_bytes += len(targets[last])
            last += 1
        group = targets[first:last]
        await connection.inbox.fill([each for each in group if len(each)])
        connection.bulk_left -= group_bytes
        sums += map(xxh3_64_digest, group)
        first = last
    return sums


def _room(view: memoryview, length: int) -> memoryview:
    """Where a value of another length than the view goes: one that does not fit is not delivered."""
    return view[:length] if length <= len(view) else memoryview(bytearray(length))
