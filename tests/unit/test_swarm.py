"""The machine of one peer of a swarm, event by event."""

import math
from random import Random
from typing import TypeVar

import pytest

from p2pstore.checkpoint.content.pieces import Availability, full_map, map_of, pack_map, pieces_in
from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.checkpoint.swarm.swarm import Swarm
from p2pstore.checkpoint.swarm.swarm_messages import (
    ANY_PIECE,
    Abandon,
    Asked,
    Complete,
    Connect,
    Decline,
    Disconnect,
    Effect,
    Event,
    FetchPiece,
    Found,
    Grant,
    Invite,
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
    Refusal,
    Refuse,
    Serve,
    Served,
    Tell,
    Tick,
    Unlinked,
)
from p2pstore.checkpoint.swarm.upload_slots import SuperSeeding

OWN = 100
PIECES = 8
E = TypeVar("E")


class Peer:
    """A machine, a clock, and all that it asked for since `asked` was called last."""

    def __init__(
        self,
        have: list[int] | None = None,
        publishes: bool = False,
        pieces: int = PIECES,
        config: SwarmConfig | None = None,
        seed: int = 1,
        needed: list[int] | None = None,
    ) -> None:
        mine = full_map(pieces) if publishes else map_of(have or [])
        self.now = 0.0
        self.ticks = 0
        self.count = pieces
        self.machine = Swarm(
            OWN,
            [100] * pieces,
            mine,
            Random(seed),
            0.0,
            publishes=publishes,
            config=config,
            needed=None if needed is None else map_of(needed),
        )
        self._effects: list[Effect] = []

    def on(self, event: Event, after: float = 0.001) -> None:
        self.now += after
        self._effects += self.machine.handle(event, self.now)

    def wait(self, seconds: float) -> None:
        """Deliver ticks as they are due, for `seconds`."""
        until = self.now + seconds
        for _ in range(10_000):
            due = self.machine.wake_at
            if due > until:
                break
            self.now = max(self.now, due)
            self.ticks += 1
            self._effects += self.machine.handle(Tick(), self.now)
        else:
            raise AssertionError("it never rests")
        self.now = until

    def neighbour(self, member: int, *pieces: int, same_host: bool = False) -> None:
        self.on(Linked(member, same_host))
        self.on(Received(member, PieceMapMessage(pack_map(map_of(pieces), self.count))))

    def asked(self, kind: type[E]) -> list[E]:
        """The effects of this kind; they and all before are forgotten."""
        effects, self._effects = self._effects, []
        return [effect for effect in effects if isinstance(effect, kind)]

    def told(self, kind: type[E]) -> list[tuple[tuple[int, ...], E]]:
        """Messages of this kind, and to whom."""
        return [
            (effect.members, effect.message)
            for effect in self.asked(Tell)
            if isinstance(effect.message, kind)
        ]

    def granted(self) -> list[int]:
        return [members[0] for members, _ in self.told(Grant)]


# --- fetching --------------------------------------------------------------------------------


def test_a_new_neighbour_hears_what_is_here_and_then_what_is_new() -> None:
    peer = Peer([1, 2])
    peer.on(Linked(1))
    assert peer.told(PieceMapMessage) == [((1,), PieceMapMessage(b"\x06"))]
    peer.on(Received(1, Grant(5)))
    peer.on(PieceArrived(1, 5))
    assert peer.told(NewPieces) == [((1,), NewPieces([5]))]


def test_news_that_come_close_together_are_told_together() -> None:
    peer = Peer(config=SwarmConfig(upload_slots=4, news_seconds=0.05))
    peer.neighbour(1, *range(8))
    peer.neighbour(3, *range(8))
    for piece in range(3):
        peer.on(Received(1, Grant(piece)))
    for piece in range(3):
        peer.on(PieceArrived(1, piece))
    assert peer.told(NewPieces) == [((1, 3), NewPieces([0]))]
    peer.neighbour(2)
    assert peer.told(PieceMapMessage) == [((2,), PieceMapMessage(b"\x07"))]
    peer.wait(0.05)
    assert peer.told(NewPieces) == [((1, 3), NewPieces([1, 2]))]
    peer.wait(10.0)
    assert peer.told(NewPieces) == []


def test_the_more_neighbours_the_more_pieces_are_told_together() -> None:
    def messages(neighbours: int) -> float:
        peer = Peer(pieces=200)
        for member in range(1, 1 + neighbours):
            peer.neighbour(member, *range(200))
        for piece in range(100):
            peer.on(Received(1, Grant(piece)))
            peer.on(PieceArrived(1, piece), after=0.05)
            peer.wait(0.0)
        told = peer.told(NewPieces)
        assert sum(len(news.pieces) for members, news in told if 1 in members) >= 96
        return sum(len(members) for members, _ in told) / 100

    assert messages(2) == 2  # to each about each
    assert 2 < messages(12) < 3.5
    assert 2.5 < messages(20) < 4


