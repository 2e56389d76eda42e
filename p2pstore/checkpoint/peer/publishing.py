"""Publishing directories and tensors, and publishing directories again after a restart. Shell."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

import trio

from p2pstore.checkpoint.checkpoint_messages import Publish
from p2pstore.checkpoint.content.hashing import hash_source
from p2pstore.checkpoint.content.manifest import Manifest, SignedManifest, format_version, sign_manifest
from p2pstore.checkpoint.content.sources import (
    FilesAsFound,
    PublishedFiles,
    SourceDirectory,
    SourceMemory,
    files_as_they_were,
)
from p2pstore.checkpoint.peer.checkpoint_peer import ACQUAINTED_SECONDS, CheckpointPeer
from p2pstore.checkpoint.peer.piece_stores import (
    HeldDirectory,
    HeldStore,
    Memories,
    PieceStore,
    PublishedMemory,
    PublishedPieces,
)
from p2pstore.checkpoint.peer.running_swarms import SwarmParts
from p2pstore.checkpoint.peer.version_fetch import Job, JobPhase, reader_of
from p2pstore.errors import (
    CheckpointChanged,
    CheckpointRefused,
    ConfigError,
    P2PStoreError,
    ProtocolError,
)
from p2pstore.gossip.checkpoint_records import checkpoint_digest
from p2pstore.gossip.records import TakesPart
from p2pstore.objects import check_checkpoint_name, format_peer_id
from p2pstore.state.state_directory import StateDirectory
from p2pstore.wire import Message, Signer, decode_body, encode_body

logger = logging.getLogger("p2pstore.peer")

FORMAT: Final = 1
"""Of `Publication`."""
LOOK_SECONDS: Final = 0.05
_FAILED: Final = {"event": "checkpoint_failed"}
_PUBLISHED: Final = {"event": "checkpoint_published"}


class Publication(Message, frozen=True):
    """A version that is published from a directory, as the state directory keeps it.

    `directory` is the absolute path in this process, `shown` the user's name for it. `times` are mtime (ns) and inode
    of each file: with equal times nothing is hashed again. A changed file that its times do not show costs the piece,
    which is verified before it is sent.
    """

    format: int
    namespace: str
    directory: bytes
    shown: str
    manifest: SignedManifest
    times: list[tuple[int, int]]

    @property
    def called(self) -> str:
        """Name and version, for messages."""
        return f"{self.manifest.manifest.name}@{format_version(self.manifest.version)}"

    def open(self) -> tuple[FilesAsFound, HeldDirectory]:
        """The unchanged directory, and what keeps it open. Raises `CheckpointChanged`, `ConfigError`, `OSError`."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            held = HeldDirectory(descriptor, self.shown)
        finally:
            os.close(descriptor)
        try:
            return files_as_they_were(held.path, self.manifest.manifest, self.times), held
        except BaseException:
            held.close()
            raise


class Publications:
    """The publications in a state directory. Blocking, for worker threads; failures of the disk are only logged."""

    def __init__(self, state: StateDirectory | None) -> None:
        """Without a state directory, nothing is kept."""
        self._state = state
        self._kept: set[bytes] = set()

    def keep(
        self, namespace: str, signed: SignedManifest, source: SourceDirectory, held: HeldDirectory
    ) -> None:
        version = signed.version
        place = held.place
        if self._state is None:
            return
        if place is None:
            logger.info(
                "%s is not found under its path: after a restart, publish %s again",
                held.shown,
                format_version(version),
            )
            return
        times = [(file.stamp[0], file.stamp[2]) for file in source.files]
        kept = Publication(FORMAT, namespace, os.fsencode(place), held.shown, signed, times)
        try:
            self._state.save_publication(format_version(version), encode_body(kept))
        except OSError as error:
            logger.warning(
                "after a restart, publish checkpoint %s again: %s", format_version(version), error
            )
            return
        self._kept.add(version)

    def forget(self, version: bytes) -> None:
        if self._state is None or version not in self._kept:
            return
        self._kept.discard(version)
        try:
            self._state.drop_publication(format_version(version))
        except OSError as error:
            logger.warning("the state directory cannot be written: %s", error)

    def load(self) -> list[Publication]:
        """The publications of the previous run. Unreadable files stay, and are logged."""
        found = []
        for name, body in [] if self._state is None else self._state.load_publications():
            try:
                kept = decode_body(Publication, body)
                if kept.format != FORMAT:
                    raise ProtocolError(f"format {kept.format}; this version knows {FORMAT}")
                if name != format_version(kept.manifest.version):
                    raise ProtocolError("it is of another version")
                kept.manifest.manifest  # noqa: B018  # decoded here, in a worker thread
            except (ProtocolError, CheckpointRefused) as error:
                logger.warning(
                    "publication %s in the state directory: %s; the file stays as it is", name, error
                )
                continue
            self._kept.add(kept.manifest.version)
            found.append(kept)
        return found


