"""The connecting side of a data connection: hello, requests, verified pulls, stores. Over any
`ByteStream`.

Bytes are received straight into the destination and each 1 MiB chunk is checked as soon as it is
there, while it is still in the cache: checking after the fact would cost a quarter of the throughput.
One task or thread uses a connection at a time (`p2pstore.transfer.data_pool` sees to that). When an
operation ends in the middle of a reply, by error or cancellation, the connection is closed: what was still on its
way would be taken for the next reply.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from xxhash import xxh3_64_digest

from p2pstore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    P2PStoreError,
    ProtocolError,
    ProtocolMismatch,
)
from p2pstore.objects import (
    CHUNK_BYTES,
    KIB,
    MAX_OBJECT_BYTES,
    MIB,
    chunk_count,
    chunk_sum,
)
from p2pstore.streams import ByteStream
from p2pstore.transfer.arriving import ONLY_READER, PART_CHUNKS, Arriving
from p2pstore.transfer.failover import AnotherVersion
from p2pstore.transfer.inbox import INBOX_BYTES, Inbox
from p2pstore.transfer.layout import (
    SLOT_BYTES,
    Slot,
    SlotRows,
    TrailerBody,
    decode_slot,
    is_only_chunk,
)
from p2pstore.transfer.messages import (
    MAX_DATA_VERSION,
    MIN_DATA_VERSION,
    REPLIES,
    SMALL_OBJECT_BYTES,
    SMALL_VERSION,
    STORE_VERSION,
    DataKind,
    Get,
    GetItem,
    GetPiece,
    GetSmall,
    Hello,
    HelloReply,
    Keeps,
    Measure,
    Measured,
    ObjectReply,
    Objects,
    ObjectStatus,
    PieceReply,
    PieceStatus,
    PieceTaken,
    Proof,
    SmallObjects,
    Store,
    Stored,
    StorePart,
    StoreReply,
    SwarmLink,
)
from p2pstore.transfer.tickets import NONCE_BYTES, GrantedTicket, check_proof, prove
from p2pstore.transfer.trace import Progress, ReadWatch
from p2pstore.transfer.transport import (
    BufferDestination,
    Destination,
    Pulled,
    PullFailed,
    ResumableDestination,
    check_object,
    checked_view,
    resume,
    verify_chunk,
    watch_of,
)
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    DATA_REQUEST_LIMITS,
    ERROR,
    HEADER,
    HEADER_BYTES,
    ONE_WAY,
    PREFACE_DATA,
    REPLY,
    Code,
    Failure,
    FrameHeader,
    Message,
    code_of,
    decode_body,
    decode_header,
    encode_body,
    encode_frame,
    error_of,
    negotiate_version,
)

R = TypeVar("R", bound=Message)
ItemOutcome = Pulled | int | P2PStoreError | ValueError
"""One item of a batch: pulled, just the length of what was (an object of one chunk that went into a plain buffer), or
why not."""

_GET: Final = int(DataKind.GET)
MAX_HELD_BODY_BYTES: Final = 64 * KIB
"""Of an answer about one object."""
NO_CHUNK: Final = MAX_OBJECT_BYTES // CHUNK_BYTES
"""Beyond the end of any object: asks for its slot and trailer alone."""
SMALL_BYTES: Final = 64 * KIB
"""Payloads that are checked before they are copied to where they belong: a batch of them takes few receives."""
MIN_BATCH_ITEMS: Final = 16
MAX_BATCH_ITEMS: Final = 256
"""Objects in one GET of `pull_many`."""
BATCHES_AHEAD: Final = 2
"""So many are asked for at once: the other side works on one while this side takes in the other."""
SMALL_BATCH_BYTES: Final = 2 * MIB
"""Of room for objects that one GET_SMALL asks for."""
SMALL_GROUP_BYTES: Final = 256 * KIB
"""Of small objects that are received together."""
_SMALL_HEAD_BYTES: Final = HEADER_BYTES + len(encode_body(SmallObjects(bytes(SLOT_BYTES))))
DISCARD_BYTES: Final = MIB
"""Bytes nobody wants that are read to keep a connection; for more, a new connection is cheaper."""
WAKE_BYTES: Final = 512 * KIB
"""Of a piece of a checkpoint that are waited for at once."""
STORE_PART_BYTES: Final = DATA_REQUEST_LIMITS.bulk_bytes
TRANSPORT_NAME: Final = "tcp"
_NO_BULK: Final = memoryview(b"")


class _Expected(NamedTuple):
    """A GET under way: its request id and what was asked for."""

    request_id: int
    items: tuple[GetItem, ...]


class DataConnection:
    """An authenticated connection to another peer. Make one with `DataConnection.open`.

    Every method raises `OSError` when the connection breaks, `DeadlineExceeded` when nothing moves for
    `stream.progress_seconds` and `ProtocolError` when the other side talks nonsense; the connection is
    closed then.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.incarnation = 0
        self.version = MIN_DATA_VERSION
        self.closed = False
        self.abandoned = False
        self._inbox = Inbox(stream)
        self._last_request_id = 0
        self._unanswered = 0
        self._bulk_left = 0
        self._damaged = False

    @classmethod
    async def open(
        cls, stream: ByteStream, granted: GrantedTicket, software: str = ""
    ) -> DataConnection:
        """Shake hands over a fresh stream. Raises `AuthenticationFailed` or `ProtocolMismatch`; then, as
        after any error, the stream is closed."""
        connection = cls(stream)
        try:
            await connection._shake_hands(granted, software)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _shake_hands(self, granted: GrantedTicket, software: str) -> None:
        nonce = os.urandom(NONCE_BYTES)
        hello = Hello(MIN_DATA_VERSION, MAX_DATA_VERSION, granted.ticket, nonce, software)
        self._unanswered += 1
        await self.stream.send(PREFACE_DATA + encode_frame(DataKind.HELLO, 0, hello))
        reply = await self._receive(DataKind.HELLO, 0, HelloReply)
        own_versions = MIN_DATA_VERSION, MAX_DATA_VERSION
        self.version = negotiate_version(reply.version, reply.version, own_versions)
        if len(reply.nonce) != NONCE_BYTES or not check_proof(
            granted.secret, b"server", nonce, reply.nonce, reply.proof
        ):
            raise AuthenticationFailed(
                "the other peer did not prove that it holds this cluster's key: something else answers at "
                "its data address, or its cluster key file differs"
            )
        self.incarnation = reply.incarnation
        proof = Proof(prove(granted.secret, b"client", nonce, reply.nonce))
        await self.stream.send(encode_frame(DataKind.PROOF, 0, proof))

    def close(self) -> None:
        """Close at once."""
        self.closed = True
        self.stream.close()

    def abandon(self) -> None:
        """End it under whoever uses it: that fails at once, and is not to be tried again over another connection."""
        self.abandoned = True
        self.stream.abort()

    @property
    def received_any(self) -> bool:
        """Whether any byte came since `start_watching`."""
        return self._inbox.received_any

    def start_watching(self) -> None:
        """Forget what came so far: tells a connection that went stale while idle from one that broke in
        the middle of an answer."""
        self._inbox.received_any = False

    # --- requests ----------------------------------------------------------------------------

    async def request(self, kind: DataKind, message: Message) -> Message:
        """Ask something other than GET. Raises the error that the other side answered."""
        reply, _ = await self.request_bulk(kind, message, 0)
        return reply

    async def request_bulk(
        self, kind: DataKind, message: Message, max_bulk_bytes: int
    ) -> tuple[Message, bytearray]:
        """Like `request`, with the reply's bulk bytes. Raises `ProtocolError` when there are more of them
        than `max_bulk_bytes`."""
        with self._operation():
            request_id = await self._send(kind, message)
            reply: Message = await self._receive(kind, request_id, REPLIES[kind])
            if self._bulk_left > max_bulk_bytes:
                raise ProtocolError(
                    f"the reply to {kind.name} announces {self._bulk_left:,} bytes of bulk; "
                    f"at most {max_bulk_bytes:,} were expected"
                )
            bulk = await self._inbox.read(self._bulk_left)
            self._bulk_left = 0
            return reply, bulk

    async def get_piece(self, request: GetPiece, into: memoryview) -> PieceReply:
        """Ask for a piece of a checkpoint, which fills `into` when the reply's status says that it came."""
        with self._operation():
            self._inbox.expect(len(into))
            number = await self._send(DataKind.GET_PIECE, request)
            reply = await self._receive(DataKind.GET_PIECE, number, PieceReply)
            expected = len(into) if reply.status == PieceStatus.OK else 0
            if self._bulk_left != expected:
                raise ProtocolError(
                    f"a piece of {expected:,} bytes was answered with {self._bulk_left:,}"
                )
            await self._read_slowly(into[:expected])
            self._bulk_left = 0
            if expected:
                await self._say_taken()
            return reply

    async def _read_slowly(self, view: memoryview) -> None:
        """Fill `view` in steps: each packet of a slow link would cost a turn of the event loop otherwise."""
        wake_after = getattr(self.stream, "wake_after", None)
        if wake_after is None:  # blocking sockets wait in the kernel, TLS for its records
            await self._inbox.read_into(view)
            return
        await self._inbox.read_in_steps(view, WAKE_BYTES, wake_after)

    async def _say_taken(self) -> None:
        try:
            await self.stream.send(
                encode_frame(DataKind.PIECE_TAKEN, 0, PieceTaken(), flags=ONE_WAY)
            )
        except OSError:
            self.close()  # the piece is here all the same

    async def become_link(self, request: SwarmLink) -> tuple[ByteStream, bytes]:
        """Have this connection be a link of a swarm: its stream, and what was received of it already. Raises what
        the other side answered; the connection goes on then."""
        await self.request(DataKind.SWARM_LINK, request)
        self.closed = True  # nobody asks anything here any more; the stream is the caller's
        return self.stream, self._inbox.take_rest()

    async def measure(
        self, send: memoryview, receive: memoryview, enough: Callable[[], bool]
    ) -> tuple[int, Measured | None]:
        """Send `send` and have `receive` filled, again and again with one request ahead, until `enough()`:
        the bytes that were moved, and the last answer. Either view may be empty.

        Raises `ProtocolMismatch` for `send` to a peer that takes no bulk, and what the other side answers:
        `P2PStoreError` (UNSUPPORTED) when it is too old to measure.
        """
        if send and self.version < STORE_VERSION:
            raise ProtocolMismatch("the other peer is too old to be sent bytes to measure")
        under_way: deque[int] = deque()
        moved, last = 0, None
        with self._operation():
            while under_way or not enough():
                while len(under_way) < 2 and not enough():
                    request = Measure(len(receive))
                    under_way.append(await self._send(DataKind.MEASURE, request, send))
                if not under_way:
                    break
                last = await self._receive(DataKind.MEASURE, under_way.popleft(), Measured)
                if (self._bulk_left, last.received_bytes) != (len(receive), len(send)):
                    raise ProtocolError(
                        "the other peer measures with other sizes than it was asked"
                    )
                await self._inbox.read_into(receive)
                self._bulk_left = 0
                moved += len(send) + len(receive)
        return moved, last

    async def store(
        self,
        request: Store,
        source: memoryview,
        finish_seconds: float = 0.0,
        progress: Progress | None = None,
    ) -> Stored:
        """Store a value on the other side; `source` is what `request` describes. `finish_seconds` is what
        the other side may need, beyond the usual, once it has all bytes. `progress` hears of each part.

        Raises `CapacityExceeded` or `ObjectTooLarge` when there is no room there, before any byte of the
        value was sent; `ValueError` when `source` changed meanwhile; `ProtocolMismatch` when the other
        side is too old to take values.
        """
        if self.version < STORE_VERSION:
            raise ProtocolMismatch(
                f"the other peer speaks version {self.version} of the data protocol and takes no "
                "values: upgrade it"
            )
        with self._operation():
            number = await self._send(DataKind.STORE, request)
            reply = await self._receive(DataKind.STORE, number, StoreReply)
            if not reply.send:
                return reply.stored
            self._unanswered += 1  # from here on, whatever ends this early must end the connection
            self._last_request_id = number = number % 0xFFFF_FFFF + 1
            try:
                await self._send_parts(number, source, progress)
            except DeadlineExceeded:
                raise
            except OSError:
                with contextlib.suppress(OSError):  # refused on the way: why, may have arrived
                    await self._receive(DataKind.STORE_PART, number, Stored)
                raise
            self.stream.progress_seconds += finish_seconds
            return await self._receive(DataKind.STORE_PART, number, Stored)

    async def _send_parts(self, number: int, source: memoryview, progress: Progress | None) -> None:
        for start in range(0, max(1, len(source)), STORE_PART_BYTES):
            bulk = source[start : start + STORE_PART_BYTES]
            end = start + len(bulk)
            frame = encode_frame(
                DataKind.STORE_PART,
                number,
                StorePart(start),
                flags=ONE_WAY if end < len(source) else 0,
                bulk_length=len(bulk),
            )
            await self.stream.send(frame, bulk)
            if progress is not None:
                progress(end, len(source))

    async def pull(
        self,
        digest: bytes,
        destination: Destination,
        slot_hint: int = 0,
        answer_seconds: float = math.inf,
        expected_bytes: int = 0,
        keeps: Keeps = Keeps.NO,
    ) -> Pulled:
        """Read one object; `expected_bytes` is about its length, where that is known. Raises `PullFailed`, or
        what `destination.prepare` raises, and `DeadlineExceeded` also when the answer does not begin within
        `answer_seconds`. When those are finite, the other side may be too busy for a large object (`PullFailed`,
        BUSY); when the object is kept, or could be, it may also be BUSY because others have it."""
        with self._operation():
            self._inbox.expect(expected_bytes)
            first, count = 0, PART_CHUNKS
            if isinstance(destination, ResumableDestination):
                first, count = destination.wanted_first()
            item = GetItem(digest, first, count, slot_hint)
            expected = await self._send_get(
                (item,), may_refuse=answer_seconds < math.inf, keeps=keeps
            )
            await self._wait_for_answer(answer_seconds)
            return await self._pull(expected, destination)

    async def pull_chunk(
        self,
        digest: bytes,
        view: memoryview,
        slot_hint: int = 0,
        expected_bytes: int = 0,
        keeps: Keeps = Keeps.NO,
    ) -> int:
        """Read an object of at most one chunk into the beginning of `view`, in as few steps as possible: its length.
        -1 when it is longer, or longer than `view`, or empty: then `pull` has to do it. Raises as `pull`."""
        if self.closed:
            raise ConnectionResetError("the connection is closed")
        self._inbox.expect(expected_bytes)
        try:
            length = await self._pull_chunk(digest, view, slot_hint, keeps)
        except PullFailed as failure:
            if self.in_the_middle or is_damage(failure):
                self.close()
            raise
        except BaseException:
            self.close()
            raise
        if self.in_the_middle or self.abandoned:
            self.close()
        return length

    async def _pull_chunk(
        self, digest: bytes, view: memoryview, slot_hint: int, keeps: Keeps
    ) -> int:
        items = [GetItem(digest, 0, 1, slot_hint)]
        number, frame = self._frame(DataKind.GET, Get(items, False, int(keeps)))
        await self.stream.send(frame)
        reply = await self._receive_only(number, items)
        size = self._bulk_left
        if reply.status:
            raise _refusal(reply)
        if reply.bulk_bytes != size or not 0 < size <= min(len(view), CHUNK_BYTES):
            await self._discard_small(size)
            return -1
        target = view[:size]
        if size >= INBOX_BYTES:
            payload = target
            payload_sum = await self._inbox.read_summed(target)
        else:
            payload = self._inbox.held(size) or await self._inbox.take(size)
            payload_sum = chunk_sum(payload)
        self._bulk_left = 0
        if not is_only_chunk(reply.slot, digest, size, payload_sum):
            slot = decode_slot(reply.slot)
            if slot is not None and slot.length > size:
                return -1
            raise PullFailed(Code.STALE, "the object arrived damaged; nothing was delivered")
        if payload is not target:
            target[:] = payload
        return size

    async def _receive_only(self, number: int, items: list[GetItem]) -> ObjectReply:
        """The head of the answer to a GET of one item."""
        inbox = self._inbox
        head = inbox.held(HEADER_BYTES) or await inbox.take(HEADER_BYTES, soon=True)
        kind, flags, request_id, body_length, bulk_length = HEADER.unpack(head)
        if (kind, flags, request_id) != (_GET, REPLY, number) or not (
            body_length <= MAX_HELD_BODY_BYTES and bulk_length <= CHUNK_BYTES
        ):
            inbox.put_back(HEADER_BYTES)  # somebody else knows what that means
            (reply,) = await self._receive_objects(_Expected(number, tuple(items)))
            return reply
        body = inbox.held(body_length) or await inbox.take(body_length)
        self._unanswered -= 1
        self._bulk_left = bulk_length
        replies = decode_body(Objects, body).items
        if len(replies) != 1:
            raise ProtocolError("the reply to GET has another number of items than the request")
        return replies[0]

    async def look(
        self, digest: bytes, slot_hint: int = 0, answer_seconds: float = math.inf
    ) -> tuple[Slot, TrailerBody]:
        """An object's slot and trailer, verified, and none of its bytes. Raises like `pull`."""
        with self._operation():
            expected = await self._send_get((GetItem(digest, NO_CHUNK, 0, slot_hint),))
            await self._wait_for_answer(answer_seconds)
            (reply,) = await self._receive_objects(expected)
            return self._check_reply(reply, expected.items[0])

    async def _wait_for_answer(self, seconds: float) -> None:
        """Wait until the reply begins, where that is not to take as long as other progress may."""
        if seconds < self.stream.progress_seconds:
            self.stream.receive_seconds = seconds
            try:
                await self._inbox.wait_for_more()
            finally:
                self.stream.receive_seconds = None

    async def pull_many(
        self,
        items: Sequence[tuple[bytes, Destination]],
        answer_seconds: float = math.inf,
        keeps: Keeps = Keeps.NO,
    ) -> list[ItemOutcome]:
        """Read many objects, small ones together in few frames: per item what was pulled, or why not.

        An item's own failure, and what its `destination.prepare` raises, is that item's result. When the
        connection fails on the way, what was pulled before stands and the rest is `PullFailed`; raises
        only when nothing was pulled. `answer_seconds` and `keeps` as for `pull`.
        """
        results: list[ItemOutcome] = []
        with self._operation():
            self._inbox.expect(0)
            try:
                await self._pull_batches(items, results, answer_seconds, keeps)
            except (OSError, ProtocolError, PullFailed) as error:
                if not results:
                    raise
                self.close()
                failure = failure_of(error)
                results += [failure] * (len(items) - len(results))
            else:
                await self._pull_large(items, results, keeps)
        return results

    async def _pull_batches(
        self,
        items: Sequence[tuple[bytes, Destination]],
        results: list[ItemOutcome],
        answer_seconds: float,
        keeps: Keeps,
    ) -> None:
        size = _batch_items(len(items))
        batches = deque(items[at : at + size] for at in range(0, len(items), size))
        under_way: deque[tuple[_Expected, Sequence[tuple[bytes, Destination]]]] = deque()
        while batches or under_way:
            frames: list[bytes] = []
            while batches and len(under_way) < BATCHES_AHEAD:
                batch = batches.popleft()
                items_asked = tuple([GetItem(digest) for digest, _ in batch])
                get = Get(list(items_asked), keeps=int(keeps))
                number, frame = self._frame(DataKind.GET, get)
                frames.append(frame)
                under_way.append((_Expected(number, items_asked), batch))
            if frames:  # together: each would wake the other side
                await self.stream.send(*frames)
            if not results:
                await self._wait_for_answer(answer_seconds)
            expected, batch = under_way.popleft()
            objects = await self._receive_objects(expected)
            for reply, item, (_, destination) in zip(objects, expected.items, batch, strict=True):
                if 0 < reply.bulk_bytes <= SMALL_BYTES:
                    payload = self._inbox.held(reply.bulk_bytes)
                    if payload is None:
                        payload = await self._inbox.take(reply.bulk_bytes)
                    self._bulk_left -= reply.bulk_bytes
                    results.append(self._deliver_small(reply, item, destination, payload))
                else:
                    results.append(await self._receive_item(reply, item, destination))

    async def pull_small(
        self,
        digests: Sequence[bytes],
        views: Sequence[memoryview],
        lengths: list[int],
        answer_seconds: float = math.inf,
    ) -> None:
        """Read many objects of 1 byte to 64 KiB into the beginnings of these views: adds the length of each to
        `lengths`, and -1 where `pull_many` is to say more, which costs nothing but a request. Nothing is known of a
        view whose length is not told. Raises as `pull`, for all that is left."""
        if self.version < SMALL_VERSION:
            lengths += [-1] * len(digests)
            return
        with self._operation():
            asked: deque[tuple[int, slice, bytes]] = deque()
            batches = _small_batches(views)
            try:
                while batches or asked:
                    frames: list[bytes] = []
                    while batches and len(asked) < BATCHES_AHEAD:
                        some = batches.popleft()
                        packed = b"".join(digests[some])
                        number, frame = self._frame(DataKind.GET_SMALL, GetSmall(packed))
                        frames.append(frame)
                        asked.append((number, some, packed))
                    if frames:  # together: each would wake the other side
                        await self.stream.send(*frames)
                    number, some, packed = asked.popleft()
                    self._inbox.expect_head(
                        _SMALL_HEAD_BYTES + SLOT_BYTES * (some.stop - some.start)
                    )
                    if not lengths:
                        await self._wait_for_answer(answer_seconds)
                    lengths += await self._receive_small(number, packed, views[some])
            finally:
                self._inbox.expect(0)

    async def _receive_small(
        self, number: int, digests: bytes, views: Sequence[memoryview]
    ) -> list[int]:
        answer = await self._receive(DataKind.GET_SMALL, number, SmallObjects)
        if len(answer.slots) != SLOT_BYTES * len(views):
            raise ProtocolError("the reply to GET_SMALL has another number of slots than digests")
        slots = SlotRows(answer.slots)
        lengths, room = slots.lengths, list(map(len, views))
        if sum(lengths) != self._bulk_left or max(lengths) > SMALL_OBJECT_BYTES:
            raise ProtocolError("the slots of a reply do not add up to its bulk bytes")
        targets = views if lengths == room else list(map(_room, views, lengths))
        sums: list[bytes] = []
        first = 0
        while first < len(targets):  # sums are made of what is still in the cache
            last, group_bytes = first, 0
            while last < len(targets) and group_bytes < SMALL_GROUP_BYTES:
                group_bytes += lengths[last]
                last += 1
            group = targets[first:last]
            await self._inbox.fill([each for each in group if len(each)])
            self._bulk_left -= group_bytes
            sums += map(xxh3_64_digest, group)
            first = last
        good = slots.are_only_chunks(digests, b"".join(sums))
        if lengths == room and good.all():
            return lengths
        return [
            length if fine and length <= size else -1
            for length, size, fine in zip(lengths, room, good.tolist(), strict=True)
        ]

    # --- pulls -------------------------------------------------------------------------------

    async def _pull_large(
        self,
        items: Sequence[tuple[bytes, Destination]],
        results: list[ItemOutcome],
        keeps: Keeps,
    ) -> None:
        """Read the items that did not fit into a reply with others, one after the other."""
        for index, result in enumerate(results):
            if not (isinstance(result, PullFailed) and result.code is Code.OBJECT_TOO_LARGE):
                continue
            digest, destination = items[index]
            if self.in_the_middle:
                text = "the connection ended with an item before this one"
                results[index] = PullFailed(Code.UNAVAILABLE, text, retriable=True)
                continue
            try:
                expected = await self._send_get((GetItem(digest, 0, PART_CHUNKS),), keeps=keeps)
                results[index] = await self._pull(expected, destination)
            except (OSError, ProtocolError, PullFailed) as error:
                self._damaged = self._damaged or is_damage(error)
                results[index] = failure_of(error)
            except (P2PStoreError, ValueError) as error:
                results[index] = error

    async def _pull(self, expected: _Expected, destination: Destination) -> Pulled:
        (reply,) = await self._receive_objects(expected)
        asked = expected.items[0]
        try:
            slot, trailer = self._check_reply(reply, asked)
            if slot.length <= CHUNK_BYTES:
                view = checked_view(destination, slot, trailer)
            else:
                arriving = resume(destination, slot, trailer)
        except (P2PStoreError, ValueError):
            await self._discard_small(reply.bulk_bytes)
            raise
        if slot.length > CHUNK_BYTES:
            try:
                run = arriving.claim(ONLY_READER, asked.first_chunk, asked.chunk_count)
                if isinstance(destination, ResumableDestination):
                    destination.when_begun(arriving)
                await self._receive_runs(asked.digest, arriving, ONLY_READER, run)
            finally:
                arriving.leave()
        elif reply.bulk_bytes:
            await self._receive_only_chunk(view, trailer, watch_of(destination))
        elif slot.length:  # chunks were asked for that a longer version had
            again = await self._send_get((GetItem(asked.digest, 0, PART_CHUNKS),))
            return await self._pull(again, destination)
        return Pulled(slot, trailer, slot.length, TRANSPORT_NAME)

    async def _receive_only_chunk(
        self, view: memoryview, trailer: TrailerBody, watch: ReadWatch | None
    ) -> None:
        """A value of one chunk: a small one is checked where it arrived, and copied then."""
        if len(view) <= SMALL_BYTES:
            payload = await self._inbox.take(len(view))
            self._bulk_left = 0
            _deliver(payload, view, trailer, watch)
            return
        await self._inbox.read_into(view)
        self._bulk_left = 0
        verify_chunk(view, int.from_bytes(trailer.sums, "little"), 0, watch)
        if watch is not None:
            watch.advanced(len(view), len(view))

    async def pull_slices(
        self,
        digest: bytes,
        arriving: Arriving,
        reader: int,
        slot_hint: int = 0,
        answer_seconds: float = math.inf,
    ) -> None:
        """Bring chunks of a value that others read as well, until none are free. Raises as `pull`, and
        `AnotherVersion` when this holder has another one."""
        with self._operation():
            run = arriving.take(reader)
            if not run:
                return
            try:
                expected = await self._ask_for(
                    digest, run, slot_hint, may_refuse=answer_seconds < math.inf
                )
                await self._wait_for_answer(answer_seconds)
                await self._receive_reply(arriving, expected)
                await self._receive_runs(digest, arriving, reader, run)
            finally:
                arriving.leave(reader)

    async def _receive_runs(
        self, digest: bytes, arriving: Arriving, reader: int, run: range
    ) -> None:
        """Receive chunks whose bytes come next, and what is free after them."""
        while True:
            # The next run is asked for before this one ends, so that the pipe stays full.
            ahead_at = max(run.start, run.stop - arriving.sharing.ahead_chunks)
            await self._receive_chunks(arriving, reader, range(run.start, ahead_at))
            following = arriving.take(reader)
            if following:
                expected = await self._ask_for(digest, following)
            await self._receive_chunks(arriving, reader, range(ahead_at, run.stop))
            if not following:
                return
            await self._receive_reply(arriving, expected)
            run = following

    async def _ask_for(
        self, digest: bytes, run: range, slot_hint: int = 0, *, may_refuse: bool = False
    ) -> _Expected:
        self._inbox.expect(len(run) * CHUNK_BYTES)
        item = GetItem(digest, run.start, len(run), slot_hint)
        return await self._send_get((item,), may_refuse=may_refuse)

    async def _receive_reply(self, arriving: Arriving, expected: _Expected) -> None:
        """The head of an answer whose chunks belong to a value that is known already."""
        (reply,) = await self._receive_objects(expected)
        if not arriving.is_of(*self._check_reply(reply, expected.items[0])):
            raise AnotherVersion()

    def _deliver_small(
        self, reply: ObjectReply, asked: GetItem, destination: Destination, payload: memoryview
    ) -> ItemOutcome:
        """An item of a batch whose payload is here."""
        if (
            type(destination) is BufferDestination
            and not reply.status
            and is_only_chunk(reply.slot, asked.digest, len(payload), chunk_sum(payload))
            and destination.take_in(payload)
        ):
            return len(payload)
        try:
            slot, trailer = self._check_reply(reply, asked)
            view = checked_view(destination, slot, trailer)
            _deliver(payload, view, trailer, watch_of(destination))
        except (P2PStoreError, ValueError) as error:
            if isinstance(error, (ProtocolError, OSError)):
                raise
            self._damaged = self._damaged or is_damage(error)
            return error
        return Pulled(slot, trailer, slot.length, TRANSPORT_NAME)

    async def _receive_item(
        self, reply: ObjectReply, asked: GetItem, destination: Destination
    ) -> ItemOutcome:
        """One item of a batch. What does not verify is its result; the next item's bytes follow anyway."""
        left_after = self._bulk_left - reply.bulk_bytes
        try:
            slot, trailer = self._check_reply(reply, asked)
            if slot.length:
                arriving = Arriving(
                    slot, trailer, checked_view(destination, slot, trailer), watch_of(destination)
                )
                run = arriving.claim(ONLY_READER, 0, chunk_count(slot.length))
                await self._receive_chunks(arriving, ONLY_READER, run)
            else:
                checked_view(destination, slot, trailer)
        except (P2PStoreError, ValueError) as error:
            if isinstance(error, (ProtocolError, OSError)):
                raise
            self._damaged = self._damaged or is_damage(error)
            await self._inbox.discard(self._bulk_left - left_after)
            self._bulk_left = left_after
            return error
        return Pulled(slot, trailer, slot.length, TRANSPORT_NAME)

    def _check_reply(self, reply: ObjectReply, asked: GetItem) -> tuple[Slot, TrailerBody]:
        """Slot and trailer of an answer that claims to have the object, verified."""
        if reply.status:
            raise _refusal(reply)
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

    async def _receive_chunks(self, arriving: Arriving, reader: int, run: range) -> None:
        for number in run:
            chunk = arriving.chunk(number)
            await self._inbox.read_into(chunk)
            self._bulk_left -= len(chunk)
            arriving.verify(number, reader)

    async def _discard_small(self, bulk_bytes: int) -> None:
        """Skip a payload that nobody wants, if that is cheaper than a new connection."""
        if self._bulk_left == bulk_bytes <= DISCARD_BYTES and not self._unanswered:
            await self._inbox.discard(bulk_bytes)
            self._bulk_left = 0

    # --- frames ------------------------------------------------------------------------------

    async def _send_get(
        self,
        items: tuple[GetItem, ...],
        *,
        may_refuse: bool = False,
        keeps: Keeps = Keeps.NO,
    ) -> _Expected:
        get = Get(list(items), may_refuse, int(keeps))
        return _Expected(await self._send(DataKind.GET, get), items)

    async def _send(self, kind: DataKind, message: Message, bulk: memoryview = _NO_BULK) -> int:
        number, frame = self._frame(kind, message, len(bulk))
        await (self.stream.send(frame, bulk) if bulk else self.stream.send(frame))
        return number

    def _frame(self, kind: DataKind, message: Message, bulk_length: int = 0) -> tuple[int, bytes]:
        """The next request's number, and its frame, which is to be sent at once."""
        self._last_request_id = number = self._last_request_id % 0xFFFF_FFFF + 1
        self._unanswered += 1
        return number, encode_frame(kind, number, message, bulk_length=bulk_length)

    async def _receive_objects(self, expected: _Expected) -> list[ObjectReply]:
        objects = await self._receive(DataKind.GET, expected.request_id, Objects)
        if len(objects.items) != len(expected.items):
            raise ProtocolError("the reply to GET has another number of items than the request")
        bulk_left = self._bulk_left
        for item in objects.items:
            if not 0 <= item.bulk_bytes <= bulk_left:
                raise ProtocolError("the items of a reply do not add up to its bulk bytes")
            bulk_left -= item.bulk_bytes
        if bulk_left:
            raise ProtocolError("the items of a reply do not add up to its bulk bytes")
        return objects.items

    async def _receive(self, kind: DataKind, request_id: int, reply_type: type[R]) -> R:
        """Header and body of the next reply; its bulk bytes are left to the caller."""
        if self._bulk_left:
            raise ProtocolError("the previous reply's bulk bytes were not read")
        header = decode_header(await self._inbox.take(HEADER_BYTES, soon=True), DATA_REPLY_LIMITS)
        body = await self._inbox.take(header.body_length)
        if header.flags & ERROR:
            failure = decode_body(Failure, body)
            self._check_order(header, kind, request_id, failure)
            if kind is DataKind.GET:
                raise PullFailed(_known(failure.code), failure.text)
            raise error_of(failure.code, failure.text, failure.detail)
        self._check_order(header, kind, request_id, None)
        return decode_body(reply_type, body)

    def _check_order(
        self, header: FrameHeader, kind: DataKind, request_id: int, failure: Failure | None
    ) -> None:
        """Replies come in the order of requests, because one task at a time uses the connection."""
        if failure is not None and header.kind in (DataKind.HELLO, DataKind.PROOF):
            return  # the other side ends the connection and says why
        if not header.flags & REPLY or (header.kind, header.request_id) != (kind, request_id):
            raise ProtocolError(
                f"expected the reply {request_id} of kind {kind.name}, "
                f"got {header.request_id} of kind {header.kind}"
            )
        if failure is not None and header.bulk_length:
            raise ProtocolError("a failure carries bulk bytes")
        self._unanswered -= 1
        self._bulk_left = header.bulk_length

    def _operation(self) -> _Operation:
        return _Operation(self)

    @property
    def in_the_middle(self) -> bool:
        """Whether the next exchange cannot begin here: an earlier one is unfinished, or was damaged."""
        return self._unanswered > 0 or self._bulk_left > 0 or self._damaged


