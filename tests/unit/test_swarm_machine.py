"""Whatever happens to a peer of a swarm, in whatever order, its books are right, and it completes when it can."""

import math
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pstore.checkpoint.content.pieces import full_map, pack_map, pieces_in
from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.checkpoint.swarm.swarm import Swarm
from p2pstore.checkpoint.swarm.swarm_messages import (
    Abandon,
    Asked,
    Connect,
    Disconnect,
    Effect,
    Event,
    FetchPiece,
    Grant,
    Linked,
    Needed,
    Needs,
    NewPieces,
    Participants,
    PieceArrived,
    PieceFailed,
    PieceFailure,
    PieceMapMessage,
    Received,
    Refuse,
    Serve,
    Served,
    Tell,
    Tick,
    Unlinked,
)

PIECES = 12
OWN = 5
MEMBERS = st.integers(1, 9)
ANY_PIECES = st.integers(-2, PIECES + 1)


class SwarmPeer(RuleBasedStateMachine):
    """Neighbours say and do anything, honest or not; the shell behaves as it must."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fetching: set[tuple[int, int]] = set()
        self.serving: set[tuple[int, int]] = set()
        self.linked: set[int] = set()
        self.banned: set[int] = set()
        self.machine = Swarm(
            OWN,
            [100] * PIECES,
            0b11,
            Random(1),
            0.0,
            publishes=False,
            config=SwarmConfig(grant_seconds=0.5, first_deadline_seconds=2.0),
            needed=0b1111_0111,
        )

    def on(self, event: Event, after: float = 0.001) -> None:
        self.now += after
        for effect in self.machine.handle(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case FetchPiece(member, piece):
                assert member in self.linked
                assert (member, piece) not in self.fetching
                assert not self.machine.have >> piece & 1
                self.fetching.add((member, piece))
                assert sum(each == piece for _, each in self.fetching) <= 2
            case Abandon(member, piece):
                self.fetching.remove((member, piece))
            case Serve(member, piece):
                assert member in self.linked
                assert self.machine.have >> piece & 1
                self.serving.add((member, piece))
            case Disconnect(member, banned):
                self.cut(member)
                if banned:
                    self.banned.add(member)
            case Connect(member):
                assert member not in self.banned
                assert member not in self.linked
            case Tell(members, _):
                assert set(members) <= self.linked

    def cut(self, member: int) -> None:
        self.linked.discard(member)
        self.fetching = {each for each in self.fetching if each[0] != member}
        self.serving = {each for each in self.serving if each[0] != member}

    # --- what may happen ---

    @rule(member=MEMBERS, same_host=st.sampled_from([False, False, True]))
    def link(self, member: int, same_host: bool) -> None:
        if member != OWN and member not in self.linked:
            self.linked.add(member)
            self.on(Linked(member, same_host))

    @rule(member=MEMBERS)
    def unlink(self, member: int) -> None:
        self.cut(member)
        self.on(Unlinked(member))

    @rule(members=st.frozensets(MEMBERS), here=st.frozensets(MEMBERS))
    def participants(self, members: frozenset[int], here: frozenset[int]) -> None:
        self.on(Participants(members, members & here))

    @rule(member=MEMBERS, pieces=st.integers(0, full_map(PIECES)))
    def tells_map(self, member: int, pieces: int) -> None:
        self.on(Received(member, PieceMapMessage(pack_map(pieces, PIECES))))

    @rule(member=MEMBERS, pieces=st.integers(0, 2 * full_map(PIECES)))
    def tells_needs(self, member: int, pieces: int) -> None:
        self.on(Received(member, Needs(pieces.to_bytes(2, "little"))))

    @rule(pieces=st.integers(0, full_map(PIECES)))
    def needs_more(self, pieces: int) -> None:
        self.on(Needed(pieces))

    @rule(member=MEMBERS, pieces=st.lists(ANY_PIECES, max_size=4))
    def tells_news(self, member: int, pieces: list[int]) -> None:
        self.on(Received(member, NewPieces(pieces)))

    @rule(member=MEMBERS, piece=ANY_PIECES)
    def grants(self, member: int, piece: int) -> None:
        self.on(Received(member, Grant(piece)))

    @rule(member=MEMBERS, reason=st.integers(0, 5))
    def refuses(self, member: int, reason: int) -> None:
        self.on(Received(member, Refuse(reason)))

    @rule(member=MEMBERS, piece=ANY_PIECES)
    def asks(self, member: int, piece: int) -> None:
        self.on(Asked(member, piece))

    @precondition(lambda self: self.serving)
    @rule(data=st.data(), whole=st.booleans())
    def served(self, data: st.DataObject, whole: bool) -> None:
        member, piece = data.draw(st.sampled_from(sorted(self.serving)))
        self.serving.remove((member, piece))
        self.on(Served(member, piece, whole))

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def arrives(self, data: st.DataObject, seconds: float) -> None:
        member, piece = data.draw(st.sampled_from(sorted(self.fetching)))
        self.fetching.remove((member, piece))
        self.on(PieceArrived(member, piece), seconds)

    @precondition(lambda self: self.fetching)
    @rule(data=st.data(), why=st.sampled_from(list(PieceFailure)))
    def fails(self, data: st.DataObject, why: PieceFailure) -> None:
        member, piece = data.draw(st.sampled_from(sorted(self.fetching)))
        self.fetching.remove((member, piece))
        self.on(PieceFailed(member, piece, why))

    @rule(seconds=st.sampled_from([0.01, 0.3, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(5000):
            due = self.machine.wake_at
            if due > until:
                break
            self.now = max(self.now, due)
            self.on(Tick(), 0.0)
        else:
            raise AssertionError("it never rests")
        self.now = until

    # --- what must hold ---

    @invariant()
    def books_are_right(self) -> None:
        machine = self.machine
        flights = machine.receiving.flights
        assert {(flight.member, piece) for piece, flight in flights} == self.fetching
        selection = machine.state.selection
        assert selection.have | selection.missing == selection.needed | selection.have
        assert not selection.missing & ~selection.needed
        assert not selection.have & selection.missing
        assert pieces_in(selection.missing & ~selection.wanted) == sorted(
            {piece for piece, _ in flights}
        )
        assert set(machine.state.neighbours) == self.linked
        assert not self.linked & self.banned
        assert set(machine.state.uploads._usual) | set(machine.state.downloads._usual) <= self.linked
        network = [flight for _, flight in flights if not flight.same_host]
        assert flights.over_network == len(network)
        assert flights.within_host == len(self.fetching) - len(network)
        assert flights.held_up == sum(flight.held_up_at == -math.inf for flight in network)
        for piece in range(PIECES):
            holders = sum(each.pieces >> piece & 1 for each in machine.state.neighbours.values())
            assert selection.availability.copies(piece) == holders

    @invariant()
    def slots_are_bounded(self) -> None:
        slots = self.machine.slots
        busy = {each for each in self.serving if not self.machine.state.neighbours[each[0]].same_host}
        assert len(busy) <= 2 * 8
        assert all(slots.is_sending(*each) for each in busy)
        used = {member: slots.used_by(member) for member in (*range(10), 99)}
        assert all(member in self.linked for member, count in used.items() if count)
        assert all(used[member] >= sum(to == member for to, _ in busy) for member in used)
        granted = sum(used.values()) - len(busy)
        assert granted <= slots.slots - slots.free <= granted + len(busy)
        assert slots.waiting <= len(self.linked)

    def teardown(self) -> None:
        """One honest neighbour is enough."""
        honest = 99
        for member in list(self.linked):
            self.unlink(member)
        self.linked.add(honest)
        self.on(Linked(honest))
        self.on(Received(honest, PieceMapMessage(pack_map(full_map(PIECES), PIECES))))
        for _ in range(200):
            if self.machine.complete:
                return
            self.time_passes(0.6)
            for member, piece in sorted(self.fetching):
                self.fetching.discard((member, piece))
                self.on(PieceArrived(member, piece))
        raise AssertionError("it does not complete")


TestSwarmPeer = SwarmPeer.TestCase
TestSwarmPeer.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