class Publishing:
    """Hashes, signs and announces versions, and serves them until their part ends."""

    def __init__(
        self,
        peer: CheckpointPeer,
        parts: SwarmParts,
        memories: Memories,
        publications: Publications,
        signer: Signer,
    ) -> None:
        self._peer = peer
        self._parts = parts
        self._memories = memories
        self._publications = publications
        self._signer = signer

    async def publish(
        self, order: Publish, directory: HeldDirectory, job: Job
    ) -> tuple[bytes, Manifest]:
        """Publish a directory; on return other peers can fetch it. Files are read in place, so `directory` stays open
        as long as this peer has a part in the version.

        Raises `CheckpointRefused` and `CheckpointChanged`, and `OSError`.
        """
        await self._check_free(order)
        source = await trio.to_thread.run_sync(
            SourceDirectory, directory.path, order.include, order.exclude
        )

        def store(manifest: Manifest, _: bytes) -> PieceStore:
            return HeldStore(PublishedPieces(source, manifest), directory.hand_over())

        held = directory.again()

        def keep(signed: SignedManifest) -> None:
            self._publications.keep(order.namespace, signed, source, held)

        try:
            return await self._publish(order, source, store, job, keep)
        finally:
            held.close()

    async def publish_memory(
        self, order: Publish, source: SourceMemory, job: Job
    ) -> tuple[bytes, Manifest]:
        """As `publish`, for a file in memory, which is closed when the part ends. Ends the parts in older versions of
        the name from memory, unless followers use them. Raises `CapacityExceeded` as well."""
        before = set(self._memories.published)
        held = False
        try:
            await self._check_free(order)
            self._memories.check_published(source.total_bytes)

            def store(manifest: Manifest, version: bytes) -> PieceStore:
                nonlocal held
                held = True
                return PublishedMemory(source, manifest, version, self._memories)

            version, manifest = await self._publish(order, source, store, job)
        except BaseException:
            if not held:
                source.close()
            raise
        digest = checkpoint_digest(order.namespace, order.name, self._peer.peer_id)
        switched = self._peer.records.switched(digest)
        for old in before - {version, b"" if switched is None else switched.version}:
            part = self._parts.get(old)
            if part is not None and part.digest == digest and not part.jobs:
                await self._parts.stop(old)
        return version, manifest

    async def _publish(
        self,
        order: Publish,
        source: PublishedFiles,
        make_store: Callable[[Manifest, bytes], PieceStore],
        job: Job,
        keep: Callable[[SignedManifest], None] = lambda _: None,
    ) -> tuple[bytes, Manifest]:
        self._peer.check_clock()  # before hours of hashing rather than after
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
        await self._check_free(order)  # another peer may have been quicker
        await self._parts.stop(version)
        store = make_store(manifest, version)
        part = await self._parts.begin(order.namespace, signed, store, publishes=True)
        with part.wanted():
            await trio.to_thread.run_sync(keep, signed)
            self._peer.announce(order.namespace, signed)
            part.announce(TakesPart.PUBLISHING)
            logger.info(
                "published checkpoint %s@%s", order.name, format_version(version), extra=_PUBLISHED
            )
            if order.wait_seeded:
                job.begin(JobPhase.SEEDING, manifest.layout.total_bytes)
                await part.run.until_dispensable(job.at)
        return version, manifest

    async def _check_free(self, order: Publish) -> None:
        """Raises `CheckpointRefused` for a malformed name, and for one of another publisher. A peer that has just
        started first waits until its neighbours have told it of their records."""
        check_checkpoint_name(order.name)
        with trio.move_on_after(max(0.0, ACQUAINTED_SECONDS - self._peer.uptime_seconds)):
            while not self._peer.core.gossip.floors.synchronised:  # noqa: ASYNC110  # the core is pure
                await trio.sleep(LOOK_SECONDS)
        self._peer.records.check_free(order.namespace, order.name)

    def _previous_piece_bytes(self, order: Publish) -> int:
        """Piece length of the name's version before, if this peer still serves it; else 0."""
        digest = checkpoint_digest(order.namespace, order.name, self._peer.peer_id)
        head = self._peer.records.head(digest)
        part = None if head is None else self._parts.get(head.version)
        return 0 if part is None else part.run.manifest.piece_bytes

    # --- after a restart -------------------------------------------------------------------------

    async def publish_again(self) -> None:
        """Publish the directories of the previous run that count still; announce a failure for changed files."""
        try:
            for kept in await trio.to_thread.run_sync(self._publications.load):
                await self._publish_if_it_counts(kept)
        except (P2PStoreError, OSError) as error:
            logger.warning("checkpoints of the previous run are not published again: %s", error)

    async def _publish_if_it_counts(self, kept: Publication) -> None:
        if kept.manifest.signer != self._peer.peer_id:
            logger.warning(
                "checkpoint %s was published by %s, the former identity of this peer: publish it again, from %s",
                kept.called,
                format_peer_id(kept.manifest.signer),
                os.fsdecode(kept.directory),
                extra=_FAILED,
            )
        if not self._counts(kept):
            await trio.to_thread.run_sync(self._publications.forget, kept.manifest.version)
            return
        try:
            await self._publish_again(kept)
        except (P2PStoreError, OSError) as error:  # does not stop the other publications
            logger.warning("checkpoint %s is not published again: %s", kept.called, error, extra=_FAILED)

    def _counts(self, kept: Publication) -> bool:
        """Whether other peers may want the version. An unknown head was lost when the previous run ended."""
        if kept.manifest.signer != self._peer.peer_id:
            return False
        version = kept.manifest.version
        digest = checkpoint_digest(kept.namespace, kept.manifest.manifest.name, self._peer.peer_id)
        head, switch = self._peer.records.head(digest), self._peer.records.switched(digest)
        if head is None or (switch is not None and switch.version == version):
            return True
        return head.version == version and not head.gone

    async def _publish_again(self, kept: Publication) -> None:
        version, manifest = kept.manifest.version, kept.manifest.manifest
        where = os.fsdecode(kept.directory)
        digest = checkpoint_digest(kept.namespace, manifest.name, self._peer.peer_id)
        try:
            source, directory = await trio.to_thread.run_sync(kept.open)
        except (CheckpointChanged, ConfigError, OSError) as error:
            why = f"{where}: {error.strerror if isinstance(error, OSError) else error}"
            logger.warning(
                "checkpoint %s is not published any more: %s; publish it again",
                kept.called,
                why,
                extra=_FAILED,
            )
            self._parts.teller(digest, version)(TakesPart.FAILED, 0, why)
            return
        if self._parts.get(version) is not None:  # its user published it meanwhile
            directory.close()
            return
        store = HeldStore(PublishedPieces(source, manifest), directory)
        part = await self._parts.begin(kept.namespace, kept.manifest, store, publishes=True)
        if self._peer.records.head(digest) is None:
            self._peer.announce(kept.namespace, kept.manifest)
        part.announce(TakesPart.PUBLISHING)
        logger.info("checkpoint %s is published again, from %s", kept.called, where, extra=_PUBLISHED)
