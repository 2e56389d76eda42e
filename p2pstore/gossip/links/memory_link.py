"""A link without sockets: peers of one process, over streams in memory. Shell, without libp2p.

Everything above the bytes is the real thing: admission, frames, the codec, limits, deadlines. It passes the same
contract as the control host (tests/contract/test_link.py), opens in microseconds, and its network may be
cut in one direction or both, which takes root with sockets.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar

import trio

from p2pstore.access.allowlist import AllowList
from p2pstore.access.keyring import KeyRing
from p2pstore.errors import ProtocolError
from p2pstore.gossip.links.admission import NONCE_BYTES, AdmissionRefused, Listener, Opener
from p2pstore.gossip.links.control_link import (
    AskingStream,
    Handler,
    LinkError,
    admit_stream,
    open_asking_stream,
)
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.runtime.trio_tasks import open_background_nursery
from p2pstore.wire import Message

_S = TypeVar("_S", Opener, Listener)

_PIPE_BYTES: Final = 256 * 1024
"""Bytes under way in one direction before the writer waits."""


class MemoryNetwork:
    """Listeners, and which directions are cut. Bytes sent in a cut direction arrive after `heal`."""

    def __init__(self) -> None:
        self.listening: dict[str, MemoryLink] = {}
        self._cut: set[tuple[PeerId, PeerId]] = set()
        self._healed = trio.Event()

    def cut(self, source: PeerId, target: PeerId) -> None:
        """Let nothing from `source` arrive at `target` any more; the other way still works."""
        self._cut.add((source, target))

    def heal(self) -> None:
        """Undo all cuts."""
        self._cut.clear()
        self._healed.set()
        self._healed = trio.Event()

    async def wait_passes(self, source: PeerId, target: PeerId) -> None:
        """Return when what `source` sent may arrive at `target`."""
        while (source, target) in self._cut:
            await self._healed.wait()


class _Pipe:
    """One direction of a stream."""

    def __init__(self, network: MemoryNetwork, source: PeerId, target: PeerId) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._buffer = bytearray()
        self._changed = trio.Event()
        self._writer_gone = False
        self._reader_gone = False

    async def read(self, max_bytes: int) -> bytes:
        while True:
            if self._reader_gone:
                raise ConnectionResetError("this side closed the stream")
            await self._network.wait_passes(self._source, self._target)
            if self._buffer:
                data = bytes(self._buffer[:max_bytes])
                del self._buffer[:max_bytes]
                self._happened()
                return data
            if self._writer_gone:
                raise ConnectionResetError("the other side closed the stream")
            await self._changed.wait()

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view:
            if self._reader_gone or self._writer_gone:
                raise ConnectionResetError("the stream is closed")
            room = _PIPE_BYTES - len(self._buffer)
            if room > 0:
                self._buffer += view[:room]
                view = view[room:]
                self._happened()
            else:
                await self._changed.wait()

    def writer_leaves(self) -> None:
        self._writer_gone = True
        self._happened()

    def reader_leaves(self) -> None:
        self._reader_gone = True
        self._happened()

    def _happened(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class _Stream:
    """One end of a stream: a `MuxedStream`."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def read(self, max_bytes: int) -> bytes:
        return await self._incoming.read(max_bytes)

    async def write(self, data: bytes) -> None:
        await self._outgoing.write(data)

    def close(self) -> None:
        self._incoming.reader_leaves()
        self._outgoing.writer_leaves()


