"""Windows of a batch in memory: published and evicted together, they leave what they leave one by one."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.memory.entries import Written
from p2pstore.memory.policies import PolicyName, make_policy
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import Pin, TrailerBody, plan_geometry
from p2pstore.objects import KIB, MIB, Version, chunk_sums, key_digest, root_checksum
from p2pstore.runtime.stepping import call_now
from simulation.segment_checks import check_segment

KEYS = [f"k{number}" for number in range(12)]
COLUMNS: list[list[Any]] = [
    [KEYS, [0, 1, 3_000, 4_090, 9_000], [0, 0, 0, int(Pin.SOFT), int(Pin.HARD)], ["", "", "q"]],
    [[0, 0, 200_000], ["", *KEYS], [0, 0, 0, 1, 2]],
]
ROWS = st.tuples(*[st.sampled_from(values) for some in COLUMNS for values in some])
"""Key, length, pin, namespace, end, the key before it, and what is wrong with the reservation."""
STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(ROWS, min_size=1, max_size=8)),
    st.tuples(st.just("evict"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["read", "lease", "end", "remove"]), st.sampled_from(KEYS)),
)
FACTS = ("key", "state", "extent_bytes", "rank", "group", "standing", "followers", "pin", "references")


class World:
    """A segment in which all that is put has room."""

    def __init__(self, policy: PolicyName, together: bool) -> None:
        self.together, self.now = together, 100.0
        geometry = plan_geometry(4 * MIB, 256)
        self.segment = Segment(
            memoryview(bytearray(geometry.total_bytes)),
            segment_id=bytes(16),
            incarnation=1,
            geometry=geometry,
            policy=make_policy(policy),
            quotas={"q": 256 * KIB},
            marks=memoryview(bytearray(geometry.slots)),
        )

    def step(self, what: str, of: Any) -> list[bytes]:
        self.now += 1.5
        objects = self.segment.objects
        entry = self.segment.find(key_digest(of), self.now) if isinstance(of, str) else None
        if what == "put":
            return self.put(of)
        if what == "evict":
            coldest = [each for each in objects.order.coldest() if each in objects.order][:of]
            for some in [coldest] if self.together else [[each] for each in coldest]:
                objects.evict(some)
        elif what == "read":
            objects.touch(key_digest(of), 1, self.now)
        elif what == "lease" and entry is not None:
            self.segment.leases.lease(entry, session=of, now=self.now)
        elif what == "end":
            self.segment.drop_session(of)
        elif what == "remove":
            self.segment.remove(key_digest(of))
        return []

    def put(self, rows: Sequence[Any]) -> list[bytes]:
        """The digests that were published of a window of keys that are not here."""
        written: list[Written] = []
        last, open_lengths, seen = 0, dict[int, int](), set[bytes]()
        for key, length, pin, namespace, expires, before, wrong in rows:
            digest, sums = key_digest(key), chunk_sums(bytes(length))
            self.segment.remove(digest)
            [room] = self.segment.reserve_free(length, 120, session="c", namespace=namespace)
            open_lengths[room.number] = length
            number = (room.number, room.number + 999, last)[wrong]  # or that of the row before
            last = room.number
            if digest in seen and not self.together:
                continue  # the same key counts once in a window
            trailer = TrailerBody(namespace, key, sums, expires, 1, pin)
            version = Version(round(self.now * 10), 1, root_checksum(length, sums))
            follows = key_digest(before) if key_digest(before or "-") in seen else b""
            written.append(Written(number, digest, version, trailer, length, follows))
            if digest not in seen and length <= open_lengths.get(number, -1):
                seen.add(digest)
                del open_lengths[number]
        windows = [written] if self.together else [[each] for each in written]
        late: list[Callable[[], None]] = []
        keep = late.append if self.together else call_now
        made = [self.segment.commit_new(each, session="c", now=self.now, keep=keep) for each in windows]
        self.segment.reserve_free(4_000, 120, session="c")
        for books in late:
            books()
        published = [entry.digest for window in made for entry in window if entry is not None]
        assert set(published) == seen
        self.segment.drop_session("c")
        return published

    def state(self) -> list[object]:
        segment, objects, order = self.segment, self.segment.objects, self.segment.objects.order
        everything = sorted(objects.held.values(), key=lambda each: getattr(each, "key", ""))
        return [
            [[getattr(each, name) for name in FACTS] for each in everything],
            [each.key for each in order.coldest()],
            [order.evictable_bytes(), order.cheap_bytes, segment.used_bytes, len(objects.timers)],
            dict(segment.quotas),
            [each.key for each in objects.take_withdrawn()],
            [each.key for name in ("", "q") for each in segment.listing.page(name, "", "", 99)[0]],
            list(getattr(getattr(segment.policy, "_ghosts", None), "_kept", {}).items()),
        ]


@pytest.mark.parametrize("policy", get_args(PolicyName))
@given(st.lists(STEPS, max_size=25))
def test_a_window_leaves_what_its_rows_leave_one_by_one(policy: PolicyName, steps: list[Any]) -> None:
    together, alone = World(policy, True), World(policy, False)
    for what, of in steps:
        assert together.step(what, of) == alone.step(what, of)
        assert together.state() == alone.state()
        check_segment(together.segment)
