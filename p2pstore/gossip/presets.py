"""Timing for kinds of networks: memberlist's `lan`, `wan` and `local`. Pure.

Peers of one cluster may differ: each judges by its own waits, and says how long a helper may take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.members.membership import MembershipConfig

Network = Literal["lan", "wan", "local"]
"""The values of the setting `network` (`p2pstore.config`, which clients read and this module is not for)."""


def preset(network: Network) -> GossipConfig:
    """Gossip's bounds and timing for a network.

    `lan`: one data centre. `wan`: round trips of up to some 100 ms; a crash is known after a minute instead of
    ten seconds. `local`: one machine.
    """
    base = GossipConfig()
    if network == "wan":
        return replace(
            base,
            membership=MembershipConfig(
                probe_interval_seconds=5.0,
                probe_timeout_seconds=3.0,
                suspicion_multiplier=6.0,
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
