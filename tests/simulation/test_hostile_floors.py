"""A member whose horizon is made up: nothing of what others hold is erased by its word."""

import pytest

from simulation.cluster import SimulatedPeer
from tests.simulation.test_floors import KEEPING, World

INVENTED = 0xDEAD_BEEF


def lie(world: World, liar: int) -> None:
    """The liar's table, which it tells to all that ask and whose hash its signed record shows, says that the floors of
    every member, and of a writer that does not exist, were dropped up to now."""
    core = world.peer(liar).core
    assert core is not None
    clock = core.clock.latest
    members = [state.member for state in core.gossip.membership.live()]
    forged = dict.fromkeys([*members, INVENTED], clock)
    core.gossip.cluster_records.floors.raise_horizon(forged)


def honest(world: World, liar: int) -> list[SimulatedPeer]:
    return [peer for peer in world.cluster.running if peer.number != liar]


def fill(world: World, *numbers: int) -> None:
    for number in numbers:
        for index in range(5):
            world.put(number, f"kept {number} {index}", b"%d" % index)


def nothing_was_erased(world: World, liar: int, *numbers: int) -> None:
    assert sum(p.core.counters["horizons_missed"] for p in honest(world, liar) if p.core) == 0
    for number in numbers:
        for index in range(5):
            assert world.read(number, f"kept {number} {index}") == b"%d" % index


@pytest.mark.parametrize("peers", [2, 4])
@pytest.mark.parametrize("liar_is", ["here for long", "new", "back after two minutes"])
def test_a_member_erases_nothing(peers: int, liar_is: str) -> None:
    world = World(peers, booted=peers - 1 if liar_is == "new" else None)
    liar = peers - 1
    fill(world, *range(liar))
    world.run(100.0)
    if liar_is == "back after two minutes":
        world.peer(liar).crash()
        world.run(120.0)
    if liar_is != "here for long":
        world.back(liar, through=0)
        world.run(1.0)
    for _ in range(3):
        lie(world, liar)
        world.run(40.0)
    nothing_was_erased(world, liar, *range(liar))


@KEEPING
@pytest.mark.parametrize("peers", [2, 4])
def test_nor_is_anything_erased_by_a_restart_of_the_honest_peer(peers: int, keeps_memory: bool) -> None:
    world = World(peers, keeps_memory=keeps_memory)
    liar = peers - 1
    fill(world, *range(liar))
    world.run(100.0)
    lie(world, liar)
    world.peer(0).crash()
    world.run(20.0)
    world.back(0, through=liar)
    world.run(60.0)
    lie(world, liar)
    world.run(60.0)
    nothing_was_erased(world, liar, *range(liar))


@pytest.mark.parametrize("peers", [3, 5])
def test_a_cluster_that_has_just_started_follows_nobody_alone(peers: int) -> None:
    """A horizon that moves all the time would leave each peer with another one."""
    world = World(peers)
    liar = peers - 1
    fill(world, *range(liar))
    for _ in range(20):
        lie(world, liar)
        world.run(0.5)
    assert not any(world.horizon(peer.number) for peer in honest(world, liar))


def test_who_has_seen_all_is_believed_though_no_two_horizons_are_the_same() -> None:
    """Else nothing could ever be read again of a member that was killed and is back."""
    world = World(3, keeps_memory=True, limit=1_000)
    fill(world, 0, 1, 2)
    old = max(peer.core.clock.latest for peer in world.cluster.running if peer.core)
    world.run(120.0)
    for peer in world.cluster.running:
        assert peer.core is not None
        gossip = peer.core.gossip
        members = [state.member for state in gossip.membership.live()]
        gossip.cluster_records.floors.raise_horizon(dict.fromkeys(members, old + peer.number))
    world.run(10.0)
    world.peer(2).crash()
    world.run(5.0)
    world.back(2, through=0)
    world.run(50.0)
    assert len({world.horizon(number) for number in range(3)}) == 3
    for reader, holder in ((0, 2), (1, 2), (2, 0), (2, 1)):
        assert world.read(reader, f"kept {holder} 0") == b"0", (reader, holder)


@KEEPING
def test_nor_after_a_long_absence_of_it(keeps_memory: bool) -> None:
    """More than half of the members do not show the liar's horizon."""
    world = World(4, keeps_memory=keeps_memory)
    fill(world, 0, 1, 2)
    world.run(100.0)
    world.peer(0).crash()
    world.run(200.0)
    lie(world, 3)
    world.back(0, through=3)
    world.run(150.0)
    lie(world, 3)
    world.run(100.0)
    nothing_was_erased(world, 3, 0, 1, 2)
