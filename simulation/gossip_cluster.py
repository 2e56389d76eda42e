"""Gossip machines together in virtual time, and what may be asked of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members.member_table import MemberChange
from p2pstore.gossip.records import LOCATION_BYTES, PeerId, location_hash
from p2pstore.wire import Message
from simulation.gossip_data import view_snapshot
from simulation.gossip_network import GossipNetwork
from simulation.gossip_peer import GossipPeer
from simulation.kernel import Kernel
from simulation.network import Faults

DECODED_UP_TO: Final = 499
"""Peers of a cluster in which every message is decoded anew by its receiver. In larger ones the receiver is
handed the sender's message, which cannot be changed; all bytes are counted exactly all the same."""

MakeGossip = Callable[..., Gossip]


@dataclass(frozen=True, slots=True)
class Totals:
    """Traffic of all peers until now."""

    control_bytes_in: int
    control_bytes_out: int
    control_messages_out: int
    data_bytes_in: int
    data_messages_out: int


class GossipCluster:
    """Hosts with a gossip machine each, on one network. Everything happens in `kernel.run_until`."""

    def __init__(
        self,
        seed: int,
        peers: int,
        *,
        config: GossipConfig | None = None,
        faults: Faults | None = None,
        make_gossip: MakeGossip = Gossip,
        make_peer: Callable[[GossipCluster, int], GossipPeer] = GossipPeer,
    ) -> None:
        self.kernel = Kernel(seed)
        self.network = GossipNetwork(self.kernel, faults or Faults())
        self.config = config or GossipConfig()
        self.make_gossip = make_gossip
        self.keeps_truth = True
        """Whether to write down what each log held at each moment, for `gossip_invariants`."""
        self.decodes = peers <= DECODED_UP_TO
        self.problems: list[str] = []
        self.problem_count = 0
        self.snapshots = 0
        self.snapshots_refused: list[str] = []
        self.on_change: Callable[[GossipPeer, MemberChange], None] = lambda peer, change: None
        self.tamper: Callable[[GossipPeer, GossipPeer, Message], Message | None] = (
            lambda source, target, sent: sent
        )
        """What becomes of a request or reply that one peer sends another; None: it is lost."""
        self.after_turn: Callable[[GossipPeer], None] | None = None
        """Called after every turn of a peer."""
        self._make_peer = make_peer
        self.peers: list[GossipPeer] = []
        self.by_number: dict[int, GossipPeer] = {}
        self.by_peer_id: dict[PeerId, GossipPeer] = {}
        self.by_address: dict[str, GossipPeer] = {}
        self._numbers = 0
        for _ in range(peers):
            self.add_peer()

    # --- life --------------------------------------------------------------------------------

    def add_peer(self) -> GossipPeer:
        peer = self._make_peer(self, self._numbers)
        self._numbers += 1
        self.peers.append(peer)
        self.by_number[peer.number] = peer
        self.by_peer_id[peer.peer_id] = peer
        self.by_address[peer.address] = peer
        return peer

    def remove_peer(self, peer: GossipPeer) -> None:
        """A host that is not running goes for good, and nothing is kept of it."""
        self.peers.remove(peer)
        del (self.by_number[peer.number], self.by_peer_id[peer.peer_id], self.by_address[peer.address])

    def boot_all(self) -> None:
        """Start every peer; all know the first one's address."""
        for peer in self.peers:
            peer.boot([self.peers[0].address])

    def boot_acquainted(self) -> None:
        """Start every peer, knowing all others already."""
        for peer in self.peers:
            peer.boot([])
        self.acquaint(self.peers)

    def acquaint(self, peers: Iterable[GossipPeer]) -> None:
        """Have these running peers know each other, as after a quiet while together."""
        peers = list(peers)
        pairs = []
        for peer in peers:
            signed = peer.gossip.record(peer.now)
            record = peer.gossip.membership.own.record
            assert record is not None
            pairs.append((record, signed, peer.gossip.member))
        follows_logs = self.config.directory_setting != "partitioned"
        for peer in peers:
            membership, directory = peer.gossip.membership, peer.gossip.directory
            now = peer.now
            for record, signed, member in pairs:
                if record.peer_id != peer.peer_id:
                    membership.observe_record(record, signed, now)
                    if follows_logs:
                        directory.observe_head(member, record.incarnation, record.head)
            peer.turn()

    @property
    def running(self) -> list[GossipPeer]:
        return [peer for peer in self.peers if peer.running]

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass, or until the condition holds, looked at after each event. Whether it did."""
        self.kernel.run_until(self.kernel.now + seconds, until or (lambda: False))
        return until is not None and until()

    def run_until(
        self, condition: Callable[[], bool], seconds: float, every_seconds: float = 0.25
    ) -> float | None:
        """Let time pass until the condition holds, looked at now and then: the seconds it took; None when
        it did not hold in time."""
        begin = self.kernel.now
        while not condition():
            if self.kernel.now >= begin + seconds:
                return None
            self.kernel.run_until(min(self.kernel.now + every_seconds, begin + seconds))
        return self.kernel.now - begin

    # --- what peers report -------------------------------------------------------------------

    def problem(self, text: str) -> None:
        """Something that may not happen among peers that all keep to the protocol."""
        self.problem_count += 1
        if len(self.problems) < 20:
            self.problems.append(f"at {self.kernel.now:.3f} s: {text}")

    def member_changed(self, peer: GossipPeer, change: MemberChange) -> None:
        self.on_change(peer, change)

    def disconnect(self, peer: GossipPeer, other: PeerId) -> None:
        """A peer closes its connection to one that it gave up."""
        target = self.by_peer_id.get(other)
        if target is not None:
            self.network.disconnect(peer.number, target.number)

    def close_spare(self, peer: GossipPeer) -> None:
        wanted = {
            target.number
            for peer_id in peer.gossip.view.neighbours()
            if (target := self.by_peer_id.get(peer_id)) is not None
        }
        self.network.close_spare(peer.number, wanted)

    def host_went(self, peer: GossipPeer, *, reset: bool) -> None:
        """A process ended. With `reset`, those who were connected to it are told by its kernel."""
        for number in self.network.disconnect_all(peer.number):
            other = self.by_number.get(number)
            if not reset or other is None or not other.running:
                continue
            life = other.life
            at = self.kernel.now + self.network.latency()

            def lost(other: GossipPeer = other, life: int = life) -> None:
                if self.network.reaches(peer.number, other.number):
                    other.arrive(life, lambda: other.connection_lost(peer.peer_id))

            self.kernel.at(at, lost)

    # --- questions ---------------------------------------------------------------------------

    def totals(self) -> Totals:
        traffic = [peer.traffic for peer in self.peers]
        return Totals(
            sum(each.bytes_in for each in traffic),
            sum(each.bytes_out for each in traffic),
            sum(each.messages_out for each in traffic),
            sum(each.data_bytes_in for each in traffic),
            sum(each.data_messages_out for each in traffic),
        )

    def bytes_by_kind(self) -> Counter[int]:
        """Control bytes sent until now, by kind of message."""
        total: Counter[int] = Counter()
        for peer in self.peers:
            total.update(peer.traffic.bytes_by_kind)
        return total

    def agreed(self) -> bool:
        """Whether all running peers know the same, and that is the truth."""
        return next(self._disagreements(exact=False), None) is None

    def complete(self) -> bool:
        """Whether every running peer counts exactly the others as members, suspected or not."""
        running = self.running
        ids = {peer.peer_id for peer in running}
        return all(
            len(live := peer.gossip.membership.live()) == len(ids)
            and all(state.peer_id in ids for state in live)
            for peer in running
        )

    def disagreements(self, limit: int = 10) -> list[str]:
        """The differences between the running peers, record by record. Empty when they agree."""
        found = []
        for text in self._disagreements(exact=True):
            found.append(text)
            if len(found) == limit:
                break
        return found

    def _disagreements(self, exact: bool) -> Iterator[str]:
        running = self.running
        ids = {peer.peer_id for peer in running}
        hashes = {peer.gossip.cluster_records.hash for peer in running}
        if len(hashes) > 1:
            yield "the cluster records differ"
        for peer in running:
            yield from self._differences(peer, running, ids, exact)

    def _differences(
        self, peer: GossipPeer, running: list[GossipPeer], ids: set[PeerId], exact: bool
    ) -> Iterable[str]:
        gossip = peer.gossip
        membership, directory = gossip.membership, gossip.directory
        live = {state.peer_id for state in membership.live()}
        if live != ids:
            missing = sorted(self.by_peer_id[each].number for each in ids - live)
            ghosts = sorted(
                str(self.by_peer_id[each].number) if each in self.by_peer_id else each.hex()
                for each in live - ids
            )
            yield f"peer {peer.number} misses members {missing} and has ghost members {ghosts}"
        for other in running:
            if other is peer:
                continue
            theirs = other.gossip
            state = membership.get(other.peer_id)
            if state is None or state.status != Status.ALIVE:
                yield f"peer {peer.number} does not hold {other.number} alive"
                continue
            position = directory.position(theirs.member)
            wanted = (theirs.incarnation, theirs.log.sequence)
            if position != wanted:
                yield f"peer {peer.number} is at {position} of the log of {other.number}, not {wanted}"
            elif exact:
                yield from self._record_differences(peer, other)

    def _record_differences(self, peer: GossipPeer, other: GossipPeer) -> Iterable[str]:
        known = view_of(peer.gossip, other)
        held = {record.encode() for record in other.held.values()}
        if known != held:
            yield (
                f"peer {peer.number} lacks {len(held - known)} records of {other.number} "
                f"and has {len(known - held)} ghosts"
            )


def view_of(gossip: Gossip, owner: GossipPeer) -> set[bytes]:
    """The packed records that a machine has of another peer."""
    snapshot = view_snapshot(gossip.directory, owner.member)
    packed = snapshot[3] if snapshot else b""
    return {packed[start : start + LOCATION_BYTES] for start in range(0, len(packed), LOCATION_BYTES)}


def packed_hash(packed: bytes) -> int:
    """XOR of the hashes of packed records, computed from the records alone."""
    total = 0
    for start in range(0, len(packed), LOCATION_BYTES):
        total ^= location_hash(packed[start : start + LOCATION_BYTES])
    return total