def test_peers_of_one_host_hear_of_each_piece_at_once() -> None:
    peer = Peer(config=SwarmConfig(news_seconds=0.5))
    peer.neighbour(1, *range(8))
    peer.neighbour(2, same_host=True)
    peer.asked(Tell)
    pieces = pieces_in(peer.machine.state.host.mask)[:2]
    for piece in pieces:
        peer.on(Received(1, Grant(piece)))
        peer.on(PieceArrived(1, piece))
    told = peer.told(NewPieces)
    assert [news.pieces for members, news in told if 2 in members] == [[each] for each in pieces]
    assert [news.pieces for members, news in told if 1 in members] == [pieces[:1]]


def test_who_is_granted_a_slot_is_told_before_what_is_new() -> None:
    peer = Peer(config=SwarmConfig(upload_slots=1, news_seconds=0.5))
    peer.neighbour(1, *range(8))
    peer.neighbour(2)
    peer.on(Received(1, Grant(0)))
    peer.on(PieceArrived(1, 0))
    peer.on(Asked(2, 0))
    peer.asked(Tell)
    peer.on(Received(1, Grant(1)))
    peer.on(PieceArrived(1, 1))
    assert peer.asked(Tell) == []  # its turn comes later
    peer.on(Served(2, 0))
    assert peer.asked(Tell) == [Tell((2,), NewPieces([1])), Tell((2,), Grant(slots=1))]
    peer.wait(0.5)
    assert peer.told(NewPieces) == [((1,), NewPieces([1]))]


def test_a_grant_is_used_for_the_rarest_piece() -> None:
    peer = Peer()
    peer.neighbour(1, 0, 1, 2)
    peer.neighbour(2, 0, 1)
    peer.on(Received(1, Grant()))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 2)]


def test_a_grant_for_a_certain_piece_is_used_for_it_if_it_is_wanted() -> None:
    peer = Peer([0])
    peer.neighbour(1, *range(8))
    peer.on(Received(1, Grant(6)))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 6)]
    peer.on(Received(1, Grant(0)))
    (fetch,) = peer.asked(FetchPiece)
    assert fetch.piece not in (0, 6)


@pytest.mark.parametrize("piece", [-2, 8, 10**9])
def test_a_grant_for_a_piece_that_does_not_exist_is_one_for_any(piece: int) -> None:
    peer = Peer()
    peer.neighbour(1, 3)
    peer.on(Received(1, Grant(piece)))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 3)]


def test_grants_are_refused_when_enough_is_on_its_way_or_nothing_is_wanted() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    peer.neighbour(2, 0)
    peer.on(Received(1, Grant(0)))
    peer.on(Received(2, Grant()))
    assert peer.told(Refuse) == [((2,), Refuse(Refusal.NOTHING))]
    peer.on(Received(1, Grant()))
    peer.on(Received(1, Grant()))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.LATER))]
    peer.on(Received(1, Grant(7)))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.FULL))]


@pytest.mark.parametrize(("slots", "fetched"), [(2, 2), (4, 5), (8, 9), (1 << 62, 9), (-1, 2)])
def test_who_comes_takes_pieces_of_as_many_as_others_divide_their_links_among(
    slots: int, fetched: int
) -> None:
    peer = Peer(pieces=60)
    for member in range(1, 31):
        peer.neighbour(member, *range(60))
        peer.on(Received(member, Grant(slots=slots)))
    assert len(peer.asked(FetchPiece)) == fetched


def test_a_publisher_does_not_wait_to_know_the_network_before_it_fills_its_link() -> None:
    peer = Peer(publishes=True, pieces=40)
    for member in range(1, 11):
        peer.neighbour(member)
    assert len(peer.told(Grant)) == 8
    other = Peer(list(range(40)), pieces=40)
    for member in range(1, 11):
        other.neighbour(member)
    assert len(other.told(Grant)) == 2


def test_three_of_those_who_were_refused_hear_when_there_is_room() -> None:
    peer = Peer(pieces=40)
    for member in range(1, 7):
        peer.neighbour(member, *range(40))
    for member in (1, 2):
        peer.on(Received(member, Grant(member)))
    for member in (3, 4, 5, 6, 1):
        peer.on(Received(member, Grant()))
    peer.on(Received(2, Grant(9)))  # it says which: its link is what all wait for
    peer.asked(Tell)
    peer.on(PieceArrived(1, 1))
    assert peer.told(Invite) == [((member,), Invite()) for member in (2, 3, 4)]
    peer.on(Received(3, Grant()))
    peer.on(Unlinked(6))
    peer.on(PieceArrived(2, 2))
    assert peer.told(Invite) == [((member,), Invite()) for member in (5, 1)]
    peer.on(PieceArrived(3, 0))
    assert peer.told(Invite) == []


