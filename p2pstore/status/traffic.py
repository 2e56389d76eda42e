"""What was moved between this peer and each other, by which transport, and how far away each is. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from p2pstore.gossip.records import Member, PeerId
from p2pstore.runtime.histograms import Histogram

MAX_PEERS: Final = 10_000
"""As many as a cluster may have members."""
ROUND_TRIPS: Final = 8
"""Round trips remembered per peer; the shortest of them is the way itself, the others met a busy process."""


@dataclass(slots=True)
class Use:
    """One transport's use: objects and bytes that came, and attempts that failed; and how many microseconds those took
    that were read one by one."""

    objects: int = 0
    bytes: int = 0
    failures: int = 0
    durations: Histogram = field(default_factory=Histogram)

    def add(self, objects: int, length_bytes: int, failures: int) -> None:
        self.objects += objects
        self.bytes += length_bytes
        self.failures += failures

    def document(self) -> dict[str, int]:
        """For JSON."""
        return {"objects": self.objects, "bytes": self.bytes, "failures": self.failures}


class Traffic:
    """What came from other peers into this one and its clients, and how long a ping takes."""

    def __init__(self) -> None:
        self.totals: dict[str, Use] = {}
        """By transport, over all peers."""
        self._by_member: dict[Member, dict[str, Use]] = {}
        self._round_trips: dict[PeerId, deque[float]] = {}

    def came(
        self,
        member: Member,
        transport: str,
        *,
        objects: int = 0,
        length_bytes: int = 0,
        failures: int = 0,
        durations: Sequence[int] = (),
        microseconds: int = 0,
    ) -> None:
        """Objects arrived from a member, or attempts to get them failed. `durations`: counts of a `Histogram`."""
        if member not in self._by_member and len(self._by_member) >= MAX_PEERS:
            del self._by_member[next(iter(self._by_member))]
        for uses in (self.totals, self._by_member.setdefault(member, {})):
            use = uses.get(transport)
            if use is None:
                use = uses[transport] = Use()
            use.add(objects, length_bytes, failures)
            if durations:
                use.durations.merge(durations, microseconds)

    def took(self, member: Member, transport: str, seconds: float) -> None:
        """One object came from a member in so much time, as `came` was told."""
        for uses in (self.totals, self._by_member.get(member, {})):
            if transport in uses:
                uses[transport].durations.add_seconds(seconds)

    def used(self, member: Member) -> dict[str, Use]:
        """What a member was read by, by transport."""
        return self._by_member.get(member, {})

    def pinged(self, peer_id: PeerId, seconds: float) -> None:
        """A peer answered a ping over a connection that was open before."""
        if peer_id not in self._round_trips and len(self._round_trips) >= MAX_PEERS:
            del self._round_trips[next(iter(self._round_trips))]
        self._round_trips.setdefault(peer_id, deque(maxlen=ROUND_TRIPS)).append(seconds)

    def round_trip_seconds(self, peer_id: PeerId) -> float | None:
        """The shortest of the latest round trips; None when there was none."""
        return min(self._round_trips.get(peer_id, ()), default=None)

    def document(self) -> dict[str, Any]:
        """Totals for the statistics document."""
        return {name: use.document() for name, use in sorted(self.totals.items())}
