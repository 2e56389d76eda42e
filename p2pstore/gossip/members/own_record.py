"""This peer's own signed record: when it is signed anew, and who else signs with the same key. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from p2pstore.gossip.floors.floor_sync import FloorSync
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.records import PeerRecord, SignedRecord, Signer, sign_peer_record

FLOORS_SECONDS: Final = 1.0
"""Shortest time between two signatures made only to announce which floors this peer has."""


class OwnRecord:
    """`describe` returns what this peer offers now; the rest is filled in here."""

    def __init__(
        self,
        signer: Signer,
        describe: Callable[[], PeerRecord],
        config: GossipConfig,
        membership: Membership,
        log: OwnLog,
        floors: FloorSync,
    ) -> None:
        self.leaving = False
        self.duplicate: PeerRecord | None = None
        """A record by which another process uses this peer's identity, for good."""
        self.describe = describe
        self._signer = signer
        self._config = config
        self._membership = membership
        self._log = log
        self._floors = floors
        self._changed = True
        self._signed_at = -math.inf

    def changed(self) -> None:
        """`describe` would say something else now."""
        self._changed = True

    def leave(self) -> None:
        """The record says from now on that this peer leaves."""
        self.leaving = self._changed = True

    def signed(self, now: float) -> SignedRecord:
        """The record, signed anew when something changed."""
        own = self._membership.own
        interval = self._config.head_interval_seconds(len(self._membership.live()))
        horizon = self._floors.records.floors.horizon_hash
        moved = own.signed is not None and (
            own.log_sequence != self._log.sequence
            or own.floors_horizon != horizon
            or not self._floors.shows_apart(own.floors_seen)
        )
        if (
            self._changed
            or (moved and now >= self._signed_at + interval)
            or (self._floors.crowded and now >= self._signed_at + max(interval, FLOORS_SECONDS))
        ):
            end, floors_hash, seen = self._floors.announcement(now, interval)
            record = msgspec.structs.replace(
                self.describe(),
                peer_id=own.peer_id,
                cluster=self._config.cluster,
                incarnation=self._log.incarnation,
                sequence=own.record_sequence + 1,
                head=self._log.head,
                leaving=self.leaving,
                floors_horizon=horizon,
                floors_end=end,
                floors_hash=floors_hash,
                floors_seen=seen,
            )
            self._membership.observe_record(record, sign_peer_record(record, self._signer), now)
            self._changed, self._signed_at = False, now
        assert own.signed is not None
        return own.signed

    def seen(self, record: PeerRecord) -> bool:
        """A record that this peer's key signed but this process did not: its identity is used
        twice. Whether the log was begun anew for it.

        Records of a past life are lower and never get here. The newer process is to go, but at
        first it sees lower records only. So the older one makes itself just higher: then the newer
        one sees that a live peer signs with its key, by so little above its own that it is a defence,
        and goes. The older one defends itself against each newcomer.
        """
        past = (
            record.leaving
        )  # of a life that ended, while this machine's clock was ahead of what it is now
        if not past and record.incarnation < self._log.incarnation + self._config.defence_margin:
            self.duplicate = record
            return False
        if record.incarnation + 1 >= MAX_INCARNATION:
            return False
        # Just above the other record, and not above what refutations have raised the claims to: by that
        # little the other one tells a defence from a third process.
        self._begin_above(record.incarnation)
        return True

    def _begin_above(self, incarnation: int) -> None:
        self._changed = True
        self._log.restart(incarnation + 1)
