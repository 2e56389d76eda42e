"""Many objects of one chunk straight into buffers, by GET_SMALL: packed digests there, packed slots and the values
back, without a message or a trailer for each object. Over any `ByteStream`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest

from p2pstore.errors import ProtocolError
from p2pstore.memory.segment_layout import SLOT_BYTES, SlotRows, is_only_chunk, slot_version
from p2pstore.objects import KIB, Announced, Version, chunk_sum
from p2pstore.runtime.flow import NO_LIMITS, HolderLimits
from p2pstore.runtime.streams import MAX_GATHER
from p2pstore.transfer.data_messages import (
    MAX_SMALL_BULK_BYTES,
    MAX_SMALL_ITEMS,
    DataKind,
    GetSmall,
    Keeps,
    SmallObjects,
)
from p2pstore.transfer.reading.data_requests import INBOX_BYTES, DataRequests
from p2pstore.transfer.reading.span_reads import MIN_BATCH_ITEMS
from p2pstore.wire import HEADER_BYTES, encode_body

BATCH_BYTES: Final = MAX_SMALL_BULK_BYTES
"""Room for the objects of one request: the most that is answered at once."""
GROUP_BYTES: Final = 256 * KIB
"""Of objects that are received together."""
PARTS_TOGETHER: Final = 2
"""Requests in one send: each may have to wake the other side, which takes 50 us."""
MAX_ITEMS: Final = min(MAX_SMALL_ITEMS, MAX_GATHER - 1)
"""Of a request, so that its answer can be sent with one call: a head and as many values."""
PARTS_AHEAD: Final = 3
"""Requests that are kept under way."""
_HEAD_BYTES: Final = HEADER_BYTES + len(encode_body(SmallObjects(bytes(SLOT_BYTES))))


class Part(NamedTuple):
    """The objects of one request: digests, and a view for each value, none empty and none of more than `most_bytes`.
    `versions` are those that were announced, one a digest; without them, the holder is known to have written all."""

    digests: Sequence[bytes]
    views: Sequence[memoryview]
    most_bytes: int
    versions: Sequence[Version] = ()


def in_parts(wanted: Part, most_items: int = 0) -> list[Part]:
    """The part of each request, of up to `most_items`; 0: a third, so that both sides have work all the time."""
    digests, views, most_bytes, versions = wanted
    third = max(MIN_BATCH_ITEMS, min(MAX_ITEMS, -(-len(views) // 3)))
    slices = _part_slices(views, most_bytes, most_items or third)
    return [Part(digests[some], views[some], most_bytes, versions[some]) for some in slices]


async def pull_small(
    connection: DataRequests,
    parts: Sequence[Part],
    lengths: list[int],
    limits: HolderLimits = NO_LIMITS,
    keeps: Keeps = Keeps.NO,
    announced: Announced | None = None,
) -> None:
    """Read many objects of 1 byte to one chunk into the beginnings of their views: adds the length of each to
    `lengths`, in the order of the parts, and -1 where `pull_many` is to say more, which costs nothing but a request.
    A view whose length is not told is undefined. `limits` and `keeps` as for `pull_many`; a version that is not
    `announced` counts as not there. Raises as every operation, for all that is left."""
    left, inbox = deque(parts), connection.inbox
    with connection.operation(limits):
        asked: deque[tuple[int, GetSmall, Part]] = deque()
        try:
            while left or asked:
                while left and len(asked) < PARTS_AHEAD:
                    frames: list[bytes] = []
                    for part in [left.popleft() for _ in range(min(PARTS_TOGETHER, len(left)))]:
                        request = GetSmall(b"".join(part.digests), part.most_bytes, int(keeps))
                        number, frame = connection.frame(DataKind.GET_SMALL, request)
                        frames.append(frame)
                        asked.append((number, request, part))
                    await connection.stream.send(*frames)
                number, request, part = asked.popleft()
                head_bytes = _HEAD_BYTES + SLOT_BYTES * len(part.views)
                inbox.expect_head(head_bytes, part.most_bytes)
                writer = None if announced is None else announced.writer
                lengths += await _receive(connection, number, request, part, writer)
        finally:
            inbox.expect(0)


async def pull_one(
    connection: DataRequests,
    digest: bytes,
    view: memoryview,
    limits: HolderLimits,
    keeps: Keeps,
    announced: Announced | None,
) -> int:
    """`pull_small` of one object, in as few steps as possible: the columns of one row take 10 us more."""
    inbox, most_bytes = connection.inbox, len(view)
    with connection.operation(limits):
        inbox.expect(most_bytes)
        request = GetSmall(digest, most_bytes, int(keeps))
        number, frame = connection.frame(DataKind.GET_SMALL, request)
        await connection.stream.send(frame)
        slot = (await connection.receive(DataKind.GET_SMALL, number, SmallObjects)).slots
        length = connection.bulk_left
        if not length:
            return -1
        if len(slot) != SLOT_BYTES or length > most_bytes:
            raise ProtocolError("the reply to GET_SMALL has other objects than were asked for")
        target = view[:length]
        if length >= INBOX_BYTES:
            payload = target
            payload_sum = await inbox.read_summed(target, soon=True)
        else:
            payload = await inbox.take(length)
            payload_sum = chunk_sum(payload)
        connection.bulk_left = 0
        if not is_only_chunk(slot, digest, length, payload_sum):
            return -1
        if announced is not None and not announced.allows(slot_version(slot)):
            return -1
        if payload is not target:
            target[:] = payload
        return length


def _part_slices(views: Sequence[memoryview], most_bytes: int, size: int) -> list[slice]:
    """Which of them one request asks for: `size`, but not too much. No view has more than `most_bytes`."""
    if size * most_bytes <= BATCH_BYTES:
        return [slice(at, min(at + size, len(views))) for at in range(0, len(views), size)]
    slices: list[slice] = []
    first = room_bytes = 0
    for place, view in enumerate(views):
        if place > first and (place - first == size or room_bytes + len(view) > BATCH_BYTES):
            slices.append(slice(first, place))
            first, room_bytes = place, 0
        room_bytes += len(view)
    if views:
        slices.append(slice(first, len(views)))
    return slices


async def _receive(
    connection: DataRequests, number: int, asked: GetSmall, part: Part, writer: int | None
) -> list[int]:
    """One answer: the lengths, as `pull_small` tells them. `writer`: the holder's hash, when the writers of the values
    matter."""
    views = part.views
    answer = await connection.receive(DataKind.GET_SMALL, number, SmallObjects)
    if len(answer.slots) != SLOT_BYTES * len(views):
        raise ProtocolError("the reply to GET_SMALL has another number of slots than digests")
    slots = SlotRows(answer.slots)
    lengths, room = slots.column("length"), list(map(len, views))
    in_all = sum(lengths)
    if (
        in_all != connection.bulk_left
        or in_all > MAX_SMALL_BULK_BYTES
        or max(lengths) > asked.most_bytes
    ):
        raise ProtocolError("a reply's slots do not add up to its bulk, or to more than was asked for")
    targets = views if lengths == room else list(map(_room, views, lengths))
    sums = await _receive_values(connection, targets, lengths)
    good = slots.are_only_chunks(asked.digests, b"".join(sums))
    if writer is not None:
        good &= slots.are_announced(writer, part.versions)
    if lengths == room and good.all():
        return lengths
    return [
        length if fine and length <= size else -1
        for length, size, fine in zip(lengths, room, good.tolist(), strict=True)
    ]


async def _receive_values(
    connection: DataRequests, targets: Sequence[memoryview], lengths: Sequence[int]
) -> list[bytes]:
    """The values that come next, which have these lengths, and the checksum of each, made of what is still in the
    cache."""
    sums: list[bytes] = []
    ends = list(accumulate(lengths))
    first = start = 0
    while first < len(targets):
        if lengths[first] >= INBOX_BYTES:
            value_sum = await connection.inbox.read_summed(targets[first])
            connection.bulk_left -= lengths[first]
            sums.append(value_sum.to_bytes(8, "big"))  # as xxh3_64_digest has it
            first, start = first + 1, ends[first]
            continue
        last = min(bisect_left(ends, start + GROUP_BYTES) + 1, len(targets))
        group, length_bytes = targets[first:last], ends[last - 1] - start
        filled = group if all(lengths[first:last]) else [each for each in group if len(each)]
        connection.inbox.expect(0)  # small ones may come along with each other again
        await connection.inbox.fill(filled, length_bytes)
        connection.bulk_left -= length_bytes
        sums += map(xxh3_64_digest, group)
        first, start = last, ends[last - 1]
    return sums


def _room(view: memoryview, length: int) -> memoryview:
    """Where a value of another length than the view goes: one that does not fit is not delivered."""
    return view[:length] if length <= len(view) else memoryview(bytearray(length))
