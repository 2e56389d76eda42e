"""Requests and replies over one multiplexed stream. Shell (trio), without libp2p.

A stream belongs to the side that opened it: that side asks through an `AskingStream`, the other answers
through an `AnsweringStream`. Both start with admission. Each stream has one writer task: a request or answer
hands over a whole frame and waits only for room, so a cancelled request never leaves half a frame behind,
and one stuck write delays no request for longer than `WRITE_SECONDS`, after which the stream ends.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from p2pstore.access.keyring import Role
from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import (
    REPLIES,
    REQUESTS,
    ControlKind,
    Hello,
    HelloReply,
    Proof,
    Welcome,
)
from p2pstore.gossip.links.admission import AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.control_frames import (
    MAX_REQUESTS_IN_FLIGHT,
    Frames,
    RawStream,
    code_from,
    printable,
)
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.runtime.byte_budget import Account
from p2pstore.wire import (
    CONTROL_LIMITS,
    ERROR,
    ONE_WAY,
    REPLY,
    Code,
    Empty,
    Failure,
    FrameHeader,
    Message,
    code_of,
    decode_body,
    encode_failure,
    encode_frame,
)

logger = logging.getLogger("p2pstore.link")

Handler = Callable[[PeerId, int, Message], Awaitable[Message]]
"""Answers a request of a peer: (peer id, kind, request) -> reply. What it raises becomes a Failure."""

ADMISSION_SECONDS: Final = 10.0
HANDLER_SECONDS: Final = 30.0
FAREWELL_SECONDS: Final = 1.0
"""How long a side that refused waits for the other to read why."""


class LinkError(Exception):
    """A request that got no reply. `refused`: the other side said no, and `code` says why; otherwise it could
    not be reached, was lost, or did not answer in time."""

    def __init__(self, text: str, *, refused: bool = False, code: Code | None = None) -> None:
        super().__init__(text)
        self.refused = refused
        self.code = code


class OwnAddress(LinkError):
    """The address is this peer's own."""


class TwinAddress(LinkError):
    """Another live process with this peer's identity listens at the address."""


class Activity:
    """The use of one connection: requests under way on it, and the time when one last began or ended."""

    __slots__ = ("in_flight", "used_at")

    def __init__(self) -> None:
        self.in_flight = 0
        self.used_at = trio.current_time()

    def begin(self) -> None:
        self.in_flight += 1
        self.used_at = trio.current_time()

    def end(self) -> None:
        self.in_flight -= 1
        self.used_at = trio.current_time()


class _Pending:
    """A request that waits for its reply."""

    __slots__ = ("error", "event", "reply")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.reply: Message | None = None
        self.error: LinkError | None = None


class AskingStream:
    """The opener's end of an admitted stream."""

    def __init__(self, frames: Frames, key_id: bytes, activity: Activity | None) -> None:
        self.key_id = key_id
        """The cluster key with which it was admitted."""
        self._frames = frames
        self._activity = activity if activity is not None else Activity()
        self._slots = trio.Semaphore(MAX_REQUESTS_IN_FLIGHT)
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._lost: str | None = None

    @property
    def usable(self) -> bool:
        return self._lost is None

    async def ask(self, kind: int, request: Message) -> Message:
        """The reply. No deadline of its own. Raises `LinkError`."""
        self._activity.begin()
        try:
            return await self._ask(kind, request)
        finally:
            self._activity.end()

    async def _ask(self, kind: int, request: Message) -> Message:
        async with self._slots:
            if self._frames.is_full:
                await self._frames.wait_sent()
            if self._lost is not None:
                raise LinkError(self._lost)
            self._last_id = self._last_id % 0xFFFF_FFFF + 1
            request_id = self._last_id
            frame = encode_frame(kind, request_id, request)
            if len(frame) > CONTROL_LIMITS.body_bytes:
                raise ValueError(f"a request of {len(frame):,} bytes; at most 4 MiB fit in a frame")
            pending = self._pending[request_id] = _Pending()
            try:
                await self._frames.enqueue(frame)
                await pending.event.wait()
            except OSError as error:
                raise LinkError(str(error)) from None
            finally:
                del self._pending[request_id]
        if pending.error is not None:
            raise pending.error
        assert pending.reply is not None
        return pending.reply

    async def run(self) -> None:
        """Read replies and send requests until the stream ends and all requests fail (`ProtocolError`, `OSError`)."""
        try:
            await self._frames.run(self._take)
        finally:
            self._lost = "the connection was lost"
            for pending in self._pending.values():
                pending.error = LinkError(self._lost)
                pending.event.set()

    async def _take(self, nursery: trio.Nursery, header: FrameHeader, body: bytes) -> None:
        self._frames.handled(body)
        if not header.flags & REPLY:
            raise ProtocolError("a request on a stream that only the other side asks on")
        pending = self._pending.get(header.request_id)
        if pending is None:
            return  # the caller has given up
        if header.flags & ERROR:
            failure = decode_body(Failure, body)
            text = printable(failure.text)
            pending.error = LinkError(text, refused=True, code=code_from(failure.code))
        else:
            pending.reply = decode_body(REPLIES.get(header.kind, Empty), body)
        pending.event.set()


