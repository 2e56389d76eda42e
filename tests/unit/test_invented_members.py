"""A member that tells of invented peers, or calls live ones dead: it causes pings and probes, and no more."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Ping, Status
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.members.contacts import (
    MAX_IN_FLIGHT_A_MEMBER,
    MAX_PINGED,
    MAX_REMEMBERED,
    PINGS_A_SECOND,
    PINGS_AT_ONCE,
    Newcomers,
)
from p2pstore.gossip.members.member_table import UNMET_FOR_EACH_MET, MembershipConfig
from p2pstore.gossip.members.membership import REFUTATIONS_AT_ONCE, Membership
from p2pstore.gossip.records import PeerId, SignedRecord, sign_peer_record
from p2pstore.wire import Message
from simulation.gossip_peer import GossipPeer
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.gossip_network import Network, Node, digest_of, location, peer_record

LIAR = 5
NEWCOMER = 6
PLACES = 300
DELTAS_A_SECOND = 17


def signed(number: int) -> SignedRecord:
    record = peer_record(number, incarnation=5000 + number)
    return sign_peer_record(record, SimulatedSigner(record.peer_id))


def invent(net: Network, *, same_for_all: bool, dead_before: bool = False) -> None:
    """From now on the liar tells every other peer of 40 invented peers in each message."""
    numbers = itertools.count(100_000)

    def turn() -> None:
        liar = net.nodes[LIAR]
        told = list(itertools.islice(numbers, 40))
        for node in list(net.nodes.values()):
            if node is liar:
                continue
            claims = [Claim(peer_id_of(each), 1, int(Status.DEAD), 7) for each in told if dead_before]
            records = [signed(each) for each in told]
            net.serve(liar, node, ControlKind.DELTA, Delta([], [], [], claims))
            net.serve(liar, node, ControlKind.DELTA, Delta(records, [], [], []))
            if not same_for_all:
                told = list(itertools.islice(numbers, 40))
        net.kernel.after(1 / DELTAS_A_SECOND, turn)

    turn()


def formed() -> Network:
    net = Network(1, GossipConfig(membership=MembershipConfig(max_members=PLACES)))
    for node in net.start_all(LIAR + 1):
        node.hold(location(node.number))
    assert net.run(20, net.converged)
    return net


def honest(net: Network) -> Iterator[Node]:
    return (node for node in net.nodes.values() if node.number != LIAR)


def find(node: Node, number: int, now: float) -> bool:
    """Whether it knows a living holder of that peer's key, or is that peer."""
    return node.number == number or any(
        not held.hidden for held in node.gossip.directory.holders(digest_of(number))
    )


def is_found_by_all(net: Network) -> bool:
    return all(find(node, NEWCOMER, net.now) for node in honest(net))


def finds_all(newcomer: Node, net: Network) -> bool:
    return all(find(newcomer, number, net.now) for number in range(LIAR))


def test_a_newcomers_objects_are_found_while_a_member_invents_others() -> None:
    for same_for_all, dead_before in ((True, False), (False, False), (False, True)):
        net = formed()
        invent(net, same_for_all=same_for_all, dead_before=dead_before)
        net.run(5.0)
        newcomer = net.start(NEWCOMER)
        newcomer.hold(location(NEWCOMER))
        assert net.run(5.0, partial(is_found_by_all, net))
        assert net.run(5.0, partial(finds_all, newcomer, net))
        net.run(5.0)
        real = {peer_id_of(number) for number in range(NEWCOMER + 1)}
        for node in honest(net):
            assert {state.peer_id for state in node.gossip.membership.live()} == real
            assert find(node, NEWCOMER, net.now)


def test_who_is_told_of_by_a_member_that_invents_others_counts_once_it_answers() -> None:
    """A newcomer that knows the liar only, and that the liar does not hide."""
    net = formed()
    invent(net, same_for_all=False)
    net.run(2.0)
    newcomer = net.start(NEWCOMER, bootstrap=LIAR)
    newcomer.hold(location(NEWCOMER))
    assert net.run(10.0, partial(is_found_by_all, net))


# --- in a large cluster --------------------------------------------------------------------------


def large(met: int, **config: Any) -> Membership:
    """Peer 0, which has met this number of others."""
    settings = replace(MembershipConfig(met_before_trust=3), **config)
    made = Membership(peer_id_of(0), 1, settings)
    for number in range(met + 1):
        tell(made, number, peer_id_of(number))
        made.heard(peer_id_of(number), 0.0)
    return made


def tell(made: Membership, number: int, by: PeerId | None, now: float = 0.0) -> bool:
    return made.observe_record(peer_record(number), signed(number), now, by)


