"""Timing, fan-out and bounds of gossip."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from p2pstore.gossip.floors.floor_set import DEFAULT_KEPT_SECONDS, DEFAULT_LIMIT
from p2pstore.gossip.homes.partition_homes import DirectorySetting, ModeLimits, PartitionConfig
from p2pstore.gossip.locations.log import DEFAULT_RING_LIMIT
from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.members.active_view import MAX_NEIGHBOURS, ROTATION_SECONDS
from p2pstore.gossip.members.member_table import MembershipConfig


@dataclass(frozen=True, slots=True)
class GossipConfig:
    """Timing, fan-out and bounds of one peer's gossip."""

    cluster: str = "default"
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    directory_setting: DirectorySetting = "auto"
    mode_limits: ModeLimits = field(default_factory=ModeLimits)
    partitions: PartitionConfig = field(default_factory=PartitionConfig)
    ring_limit: int = DEFAULT_RING_LIMIT
    cluster_record_limit: int = DEFAULT_LIMIT
    floor_kept_seconds: float = DEFAULT_KEPT_SECONDS
    exchange_seconds: float = 0.067
    idle_exchange_seconds: float = 1.0
    exchange_timeout_seconds: float = 5.0
    delta_bytes: int = 160 * 1024
    messages_per_second: float = 108.0
    """All gossip messages, in, out and answers, that exchanges and relay may fill up to; probes do not wait."""
    message_burst: float = 40.0
    active_view: int = MAX_NEIGHBOURS
    """How many members exchanges and eager messages go to."""
    view_rotation_seconds: float = ROTATION_SECONDS
    eager_fanout: int = 4
    eager_seconds: float = 0.05
    """Shortest time between two eager messages to the same number of members."""
    eager_bytes: int = 128 * 1024
    eager_operations_per_second: float = 500.0
    """Above this rate of operations in the cluster they are left to exchanges, until there are half as many."""
    head_seconds: float = 0.2
    head_seconds_a_member: float = 0.05
    """Shortest time between two signatures made only because the log moved on, by the size of the cluster:
    all members are sent each, and check it. So all of them together are some 20 a second, or less."""
    longest_head_seconds: float = 300.0
    partitioned_digest_bytes_per_second: float = 15_000.0
    """Of digests that a peer in partitioned mode sends of its own accord: of thousands of members they are large."""
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

    def head_interval_seconds(self, members: int) -> float:
        """Seconds that a head may be behind its log in a cluster of `members`."""
        return min(
            max(self.head_seconds, self.head_seconds_a_member * members), self.longest_head_seconds
        )


Network = Literal["lan", "wan", "local"]
"""The values of the setting `network` (`p2pstore.config`, which clients read and this module is not for)."""


def preset(network: Network) -> GossipConfig:
    """Gossip's bounds and timing. `lan`: one data centre. `wan`: round trips of up to some 100 ms; a crash is known
    after a minute instead of ten seconds. `local`: one machine."""
    base = GossipConfig()
    if network == "wan":
        return replace(
            base,
            membership=MembershipConfig(
                probe_interval_seconds=5.0, probe_timeout_seconds=3.0, suspicion_multiplier=6.0
            ),
            exchange_seconds=0.125,
            exchange_timeout_seconds=15.0,
            leave_timeout_seconds=3.0,
        )
    if network == "local":
        return replace(
            base,
            membership=MembershipConfig(
                probe_timeout_seconds=0.2,
                indirect_probes=1,
                suspicion_multiplier=3.0,
                retransmit_multiplier=2,
            ),
        )
    return base
