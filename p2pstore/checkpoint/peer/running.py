"""The swarms that a peer takes part in, by version: what other members' requests come to."""

from __future__ import annotations

from collections.abc import Sequence

from p2pstore.checkpoint.content.manifest import format_version
from p2pstore.checkpoint.peer.swarm_links import OfferedSwarmLink
from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.errors import NoSuchKey
from p2pstore.gossip.records import member_of
from p2pstore.runtime.streams import BytesLike
from p2pstore.transfer.data_messages import (
    GetManifest,
    GetPiece,
    ManifestReply,
    PieceReply,
    PieceStatus,
)
from p2pstore.transfer.serving.serving_backends import OpenedPiece


class RunningSwarms:
    """Satisfies `p2pstore.transfer.serving.serving_backends.SwarmBackend`."""

    def __init__(self) -> None:
        self._runs: dict[bytes, SwarmRun] = {}

    def add(self, run: SwarmRun) -> None:
        """Others may ask for it from now on. There is at most one of a version."""
        if self._runs.setdefault(run.version, run) is not run:
            raise ValueError("there is a swarm of this version already")

    def remove(self, run: SwarmRun) -> None:
        """It has ended; may be called twice."""
        if self._runs.get(run.version) is run:
            del self._runs[run.version]

    def get(self, version: bytes) -> SwarmRun | None:
        """The swarm of a version."""
        return self._runs.get(version)

    def all(self) -> list[SwarmRun]:
        """The one that was begun first comes first."""
        return list(self._runs.values())

    def manifest(self, request: GetManifest) -> tuple[ManifestReply, Sequence[BytesLike]]:
        """The answer to GET_MANIFEST. Raises `NoSuchKey`."""
        signed = self._require(request.version).signed
        return ManifestReply(signed.signer, signed.signature), (signed.body,)

    async def open_piece(self, request: GetPiece, peer: bytes) -> OpenedPiece | PieceReply:
        """A piece, or why not."""
        run = self._runs.get(request.version)
        if run is None:
            return PieceReply(PieceStatus.NOT_LINKED)
        return await run.open_piece(member_of(peer), request.piece)

    def piece_sent(self, opened: OpenedPiece, whole: bool) -> None:
        """The end of `open_piece`."""
        run, member, piece, buffer = opened.handle
        run.sent(member, piece, buffer, whole)

    def take_link(self, version: bytes, peer: bytes) -> OfferedSwarmLink:
        """A link for a member. Raises `NoSuchKey` and `Unavailable`."""
        return self._require(version).take_link(member_of(peer))

    def _require(self, version: bytes) -> SwarmRun:
        run = self._runs.get(version)
        if run is None:
            raise NoSuchKey(f"this peer has no part in version {format_version(version)}")
        return run
