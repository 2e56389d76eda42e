"""One data connection after its hello: requests in, answers out. Under trio.

All requests that have arrived are taken before anything is answered, and small answers leave together in one `sendmsg`:
that makes many small reads cheap. The cases, in the order of `_answer`:

1. A read (GET, GET_SMALL) is answered inline, in order, or by a thread to which the connection is lent.
2. STORE, RDMA_CONNECT, GET_PIECE, SWARM_LINK and MEASURE are answered inline; nothing else is read meanwhile.
3. Every other request is answered by a task of its own.
"""

from __future__ import annotations

import math
import os
import time
from typing import Final

import trio
from msgspec.structs import astuple

from p2pstore.access.keyring import Role
from p2pstore.errors import DeadlineExceeded, ProtocolError
from p2pstore.objects import KIB, MIB
from p2pstore.runtime.byte_budget import Account
from p2pstore.runtime.streams import AcceptedStream
from p2pstore.runtime.trio_tasks import wait_room
from p2pstore.transfer.data_frames import FrameLink, skip_bulk
from p2pstore.transfer.data_messages import (
    MAX_MEASURE_BYTES,
    Get,
    GetPiece,
    GetSmall,
    Measure,
    Measured,
    PieceTaken,
    RdmaConnect,
    Refused,
    Store,
    Stored,
    StoreReply,
    SwarmLink,
)
from p2pstore.transfer.rdma.rdma_serving import ServedReader
from p2pstore.transfer.read_tickets import Rights, TicketClaims
from p2pstore.transfer.serving.other_requests import RequestTasks, SwarmAnswers, receive_value
from p2pstore.transfer.serving.read_answers import (
    MAX_READ_THREADS,
    Outgoing,
    ReadAnswers,
    Traffic,
    may_be_large,
)
from p2pstore.transfer.serving.read_thread import Briskness, ReadThread
from p2pstore.transfer.serving.serving_backends import Backends
from p2pstore.transfer.serving.serving_limits import ServerLimits
from p2pstore.transfer.serving.session_rules import (
    Event,
    Lifecycle,
    Refusal,
    RequestRules,
    State,
    failure_frame,
    malformed,
    reply_frame,
)
from p2pstore.wire import HEADER, ONE_WAY, Code, FrameBuffer, FrameHeader, Message

RECEIVE_BYTES: Final = 64 * KIB
GATHER_BYTES: Final = 64 * KIB
"""Answers to pipelined requests wait for each other until they have this many bytes."""
GATHER_PARTS: Final = 512
_MEASURE_FILL: Final = memoryview(os.urandom(MIB))
"""Random: a way that compresses must not look faster than it is for tensors."""
TAKE_IN_SECONDS: Final = 0.25
"""Between two steps that count reads of threads."""
PIECE_SECONDS: Final = 60.0
"""Deadline of the request that confirms a piece: until then the piece keeps its upload slot."""
RETIRING_IDLE_SECONDS: Final = 0.25
"""Pause after which a connection that is to end does so."""


