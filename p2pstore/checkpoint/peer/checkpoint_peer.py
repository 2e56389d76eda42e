"""The peer as its checkpoints see it, and no more of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from p2pstore.checkpoint.content.manifest import SignedManifest
from p2pstore.core.checkpoints import CheckpointNames
from p2pstore.core.participations import Participations
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.checkpoint_records import HeadBody
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Member, Participation, PeerId
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.transport import RemotePeer

THREADS: Final = 4
"""Worker threads that read, verify and write pieces, for all swarms of a peer."""
ACQUAINTED_SECONDS: Final = 3.0
"""After its start, a peer does not yet know all publishers and followers."""
MAX_WAIT_SECONDS: Final = 24 * 3600.0
"""Upper bound of a wait that a client asks for."""


@dataclass(slots=True, eq=False)
class CheckpointPeer:
    """This peer's records and connections, for publishing, fetching and following."""

    core: PeerCore
    pool: ConnectionPool
    """Data connections to other peers."""
    host_id: bytes
    started_at: float
    """Trio's time."""
    process: Callable[[], None]
    """Carry out what the records decided; call after each change of them."""
    news: Callable[[object], Awaitable[object]]
    """Wait until the records differ from the argument: None at first, then the result of the last call."""
    start_soon: Callable[[Callable[[], Awaitable[None]]], None]
    """Run a task until the peer ends."""
    threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(THREADS))
    """Limit of the threads that read and write pieces."""

    @property
    def own(self) -> Member:
        """This peer's short name."""
        return self.core.member

    @property
    def peer_id(self) -> PeerId:
        return self.core.peer_id

    @property
    def records(self) -> CheckpointNames:
        return self.core.checkpoints

    @property
    def parts(self) -> Participations:
        return self.core.participations

    @property
    def now(self) -> float:
        """The clock of the records: monotonic seconds."""
        return time.monotonic()

    @property
    def uptime_seconds(self) -> float:
        return trio.current_time() - self.started_at

    def check_clock(self) -> None:
        """Raises `P2PStoreError` while this peer may write no records because its clock is wrong."""
        self.core.timekeeping.check(self.now)

    def announce(self, namespace: str, signed: SignedManifest) -> None:
        """Write the head of a name: this version is the newest."""
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
        return self.core.gossip.membership.resolve(member)

    def way_to(self, member: Member) -> RemotePeer | None:
        """Addresses of a live member; None for others."""
        state = self._state(member)
        if state is None or not state.live:
            return None
        return RemotePeer(state.peer_id, tuple(state.record.data) if state.record is not None else ())

    def is_gone(self, member: Member) -> bool:
        """Whether a member that was known is not live any more."""
        state = self._state(member)
        return state is not None and not state.live

    def is_here(self, member: Member) -> bool:
        """Whether a member runs on this host."""
        state = self._state(member)
        record = None if state is None else state.record
        return record is not None and record.host_id == self.host_id

    def is_alive(self, peer_id: PeerId) -> bool:
        state = self.core.gossip.membership.get(peer_id)
        return state is not None and state.alive

    def identify(self, member: Member) -> tuple[PeerId, str]:
        """A member's identity and display name; empty identity for one that is not known."""
        state = self._state(member)
        if state is None:
            return b"", f"{member:016x}"
        return state.peer_id, self.core.name_of(state.peer_id)

    def participants(self, version: bytes) -> Iterable[Member]:
        """All members that, by gossip, have pieces of a version or want them."""
        return self.parts.participants(version)

    def participations(self) -> Iterator[tuple[Member, Sequence[Participation]]]:
        """Parts in versions, of all live members."""
        for state in self.core.gossip.membership.live():
            yield state.member, state.checkpoints
