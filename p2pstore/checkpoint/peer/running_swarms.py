"""The swarms of this peer: beginning, announcing and ending its part in a version, and answers to other members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import trio

from p2pstore.checkpoint.content.manifest import SignedManifest, format_version
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.piece_stores import PieceStore
from p2pstore.checkpoint.peer.swarm_links import OfferedSwarmLink
from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.errors import CapacityExceeded, NoSuchKey
from p2pstore.gossip.checkpoint_records import checkpoint_digest, short_version
from p2pstore.gossip.records import Participation, TakesPart, member_of
from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_messages import GetManifest, GetPiece, ManifestReply, PieceReply, PieceStatus
from p2pstore.transfer.serving.serving_backends import OpenedPiece

logger = logging.getLogger("p2pstore.peer")

MAX_SWARMS: Final = 16
WATCH_SECONDS: Final = 0.05
"""Minimum time between two looks at gossip: a large cluster always has news."""

TellPart = Callable[[TakesPart, int, str], None]
"""Announces this peer's part in a version: state, permille done, reason of a failure."""


@dataclass(slots=True, eq=False)
class SwarmPart:
    """This peer's part in one swarm."""

    run: SwarmRun
    scope: trio.CancelScope
    tell: TellPart
    digest: bytes
    """Of namespace, name and publisher."""
    jobs: int = 0
    """Jobs that wait for it; without any, the part may be ended to make room."""

    def announce(self, state: TakesPart, done_permille: int = 1000) -> None:
        """Announce the state, unless the swarm ended: the reason of its end stays the last announcement."""
        if not self.run.progress.ended.is_set():
            self.tell(state, done_permille, "")

    def announce_progress(self) -> None:
        self.announce(TakesPart.FETCHING, self.run.progress.done_permille)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Keep the part while the block runs."""
        self.jobs += 1
        try:
            yield
        finally:
            self.jobs -= 1


class RunningSwarms:
    """This peer's parts in swarms, at most one a version, and answers to the other members. Satisfies
    `p2pstore.transfer.serving.serving_backends.SwarmBackend`."""

    def __init__(self) -> None:
        self.parts: dict[bytes, SwarmPart] = {}
        """By version, the oldest first."""

    def get(self, version: bytes) -> SwarmPart | None:
        return self.parts.get(version)

    def manifest(self, request: GetManifest) -> tuple[ManifestReply, Sequence[BytesLike]]:
        """The answer to GET_MANIFEST. Raises `NoSuchKey`."""
        signed = self._require(request.version).signed
        return ManifestReply(signed.signer, signed.signature), (signed.body,)

    async def open_piece(self, request: GetPiece, peer: bytes) -> OpenedPiece | PieceReply:
        """A piece, or the reason why it is not sent."""
        part = self.get(request.version)
        if part is None:
            return PieceReply(PieceStatus.NOT_LINKED)
        return await part.run.open_piece(member_of(peer), request.piece)

    def piece_sent(self, opened: OpenedPiece, whole: bool) -> None:
        """Must follow each `OpenedPiece`."""
        run, member, piece, buffer = opened.handle
        run.sent(member, piece, buffer, whole)

    def take_link(self, version: bytes, peer: bytes) -> OfferedSwarmLink:
        """A link for a member. Raises `NoSuchKey` and `Unavailable`."""
        return self._require(version).links.take(member_of(peer))

    def _require(self, version: bytes) -> SwarmRun:
        part = self.get(version)
        if part is None:
            raise NoSuchKey(f"this peer has no part in version {format_version(version)}")
        return part.run


class SwarmParts(RunningSwarms):
    """Begins and ends parts, at most `MAX_SWARMS`. The oldest part without a job makes room for a new one."""

    def __init__(
        self, peer: CheckpointPeer, rng: Random, forget_publication: Callable[[bytes], None]
    ) -> None:
        """`forget_publication` runs in a worker thread when a version is not passed on any more."""
        super().__init__()
        self._peer = peer
        self._rng = rng
        self._forget_publication = forget_publication

    async def watch(self) -> None:
        """Pass news of gossip on to the swarms, until cancelled."""
        seen: object = None
        while True:
            seen = await self._peer.news(seen)
            for part in list(self.parts.values()):
                part.run.look_around()
            await trio.sleep(WATCH_SECONDS)

    async def begin(
        self,
        namespace: str,
        signed: SignedManifest,
        store: PieceStore,
        *,
        publishes: bool = False,
        rate: int = 0,
    ) -> SwarmPart:
        """Take part in a swarm until `stop`. `rate` limits fetching, in bytes a second; 0 for no limit. Closes the
        store when it raises `CapacityExceeded`."""
        try:
            await self._make_room()
            if signed.version in self.parts:
                raise ValueError("there is a swarm of this version already")
            rng = Random(self._rng.getrandbits(64))
            run = SwarmRun(self._peer, signed, store, rng, publishes=publishes, rate=rate)
        except BaseException:
            store.close()
            raise
        digest = checkpoint_digest(namespace, run.manifest.name, signed.signer)
        part = SwarmPart(run, trio.CancelScope(), self.teller(digest, run.version), digest)
        self.parts[run.version] = part
        self._peer.start_soon(partial(self._run, part))
        return part

    def teller(self, digest: bytes, version: bytes) -> TellPart:
        """A function that announces this peer's part in a version."""

        def tell(state: TakesPart, done_permille: int, why: str) -> None:
            part = self.get(version)
            needs = 1000 if part is None else part.run.progress.needs_permille
            told = Participation(
                digest, short_version(version), state, done_permille, why=why, needs_permille=needs
            )
            self._peer.parts.take_part(told, self._peer.now)
            self._peer.process()

        return tell

    async def _run(self, part: SwarmPart) -> None:
        run = part.run
        try:
            with part.scope:
                await run.run()
        finally:
            del self.parts[run.version]
            self._peer.parts.take_no_part(part.digest, run.version, self._peer.now)
            if run.progress.failure is not None:
                self._say_failed(part, run.progress.failure)
            self._peer.process()
            head = self._peer.records.head(part.digest)
            if run.progress.failure is not None and (head is None or head.version != run.version):
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._forget_publication, run.version)

    def _say_failed(self, part: SwarmPart, error: Exception) -> None:
        text = "its files are gone" if isinstance(error, FileNotFoundError) else str(error)
        logger.warning(
            "checkpoint %s@%s: this peer left the swarm: %s",
            part.run.manifest.name,
            format_version(part.run.version),
            text,
            extra={"event": "checkpoint_failed"},
        )
        part.tell(TakesPart.FAILED, part.run.progress.done_permille, text)

    async def stop(self, version: bytes) -> bool:
        """End the part in a version; its store is closed on return. False when there was none."""
        part = self.get(version)
        if part is None:
            return False
        part.scope.cancel()
        with trio.CancelScope(shield=True):  # threads are at work in its directory
            await part.run.progress.ended.wait()
            await trio.to_thread.run_sync(self._forget_publication, version)
        return True

    async def stop_name(self, digest: bytes) -> None:
        """End the parts in all versions of a publisher's name."""
        for part in list(self.parts.values()):
            if part.digest == digest:
                await self.stop(part.run.version)

    async def _make_room(self) -> None:
        while len(self.parts) >= MAX_SWARMS:
            idle = next((part for part in self.parts.values() if not part.jobs), None)
            if idle is None:
                raise CapacityExceeded(f"{MAX_SWARMS} checkpoints are being fetched already")
            logger.info(
                "version %s is not passed on any more: this peer has %d newer ones",
                format_version(idle.run.version),
                MAX_SWARMS,
            )
            await self.stop(idle.run.version)