async def open_asking_stream(
    stream: RawStream, opener: Opener, activity: Activity | None = None, account: Account | None = None
) -> AskingStream:
    """Be admitted; `activity` counts the requests, `account` the bytes that are held for the other side.

    Raises `AdmissionRefused`, `ProtocolError`, `OSError`, `trio.TooSlowError` (10 s)."""
    frames = Frames(stream, account)
    try:
        with trio.fail_after(ADMISSION_SECONDS):
            await frames.write(encode_frame(ControlKind.HELLO, 1, opener.hello()))
            reply = await frames.expect(ControlKind.HELLO, REPLY, HelloReply)
            try:
                proof = opener.receive_reply(reply)
            except AdmissionRefused as refusal:
                failure = encode_failure(ControlKind.PROOF, 2, refusal.code, refusal.told)
                await frames.write(failure)
                raise
            await frames.write(encode_frame(ControlKind.PROOF, 2, proof))
            opener.receive_welcome(await frames.expect(ControlKind.PROOF, REPLY, Welcome))
    except AdmissionRefused as refusal:
        raise opener.explained(refusal) from None
    frames.admitted()
    return AskingStream(frames, opener.key_id, activity)


class AnsweringStream:
    """The listener's end of an admitted stream."""

    def __init__(
        self, frames: Frames, peer_id: PeerId, handler: Handler, key_id: bytes, activity: Activity | None
    ) -> None:
        self.key_id = key_id
        """The cluster key with which the opener was admitted."""
        self._frames = frames
        self._peer_id = peer_id
        self._handler = handler
        self._activity = activity if activity is not None else Activity()
        self._slots = trio.Semaphore(MAX_REQUESTS_IN_FLIGHT)

    async def run(self) -> None:
        """Answer until the stream ends. Raises `ProtocolError` and `OSError`."""
        await self._frames.run(self._take)

    async def _take(self, nursery: trio.Nursery, header: FrameHeader, body: bytes) -> None:
        if header.flags & (REPLY | ERROR):
            raise ProtocolError("a reply on a stream that only the other side asks on")
        await self._slots.acquire()
        self._activity.begin()
        nursery.start_soon(self._answer, header, body)

    async def _answer(self, header: FrameHeader, body: bytes) -> None:
        try:
            frame = await self._reply(header, body)
            self._frames.handled(body)
            del body
            if not header.flags & ONE_WAY:
                await self._frames.enqueue(frame)
        finally:
            self._activity.end()
            self._slots.release()

    async def _reply(self, header: FrameHeader, body: bytes) -> bytes:
        kind, request_id = header.kind, header.request_id
        request_type = REQUESTS.get(kind)
        if request_type is None or kind in (ControlKind.HELLO, ControlKind.PROOF):
            text = f"requests of kind {kind} are not known here"
            return encode_failure(kind, request_id, Code.UNSUPPORTED, text)
        if self._frames.is_full:
            await self._frames.wait_sent()
        request = decode_body(request_type, body)
        try:
            with trio.fail_after(HANDLER_SECONDS):
                reply = await self._handler(self._peer_id, kind, request)
            frame = encode_frame(kind, request_id, reply, flags=REPLY)
            if len(frame) > CONTROL_LIMITS.body_bytes:
                raise RuntimeError(f"a reply of {len(frame):,} bytes does not fit in a frame")
        except trio.TooSlowError:
            text = f"no answer was found within {HANDLER_SECONDS:g} s"
            return encode_failure(kind, request_id, Code.DEADLINE_EXCEEDED, text)
        except Exception as error:
            code = code_of(error)
            if code == Code.INTERNAL:
                logger.error(
                    "a request of kind %d from %s failed: %r", kind, format_peer_id(self._peer_id), error
                )
                return encode_failure(
                    kind, request_id, code, "the peer failed to answer; its log says why"
                )
            return encode_failure(kind, request_id, code, str(error))
        return frame


async def admit_stream(
    stream: RawStream,
    listener: Listener,
    handler: Handler,
    *,
    may_come: Callable[[], bool] = lambda: True,
    activity: Activity | None = None,
    readers: Handler | None = None,
    account: Account | None = None,
) -> AnsweringStream:
    """Admit the opener, if `may_come` says that there is a place (else BUSY). `activity` counts the requests, `account`
    the bytes held for the other side; `readers` answers an opener that may only read (None refuses it). Raises
    `AdmissionRefused` (after telling the opener), `ProtocolError`, `OSError`, `trio.TooSlowError`."""
    frames = Frames(stream, account)
    with trio.fail_after(ADMISSION_SECONDS):
        kind = ControlKind.HELLO
        try:
            reply = listener.receive_hello(await frames.expect(kind, 0, Hello))
            await frames.write(encode_frame(kind, 1, reply, flags=REPLY))
            kind = ControlKind.PROOF
            welcome = listener.receive_proof(await frames.expect(kind, 0, Proof))
            if listener.their_role is Role.READER:
                if readers is None:
                    raise AdmissionRefused(Code.UNSUPPORTED, "this side serves no readers")
                handler = readers
            if not may_come():
                text = "all places for members are taken and in use here; the status page says by whom"
                raise AdmissionRefused(Code.BUSY, text)
        except AdmissionRefused as refusal:
            await _refuse(frames, kind, refusal)
            raise
        await frames.write(encode_frame(kind, 2, welcome, flags=REPLY))
    frames.admitted()
    return AnsweringStream(frames, listener.peer_id, handler, listener.key_id, activity)


async def _refuse(frames: Frames, kind: ControlKind, refusal: AdmissionRefused) -> None:
    """Say why, and give the other side a moment to read it before the stream ends."""
    with suppress(OSError, ProtocolError), trio.move_on_after(FAREWELL_SECONDS):
        await frames.write(encode_failure(kind, int(kind), refusal.code, refusal.told))
        await frames.read()
