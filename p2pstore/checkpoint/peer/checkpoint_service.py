"""Everything of checkpoints that one peer does: what it publishes, what it fetches, and its part in their swarms.

A peer goes on passing a version on after it has published or fetched it, until it ends, the version is stopped, or
there are too many: then the one begun first goes that nobody waits for.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

import trio

from p2pstore.checkpoint.content.content_paths import check_checkpoint_name
from p2pstore.checkpoint.content.directory_versions import kept_manifest, kept_versions
from p2pstore.checkpoint.content.hashing import hash_source
from p2pstore.checkpoint.content.manifest import (
    Manifest,
    SignedManifest,
    Signer,
    Verifier,
    format_version,
    open_manifest,
    sign_manifest,
)
from p2pstore.checkpoint.content.piece_map import NO_PIECES, PieceMap, pieces_in
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.source_directory import SourceDirectory
from p2pstore.checkpoint.content.source_memory import SourceMemory
from p2pstore.checkpoint.content.target_directory import (
    DirectoryInUse,
    TargetDirectory,
)
from p2pstore.checkpoint.peer.held_directory import HeldDirectory
from p2pstore.checkpoint.peer.holding import Holding, PublishedMemory
from p2pstore.checkpoint.peer.job import Job, JobPhase
from p2pstore.checkpoint.peer.manifests import ask_for_manifest
from p2pstore.checkpoint.peer.memories import Memories
from p2pstore.checkpoint.peer.memory_target import MemoryTarget
from p2pstore.checkpoint.peer.orders import Fetched, FetchOrder, PublishOrder, pieces_ordered
from p2pstore.checkpoint.peer.publications import Publication, Publications
from p2pstore.checkpoint.peer.running import RunningSwarms
from p2pstore.checkpoint.peer.stores import PieceStore, PublishedPieces, Target
from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.checkpoint.peer.updating import ACQUAINTED_SECONDS
from p2pstore.checkpoint.peer.verifying import make_durable, reader_of, verify
from p2pstore.checkpoint.swarm.choosing import WILDCARDS, choose_files, nearest, unmatched
from p2pstore.errors import (
    CapacityExceeded,
    CheckpointChanged,
    ConfigError,
    NoSuchKey,
    P2PStoreError,
    StoreClosed,
    Unavailable,
)
from p2pstore.gossip.checkpoint_records import Head, checkpoint_digest, short_version
from p2pstore.gossip.records import Participation, PeerId, TakesPart, member_of
from p2pstore.objects import format_peer_id
from p2pstore.peer.node import Node
from p2pstore.runtime.nursery import open_background_nursery
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transport import RemotePeer

logger = logging.getLogger("p2pstore.peer")

MAX_SWARMS: Final = 16
THREADS: Final = 4
"""That read, verify and write pieces."""
MANIFEST_SECONDS: Final = 10.0
"""Until somebody must have given a manifest."""
ASK_AGAIN_SECONDS: Final = 0.5
"""Between two rounds of asking for a manifest."""
HOPE_SECONDS: Final = 10.0
"""Until a fetch ends whose publisher says that it has given the version up."""
IN_USE_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 0.05
REPORT_SECONDS: Final = 0.25
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

TellPart = Callable[[TakesPart, int, str], None]
"""Has others know this peer's part in a version: its state, permille done, why it failed."""


@dataclass(frozen=True, slots=True)
class _Bringing:
    """What is brought where."""

    order: FetchOrder
    signed: SignedManifest
    target: Target
    store: PieceStore
    """The target, with what it needs to stay open."""
    job: Job
    finish: Callable[[], Iterator[None]]
    """Puts it in its place, in steps; in threads."""


@dataclass(slots=True, eq=False)
class _Part:
    """A swarm that runs here."""

    run: SwarmRun
    scope: trio.CancelScope
    tell: TellPart
    digest: bytes
    jobs: int = 0
    """Who waits for it."""

    def say(self, state: TakesPart, done_permille: int = 1000) -> None:
        """Have others know how far it is, unless it has ended: how it ended is the last that they hear of it."""
        if not self.run.ended.is_set():
            self.tell(state, done_permille, "")