def test_no_neighbour_is_invited_for_unwanted_pieces() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    peer.neighbour(2, 0)
    peer.on(Received(1, Grant(0)))
    peer.on(Received(2, Grant()))
    assert peer.told(Refuse) == [((2,), Refuse(Refusal.NOTHING))]
    peer.on(PieceArrived(1, 0))
    peer.wait(10.0)
    assert peer.told(Invite) == []


def test_all_pieces_are_here_in_the_end_and_that_is_said_once() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    for _ in range(8):
        peer.on(Received(1, Grant()))
        (fetch,) = peer.asked(FetchPiece)
        peer.on(PieceArrived(1, fetch.piece))
    assert peer.asked(Complete) == [Complete()]
    assert peer.machine.complete
    assert peer.machine.have == full_map(8)
    peer.on(PieceArrived(1, 3))
    peer.wait(60.0)
    assert peer.asked(Complete) == []


def test_a_checkpoint_without_pieces_is_complete() -> None:
    peer = Peer(pieces=0)
    peer.neighbour(1)
    peer.wait(60.0)
    assert peer.machine.complete
    assert peer.machine.dispensable


# --- what goes wrong -------------------------------------------------------------------------


def test_a_piece_whose_sender_goes_is_asked_for_elsewhere_at_once() -> None:
    peer = Peer()
    peer.neighbour(1, 0, 1)
    peer.neighbour(2, 0)
    peer.on(Received(1, Grant(0)))
    peer.asked(FetchPiece)
    peer.on(Unlinked(1))
    assert peer.asked(FetchPiece) == [FetchPiece(2, 0)]


def test_a_piece_that_is_overdue_is_given_up_and_asked_for_elsewhere() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    peer.neighbour(2, *range(8))
    for piece in range(2):
        peer.on(Received(1, Grant(piece)))
        peer.on(PieceArrived(1, piece), after=0.4)
    peer.on(Received(1, Grant(2)))
    peer.asked(FetchPiece)
    peer.wait(4 * 0.4 - 0.1)
    assert peer.asked(FetchPiece) == []
    peer.wait(0.2)
    assert [each for each in peer._effects if isinstance(each, Abandon | FetchPiece)] == [
        Abandon(1, 2),
        FetchPiece(2, 2),
    ]
    peer.asked(FetchPiece)
    # Its sender is left alone for a while.
    peer.on(Received(1, Grant(3)))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.NOTHING))]
    # A piece that it brings after all is welcome.
    peer.on(PieceArrived(1, 2))
    assert peer.asked(Abandon) == [Abandon(2, 2)]
    assert peer.machine.have == map_of([0, 1, 2])


def test_who_sends_a_bad_piece_is_left_alone_and_the_second_time_banned() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    peer.on(Received(1, Grant(0)))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 0)]
    peer.on(PieceFailed(1, 0, PieceFailure.BAD))
    peer.on(Received(1, Grant(0)))
    peer.wait(29.0)
    assert peer.asked(FetchPiece) == []
    assert peer.asked(Disconnect) == []
    peer.wait(1.0)
    peer.on(Received(1, Grant(0)))
    (fetch,) = peer.asked(FetchPiece)
    peer.on(PieceFailed(1, fetch.piece, PieceFailure.BAD))
    assert peer.asked(Disconnect) == [Disconnect(1, banned=True)]
    assert peer.machine.have == 0
    peer.on(Linked(1))
    assert peer.asked(Disconnect) == [Disconnect(1, banned=True)]
    peer.on(Participants(frozenset([1, 2, OWN])))
    assert peer.asked(Connect) == [Connect(2)]
    peer.on(Asked(1, 0))
    assert peer.asked(Serve) == []


def test_who_tells_of_pieces_that_do_not_exist_is_banned() -> None:
    peer = Peer([0])
    peer.on(Participants(frozenset([1])))
    assert peer.asked(Connect) == [Connect(1)]
    peer.neighbour(1)
    peer.on(Received(1, NewPieces([8])))
    assert peer.asked(Disconnect) == [Disconnect(1, banned=True)]
    peer.wait(60.0)
    assert peer.asked(Connect) == []
    peer.on(Linked(1))
    assert peer.asked(Disconnect) == [Disconnect(1, banned=True)]


