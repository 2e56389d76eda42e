"""One data connection after its hello: requests in, answers out. Under trio.

All requests that have arrived are taken before anything is answered, and small answers leave
together in one `sendmsg`: that is what makes many small reads cheap. GET is answered in order and
inline; a STORE has the connection for itself until its value is there; everything else is answered in a
task of its own, so that it holds nothing up.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Final

import trio
from msgspec.structs import astuple

from p2pstore.access.keyring import Role
from p2pstore.errors import DeadlineExceeded, P2PStoreError, ProtocolError
from p2pstore.objects import DIGEST_BYTES, KIB, MIB
from p2pstore.runtime.byte_budget import SHARE_BYTES, Account
from p2pstore.runtime.streams import (
    AcceptedStream,
    BytesLike,
    total_bytes,
)
from p2pstore.runtime.trio_tasks import wait_room
from p2pstore.transfer.data_frames import FrameLink, Refused, skip_bulk
from p2pstore.transfer.data_messages import (
    MAX_MEASURE_BYTES,
    REQUESTS,
    STORE_VERSION,
    WRITE_KINDS,
    DataKind,
    Get,
    GetPiece,
    GetSmall,
    Measure,
    Measured,
    PieceReply,
    PieceTaken,
    RdmaConnect,
    Store,
    Stored,
    StorePart,
    StoreReply,
    SwarmLink,
    SwarmLinked,
)
from p2pstore.transfer.rdma.rdma_serving import RdmaBackend, ReadableEnd
from p2pstore.transfer.read_tickets import Rights, TicketClaims
from p2pstore.transfer.serving.read_answers import (
    MAX_READ_THREADS,
    ReadAnswers,
    Traffic,
    may_be_large,
)
from p2pstore.transfer.serving.read_thread import Briskness, ReadThread
from p2pstore.transfer.serving.serving_backends import (
    DataBackend,
    OpenedPiece,
    StoreBackend,
    SwarmBackend,
)
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.serving.store_intake import receive_value
from p2pstore.wire import (
    DATA_REPLY_LIMITS,
    HEADER,
    HEADER_BYTES,
    ONE_WAY,
    REPLY,
    Code,
    FrameBuffer,
    FrameHeader,
    Message,
    code_of,
    decode_body,
    encode_failure,
    encode_frame,
)

logger = logging.getLogger("p2pstore.transfer")

# Plain numbers: they are compared for every request.
HELLO, PROOF = int(DataKind.HELLO), int(DataKind.PROOF)
RECEIVE_BYTES: Final = 64 * KIB
GATHER_BYTES: Final = 64 * KIB
"""Answers to pipelined requests wait for each other until they have this many bytes."""
GATHER_PARTS: Final = 512
MAX_UNSENT_BYTES: Final = 4 * MIB
"""Of answers to other requests than reads that wait to be sent on one connection: until there are fewer, none is
made."""
MAX_HELD_ANSWER_BYTES: Final = SHARE_BYTES
"""What the largest of them, a snapshot, counts as: one is always sent, and the next one after it."""
LARGE_ANSWERS: Final = frozenset(
    map(int, (DataKind.LIST, DataKind.LOOKUP, DataKind.SNAPSHOT, DataKind.GET_MANIFEST))
)
"""Kinds of requests, as plain numbers, whose answers may have megabytes."""
_MEASURE_FILL: Final = memoryview(os.urandom(MIB))
"""Random: a way that compresses must not look faster than it is for tensors."""
TAKE_IN_SECONDS: Final = 0.25
TAKE_IN_OBJECTS: Final = 128
"""How often reads that threads answered are taken in, and of how many objects at once: these threads wait for the
interpreter meanwhile, some 1 us for each."""
PIECE_SECONDS: Final = 60.0
"""By when the reader of a piece says that it has it, or goes on: until then it has an upload's place."""
RETIRING_IDLE_SECONDS: Final = 0.25
"""A connection that is to end does so when no request came for so long."""


