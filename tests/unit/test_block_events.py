"""A consumer that counts stores and removals knows which blocks the pool has."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.integrations.block_events import BlockEvents

KEYS = [b"a", b"b", b"c", b"d", b"e"]
STEP = st.tuples(
    st.sampled_from(["store", "evict", "check", "slow check", "forget", "take"]),
    st.sets(st.sampled_from(KEYS)),
)


def take_into(counted: Counter[bytes], events: BlockEvents[bytes]) -> None:
    for event in events.take():
        assert event.keys
        counted.update(dict.fromkeys(event.keys, -1 if event.removed else 1))
        assert set(counted.values()) <= {0, 1}


@given(st.lists(STEP, max_size=40), st.integers(1, 5))
def test_a_consumer_knows_what_is_there_whatever_happened(
    steps: list[tuple[str, set[bytes]]], max_told: int
) -> None:
    events, pool, counted = BlockEvents[bytes](max_told), set[bytes](), Counter[bytes]()
    stored: set[bytes] = set()
    for what, keys in steps:
        match what:
            case "store":
                events.found(sorted(keys - pool), new=True)
                events.found(sorted(keys & pool), new=False)
                pool |= keys
                stored |= keys
            case "evict":
                pool -= keys
            case "check":
                asked = events.to_check()
                events.checked(asked, [key in pool for key in asked])
            case "slow check":
                asked = events.to_check()
                there = [key in pool for key in asked]
                events.found(sorted(keys - pool), new=True)
                stored |= keys - pool
                pool |= keys
                events.checked(asked, there)
            case "forget":
                events.forget()
                stored.clear()
            case _:
                take_into(counted, events)
    asked = events.to_check()
    events.checked(asked, [key in pool for key in asked])
    take_into(counted, events)
    known = {key for key, count in counted.items() if count}
    assert known <= pool
    assert len(known) <= max_told
    if max_told == len(KEYS):
        assert known == pool & stored


def test_checks_come_to_all_in_turn() -> None:
    events = BlockEvents[bytes]()
    keys = [number.to_bytes(4) for number in range(5000)]
    events.found(keys, new=True)
    assert len(events.take()) == 1
    first, second = events.to_check(), events.to_check()
    assert set(first + second) == set(keys)
    events.checked(first, [False] * len(first))
    events.checked(first, [False] * len(first))
    assert [(len(event.keys), event.removed) for event in events.take()] == [(len(first), True)]
