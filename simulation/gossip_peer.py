"""One gossip machine with its shell, in virtual time: what the real shell does, in the same order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from p2pstore.errors import ProtocolError
from p2pstore.gossip.gossip_messages import (
    Answer,
    Ask,
    Contact,
    Duplicate,
    Effect,
    FetchSnapshot,
    SnapshotHead,
    Status,
)
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members.member_table import MemberChange
from p2pstore.gossip.records import (
    PEER_RECORD_FORMAT,
    ClusterRecord,
    LocationRecord,
    LogHead,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    member_of,
    sign_cluster_record,
)
from p2pstore.objects import clock_from_unix_seconds
from simulation.gossip_control import ControlTalk
from simulation.gossip_data import fetch_snapshot, send_push
from simulation.gossip_host import GossipHost
from simulation.gossip_truth import LogTruth
from simulation.signer import SimulatedSigner, SimulatedVerifier, peer_id_of

if TYPE_CHECKING:
    from simulation.gossip_cluster import GossipCluster

CLOSE_SPARE_SECONDS: Final = 2.5


@dataclass(slots=True)
class SavedState:
    """What a state directory keeps of one life for the next."""

    incarnation: int = 0
    addresses: list[tuple[PeerId, tuple[str, ...]]] = field(default_factory=list)


class GossipPeer(GossipHost):
    """A host that runs a gossip machine, or is stopped and has only its saved state."""

    def __init__(self, cluster: GossipCluster, number: int) -> None:
        super().__init__(cluster.kernel, number)
        self.cluster = cluster
        self.address = address_of(number)
        self.signer = SimulatedSigner(peer_id_of(number))
        self.peer_id = self.signer.peer_id
        self.member: Member = member_of(self.peer_id)
        self.saved = SavedState()
        self.silent = False
        """A host that is off does not even refuse connections."""
        self.held: dict[bytes, LocationRecord] = {}
        self.truth: dict[int, LogTruth] = {}
        """By incarnation: the record that readers of the log must find at each place of it."""
        self.top_incarnation = 0
        """The highest that this identity ever had."""
        self.control: ControlTalk
        self._gossip: Gossip | None = None
        self._close_spare_at = -math.inf
        self._next_tick: float | None = None
        """What the machine said last of when it is due; None once something was fed in."""
        self._seen_version = -1
        """Of its members, when it said so."""

    # --- life --------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._gossip is not None

    @property
    def gossip(self) -> Gossip:
        """The machine. Raises `RuntimeError` when the peer is not running."""
        if self._gossip is None:
            raise RuntimeError(f"simulated peer {self.number} is not running")
        return self._gossip

    def boot(self, bootstrap: list[str], *, keep_state: bool = True) -> None:
        """Start a fresh process on this host, with the state of the last one or without."""
        if not keep_state:
            self.saved = SavedState()
        self.start()
        self.silent = False
        self.held.clear()
        self.control = ControlTalk(self)
        incarnation = self.choose_incarnation()
        self.saved.incarnation = incarnation
        rng = Random(self.kernel.rng.getrandbits(64))
        gossip = self.cluster.make_gossip(
            self.signer,
            SimulatedVerifier(),
            incarnation,
            self._describe,
            self.cluster.config,
            rng,
            wall_clock=lambda at: clock_from_unix_seconds(self.unix(at)),
        )
        self._gossip = gossip
        self._next_tick, self._seen_version = None, -1
        self.truth[incarnation] = LogTruth()
        gossip.addresses.load(self.saved.addresses)
        gossip.addresses.add_bootstrap([address for address in bootstrap if address != self.address])
        self.settle()

    def choose_incarnation(self) -> int:
        """Wall-clock milliseconds, and above the last one used."""
        return max(self.saved.incarnation + 1, int(self.unix(self.now) * 1000))

    def _describe(self) -> PeerRecord:
        return PeerRecord(
            format=PEER_RECORD_FORMAT,
            peer_id=self.peer_id,
            cluster=self.cluster.config.cluster,
            name=f"peer-{self.number}",
            incarnation=0,
            sequence=0,
            host_id=self.number.to_bytes(16, "little"),
            control=[self.address],
            data=[self.address],
            socket=f"/run/p2pstore/{self.number}.sock",
            transports=[],
            segments=[],
            memory_capacity=0,
            memory_used=0,
            ssd_capacity=0,
            ssd_used=0,
            load_permille=0,
            head=LogHead(),
            software="simulated",
        )

    def save(self) -> None:
        """Write the state directory, as running peers do now and then."""
        self.saved.addresses = self.gossip.addresses.entries()

    def crash(self, *, silent: bool = False) -> None:
        """End without a word. `silent`: the whole host goes; else its kernel resets the connections."""
        if self._gossip is None:
            return
        self.save()
        self._end(silent)

    def leave(self) -> None:
        """End as a peer does that is asked to: the others are told."""
        if self._gossip is None:
            return
        self.save()
        self.carry_out(self._gossip.leave(self.now))
        self._end(silent=False)

    def _end(self, silent: bool) -> None:
        self.note_incarnation()
        self.end()
        self.silent = silent
        self._gossip = None
        self.held.clear()
        self.cluster.host_went(self, reset=not silent)

    # --- work --------------------------------------------------------------------------------

    def hold(self, record: LocationRecord) -> None:
        if self.held.get(record.digest) != record:
            self.held[record.digest] = record
            self.gossip.hold(record, self.now)
            self._note_operation(record.digest, record.encode())

    def release(self, digest: bytes) -> None:
        record = self.held.pop(digest)
        self.gossip.release(digest, record.version, self.now)
        self._note_operation(digest, None)

    def _note_operation(self, digest: bytes, packed: bytes | None) -> None:
        self._next_tick = None
        if self.cluster.keeps_truth:
            self.truth[self.gossip.incarnation].note(digest, packed)
        if not self.stalled:
            self.settle()

    def offer(self, record: ClusterRecord) -> SignedRecord:
        signed = sign_cluster_record(record, self.signer)
        self.gossip.cluster_records.offer(record, signed)
        self._next_tick = None
        if not self.stalled:
            self.settle()
        return signed

    def note_incarnation(self) -> None:
        """See `top_incarnation`; call it before the process ends and before comparing."""
        if self._gossip is not None:
            own = self._gossip.membership.own.incarnation
            self.top_incarnation = max(self.top_incarnation, own)

    # --- turns -------------------------------------------------------------------------------

    def drain(self) -> None:
        if self._inbox or self.control.any_expired:
            self._next_tick = None
        super().drain()

    def fail_expired(self) -> None:
        self.control.fail_expired()

    def tick_if_due(self) -> None:
        gossip, now = self.gossip, self.now
        if self._next_tick is None or gossip.membership.version != self._seen_version:
            self._next_tick = gossip.next_tick(now)
        if self._next_tick <= now:
            self._next_tick = None
            self.carry_out(gossip.tick(now))

    def settle(self) -> None:
        """Send what the machine has for homes, note changes, and see when the next turn is due."""
        gossip = self.gossip
        now = self.now
        pushes = gossip.partitions.take_pushes(now)
        for push in pushes:
            send_push(self, push)
        if pushes or gossip.membership.version != self._seen_version:
            self._next_tick, self._seen_version = None, gossip.membership.version
        for change in gossip.take_changes():
            self._note_change(change)
        if self.kernel.now >= self._close_spare_at:
            self._close_spare_at = self.kernel.now + CLOSE_SPARE_SECONDS
            self.cluster.close_spare(self)
        if self._next_tick is None:
            self._next_tick = gossip.next_tick(now)
        self.tick_at(self._next_tick)
        if self.cluster.after_turn is not None:
            self.cluster.after_turn(self)

    def _note_change(self, change: MemberChange) -> None:
        self.cluster.member_changed(self, change)
        if change.new > Status.SUSPECT:
            self.cluster.disconnect(self, change.peer_id)

    # --- what the machine asks for -----------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.control.ask(effect)
            elif isinstance(effect, FetchSnapshot):
                fetch_snapshot(self, effect)
            elif isinstance(effect, Contact):
                self.control.contact(effect)
            elif isinstance(effect, Answer):
                self.control.answer_later(effect)
            elif isinstance(effect, Duplicate):
                self.cluster.problem(f"peer {self.number} believes that it has a twin")
                self._end(silent=False)
                return
            else:
                raise TypeError(f"the simulator does not know the effect {effect!r}")

    def connection_lost(self, peer_id: PeerId) -> None:
        self.carry_out(self.gossip.connection_lost(peer_id, self.now))

    def install_snapshot(self, fetch: FetchSnapshot, head: SnapshotHead | None, packed: bytes) -> None:
        try:
            self.gossip.snapshot_fetched(fetch.token, head, packed, self.now)
        except ProtocolError as error:
            # The head that it is checked against may have come meanwhile: it is fetched again.
            self.cluster.snapshots_refused.append(str(error))


def address_of(number: int) -> str:
    """Where a numbered host is reached."""
    return f"sim:{number}"
