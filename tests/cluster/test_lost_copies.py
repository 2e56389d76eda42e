"""Copies when peers die or leave, with real processes."""

import json
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from p2pstore.core.copies.hand_over import READY_PART
from p2pstore.objects import KIB, MIB
from tests.cluster.machines import Machine, Peer, done, new_machine
from tests.waiting import eventually


@pytest.fixture
def trio_of_peers() -> Iterator[list[Peer]]:
    """Three peers on one machine, which repair within seconds."""
    with new_machine() as machine:
        yield three(machine)


def three(machine: Machine) -> list[Peer]:
    peers = [machine.join("first", "--network", "local")]
    for name in ("second", "third"):
        contact = ("--bootstrap", peers[0].ready["control"])
        peers.append(machine.join(name, "--network", "local", *contact))
    eventually(lambda: all(peer.alive() == 3 for peer in peers))
    return peers


def holders(peer: Peer, key: str) -> set[str]:
    """The names of those that hold a copy and can be reached, as a peer knows."""
    return {found.peer for found in peer.client.locate(key) if found.reachable}


def value_of(number: int) -> bytes:
    return bytes([number]) * (MIB // 4 + number)


def test_after_kill_9_all_objects_have_their_copies_again(trio_of_peers: list[Peer]) -> None:
    first, second, third = trio_of_peers
    for number in range(12):
        result = trio_of_peers[number % 3].client.put(f"k{number}", value_of(number), replicas=2)
        assert result.copies == 2
    eventually(lambda: all(len(holders(first, f"k{number}")) == 2 for number in range(12)))
    lost = sum("third" in holders(first, f"k{number}") for number in range(12))
    assert lost >= 4
    third.stop(signal.SIGKILL)
    eventually(
        lambda: all(holders(first, f"k{number}") == {"first", "second"} for number in range(12)), 60.0
    )

    def repaired(what: str) -> int:
        """Of both, which count a copy when its new holder has answered: after the others have heard of it."""
        statistics = [peer.client.statistics()["peer"]["repair"] for peer in (first, second)]
        return sum(repair[what] for repair in statistics)

    eventually(lambda: repaired("copies") == lost)
    assert repaired("bytes") >= lost * MIB // 4
    assert any("made again" in done(peer.run("stats")).stdout.decode() for peer in (first, second))
    first.stop(signal.SIGKILL)
    for number in range(12):
        assert second.client.get(f"k{number}") == value_of(number)


def test_leave_hands_over_what_only_that_peer_holds(trio_of_peers: list[Peer]) -> None:
    first, second, third = trio_of_peers
    for number in range(20):
        assert third.client.put(f"k{number}", value_of(number)).location == "third"
    total = sum(len(value_of(number)) for number in range(20))
    left = done(third.run("leave", "--drain", "30s", "--json"))
    # At once, from who may not have heard of it yet:
    for number in range(20):
        assert (first, second)[number % 2].client.get(f"k{number}") == value_of(number)
    assert json.loads(left.stdout) == {
        "left": True,
        "handed_over": {"objects": 20, "bytes": total},
        "left_behind": {"objects": 0, "bytes": 0},
    }
    assert third.process.wait(60) == 0
    first.client.put("of the first", b"value")
    said = done(first.run("leave")).stderr.decode()
    assert "the peer left the cluster: " in said
    assert "handed over" in said
    assert second.client.get("of the first") == b"value"
    said = done(second.run("leave", "--drain", "5s")).stderr.decode()
    assert "left behind" in said
    assert "handed over" not in said


def test_a_peer_that_is_asked_to_stop_hands_over_as_well(trio_of_peers: list[Peer]) -> None:
    first, _, third = trio_of_peers
    third.client.put("k", value_of(1))
    assert third.stop(signal.SIGTERM) == 0
    assert first.client.get("k") == value_of(1)
    assert "handed over 1 object (256.0 KiB) that only this peer held" in third.log.read_text()


def test_last_copies_move_to_a_neighbour_with_room_instead_of_being_dropped() -> None:
    size, extent, count = 128 * KIB, 132 * KIB, 300
    with new_machine() as machine:
        first = machine.join("first", "--network", "local", "--memory", "24MiB")
        contact = ("--bootstrap", first.ready["control"])
        second = machine.join("second", "--network", "local", "--memory", "24MiB", *contact)
        eventually(lambda: first.alive() == 2)

        def counted(what: str) -> int:
            return int(first.client.statistics()["peer"]["counters"].get(what, 0))

        ready = 24 * MIB * (READY_PART - 1) // READY_PART
        for number in range(count):
            first.client.put(f"k{number}", bytes([number % 256]) * size)
            if number % 4 == 3:  # a put does not wait for another peer: here the test does
                needed = number + 1 - ready // extent
                eventually(partial(lambda least: counted("offers_taken") >= least, needed))
        assert counted("last_copies_dropped") == 0
        assert counted("offers_refused") == 0
        for number in range(count):
            assert second.client.get(f"k{number}") == bytes([number % 256]) * size
        assert "offered" in done(first.run("stats", "--json")).stdout.decode()
