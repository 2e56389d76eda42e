"""Whether keys are known to be held by anyone, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pstore.gossip.records import Member
from p2pstore.objects import ZERO_VERSION, newest_accepted_clock

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


def is_known(core: PeerCore, digest: bytes, now: float, namespace: bytes | None = None) -> bool:
    """`known_keys` for one key: without the sets, which cost more than looking it up."""
    if digest in core.segment.digests() or core.cold.find(digest, now) is not None:
        return True
    locations = core.gossip.holders(digest, now)
    if not locations:
        return False
    floors = core.gossip.cluster_records.floors
    end = newest_accepted_clock(core.believed_unix(now)) + 1
    for location in locations:
        version = location.record.version
        state = core.gossip.membership.resolve(location.member)
        if (
            not location.hidden
            and state is not None
            and state.alive
            and version.clock < end
            and not core.gossip.doubts(location.member, version, now)
            and not floors.forbids(digest, namespace, version)
        ):
            return True
    return False


def known_keys(
    core: PeerCore, digests: Sequence[bytes], now: float, namespace: bytes | None = None
) -> set[bytes]:
    """Those of `digests` (of the namespace with this digest) of which `known_copies` would name a reachable
    copy, at a microsecond or so each. Objects that expired within the last second still count."""
    wanted = set(digests)
    here = wanted & core.segment.digests()
    here |= core.cold.held_only_here(wanted - here, now)

    flushed = core.gossip.cluster_records.floors.floor_for(b"", namespace).clock
    end = newest_accepted_clock(core.believed_unix(now)) + 1

    def believed(member: Member) -> range:
        state = core.gossip.membership.resolve(member)
        if state is None or not state.alive:
            return range(0)
        return range(max(flushed, core.gossip.doubted_up_to(member, now) + 1), end)

    elsewhere = core.gossip.locations.held(wanted - here, believed, now)
    floors = core.gossip.cluster_records.floors
    under_a_floor = (
        [digest for digest in elsewhere if floors.floor_for(digest) is not ZERO_VERSION]
        if floors.count
        else []
    )
    for digest in under_a_floor:  # few: their versions decide
        if not any(copy.reachable for copy in core.copies.known(digest, now, namespace)):
            elsewhere.discard(digest)
    return here | elsewhere