def test_a_peer_that_has_met_many_believes_each_member_a_share_of_others() -> None:
    made = large(met=4)
    share = UNMET_FOR_EACH_MET * 5  # it has met itself, too
    told = [tell(made, number, peer_id_of(1)) for number in range(100, 300)]
    assert sum(told) == share
    assert made.newcomers.take() != []
    assert tell(made, 400, peer_id_of(2))  # another member has a share of its own
    made.heard(peer_id_of(100), 0.0)  # and who is met does not count as told of
    assert tell(made, 401, peer_id_of(1))
    gone = made.get(peer_id_of(101))
    assert gone is not None
    made.forget(gone)
    assert sum(made._introduced.values()) == share  # one more, and one less


def test_when_there_is_no_room_invented_ones_go_first_and_who_comes_itself_has_a_place() -> None:
    made = large(met=4, max_members=5 + 30)
    for number in range(100, 120):
        assert tell(made, number, peer_id_of(1))
    for number in range(200, 210):
        assert tell(made, number, peer_id_of(2))
    assert not tell(made, 300, peer_id_of(1))  # who told of most is told that there is no room
    assert made.refused_count == 1
    assert tell(made, 301, peer_id_of(2))
    assert made.get(peer_id_of(100)) is None  # the oldest of those
    assert tell(made, 302, peer_id_of(302))
    assert made.get(peer_id_of(101)) is None
    made.heard(peer_id_of(302), 0.0)
    assert all(made.get(peer_id_of(number)) for number in (*range(5), *range(200, 210), 302))
    assert len(made) == 35


def test_one_of_whom_there_are_only_claims_is_met_before_it_counts() -> None:
    made = large(met=1)
    made.observe_claims([Claim(peer_id_of(9), 1, int(Status.DEAD), 7)], 0.0, peer_id_of(1))
    assert not tell(made, 9, peer_id_of(1))
    assert made.newcomers.take() == [peer_id_of(9)]


# --- whom to ping --------------------------------------------------------------------------------


def test_pings_for_one_members_word_are_bounded() -> None:
    newcomers = Newcomers()
    inventor, other = peer_id_of(1), peer_id_of(2)
    for number in range(100, 300):
        newcomers.told_of(peer_id_of(number), ["h:1"], inventor, 0.0)
    assert len(newcomers.take()) == MAX_IN_FLIGHT_A_MEMBER
    newcomers.told_of(peer_id_of(3), ["h:1"], other, 0.0)
    newcomers.told_of(peer_id_of(3), ["h:1"], other, 0.0)
    assert newcomers.is_due
    assert newcomers.take() == [peer_id_of(3)]
    assert newcomers.addresses_of(peer_id_of(3)) == ["h:1"]
    newcomers.answered(peer_id_of(3))
    newcomers.told_of(peer_id_of(3), ["h:1"], other, 0.5)
    newcomers.told_of(peer_id_of(4), [], other, 0.5)
    assert not newcomers.is_due
    newcomers.told_of(peer_id_of(3), ["h:1"], other, 1.0)
    assert newcomers.take() == [peer_id_of(3)]


def test_pings_a_second_and_all_tables_are_bounded() -> None:
    newcomers = Newcomers()
    pinged = 0
    for number in range(1000):
        newcomers.told_of(peer_id_of(number), ["h:1"], peer_id_of(1), number / 100)
        for peer_id in newcomers.take():
            newcomers.answered(peer_id)
            pinged += 1
    assert pinged <= PINGS_AT_ONCE + 10 * PINGS_A_SECOND
    for number in range(3 * MAX_REMEMBERED):
        newcomers.told_of(peer_id_of(number), ["h:1"], peer_id_of(number), 100.0)
        newcomers.answered(peer_id_of(number))
    assert len(newcomers._pings) == len(newcomers._pinged_at) == MAX_REMEMBERED
    for number in range(MAX_PINGED + 10):
        newcomers.told_of(peer_id_of(10_000 + number), ["h:1"], peer_id_of(number), 200.0)
    assert len(newcomers._in_flight) == MAX_PINGED


SLANDERER = 4
SLANDERS_PER_SECOND = 25
ACCUSATIONS = (Status.SUSPECT, Status.DEAD, Status.LEFT)


def acquainted(count: int = 5) -> Network:
    """Peers that know each other; each holds one key, that of its number."""
    net = Network(1)
    for node in net.start_all(count):
        node.hold(location(node.number))
    assert net.run(20, net.converged)
    return net


def truthful(net: Network) -> list[Node]:
    return [node for number, node in net.nodes.items() if number != SLANDERER]


def incarnation_of(net: Network, number: int) -> int:
    """The highest that any member knows: an accusation in a lower one is stale."""
    states = (node.gossip.membership.get(peer_id_of(number)) for node in net.nodes.values())
    return max(state.incarnation for state in states if state is not None)


