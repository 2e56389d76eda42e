"""Fetching versions to directories and to memory, and passing on versions of the previous run. Shell."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from typing import Final

import trio
from msgspec import structs

from p2pstore.checkpoint.checkpoint_messages import Fetch, Fetched
from p2pstore.checkpoint.content.directory_versions import kept_manifest, kept_versions
from p2pstore.checkpoint.content.manifest import (
    MAX_MANIFEST_BYTES,
    WILDCARDS,
    Manifest,
    SignedManifest,
    choose_files,
    format_version,
    nearest,
    open_manifest,
    unmatched,
)
from p2pstore.checkpoint.content.pieces import NO_PIECES, PieceMap, full_map, unpack_map
from p2pstore.checkpoint.content.target_directory import DirectoryInUse, TargetDirectory
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.piece_stores import HeldDirectory, HeldStore, Memories, MemoryTarget
from p2pstore.checkpoint.peer.running_swarms import SwarmParts
from p2pstore.checkpoint.peer.version_fetch import Job, JobPhase, VersionFetch, in_threads, verify
from p2pstore.errors import CheckpointRefused, NoSuchKey, P2PStoreError, ProtocolError, Unavailable
from p2pstore.gossip.checkpoint_records import Head
from p2pstore.gossip.records import PeerId, TakesPart, member_of
from p2pstore.transfer.data_messages import DataKind, GetManifest, ManifestReply
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import Verifier

logger = logging.getLogger("p2pstore.peer")

MANIFEST_SECONDS: Final = 10.0
"""Deadline for getting a manifest from any member."""
ASK_AGAIN_SECONDS: Final = 0.5
"""Time between two rounds of asking members for a manifest."""
IN_USE_SECONDS: Final = 3.0
"""How long a directory may stay locked by a fetch that is just being given up."""
LOOK_SECONDS: Final = 0.05


class Fetching:
    """Fetches for clients and followers. Pieces that are here are passed on, during the fetch and after."""

    def __init__(
        self, peer: CheckpointPeer, parts: SwarmParts, memories: Memories, finder: Finder
    ) -> None:
        self._peer = peer
        self._parts = parts
        self._memories = memories
        self._finder = finder

    # --- to directories --------------------------------------------------------------------------

    async def fetch(self, order: Fetch, directory: HeldDirectory, job: Job) -> Fetched:
        """Bring a version to a directory and put it in its place. The swarm has the directory from its beginning on.

        Raises `NoSuchKey` for an unknown checkpoint, `CheckpointRefused` for what its publisher did not sign,
        `CapacityExceeded` and `ConfigError` for a directory without room or permission, `Unavailable` when no peer
        that has it can be reached.
        """
        head, version = await self._finder.find(order)
        return await self.bring(order, version, head.publisher, directory, job)

    async def bring(
        self,
        order: Fetch,
        version: bytes,
        publisher: PeerId,
        directory: HeldDirectory,
        job: Job,
        *,
        use: bool = True,
    ) -> Fetched:
        """As `fetch`, for a known version. Without `use` the version is put in its place, but `current` stays."""
        job.version = version
        job.begin(JobPhase.CHECKING)
        signed = await self._finder.manifest(version, publisher)
        chosen, unmatched = await trio.to_thread.run_sync(_choose, order, signed.manifest, use)
        target = await self._open_target(order, signed, directory, job, chosen)

        def finish() -> Iterator[None]:
            yield from target.finishing(order.keep, use=use)
            target.close()

        store = HeldStore(target, directory.hand_over())
        fetch = VersionFetch(
            self._peer, self._parts, order, signed, target, job, store=store, finish=finish
        )
        fetched = await fetch.run()
        try:
            if not order.flat:
                await self._stop_forgotten(directory)
        finally:
            part = self._parts.get(version)
            if part is None or part.run.store is not store:
                store.close()
        where = "" if order.flat else format_version(version)
        return structs.replace(fetched, directory=where, whole=target.whole, unmatched=list(unmatched))

    async def pass_on(
        self, order: Fetch, version: bytes, publisher: PeerId, directory: HeldDirectory
    ) -> None:
        """Serve a version of the previous run, if the directory has all that was ordered. Raises `P2PStoreError`,
        `OSError`, and `ValueError` for an order of no file."""

        def look() -> tuple[SignedManifest, frozenset[int] | None] | None:
            signed = kept_manifest(directory.path, version)
            if signed is None:
                return None
            self._finder.check(signed, version, publisher)
            return signed, choose_files(signed.manifest, order.include, order.exclude)

        found = await trio.to_thread.run_sync(look)
        if found is None or self._parts.get(version) is not None:
            return
        signed, chosen = found
        target = await self._take_directory(order, signed, directory, chosen)
        target.close()  # it is only read
        if not target.committed:
            return
        store = HeldStore(target, directory.hand_over())
        part = await self._parts.begin(order.namespace, signed, store)
        part.announce(TakesPart.SEEDING)

    async def _open_target(
        self,
        order: Fetch,
        signed: SignedManifest,
        directory: HeldDirectory,
        job: Job,
        chosen: frozenset[int] | None,
    ) -> TargetDirectory:
        target = await self._take_directory(order, signed, directory, chosen)
        try:
            await in_threads(target.prepare(), job)
            if order.verify:
                await verify(target, job)
        except BaseException:
            target.close()
            raise
        return target

    async def _take_directory(
        self,
        order: Fetch,
        signed: SignedManifest,
        directory: HeldDirectory,
        chosen: frozenset[int] | None,
    ) -> TargetDirectory:
        """Lock the directory, after a fetch that is just being given up if need be."""
        make = partial(TargetDirectory, directory.path, signed, flat=order.flat, chosen=chosen)
        patience = trio.current_time() + IN_USE_SECONDS
        while True:
            try:
                return await trio.to_thread.run_sync(make)
            except DirectoryInUse:
                if trio.current_time() > patience:
                    raise
                await trio.sleep(LOOK_SECONDS)

    async def _stop_forgotten(self, directory: HeldDirectory) -> None:
        """End the parts in versions that were removed from the directory because newer ones came."""
        there = await trio.to_thread.run_sync(kept_versions, directory.path)
        for part in list(self._parts.parts.values()):
            if part.jobs or part.run.version in there or not part.run.machine.complete:
                continue
            if isinstance(part.run.store, HeldStore) and part.run.store.fetched_to(directory):
                await self._parts.stop(part.run.version)

    # --- to memory -------------------------------------------------------------------------------

    async def fetch_to_memory(self, order: Fetch, job: Job, user: int) -> Fetched:
        """Bring a version to memory that clients map, for the client `user`. It stays until its last client leaves.
        Raises like `fetch`; `CapacityExceeded` above `--checkpoint-memory`."""
        head, version = await self._finder.find(order)
        job.version = version
        job.begin(JobPhase.CHECKING)
        async with self._memories.turn(version):
            target = self._memories.use(version, user)
            if target is None:
                signed = await self._finder.manifest(version, head.publisher)
                needed = _pieces_ordered(order, signed.manifest)
                size = signed.manifest.layout.size_of(needed)
                await self._memories.until_room(size)
                with self._memories.room_for(version, size):
                    target = await trio.to_thread.run_sync(MemoryTarget, signed, needed)
                    fetched = await self._to_memory(order, target, job).run()
                self._memories.add(target, user)
                return fetched
            needed = _pieces_ordered(order, target.manifest)
            with self._memories.room_for(version, target.bytes_more(needed)):
                target.needed |= needed
        return await self._bring_more(order, target, needed, job)

    async def _bring_more(
        self, order: Fetch, target: MemoryTarget, needed: PieceMap, job: Job
    ) -> Fetched:
        """Bring more pieces of a version in memory, which other clients may use and extend at the same time."""
        size = target.manifest.layout.size_of(needed)
        missing = needed & ~target.have
        part = self._parts.get(target.version)
        if not missing:
            return Fetched(target.version, "", size, 0)
        fetch = self._to_memory(order, target, job)
        if part is None or part.run.store is not target:
            return await fetch.run()
        before = part.run.progress.fetched_bytes
        await fetch.fetch_more(part, missing)
        return Fetched(target.version, "", size, min(size, part.run.progress.fetched_bytes - before))

    def _to_memory(self, order: Fetch, target: MemoryTarget, job: Job) -> VersionFetch:
        return VersionFetch(self._peer, self._parts, order, target.signed, target, job)

    def memory_left(self, user: int) -> None:
        """A client has gone: free the versions that no other client uses."""
        for target in self._memories.left(user):
            part = self._parts.get(target.version)
            if part is not None and part.run.store is target:
                part.scope.cancel()  # the swarm closes its store when its threads are done
            else:
                target.close()


def _choose(
    order: Fetch, manifest: Manifest, exactly: bool
) -> tuple[frozenset[int] | None, tuple[str, ...]]:
    """Numbers of the files to bring (None: all), and patterns without a match. Raises `ValueError` when no file
    matches; with `exactly`, also for a name that is no file. (A follower takes what each version has.)"""
    chosen = choose_files(manifest, order.include, order.exclude)
    if not order.include and not order.exclude:
        return chosen, ()
    paths = {file.path for file in manifest.files}
    for name in unmatched(paths, order.include) if exactly else ():
        if not WILDCARDS & set(name):
            raise ValueError(f"checkpoint {manifest.name!r} has no file {name!r}{nearest(name, paths)}")
    return chosen, tuple(unmatched(paths, [*order.include, *order.exclude]))


def _pieces_ordered(order: Fetch, manifest: Manifest) -> PieceMap:
    """The pieces to bring to memory. Raises `ValueError` for pieces that do not exist."""
    count = manifest.layout.count
    if order.pieces is None:
        return full_map(count)
    try:
        return unpack_map(order.pieces, count) if order.pieces else NO_PIECES
    except ProtocolError as error:
        raise ValueError(f"pieces of checkpoint {manifest.name!r}: {error}") from error


class Finder:
    """Resolves names to versions, and versions to verified manifests."""

    def __init__(self, peer: CheckpointPeer, parts: SwarmParts, verifier: Verifier, rng: Random) -> None:
        self._peer = peer
        self._parts = parts
        self._verifier = verifier
        self._rng = rng

    async def find(self, order: Fetch) -> tuple[Head, bytes]:
        """The head of the name, and the version that the order means; waits for it if so ordered. Raises `NoSuchKey`,
        and `ValueError` when the publisher is ambiguous."""
        seen: object = None
        with trio.move_on_after(order.wait_ms / 1000):
            while True:
                try:
                    return self._find_now(order)
                except NoSuchKey:
                    if not order.wait_ms:
                        raise
                    seen = await self._peer.news(seen)
        return self._find_now(order)

    def _find_now(self, order: Fetch) -> tuple[Head, bytes]:
        head = self._peer.records.find(order.namespace, order.name, order.publisher or None)
        digits = order.version.lower()
        if not digits:
            return head, head.version
        known = [head.version, head.body.previous, *self._parts.parts]
        found = {each for each in known if each and format_version(each).startswith(digits)}
        if len(digits) == 2 * len(head.version):
            found.add(bytes.fromhex(digits))
        if len(found) != 1:
            what = "more than one version" if found else "no version"
            raise NoSuchKey(
                f"{what} of {order.name} that is known here begins with {digits}: give all its "
                f"{2 * len(head.version)} digits, or none for the newest"
            )
        return head, found.pop()

    def check(self, signed: SignedManifest, version: bytes, publisher: PeerId) -> None:
        """Verify a manifest; blocking. Raises `CheckpointRefused`."""
        open_manifest(signed, version=version, publisher=publisher, verifier=self._verifier)

    async def manifest(self, version: bytes, publisher: PeerId) -> SignedManifest:
        """The verified manifest, from any member that has it. Gossip may name one only a moment later. Raises
        `Unavailable` when none answers, and `CheckpointRefused`."""
        part = self._parts.get(version)
        if part is not None and part.run.signed.signer == publisher:
            return part.run.signed
        with trio.move_on_after(MANIFEST_SECONDS):
            while True:
                ways = self._ways(version, publisher)
                found = await ask_for_manifest(self._peer.pool, ways, version, publisher, self._verifier)
                if found is not None:
                    return found
                await trio.sleep(ASK_AGAIN_SECONDS)
        asked = f"{len(ways)} {'was' if len(ways) == 1 else 'were'} asked"
        why = self._peer.parts.why_not_offered(version, publisher) or asked
        raise Unavailable(f"no peer that has version {format_version(version)} can be reached: {why}")

    def _ways(self, version: bytes, publisher: PeerId) -> list[RemotePeer]:
        members = {*self._peer.participants(version), member_of(publisher)} - {self._peer.own}
        order = sorted(members)
        self._rng.shuffle(order)
        return [way for member in order if (way := self._peer.way_to(member)) is not None]


async def ask_for_manifest(
    pool: ConnectionPool,
    ways: Sequence[RemotePeer],
    version: bytes,
    publisher: bytes,
    verifier: Verifier,
) -> SignedManifest | None:
    """The manifest, from the first of these peers that has it; None when none has. Raises `CheckpointRefused` when
    the only manifests offered are not signed by this publisher."""
    refused: CheckpointRefused | None = None
    for way in ways:
        try:
            reply, body = await pool.request_bulk(
                way, DataKind.GET_MANIFEST, GetManifest(version), MAX_MANIFEST_BYTES
            )
        except (P2PStoreError, OSError, ValueError) as error:
            logger.debug("no manifest from %s: %s", ", ".join(way.data), error)
            continue
        assert isinstance(reply, ManifestReply)
        signed = SignedManifest(bytes(body), reply.signer, reply.signature)
        check = partial(open_manifest, signed, version=version, publisher=publisher, verifier=verifier)
        try:
            await trio.to_thread.run_sync(check)
        except CheckpointRefused as error:
            logger.warning("a manifest from %s: %s", ", ".join(way.data), error)
            refused = error
        else:
            return signed
    if refused is not None:
        raise refused
    return None
