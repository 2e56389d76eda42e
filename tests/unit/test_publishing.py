"""Publishing a batch as one: each value ends as it does alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pstore.core.copies.replicate import PutAmongMany
from p2pstore.core.operation import PutEnd
from p2pstore.core.puts.publishing import publish_new
from p2pstore.gossip.records import writer_of
from p2pstore.memory.segment_layout import Pin, decode_trailer
from p2pstore.put_facts import PutFacts, PutOptions, PutStatus
from simulation.segment_checks import check_segment
from tests.present import present
from tests.unit.core_harness import HOLDER, NAMESPACE, Harness, clock_at, digest_of


def publish(world: Harness, items: list[PutFacts]) -> list[PutEnd | PutAmongMany | None]:
    return publish_new(world.core, items, session=HOLDER, namespace=NAMESPACE, now=world.now)


def test_values_of_new_keys_are_published_under_one_stamp() -> None:
    world = Harness(others=2)
    items = [
        world.facts("a", b"1", pin=int(Pin.HARD)),
        world.facts("b", b"22", ttl_seconds=5.0, follows=digest_of("a")),
        world.facts("c", b""),
    ]
    ends = publish(world, items)
    assert all(isinstance(end, PutEnd) and end.status is PutStatus.CREATED for end in ends)
    entries = [world.segment.find(digest_of(key), world.core.unix(world.now)) for key in "abc"]
    assert all(entries)
    a, b, c = (entry for entry in entries if entry is not None)
    assert a.version[:2] == b.version[:2] == c.version[:2]
    assert a.version.writer == writer_of(world.core.peer_id)
    assert [bytes(world.segment.payload(each)) for each in (a, b, c)] == [b"1", b"22", b""]
    assert a.pin is Pin.HARD
    assert b.follows is a
    assert b.expires_unix_ms == round(world.core.unix(world.now) * 1000) + 5000
    for key, entry in zip("abc", (a, b, c), strict=True):
        location = present(world.announced(key))
        assert location.version == entry.version
        trailer = present(decode_trailer(world.segment.table.trailer_bytes(entry)))
        assert trailer.key == key
    assert world.core.counters["objects_published"] == 3
    assert all(world.core.proofs.of(each, world.now) for each in (a, b, c))
    assert world.core.counters["version_signatures"] == 1, "one is for all that were put together"
    check_segment(world.segment)


def test_who_waits_for_a_key_hears_of_it() -> None:
    world = Harness(others=1)
    heard: list[bytes] = []
    operation: Any = world.put("waited for", b"v", overwrite=True)  # any that has a number
    operation.heard_of = lambda digest, now: heard.append(digest)
    world.core.operations._running[operation.number] = operation
    world.core.operations.await_keys(operation, [digest_of("b")])
    publish(world, [world.facts(key, b"v") for key in "abc"])
    assert heard == [digest_of("b")]


def unusual(world: Harness, what: str) -> PutFacts:
    """A value about whose key, or with which, more has to be decided."""
    facts = world.facts("odd", b"value")
    if what == "here":
        world.stored("odd", b"other")
    elif what == "elsewhere":
        world.hold(world.others[0], "odd", b"other")
    elif what == "removed elsewhere":
        world.push(world.others[0], world.hold(world.others[0], "odd", b"other"), removed=True)
    changes: dict[str, dict[str, Any]] = {
        "overwrite": {"options": PutOptions(overwrite=True)},
        "too many replicas": {"options": PutOptions(65)},
        "durable": {"options": PutOptions(durable=True)},
        "bad pin": {"options": PutOptions(pin=9)},
        "bad end": {"options": PutOptions(ttl_ms=-1)},
        "negative": {"length": -1},
        "longer than its room": {"length": 1 << 33},
        "no reservation": {"reservation": 0},
        "a stranger's reservation": {"reservation": 999},
    }
    return replace(facts, **changes.get(what, {}))


@pytest.mark.parametrize(
    "what",
    [
        *("here", "elsewhere", "removed elsewhere", "overwrite", "too many replicas"),
        *("durable", "bad pin", "bad end", "negative"),
        *("longer than its room", "no reservation", "a stranger's reservation"),
    ],
)
def test_what_takes_more_is_left_and_the_rest_is_published(what: str) -> None:
    world = Harness(others=2)
    odd = unusual(world, what)
    before = world.segment.object_count
    ends = publish(world, [world.facts("a", b"1"), odd, world.facts("c", b"3")])
    assert [end is None for end in ends] == [False, True, False]
    assert world.segment.object_count == before + 2
    check_segment(world.segment)


def test_nothing_is_published_by_a_clock_that_others_refuse() -> None:
    world = Harness(others=2)
    world.core.clock.latest = clock_at(3600.0)
    assert publish(world, [world.facts("a", b"v")]) == [None]


KEYS = st.sampled_from("abcdefgh")


@given(
    st.lists(KEYS, max_size=4),
    st.lists(KEYS, max_size=4),
    st.lists(st.tuples(KEYS, st.binary(max_size=3), st.booleans()), max_size=12),
)
def test_a_batch_ends_as_its_values_do_one_by_one(
    here: list[str], elsewhere: list[str], batch: list[tuple[str, bytes, bool]]
) -> None:
    def prepared() -> tuple[Harness, list[PutFacts]]:
        world = Harness(others=1)
        for key in here:
            world.stored(key, b"x")
        for key in elsewhere:
            world.hold(world.others[0], key, b"y")
        return world, [world.facts(key, value, overwrite=overwrite) for key, value, overwrite in batch]

    def put_alone(world: Harness, facts: PutFacts) -> PutStatus | None:
        operation = world.operation(facts)
        world.start(operation)
        return operation.result.status if isinstance(operation.result, PutEnd) else None

    together, items = prepared()
    ends = publish(together, items)
    statuses = [
        end.status if isinstance(end, PutEnd) else put_alone(together, facts)
        for facts, end in zip(items, ends, strict=True)
    ]
    alone, items = prepared()
    expected = [put_alone(alone, facts) for facts in items]
    if len({key for key, _, _ in batch}) == len(batch):  # else the order of those decided alone counts
        assert statuses == expected
        assert together.segment.object_count == alone.segment.object_count
    check_segment(together.segment)
