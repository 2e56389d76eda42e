"""`known_keys` says of many keys at once what `known_copies` says of each."""

from random import Random

import pytest

from p2pstore.core.gets.key_pages import (
    PrefixMatch,
    PrefixRun,
    holdings_here,
    holdings_of,
    is_known,
    known_keys,
    match,
)
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.records import SCOPE_NAMESPACE
from p2pstore.objects import Version, namespace_digest, newest_accepted_clock
from tests.unit.core_harness import NAMESPACE, UNIX, Harness, clock_at, digest_of, remote_object


def known_one_by_one(world: Harness, digests: list[bytes]) -> set[bytes]:
    return {
        digest
        for digest in digests
        if any(copy.reachable for copy in world.core.copies.known(digest, world.now))
    }


def match_here(world: Harness, digests: list[bytes], name: bytes, pieces: int = 1) -> PrefixMatch:
    found = holdings_here(world.core, digests, world.now, name)
    assert found is not None
    return match(found, len(digests), pieces)


def check_matches(world: Harness, digests: list[bytes], name: bytes = namespace_digest("other")) -> None:
    """A chain that begins at any of these matches as the copies of each key say."""
    copies = [world.core.copies.known(digest, world.now, name) for digest in digests]
    for begin in range(0, len(digests), 5):
        for pieces in (1, 3):
            end = len(digests) - (len(digests) - begin) % pieces
            here = match_here(world, digests[begin:end], name, pieces)
            assert here == match(holdings_of(copies[begin:end]), end - begin, pieces)


def known(world: Harness, *keys: str) -> list[bool]:
    digests = [digest_of(key) for key in keys]
    found = known_keys(world.core, digests, world.now)
    check_matches(world, digests)
    assert found == known_one_by_one(world, digests)
    assert found == {digest for digest in digests if is_known(world.core, digest, world.now)}
    return [digest in found for digest in digests]


def test_here_elsewhere_and_nowhere() -> None:
    world = Harness(others=2)
    world.stored("mine", b"1")
    world.hold(world.others[1], "theirs", b"2")
    assert known(world, "mine", "theirs", "nobody's", "mine") == [True, True, False, True]
    assert known_keys(world.core, [], world.now) == set()


def test_runs_of_a_chain_by_holder() -> None:
    world = Harness(others=2)
    for key in ("a", "b", "d"):
        world.stored(key, b"1")
    for key in ("b", "c"):
        world.hold(world.others[0], key, b"2")
    digests = [digest_of(key) for key in "abcd"]
    assert match_here(world, digests, namespace_digest(NAMESPACE)) == PrefixMatch(
        4, [PrefixRun(world.core.member, 2, 2)]
    )
    halves = match_here(world, digests, namespace_digest(NAMESPACE), 2)
    assert halves == PrefixMatch(1, [PrefixRun(world.core.member, 1, 1)])
    assert match_here(world, [], b"") == PrefixMatch(0, [])


def test_a_dead_holder_does_not_count_until_it_is_back() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"1")
    world.die(world.others[0])
    assert known(world, "k") == [False]


def test_what_a_holder_denied_does_not_count() -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"1")
    member = world.others[0].member
    incarnation, sequence = world.core.gossip.directory.position(member)
    world.core.gossip.directory.mark_stale(member, digest_of("k"), max(incarnation, 7), sequence + 9)
    assert known(world, "k") == [False]


def test_a_version_from_the_future_does_not_count() -> None:
    world = Harness(others=1)
    late = newest_accepted_clock(UNIX) + (1 << 30)
    world.hold(world.others[0], "k", b"1", clock=late)
    assert known(world, "k") == [False]


def test_a_floor_decides_by_version() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "old", b"1", clock=clock_at(1))
    world.hold(world.others[0], "new", b"1", clock=clock_at(3))
    for key in ("old", "new"):
        world.core.floors.write(digest_of(key), Version(clock_at(2), 1, 0), world.now)
    assert known(world, "old", "new") == [False, True]


def test_a_holder_that_may_have_missed_a_floor_does_not_count() -> None:
    world = Harness(others=1)
    thing = remote_object("old", b"1")
    world.miss_a_horizon(thing.version.clock)
    late = world.join(7)
    world.push(late, thing)
    world.hold(late, "new", b"1", clock=thing.version.clock + 1)
    assert known(world, "old", "new") == [False, True]


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_the_slow_way_whatever_happened(seed: int) -> None:
    rng = Random(seed)
    world = Harness(others=4)
    keys = [f"k{number}" for number in range(12)]
    for _ in range(80):
        key, other = rng.choice(keys), rng.choice(world.others)
        match rng.randrange(6):
            case 0 if world.find(key) is None:
                world.put(key, b"here")
            case 1:
                thing = world.hold(other, key, b"there", clock=clock_at(rng.uniform(0, 30)))
                if rng.random() < 0.3:
                    world.push(other, thing, removed=True)
            case 2:
                version = Version(clock_at(rng.uniform(0, 5)), 1, 0)
                world.core.floors.write(digest_of(key), version, world.now)
            case 3:
                world.core.gossip.directory.mark_stale(
                    other.member, digest_of(key), 7, rng.randrange(20)
                )
            case 4:
                directory = world.core.gossip.directory
                rng.choice((directory.hide, directory.show))(other.member)
            case _:
                world.pass_time(rng.uniform(0, 0.2))
        known(world, *keys)
    assert Status.ALIVE in {state.status for state in world.core.gossip.membership.states()}


def test_a_flushed_namespace_counts_for_nothing() -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "old", b"1", clock=clock_at(1))
    world.hold(world.others[0], "new", b"1", clock=clock_at(3))
    name = namespace_digest(NAMESPACE)
    world.core.floors.write(name, Version(clock_at(2), 1, 0), world.now, scope=SCOPE_NAMESPACE)
    digests = [digest_of("old"), digest_of("new")]
    assert known_keys(world.core, digests, world.now, name) == {digest_of("new")}
    check_matches(world, digests, name)
    for digest in digests:
        copies = world.core.copies.known(digest, world.now, name)
        assert bool(copies) == (digest == digest_of("new"))
        assert is_known(world.core, digest, world.now, name) == bool(copies)
