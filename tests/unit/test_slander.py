"""A member that calls live members dead, or gone: it causes probes, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Ping, Status
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.members.membership import REFUTATIONS_AT_ONCE
from tests.unit.gossip_network import Network, Node, digest_of, location, peer_id_of

LIAR = 4
SLANDERS_PER_SECOND = 25
ACCUSATIONS = (Status.SUSPECT, Status.DEAD, Status.LEFT)


def formed(count: int = 5) -> Network:
    """Peers that know each other; each holds one key, that of its number."""
    net = Network(1)
    for node in net.start_all(count):
        node.hold(location(node.number), net.now)
    assert net.run(20, net.converged)
    return net


def honest(net: Network) -> list[Node]:
    return [node for number, node in net.nodes.items() if number != LIAR]


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
        liar = net.nodes[LIAR]
        for node in honest(net):
            if told is not None and node.number not in told:
                continue
            claims = [
                Claim(peer_id_of(v), incarnation_of(net, v), int(status), by(turns[0])) for v in victims
            ]
            net.serve(liar, node, ControlKind.PING, Ping(0, claims))
        net.later(1 / SLANDERS_PER_SECOND, turn)

    turn()


def hidden_share(net: Network, seconds: float) -> float:
    """How often a look-up of another honest peer's key finds no holder that is held alive."""
    looked, hidden = 0, 0
    for _ in range(round(seconds * 20)):
        net.run(0.05)
        for reader in honest(net):
            for holder in honest(net):
                if holder is not reader:
                    looked += 1
                    hidden += not any(
                        map(_shown, reader.gossip.holders(digest_of(holder.number), net.now))
                    )
    return hidden / looked


def _shown(held: Location) -> bool:
    return not held.hidden


def statuses(net: Network, number: int) -> set[Status]:
    found = set()
    for node in honest(net):
        state = node.gossip.membership.get(peer_id_of(number))
        if node.number != number:
            found.add(Status.DEAD if state is None else state.status)
    return found


@pytest.mark.parametrize("status", ACCUSATIONS)
def test_slander_hides_nothing_that_the_living_hold(status: Status) -> None:
    net = formed()
    slander(net, range(LIAR), status)
    assert hidden_share(net, 20.0) < 0.01


@pytest.mark.parametrize("status", ACCUSATIONS)
def test_the_slandered_neither_begin_their_logs_anew_nor_refute_all_the_time(status: Status) -> None:
    net = formed()
    victim = net.nodes[1].gossip
    log, before = victim.incarnation, victim.membership.own.incarnation
    slander(net, [1], status)
    net.run(20.0)
    assert victim.incarnation == log
    assert victim.membership.own.incarnation - before < 12
    assert victim.membership.health.score <= REFUTATIONS_AT_ONCE


def test_slander_calls_for_few_probes() -> None:
    net = formed()
    pings = [0]

    def count(source: Node, target: Node, message: object) -> object:
        pings[0] += isinstance(message, Ping) and source.number != LIAR and target.number == 1
        return message

    net.tamper = count  # type: ignore[assignment]  # it changes nothing
    net.run(20.0)
    undisturbed, pings[0] = pings[0], 0
    slander(net, [1], Status.DEAD)
    net.run(20.0)
    assert pings[0] < undisturbed + 30


def test_nobody_else_loses_its_word_by_what_a_liar_says_in_its_name() -> None:
    """The liar names an honest member as the accuser; that one's own judgement counts as before."""
    net = formed()
    members = [node.gossip.member for node in honest(net)]
    slander(net, [1], Status.DEAD, by=lambda turn: members[turn % LIAR])
    net.run(20.0)
    assert statuses(net, 1) <= {Status.ALIVE, Status.SUSPECT}
    net.stop(1)
    assert net.run(12.0, lambda: statuses(net, 1) == {Status.DEAD})


def test_the_death_of_one_that_was_slandered_is_known_in_time() -> None:
    net = formed(8)
    slander(net, [1], Status.DEAD)
    net.run(20.0)
    net.stop(1)
    assert net.run(12.0, lambda: statuses(net, 1) == {Status.DEAD})


def test_who_leaves_is_gone_everywhere_by_its_own_word() -> None:
    net = formed(8)
    leaver = net.nodes[1]
    net.do(leaver, leaver.gossip.leave(net.now))
    net.run(0.05)
    net.stop(1)
    assert net.run(3.0, lambda: statuses(net, 1) == {Status.LEFT})


def test_who_missed_a_farewell_is_shown_it() -> None:
    net = formed(5)
    net.partition({0}, {1, 2, 3, 4})
    leaver = net.nodes[1]
    net.do(leaver, leaver.gossip.leave(net.now))
    net.run(0.2)
    net.stop(1)
    net.heal()
    assert net.run(8.0, lambda: statuses(net, 1) == {Status.LEFT})


def test_a_farewell_by_hearsay_is_none() -> None:
    net = formed()
    node = net.nodes[0].gossip
    left = Claim(peer_id_of(1), incarnation_of(net, 1), int(Status.LEFT), 7)
    node.serve(peer_id_of(LIAR), ControlKind.DELTA, Delta([], [], [], [left]), net.now)
    state = node.membership.get(peer_id_of(1))
    assert state is not None
    assert state.alive
    net.stop(1)
    assert net.run(12.0, lambda: statuses(net, 1) == {Status.DEAD})
