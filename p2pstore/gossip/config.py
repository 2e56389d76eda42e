"""Timing, fan-out and bounds of gossip."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pstore.gossip.cluster_records import DEFAULT_KEPT_SECONDS, DEFAULT_LIMIT
from p2pstore.gossip.directory import DirectoryConfig
from p2pstore.gossip.log import DEFAULT_RING_LIMIT
from p2pstore.gossip.membership import MembershipConfig


@dataclass(frozen=True, slots=True)
class GossipConfig:
    """Timing, fan-out and bounds of one peer's gossip."""

    cluster: str = "default"
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    ring_limit: int = DEFAULT_RING_LIMIT
    cluster_record_limit: int = DEFAULT_LIMIT
    floor_kept_seconds: float = DEFAULT_KEPT_SECONDS
    exchange_seconds: float = 0.067
    idle_exchange_seconds: float = 1.0
    exchange_timeout_seconds: float = 5.0
    delta_bytes: int = 160 * 1024
    eager_fanout: int = 3
    eager_seconds: float = 0.05
    """Shortest time between two eager messages to the same number of members."""
    eager_bytes: int = 128 * 1024
    push_seconds: float = 0.02
    head_seconds: float = 0.2
    """Shortest time between two signatures made only because the log moved on."""
    behind_seconds: float = 1.0
    """How long a view may stand still behind its owner's head before a snapshot is fetched."""
    snapshot_timeout_seconds: float = 60.0
    forget_seconds: float = 60.0
    """How long a dead member's locations are kept, hidden."""
    leave_fanout: int = 8
    leave_timeout_seconds: float = 1.0
    defence_margin: int = 16
    """A record of this peer's identity whose incarnation (ms of its start) is less than this above its
    own is an older process defending itself: this one gives way."""