class DataSession:
    """One authenticated connection: reads requests, answers GET in order and inline, the rest in tasks."""

    def __init__(
        self,
        stream: AcceptedStream,
        frames: FrameBuffer,
        claims: TicketClaims,
        *,
        version: int,
        account: Account,
        backend: DataBackend,
        stores: StoreBackend | None,
        rdma: RdmaBackend | None,
        limits: ServerLimits,
        traffic: Traffic,
        swarms: SwarmBackend | None = None,
        role: Role = Role.MEMBER,
    ) -> None:
        self._rights = Rights(claims, role)
        self._swarms = swarms
        self._sent_piece: OpenedPiece | None = None
        """The one sent last, until the other side says something: then it has it."""
        self._backend = backend
        self._limits = limits
        self._traffic = traffic
        self._stream = stream
        self._frames = frames
        self._account = account
        """What is kept of requests, and of answers beside the memory that all share."""
        self._partial_bytes = 0
        """Of a request that is not whole; from `_frame_due` on it is too late."""
        self._frame_due = math.inf
        self._unsent_bytes = 0
        self._sent = trio.Event()
        self._claims = claims
        self._stores = stores
        self._rdma = rdma
        self._readable: list[ReadableEnd] = []
        self._known = {
            int(kind): message_type
            for kind, message_type in REQUESTS.items()
            if kind not in WRITE_KINDS or (stores is not None and version >= STORE_VERSION)
        }
        self._allowed = {
            kind: message_type
            for kind, message_type in self._known.items()
            if self._rights.allow(kind)
        }
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._sending = trio.Lock()
        self._answering_large = trio.StrictFIFOLock()
        self._ended_by: Exception | None = None
        self._quiet_since: float | None = None
        """Since when the next request is waited for, unless one is being answered."""
        self._idle_watch = trio.CancelScope()
        self._nap = trio.CancelScope()
        self._retiring = False
        self._handlers = 0
        self._briskness = Briskness()
        self._measured_bytes = 0
        self._answers = ReadAnswers(backend, claims.issuer, traffic, limits.reply_bulk_bytes)
        """What is to be sent next. A thread that has the connection has them as well."""
        self._held_bytes = 0
        """Of the answers that were gathered, in memory of their own."""
        self._for_thread = b""
        """A request that a thread is to answer."""
        self._left_by_thread = False
        """Whether the next request comes back from one."""

    async def run(self) -> None:
        """Serve until the other side closes. Raises `Refused`, `ProtocolError` and `OSError` bare."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_idleness)
            try:
                await self._serve_requests(nursery)
            except (Refused, ProtocolError, OSError) as error:
                self._ended_by = error
            finally:
                self._let_go_all()
                self._confirm_piece(False)
                for each in self._readable:
                    each.close()
            self._idle_watch.cancel()
            if not self._retiring:
                nursery.cancel_scope.cancel()  # nobody is left to hear the answers
        self._frames.drop()
        if self._ended_by is not None:
            problem, self._ended_by = self._ended_by, None
            try:
                raise problem
            finally:
                del problem  # it refers to this frame: only the collector of garbage would free what belongs to it

    @property
    def idle_since(self) -> float | None:
        """When it was last used (monotonic), None while it is in use."""
        return None if self._handlers else self._quiet_since

    def retire(self) -> None:
        """End as soon as the other side pauses between its requests; what is under way is answered."""
        self._retiring = True
        if self._quiet_since is not None:  # a request may be on its way just now
            self._quiet_since = time.monotonic()
        self._nap.cancel()

    async def _watch_idleness(self) -> None:
        """Take no more requests when none came for too long; what has arrived by then is answered. A deadline
        around each wait would be made and undone for every small read."""
        with self._idle_watch:
            while (left_seconds := self._patience_left()) > 0:
                with trio.move_on_after(left_seconds) as self._nap:
                    await trio.sleep_forever()
            self._stream.stop_receiving()

    def _patience_left(self) -> float:
        patience = RETIRING_IDLE_SECONDS if self._retiring else self._limits.idle_seconds
        if self._sent_piece is not None:
            patience = min(patience, PIECE_SECONDS)
        if self._quiet_since is None:
            return patience
        return self._quiet_since + patience - time.monotonic()

    async def _serve_requests(self, nursery: trio.Nursery) -> None:
        await self._answer_all(nursery)  # what came along with the hello
        while True:
            while self._for_thread or (self._briskness.is_brisk and self._may_lend):
                await self._answer_in_thread(nursery)
            if not (count := await self._receive_request()):
                return
            data = self._buffer[:count]
            if (frame := self._frames.sole_frame(data)) is not None:
                await self._answer(*frame, nursery)
                del frame  # the next one may be late
                await self._flush()
            else:
                self._frames.feed(data)
                await self._answer_all(nursery)

    @property
    def _may_lend(self) -> bool:
        """Whether one thread more may have the connection, and nobody else needs it meanwhile."""
        return (
            self._stream.can_lend
            and not (self._handlers or self._retiring)
            and self._traffic.read_threads < MAX_READ_THREADS
        )

    async def _answer_in_thread(self, nursery: trio.Nursery) -> None:
        """Have a thread answer the reads that come now, or the one that waits; what it leaves is answered here."""
        traffic = self._traffic
        begun, self._for_thread = self._for_thread, b""
        rest = memoryview(bytearray(self._frames.pending_bytes))
        self._frames.take_into(rest)
        thread = ReadThread(
            self._answers,
            lambda: not self._retiring,
            self._limits.progress_seconds,
            begun + rest,
            in_bulk=bool(begun),
        )
        taking = trio.CancelScope()
        nursery.start_soon(self._take_in_reads, taking)
        traffic.read_threads += 1
        try:
            left = await self._stream.lend(thread.serve)
        finally:
            traffic.read_threads -= 1
            taking.cancel()
        self._briskness = Briskness()
        self._frames.feed(left)
        self._left_by_thread = bool(left)
        await self._answer_all(nursery)

    async def _take_in_reads(self, scope: trio.CancelScope) -> None:
        try:
            with scope:
                while True:
                    await trio.sleep(TAKE_IN_SECONDS)
                    await self._take_in_all()
        finally:
            # The last ones as well, also of a connection that has ended: nothing is waited for.
            with trio.CancelScope(shield=True):
                await self._take_in_all()

    async def _take_in_all(self) -> None:
        while self._take_in_some():
            await trio.lowlevel.checkpoint()

    def _take_in_some(self) -> bool:
        """Tell the backend of some reads that threads answered; whether there may be more."""
        counts, length_bytes = self._traffic.tally.take(TAKE_IN_OBJECTS)
        self._traffic.objects += sum(counts.values())
        self._traffic.bytes += length_bytes
        if counts:
            self._backend.note_reads(counts)
        return self._traffic.tally.has_more

    async def _receive_request(self) -> int:
        """The next bytes; 0 when the other side closed, or was silent for too long between requests."""
        if self._frames.pending_bytes:
            return await self._receive_rest()
        self._quiet_since = time.monotonic()
        await self._stream.wait_readable_forever()
        if not self._account.has_room:
            await wait_room(self._account)
        self._quiet_since = None
        return await self._stream.receive_into(self._buffer)

    async def _receive_rest(self) -> int:
        """More of a request that has begun. Raises `DeadlineExceeded` when it should be whole by now."""
        with trio.move_on_at(self._frame_due):
            if not self._account.has_room:
                await wait_room(self._account)
            return await self._stream.receive_into(self._buffer)
        raise DeadlineExceeded(f"a request was not whole within {self._limits.frame_seconds:g} s")

    async def _answer_all(self, nursery: trio.Nursery) -> None:
        """Answer every request that has arrived whole."""
        answered = False
        while not self._for_thread and (frame := self._frames.next_frame()) is not None:
            answered = True
            await self._answer(*frame, nursery)
        await self._flush()
        before, self._partial_bytes = self._partial_bytes, self._frames.pending_bytes
        if self._partial_bytes and (answered or not before):  # the beginning of another request
            self._frame_due = trio.current_time() + self._limits.frame_seconds
        if self._partial_bytes != before:
            self._account.hold(self._partial_bytes - before)

    async def _answer(self, header: FrameHeader, body: bytes, nursery: trio.Nursery) -> None:
        """Answer a request, or gather what it is to be answered with."""
        message = self._decode(header, body)
        if self._sent_piece is not None:
            self._confirm_piece(True)
        if header.bulk_length:
            await self._flush()  # what is ready does not wait for it
            await self._skip_bulk(header.bulk_length)
        if message is None:
            return
        if isinstance(message, Get | GetSmall):
            if self._is_for_thread(header, message, body):
                return
            if isinstance(message, GetSmall):
                await self._flush()  # it may take an upload's place of its own
            elif self._backend.must_bring(message.items):
                await self._flush()  # what is ready does not wait for it
                await self._backend.bring(message.items)
            self._answer_read(header.request_id, message)
            answers = self._answers
            if answers.length_bytes >= GATHER_BYTES or len(answers.parts) >= GATHER_PARTS:
                await self._flush()
        elif isinstance(message, Store):
            await self._flush()
            await self._store(header, message)
        elif isinstance(message, RdmaConnect):
            await self._flush()
            await self._connect_rdma(header, message)
        elif isinstance(message, GetPiece):
            await self._flush()
            await self._send_piece(header, message)
        elif isinstance(message, PieceTaken):
            pass  # by now it has been confirmed
        elif isinstance(message, SwarmLink):
            await self._flush()
            await self._become_link(header, message)
        elif isinstance(message, Measure):
            self._gather_measured(header, message)
            await self._flush()
        elif self._handlers >= self._limits.handlers_per_connection:
            text = f"{self._handlers} requests of this connection are under way already"
            self._gather(encode_failure(header.kind, header.request_id, Code.BUSY, text))
        else:
            self._handlers += 1
            self._account.hold(len(body))
            handle = self._handle_large if header.kind in LARGE_ANSWERS else self._handle
            nursery.start_soon(handle, header, message, len(body), nursery.cancel_scope)

    async def _skip_bulk(self, length_bytes: int) -> None:
        limits = self._limits
        seconds = limits.store_seconds + length_bytes / limits.store_bytes_per_second
        with trio.move_on_after(seconds):
            await skip_bulk(self._stream, self._frames, length_bytes, self._buffer)
            return
        raise DeadlineExceeded(f"{length_bytes:,} bytes did not arrive within {seconds:.3g} s")

    def _decode(self, header: FrameHeader, body: bytes) -> Message | None:
        """The request, or None when it was answered with a failure. Raises `Refused` for garbage."""
        kind, request_id = header.kind, header.request_id
        if kind in (HELLO, PROOF) or header.flags & REPLY:
            raise ProtocolError(f"a frame of kind {kind}, flags {header.flags} is not a request")
        message_type = self._allowed.get(kind)
        if message_type is None and kind not in self._known:
            self._refuse(header, Code.UNSUPPORTED, f"kind {kind} is unknown to this version")
            return None
        if message_type is None:
            self._refuse(header, Code.AUTHENTICATION_FAILED, self._rights.why_not(kind))
            return None
        try:
            message: Message = decode_body(message_type, body)
        except ProtocolError as error:
            raise Refused(kind, request_id, Code.MALFORMED, str(error)) from error
        if refusal := self._rights.refusal(message):
            self._refuse(header, Code.AUTHENTICATION_FAILED, refusal)
            return None
        if isinstance(message, Get) and not message.items:
            raise Refused(kind, request_id, Code.MALFORMED, "a GET without items")
        if isinstance(message, GetSmall) and len(message.digests) % DIGEST_BYTES:
            raise Refused(kind, request_id, Code.MALFORMED, "digests are 16 bytes each")
        if isinstance(message, StorePart):
            text = "a part of a value, but no STORE was answered with room for it"
            raise Refused(kind, request_id, Code.MALFORMED, text)
        return message

    def _gather_measured(self, header: FrameHeader, message: Measure) -> None:
        """Answer MEASURE: in order and inline like GET, or pipelining would measure the scheduler."""
        wanted = message.reply_bytes
        self._measured_bytes += max(0, wanted) + header.bulk_length
        if not 0 <= wanted <= MAX_MEASURE_BYTES:
            text = f"{wanted:,} bytes are no size for a measurement: 0 to {MAX_MEASURE_BYTES:,} are"
            self._refuse(header, Code.INVALID_ARGUMENT, text)
        elif self._measured_bytes > self._limits.measured_bytes:
            text = f"this connection has moved {self._limits.measured_bytes:,} bytes to measure: enough"
            self._refuse(header, Code.BUSY, text)
        elif not header.flags & ONE_WAY:
            reply = Measured(header.bulk_length, round(time.time() * 1000))
            kind, number = DataKind.MEASURE, header.request_id
            frame = encode_frame(kind, number, reply, flags=REPLY, bulk_length=wanted)
            whole, rest = divmod(wanted, len(_MEASURE_FILL))
            self._gather(frame, [_MEASURE_FILL] * whole + [_MEASURE_FILL[:rest]])

    def _refuse(self, header: FrameHeader, code: Code, text: str) -> None:
        if not header.flags & ONE_WAY:
            self._gather(encode_failure(header.kind, header.request_id, code, text))

    # --- reads -------------------------------------------------------------------------------

    def _is_for_thread(self, header: FrameHeader, message: Get | GetSmall, body: bytes) -> bool:
        """Whether a thread is to answer this, so that the event loop is free for those that read small objects."""
        left, self._left_by_thread = self._left_by_thread, False
        if left or not (
            may_be_large(message) and self._traffic.tally.small_reads_go_on and self._may_lend
        ):
            return False
        self._for_thread = HEADER.pack(*astuple(header)) + body
        return True

    def _answer_read(self, request_id: int, message: Get | GetSmall) -> None:
        """Put the answer with those that are to be sent next; its objects are held from here on."""
        answers = self._answers
        if isinstance(message, Get):
            answers.get(request_id, message, decides=True)
        else:
            answers.get_small(request_id, message, decides=True)
        self._hold_own()
        self._briskness.answered(time.monotonic(), quick=answers.was_quick)

    def _gather(self, frame: bytes, bulk: Sequence[BytesLike] = ()) -> None:
        self._answers.add(frame, bulk)
        self._hold_own()

    def _hold_own(self) -> None:
        """What was gathered is in memory of its own, as far as it is not lent."""
        self._account.hold(self._answers.own_bytes - self._held_bytes)
        self._held_bytes = self._answers.own_bytes

    async def _flush(self) -> None:
        """Send what was gathered and give the objects back."""
        answers = self._answers
        if not answers.parts:
            return
        try:
            answers.note()
            self._take_in_some()
            await self._send(*answers.parts)
        finally:
            self._let_go_all()

    async def _send(self, *parts: BytesLike) -> None:
        """Send without another task's reply in between."""
        try:
            self._sending.acquire_nowait()  # `async with` would cost a turn of the event loop
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            await self._stream.send(*parts)
        finally:
            self._sending.release()

    def _let_go_all(self) -> None:
        self._account.release(self._held_bytes)
        self._held_bytes = 0
        self._answers.end()

    # --- STORE -------------------------------------------------------------------------------

    async def _store(self, header: FrameHeader, request: Store) -> None:
        """Take a value in. Until then nothing else is read: whoever stores cannot keep its room longer
        by asking for other things."""
        if header.flags & ONE_WAY:
            raise Refused(header.kind, header.request_id, Code.MALFORMED, "a one-way STORE")
        limits, stores = self._limits, self._stores
        assert stores is not None
        try:
            opened = await stores.begin_store(request, self._claims)
        except Exception as error:
            await self._send(_failure(header, error))
            return
        if isinstance(opened, Stored):
            await self._send(_reply(header, StoreReply(False, opened)))
            return
        try:
            await self._send(_reply(header, StoreReply(True)))
            seconds = limits.store_seconds + len(opened.payload) / limits.store_bytes_per_second
            last = await receive_value(self._stream, self._frames, self._buffer, opened, seconds)
            try:
                answer = _reply(last, await stores.finish_store(opened))
            except Exception as error:
                answer = _failure(last, error)
            await self._send(answer)
        finally:
            stores.abandon_store(opened)

    # --- RDMA --------------------------------------------------------------------------------

    async def _connect_rdma(self, header: FrameHeader, request: RdmaConnect) -> None:
        """Let the other side's queue pair read, until this connection ends."""
        if self._rdma is None:
            self._refuse(header, Code.UNSUPPORTED, "this peer does not let others read by RDMA")
            return
        try:
            end = await self._rdma.connect(request, self._claims)
        except Exception as error:
            await self._send(_failure(header, error))
            return
        self._readable.append(end)
        await self._send(_reply(header, end.reply))

    # --- swarms ------------------------------------------------------------------------------

    async def _send_piece(self, header: FrameHeader, request: GetPiece) -> None:
        """Answer with a piece of a checkpoint. Nothing else is read meanwhile: who asks waits for it."""
        if self._swarms is None:
            self._refuse(header, Code.UNSUPPORTED, "this peer takes part in no swarms")
            return
        try:
            opened = await self._swarms.open_piece(request, self._claims.issuer)
        except Exception as error:
            await self._send(_failure(header, error))
            return
        if isinstance(opened, PieceReply):
            await self._send(_reply(header, opened))
            return
        await self._send_opened(header, opened)

    async def _send_opened(self, header: FrameHeader, opened: OpenedPiece) -> None:
        self._sent_piece = opened
        try:
            size = len(opened.data)
            frame = encode_frame(
                header.kind, header.request_id, PieceReply(), flags=REPLY, bulk_length=size
            )
            await self._send(frame, opened.data)
            self._nap.cancel()  # it is waited for less long
            self._traffic.bytes += size
        except BaseException:
            self._confirm_piece(False)
            raise

    def _confirm_piece(self, whole: bool) -> None:
        """The other side has the piece that was sent last, or never will."""
        sent, self._sent_piece = self._sent_piece, None
        if sent is not None and self._swarms is not None:
            self._swarms.piece_sent(sent, whole)

    async def _become_link(self, header: FrameHeader, request: SwarmLink) -> None:
        """From here on, this connection is a link; with it, the session ends."""
        if self._swarms is None:
            self._refuse(header, Code.UNSUPPORTED, "this peer takes part in no swarms")
            return
        try:
            offered = self._swarms.take_link(request.version, self._claims.issuer)
        except Exception as error:
            await self._send(_failure(header, error))
            return
        await self._send(_reply(header, SwarmLinked()))
        await offered.run(FrameLink(self._stream, self._frames))
        raise ConnectionAbortedError("the link of a swarm ended")

    # --- everything else ---------------------------------------------------------------------

    async def _handle_large(
        self, header: FrameHeader, message: Message, body_bytes: int, connection: trio.CancelScope
    ) -> None:
        """One after the other: the next answer is made when this one was sent."""
        async with self._answering_large:
            await self._handle(header, message, body_bytes, connection)

    async def _handle(
        self, header: FrameHeader, message: Message, body_bytes: int, connection: trio.CancelScope
    ) -> None:
        """Answer one request in a task of its own. Its `body_bytes` are held already."""
        kind, request_id = DataKind(header.kind), header.request_id
        bulk: Sequence[BytesLike] = ()
        try:
            while self._unsent_bytes >= MAX_UNSENT_BYTES:
                await self._sent.wait()
            reply, bulk = await self._backend.handle(kind, message, self._claims)
            size = sum(len(part) for part in bulk)
            frame = encode_frame(kind, request_id, reply, flags=REPLY, bulk_length=size)
            if len(frame) - HEADER_BYTES > DATA_REPLY_LIMITS.body_bytes:
                raise ValueError(f"the answer has {len(frame):,} bytes: ask for less")
        except Exception as error:
            frame = _failure(header, error)
        finally:
            self._handlers -= 1
            self._account.release(body_bytes)
        if not header.flags & ONE_WAY:
            size = len(frame) + total_bytes(bulk)
            held_bytes = min(size, MAX_HELD_ANSWER_BYTES)
            self._unsent_bytes += size
            self._account.hold(held_bytes)
            try:
                await self._send(frame, *bulk)
            except OSError as error:  # half a reply may have left: the connection is of no use now
                self._ended_by = error
                connection.cancel()
            finally:
                self._account.release(held_bytes)
                self._unsent_bytes -= size
                self._sent.set()
                self._sent = trio.Event()


def _reply(header: FrameHeader, message: Message) -> bytes:
    return encode_frame(header.kind, header.request_id, message, flags=REPLY)


def _failure(header: FrameHeader, error: Exception) -> bytes:
    """The answer to a request that failed. An error of this program is logged, and not told in detail."""
    if isinstance(error, (P2PStoreError, ValueError)):
        detail = getattr(error, "needed", 0)
        return encode_failure(header.kind, header.request_id, code_of(error), str(error), detail)
    name = DataKind(header.kind).name
    logger.error("a %s request failed by an internal error", name, exc_info=error)
    text = f"internal error of the other peer ({type(error).__name__}): see its log"
    return encode_failure(header.kind, header.request_id, Code.INTERNAL, text)
