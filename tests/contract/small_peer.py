"""A peer without other peers: a real segment in a real memfd behind the real local server.

`SmallPeer` serves from a trio loop in a thread of its own, so that blocking and trio clients of the
same test process can use it. What the segment holds is looked at through `call`, on that thread.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from p2pstore.errors import CapacityExceeded, LeaseLimitExceeded, NoSuchKey, P2PStoreError
from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local.listener import serve_local
from p2pstore.local.local_protocol import LocalClient, LocalKind
from p2pstore.local.put_columns import sizes_of, values_of
from p2pstore.memory.entries import Written
from p2pstore.memory.hazards import HAZARD_PAGE_BYTES
from p2pstore.memory.mapped.mapped_memory import SharedMemory, create_memory, create_page
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import Pin, TrailerBody, plan_geometry
from p2pstore.objects import DIGEST_BYTES, MIB, Version, batch_key_hasher, key_digest
from p2pstore.put_facts import KeyEntry, PutFacts, PutStatus
from p2pstore.runtime import linux
from p2pstore.wire import Code, Empty, Message, code_of
from simulation.segment_checks import check_segment

T = TypeVar("T")
PEER_ID = bytes.fromhex("002408011220") + bytes(32)


class SmallBackend:
    """The rules of the local socket over one segment, without replicas and other peers.

    `planned` are plan items to answer with, by digest, for tests of reading elsewhere; `gate`, once
    set to an event, holds up LOCATE, which so stands for requests that take long. Without `gives_pages`, clients have
    to ask for their leases, as of a peer that cannot give any.
    """

    request_types = local_protocol.REQUESTS

    def __init__(self, memory_bytes: int, max_leased_bytes: int, *, gives_pages: bool) -> None:
        geometry = plan_geometry(memory_bytes)
        self.memory = create_memory(geometry.total_bytes, "small-peer", huge_pages="never")
        self.read_only = self.memory.read_only_descriptor()
        self.segment = Segment(
            self.memory.view,
            segment_id=os.urandom(16),
            incarnation=1,
            geometry=geometry,
            barrier=linux.memory_barrier,
        )
        self.max_leased_bytes = max_leased_bytes
        self.gives_pages = gives_pages
        self.pages: dict[int, SharedMemory] = {}
        self.planned: dict[bytes, list[local.PlanItem]] = {}
        self.excluded: list[list[int]] = []
        self.reports: list[local.Report] = []
        self.requests: list[LocalKind] = []
        self.on_handled: Callable[[], object] = lambda: None
        self.on_made_ready: Callable[[], object] = lambda: None
        self.on_answered: Callable[[], object] = lambda: None
        self.clients: list[LocalClient] = []
        self.gone: list[int] = []
        self.gate: trio.Event | None = None
        self._clock = 0

    def close(self) -> None:
        self.segment.close()
        os.close(self.read_only)
        self.memory.close()

    def welcome(self, client: LocalClient, version: int) -> tuple[local_protocol.HelloReply, list[int]]:
        self.clients.append(client)
        writable = client.access == local_protocol.Access.WRITE
        segment = local_protocol.SegmentInfo(self.segment.segment_id, self.segment.geometry.total_bytes)
        reply = local_protocol.HelloReply(
            version, PEER_ID, "small", 1, [segment], self.max_leased_bytes, "test"
        )
        descriptors = [self.memory.descriptor if writable else self.read_only]
        if self.gives_pages and client.hazards:
            page = self.pages[client.session] = create_page(HAZARD_PAGE_BYTES, "small-peer-hazards")
            self.segment.leases.watch_hazards(client.session, page.view)
            reply = msgspec.structs.replace(reply, hazards=True)
            descriptors.append(page.descriptor)
        return reply, descriptors

    def welcomed(self, client: LocalClient) -> None:
        if client.session in self.pages:
            self.pages[client.session].close_descriptor()

    def make_ready(self) -> None:
        self.on_made_ready()

    def handled(self) -> None:
        self.on_handled()

    def began(self, kind: LocalKind, message: Message) -> object:
        return None

    def answered(self, *_: object) -> None:
        self.on_answered()

    def client_gone(self, client: LocalClient) -> None:
        self.gone.append(client.session)
        self.segment.drop_session(client.session)
        if client.session in self.pages:
            self.pages.pop(client.session).close()

    def handle(
        self, client: LocalClient, kind: LocalKind, message: Any
    ) -> Message | Awaitable[Message | None] | None:
        self.requests.append(kind)
        handler = getattr(self, f"_{kind.name.lower()}", None)
        if handler is None:
            raise P2PStoreError(f"the small peer does not do {kind.name}")
        answer: Message | Awaitable[Message | None] | None = handler(client, message)
        return answer

    def _reserve(self, client: LocalClient, message: local.Reserve) -> Message:
        return local.Reserved([self._reserve_one(client, *size) for size in sizes_of(message.rooms)])

    def _reserve_one(self, client: LocalClient, length: int, trailer_length: int) -> local.Span:
        try:
            made = self.segment.reserve(length, trailer_length, session=client.session, now=time.time())
        except P2PStoreError as error:
            return local.Span(1, error=_item_error(error))
        return local.Span(1, made.number, made.length, made.offset.to_bytes(8, "little"))

    def _commit(self, client: LocalClient, message: local.Commit) -> Message:
        items = values_of(message, batch_key_hasher(message.namespace))
        outcomes = [(1, self._commit_one(client, message.namespace, item)) for item in items]
        again = [self._reserve_one(client, *size) for size in sizes_of(message.again)]
        return local.Committed(outcomes, again)

    def _commit_one(self, client: LocalClient, namespace: str, item: PutFacts) -> local.PutOutcome:
        digest, options = item.digest, item.options
        existing = self.segment.find(digest, time.time())
        if existing is not None and not options.overwrite:
            self.segment.abort(item.reservation, session=client.session)
            same = existing.version.root == item.root and existing.length == item.length
            status = PutStatus.UNCHANGED if same else PutStatus.KEPT_EXISTING
            version = existing.version
            return local.PutOutcome(status, 1, options.replicas, version.clock, version.writer)
        self._clock += 1
        trailer = TrailerBody(
            namespace,
            item.key,
            item.sums,
            int(time.time() * 1000) + options.ttl_ms if options.ttl_ms else 0,
            options.replicas,
            options.pin,
            options.dtype,
            options.shape,
        )
        self.segment.commit(
            Written(item.reservation, digest, Version(self._clock, 7, item.root), trailer, item.length),
            session=client.session,
            soft=False,
            now=time.time(),
        )
        return local.PutOutcome(PutStatus.CREATED, 1, options.replicas, self._clock, 7)

    def _place(self, client: LocalClient, message: local.Place) -> Message:
        return local.Placed([], error=_item_error(CapacityExceeded("there is no other peer")))

    def _abort(self, client: LocalClient, message: local.Abort) -> None:
        for number in message.reservations:
            with contextlib.suppress(ValueError):  # it has ended already
                self.segment.abort(number, session=client.session)

    def _lease(self, client: LocalClient, message: local.Lease) -> Message:
        return local.Leased([self._lease_one(client, each) for each in split(message.digests)])

    def _lease_one(self, client: LocalClient, digest: bytes) -> local.LeaseGrant:
        entry = self.segment.find(digest, time.time())
        error: P2PStoreError
        if entry is None:
            error = NoSuchKey("no live peer holds this key")
            return local.LeaseGrant(0, 0, 0, 0, 0, error=_item_error(error))
        if self.segment.leases.leased_bytes_of(client.session) + entry.length > self.max_leased_bytes:
            error = LeaseLimitExceeded("let go of views before you take more")
            return local.LeaseGrant(0, 0, 0, 0, 0, error=_item_error(error))
        number = self.segment.leases.lease(entry, session=client.session, now=time.time())
        version = entry.version
        return local.LeaseGrant(
            *(number, 0, entry.offset, entry.length, entry.trailer_length),
            *(version.clock, version.writer, version.root),
        )

    def _release(self, client: LocalClient, message: local.Release) -> None:
        for lease in message.leases:
            self.segment.leases.release(lease, session=client.session)

    def _plan(self, client: LocalClient, message: local.Plan) -> Message | Awaitable[Message]:
        self.excluded.append(message.exclude)
        if message.wait_ms and not self.planned:
            return self._plan_later(message)
        return local.Planned([self._plan_one(each) for each in split(message.digests)])

    async def _plan_later(self, message: local.Plan) -> Message:
        with trio.move_on_after(message.wait_ms / 1000):
            while any(  # a small peer; the real one is told
                self.segment.find(each, time.time()) is None for each in split(message.digests)
            ):
                await trio.sleep(0.005)
        return local.Planned([self._plan_one(each) for each in split(message.digests)])

    def _plan_one(self, digest: bytes) -> local.PlanItem:
        if self.planned.get(digest):
            return self.planned[digest].pop(0)
        if self.segment.find(digest, time.time()) is not None:
            return local.PlanItem([], local=True)
        error = local.ItemError(int(Code.NO_SUCH_KEY), "no live peer holds this key")
        return local.PlanItem([], error=error)

    def _report(self, client: LocalClient, message: local.Report) -> None:
        self.reports.append(message)

    def _contains(self, client: LocalClient, message: local.Contains) -> Message:
        found = [self.segment.find(each, time.time()) for each in split(message.digests)]
        return local.ContainsReply(bytes(each is not None for each in found))

    def _match_prefix(self, client: LocalClient, message: local.MatchPrefix) -> Message:
        for number, digest in enumerate(split(message.digests)):
            if self.segment.find(digest, time.time()) is None:
                return local.MatchedPrefix(number)
        return local.MatchedPrefix(len(message.digests) // DIGEST_BYTES)

    def _locate(self, client: LocalClient, message: local.Locate) -> Awaitable[Message]:
        return self._locate_behind(self.gate, message)  # the gate of now: a test may set another

    async def _locate_behind(self, gate: trio.Event | None, message: local.Locate) -> Message:
        if gate is not None:
            await gate.wait()
        copies = []
        for digest in split(message.digests):
            entry = self.segment.find(digest, time.time())
            copies.append([] if entry is None else [_copy(entry)])
        return local.Located(copies)

    def _remove(self, client: LocalClient, message: local.Remove) -> Message:
        removed = [self.segment.remove(key_digest(key, message.namespace)) for key in message.keys]
        return local.Removed([each is not None for each in removed])

    def _list(self, client: LocalClient, message: local.ListKeys) -> Message:
        entries, more = self.segment.listing.page(
            message.namespace, message.prefix, message.after, message.limit
        )
        return local.Keys(
            [
                KeyEntry(each.key, each.length, 1, ["small"], each.pin, each.soft, each.expires_unix_ms)
                for each in entries
            ],
            more,
            [],
        )

    def _peers(self, client: LocalClient, message: local.Peers) -> Message:
        me = local.PeerEntry(PEER_ID, "small", "alive", 1, [], [], 1, 0, 0, True, "test", 0.0)
        return local.PeersReply([me])

    def _statistics(self, client: LocalClient, message: local.Statistics) -> Message:
        return local.StatisticsReply(
            json.dumps({"peer": {"objects": self.segment.object_count}}).encode()
        )

    def _pin(self, client: LocalClient, message: local.SetPin) -> Message:
        items = []
        for digest in split(message.digests):
            entry = self.segment.find(digest, time.time())
            if entry is None:
                items.append(_item_error(NoSuchKey("no live peer holds this key")))
            else:
                self.segment.objects.set_pin(entry, Pin(message.pin), 0)
                items.append(local.OK)
        return local.Pinned(items)

    def _flush(self, client: LocalClient, message: local.Flush) -> Message:
        for entry in self.segment.listing.page(message.namespace, "", "", 1000)[0]:
            self.segment.remove(entry.digest)
        return Empty()


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _item_error(error: P2PStoreError) -> local.ItemError:
    return local.ItemError(int(code_of(error)), str(error))


def _copy(entry: Any) -> local.Copy:
    version = entry.version
    return local.Copy(
        *(PEER_ID, "small", 0, entry.length, version.clock, version.writer),
        *(entry.soft, int(entry.pin), True, True),
    )


class SmallPeer:
    """A running `SmallBackend`."""

    def __init__(
        self,
        path: Path,
        *,
        memory_bytes: int = 16 * MIB,
        max_leased_bytes: int | None = None,
        gives_pages: bool = False,
    ) -> None:
        self.path = path
        limit = max_leased_bytes if max_leased_bytes is not None else 1 << 62
        self.backend = SmallBackend(memory_bytes, limit, gives_pages=gives_pages)
        self.failure: BaseException | None = None
        self.token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="small-peer")
        self._thread.start()
        assert self._ready.wait(60)
        if self.failure is not None:
            self._thread.join(60)
            self.backend.close()
            raise self.failure

    def _run(self) -> None:
        async def main() -> None:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(
                        partial(serve_local, self.path, self.backend, observer=self.backend)
                    )
                    self.token = trio.lowlevel.current_trio_token()
                    self._ready.set()

        try:
            trio.run(main)
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the peer's thread; for callers in a trio loop of their own too."""
        assert self.token is not None
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        self.token.run_sync_soon(run)
        return outcome.result(10)

    def stall(self, seconds: float) -> None:
        """Stall the whole peer for this time, from now on."""
        assert self.token is not None
        begun = threading.Event()

        def stand_still() -> None:
            begun.set()
            time.sleep(seconds)

        self.token.run_sync_soon(stand_still)
        assert begun.wait(60)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The whole peer stands still for the length of the block."""
        wake, stands = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            wake.wait(120)

        assert self.token is not None
        self.token.run_sync_soon(stand)
        assert stands.wait(30)
        try:
            yield
        finally:
            wake.set()

    def wait_until(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        """Wait for something to become true on the peer's thread."""
        deadline = time.monotonic() + seconds
        while not self.call(condition):
            assert time.monotonic() < deadline, "it did not become true in time"
            time.sleep(0.002)

    def used_bytes(self) -> int:
        """Bytes taken in the segment, which is checked for leaks and contradictions."""

        def look() -> int:
            check_segment(self.backend.segment)
            return self.backend.segment.used_bytes

        return self.call(look)

    def stop(self) -> None:
        """End the server; clients see their connections close."""
        if self._thread.is_alive():
            with contextlib.suppress(trio.RunFinishedError):
                self.call(self._scope.cancel)
            self._thread.join(60)
            assert not self._thread.is_alive()
            self.backend.close()
        if self.failure is not None:
            raise self.failure


@contextlib.contextmanager
def small_peer(path: Path, **settings: Any) -> Iterator[SmallPeer]:
    """A small peer for the length of the block; at its end nothing may be leased or reserved."""
    peer = SmallPeer(path, **settings)
    try:
        yield peer
    finally:
        peer.stop()
    assert sorted(peer.backend.gone) == sorted(each.session for each in peer.backend.clients)
    assert math.isfinite(peer.backend.segment.leased_bytes)
