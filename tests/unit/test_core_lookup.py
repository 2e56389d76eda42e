"""Looking up: copies known here first, else the home peers, once per batch."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from p2pstore.core import peer_core
from p2pstore.core.gets.lookup import LOOKUP_TIMEOUT_SECONDS, LookupOperation
from p2pstore.core.operation import AskPeer
from p2pstore.gossip.gossip_messages import Ack, Ask, ControlKind
from p2pstore.home_messages import Holding
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import CopyChecked, Locations
from p2pstore.wire import Code, Failure
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.core_harness import (
    OTHER_INCARNATION,
    Harness,
    Other,
    RemoteObject,
    clock_at,
    digest_of,
    digests_asked,
    remote_object,
)


def look(world: Harness, *keys: str, **options: object) -> LookupOperation:
    operation = LookupOperation(world.core, [digest_of(key) for key in keys], **options)  # type: ignore[arg-type]  # by name
    world.start(operation)
    return operation


def told(world: Harness, other: Other, thing: RemoteObject) -> Holding:
    """A home peer's answer about a copy at `other`."""
    return Holding(other.member, OTHER_INCARNATION, 1, world.location(thing))


def nothing(ask: AskPeer) -> Locations:
    return Locations([[] for _ in digests_asked(ask)])


def answer_all(world: Harness, asks: list[AskPeer]) -> None:
    for ask in asks:
        world.answer(ask, nothing(ask))


def test_what_is_known_here_needs_no_question() -> None:
    world = Harness(others=4)
    world.stored("mine", b"1")
    world.hold(world.others[0], "theirs", b"2")
    operation = look(world, "mine", "theirs")
    assert operation.done
    mine, theirs = operation.result
    assert [(copy.local, copy.reachable) for copy in mine] == [(True, True)]
    assert [(copy.member, copy.local) for copy in theirs] == [(world.others[0].member, False)]
    assert not world.effects(AskPeer)
    world.check_idle()


def test_each_home_is_asked_once_for_all_its_keys() -> None:
    world = Harness(others=5)
    keys = [f"k{number}" for number in range(40)]
    operation = look(world, *keys)
    asks = world.asks(DataKind.LOOKUP)
    assert len({ask.peer_id for ask in asks}) == len(asks) <= 5
    for key in keys:
        asked = {ask.peer_id for ask in asks if digest_of(key) in digests_asked(ask)}
        assert asked == set(world.core.homes(digest_of(key)))
        assert world.core.peer_id not in asked
    assert all(ask.timeout_seconds == LOOKUP_TIMEOUT_SECONDS for ask in asks)
    answer_all(world, asks)
    assert operation.result == [[] for _ in keys]
    assert not world.asks(DataKind.LOOKUP), "without waiting nobody is asked twice"
    world.check_idle()


def test_only_what_is_missing_is_asked_for() -> None:
    world = Harness(others=3)
    world.stored("mine", b"1")
    look(world, "mine", "absent")
    for ask in world.asks(DataKind.LOOKUP):
        assert digests_asked(ask) == [digest_of("absent")]


def test_it_ends_as_soon_as_every_key_was_found() -> None:
    world = Harness(others=5)
    operation = look(world, "k")
    first, *others = world.asks(DataKind.LOOKUP)
    assert len(others) == 2
    thing = remote_object("k", b"1")
    holder = world.others[0]
    world.answer(first, Locations([[told(world, holder, thing)]]))
    assert operation.done
    ((copy,),) = operation.result
    assert (copy.peer_id, copy.record.version.clock) == (holder.peer_id, thing.version.clock)
    answer_all(world, others)  # late, and harmless
    world.check_idle()


def test_it_waits_for_the_other_homes_while_a_key_is_missing() -> None:
    world = Harness(others=3)
    operation = look(world, "k")
    asks = world.asks(DataKind.LOOKUP)
    answer_all(world, asks[:-1])
    assert not operation.done
    answer_all(world, asks[-1:])
    assert operation.done


def test_without_asking_homes_it_answers_at_once() -> None:
    world = Harness(others=3)
    assert look(world, "k", ask_homes=False).result == [[]]
    assert not world.effects(AskPeer)


