"""Readers of a hot object: served, or sent on to others; and the reads that a holder does not see."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest

from p2pstore.core.gets import hot_objects
from p2pstore.core.gets import hot_objects as read_reports
from p2pstore.core.gets.fetch_operation import MAX_HOPS, FetchOperation
from p2pstore.core.gets.hot_objects import (
    ANSWER_SECONDS,
    FIRST_PAUSE_SECONDS,
    HALF_LIFE_SECONDS,
    KEPT_SHARE,
    LAST_PAUSE_SECONDS,
    LOST_SECONDS,
    MAX_KEEPERS,
    MAX_LOSERS,
    MAX_TRANSFERS,
    REPORT_SECONDS,
    HotObjects,
)
from p2pstore.core.operation import PullObject, PullOutcome
from p2pstore.errors import ProtocolError, Unavailable
from p2pstore.memory import segment_objects
from p2pstore.memory.segment_objects import COUNTED, MostRead
from p2pstore.objects import MIB
from p2pstore.transfer.data_messages import DataKind, Keeps
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.peer_messages import MAX_READ_COUNTS, Locations, ReadCount, Reads, ReadsTaken
from p2pstore.wire import Code
from tests.unit.core_harness import Harness, Other, RemoteObject, digest_of

KEY = digest_of("hot")
LENGTH = 4 * MIB
MEMORY = KEPT_SHARE * LENGTH


def read(
    hot: HotObjects, reader: int, keeps: Keeps = Keeps.BY_PEER, now: float = 0.0
) -> list[int] | None:
    return hot.read(KEY, LENGTH, reader, MEMORY, keeps, now)


def test_who_reads_alone_is_served() -> None:
    hot = HotObjects()
    assert read(hot, 1) is None
    assert read(hot, 2, now=60.0) is None, "the first one was long ago"
    assert read(hot, 3, Keeps.YES, now=120.0) is None


def test_clients_that_read_what_others_just_read_have_their_peer_keep_it() -> None:
    hot = HotObjects()
    assert read(hot, 1) is None
    assert read(hot, 2) == []
    assert read(hot, 2, Keeps.YES) is None
    assert read(hot, 3) == [], "this holder can serve one more"
    assert read(hot, 3, Keeps.YES) is None
    assert read(hot, 4) == [2, 3]
    assert read(hot, 4, Keeps.YES) == [2, 3]


def test_who_insists_is_served() -> None:
    hot = HotObjects()
    for reader in range(10):
        read(hot, reader, Keeps.YES)
    assert read(hot, 10, Keeps.NO) is None


def test_a_small_peer_does_not_give_up_its_memory_for_one_object() -> None:
    hot = HotObjects()
    assert read(hot, 1) is None
    assert hot.read(KEY, LENGTH, 2, MEMORY, Keeps.BY_PEER, 0.0) == []
    for memory_bytes in (MEMORY - 1, 0):
        assert hot.read(KEY, LENGTH, 3, memory_bytes, Keeps.BY_PEER, 0.0) is None


def test_a_keeper_that_comes_again_is_served_again() -> None:
    """It lost what it was sent, or others would wait for it in vain."""
    hot = HotObjects()
    for reader in (1, 2, 3):
        assert read(hot, reader, Keeps.YES) is None
    assert read(hot, 4, Keeps.YES) == [1, 2, 3]
    assert read(hot, 2, Keeps.YES) is None


def test_what_nobody_keeps_is_not_sent_on() -> None:
    hot = HotObjects()
    for reader in range(10):
        assert read(hot, reader, Keeps.NO) is None
    assert read(hot, 10, Keeps.YES) is None


def test_what_one_peer_reads_again_and_again_it_keeps() -> None:
    hot = HotObjects()
    answers = [read(hot, 1, now=second) for second in (0.0, 1.0, 2.0, 3.0)]
    assert answers == [None, None, None, []]


def kept(hot: HotObjects, reader: int, now: float) -> float:
    """One peer reads the object until it is to keep it, and is sent it: when that was."""
    for turn in range(10):
        if read(hot, reader, now=now + turn) is not None:
            assert read(hot, reader, Keeps.YES, now=now + turn) is None
            return now + turn
    raise AssertionError("it is not hot")


def test_who_loses_what_it_was_to_keep_reads_without_keeping_for_a_while() -> None:
    hot = HotObjects()
    now = kept(hot, 1, 0.0) + 1.0
    seconds = FIRST_PAUSE_SECONDS
    for _ in range(8):
        assert read(hot, 1, now=now) is None, "it came back for it"
        for part in range(20):
            assert read(hot, 1, now=now + part / 20 * seconds) is None
        now = kept(hot, 1, now + seconds) + 1.0
        seconds = min(2 * seconds, LAST_PAUSE_SECONDS)
    assert seconds == LAST_PAUSE_SECONDS


def test_who_lost_something_long_ago_is_trusted_as_before() -> None:
    hot = HotObjects()
    assert read(hot, 1, now=kept(hot, 1, 0.0) + 1.0) is None
    now = kept(hot, 1, 10 * FIRST_PAUSE_SECONDS) + 1.0
    assert read(hot, 1, now=now) is None
    assert kept(hot, 1, now + FIRST_PAUSE_SECONDS)


def test_who_loses_one_object_is_to_keep_no_other_one_either() -> None:
    hot = HotObjects()
    now = kept(hot, 1, 0.0) + 1.0
    assert read(hot, 1, now=now) is None
    for turn in range(10):
        at = now + turn / 5
        assert hot.read(digest_of("other"), LENGTH, 1, MEMORY, Keeps.BY_PEER, at) is None
    assert hot.read(digest_of("other"), LENGTH, 2, MEMORY, Keeps.BY_PEER, at) == []


def test_what_is_on_its_way_is_not_lost_nor_what_was_kept_for_long() -> None:
    hot = HotObjects()
    now = kept(hot, 1, 0.0)
    assert read(hot, 1, now=now + 0.1) == [], "another client of the same peer"
    now = kept(hot, 1, now + LOST_SECONDS + 1.0)
    assert now > LOST_SECONDS


def test_of_many_readers_at_once_also_those_that_lose_it_are_sent_on() -> None:
    hot = HotObjects()
    now = kept(hot, 1, 0.0) + 1.0
    assert read(hot, 1, now=now) is None
    for reader, keeps in enumerate((Keeps.YES, Keeps.YES, Keeps.NO), start=2):
        assert read(hot, reader, keeps, now=now) is None
    assert read(hot, 1, now=now) == [2, 3]


def test_however_often_it_is_read_what_is_remembered_is_as_much_as_there_are_readers() -> None:
    hot = HotObjects()
    for turn in range(10_000):
        assert read(hot, turn % 3, Keeps.NO, now=turn * 1e-4) is None
    assert list(hot._objects[KEY].sent_at) == [1, 2, 0]
    assert read(hot, 7, Keeps.NO, now=100.0) is None
    assert list(hot._objects[KEY].sent_at) == [7], "the others read it long ago"


def test_a_bounded_number_of_readers_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = HotObjects()
    for reader in range(3 * MAX_KEEPERS):
        assert read(hot, reader, Keeps.YES, now=100.0 * reader) is None
    assert len(hot._objects[KEY].kept_at) == MAX_KEEPERS
    monkeypatch.setattr(hot_objects, "MAX_LOSERS", 8)
    for reader in range(3 * 8):
        hot._lost(reader, 0.0)
    assert list(hot._pauses) == list(range(2 * 8, 3 * 8))
    assert MAX_LOSERS > 8


def test_heat_decays() -> None:
    hot = HotObjects()
    for turn in range(20):
        assert read(hot, 1, now=turn * HALF_LIFE_SECONDS) is None


def test_the_readers_of_a_bounded_number_of_objects_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hot_objects, "MAX_OBJECTS", 8)
    hot = HotObjects()
    for number in range(100):
        hot.read(digest_of(str(number)), LENGTH, 1, MEMORY, Keeps.YES, 0.0)
    assert len(hot) == 8
    assert hot.read(digest_of("99"), LENGTH, 2, MEMORY, Keeps.BY_PEER, 0.0) == []


@pytest.mark.parametrize("readers", [2, 4, 16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_a_holder_serves_a_few_whoever_comes_first(seed: int, readers: int) -> None:
    """All clients ask at once; a sent object arrives a round later."""
    rng = Random(seed)
    peers = [HotObjects() for _ in range(readers + 1)]
    asking = deque((reader, 0, Keeps.BY_PEER, 0) for reader in range(1, readers + 1))
    served: Counter[int] = Counter()
    while asking:
        rng.shuffle(asking)
        reader, holder, keeps, hops = asking.popleft()
        answer = read(peers[holder], reader, keeps)
        if answer is None:
            served[holder] += 1
        elif keeps is Keeps.BY_PEER:
            asking.append((reader, 0, Keeps.YES, 0))
        else:
            assert hops < MAX_HOPS
            asking.append((reader, rng.choice(answer), Keeps.YES, hops + 1))
    assert served.total() == readers
    assert max(served.values()) <= MAX_TRANSFERS


# --- a peer that is sent on ------------------------------------------------------------------


def fetching(world: Harness) -> tuple[FetchOperation, RemoteObject]:
    """A fetch of what the first of the others holds."""
    thing = world.hold(world.others[0], "k", b"value")
    return world.core.operations.fetch(digest_of("k"), world.now), thing


def sent_on(world: Harness, pull: PullObject, *keepers: Other) -> None:
    """The holder that was asked names these."""
    failure = HolderReport(
        pull.copies[0].member, int(Code.BUSY), keep=True, others=tuple(each.member for each in keepers)
    )
    world.core.operations.pulled(pull.operation, PullOutcome(False, (failure,)), world.now)


def asked(pull: PullObject) -> list[bytes]:
    return [copy.peer_id for copy in pull.copies]


def test_a_fetch_that_is_sent_on_asks_a_keeper() -> None:
    world = Harness(others=3)
    operation, thing = fetching(world)
    sent_on(world, world.pull_wanted(), world.others[2])
    pull = world.pull_wanted()
    assert asked(pull) == [world.others[2].peer_id]
    assert not pull.insist
    assert operation.result is None
    assert world.deliver(pull, thing) is operation.result
    world.check_idle()


def test_when_the_keeper_has_nothing_the_holder_has_to_send_it() -> None:
    world = Harness(others=3)
    operation, thing = fetching(world)
    sent_on(world, world.pull_wanted(), world.others[2])
    world.fail(world.pull_wanted(), Code.NO_SUCH_KEY)
    pull = world.pull_wanted()
    assert asked(pull) == [world.others[0].peer_id]
    assert pull.insist
    world.deliver(pull, thing)
    assert operation.result is not None


def test_who_is_sent_from_one_to_the_other_insists_in_the_end() -> None:
    world = Harness(others=MAX_HOPS + 3)
    operation, thing = fetching(world)
    for hop in range(MAX_HOPS):
        sent_on(world, world.pull_wanted(), world.others[hop + 1])
    sent_on(world, world.pull_wanted(), world.others[MAX_HOPS + 1])
    pull = world.pull_wanted()
    assert pull.insist
    assert world.others[0].peer_id in asked(pull)
    world.deliver(pull, thing)
    assert operation.result is not None


def test_strangers_and_this_peer_itself_are_no_keepers() -> None:
    world = Harness(others=1)
    fetching(world)
    pull = world.pull_wanted()
    failure = HolderReport(
        pull.copies[0].member, int(Code.BUSY), keep=True, others=(world.core.member, 12345)
    )
    world.core.operations.pulled(pull.operation, PullOutcome(False, (failure,)), world.now)
    assert world.pull_wanted().insist


def test_when_nobody_delivers_the_fetch_ends() -> None:
    world = Harness(others=3)
    operation, _ = fetching(world)
    sent_on(world, world.pull_wanted(), world.others[2])
    world.fail(world.pull_wanted(), Code.UNAVAILABLE)
    world.fail(world.pull_wanted(), Code.UNAVAILABLE)
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[]]))
    assert isinstance(operation.result, Unavailable)
    world.check_idle()


def told(world: Harness) -> dict[bytes, dict[bytes, int]]:
    """The reports since the last call: read counts by member and object."""
    found: dict[bytes, dict[bytes, int]] = {}
    for ask in world.asks(DataKind.READS):
        assert isinstance(ask.request, Reads)
        assert ask.timeout_seconds == ANSWER_SECONDS
        counts = found.setdefault(ask.peer_id, {})
        counts |= {item.digest: item.count for item in ask.request.items}
    return found


def test_reads_are_told_to_their_holders_together_and_once() -> None:
    world = Harness(others=2)
    first, second = world.others
    reports = world.core.read_reports
    for _ in range(3):
        reports.note(first.member, digest_of("a"), 1, world.now)
    reports.note(first.member, digest_of("b"), 5, world.now)
    reports.note(second.member, digest_of("a"), -1, world.now)
    reports.note(12345, digest_of("a"), 1, world.now)  # no member
    world.pass_time(REPORT_SECONDS / 2)
    assert told(world) == {}
    world.pass_time(REPORT_SECONDS)
    assert told(world) == {
        first.peer_id: {digest_of("a"): 3, digest_of("b"): 5},
        second.peer_id: {digest_of("a"): 0},
    }
    world.pass_time(10 * REPORT_SECONDS)
    assert told(world) == {}


def test_what_is_read_elsewhere_stays_there_when_room_is_made() -> None:
    world = Harness(others=1)
    value = bytes(20_000)
    keys = [f"k{number}" for number in range(12)]
    for key in keys:
        world.stored(key, value)
        world.pass_time(1.0)
    items = [ReadCount(digest_of(keys[0]), 2), ReadCount(digest_of("absent"))]
    assert isinstance(world.serve(world.others[0], DataKind.READS, Reads(items)), ReadsTaken)
    world.stored("new", value)
    assert world.find(keys[0]) is not None
    assert world.find(keys[1]) is None


def test_a_pull_that_its_holder_did_not_see_is_told_and_others_are_not() -> None:
    world = Harness(others=1)
    holder = world.others[0]
    for key, transport in (("shm", "shm"), ("rdma", "rdma"), ("tcp", "tcp")):
        thing = world.hold(holder, key, b"value")
        world.start(FetchOperation(world.core, digest_of(key)))
        pull = world.pull_wanted()
        destination = world.core.operations.copy_destination(pull.operation, world.now)
        destination.prepare(thing.slot, thing.trailer)[:] = thing.value
        destination.commit(world.now)
        outcome = PullOutcome(True, source=holder.member, transport=transport)
        world.core.operations.pulled(pull.operation, outcome, world.now)
    world.pass_time(2 * REPORT_SECONDS)
    assert told(world) == {holder.peer_id: {digest_of("shm"): 1, digest_of("rdma"): 1}}


def test_reports_are_bounded_and_those_who_do_not_answer_get_none() -> None:
    world = Harness(others=2)
    first, second = world.others
    reports = world.core.read_reports
    for number in range(read_reports.MAX_NOTED + 10):
        reports.note(first.member, number.to_bytes(16, "little"), 1, world.now)
    reports.note(second.member, digest_of("a"), 1, world.now)
    world.core.holders.peer_failed(second.peer_id, world.now)
    world.pass_time(REPORT_SECONDS)
    asks = world.asks(DataKind.READS)
    assert {ask.peer_id for ask in asks} == {first.peer_id}
    assert [len(ask.request.items) for ask in asks if isinstance(ask.request, Reads)] == (
        [MAX_READ_COUNTS] * (read_reports.MAX_NOTED // MAX_READ_COUNTS)
    )
    too_many = [ReadCount(digest_of("a"))] * (MAX_READ_COUNTS + 1)
    with pytest.raises(ProtocolError):
        world.serve(first, DataKind.READS, Reads(too_many))


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_steady_rate_is_told_as_it_is() -> None:
    reads = MostRead()
    for tick in range(int(10 * segment_objects.HALF_LIFE_SECONDS) * 10):
        reads.read(digest(1), 3, tick / 10)
        reads.read(digest(2), 1, tick / 10)
    (first, rate), (second, other) = reads.most(5, 10 * segment_objects.HALF_LIFE_SECONDS)
    assert (first, second) == (digest(1), digest(2))
    assert rate == pytest.approx(30, rel=0.02)
    assert other == pytest.approx(10, rel=0.02)


def test_what_was_read_long_ago_counts_less() -> None:
    reads = MostRead()
    reads.read(digest(1), 100, 1000.0)
    later = 1000.0 + 4 * segment_objects.HALF_LIFE_SECONDS
    reads.read(digest(2), 10, later)
    (first, rate), (second, other) = reads.most(2, later)
    assert (first, second) == (digest(2), digest(1))
    assert rate / other == pytest.approx(10 / (100 / 16))
    assert reads.most(2, later + 1e6) == []


def test_the_hottest_stand_out_of_any_number_of_others() -> None:
    """Half of a million reads go to a few; the others never come twice. Memory stays bounded."""
    rng, reads, real = Random(5), MostRead(256), Counter[int]()
    for step in range(200_000):
        hot = rng.random() < 0.5
        number = int(rng.expovariate(0.3)) if hot else 1000 + step
        real[number] += 1
        reads.read(digest(number), 1, step / 100_000)
        assert len(reads) <= 256
    told = [int.from_bytes(each, "big") for each, _ in reads.most(8, 2.0)]
    assert told == [number for number, _ in real.most_common(8)]


def test_one_pass_over_all_objects_leaves_the_hot_ones() -> None:
    reads = MostRead()
    for _ in range(200):
        reads.read(digest(1), 1, 1.0)
    for number in range(2, 100 * COUNTED):
        reads.read(digest(number), 1, 1.0)
    assert reads.most(1, 1.0)[0][0] == digest(1)


def test_years_and_a_clock_that_is_set_back_do_no_harm() -> None:
    reads = MostRead()
    for day in range(40):
        reads.read(digest(day % 3), 1, day * 3000.0)  # 50 half-lives each
    assert reads.most(1, 40 * 3000.0)[0][0] == digest(39 % 3)
    reads.read(digest(7), 1, 5.0)
    reads.read(digest(7), 1, 5.0 + segment_objects.HALF_LIFE_SECONDS)
    found, rate = reads.most(1, 5.0 + segment_objects.HALF_LIFE_SECONDS)[0]
    assert found == digest(7)
    assert rate == pytest.approx(1.5 * 0.693 / segment_objects.HALF_LIFE_SECONDS, rel=0.01)
