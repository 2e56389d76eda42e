"""Whether keys are known to be held by anyone, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pstore.gossip.records import Member
from p2pstore.objects import ZERO_VERSION, newest_accepted_clock

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


def known_keys(core: PeerCore, digests: Sequence[bytes], now: float) -> set[bytes]:
    """Those of `digests` of which `known_copies` would name a reachable copy, at a microsecond or
    so each. Objects that expired within the last second still count."""
    wanted = set(digests)
    here = wanted & core.segment.digests()

    def is_alive(member: Member) -> bool:
        state = core.gossip.membership.resolve(member)
        return state is not None and state.alive

    elsewhere = core.gossip.directory.held(
        wanted - here, is_alive, newest_accepted_clock(core.unix(now))
    )
    floor_for = core.gossip.cluster_records.floor_for
    under_a_floor = [
        digest for digest in elsewhere if floor_for(digest) is not ZERO_VERSION
    ]  # few: their versions decide
    for digest in under_a_floor:
        if not any(copy.reachable for copy in core.known_copies(digest, now)):
            elsewhere.discard(digest)
    return here | elsewhere