def test_a_home_that_does_not_answer_is_avoided_and_probed() -> None:
    world = Harness(others=3)
    operation = look(world, "k")
    asks = world.asks(DataKind.LOOKUP)
    world.answer(asks[0], None)
    assert [probe.peer_id for probe in world.effects(Ask)] == [asks[0].peer_id]
    answer_all(world, asks[1:])
    assert operation.result == [[]]
    thing = world.hold(world.other(asks[0].peer_id), "k", b"1")
    world.push(world.other(asks[1].peer_id), thing)
    copies = world.core.copies.known(digest_of("k"), world.now)
    assert [copy.peer_id for copy in copies] == [asks[1].peer_id, asks[0].peer_id]


def test_a_home_that_refuses_is_not_taken_for_dead() -> None:
    world = Harness(others=1)
    operation = look(world, "k")
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, Failure(int(Code.BUSY), "later"))
    assert operation.result == [[]]
    assert not world.effects(Ask)


def test_excluded_members_are_neither_asked_nor_found() -> None:
    world = Harness(others=3)
    excluded, other = world.others[0], world.others[1]
    world.hold(excluded, "k", b"1")
    operation = look(world, "k", exclude=frozenset({excluded.member}))
    asks = world.asks(DataKind.LOOKUP)
    homes = set(world.core.homes(digest_of("k")))
    assert {ask.peer_id for ask in asks} == homes - {excluded.peer_id} != homes
    thing = remote_object("k", b"1")
    world.answer(asks[0], Locations([[told(world, other, thing)]]))
    assert [[copy.peer_id for copy in copies] for copies in operation.result] == [[other.peer_id]]


def test_unreachable_copies_are_told_apart_from_absent_keys() -> None:
    world = Harness(others=3)
    world.hold(world.others[0], "held by the dead", b"1")
    world.die(world.others[0])
    operation = look(world, "held by the dead", "absent")
    asks = world.asks(DataKind.LOOKUP)
    dead_key = digest_of("held by the dead")
    assert dead_key in digests_asked(asks[0]), "a copy that cannot be reached is no answer"
    answer_all(world, asks)
    dead, absent = operation.result
    assert [copy.reachable for copy in dead] == [False]
    assert absent == []


def test_the_newest_version_comes_first_then_the_reachable_then_the_local() -> None:
    world = Harness(others=4)
    old = remote_object("k", b"1", clock=clock_at(-50.0))
    new = remote_object("k", b"2", clock=clock_at(-40.0))
    for other, thing in zip(world.others, (old, new, new, old), strict=True):
        world.push(other, thing)
    world.die(world.others[1])
    copies = look(world, "k").result[0]
    assert [(copy.record.version.clock, copy.reachable) for copy in copies] == [
        (new.version.clock, True),
        (new.version.clock, False),
        (old.version.clock, True),
        (old.version.clock, True),
    ]
    mine = world.put("k", b"1")
    (ask,) = world.asks(DataKind.GET)
    world.answer(ask, new.reply)
    (doubt,) = world.asks(DataKind.CHECK_COPY)
    world.answer(doubt, CopyChecked(True))
    assert mine.done
    operation = world.core.operations.fetch(digest_of("k"), world.now)
    world.deliver(world.pull_wanted(), new)
    assert operation.done
    assert look(world, "k").result[0][0].local


def test_of_versions_with_one_clock_the_higher_writer_comes_first() -> None:
    world = Harness(others=2)
    world.hold(world.others[0], "k", b"1", clock=clock_at(-5.0), writer=3)
    world.hold(world.others[1], "k", b"2", clock=clock_at(-5.0), writer=4)
    assert [copy.record.version.writer for copy in look(world, "k").result[0]] == [4, 3]


def test_versions_below_a_floor_are_not_found() -> None:
    world = Harness(others=2)
    thing = world.hold(world.others[0], "k", b"1")
    world.learn_floor(world.others[1], digest_of("k"), thing.version)
    operation = look(world, "k")
    for ask in world.asks(DataKind.LOOKUP):
        world.answer(ask, Locations([[told(world, world.others[0], thing)]]))
    assert operation.result == [[]]


@pytest.mark.parametrize(("ahead_seconds", "found"), [(9.9, 1), (10.1, 0)])
def test_versions_from_the_future_are_not_found(ahead_seconds: float, found: int) -> None:
    world = Harness(others=1)
    world.hold(world.others[0], "k", b"1", clock=clock_at(ahead_seconds))
    assert len(world.core.copies.known(digest_of("k"), world.now)) == found
    assert len(world.core.copies.known(digest_of("k"), world.now + 1.0)) == 1, "until their time"


# --- what answers may not do -----------------------------------------------------------------


