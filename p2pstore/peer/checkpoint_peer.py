"""This peer as checkpoints see it: the implementation of `p2pstore.checkpoint.peer.surroundings.PeerInterface`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import trio

from p2pstore.checkpoint.content.manifest import SignedManifest
from p2pstore.checkpoint.peer.surroundings import THREADS
from p2pstore.gossip.checkpoint_records import HeadBody
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Member, Participation, PeerId
from p2pstore.peer.node import Node
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transport import RemotePeer


class CheckpointPeer:
    """Satisfies `PeerInterface`."""

    def __init__(self, node: Node) -> None:
        core = node.core
        self.own: Member = core.member
        self.peer_id: PeerId = core.peer_id
        self.threads = trio.CapacityLimiter(THREADS)
        self.records = core.checkpoints
        self.parts = core.participations
        self.name_of = core.name_of
        self.process = node.process
        self.news = node.checkpoint_news
        self._node = node
        self._core = core
        self._membership = core.gossip.membership

    @property
    def pool(self) -> DataPool:
        return self._node.pool

    @property
    def now(self) -> float:
        return self._node.now

    @property
    def uptime_seconds(self) -> float:
        return self._node.uptime_seconds

    @property
    def synchronised(self) -> bool:
        return self._core.gossip.floors.synchronised

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        self._node.start_soon(work)

    def check_clock(self) -> None:
        self._core.timekeeping.check(self._node.now)

    def announce(self, namespace: str, signed: SignedManifest) -> None:
        manifest = signed.manifest
        body = HeadBody(
            namespace,
            manifest.name,
            signed.version,
            manifest_bytes=len(signed.body),
            total_bytes=manifest.layout.total_bytes,
            files=len(manifest.files),
            pieces=manifest.layout.count,
        )
        self.records.publish(body, self.now)

    def _state(self, member: Member) -> MemberState | None:
        return self._membership.resolve(member)

    def way_to(self, member: Member) -> RemotePeer | None:
        state = self._state(member)
        if state is None or not state.live:
            return None
        return self._node.routes.remote_peer(state.peer_id)

    def is_gone(self, member: Member) -> bool:
        state = self._state(member)
        return state is not None and not state.live

    def is_here(self, member: Member) -> bool:
        state = self._state(member)
        record = None if state is None else state.record
        return record is not None and record.host_id == self._node.routes.host_id

    def is_alive(self, peer_id: PeerId) -> bool:
        state = self._membership.get(peer_id)
        return state is not None and state.alive

    def identify(self, member: Member) -> tuple[PeerId, str]:
        state = self._state(member)
        if state is None:
            return b"", f"{member:016x}"
        return state.peer_id, self.name_of(state.peer_id)

    def participants(self, version: bytes) -> Iterable[Member]:
        return self.parts.participants(version)

    def participations(self) -> Iterator[tuple[Member, Sequence[Participation]]]:
        for state in self._membership.live():
            yield state.member, state.checkpoints