def test_what_a_neighbour_turns_out_to_lack_is_asked_for_elsewhere() -> None:
    peer = Peer()
    peer.neighbour(1, 0)
    peer.neighbour(2, 0)
    peer.on(Received(1, Grant(0)))
    peer.on(PieceFailed(1, 0, PieceFailure.LACKS))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 0), FetchPiece(2, 0)]
    peer.on(PieceFailed(2, 0, PieceFailure.LACKS))
    peer.wait(10.0)
    assert peer.asked(FetchPiece) == []


def test_without_offers_it_asks_now_and_then() -> None:
    peer = Peer()
    peer.neighbour(1, 4)
    peer.wait(0.6)
    assert peer.asked(FetchPiece) == [FetchPiece(1, 4)]
    peer.on(PieceFailed(1, 4, PieceFailure.BUSY))
    assert peer.asked(FetchPiece) == []
    peer.wait(0.6)
    assert peer.asked(FetchPiece) == [FetchPiece(1, 4)]


def test_what_is_late_in_the_end_is_asked_for_twice_and_the_slower_one_is_given_up() -> None:
    peer = Peer(list(range(5)))
    peer.neighbour(1, *range(8))
    peer.neighbour(2, *range(8))
    for member, piece in ((1, 5), (2, 6)):
        peer.on(Received(member, Grant(piece)))
        peer.on(PieceArrived(member, piece), after=0.2)
    peer.on(Received(1, Grant(7)))
    assert peer.asked(FetchPiece)[-1] == FetchPiece(1, 7)
    peer.wait(0.25)
    assert peer.asked(FetchPiece) == []
    peer.wait(0.25)  # it takes more than 1.5 times what is usual
    assert peer.asked(FetchPiece) == [FetchPiece(2, 7)]
    peer.wait(0.25)
    assert peer.asked(FetchPiece) == []  # never a third time
    peer.on(PieceArrived(2, 7))
    assert peer.asked(Abandon) == [Abandon(1, 7)]
    assert peer.machine.complete


def test_a_slow_sender_takes_no_place_that_others_would_use() -> None:
    peer = Peer(pieces=40)
    peer.neighbour(1, *range(40))
    peer.neighbour(2, *range(40))
    for piece in range(2):
        peer.on(Received(1, Grant(piece)))
        peer.on(PieceArrived(1, piece), after=0.1)
    for piece in (10, 11):
        peer.on(Received(2, Grant(piece)))
    peer.on(Received(1, Grant(12)))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.FULL))]
    peer.wait(0.35)  # three times the quickest: those two are held up by their sender
    assert peer.told(Invite) == [((1,), Invite())]
    for piece in (12, 13):
        peer.on(Received(1, Grant(piece)))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 12), FetchPiece(1, 13)]
    peer.on(Received(1, Grant(14)))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.FULL))]


# --- sending ---------------------------------------------------------------------------------


def test_who_refused_is_granted_nothing_before_that_changes() -> None:
    for reason in (Refusal.LATER, Refusal.NOTHING):
        peer = Peer([0, 1, 2])
        peer.neighbour(1, 0)
        assert peer.granted() == [1, 1]
        for _ in range(2):
            peer.on(Received(1, Refuse(reason)))
        peer.on(Received(1, NewPieces([1])))
        assert peer.granted() == []
        peer.on(Received(1, Invite()))
        assert peer.granted() == [1, 1]


def test_free_slots_are_granted_to_those_who_lack_something() -> None:
    peer = Peer([0, 1])
    peer.neighbour(1, 0, 1, 2)
    assert peer.granted() == []
    peer.on(Linked(2))
    assert peer.granted() == []  # nothing is known of it yet
    peer.neighbour(2, 0)
    assert peer.granted() == [2, 2]


def test_slots_go_to_those_who_have_none_first() -> None:
    peer = Peer([0, 1], config=SwarmConfig(upload_slots=2))
    peer.neighbour(1)
    assert peer.granted() == [1, 1]
    peer.on(Asked(1, 0))
    assert peer.asked(Serve) == [Serve(1, 0)]
    peer.neighbour(2)
    peer.on(Asked(1, 1))
    peer.asked(Serve)
    peer.on(Served(1, 0))
    assert peer.granted() == [2]


def test_who_refused_because_it_is_full_is_offered_a_slot_when_it_says_that_it_got_something() -> None:
    peer = Peer([0, 1, 2])
    peer.neighbour(1)
    assert peer.granted() == [1, 1]
    peer.on(Received(1, Refuse(Refusal.FULL)))
    peer.on(Received(1, Refuse(Refusal.FULL)))
    peer.wait(4.0)
    assert peer.granted() == []
    peer.on(Received(1, NewPieces([5])))
    assert peer.granted() == [1, 1]