@pytest.mark.parametrize("nonsense", ["short", "other key", "removed", "myself", "too many"])
def test_nonsense_in_an_answer_is_left_out(nonsense: str) -> None:
    world = Harness(others=1)
    operation = look(world, "k")
    (ask,) = world.asks(DataKind.LOOKUP)
    thing, other = remote_object("k", b"1"), world.others[0]
    holding = told(world, other, thing)
    replies = {
        "short": [[Holding(other.member, 1, 1, holding.record[:-1])]],
        "other key": [[told(world, other, remote_object("x", b"1"))]],
        "removed": [[Holding(other.member, 1, 1, world.location(thing, removed=True))]],
        "myself": [[Holding(world.core.member, 1, 1, holding.record)]],
        "too many": [[], [holding]],
    }
    world.answer(ask, Locations(replies[nonsense]))
    assert operation.result == [[]]


def test_an_answer_cannot_take_back_what_a_holder_itself_said() -> None:
    world = Harness(others=2)
    operation = look(world, "k", "absent")
    ask, *_ = world.asks(DataKind.LOOKUP)
    thing = world.hold(world.others[0], "k", b"1")
    gone = world.location(thing, removed=True)
    reply = [
        [Holding(world.others[0].member, OTHER_INCARNATION, 99, gone)] * (digest == digest_of("k"))
        for digest in digests_asked(ask)
    ]
    world.answer(ask, Locations(reply))
    assert not operation.done
    assert len(world.core.copies.known(digest_of("k"), world.now)) == 1


def test_a_thousand_holders_in_one_answer_are_cut() -> None:
    world = Harness(others=1)
    operation = look(world, "k")
    (ask,) = world.asks(DataKind.LOOKUP)
    record = world.location(remote_object("k", b"1"))
    world.answer(ask, Locations([[Holding(1000 + n, 1, 1, record) for n in range(1000)]]))
    assert operation.done
    assert world.gossip.directory.word_count == 64


# --- waiting ---------------------------------------------------------------------------------


def asked_during(world: Harness, seconds: float) -> list[float]:
    """Answer every question with nothing, and note when it came."""
    begin, times = world.now, []
    while world.now < begin + seconds:
        asks = world.asks(DataKind.LOOKUP)
        for probe in world.effects(Ask):  # no member may be taken for dead meanwhile
            if probe.kind == ControlKind.PING:
                world.gossip.answered(probe.token, Ack(0, []), world.now)
        times += [world.now - begin] * bool(asks)
        answer_all(world, asks)
        world.pass_time(0.01)
    return times


def test_waiting_asks_again_with_growing_pauses_until_its_time_is_over() -> None:
    world = Harness(others=1)
    operation = look(world, "k", wait_seconds=12.0)
    times = asked_during(world, 11.9)
    assert not operation.done
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] == pytest.approx(0.05, abs=0.06)
    assert all(later >= 0.9 * earlier for earlier, later in pairwise(pauses)), pauses
    assert all(1.9 <= pause <= 2.1 for pause in pauses[6:]), pauses
    assert 9 <= len(times) <= 14
    asked_during(world, 0.2)
    assert operation.result == [[]]
    world.check_idle()


def test_waiting_notices_what_gossip_brings() -> None:
    world = Harness(others=1)
    operation = look(world, "k", wait_seconds=3.0)
    asked_during(world, 0.5)
    world.hold(world.others[0], "k", b"1")
    world.pass_time(0.06)
    assert operation.done
    assert len(operation.result[0]) == 1


def test_waiting_ends_at_once_with_the_last_key_that_was_missing() -> None:
    world = Harness(others=1)
    operation = look(world, "k", "l", wait_seconds=30.0)
    answer_all(world, world.asks(DataKind.LOOKUP))
    world.hold(world.others[0], "k", b"1")
    world.core.gossip_arrived(world.now)
    assert not operation.done
    world.hold(world.others[0], "l", b"2")
    world.core.gossip_arrived(world.now)
    assert operation.done
    assert [len(copies) for copies in operation.result] == [1, 1]
    world.check_idle()


def test_waiting_does_not_ask_while_an_answer_is_out() -> None:
    world = Harness(others=1)
    operation = look(world, "k", wait_seconds=0.5)
    (ask,) = world.asks(DataKind.LOOKUP)
    world.pass_time(0.9)
    assert not world.asks(DataKind.LOOKUP)
    assert not operation.done, "its answer may still come: the request has a time limit of its own"
    world.answer(ask, None)
    assert operation.done


