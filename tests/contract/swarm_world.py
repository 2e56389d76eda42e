"""Members of a swarm in one process: real data servers and connections on loopback, without peers around them.

Gossip is instantaneous: the world knows all members and their parts in versions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import trio

from p2pstore.access.keyring import KeyRing
from p2pstore.addresses import join_address
from p2pstore.checkpoint.content.hashing import hash_source
from p2pstore.checkpoint.content.manifest import SignedManifest, read_manifest, sign_manifest, version_of
from p2pstore.checkpoint.content.sources import SourceDirectory
from p2pstore.checkpoint.content.target_directory import TargetDirectory
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.piece_stores import PieceStore, PublishedPieces
from p2pstore.checkpoint.peer.running_swarms import RunningSwarms, SwarmPart
from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.records import member_of
from p2pstore.memory.entries import SmallObjectsLent
from p2pstore.runtime.streams import BytesLike
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import (
    DataKind,
    GetItem,
    GetManifest,
    GetSmall,
    ObjectReply,
    over_tls,
)
from p2pstore.transfer.read_tickets import TicketClaims
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.serving.data_server import DataServer, open_data_listeners
from p2pstore.transfer.serving.read_answers import LentObject
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import Message

PIECE = 64 * 1024
RING = KeyRing([bytes(32)])


class _Backend:
    """Answers GET_MANIFEST alone."""

    def __init__(self, swarms: RunningSwarms) -> None:
        self._swarms = swarms

    def must_bring(self, items: Sequence[GetItem]) -> bool:
        raise AssertionError("there are no objects")

    async def bring(self, items: Sequence[GetItem]) -> None:
        raise AssertionError("there are no objects")

    def lend(
        self, item: GetItem, reader: bytes, keeps: int, *, decides: bool
    ) -> LentObject | ObjectReply | None:
        raise AssertionError("there are no objects")

    def lend_small(self, asked: GetSmall, reader: bytes) -> SmallObjectsLent | None:
        raise AssertionError("there are no objects")

    def end_loan(self, handle: Any) -> None:
        raise AssertionError("there are no objects")

    def note_reads(self, counts: Mapping[bytes, int]) -> None:
        raise AssertionError("there are no objects")

    def answered(self) -> None:
        pass

    async def handle(
        self, kind: DataKind, message: Message, claims: TicketClaims
    ) -> tuple[Message, Sequence[BytesLike]]:
        assert isinstance(message, GetManifest)
        return self._swarms.manifest(message)


class MemberHere:
    """A member of the world, with that part of `CheckpointPeer` that swarms use."""

    def __init__(self, world: World, number: int, host: str) -> None:
        self.world = world
        self.number = number
        self.host = host
        self.identity = Identity(bytes([number + 1]) * 32)
        self.own = member_of(self.identity.peer_id)
        self.pool = ConnectionPool(TrioDriver(), TicketIssuer(self.identity, RING).for_peers)
        self.threads = trio.CapacityLimiter(4)
        self.swarms = RunningSwarms()
        self.address = ""
        self.run: SwarmRun
        self.server: DataServer
        self.taking_part: trio.CancelScope | None = None
        self._scope = trio.CancelScope()

    def way_to(self, member: int) -> RemotePeer | None:
        other = self.world.living.get(member)
        return None if other is None else RemotePeer(other.identity.peer_id, (other.address,))

    def is_gone(self, member: int) -> bool:
        return member not in self.world.living

    def is_here(self, member: int) -> bool:
        other = self.world.living.get(member)
        return other is not None and other.host == self.host

    def participants(self, version: bytes) -> Iterable[int]:
        return [each.own for each in self.world.living.values() if each.swarms.get(version) is not None]

    async def serve(self, *, tls: bool, task_status: trio.TaskStatus[None]) -> None:
        (listener,) = await open_data_listeners(["127.0.0.1:0"])
        address = join_address(*listener.getsockname()[:2])
        self.address = over_tls(address) if tls else address
        self.server = server = DataServer(
            _Backend(self.swarms),
            ring=RING,
            signer=self.identity,
            verifier=Ed25519Verifier(),
            incarnation=1,
            swarms=self.swarms,
            tls=tls,
        )
        with self._scope:
            task_status.started()
            await server.serve([listener])

    def join(
        self,
        signed: SignedManifest,
        store: PieceStore,
        *,
        publishes: bool = False,
        config: SwarmConfig | None = None,
    ) -> SwarmRun:
        """Take part in a swarm, until the world ends or `leave`."""
        self.run = SwarmRun(
            cast(CheckpointPeer, self),
            signed,
            store,
            Random(self.number),
            publishes=publishes,
            config=config,
        )
        self.swarms.parts[self.run.version] = SwarmPart(
            self.run, trio.CancelScope(), lambda *_: None, b""
        )
        self.world.nursery.start_soon(self._take_part, self.run)
        self.world.changed()
        return self.run

    async def _take_part(self, run: SwarmRun) -> None:
        try:
            with trio.CancelScope() as self.taking_part:
                await run.run()
        finally:
            del self.swarms.parts[run.version]

    @property
    def sent_bytes(self) -> int:
        """Of pieces, to others."""
        return self.server.traffic.bytes

    def publish(self, signed: SignedManifest, source: SourceDirectory) -> SwarmRun:
        """Bring a directory into the swarm."""
        store = PublishedPieces(source, read_manifest(signed.body))
        return self.join(signed, store, publishes=True)

    def fetch(
        self, signed: SignedManifest, directory: Path, config: SwarmConfig | None = None
    ) -> SwarmRun:
        """Bring it into a directory."""
        target = TargetDirectory(directory, signed)
        for _ in target.prepare():
            pass
        return self.join(signed, target, config=config)

    def leave(self) -> None:
        """End the part, and the server."""
        assert self.taking_part is not None
        self.taking_part.cancel()
        self.die()

    def die(self) -> None:
        """As if the process had been killed: its connections end, without a word."""
        self.world.living.pop(self.own, None)
        self._scope.cancel()
        self.pool.close()
        if self.taking_part is not None:
            self.taking_part.cancel()
        self.world.changed()


class World:
    """All members, and what they know of each other."""

    def __init__(self, nursery: trio.Nursery, tls: bool) -> None:
        self.nursery = nursery
        self.tls = tls
        self.gossips = True
        """Whether gossip tells of others than the first member."""
        self.living: dict[int, MemberHere] = {}
        self._count = 0

    async def add(self, host: str | None = None) -> MemberHere:
        """Another member, on a host of its own unless said otherwise."""
        member = MemberHere(self, self._count, host or f"host {self._count}")
        self._count += 1
        await self.nursery.start(lambda task_status: member.serve(tls=self.tls, task_status=task_status))
        self.living[member.own] = member
        return member

    def changed(self) -> None:
        """Gossip: all members hear of all participants."""
        for member in self.living.values():
            for part in list(member.swarms.parts.values()):
                part.run.look_around()


@asynccontextmanager
async def open_world(*, tls: bool = False) -> AsyncIterator[World]:
    """A world for one test; at its end all servers end."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, tls)
        try:
            yield world
        finally:
            for member in list(world.living.values()):
                member.pool.close()
            nursery.cancel_scope.cancel()


def make_files(directory: Path, files: dict[str, int], seed: int = 0) -> None:
    """Files of these lengths, with random bytes."""
    rng = np.random.default_rng(seed)
    for path, size in files.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(rng.integers(0, 256, size, np.uint8).tobytes())


async def signed_directory(
    directory: Path, publisher: Identity, piece_bytes: int = PIECE
) -> tuple[SignedManifest, SourceDirectory]:
    """A directory's manifest."""
    source = SourceDirectory(directory)
    manifest = await hash_source(source, "model", piece_bytes=piece_bytes)
    return sign_manifest(manifest, publisher), source


def same_files(one: Path, other: Path) -> bool:
    """Whether two directories have the same files with the same bytes."""

    def content(root: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and ".p2pstore" not in path.parts
        }

    return content(one) == content(other)


__all__ = [
    "PIECE",
    "MemberHere",
    "World",
    "make_files",
    "open_world",
    "same_files",
    "signed_directory",
    "version_of",
]