class PeerCheckpoints:
    """Satisfies `Surroundings` for its swarms."""

    def __init__(
        self,
        node: Node,
        signer: Signer,
        verifier: Verifier,
        rng: Random,
        memory_limit_bytes: int | None = None,
        publications: Publications | None = None,
    ) -> None:
        """`memory_limit_bytes`: see `Memories`. `publications`: what was published in an earlier life, and will be in
        the next."""
        self._publications = publications or Publications(None)
        self.memories = Memories(memory_limit_bytes)
        self.swarms = RunningSwarms()
        self.threads = trio.CapacityLimiter(THREADS)
        self._node = node
        self._core = node.core
        self._signer = signer
        self._verifier = verifier
        self._rng = rng
        self._parts: dict[bytes, _Part] = {}

    # --- surroundings ------------------------------------------------------------------------

    @property
    def own(self) -> int:
        """This peer's short name."""
        return self._core.member

    @property
    def pool(self) -> DataPool:
        """Connections to other peers."""
        return self._node.pool

    def way_to(self, member: int) -> RemotePeer | None:
        """How to reach a member; None when it is gone, or was not heard of yet."""
        state = self._core.gossip.membership.resolve(member)
        if state is None or not state.live:
            return None
        return self._node.routes.remote_peer(state.peer_id)

    def is_gone(self, member: int) -> bool:
        """Whether it was there, and is not any more."""
        state = self._core.gossip.membership.resolve(member)
        return state is not None and not state.live

    def is_here(self, member: int) -> bool:
        """Whether it is on this host."""
        state = self._core.gossip.membership.resolve(member)
        record = None if state is None else state.record
        return record is not None and record.host_id == self._node.routes.host_id

    def participants(self, version: bytes) -> Iterable[int]:
        """Who has pieces of it, or wants them, as gossip says it."""
        return self._core.checkpoints.participants(version)

    async def watch(self) -> None:
        """Have the swarms hear what gossip brings, until cancelled."""
        seen: object = None
        while True:
            seen = await self._node.checkpoint_news(seen)
            for run in self.swarms.all():
                run.look_around()
            await trio.sleep(LOOK_SECONDS)  # in a large cluster there is always something new

    # --- publishing --------------------------------------------------------------------------

    async def publish(
        self, order: PublishOrder, directory: HeldDirectory, job: Job
    ) -> tuple[bytes, Manifest]:
        """Publish a directory: others can fetch it when this returns. Its files are read from where they are, as long
        as this peer has a part in the version, so `directory` stays open until then.

        Raises `CheckpointRefused` and `CheckpointChanged`, and `OSError`.
        """
        await self._check_free(order)
        source = await trio.to_thread.run_sync(
            SourceDirectory, directory.path, order.include, order.exclude
        )

        def store(manifest: Manifest, _: bytes) -> PieceStore:
            return Holding(PublishedPieces(source, manifest), directory.hand_over())

        held = directory.again()

        def keep(signed: SignedManifest) -> None:
            self._publications.keep(order.namespace, signed, source, held)

        try:
            return await self._publish(order, source, store, job, keep)
        finally:
            held.close()

    async def publish_again(self) -> None:
        """What was published from directories in an earlier life, and is still the newest of its name, or in use. Where
        files have changed since, others hear that it is not."""
        try:
            for kept in await trio.to_thread.run_sync(self._publications.load):
                await self._publish_if_it_counts(kept)
        except (P2PStoreError, OSError) as error:
            logger.warning("what was published before is not published again: %s", error)

    async def _publish_if_it_counts(self, kept: Publication) -> None:
        manifest, version = kept.manifest.manifest, kept.manifest.version
        if kept.manifest.signer != self._core.peer_id:
            logger.warning(
                "checkpoint %s@%s was published by %s, which this peer was before: publish it again, from %s",
                manifest.name,
                format_version(version),
                format_peer_id(kept.manifest.signer),
                os.fsdecode(kept.directory),
                extra={"event": "checkpoint_failed"},
            )
        if not self._counts(kept, manifest.name, version):
            await trio.to_thread.run_sync(self._publications.forget, version)
            return
        try:
            await self._publish_again(kept, manifest, version)
        except (P2PStoreError, OSError) as error:  # the others are published all the same
            logger.warning(
                "checkpoint %s@%s is not published again: %s",
                manifest.name,
                format_version(version),
                error,
                extra={"event": "checkpoint_failed"},
            )

    def _counts(self, kept: Publication, name: str, version: bytes) -> bool:
        """Whether others may want a version that was published here. (A head that is not known was lost with the last
        moments of the earlier life.)"""
        if kept.manifest.signer != self._core.peer_id:
            return False
        digest = checkpoint_digest(kept.namespace, name, self._core.peer_id)
        head, switch = self._core.checkpoints.head(digest), self._core.checkpoints.switched(digest)
        if head is None or (switch is not None and switch.version == version):
            return True
        return head.version == version and not head.gone

    async def _publish_again(self, kept: Publication, manifest: Manifest, version: bytes) -> None:
        called = f"{manifest.name}@{format_version(version)}"
        where = os.fsdecode(kept.directory)
        digest = checkpoint_digest(kept.namespace, manifest.name, self._core.peer_id)
        try:
            source, directory = await trio.to_thread.run_sync(kept.open)
        except (CheckpointChanged, ConfigError, OSError) as error:
            why = f"{where}: {error.strerror if isinstance(error, OSError) else error}"
            logger.warning(
                "checkpoint %s is not published any more: %s; publish it again",
                called,
                why,
                extra={"event": "checkpoint_failed"},
            )
            self._teller(digest, version)(TakesPart.FAILED, 0, why)
            return
        if version in self._parts:  # its user was quicker
            directory.close()
            return
        store = Holding(PublishedPieces(source, manifest), directory)
        part = await self._begin(kept.namespace, kept.manifest, store, publishes=True)
        if self._core.checkpoints.head(digest) is None:
            self._announce(kept.namespace, kept.manifest)
        part.say(TakesPart.PUBLISHING)
        logger.info(
            "checkpoint %s is published again, from %s",
            called,
            where,
            extra={"event": "checkpoint_published"},
        )

    async def publish_memory(
        self, order: PublishOrder, source: SourceMemory, job: Job
    ) -> tuple[bytes, Manifest]:
        """As `publish`, a file in memory, which is closed when this peer has no part in it any more. An older version
        of the name from memory is given away no more, unless followers use it. Raises `CapacityExceeded` as well."""
        before = set(self.memories.published)
        held = False
        try:
            await self._check_free(order)
            self.memories.check_published(source.total_bytes)

            def store(manifest: Manifest, version: bytes) -> PieceStore:
                nonlocal held
                held = True
                return PublishedMemory(source, manifest, version, self.memories)

            version, manifest = await self._publish(order, source, store, job)
        except BaseException:
            if not held:
                source.close()
            raise
        digest = checkpoint_digest(order.namespace, order.name, self._core.peer_id)
        switched = self._core.checkpoints.switched(digest)
        for old in before - {version, b"" if switched is None else switched.version}:
            part = self._parts.get(old)
            if part is not None and part.digest == digest and not part.jobs:
                await self.stop(old)
        return version, manifest

    async def _publish(
        self,
        order: PublishOrder,
        source: SourceDirectory | SourceMemory,
        make_store: Callable[[Manifest, bytes], PieceStore],
        job: Job,
        keep: Callable[[SignedManifest], None] = lambda _: None,
    ) -> tuple[bytes, Manifest]:
        self._core.timekeeping.check(self._node.now)  # rather than when all is hashed
        job.begin(JobPhase.HASHING, source.total_bytes)
        manifest = await hash_source(
            source,
            order.name,
            reader=reader_of(source.total_bytes),
            piece_bytes=order.piece_bytes,
            previous_piece_bytes=self._previous_piece_bytes(order),
            progress=job.advance,
        )
        signed = await trio.to_thread.run_sync(sign_manifest, manifest, self._signer)
        version = job.version = signed.version
        await self._check_free(order)  # the others may have been quicker
        await self.stop(version)
        part = await self._begin(
            order.namespace, signed, make_store(manifest, version), publishes=True
        )
        with self._wanted(part):
            await trio.to_thread.run_sync(keep, signed)
            self._announce(order.namespace, signed)
            part.say(TakesPart.PUBLISHING)
            logger.info(
                "published checkpoint %s@%s",
                order.name,
                format_version(version),
                extra={"event": "checkpoint_published"},
            )
            if order.wait_seeded:
                job.begin(JobPhase.SEEDING, manifest.layout.total_bytes)
                await part.run.until_dispensable(job.at)
        return version, manifest

    async def _check_free(self, order: PublishOrder) -> None:
        """Raises `CheckpointRefused` for what is no name, and for one of another publisher. A peer that has just
        started waits for a moment, until it has heard what its neighbours know."""
        check_checkpoint_name(order.name)
        with trio.move_on_after(max(0.0, ACQUAINTED_SECONDS - self._node.uptime_seconds)):
            while not self._core.gossip.floors.synchronised:  # noqa: ASYNC110  # the core is pure
                await trio.sleep(LOOK_SECONDS)
        self._core.checkpoints.check_free(order.namespace, order.name)

    def _announce(self, namespace: str, signed: SignedManifest) -> None:
        """Say that this is the newest version of the name."""
        manifest = signed.manifest
        self._core.checkpoints.publish(
            namespace,
            manifest.name,
            signed.version,
            self._node.now,
            manifest_bytes=len(signed.body),
            total_bytes=manifest.layout.total_bytes,
            files=len(manifest.files),
            pieces=manifest.layout.count,
        )

    def _previous_piece_bytes(self, order: PublishOrder) -> int:
        """Of the version that this peer published under the name before, if it is still at hand."""
        digest = checkpoint_digest(order.namespace, order.name, self._core.peer_id)
        head = self._core.checkpoints.head(digest)
        run = None if head is None else self.swarms.get(head.version)
        return 0 if run is None else run.manifest.piece_bytes

    # --- fetching ----------------------------------------------------------------------------

    async def fetch(self, order: FetchOrder, directory: HeldDirectory, job: Job) -> Fetched:
        """Bring a version to a directory, and put it in its place; `directory` is closed when nobody needs it any more.
        This peer passes on what it has of the version, then and later.

        Raises `NoSuchKey` when there is no such checkpoint, `CheckpointRefused` for what its publisher did not sign,
        `CapacityExceeded` and `ConfigError` for a directory without room or permission, `Unavailable` when nobody who
        has it can be reached.
        """
        head, version = await self._find(order, job)
        return await self.bring(order, version, head.publisher, directory, job)

    async def bring(
        self,
        order: FetchOrder,
        version: bytes,
        publisher: PeerId,
        directory: HeldDirectory,
        job: Job,
        *,
        use: bool = True,
    ) -> Fetched:
        """As `fetch`, of a version that is known. Without `use`, it is put in its place, but `current` stays."""
        job.version = version
        job.begin(JobPhase.CHECKING)
        signed = await self._manifest(version, publisher)
        chosen, unmatched = await trio.to_thread.run_sync(_choose, order, signed.manifest, use)
        target = await self._open_target(order, signed, directory, job, chosen)

        def finish() -> Iterator[None]:
            yield from target.finishing(order.keep, use=use)
            target.close()

        store = Holding(target, directory)
        fetched = await self._fill(_Bringing(order, signed, target, store, job, finish))
        if not order.flat:
            await self._stop_forgotten(directory)
        if self.swarms.get(version) is None or not self._is_store_of(store, version):
            store.close()
        return replace(fetched, whole=target.whole, unmatched=unmatched)

    def _is_store_of(self, store: PieceStore, version: bytes) -> bool:
        run = self.swarms.get(version)
        return run is not None and run.store is store

    async def fetch_to_memory(self, order: FetchOrder, job: Job, user: int) -> Fetched:
        """Bring a version to memory that clients may map, for the client `user`: it stays as long as one of them is
        there. Raises like `fetch`; `CapacityExceeded` when it is more than `--checkpoint-memory`."""
        head, version = await self._find(order, job)
        job.version = version
        job.begin(JobPhase.CHECKING)
        async with self.memories.turn(version):
            target = self.memories.use(version, user)
            if target is None:
                signed = await self._manifest(version, head.publisher)
                needed = pieces_ordered(order, signed.manifest)
                size = signed.manifest.layout.size_of(needed)
                await self.memories.until_room(size)
                with self.memories.room_for(version, size):
                    target = await trio.to_thread.run_sync(MemoryTarget, signed, needed)
                    bringing = _Bringing(order, signed, target, target, job, _nothing_to_do)
                    fetched = await self._fill(bringing)
                self.memories.add(target, user)
                return fetched
            needed = pieces_ordered(order, target.manifest)
            with self.memories.room_for(version, target.bytes_more(needed)):
                target.needed |= needed
        return await self._bring_more(order, target, needed, job)

    async def _bring_more(
        self, order: FetchOrder, target: MemoryTarget, needed: PieceMap, job: Job
    ) -> Fetched:
        """More pieces of a version that is in memory; others may look at it, and want more of it, at the same time."""
        size = target.manifest.layout.size_of(needed)
        missing = needed & ~target.have
        part = self._parts.get(target.version)
        if not missing:
            return Fetched(target.version, size, 0)
        if part is None or part.run.store is not target:
            bringing = _Bringing(order, target.signed, target, target, job, _nothing_to_do)
            return await self._fill(bringing)
        run = part.run
        before = run.fetched_bytes
        with self._wanted(part):
            run.need(missing)
            await self._until(
                part, job, partial(run.until, lambda: not missing & ~run.machine.have)
            )
        if run.complete:
            part.say(TakesPart.SEEDING)
        return Fetched(target.version, size, min(size, run.fetched_bytes - before))

    def memory_left(self, user: int) -> None:
        """A client is gone: give back the memory of versions that nobody looks at any more."""
        for target in self.memories.left(user):
            part = self._parts.get(target.version)
            if part is not None and part.run.store is target:
                part.scope.cancel()  # it closes its store when no thread is at work there
            else:
                target.close()

    def close(self) -> None:
        """The peer ends: give back all memory. No swarm runs any more."""
        self.memories.close()

    async def _fill(self, bringing: _Bringing) -> Fetched:
        """Bring all pieces: from another place of this host, or else by the swarm. Closes the store when that fails."""
        order, target = bringing.order, bringing.target
        version = bringing.signed.version
        try:
            while (part := self._parts.get(version)) is not None:
                if target.needed & ~(part.run.machine.needed | part.run.store.needed):
                    await self._take_over(part, bringing)
                elif await self._copy(part, bringing):
                    return Fetched(version, _needed_bytes(target), 0)
            part = await self._begin(
                order.namespace, bringing.signed, bringing.store, rate=order.bytes_per_second
            )
        except BaseException:
            bringing.store.close()
            raise
        try:
            with self._wanted(part):
                await self._bring(part, bringing)
        except BaseException:
            await self.stop(version)
            raise
        part.say(TakesPart.SEEDING)
        return Fetched(version, part.run.total_bytes, part.run.fetched_bytes)

    async def _take_over(self, part: _Part, bringing: _Bringing) -> None:
        """What runs here brings too little. Have what it has, wait for those who wait for it, and end it: the swarm of
        a version goes to one place."""
        run, job = part.run, bringing.job
        while True:
            await self._copy_what_is_there(part, bringing)
            if run.ended.is_set():
                return
            if not part.jobs:
                break
            job.at(run.done_bytes, len(run.links.members))
            await trio.sleep(LOOK_SECONDS)
        await self.stop(run.version)

    async def _copy_what_is_there(self, part: _Part, bringing: _Bringing) -> bool:
        """What is here of a version already, from its place to another one. False when it cannot be read: then it ends
        there."""
        run, target = part.run, bringing.target
        for piece in pieces_in(target.needed & ~target.have & run.machine.have):
            copy = partial(_copy_piece, run.store, target, piece)
            error = await trio.to_thread.run_sync(copy, limiter=self.threads)
            if error is not None:
                if not part.scope.cancel_called:  # else it ends anyway, and for no fault
                    run.fail(error)
                await run.ended.wait()
                return False
            bringing.job.advance(run.size_of(piece))
        return True

    async def _copy(self, part: _Part, bringing: _Bringing) -> bool:
        """Another directory of this host gets the version, or has it: take what comes there from there. False when that
        one ends before it has everything."""
        run, target, job = part.run, bringing.target, bringing.job
        job.begin(JobPhase.FETCHING, _needed_bytes(target))
        with self._wanted(part):
            while target.needed & ~target.have:
                if not await self._copy_what_is_there(part, bringing):
                    return False
                if not target.needed & ~target.have:
                    break
                if run.ended.is_set():
                    return False
                if not target.needed & ~target.have & run.machine.have:
                    await run.changed()
        await self._finish(bringing)
        return True

    async def _find(self, order: FetchOrder, job: Job) -> tuple[Head, bytes]:
        """The head of the name, once there is one, and the version that is meant."""
        checkpoints = self._core.checkpoints
        seen: object = None
        with trio.move_on_after(order.wait_seconds):
            while True:
                try:
                    head = checkpoints.find(order.namespace, order.name, order.publisher)
                    return head, self._version(order, head)
                except NoSuchKey:
                    if not order.wait_seconds:
                        raise
                    seen = await self._node.checkpoint_news(seen)
        head = checkpoints.find(order.namespace, order.name, order.publisher)
        return head, self._version(order, head)

    def _version(self, order: FetchOrder, head: Head) -> bytes:
        """The version that these digits begin. Raises `NoSuchKey` when none of those known here does."""
        digits = order.version.lower()
        known = [head.version, head.body.previous, *self._parts]
        found = {each for each in known if each and format_version(each).startswith(digits)}
        if len(digits) == 2 * len(head.version):
            found.add(bytes.fromhex(digits))
        if not digits:
            found = {head.version}
        if len(found) != 1:
            what = "no version" if not found else "more than one version"
            raise NoSuchKey(
                f"{what} of {order.name} that is known here begins with {digits}: give all its "
                f"{2 * len(head.version)} digits, or none for the newest"
            )
        return found.pop()

    async def pass_on(
        self, order: FetchOrder, version: bytes, publisher: PeerId, directory: HeldDirectory
    ) -> bool:
        """Give a version to others again of which all that was ordered is in a directory, of an earlier life. Whether
        it is; the directory stays open then. Raises `P2PStoreError`, `OSError`, and `ValueError` for an order of no
        file."""

        def look() -> tuple[SignedManifest, frozenset[int] | None] | None:
            signed = kept_manifest(directory.path, version)
            if signed is None:
                return None
            manifest = open_manifest(
                signed, version=version, publisher=publisher, verifier=self._verifier
            )
            return signed, choose_files(manifest, order.include, order.exclude)

        found = await trio.to_thread.run_sync(look)
        if found is None or version in self._parts:
            return False
        signed, chosen = found
        target = await self._take_directory(order, signed, directory, chosen)
        target.close()  # it is only read
        if not target.committed:
            return False
        part = await self._begin(order.namespace, signed, Holding(target, directory))
        part.say(TakesPart.SEEDING)
        return True

    async def _manifest(self, version: bytes, publisher: PeerId) -> SignedManifest:
        """The manifest, from whoever has it; who has it may be known a moment later only. Raises `Unavailable` when
        nobody can be reached."""
        run = self.swarms.get(version)
        if run is not None and run.signed.signer == publisher:
            return run.signed
        with trio.move_on_after(MANIFEST_SECONDS):
            while True:
                ways = self._who_may_have(version, publisher)
                found = await ask_for_manifest(self.pool, ways, version, publisher, self._verifier)
                if found is not None:
                    return found
                await trio.sleep(ASK_AGAIN_SECONDS)
        asked = f"{len(ways)} {'was' if len(ways) == 1 else 'were'} asked"
        why = self._core.checkpoints.why_not_offered(version, publisher) or asked
        raise Unavailable(f"nobody who has version {format_version(version)} can be reached: {why}")

    def _who_may_have(self, version: bytes, publisher: PeerId) -> list[RemotePeer]:
        members = {*self.participants(version), member_of(publisher)} - {self.own}
        order = sorted(members)
        self._rng.shuffle(order)
        return [way for member in order if (way := self.way_to(member)) is not None]

    async def _open_target(
        self,
        order: FetchOrder,
        signed: SignedManifest,
        directory: HeldDirectory,
        job: Job,
        chosen: frozenset[int] | None,
    ) -> TargetDirectory:
        target = await self._take_directory(order, signed, directory, chosen)
        try:
            await self._in_steps(target.prepare(), job)
            if order.verify:
                await verify(target, job)
        except BaseException:
            target.close()
            raise
        return target

    async def _take_directory(
        self,
        order: FetchOrder,
        signed: SignedManifest,
        directory: HeldDirectory,
        chosen: frozenset[int] | None = None,
    ) -> TargetDirectory:
        """The directory may be that of a fetch which was given up this moment."""
        make = partial(TargetDirectory, directory.path, signed, flat=order.flat, chosen=chosen)
        patience = trio.current_time() + IN_USE_SECONDS
        while True:
            try:
                return await trio.to_thread.run_sync(make)
            except DirectoryInUse:
                if trio.current_time() > patience:
                    raise
                await trio.sleep(LOOK_SECONDS)

    async def _bring(self, part: _Part, bringing: _Bringing) -> None:
        """By the swarm; then it is put in its place."""
        run = part.run
        await self._until(part, bringing.job, run.until_complete)
        await run.written()
        failed = await self._copy_within(run, bringing.target, bringing.job)
        if failed:  # its publisher has false hashes of files: they come from the swarm
            run.need(failed)
            await self._until(part, bringing.job, run.until_complete)
            await run.written()
        await self._finish(bringing)

    async def _copy_within(self, run: SwarmRun, target: Target, job: Job) -> PieceMap:
        """Make pieces of others that are here, as equal files have the same. Those that cannot be made so."""
        failed = NO_PIECES
        copies = iter(target.copies.items())

        async def work() -> None:
            nonlocal failed
            for piece, extents in copies:
                copy = partial(_copy_extents, target, piece, extents)
                if run.ended.is_set():
                    return
                if await trio.to_thread.run_sync(copy, limiter=self.threads):
                    run.found(1 << piece)
                    job.at(run.done_bytes, len(run.links.members))
                else:
                    failed |= 1 << piece

        async with trio.open_nursery() as nursery:
            for _ in range(THREADS):
                nursery.start_soon(work)
        run.check_running()
        return failed

    async def _until(self, part: _Part, job: Job, until: Callable[[], Awaitable[None]]) -> None:
        """Until the swarm has brought something; others hear how far it is."""
        run = part.run
        job.begin(JobPhase.FETCHING, run.total_bytes, run.done_bytes)
        part.say(TakesPart.FETCHING, _permille(run))
        async with open_background_nursery() as nursery:
            nursery.start_soon(self._tell_progress, part, job)
            nursery.start_soon(self._give_up_without_publisher, run)
            await until()

    async def _tell_progress(self, part: _Part, job: Job) -> None:
        run = part.run
        while True:
            await run.changed()
            part.say(TakesPart.FETCHING, _permille(run))
            job.at(run.done_bytes, len(run.links.members))
            await trio.sleep(REPORT_SECONDS)

    async def _give_up_without_publisher(self, run: SwarmRun) -> None:
        """End what cannot go on: its publisher is there and passes it on no more, and no neighbour has anything that is
        missing. A publisher that is away may come back."""
        checkpoints, publisher = self._core.checkpoints, run.signed.signer
        since = trio.current_time()
        while True:
            await trio.sleep(HOPE_SECONDS / 10)
            why = checkpoints.why_not_offered(run.version, publisher)
            if not why or self.is_gone(member_of(publisher)) or run.machine.has_source:
                since = trio.current_time()
            elif trio.current_time() - since > HOPE_SECONDS:
                run.fail(Unavailable(f"nobody has the pieces that are missing: {why}"))

    async def _finish(self, bringing: _Bringing) -> None:
        """Everything is there: put it in its place, and let others fetch to the directory."""
        target, job = bringing.target, bringing.job
        if isinstance(target, TargetDirectory):
            await make_durable(target, job)
        await self._in_steps(bringing.finish(), job)

    async def _in_steps(self, steps: Iterator[None], job: Job) -> None:
        """What takes long, a step after the other, each in a thread; each is progress, and between two it may be
        cancelled."""
        while await trio.to_thread.run_sync(next, steps, self) is not self:
            job.changed()

    async def _stop_forgotten(self, directory: HeldDirectory) -> None:
        """Pass on no more what was removed from a directory because newer versions came."""
        there = await trio.to_thread.run_sync(kept_versions, directory.path)
        for part in list(self._parts.values()):
            if part.jobs or part.run.version in there or not part.run.complete:
                continue
            if isinstance(part.run.store, Holding) and part.run.store.fetched_to(directory):
                await self.stop(part.run.version)

    # --- swarms ------------------------------------------------------------------------------

    async def _begin(
        self,
        namespace: str,
        signed: SignedManifest,
        store: PieceStore,
        *,
        publishes: bool = False,
        rate: int = 0,
    ) -> _Part:
        """Take part in a swarm, until `stop`. `rate`: bytes a second that are fetched at most; 0 for as many as can
        be."""
        try:
            await self._make_room()
            rng = Random(self._rng.getrandbits(64))
            run = SwarmRun(self, signed, store, rng, publishes=publishes, rate=rate)
            self.swarms.add(run)
        except BaseException:
            store.close()
            raise
        digest = checkpoint_digest(namespace, run.manifest.name, signed.signer)
        part = _Part(run, trio.CancelScope(), self._teller(digest, run.version), digest)
        self._parts[run.version] = part
        self._node.start_soon(partial(self._run, part))
        return part

    def _teller(self, digest: bytes, version: bytes) -> TellPart:
        def tell(state: TakesPart, done_permille: int, why: str) -> None:
            run = self.swarms.get(version)
            needs = 1000 if run is None else run.needs_permille
            part = Participation(
                digest,
                short_version(version),
                state,
                done_permille,
                why=why,
                needs_permille=needs,
            )
            self._core.checkpoints.take_part(part, self._node.now)
            self._node.process()

        return tell

    async def _run(self, part: _Part) -> None:
        run = part.run
        try:
            with part.scope:
                await run.run()
        finally:
            self.swarms.remove(run)
            if self._parts.get(run.version) is part:
                del self._parts[run.version]
            checkpoints = self._core.checkpoints
            checkpoints.take_no_part(part.digest, run.version, self._node.now)
            if run.failure is not None:
                self._say_failed(part, run.failure)
            self._node.process()
            head = checkpoints.head(part.digest)
            if run.failure is not None and (head is None or head.version != run.version):
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._publications.forget, run.version)

    def _say_failed(self, part: _Part, error: Exception) -> None:
        text = "its files are gone" if isinstance(error, FileNotFoundError) else str(error)
        logger.warning(
            "checkpoint %s@%s: this peer takes no part any more: %s",
            part.run.manifest.name,
            format_version(part.run.version),
            text,
            extra={"event": "checkpoint_failed"},
        )
        part.tell(TakesPart.FAILED, _permille(part.run), text)

    async def stop(self, version: bytes) -> bool:
        """Take no part in a version any more. Whether there was one; its store is closed when this returns."""
        part = self._parts.get(version)
        if part is None:
            return False
        part.scope.cancel()
        with trio.CancelScope(shield=True):  # threads are at work in its directory
            await part.run.ended.wait()
            await trio.to_thread.run_sync(self._publications.forget, version)
        return True

    async def stop_name(self, digest: bytes) -> None:
        """Take no part any more in any version of a publisher's name."""
        for version in [part.run.version for part in self._parts.values() if part.digest == digest]:
            await self.stop(version)

    async def _make_room(self) -> None:
        while len(self._parts) >= MAX_SWARMS:
            idle = [part for part in self._parts.values() if not part.jobs]
            if not idle:
                raise CapacityExceeded(f"{MAX_SWARMS} checkpoints are being fetched already")
            logger.info(
                "version %s is not passed on any more: there are %d newer ones",
                format_version(idle[0].run.version),
                MAX_SWARMS,
            )
            await self.stop(idle[0].run.version)

    @contextmanager
    def _wanted(self, part: _Part) -> Iterator[None]:
        part.jobs += 1
        try:
            yield
        finally:
            part.jobs -= 1