def test_waiting_wakes_the_shell_in_time() -> None:
    world = Harness(others=1)
    operation = look(world, "k", wait_seconds=0.02)
    answer_all(world, world.asks(DataKind.LOOKUP))
    assert world.core.next_tick(world.now) <= world.now + 0.02
    world.pass_time(0.021)
    assert operation.done
    assert operation.wake_at == float("inf")


def test_cancelling_ends_it() -> None:
    world = Harness(others=1)
    operation = look(world, "k", wait_seconds=3.0)
    world.core.operations.cancel(operation, world.now)
    assert operation.done
    assert world.finished() == {operation.number}
    answer_all(world, world.asks(DataKind.LOOKUP))
    world.pass_time(3.0)
    world.check_idle()


def test_a_location_of_a_stranger_is_not_a_copy() -> None:
    world = Harness(others=1)
    stranger = Other(world.signer)
    stranger.signer = SimulatedSigner(peer_id_of(77))
    world.hold(stranger, "k", b"1")
    assert world.core.copies.known(digest_of("k"), world.now) == []
    world.others.append(world.join(77))
    assert len(world.core.copies.known(digest_of("k"), world.now)) == 1


# --- many keys -------------------------------------------------------------------------------


def test_many_keys_are_gone_through_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is held up for long declares others dead."""
    world = Harness(others=4)
    monkeypatch.setattr(peer_core, "WORK_PER_STEP", 2 * (8 + 5))
    assert world.core.keys_per_step == 2
    looked = Counter[float]()
    sorted_copies = world.core.copies.sorted

    def counted(*arguments: Any, **named: Any) -> Any:
        looked[world.now] += 1
        return sorted_copies(*arguments, **named)

    monkeypatch.setattr(world.core.copies, "sorted", counted)
    world.hold(world.others[0], "k3", b"known")
    keys = [f"k{number}" for number in range(7)]
    operation = look(world, *keys, "k3")
    asks: list[AskPeer] = []
    for _ in range(20):
        world.pass_time(0.001)
        asks += world.asks(DataKind.LOOKUP)
    homes = [home for key in keys if key != "k3" for home in world.core.homes(digest_of(key))]
    assert Counter(homes) == Counter(ask.peer_id for ask in asks for _ in digests_asked(ask))
    looked.clear()
    for ask in asks[:-1]:
        world.answer(ask, nothing(ask))
        assert looked.total() <= len(digests_asked(ask)), "only what this peer was asked for"
        looked.clear()
    found = remote_object("k5", b"told")
    last = asks[-1]
    members = [told(world, world.others[1], found)]
    wanted = digest_of("k5")
    world.answer(last, Locations([members if d == wanted else [] for d in digests_asked(last)]))
    looked.clear()
    assert not operation.done
    world.pass_time(0.1)
    assert max(looked.values()) <= 2
    assert [len(copies) for copies in operation.result] == [
        int(key == "k3" or (key == "k5" and wanted in digests_asked(last))) for key in [*keys, "k3"]
    ]
    world.check_idle()


def test_news_of_many_keys_is_taken_in_steps_and_first_where_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Harness(others=1)
    monkeypatch.setattr(peer_core, "WORK_PER_STEP", 3 * (8 + 2))
    keys = [f"k{number}" for number in range(10)]
    mine = [world.stored(key, b"mine") for key in keys]
    waiting = look(world, "wanted", wait_seconds=5.0, ask_homes=False)
    later = clock_at(1.0)
    for key in keys:
        world.hold(world.others[0], key, b"newer", clock=later)
    world.hold(world.others[0], "wanted", b"value")
    world.core.gossip_arrived(world.now)
    assert waiting.done
    assert sum(world.find(key) is None for key in keys) == 2, "the others are still to be looked at"
    assert world.core.next_tick(world.now) == world.now
    world.pass_time(0.1)
    assert all(world.find(key) is None for key in keys), mine
    assert not world.gossip.directory.watched.any_touched


def test_a_long_wait_keeps_nothing_of_what_was_answered() -> None:
    world = Harness(others=3)
    operation = look(world, "k", wait_seconds=3600.0)
    sizes = []
    for _ in range(10):
        answer_all(world, world.asks(DataKind.LOOKUP))
        sizes.append(len(operation.asked))
        world.pass_time(2.5)
    assert sizes == [0] * 10
    assert operation.homes_asked == len(world.core.homes(digest_of("k"))) > 0
    world.core.operations.cancel(operation, world.now)
    world.check_idle()