def test_who_wanted_nothing_is_offered_a_slot_when_there_is_something_new() -> None:
    peer = Peer([0])
    peer.neighbour(2, *range(8))
    peer.neighbour(1)
    for _ in range(2):
        peer.on(Received(1, Refuse(Refusal.NOTHING)))
    peer.asked(Tell)
    peer.on(Received(2, Grant(7)))
    assert peer.granted() == []
    peer.on(PieceArrived(2, 7))
    assert peer.granted() == [1, 1]


def test_a_grant_that_is_not_answered_is_void() -> None:
    peer = Peer([0, 1])
    peer.neighbour(1)
    assert peer.granted() == [1, 1]
    peer.neighbour(2)
    peer.wait(1.9)
    assert peer.granted() == []
    peer.wait(0.2)
    assert peer.granted() == [2, 2]


def test_who_asks_without_a_grant_is_served_if_a_slot_is_free_else_waits_for_one() -> None:
    peer = Peer([0, 1, 2])
    peer.neighbour(1, 0, 1, 2)
    peer.on(Asked(1, 0))
    assert peer.asked(Serve) == [Serve(1, 0)]  # it may have lost what it had
    peer.neighbour(2)
    peer.neighbour(3)
    peer.neighbour(4)
    peer.asked(Tell)
    peer.on(Asked(4, 1))
    assert peer.asked(Decline) == [Decline(4, 1, Refusal.BUSY, 1)]
    peer.on(Served(1, 0))
    assert peer.granted() == [4]


def test_a_piece_that_is_not_here_is_not_sent() -> None:
    peer = Peer([0])
    peer.neighbour(1)
    peer.asked(Tell)
    for piece in (1, -1, 8):
        peer.on(Asked(1, piece))
        assert peer.asked(Decline) == [Decline(1, piece, Refusal.LACKS)]
    peer.on(Asked(77, 0))
    assert peer.asked(Serve) == []


def test_a_slow_receiver_does_not_keep_slots_that_others_would_use() -> None:
    peer = Peer(list(range(8)), config=SwarmConfig(upload_slots=2))
    peer.neighbour(1)
    for piece in range(2):
        peer.on(Asked(1, piece))
        peer.on(Served(1, piece), after=0.1)
    for _ in range(2):
        peer.on(Received(1, Refuse(Refusal.FULL)))
    peer.neighbour(2)
    for piece in range(2):
        peer.on(Asked(2, piece))
    peer.neighbour(3)
    peer.asked(Tell)
    peer.wait(0.2)
    assert peer.granted() == []
    peer.wait(0.2)
    assert peer.granted() == [3, 3]


def test_slots_are_free_again_when_their_user_goes() -> None:
    peer = Peer([0, 1])
    peer.neighbour(1)
    peer.on(Asked(1, 0))
    peer.neighbour(2)
    peer.asked(Tell)
    peer.on(Unlinked(1))
    assert peer.granted() == [2, 2]
    peer.on(Served(1, 0))
    assert peer.machine.slots.free == 0
    assert not peer.machine.sending._serving_since


# --- the publisher ---------------------------------------------------------------------------


def test_a_publisher_names_each_piece_once_before_receivers_choose() -> None:
    peer = Peer(publishes=True)
    named: list[int] = []
    peer.neighbour(1)
    while len(named) < 8:
        grants = [grant for _, grant in peer.told(Grant)]
        named += [grant.piece for grant in grants]
        for grant in grants:
            peer.on(Asked(1, grant.piece))
        for grant in grants:
            peer.on(Served(1, grant.piece))
            peer.on(Received(1, NewPieces([grant.piece])))
    assert sorted(named) == list(range(8))
    assert peer.machine.dispensable
    peer.neighbour(2)
    assert {grant.piece for _, grant in peer.told(Grant)} <= {ANY_PIECE}


@pytest.mark.parametrize("how", ["refused", "other", "unserved", "gone", "void"])
def test_what_a_publisher_did_not_get_away_it_names_again(how: str) -> None:
    peer = Peer(publishes=True, pieces=2)
    peer.neighbour(1)
    first, second = (grant.piece for _, grant in peer.told(Grant))
    assert {first, second} == {0, 1}
    match how:
        case "refused":
            peer.on(Received(1, Refuse(Refusal.FULL)))
        case "other":
            peer.on(Asked(1, second))  # in place of the first
            peer.on(Served(1, second))
        case "unserved":
            peer.on(Asked(1, first))
            peer.on(Served(1, first, whole=False))
            peer.on(Received(1, Refuse(Refusal.FULL)))
        case "gone":
            peer.on(Unlinked(1))
        case "void":
            peer.wait(2.1)
    peer.neighbour(2)
    named = [grant.piece for _, grant in peer.told(Grant)]
    assert first in named
    assert not peer.machine.dispensable


