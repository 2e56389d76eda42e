"""A checkpoint broadcast in virtual time: the machines of real swarms, over links that are queues. Pure.

Every host has an uplink and a downlink of some bytes a second, each a first-in-first-out queue of whole pieces. A piece
passes both at once, as streams do: it is there when both have let it through. Messages take a latency and no bandwidth.
A death is noticed by neighbours some time later. Not modelled: how TCP shares a link, disks, and what hashing and
Python cost.

The unit of comparison is the shortest time in which the last of N receivers can have K pieces over equal links: the
last piece leaves the source after K piece times at the earliest, and from then on holders at best double, so that is
K + floor(log2 N).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Final

from p2pstore.checkpoint.content.pieces import NO_PIECES, PieceMap, full_map
from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.checkpoint.swarm.swarm import Swarm
from p2pstore.checkpoint.swarm.swarm_messages import (
    Abandon,
    Asked,
    Complete,
    Connect,
    Decline,
    Disconnect,
    Event,
    FetchPiece,
    Linked,
    Participants,
    PieceArrived,
    PieceFailed,
    PieceFailure,
    Received,
    Refusal,
    Serve,
    Served,
    Tell,
    Tick,
    Unlinked,
)
from simulation.kernel import Kernel

SOURCE: Final = 0
"""The member that publishes; receivers are 1 to N."""
CONNECTING_ROUND_TRIPS: Final = 3
MEMORY_BYTES_PER_SECOND: Final = 10e9
GOSSIP_SECONDS: Final = 0.3
"""Until others hear of one who joins late."""


@dataclass(frozen=True, slots=True)
class BroadcastScenario:
    """One broadcast. Times in virtual seconds; shares 0 to 1."""

    receivers: int = 64
    pieces: int = 256
    piece_bytes: int = 64 * 1024 * 1024
    bytes_per_second: float = 1e9
    latency: float = 0.001
    """Of a message, one way."""
    slow_share: float = 0.0
    slow_speed: float = 0.25
    """Of slow receivers' links, of the others'."""
    dying_share: float = 0.0
    """Receivers that die when half of the shortest time is over."""
    noticed_after: float = 0.5
    hostile_share: float = 0.0
    """Receivers that send nothing but wrong bytes."""
    silent_share: float = 0.0
    """Receivers that offer what they have and send nothing."""
    joining_over: float = 0.0
    """Receivers join evenly over this multiple of the shortest time."""
    receivers_per_host: int = 1
    parts: int = 1
    """Each receiver needs one part of the pieces, of this number of equal parts."""
    source_leaves: bool = False
    """As soon as its neighbours have every piece."""
    give_up_after: float = 20.0
    """Shortest times after which the broadcast has failed."""
    config: SwarmConfig = field(default_factory=SwarmConfig)

    @property
    def piece_seconds(self) -> float:
        """How long a piece takes over a usual link."""
        return self.piece_bytes / self.bytes_per_second

    @property
    def shortest_seconds(self) -> float:
        """No broadcast over equal links is faster. (One of pieces that few hosts fetch is counted by hosts.)"""
        hosts = -(-self.receivers // self.receivers_per_host)
        return (self.pieces + math.floor(math.log2(hosts))) * self.piece_seconds


@dataclass(slots=True)
class BroadcastOutcome:
    """The result. Times of receivers from when they joined, in shortest times."""

    last: float
    """When the last healthy receiver had everything; infinity when one never had."""
    mean: float
    last_slow: float
    source_copies: float
    """What the source sent, in copies of the checkpoint."""
    copies_per_host: float
    """What crossed the network into the average host that finished, in copies."""
    most_copies_per_host: float
    bad_pieces: int
    """Pieces with wrong bytes that healthy receivers got, in all."""
    banned: int
    """Hostile receivers that at least one other banned."""
    wrongly_banned: int
    source_left_at: float
    """In shortest times; infinity when it stayed."""
    busy: int
    events: int
    scheduling_seconds: float
    """What all machines took together, by the clock that was handed in."""
    pieces_arrived: int
    trace_hash: str


class Fate(Enum):
    """How a receiver behaves: see `BroadcastScenario`."""

    HEALTHY = "healthy"
    SLOW = "slow"
    DYING = "dying"
    HOSTILE = "hostile"
    SILENT = "silent"


class _Link:
    """Up and down of one host."""

    def __init__(self, bytes_per_second: float) -> None:
        self.seconds_per_byte = 1 / bytes_per_second
        self.up_free_at = 0.0
        self.down_free_at = 0.0
        self.received_bytes = 0
        self.sent_bytes = 0


class _Peer:
    """A machine with its place in the simulated world."""

    def __init__(self, member: int, host: int, link: _Link, machine: Swarm, joined_at: float) -> None:
        self.member = member
        self.host = host
        self.link = link
        self.machine = machine
        self.joined_at = joined_at
        self.alive = True
        self.fate = Fate.HEALTHY
        self.linked: set[int] = set()
        self.fetching: set[tuple[int, int]] = set()
        self.wakes_at = math.inf
        self.finished_at = math.inf


class Broadcast:
    """A run from one seed; the same seed gives the same run."""

    def __init__(
        self, scenario: BroadcastScenario, seed: int, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`clock` measures what the machines cost: seconds of real or of CPU time."""
        self.scenario = scenario
        self.kernel = Kernel(seed)
        self._clock = clock
        self._scheduling = 0.0
        self._arrived = 0
        self._bad_pieces = 0
        self._busy = 0
        self._banned: set[int] = set()
        self._source_left_at = math.inf
        self._unfinished = 0
        self._known: frozenset[int] = frozenset()
        self._sizes = [scenario.piece_bytes] * scenario.pieces
        self._hosts: dict[int, _Link] = {}
        self.peers: dict[int, _Peer] = {}
        self._choose_fates()

    def run(self) -> BroadcastOutcome:
        """Until the last healthy receiver has everything, or it takes too long."""
        scenario, kernel = self.scenario, self.kernel
        joining = scenario.joining_over * scenario.shortest_seconds
        for peer in self.peers.values():
            peer.joined_at = 0.0
            if joining and peer.member != SOURCE:
                peer.joined_at = joining * kernel.rng.random()
        self._known = frozenset(member for member, peer in self.peers.items() if peer.joined_at == 0.0)
        for peer in self.peers.values():
            kernel.at(peer.joined_at, lambda peer=peer: self._join(peer))  # type: ignore[misc]
            if peer.fate is Fate.DYING:
                kernel.at(scenario.shortest_seconds / 2, lambda peer=peer: self._die(peer))  # type: ignore[misc]
        kernel.run_until(
            scenario.give_up_after * scenario.shortest_seconds + joining,
            stop=lambda: self._unfinished == 0,
        )
        return self._outcome()

    # --- the world ---------------------------------------------------------------------------

    def _choose_fates(self) -> None:
        scenario, rng = self.scenario, self.kernel.rng
        receivers = list(range(1, scenario.receivers + 1))
        for member in (SOURCE, *receivers):
            host = -1 if member == SOURCE else (member - 1) // scenario.receivers_per_host
            link = self._hosts.setdefault(host, _Link(scenario.bytes_per_second))
            machine = Swarm(
                member,
                self._sizes,
                full_map(scenario.pieces) if member == SOURCE else NO_PIECES,
                Random(rng.getrandbits(64)),
                0.0,
                publishes=member == SOURCE,
                config=scenario.config,
                needed=None if member == SOURCE else self._part_of(member),
            )
            self.peers[member] = _Peer(member, host, link, machine, 0.0)
        rng.shuffle(receivers)
        for share, fate in (
            (scenario.slow_share, Fate.SLOW),
            (scenario.dying_share, Fate.DYING),
            (scenario.hostile_share, Fate.HOSTILE),
            (scenario.silent_share, Fate.SILENT),
        ):
            count = math.ceil(share * scenario.receivers)
            for member in receivers[:count]:
                peer = self.peers[member]
                peer.fate = fate
                if fate is Fate.SLOW:
                    peer.link.seconds_per_byte /= scenario.slow_speed
            del receivers[:count]
        self._unfinished = sum(self._counts(peer) for peer in self.peers.values())

    def _part_of(self, member: int) -> PieceMap:
        pieces, parts = self.scenario.pieces, self.scenario.parts
        number = member % parts
        return full_map(pieces * (number + 1) // parts) & ~full_map(pieces * number // parts)

    def _counts(self, peer: _Peer) -> bool:
        """Whether it is waited for: healthy receivers are."""
        return peer.fate is Fate.HEALTHY and peer.member != SOURCE

    def _join(self, peer: _Peer) -> None:
        known = self._known | {peer.member}
        if known != self._known:
            self._known = known
            self.kernel.after(GOSSIP_SECONDS, self._tell_participants)
        self._happens(peer, self._participants(peer))

    def _tell_participants(self) -> None:
        for peer in list(self.peers.values()):
            if peer.joined_at <= self.kernel.now:
                self._happens(peer, self._participants(peer))

    def _participants(self, peer: _Peer) -> Participants:
        share = self.scenario.receivers_per_host
        first = peer.host * share + 1
        here = range(first, first + share) if peer.member != SOURCE and share > 1 else ()
        return Participants(self._known, self._known & frozenset(here))

    def _die(self, peer: _Peer) -> None:
        peer.alive = False
        self._known -= {peer.member}
        for member in peer.linked:
            self.kernel.after(
                self.scenario.noticed_after,
                lambda member=member: self._cut(self.peers[member], peer),  # type: ignore[misc]
            )
        self.kernel.after(self.scenario.noticed_after, self._tell_participants)

    def _cut(self, peer: _Peer, from_peer: _Peer) -> None:
        """A connection ends, as `peer` sees it."""
        if from_peer.member in peer.linked:
            peer.linked.discard(from_peer.member)
            peer.fetching = {each for each in peer.fetching if each[0] != from_peer.member}
            self._happens(peer, Unlinked(from_peer.member))

    # --- machines ----------------------------------------------------------------------------

    def _happens(self, peer: _Peer, event: Event) -> None:
        if not peer.alive:
            return
        before = self._clock()
        effects = peer.machine.handle(event, self.kernel.now)
        self._scheduling += self._clock() - before
        for effect in effects:
            self._carry_out(peer, effect)
        wake_at = peer.machine.wake_at
        if wake_at < peer.wakes_at:
            peer.wakes_at = wake_at
            self.kernel.at(wake_at, lambda: self._wake(peer, wake_at))
        if peer.member == SOURCE and self.scenario.source_leaves and peer.machine.dispensable:
            self._source_left_at = self.kernel.now / self.scenario.shortest_seconds
            self._die(peer)

    def _wake(self, peer: _Peer, planned: float) -> None:
        if peer.wakes_at == planned:
            peer.wakes_at = math.inf
            self._happens(peer, Tick())

    def _carry_out(self, peer: _Peer, effect: object) -> None:
        match effect:
            case Tell(members, message):
                event = Received(peer.member, message)
                self.kernel.after(self.scenario.latency, lambda: self._deliver(peer, members, event))
            case FetchPiece(member, piece):
                peer.fetching.add((member, piece))
                asked = Asked(peer.member, piece)
                self.kernel.after(self.scenario.latency, lambda: self._deliver(peer, (member,), asked))
            case Serve(member, piece):
                self._serve(peer, self.peers[member], piece)
            case Decline(member, piece, why):
                failure = PieceFailure.BUSY if why is Refusal.BUSY else PieceFailure.LACKS
                self._busy += failure is PieceFailure.BUSY
                self.kernel.after(
                    self.scenario.latency,
                    lambda: self._end_fetch(
                        self.peers[member], peer, piece, PieceFailed(peer.member, piece, failure)
                    ),
                )
            case Abandon(member, piece):
                peer.fetching.discard((member, piece))
                served = Served(peer.member, piece, whole=False)
                self.kernel.after(self.scenario.latency, lambda: self._deliver(peer, (member,), served))
            case Connect(member):
                self._connect(peer, self.peers[member])
            case Disconnect(member, banned):
                if banned:
                    self._banned.add(member)
                peer.linked.discard(member)
                peer.fetching = {each for each in peer.fetching if each[0] != member}
                self.kernel.after(self.scenario.latency, lambda: self._cut(self.peers[member], peer))
            case Complete():
                peer.finished_at = self.kernel.now
                self._unfinished -= self._counts(peer)
                self.kernel.trace("complete", peer.member)

    def _deliver(self, sender: _Peer, members: tuple[int, ...], event: Event) -> None:
        """What a peer says reaches those that are connected with it."""
        for member in members:
            receiver = self.peers[member]
            if sender.member in receiver.linked:
                self._happens(receiver, event)

    def _connect(self, peer: _Peer, other: _Peer) -> None:
        def made() -> None:
            if not (peer.alive and other.alive and other.joined_at <= self.kernel.now):
                self._happens(peer, Unlinked(other.member))
                return
            if other.member in peer.linked:
                return
            peer.linked.add(other.member)
            other.linked.add(peer.member)
            same_host = peer.host == other.host
            self._happens(peer, Linked(other.member, same_host))
            self._happens(other, Linked(peer.member, same_host))

        self.kernel.after(2 * CONNECTING_ROUND_TRIPS * self.scenario.latency, made)

    # --- pieces ------------------------------------------------------------------------------

    def _serve(self, sender: _Peer, receiver: _Peer, piece: int) -> None:
        if not sender.machine.have >> piece & 1:
            raise AssertionError(f"{sender.member} serves piece {piece}, which it does not have")
        if sender.fate is Fate.SILENT:
            return
        now, size = self.kernel.now, self._sizes[piece]
        if sender.host == receiver.host:
            arrives = now + size / MEMORY_BYTES_PER_SECOND
            self.kernel.at(arrives, lambda: self._arrive(sender, receiver, piece))
            return
        begins = max(now, sender.link.up_free_at)
        leaves = sender.link.up_free_at = begins + size * sender.link.seconds_per_byte
        self.kernel.at(
            begins + self.scenario.latency,
            lambda: self._come_in(sender, receiver, piece, leaves + self.scenario.latency),
        )

    def _come_in(self, sender: _Peer, receiver: _Peer, piece: int, last_byte_at: float) -> None:
        """The first byte of a piece is at the receiver's link, where other pieces may come first."""
        link = receiver.link
        begins = max(self.kernel.now, link.down_free_at)
        link.down_free_at = begins + self._sizes[piece] * link.seconds_per_byte
        arrives = max(link.down_free_at, last_byte_at)
        self.kernel.at(arrives, lambda: self._arrive(sender, receiver, piece))

    def _arrive(self, sender: _Peer, receiver: _Peer, piece: int) -> None:
        if not sender.alive:
            return  # what it had sent of the piece is lost with it
        if sender.host != receiver.host:
            sender.link.sent_bytes += self._sizes[piece]
            receiver.link.received_bytes += self._sizes[piece]
        served = Served(receiver.member, piece)
        self.kernel.after(
            self.scenario.latency, lambda: self._deliver(receiver, (sender.member,), served)
        )
        event: Event = PieceArrived(sender.member, piece)
        if sender.fate is Fate.HOSTILE:
            event = PieceFailed(sender.member, piece, PieceFailure.BAD)
        self._end_fetch(receiver, sender, piece, event)

    def _end_fetch(self, receiver: _Peer, sender: _Peer, piece: int, event: Event) -> None:
        if (sender.member, piece) not in receiver.fetching or not receiver.alive:
            return
        receiver.fetching.discard((sender.member, piece))
        if isinstance(event, PieceArrived):
            self._arrived += 1
        elif isinstance(event, PieceFailed) and event.why is PieceFailure.BAD:
            self._bad_pieces += receiver.fate is not Fate.HOSTILE
        self._happens(receiver, event)

    # --- what came of it ---------------------------------------------------------------------

    def _outcome(self) -> BroadcastOutcome:
        scenario = self.scenario
        size = scenario.pieces * scenario.piece_bytes
        healthy = [
            (peer.finished_at - peer.joined_at) / scenario.shortest_seconds
            for peer in self.peers.values()
            if self._counts(peer)
        ]
        slow = [
            (peer.finished_at - peer.joined_at) / scenario.shortest_seconds
            for peer in self.peers.values()
            if peer.fate is Fate.SLOW
        ]
        copies = [
            self._hosts[host].received_bytes / size
            for host in {peer.host for peer in self.peers.values() if self._counts(peer)}
        ]
        hostile = {peer.member for peer in self.peers.values() if peer.fate is Fate.HOSTILE}
        return BroadcastOutcome(
            last=max(healthy),
            mean=sum(healthy) / len(healthy),
            last_slow=max(slow, default=0.0),
            source_copies=self._hosts[-1].sent_bytes / size,
            copies_per_host=sum(copies) / len(copies),
            most_copies_per_host=max(copies),
            bad_pieces=self._bad_pieces,
            banned=len(self._banned & hostile),
            wrongly_banned=len(self._banned - hostile),
            source_left_at=self._source_left_at,
            busy=self._busy,
            events=self.kernel.events,
            scheduling_seconds=self._scheduling,
            pieces_arrived=self._arrived,
            trace_hash=self.kernel.trace_hash,
        )