def _room(view: memoryview, length: int) -> memoryview:
    """Where a value of another length than the view goes: one that does not fit is not delivered."""
    return view[:length] if length <= len(view) else memoryview(bytearray(length))


def _small_batches(views: Sequence[memoryview]) -> deque[slice]:
    """Which of them one GET_SMALL asks for: a quarter, so that both sides have work all the time, and not too much."""
    size = _batch_items(len(views))
    if size * max(map(len, views)) <= SMALL_BATCH_BYTES:
        return deque(slice(at, min(at + size, len(views))) for at in range(0, len(views), size))
    batches: deque[slice] = deque()
    first = room_bytes = 0
    for place, view in enumerate(views):
        room_bytes += len(view)
        if place + 1 - first == size or room_bytes >= SMALL_BATCH_BYTES:
            batches.append(slice(first, place + 1))
            first, room_bytes = place + 1, 0
    if first < len(views):
        batches.append(slice(first, len(views)))
    return batches


def _batch_items(count: int) -> int:
    """How many of `count` objects one GET asks for: a quarter, so that both sides have work all the time."""
    return max(MIN_BATCH_ITEMS, min(MAX_BATCH_ITEMS, -(-count // 4)))


def _refusal(reply: ObjectReply) -> PullFailed:
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


def _deliver(
    payload: memoryview, view: memoryview, trailer: TrailerBody, watch: ReadWatch | None
) -> None:
    """Check a payload of one chunk in place, and copy it to where it belongs."""
    verify_chunk(payload, int.from_bytes(trailer.sums, "little"), 0, watch)
    view[:] = payload
    if watch is not None:
        watch.advanced(len(view), len(view))


def _known(code: int) -> Code:
    """A code as sent; INTERNAL for one that a newer version made up."""
    return Code(code) if code in Code._value2member_map_ else Code.INTERNAL


def is_damage(error: BaseException | None) -> bool:
    """Whether what this side received makes no sense, so that it should not go on with the other."""
    if isinstance(error, PullFailed):
        return error.code in (Code.STALE, Code.MALFORMED)
    return isinstance(error, (OSError, ProtocolError))


def failure_of(error: Exception) -> PullFailed:
    """A broken connection as the failure of a pull; another transport may still get there."""
    if isinstance(error, PullFailed):
        return error
    code = code_of(error)
    if isinstance(error, OSError) and code is Code.INTERNAL:
        code = Code.UNAVAILABLE
    return PullFailed(code, str(error), retriable=True)


class _Operation:
    """Closes the connection when an exchange does not end where the next one can begin."""

    __slots__ = ("_connection",)

    def __init__(self, connection: DataConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if self._connection.closed:
            raise ConnectionResetError("the connection is closed")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._connection
        if connection.in_the_middle or is_damage(error) or connection.abandoned:
            connection.close()