def test_a_publisher_may_go_when_its_neighbours_have_everything_among_them() -> None:
    peer = Peer(publishes=True)
    assert not peer.machine.dispensable
    peer.neighbour(1, *range(5))
    assert not peer.machine.dispensable
    peer.neighbour(2, 5, 6, 7)
    assert peer.machine.dispensable
    peer.on(Unlinked(1))
    assert not peer.machine.dispensable


def test_a_publisher_whose_open_grant_is_refused_goes_on() -> None:
    peer = Peer(publishes=True, pieces=1)
    peer.neighbour(1)
    for _, grant in peer.told(Grant):
        peer.on(Asked(1, 0) if grant.piece == 0 else Received(1, Refuse(Refusal.NOTHING)))
    peer.neighbour(2)
    assert {grant.piece for _, grant in peer.told(Grant)} == {ANY_PIECE}


# --- one host --------------------------------------------------------------------------------


def test_peers_of_one_host_fetch_different_pieces_and_the_rest_from_each_other() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    peer.neighbour(50, same_host=True)
    peer.neighbour(200, same_host=True)
    fetched = set()
    for _ in range(2):
        peer.on(Received(1, Grant()))
        (fetch,) = peer.asked(FetchPiece)
        peer.on(PieceArrived(1, fetch.piece))
        fetched.add(fetch.piece)
    peer.on(Received(1, Grant()))
    (fetch,) = peer.asked(FetchPiece)
    fetched.add(fetch.piece)
    peer.on(PieceArrived(1, fetch.piece))
    assert fetched == {1, 4, 7}  # the second of three
    peer.on(Received(1, Grant()))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.NOTHING))]
    peer.on(Received(50, NewPieces([0, 3])))
    assert sorted(peer.asked(FetchPiece), key=lambda each: each.piece) == [
        FetchPiece(50, 0, same_host=True),
        FetchPiece(50, 3, same_host=True),
    ]


def test_a_peer_that_says_it_is_of_this_host_is_not_sent_everything_at_once() -> None:
    peer = Peer(publishes=True, config=SwarmConfig(most_lent=2))
    peer.neighbour(50, same_host=True)
    for piece in (0, 1, 2):
        peer.on(Asked(50, piece))
    assert [each.piece for each in peer.asked(Serve)] == [0, 1]
    peer.on(Served(50, 0))
    peer.on(Asked(50, 2))
    peer.on(Asked(50, 3))
    assert [each.piece for each in peer.asked(Serve)] == [2]


def test_a_peer_of_this_host_that_brings_nothing_has_its_share_taken_over() -> None:
    peer = Peer(config=SwarmConfig(sibling_patience_seconds=5.0))
    peer.neighbour(1, *range(8))
    peer.neighbour(50, same_host=True)
    for _ in range(4):
        peer.on(Received(1, Grant()))
        peer.on(PieceArrived(1, peer.asked(FetchPiece)[-1].piece))
    assert peer.machine.have == map_of([1, 3, 5, 7])
    peer.wait(3.0)
    assert peer.asked(FetchPiece) == []
    peer.wait(2.5)
    (fetch,) = peer.asked(FetchPiece)
    assert fetch.piece in (0, 2, 4, 6)
    assert fetch.member == 1


def test_a_peer_of_this_host_that_brings_something_now_and_then_keeps_its_share() -> None:
    peer = Peer(config=SwarmConfig(sibling_patience_seconds=5.0))
    peer.neighbour(1, *range(8))
    peer.neighbour(50, same_host=True)
    for piece in (1, 3, 5, 7):
        peer.on(Received(1, Grant(piece)))
        peer.on(PieceArrived(1, piece))
    for piece in (0, 2, 4):
        peer.wait(4.0)
        peer.on(Received(50, NewPieces([piece])))
        peer.on(PieceArrived(50, piece))
    assert all(fetch.member == 50 or fetch.piece % 2 for fetch in peer.asked(FetchPiece))
    peer.wait(6.0)
    assert peer.asked(FetchPiece) == [FetchPiece(1, 6)]


def test_peers_of_one_host_have_its_slots_together() -> None:
    peer = Peer(list(range(8)))
    assert peer.machine.slots.slots == 2
    peer.neighbour(50, same_host=True)
    assert peer.machine.slots.slots == 1
    peer.on(Unlinked(50))
    assert peer.machine.slots.slots == 2


def test_a_peer_of_this_host_whose_piece_is_bad_loses_its_share() -> None:
    peer = Peer()
    peer.neighbour(1, *range(8))
    peer.neighbour(50, 0, same_host=True)
    assert peer.asked(FetchPiece) == [FetchPiece(50, 0, same_host=True)]
    peer.on(PieceFailed(50, 0, PieceFailure.BAD))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 0)]
    peer.on(Received(50, PieceMapMessage(b"\xff")))
    peer.wait(0.6)
    assert all(fetch.member == 1 for fetch in peer.asked(FetchPiece))
    peer.wait(30.0)  # then it is tried again
    assert any(fetch.member == 50 for fetch in peer.asked(FetchPiece))