def slander(
    net: Network,
    victims: Iterable[int],
    status: Status,
    told: Iterable[int] | None = None,
    by: Callable[[int], int] = lambda turn: 7,
) -> None:
    """The liar says so from now on, 25 times a second, to all members (or those `told`), over its own channels."""
    victims, turns = list(victims), [0]

    def turn() -> None:
        turns[0] += 1
        liar = net.nodes[SLANDERER]
        for node in truthful(net):
            if told is not None and node.number not in told:
                continue
            claims = [
                Claim(peer_id_of(v), incarnation_of(net, v), int(status), by(turns[0])) for v in victims
            ]
            net.serve(liar, node, ControlKind.PING, Ping(0, claims))
        net.kernel.after(1 / SLANDERS_PER_SECOND, turn)

    turn()


def hidden_share(net: Network, seconds: float) -> float:
    """How often a look-up of another honest peer's key finds no holder that is held alive."""
    looked, hidden = 0, 0
    for _ in range(round(seconds * 20)):
        net.run(0.05)
        for reader in truthful(net):
            for holder in truthful(net):
                if holder is not reader:
                    looked += 1
                    hidden += not any(
                        map(_shown, reader.gossip.directory.holders(digest_of(holder.number)))
                    )
    return hidden / looked


def _shown(held: Location) -> bool:
    return not held.hidden


def statuses(net: Network, number: int) -> set[Status]:
    found = set()
    for node in truthful(net):
        state = node.gossip.membership.get(peer_id_of(number))
        if node.number != number:
            found.add(Status.DEAD if state is None else state.status)
    return found


@pytest.mark.parametrize("status", ACCUSATIONS)
def test_slander_hides_nothing_that_the_living_hold(status: Status) -> None:
    net = acquainted()
    slander(net, range(SLANDERER), status)
    assert hidden_share(net, 20.0) < 0.01


@pytest.mark.parametrize("status", ACCUSATIONS)
def test_the_slandered_neither_begin_their_logs_anew_nor_refute_all_the_time(status: Status) -> None:
    net = acquainted()
    victim = net.nodes[1].gossip
    log, before = victim.incarnation, victim.membership.own.incarnation
    slander(net, [1], status)
    net.run(20.0)
    assert victim.incarnation == log
    assert victim.membership.own.incarnation - before < 12
    assert victim.membership.health.score <= REFUTATIONS_AT_ONCE


def test_slander_calls_for_few_probes() -> None:
    net = acquainted()
    pings = [0]

    def count(source: GossipPeer, target: GossipPeer, message: Message) -> Message:
        pings[0] += isinstance(message, Ping) and source.number != SLANDERER and target.number == 1
        return message

    net.tamper = count
    net.run(20.0)
    undisturbed, pings[0] = pings[0], 0
    slander(net, [1], Status.DEAD)
    net.run(20.0)
    assert pings[0] < undisturbed + 30


def test_nobody_else_loses_its_word_by_what_a_liar_says_in_its_name() -> None:
    """The liar names an honest member as the accuser; that one's own judgement counts as before."""
    net = acquainted()
    members = [node.gossip.member for node in truthful(net)]
    slander(net, [1], Status.DEAD, by=lambda turn: members[turn % SLANDERER])
    net.run(20.0)
    assert statuses(net, 1) <= {Status.ALIVE, Status.SUSPECT}
    net.stop(1)
    assert net.run(12.0, lambda: statuses(net, 1) == {Status.DEAD})


def test_the_death_of_one_that_was_slandered_is_known_in_time() -> None:
    net = acquainted(8)
    slander(net, [1], Status.DEAD)
    net.run(20.0)
    net.stop(1)
    assert net.run(12.0, lambda: statuses(net, 1) == {Status.DEAD})


def test_who_leaves_is_gone_everywhere_by_its_own_word() -> None:
    net = acquainted(8)
    leaver = net.nodes[1]
    leaver.carry_out(leaver.gossip.leave(net.now))
    net.run(0.05)
    net.stop(1)
    assert net.run(3.0, lambda: statuses(net, 1) == {Status.LEFT})


def test_who_missed_a_farewell_is_shown_it() -> None:
    net = acquainted(5)
    net.network.partition({0}, {1, 2, 3, 4})
    leaver = net.nodes[1]
    leaver.carry_out(leaver.gossip.leave(net.now))
    net.run(0.2)
    net.stop(1)
    net.heal()
    assert net.run(8.0, lambda: statuses(net, 1) == {Status.LEFT})


def test_a_farewell_by_hearsay_is_none() -> None:
    net = acquainted()
    node = net.nodes[0].gossip
    left = Claim(peer_id_of(1), incarnation_of(net, 1), int(Status.LEFT), 7)
    node.serve(peer_id_of(SLANDERER), ControlKind.DELTA, Delta([], [], [], [left]), net.now)
    state = node.membership.get(peer_id_of(1))
    assert state is not None
    assert state.alive
    net.stop(1)
    assert net.run(12.0, lambda: statuses(net, 1) == {Status.DEAD})
