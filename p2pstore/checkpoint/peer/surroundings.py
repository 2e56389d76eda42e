"""The narrow interface between checkpoints and their peer: what `p2pstore.peer` provides, as protocols."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import trio

from p2pstore.checkpoint.content.manifest import SignedManifest
from p2pstore.core.checkpoints import Checkpoints
from p2pstore.core.participations import Participations
from p2pstore.gossip.records import Member, Participation, PeerId
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transport import RemotePeer

THREADS: Final = 4
"""Worker threads that read, verify and write pieces, for all swarms of a peer."""
ACQUAINTED_SECONDS: Final = 3.0
"""After its start, a peer does not yet know all publishers and followers."""
MAX_WAIT_SECONDS: Final = 24 * 3600.0
"""Upper bound of a wait that a client asks for."""


class Surroundings(Protocol):
    """The peer, as one swarm sees it."""

    @property
    def own(self) -> Member:
        """This peer's short name."""
        ...

    @property
    def pool(self) -> DataPool:
        """Data connections to other peers."""
        ...

    @property
    def threads(self) -> trio.CapacityLimiter:
        """Limit of the threads that read and write pieces."""
        ...

    def way_to(self, member: Member) -> RemotePeer | None:
        """Addresses of a live member; None for others."""
        ...

    def is_gone(self, member: Member) -> bool:
        """Whether a member that was known is not live any more."""
        ...

    def is_here(self, member: Member) -> bool:
        """Whether a member runs on this host."""
        ...

    def participants(self, version: bytes) -> Iterable[Member]:
        """All members that, by gossip, have pieces of a version or want them."""
        ...


class PeerInterface(Surroundings, Protocol):
    """All that checkpoints need of their peer."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def now(self) -> float:
        """The clock of the records: monotonic seconds."""
        ...

    @property
    def uptime_seconds(self) -> float: ...

    @property
    def records(self) -> Checkpoints: ...

    @property
    def parts(self) -> Participations: ...

    def announce(self, namespace: str, signed: SignedManifest) -> None:
        """Write the head of a name: this version is the newest."""
        ...

    @property
    def synchronised(self) -> bool:
        """Whether the neighbours' records are known here."""
        ...

    def check_clock(self) -> None:
        """Raises `P2PStoreError` while this peer may write no records because its clock is wrong."""
        ...

    def identify(self, member: Member) -> tuple[PeerId, str]:
        """A member's identity and display name; empty identity for one that is not known."""
        ...

    def name_of(self, peer_id: PeerId) -> str:
        """A peer's display name."""
        ...

    def is_alive(self, peer_id: PeerId) -> bool: ...

    def participations(self) -> Iterator[tuple[Member, Sequence[Participation]]]:
        """Parts in versions, of all live members."""
        ...

    def process(self) -> None:
        """Carry out what the records decided; call after each change of them."""
        ...

    async def news(self, seen: object) -> object:
        """Wait until the records differ from `seen`: None at first, then the result of the last call."""
        ...

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the peer ends."""
        ...