def _copy_piece(source: PieceStore, target: Target, piece: int) -> Exception | None:
    """From one directory of this host to another; what is wrong with the first one, if something is."""
    try:
        data = source.read(piece)
    except (CheckpointChanged, StoreClosed, OSError, EOFError) as error:
        return error
    return None if target.write(piece, data) else CheckpointChanged("a file was changed")


def _choose(
    order: FetchOrder, manifest: Manifest, exactly: bool
) -> tuple[frozenset[int] | None, tuple[str, ...]]:
    """The files that are wanted, and the patterns that match none. Raises `ValueError` when no file is wanted; with
    `exactly`, also for a name that is no file. (One who follows takes what a version has.)"""
    chosen = choose_files(manifest, order.include, order.exclude)
    if not order.include and not order.exclude:
        return chosen, ()
    paths = {file.path for file in manifest.files}
    for name in unmatched(paths, order.include) if exactly else ():
        if not WILDCARDS & set(name):
            raise ValueError(
                f"checkpoint {manifest.name!r} has no file {name!r}{nearest(name, paths)}"
            )
    return chosen, tuple(unmatched(paths, [*order.include, *order.exclude]))


def _copy_extents(target: Target, piece: int, extents: Sequence[Extent]) -> bool:
    """Whether the piece is there, or could be made of these ranges."""
    try:
        return bool(target.have >> piece & 1) or target.write(piece, target.read_extents(extents))
    except (OSError, EOFError):
        return False


def _nothing_to_do() -> Iterator[None]:
    """Memory needs no end."""
    return iter(())


def _needed_bytes(target: Target) -> int:
    return target.manifest.layout.size_of(target.needed)


def _permille(run: SwarmRun) -> int:
    return 1000 * run.done_bytes // run.total_bytes if run.total_bytes else 1000


@contextmanager
def in_users_words(directory: HeldDirectory) -> Iterator[None]:
    """What goes wrong with files, as errors that say it to the client, with paths as it knows them."""
    try:
        yield
    except P2PStoreError as error:
        raise type(error)(directory.say(str(error))) from error
    except OSError as error:
        text = directory.say(f"{error.filename or directory.shown}: {error.strerror or error}")
        kind = CapacityExceeded if error.errno in FULL else ConfigError
        raise kind(text) from error