class MemoryLink:
    """One peer's link. Made by `open_memory_link`; satisfies `p2pstore.gossip.links.control_link.Link`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: PeerId,
        ring: KeyRing,
        cluster: str,
        handler: Handler,
        on_lost: Callable[[PeerId], None],
    ) -> None:
        self.peer_id = peer_id
        self.nursery: trio.Nursery
        self._network = network
        self._ring = ring
        self._cluster = cluster
        self._handler = handler
        self._on_lost = on_lost
        self._asking: dict[PeerId, AskingStream] = {}
        self._opening: dict[PeerId, trio.Lock] = {}
        self._admitted: dict[PeerId, list[_Stream]] = {}
        self._closed = False

    async def ask(
        self,
        peer_id: PeerId,
        addresses: Sequence[str],
        kind: int,
        request: Message,
        timeout_seconds: float,
    ) -> Message:
        """The peer's reply. Raises `LinkError`; `ValueError` when the request is over 4 MiB."""
        try:
            with trio.fail_after(timeout_seconds):
                async with self._opening.setdefault(peer_id, trio.Lock()):
                    asking = self._asking.get(peer_id)
                    if asking is None or not asking.usable:
                        asking = await self._open(peer_id, addresses)
                return await asking.ask(kind, request)
        except trio.TooSlowError:
            raise LinkError(
                f"{format_peer_id(peer_id)} did not answer within {timeout_seconds:g} s"
            ) from None

    async def disconnect(self, peer_id: PeerId) -> None:
        """End all streams with a peer; `on_lost` is not called."""
        for stream in self._admitted.pop(peer_id, []):
            stream.close()
        self._asking.pop(peer_id, None)
        await trio.lowlevel.checkpoint()

    def connected(self) -> list[PeerId]:
        """Peers with an admitted stream in either direction."""
        return list(self._admitted)

    def close(self) -> None:
        """Stop listening and end all streams, without a word. May be called twice."""
        self._closed = True
        for address in [a for a, link in self._network.listening.items() if link is self]:
            del self._network.listening[address]
        self.nursery.cancel_scope.cancel()

    # --- asking ------------------------------------------------------------------------------

    async def _open(self, peer_id: PeerId, addresses: Sequence[str]) -> AskingStream:
        found = [link for a in addresses if (link := self._network.listening.get(a)) is not None]
        other = next((link for link in found if link.peer_id == peer_id), None)
        if other is None:
            what = "another peer than the one wanted" if found else "nobody"
            raise LinkError(f"{what} listens at {', '.join(addresses) or 'no address'}")
        to, fro = (
            _Pipe(self._network, self.peer_id, peer_id),
            _Pipe(self._network, peer_id, self.peer_id),
        )
        other.nursery.start_soon(other._serve, _Stream(to, fro), self.peer_id)
        try:
            asking: AskingStream = await self.nursery.start(self._run, _Stream(fro, to), peer_id)
        except AdmissionRefused as refusal:
            raise LinkError(str(refusal), refused=True, code=refusal.code) from None
        except (OSError, ProtocolError, RuntimeError) as error:
            raise LinkError(f"no stream to {format_peer_id(peer_id)}: {error}") from None
        return asking

    async def _run(
        self,
        stream: _Stream,
        peer_id: PeerId,
        task_status: trio.TaskStatus[AskingStream] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            asking = await open_asking_stream(stream, self._side(Opener, peer_id))
            with self._using(peer_id, stream):
                self._asking[peer_id] = asking
                task_status.started(asking)
                with _ordinary_end():
                    await asking.run()
        finally:
            stream.close()

    # --- answering ---------------------------------------------------------------------------

    async def _serve(self, stream: _Stream, peer_id: PeerId) -> None:
        try:
            with _ordinary_end():
                side = self._side(Listener, peer_id)
                answering = await admit_stream(stream, side, self._handler)
                with self._using(peer_id, stream):
                    await answering.run()
        finally:
            stream.close()

    # --- both --------------------------------------------------------------------------------

    @contextmanager
    def _using(self, peer_id: PeerId, stream: _Stream) -> Iterator[None]:
        """An admitted stream exists inside; the loss of a peer's last one is reported."""
        self._admitted.setdefault(peer_id, []).append(stream)
        try:
            yield
        finally:
            left = self._admitted.get(peer_id, [])
            if stream in left:
                left.remove(stream)
                if not left:
                    del self._admitted[peer_id]
                    if not self._closed:
                        self._on_lost(peer_id)

    def _side(self, side: type[_S], peer_id: PeerId) -> _S:
        return side(
            ring=self._ring,
            allowed=AllowList(),
            cluster=self._cluster,
            own_id=self.peer_id,
            peer_id=peer_id,
            nonce=secrets.token_bytes(NONCE_BYTES),
            software="memory",
        )


@contextmanager
def _ordinary_end() -> Iterator[None]:
    """A stream that ends, breaks the protocol or is refused ends alone; the asker is told in its own way."""
    try:
        yield
    except (OSError, ProtocolError, AdmissionRefused, trio.TooSlowError):
        return


@asynccontextmanager
async def open_memory_link(
    network: MemoryNetwork,
    address: str,
    *,
    peer_id: PeerId,
    ring: KeyRing,
    cluster: str,
    handler: Handler,
    on_lost: Callable[[PeerId], None],
) -> AsyncIterator[MemoryLink]:
    """A link that listens at `address` of `network` until the block ends. Parameters as of `open_control_host`."""
    link = MemoryLink(network, peer_id, ring, cluster, handler, on_lost)
    async with open_background_nursery() as outer:
        link.nursery = outer
        network.listening[address] = link
        try:
            yield link
        finally:
            link.close()
