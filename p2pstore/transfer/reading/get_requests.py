"""GET on a data connection: what was asked for, what came, and what it means. Over any `ByteStream`."""

from __future__ import annotations

from typing import Final, NamedTuple

from p2pstore.errors import ProtocolError
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import CHUNK_BYTES, KIB, MAX_OBJECT_BYTES, chunk_count
from p2pstore.runtime.flow import Outrun
from p2pstore.transfer.data_messages import (
    DataKind,
    Get,
    GetItem,
    Keeps,
    ObjectReply,
    Objects,
    ObjectStatus,
)
from p2pstore.transfer.failover import TooSlow
from p2pstore.transfer.reading.data_requests import DataRequests
from p2pstore.transfer.transport import PullFailed, check_object
from p2pstore.wire import Code, code_of

SMALL_BYTES: Final = 64 * KIB
"""Payloads that are checked before they are copied to where they belong: a batch of them takes few receives."""
TRANSPORT_NAME: Final = "tcp"


class Asked(NamedTuple):
    """A GET under way: its request id and what was asked for."""

    request_id: int
    items: tuple[GetItem, ...]


async def ask(
    connection: DataRequests,
    items: tuple[GetItem, ...],
    *,
    may_refuse: bool = False,
    keeps: Keeps = Keeps.NO,
) -> Asked:
    """Send a GET; see `Get` for what it may say."""
    get = Get(list(items), may_refuse, int(keeps))
    return Asked(await connection.send(DataKind.GET, get), items)


async def receive_answer(connection: DataRequests, asked: Asked) -> list[ObjectReply]:
    """What is said of each item. Their bytes come next, one item's after the other's, all bulk there is. Raises
    `ProtocolError` when these do not add up."""
    objects = await connection.receive(DataKind.GET, asked.request_id, Objects)
    if len(objects.items) != len(asked.items):
        raise ProtocolError("the reply to GET has another number of items than the request")
    bulk_left = connection.bulk_left
    for item in objects.items:
        if not 0 <= item.bulk_bytes <= bulk_left:
            raise ProtocolError("the items of a reply do not add up to its bulk bytes")
        bulk_left -= item.bulk_bytes
    if bulk_left:
        raise ProtocolError("the items of a reply do not add up to its bulk bytes")
    return objects.items


def check_reply(reply: ObjectReply, asked: GetItem) -> tuple[Slot, TrailerBody]:
    """Slot and trailer of an answer that claims to have the object, verified. Raises `PullFailed`."""
    if reply.status:
        raise refusal(reply)
    slot, trailer = check_object(reply.slot, reply.trailer, asked.digest)
    if slot.length > MAX_OBJECT_BYTES:
        raise PullFailed(Code.OBJECT_TOO_LARGE, "the holder claims an object above 4 GiB")
    last_chunk = chunk_count(slot.length)
    if asked.chunk_count:
        last_chunk = min(last_chunk, asked.first_chunk + asked.chunk_count)
    end = min(slot.length, last_chunk * CHUNK_BYTES)
    if reply.bulk_bytes != max(0, end - asked.first_chunk * CHUNK_BYTES):
        raise PullFailed(Code.MALFORMED, "the holder sent another range than it was asked for")
    return slot, trailer


def refusal(reply: ObjectReply) -> PullFailed:
    """Why the holder did not send the object."""
    if reply.status == ObjectStatus.NOT_FOUND:
        return PullFailed(
            Code.NO_SUCH_KEY,
            "the holder does not have the object any more",
            incarnation=reply.incarnation,
            sequence=reply.sequence,
        )
    if reply.status == ObjectStatus.BUSY and reply.keep:
        text = "others read it, too: the local peer is to bring it, and keep it"
        if reply.others:
            text = "others read it, too, and send it on"
        return PullFailed(Code.BUSY, text, keep=True, others=reply.others)
    if reply.status == ObjectStatus.BUSY:
        return PullFailed(
            Code.BUSY,
            "the holder has much to send already, or cannot bring it from its SSD: that does not answer, or memory is "
            "full of pins and leases",
        )
    if reply.status == ObjectStatus.TOO_LARGE:
        return PullFailed(Code.OBJECT_TOO_LARGE, "the object did not fit into the reply")
    return PullFailed(Code.UNSUPPORTED, f"the holder answered with status {reply.status}")


def failure_of(error: Exception) -> PullFailed:
    """A broken connection as the failure of a pull; another transport may still get there."""
    if isinstance(error, PullFailed):
        return error
    if isinstance(error, Outrun):
        return TooSlow(str(error))
    code = code_of(error)
    if isinstance(error, OSError) and code is Code.INTERNAL:
        code = Code.UNAVAILABLE
    return PullFailed(code, str(error), retriable=True)