class DataSession:
    """One authenticated connection: reads requests, answers them or has them answered."""

    def __init__(
        self,
        stream: AcceptedStream,
        frames: FrameBuffer,
        claims: TicketClaims,
        *,
        role: Role,
        account: Account,
        backends: Backends,
        limits: ServerLimits,
        traffic: Traffic,
    ) -> None:
        """`account` has the bytes of requests, and of answers beside the memory that all share."""
        self._stream = stream
        self._frames = frames
        self._claims = claims
        self._account = account
        self._backends = backends
        self._limits = limits
        self._traffic = traffic
        self._rules = RequestRules(Rights(claims, role), stores=backends.stores is not None)
        self._life = Lifecycle()
        self._answers = ReadAnswers(backends.objects, claims.issuer, traffic, limits.reply_bulk_bytes)
        """A thread that has the connection has them as well."""
        self._out = Outgoing(stream, self._answers, account, self._take_in)
        self._tasks = RequestTasks(backends.objects, claims, self._out, account, self._break)
        self._swarm = SwarmAnswers(backends.swarms, claims.issuer, self._out, traffic)
        self._briskness = Briskness()
        self._nursery: trio.Nursery
        self._idle_watch = trio.CancelScope()
        self._nap = trio.CancelScope()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._partial_bytes = 0
        """Of a request that is not whole; its deadline is `_frame_due`."""
        self._frame_due = math.inf
        self._measured_bytes = 0
        self._readable: list[ServedReader] = []
        self._ended_by: Exception | None = None

    async def run(self) -> None:
        """Serve until the other side closes. Raises `Refused`, `ProtocolError` and `OSError` bare."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._watch_idleness)
            try:
                await self._serve_requests()
            except (Refused, ProtocolError, OSError) as error:
                self._ended_by = error
            finally:
                self._life.happened(Event.END)
                self._out.drop()
                self._swarm.confirm(whole=False)
                for each in self._readable:
                    each.close()
            self._idle_watch.cancel()
            if not self._life.retiring:
                self._nursery.cancel_scope.cancel()  # the reader has gone: answers are of no use
        self._frames.drop()
        if self._ended_by is not None:
            problem, self._ended_by = self._ended_by, None
            try:
                raise problem
            finally:
                del (
                    problem
                )  # it refers to this frame: only the collector of garbage would free what belongs to it

    @property
    def idle_since(self) -> float | None:
        """When it was last used (monotonic), None while it is in use."""
        return None if self._tasks.count else self._life.quiet_since

    def retire(self) -> None:
        """End as soon as the other side pauses between its requests, after the answers to those under way."""
        self._life.retire(time.monotonic())
        self._nap.cancel()

    def _break(self, error: OSError) -> None:
        """End the connection, on which half an answer may have left."""
        self._ended_by = error
        self._nursery.cancel_scope.cancel()

    async def _watch_idleness(self) -> None:
        """Take no more requests when none came for too long, and answer those that arrived. A deadline
        around each wait would be made and undone for every small read."""
        with self._idle_watch:
            while (left_seconds := self._patience_left()) > 0:
                with trio.move_on_after(left_seconds) as self._nap:
                    await trio.sleep_forever()
            self._stream.stop_receiving()

    def _patience_left(self) -> float:
        patience = RETIRING_IDLE_SECONDS if self._life.retiring else self._limits.idle_seconds
        if self._swarm.sent_piece is not None:
            patience = min(patience, PIECE_SECONDS)
        quiet_since = self._life.quiet_since
        return patience if quiet_since is None else quiet_since + patience - time.monotonic()

    async def _serve_requests(self) -> None:
        await self._answer_all(answered=False)  # requests that came with the hello
        while True:
            if self._briskness.is_brisk and self._may_lend:
                await self._lend()
                await self._answer_all(answered=True)
            if not (count := await self._receive()):
                return
            data = self._buffer[:count]
            frame = self._frames.sole_frame(data)
            if frame is None:
                self._frames.feed(data)
                await self._answer_all(answered=False)
            else:
                await self._answer(*frame)
                del frame  # the next one may be late
                await self._answer_all(answered=True)

    async def _receive(self) -> int:
        """The next bytes; 0 when the other side closed, or was silent for too long between requests. Raises
        `DeadlineExceeded` for a request that should be whole by now."""
        if self._life.state is State.PARTIAL:
            with trio.move_on_at(self._frame_due) as scope:
                count = await self._receive_with_room()
            if scope.cancelled_caught:
                seconds = self._limits.frame_seconds
                raise DeadlineExceeded(f"a request was not whole within {seconds:g} s")
        else:
            await self._stream.wait_readable_forever()
            count = await self._receive_with_room()
        self._life.happened(Event.RECEIVED)
        return count

    async def _receive_with_room(self) -> int:
        if not self._account.has_room:
            await wait_room(self._account)
        return await self._stream.receive_into(self._buffer)

    async def _answer_all(self, *, answered: bool) -> None:
        """Answer every request that has arrived whole; `answered`: one was since the last bytes came."""
        while (frame := self._frames.next_frame()) is not None:
            answered = True
            await self._answer(*frame)
        await self._out.flush()
        before, self._partial_bytes = self._partial_bytes, self._frames.pending_bytes
        if self._partial_bytes:
            if answered or not before:  # the beginning of another request
                self._frame_due = trio.current_time() + self._limits.frame_seconds
            self._life.happened(Event.CUT)
        else:
            self._life.happened(Event.ANSWERED, time.monotonic())
        if self._partial_bytes != before:
            self._account.hold(self._partial_bytes - before)

    async def _answer(self, header: FrameHeader, body: bytes, *, lends: bool = True) -> None:
        """Answer a request, or gather its answer. `lends`: a thread may do so."""
        message = self._rules.decode(header, body)
        if self._swarm.sent_piece is not None:
            self._swarm.confirm(whole=True)
        if header.bulk_length:
            await self._out.flush()  # answers that are ready do not wait for it
            await self._skip_bulk(header.bulk_length)
        if isinstance(message, Get | GetSmall):
            if lends and self._is_for_thread(message):
                await self._out.flush()
                await self._lend(HEADER.pack(*astuple(header)) + body)
            else:
                await self._answer_read(header.request_id, message)
        elif isinstance(message, Refusal):
            self._out.refuse(header, *message)
        else:
            await self._answer_other(header, message, len(body))

    async def _skip_bulk(self, length_bytes: int) -> None:
        limits = self._limits
        seconds = limits.store_seconds + length_bytes / limits.store_bytes_per_second
        with trio.move_on_after(seconds):
            await skip_bulk(self._stream, self._frames, length_bytes, self._buffer)
            return
        raise DeadlineExceeded(f"{length_bytes:,} bytes did not arrive within {seconds:.3g} s")

    # --- reads -------------------------------------------------------------------------------

    @property
    def _may_lend(self) -> bool:
        """Whether one thread more may have the connection, which only reads use now."""
        return (
            self._stream.can_lend
            and not (self._tasks.count or self._life.retiring)
            and self._traffic.read_threads < MAX_READ_THREADS
        )

    def _is_for_thread(self, message: Get | GetSmall) -> bool:
        """Whether a thread is to answer this, so that the event loop is free for small reads of others."""
        return may_be_large(message) and self._traffic.tally.small_reads_go_on and self._may_lend

    async def _lend(self, request: bytes = b"") -> None:
        """Have a thread answer this request and the reads that follow. The request at which it stops needs a decision,
        and is answered here."""
        rest = memoryview(bytearray(self._frames.pending_bytes))
        self._frames.take_into(rest)
        thread = ReadThread(
            self._answers,
            lambda: not self._life.retiring,
            self._limits.progress_seconds,
            request + rest,
            in_bulk=bool(request),
        )
        counting = trio.CancelScope()
        self._nursery.start_soon(self._count_reads, counting)
        self._life.happened(Event.LENT)
        self._traffic.read_threads += 1
        try:
            left = await self._stream.lend(thread.serve)
        finally:
            self._traffic.read_threads -= 1
            counting.cancel()
        self._life.happened(Event.RETURNED)
        self._briskness = Briskness()
        self._frames.feed(left)
        if (frame := self._frames.next_frame()) is not None:
            await self._answer(*frame, lends=False)

    async def _count_reads(self, scope: trio.CancelScope) -> None:
        """Take in the reads that a thread answers, and the last ones after its end."""
        try:
            with scope:
                while True:
                    await trio.sleep(TAKE_IN_SECONDS)
                    await self._take_in_all()
        finally:
            with trio.CancelScope(shield=True):
                await self._take_in_all()

    async def _take_in_all(self) -> None:
        while self._take_in():
            await trio.lowlevel.checkpoint()

    def _take_in(self) -> bool:
        return self._traffic.take_in(self._backends.objects.note_reads)

    async def _answer_read(self, request_id: int, message: Get | GetSmall) -> None:
        """Put the answer with those that are to be sent next; its objects are held from here on."""
        answers, objects = self._answers, self._backends.objects
        if isinstance(message, GetSmall):
            await self._out.flush()  # it may take an upload's place of its own
            answers.get_small(request_id, message, decides=True)
        else:
            if objects.must_bring(message.items):
                await self._out.flush()  # answers that are ready do not wait for it
                await objects.bring(message.items)
            answers.get(request_id, message, decides=True)
        self._out.hold()
        self._briskness.answered(time.monotonic(), quick=answers.was_quick)
        if answers.length_bytes >= GATHER_BYTES or len(answers.parts) >= GATHER_PARTS:
            await self._out.flush()

    # --- other requests ----------------------------------------------------------------------

    async def _answer_other(self, header: FrameHeader, message: Message, body_bytes: int) -> None:
        """Inline, with all that is ready sent before; or by a task."""
        match message:
            case Store():
                await self._out.flush()
                await self._store(header, message)
            case RdmaConnect():
                await self._out.flush()
                await self._connect_rdma(header, message)
            case GetPiece():
                await self._out.flush()
                await self._swarm.send_piece(header, message)
                self._nap.cancel()  # the next request is waited for less long
            case PieceTaken():
                pass  # by now it has been confirmed
            case SwarmLink():
                await self._out.flush()
                await self._become_link(header, message)
            case Measure():
                self._measure(header, message)
                await self._out.flush()
            case _ if self._tasks.count >= self._limits.handlers_per_connection:
                text = f"{self._tasks.count} requests of this connection are under way already"
                self._out.refuse(header, Code.BUSY, text)
            case _:
                self._tasks.start(self._nursery, header, message, body_bytes)

    async def _store(self, header: FrameHeader, request: Store) -> None:
        """Take a value in. Nothing else is read before it is there, which bounds how long its room is taken."""
        if header.flags & ONE_WAY:
            raise malformed(header, "a one-way STORE")
        limits, stores = self._limits, self._backends.stores
        assert stores is not None
        try:
            opened = await stores.begin_store(request, self._claims)
        except Exception as error:
            await self._out.send(failure_frame(header, error))
            return
        if isinstance(opened, Stored):
            await self._out.send(reply_frame(header, StoreReply(False, opened)))
            return
        self._life.happened(Event.STORE)
        try:
            await self._out.send(reply_frame(header, StoreReply(True)))
            seconds = limits.store_seconds + len(opened.payload) / limits.store_bytes_per_second
            last = await receive_value(self._stream, self._frames, self._buffer, opened, seconds)
            try:
                answer = reply_frame(last, await stores.finish_store(opened))
            except Exception as error:
                answer = failure_frame(last, error)
            await self._out.send(answer)
        finally:
            stores.abandon_store(opened)
        self._life.happened(Event.STORED)

    async def _connect_rdma(self, header: FrameHeader, request: RdmaConnect) -> None:
        """Let the other side's queue pair read, until this connection ends."""
        rdma = self._backends.rdma
        if rdma is None:
            text = "this peer does not let others read by RDMA"
            self._out.refuse(header, Code.UNSUPPORTED, text)
            return
        try:
            end = await rdma.connect(request, self._claims)
        except Exception as error:
            await self._out.send(failure_frame(header, error))
            return
        self._readable.append(end)
        await self._out.send(reply_frame(header, end.reply))

    async def _become_link(self, header: FrameHeader, request: SwarmLink) -> None:
        """Be a link from here on; its end is that of the session."""
        offered = await self._swarm.open_link(header, request)
        if offered is not None:
            self._life.happened(Event.LINK)
            await offered.run(FrameLink(self._stream, self._frames))
            raise ConnectionAbortedError("the link of a swarm ended")

    def _measure(self, header: FrameHeader, message: Measure) -> None:
        """Answer MEASURE: in order and inline like GET, or pipelining would measure the scheduler."""
        wanted = message.reply_bytes
        self._measured_bytes += max(0, wanted) + header.bulk_length
        if not 0 <= wanted <= MAX_MEASURE_BYTES:
            text = f"{wanted:,} bytes are no size for a measurement: 0 to {MAX_MEASURE_BYTES:,} are"
            self._out.refuse(header, Code.INVALID_ARGUMENT, text)
        elif self._measured_bytes > self._limits.measured_bytes:
            text = f"this connection has moved {self._limits.measured_bytes:,} bytes to measure: enough"
            self._out.refuse(header, Code.BUSY, text)
        elif not header.flags & ONE_WAY:
            reply = Measured(header.bulk_length, round(time.time() * 1000))
            whole, rest = divmod(wanted, len(_MEASURE_FILL))
            fill = [_MEASURE_FILL] * whole + [_MEASURE_FILL[:rest]]
            self._out.add(reply_frame(header, reply, wanted), fill)
