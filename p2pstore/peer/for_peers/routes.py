"""The route to each copy over data connections, and the order in which copies are read. Shell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from random import Random

from p2pstore.config import PeerConfig
from p2pstore.core.operation import KnownCopy
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.records import PeerId, PeerRecord, Tier, writer_of
from p2pstore.objects import SIZE_UNIT_BYTES, Announced
from p2pstore.transfer.failover import order_copies
from p2pstore.transfer.rdma.rdma_rules import NAME as RDMA
from p2pstore.transfer.transport import RemoteCopy, RemotePeer, Transport


class Routes:
    """Ways of one peer to copies at others, and their reading order. `transports`: those that this peer reads by."""

    def __init__(self, core: PeerCore, config: PeerConfig, host_id: bytes, rng: Random) -> None:
        self._core = core
        self._membership = core.gossip.membership
        self._config = config
        self._rng = rng
        self.host_id = host_id
        self.transports: Sequence[Transport] = ()

    def remote_peer(self, peer_id: PeerId) -> RemotePeer:
        record = self.record_of(peer_id)
        return RemotePeer(peer_id, tuple(record.data) if record is not None else ())

    def remote_copy(self, copy: KnownCopy) -> RemoteCopy:
        """The route to one copy, on its holder's SSD or in its memory."""
        way = self.way_to(copy)
        if copy.record.tier is Tier.SSD:  # one request over TCP does it; RDMA takes several
            return replace(way, on_ssd=True, rdma=way.rdma and self._config.transport == RDMA)
        return way

    def way_to(self, copy: KnownCopy) -> RemoteCopy:
        """The route to what a copy's holder has in memory. A strict transport leaves out all others."""
        record = self.record_of(copy.peer_id)
        strict = self._config.transport
        by_socket = record is not None and record.host_id == self.host_id and strict in ("auto", "shm")
        return RemoteCopy(
            peer_id=copy.peer_id,
            data=tuple(record.data) if record is not None and strict != "shm" else (),
            member=copy.member,
            socket=record.socket if record is not None and by_socket else "",
            same_host=by_socket,
            slot=copy.record.slot,
            version=copy.record.version,
            announced=Announced(writer_of(copy.peer_id), copy.announced),
            load_permille=record.load_permille if record is not None else 0,
            rdma=record is not None and any(offer.name == RDMA for offer in record.transports),
            length_bytes=copy.record.size_units * SIZE_UNIT_BYTES,
        )

    def reads_by_rdma(self, copy: RemoteCopy) -> bool:
        """Whether this peer would try RDMA first."""
        offered = [each for each in self.transports if not each.why_not(copy)]
        return bool(offered) and min(offered, key=lambda each: each.cost(copy)).name == RDMA

    def reading_order(self, copies: Sequence[KnownCopy]) -> list[KnownCopy]:
        """Copies in the order to try them: the core's order by version and recent failures; among equals this host
        first, then at random, so that readers spread over the holders."""
        now, ordered = time.monotonic(), []
        for _, group in groupby(
            copies, lambda copy: (copy.record.version, self._core.holders.is_avoided(copy.member, now))
        ):
            equals = {copy.member: copy for copy in group}
            remote = [self.remote_copy(copy) for copy in equals.values()]
            ordered += [equals[copy.member] for copy in order_copies(remote, self._rng)]
        return ordered

    def record_of(self, peer_id: PeerId) -> PeerRecord | None:
        state = self._membership.get(peer_id)
        return state.record if state is not None else None