def test_a_peer_of_this_host_needs_no_slot() -> None:
    peer = Peer(list(range(8)))
    for member in (50, 51, 52):
        peer.neighbour(member, same_host=True)
        peer.on(Asked(member, 0))
    assert len(peer.asked(Serve)) == 3


# --- connections -----------------------------------------------------------------------------


def test_connections_are_made_and_the_least_useful_ended_for_a_late_joiner() -> None:
    peer = Peer([0])
    peer.on(Participants(frozenset([*range(1, 25), OWN])))
    assert len(peer.asked(Connect)) == 24
    for member in range(1, 25):
        peer.on(Linked(member))
    assert peer.asked(Disconnect) == []
    peer.neighbour(99)
    (ended,) = peer.asked(Disconnect)
    assert ended.member != 99
    assert not ended.banned
    assert 99 in peer.machine.state.neighbours
    assert len(peer.machine.state.neighbours) == 24


def test_a_peer_that_has_everything_does_not_look_for_others() -> None:
    peer = Peer(list(range(8)))
    peer.on(Participants(frozenset(range(1, 1000))))
    peer.wait(60.0)
    assert peer.asked(Connect) == []


def test_it_sleeps_when_nothing_is_to_be_done() -> None:
    peer = Peer(list(range(8)))
    peer.neighbour(1, *range(8))
    peer.wait(60.0)
    assert peer.ticks <= 60 / 5 + 1  # connections are looked at
    assert peer.now < peer.machine.wake_at < math.inf
    assert pieces_in(peer.machine.have) == list(range(8))


def test_a_neighbour_that_is_linked_twice_is_one() -> None:
    peer = Peer()
    peer.neighbour(1, 3)
    peer.on(Linked(1))
    peer.on(Received(1, Grant()))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 3)]


def test_for_a_neighbour_that_went_another_is_looked_for_at_once() -> None:
    peer = Peer()
    peer.on(Participants(frozenset(range(1, 60))))
    peer.wait(1.1)
    dialled = [connect.member for connect in peer.asked(Connect)]
    assert len(dialled) == 16
    for member in dialled:
        peer.on(Linked(member))
    peer.on(Unlinked(dialled[0]))
    (another,) = peer.asked(Connect)
    assert another.member not in dialled


def test_old_neighbours_are_replaced_now_and_then_those_with_transfers_last() -> None:
    peer = Peer()
    peer.on(Participants(frozenset(range(1, 60))))
    for member in range(1, 21):
        peer.neighbour(member, member % 8)
    peer.on(Received(1, Grant()))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 1)]
    peer.on(Received(2, Grant()))
    peer.on(PieceArrived(2, 2))
    peer.wait(5.0)
    ended = [each.member for each in peer.asked(Disconnect)]
    assert len(ended) == 2
    assert 1 not in ended
    assert len(peer.machine.state.neighbours) == 18


def test_what_a_late_joiner_takes_the_place_of_is_of_no_use() -> None:
    peer = Peer(list(range(8)))
    for member in range(1, 25):
        peer.neighbour(member, *(range(8) if member == 17 else [0]))
    peer.asked(Tell)
    peer.on(Linked(99))
    assert peer.asked(Disconnect) == [Disconnect(17)]
    peer.on(Linked(17))  # it may come again
    assert 17 in peer.machine.state.neighbours


# --- some pieces only ------------------------------------------------------------------------


def needs(member: int, *pieces: int) -> Received:
    return Received(member, Needs(pack_map(map_of(pieces), PIECES)))


def test_who_needs_some_pieces_says_so_and_is_complete_when_it_has_them() -> None:
    peer = Peer([0], needed=[1, 2])
    peer.on(Linked(1))
    told = [effect.message for effect in peer.asked(Tell)]
    assert told == [Needs(b"\x06"), PieceMapMessage(b"\x01")]
    peer.on(Received(1, PieceMapMessage(b"\xff")))
    peer.on(Received(1, Grant(5)))
    (fetch,) = peer.asked(FetchPiece)
    assert fetch.piece in (1, 2)
    peer.on(Received(1, Grant(3 - fetch.piece)))
    assert peer.asked(FetchPiece) == [FetchPiece(1, 3 - fetch.piece)]
    peer.on(Received(1, Grant(5)))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.FULL))]
    peer.on(PieceArrived(1, 1))
    assert not peer.machine.complete
    peer.on(PieceArrived(1, 2))
    assert peer.asked(Complete) == [Complete()]
    peer.on(Received(1, Grant(5)))
    assert peer.told(Refuse) == [((1,), Refuse(Refusal.NOTHING))]


def test_no_neighbour_is_offered_unneeded_pieces() -> None:
    peer = Peer([0, 1])
    peer.on(Linked(1))
    peer.on(needs(1, 1, 2))
    peer.on(Received(1, PieceMapMessage(b"\x02")))
    assert peer.granted() == []
    peer.neighbour(2, *range(8))
    peer.on(Received(2, Grant(3)))
    peer.on(PieceArrived(2, 3))
    assert peer.granted() == []
    peer.on(Received(2, Grant(2)))
    peer.on(PieceArrived(2, 2))
    granted = peer.granted()
    assert set(granted) == {1}
    for _ in granted:
        peer.on(Received(1, Refuse(Refusal.NOTHING)))
    assert peer.granted() == []
    peer.on(needs(1, 0, 1, 2, 3))
    assert set(peer.granted()) == {1}, "it needs more now"


def test_a_publisher_names_only_pieces_that_are_needed() -> None:
    peer = Peer(publishes=True)
    peer.on(Linked(1))
    peer.on(needs(1, 2, 5))
    peer.on(Received(1, PieceMapMessage(b"\x00")))
    assert sorted(message.piece for _, message in peer.told(Grant)) == [2, 5]
    assert not peer.machine.dispensable


def test_more_may_be_needed_later() -> None:
    peer = Peer([1], needed=[1])
    assert peer.machine.complete
    peer.neighbour(1, *range(8))
    peer.asked(Tell)
    peer.on(Needed(map_of([1, 4])))
    assert peer.told(Needs) == [((1,), Needs(b"\x12"))]
    assert not peer.machine.complete
    peer.wait(1.0)
    assert peer.asked(FetchPiece) == [FetchPiece(1, 4)], "it asks without a grant"
    peer.on(PieceArrived(1, 4))
    assert peer.asked(Complete) == [Complete()]
    peer.on(Needed(map_of([4])))
    assert peer.asked(Tell) == []
    assert peer.machine.complete


def test_a_peer_of_this_host_shares_the_work_only_for_what_it_needs_itself() -> None:
    def fetched(*sibling_needs: int) -> int:
        peer = Peer(config=SwarmConfig(upload_slots=8))
        peer.on(Linked(1, same_host=True))
        peer.on(needs(1, *sibling_needs))
        peer.on(Received(1, PieceMapMessage(b"\x00")))
        peer.neighbour(2, *range(8))
        for _ in range(8):
            peer.on(Received(2, Grant()))
        return len(peer.asked(FetchPiece))

    assert fetched(*range(8)) == 4
    assert fetched(1, 2, 3) == 8


def test_a_neighbour_that_has_and_needs_nothing_of_use_makes_room() -> None:
    peer = Peer(needed=[1])
    members = range(1, 40)
    peer.on(Participants(frozenset(members)))
    for member in members[:20]:
        peer.on(Linked(member))
        peer.on(needs(member, *([1] if member in (3, 4) else [6])))
        peer.on(Received(member, PieceMapMessage(b"\x00")))
    peer.asked(Disconnect)
    peer.wait(6.0)
    gone = {effect.member for effect in peer.asked(Disconnect)}
    assert gone == set(members[:20]) - {3, 4}


def test_who_says_that_it_needs_pieces_that_do_not_exist_is_banned() -> None:
    peer = Peer()
    peer.neighbour(1)
    peer.on(Received(1, Needs(b"\xff\xff")))
    assert peer.asked(Disconnect) == [Disconnect(1, banned=True)]


# --- copies ------------------------------------------------------------------------------------


def test_what_is_found_here_is_told_to_all_and_is_not_asked_for() -> None:
    peer = Peer(needed=[0, 1], pieces=3)
    peer.neighbour(1, 0, 1, 2)
    peer.neighbour(2)
    peer.on(Received(1, Grant(0)))
    peer.on(PieceArrived(1, 0))
    assert not peer.machine.complete
    peer.asked(Tell)
    peer.on(Found(map_of([1, 2])))
    assert peer.told(PieceMapMessage) == [((1, 2), PieceMapMessage(b"\x07"))]
    assert peer.machine.complete
    assert peer.machine.have == peer.machine.needed == 0b111
    peer.on(Found(map_of([1])))
    assert peer.told(PieceMapMessage) == [], "nothing is new"


def test_a_publisher_need_not_send_copies() -> None:
    seeding = SuperSeeding(3, Random(1), copies=0b100)
    seeding.sending(0)
    assert not seeding.over
    assert seeding.choose(0b111, Availability(3)) == 1
    seeding.sending(1)
    assert seeding.over
