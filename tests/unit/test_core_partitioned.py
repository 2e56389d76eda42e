"""A peer that knows a part of the directory: one home is asked, the next one where that cannot tell."""

from collections.abc import Sequence

import pytest

from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import (
    BELIEVED,
    HEDGE_PROBE_TIMEOUTS,
    NEXT_HOME_SECONDS,
    UNSURE_SECONDS,
    LookupOperation,
)
from p2pstore.core.operation import AskPeer
from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.gossip.homes.partition_homes import KeptDirectory
from p2pstore.gossip.records import PARTITION_COUNT, LocationRecord, PeerId, member_of, partition_of
from p2pstore.home_messages import Holding, PartitionSet, Push, Pushed
from p2pstore.objects import Version
from p2pstore.put_facts import PutStatus
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import CopyChecked, Locations, Lookup
from p2pstore.wire import Code, Failure
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

OTHERS = 6


def partitioned(others: int = OTHERS) -> Harness:
    """A peer in partitioned mode, as all others."""
    world = Harness(others, directory="partitioned")
    for other in world.others:
        world.offer(other, directory=int(KeptDirectory.PARTITIONED))
    for push in pushes_of(world, 1.0):
        world.answer(push, Pushed())
    return world


def pushes_of(world: Harness, seconds: float = 0.1) -> list[AskPeer]:
    asks = []
    for _ in range(int(seconds / 0.05)):
        world.pass_time(0.05)
        asks += world.asks(DataKind.PUSH)
    return asks


def foreign_key(world: Harness, number: int = 0) -> str:
    """A key that this peer is no home of."""
    return foreign_keys(world)[number]


def foreign_keys(world: Harness) -> list[str]:
    keys = [f"k{number}" for number in range(200)]
    return [key for key in keys if len(world.core.homes(digest_of(key))) == 3]


def home_key(world: Harness) -> str:
    """A key that this peer is a home of."""
    keys = (f"k{number}" for number in range(1000))
    return next(key for key in keys if len(world.core.homes(digest_of(key))) == 2)


def look(world: Harness, *keys: str, **options: object) -> LookupOperation:
    operation = LookupOperation(world.core, [digest_of(key) for key in keys], **options)  # type: ignore[arg-type]  # by name
    world.start(operation)
    return operation


def told(other: Other, thing: RemoteObject, world: Harness) -> Holding:
    return Holding(other.member, OTHER_INCARNATION, 1, world.location(thing))


def absent(ask: AskPeer, unsure: Sequence[int] = ()) -> Locations:
    return Locations([[] for _ in digests_asked(ask)], list(unsure))


def test_two_homes_are_asked_before_a_key_is_nowhere() -> None:
    world = partitioned()
    key = foreign_key(world)
    operation = look(world, key)
    (first,) = world.asks(DataKind.LOOKUP)
    assert first.timeout_seconds == NEXT_HOME_SECONDS
    world.answer(first, absent(first))
    (second,) = world.asks(DataKind.LOOKUP)
    assert {first.peer_id, second.peer_id} < set(world.core.homes(digest_of(key)))
    world.answer(second, absent(second))
    assert operation.result == [[]]
    assert not world.asks(DataKind.LOOKUP)
    world.check_idle()


@pytest.mark.parametrize("lie", ["nobody", "one that is dead"])
def test_a_home_that_denies_what_is_there_hides_nothing(lie: str) -> None:
    world = partitioned()
    key, holder, dead = foreign_key(world), world.others[0], world.others[1]
    world.die(dead)
    operation = look(world, key)
    (liar,) = world.asks(DataKind.LOOKUP)
    named = [told(dead, remote_object(key, b"1"), world)] if lie != "nobody" else []
    world.answer(liar, Locations([named]))
    (honest,) = world.asks(DataKind.LOOKUP)
    world.answer(honest, Locations([[told(holder, remote_object(key, b"1"), world)]]))
    assert operation.result[0][0].peer_id == holder.peer_id


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 5.0])
@pytest.mark.parametrize("name", ["wait_seconds", "patience_seconds"])
def test_what_a_home_claims_to_have_itself_and_does_not_prove_hides_nothing(
    name: str, seconds: float, silent: bool
) -> None:
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    operation = look(world, key, **{name: seconds})
    (ask,) = world.asks(DataKind.LOOKUP)
    world.silent = {ask.peer_id} if silent else set()
    claimed = LocationRecord(digest_of(key), Version(clock_at(-1.0), 9, 5), 5, 1)
    liar = Holding(member_of(ask.peer_id), OTHER_INCARNATION, 1, claimed.encode())
    world.answer(ask, Locations([[liar]]))
    while asks := world.asks(DataKind.LOOKUP):  # the liar once more, perhaps
        for ask in asks:
            honest = member_of(ask.peer_id) != liar.member
            true = told(holder, remote_object(key, b"1"), world)
            world.answer(ask, Locations([[true if honest else liar]]))
    assert [copy.peer_id for copy in operation.result[0]] == [holder.peer_id]
    world.check_idle()


def test_a_key_that_is_claimed_only_is_nowhere() -> None:
    world = partitioned()
    key = foreign_key(world)
    operation = look(world, key)
    claimed = LocationRecord(digest_of(key), Version(clock_at(-1.0), 9, 5), 5, 1).encode()
    asked = 0
    while asks := world.asks(DataKind.LOOKUP):
        for ask in asks:
            its_own = Holding(member_of(ask.peer_id), OTHER_INCARNATION, 1, claimed)
            world.answer(ask, Locations([[its_own]]))
        asked += len(asks)
        assert asked <= 4
    assert operation.result == [[]]
    world.check_idle()


def test_a_key_whose_holder_is_not_known_yet_as_a_member_is_not_nowhere() -> None:
    world = partitioned()
    key = foreign_key(world)
    thing = remote_object(key, b"1")
    operation = look(world, key)
    stranger = Holding(77, OTHER_INCARNATION, 1, world.location(thing))
    for _ in range(3):
        (ask,) = world.asks(DataKind.LOOKUP)
        world.answer(ask, Locations([[stranger]]))
    assert not operation.done
    world.pass_time(0.06)
    (ask,) = world.asks(DataKind.LOOKUP)
    holder = world.others[0]
    world.answer(ask, Locations([[told(holder, thing, world)]]))
    assert [copy.peer_id for copy in operation.result[0]] == [holder.peer_id]


def test_one_home_is_believed_when_the_others_do_not_answer() -> None:
    world = partitioned()
    operation = look(world, foreign_key(world))
    (first,) = world.asks(DataKind.LOOKUP)
    world.answer(first, absent(first))
    for _ in range(2):
        assert not operation.done
        (silent,) = world.asks(DataKind.LOOKUP)
        world.answer(silent, None)
    assert operation.result == [[]]
    assert isinstance(operation.absence(operation.digests[0]), NoSuchKey)


def test_who_needs_the_word_of_one_home_only_asks_no_other() -> None:
    world = partitioned()
    operation = look(world, foreign_key(world), believed=1)
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, absent(ask))
    assert operation.result == [[]]
    assert not world.asks(DataKind.LOOKUP)
    world.check_idle()


def test_what_a_home_says_is_kept_for_the_next_time() -> None:
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    operation = look(world, key)
    (ask,) = world.asks(DataKind.LOOKUP)
    thing = remote_object(key, b"1")
    world.answer(ask, Locations([[told(holder, thing, world)]]))
    assert [[copy.peer_id for copy in copies] for copies in operation.result] == [[holder.peer_id]]
    again = look(world, key)
    assert again.done
    assert not world.asks(DataKind.LOOKUP)
    world.gossip.directory.mark_stale(holder.member, digest_of(key), OTHER_INCARNATION, 5)
    look(world, key)
    assert world.asks(DataKind.LOOKUP), "it was wrong: a home is asked again"


def test_a_home_that_cannot_tell_is_followed_by_the_next() -> None:
    world = partitioned()
    key = foreign_key(world)
    operation = look(world, key)
    asked = []
    for reply in ("unsure", "silent", "refuses"):
        (ask,) = world.asks(DataKind.LOOKUP)
        asked.append(ask.peer_id)
        if reply == "unsure":
            world.answer(ask, absent(ask, [0]))
        elif reply == "silent":
            world.answer(ask, None)
        else:
            world.answer(ask, Failure(int(Code.BUSY), "later"))
    assert set(asked) == set(world.core.homes(digest_of(key)))
    assert not operation.done, "nobody could tell"
    world.pass_time(0.06)
    (ask,) = world.asks(DataKind.LOOKUP)
    assert ask.peer_id != asked[1], "who was silent is asked last"
    world.answer(ask, absent(ask))
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, absent(ask))
    assert operation.result == [[]]


def test_nobody_can_tell_for_long() -> None:
    world = partitioned()
    operation = look(world, foreign_key(world))
    begin = world.now
    while not operation.done:
        assert world.now < begin + UNSURE_SECONDS + 1.0
        for ask in world.asks(DataKind.LOOKUP):
            world.answer(ask, absent(ask, [0]))
        world.pass_time(0.02)
    assert operation.result == [[]]
    assert world.now >= begin + UNSURE_SECONDS
    world.check_idle()


def test_only_keys_that_a_home_could_not_tell_of_go_to_the_next() -> None:
    world = partitioned()
    one, *rest = foreign_keys(world)
    homes = set(world.core.homes(digest_of(one)))
    other = next(key for key in rest if set(world.core.homes(digest_of(key))) == homes)
    operation = look(world, one, other, believed=1)
    (ask,) = world.asks(DataKind.LOOKUP)
    digests = digests_asked(ask)
    assert set(digests) == {digest_of(one), digest_of(other)}, "both of the same home"
    world.answer(ask, absent(ask, [digests.index(digest_of(other))]))
    (again,) = world.asks(DataKind.LOOKUP)
    assert digests_asked(again) == [digest_of(other)]
    world.answer(again, absent(again))
    assert operation.result == [[], []]


def test_a_batch_goes_to_few_homes() -> None:
    world = partitioned()
    keys = foreign_keys(world)[:40]
    operation = look(world, *keys, believed=1)
    asks = world.asks(DataKind.LOOKUP)
    assert len({ask.peer_id for ask in asks}) == len(asks) <= OTHERS
    assert sum(len(digests_asked(ask)) for ask in asks) == 40, "each key of one home"
    for ask in asks:
        world.answer(ask, absent(ask))
    assert operation.done


def empty_partitions() -> Push:
    """The answer of a member that holds nothing."""
    sets = [PartitionSet(partition, 0, 0, b"") for partition in range(PARTITION_COUNT)]
    return Push(OTHER_INCARNATION, [], b"", b"", 1, sets)


def acquainted(world: Harness) -> Harness:
    """All others have told this peer the records it should know, and know the same members."""
    for other in world.others:
        assert world.serve(other, DataKind.PUSH, empty_partitions()) == Pushed()
    world.gossip.partitions.housekeep(world.now, agreed=True)
    pushes_of(world, 1.1)
    return world


def numbered(world: Harness, thing: RemoteObject, number: int, sequence: int) -> Push:
    packed = world.location(thing)
    return Push(OTHER_INCARNATION, [sequence], packed, number.to_bytes(4, "little"))


def test_a_home_vouches_for_its_partitions_and_for_no_others() -> None:
    world = acquainted(partitioned())
    mine, theirs = home_key(world), foreign_key(world)
    assert look(world, mine).result == [[]]
    assert not world.asks(DataKind.LOOKUP), "it would know"
    packed = digest_of(mine) + digest_of(theirs)
    reply = world.serve(world.others[0], DataKind.LOOKUP, Lookup(packed))
    assert reply == Locations([[], []], [1])


def test_a_home_knows_what_owners_push_and_says_what_it_missed() -> None:
    world = acquainted(partitioned())
    key, owner = home_key(world), world.others[0]
    thing = remote_object(key, b"1")
    assert world.serve(owner, DataKind.PUSH, numbered(world, thing, 1, 50)) == Pushed()
    (copies,) = look(world, key).result
    assert [copy.peer_id for copy in copies] == [owner.peer_id]
    later = remote_object(key, b"2", clock=clock_at(-30.0))
    partition = partition_of(digest_of(key))
    assert world.serve(owner, DataKind.PUSH, numbered(world, later, 3, 52)) == Pushed([partition])
    reply = world.serve(world.others[1], DataKind.LOOKUP, Lookup(digest_of(key)))
    assert reply.unsure == [0]


def test_a_stale_location_is_hidden_until_its_owner_says_more() -> None:
    world = acquainted(partitioned())
    key, owner = home_key(world), world.others[0]
    thing = remote_object(key, b"1")
    world.serve(owner, DataKind.PUSH, numbered(world, thing, 1, 50))
    world.gossip.directory.mark_stale(owner.member, digest_of(key), OTHER_INCARNATION, 60)
    assert look(world, key).result == [[]]
    later = remote_object(key, b"2", clock=clock_at(-30.0))
    world.serve(owner, DataKind.PUSH, numbered(world, later, 2, 61))
    assert len(look(world, key).result[0]) == 1


def test_a_put_asks_a_home_whether_the_key_exists() -> None:
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    put = world.put(key, b"mine")
    (ask,) = world.asks(DataKind.LOOKUP)
    theirs = remote_object(key, b"theirs")
    world.answer(ask, Locations([[told(holder, theirs, world)]]))
    (compare,) = world.asks(DataKind.GET)
    world.answer(compare, theirs.reply)
    (doubt,) = world.asks(DataKind.CHECK_COPY)
    world.answer(doubt, CopyChecked(True))
    assert put.result.status is PutStatus.KEPT_EXISTING
    fresh = world.put(foreign_key(world, 1), b"mine")
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, absent(ask))
    assert fresh.result.status is PutStatus.CREATED


def test_of_two_first_puts_the_older_one_hears_of_the_newer_from_the_home() -> None:
    """The home names other versions to who pushes; who pushed the newer one tells the other holder."""
    world = acquainted(partitioned())
    key, first, second = home_key(world), *world.others[:2]
    old = remote_object(key, b"old", clock=clock_at(-50.0), writer=3)
    new = remote_object(key, b"new", clock=clock_at(-40.0), writer=4)
    assert world.serve(first, DataKind.PUSH, numbered(world, old, 1, 50)) == Pushed()
    reply = world.serve(second, DataKind.PUSH, numbered(world, new, 1, 70))
    assert [holding.member for holding in reply.rivals] == [first.member]
    assert reply.rivals[0].record == world.location(old)


@pytest.mark.parametrize("mode", [KeptDirectory.PARTITIONED, KeptDirectory.FULL])
def test_who_follows_no_logs_hears_of_what_a_full_peer_puts(mode: KeptDirectory) -> None:
    """Else it would hold the older version for good."""
    world = Harness(2)
    first, second = world.others
    world.offer(first, directory=int(mode))
    old = remote_object("k", b"old", clock=clock_at(-50.0), writer=3)
    new = remote_object("k", b"new", clock=clock_at(-40.0), writer=4)
    world.serve(first, DataKind.PUSH, numbered(world, old, 1, 50))
    reply = world.serve(second, DataKind.PUSH, numbered(world, new, 1, 70))
    follows_none = mode is KeptDirectory.PARTITIONED
    assert [holding.member for holding in reply.rivals] == [first.member] * follows_none


FAR = 1 << 40
"""A place that no log reaches."""


def put_here(world: Harness, key: str) -> list[AskPeer]:
    """A key is put and held here. The pushes to its homes, which are not answered yet."""
    put = world.put(key, b"mine")
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, absent(ask))
    assert put.result.status is PutStatus.CREATED
    asks = pushes_of(world)
    assert {ask.peer_id for ask in asks} == set(world.core.homes(digest_of(key)))
    return asks


@pytest.mark.parametrize("is_true", [True, False])
def test_who_is_told_of_a_newer_version_asks_its_holder_before_it_withdraws_its_own(
    is_true: bool,
) -> None:
    world = partitioned()
    key = foreign_key(world)
    rival = next(o for o in world.others if o.peer_id not in world.core.homes(digest_of(key)))
    asks = put_here(world, key)
    newer = remote_object(key, b"theirs", clock=clock_at(5.0))
    rivals = [Holding(rival.member, OTHER_INCARNATION, 9, world.location(newer))]
    for ask in asks:
        world.answer(ask, Pushed([], rivals))
    asked = pushes_of(world)
    assert [ask.peer_id for ask in asked] == [rival.peer_id]
    assert world.find(key) is not None, "a home alone says so"
    world.answer(asked[0], Pushed([], rivals if is_true else []))
    pushes_of(world)
    assert (world.find(key) is None) is is_true


def test_who_holds_the_newer_version_says_so_to_who_tells_of_an_older_one() -> None:
    world = partitioned()
    key, other = foreign_key(world), world.others[0]
    for ask in put_here(world, key):
        world.answer(ask, Pushed())
    older = remote_object(key, b"theirs", clock=clock_at(-100.0))
    reply = world.serve(other, DataKind.PUSH, numbered(world, older, 0, 7))
    assert [holding.member for holding in reply.rivals] == [world.core.member]
    assert world.find(key) is not None


def test_what_others_say_of_a_holder_gives_up_no_copy_and_hides_no_word_of_it() -> None:
    world = acquainted(partitioned())
    key, owner, liar = home_key(world), *world.others[:2]
    thing = remote_object(key, b"1", clock=clock_at(-50.0))
    world.serve(owner, DataKind.PUSH, numbered(world, thing, 1, 50))
    world.start(FetchOperation(world.core, digest_of(key), soft=False))
    world.deliver(world.pull_wanted(), thing)
    copy = world.find(key)
    assert copy is not None
    newer = world.location(remote_object(key, b"2", clock=clock_at(5.0)))
    forged = Locations([[Holding(owner.member, OTHER_INCARNATION, FAR, newer)]])
    world.core.copies.learn_locations(liar.peer_id, [digest_of(key)], forged, world.now)
    world.pass_time(0.1)
    assert world.find(key) is copy
    (known,) = (c for c in world.core.copies.known(digest_of(key), world.now) if not c.local)
    assert (known.member, known.hearsay) == (owner.member, False)
    assert known.record.version[:2] == thing.version[:2]
    reply = world.serve(liar, DataKind.LOOKUP, Lookup(digest_of(key)))
    assert FAR not in [each.sequence for each in reply.items[0]], "it is not passed on"


def test_a_lie_about_a_holder_does_not_hide_what_a_home_says_of_it() -> None:
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    for clock in (clock_at(-200.0), clock_at(3600.0)):
        made_up = world.location(remote_object(key, b"2", clock=clock))
        forged = Locations([[Holding(holder.member, OTHER_INCARNATION, FAR, made_up)]])
        world.core.copies.learn_locations(world.others[1].peer_id, [digest_of(key)], forged, world.now)
    thing = remote_object(key, b"1", clock=clock_at(-50.0))
    truth = Locations([[told(holder, thing, world)]])
    world.core.copies.learn_locations(world.others[2].peer_id, [digest_of(key)], truth, world.now)
    (known,) = world.core.copies.known(digest_of(key), world.now)
    assert known.record.version[:2] == thing.version[:2]


def test_the_denial_of_a_member_ends_what_others_say_of_it_whatever_place_that_claims() -> None:
    world = partitioned()
    key, owner = foreign_key(world), world.others[0]
    record = world.location(remote_object(key, b"2"))
    forged = Locations([[Holding(owner.member, OTHER_INCARNATION, FAR, record)]])
    world.core.copies.learn_locations(world.others[1].peer_id, [digest_of(key)], forged, world.now)
    assert look(world, key).done
    world.gossip.directory.mark_stale(owner.member, digest_of(key), OTHER_INCARNATION, 5)
    assert world.core.copies.known(digest_of(key), world.now) == []


def test_who_has_the_newer_version_tells_the_other_holder() -> None:
    world = partitioned()
    key = foreign_key(world)
    rival = next(o for o in world.others if o.peer_id not in world.core.homes(digest_of(key)))
    world.put(key, b"mine")
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, absent(ask))
    asks = pushes_of(world)
    older = remote_object(key, b"theirs", clock=clock_at(-100.0))
    rivals = [Holding(rival.member, OTHER_INCARNATION, 9, world.location(older))]
    for ask in asks:
        world.answer(ask, Pushed([], rivals))
    told_rival = [ask for ask in pushes_of(world) if ask.peer_id == rival.peer_id]
    assert told_rival
    request = told_rival[0].request
    assert isinstance(request, Push)
    assert request.numbers[:4] == bytes(4), "it is no home of the key"
    assert world.find(key) is not None


def test_what_a_member_tells_of_itself_is_taken_in_by_who_is_no_home() -> None:
    world = partitioned()
    key = foreign_key(world)
    thing = remote_object(key, b"1")
    assert world.serve(world.others[0], DataKind.PUSH, numbered(world, thing, 0, 5)) == Pushed()
    assert len(look(world, key).result[0]) == 1
    assert world.gossip.partitions.views.record_count == 0


def test_the_next_home_is_asked_as_well_when_one_is_silent() -> None:
    world = partitioned()
    patience = HEDGE_PROBE_TIMEOUTS * world.gossip.config.membership.probe_timeout_seconds
    key = foreign_key(world)
    operation = look(world, key)
    (silent,) = world.asks(DataKind.LOOKUP)
    world.pass_time(0.9 * patience)
    assert not world.asks(DataKind.LOOKUP)
    world.pass_time(0.2 * patience)
    (second,) = world.asks(DataKind.LOOKUP)
    assert second.peer_id != silent.peer_id
    world.answer(second, absent(second))
    (third,) = world.asks(DataKind.LOOKUP)
    world.answer(third, absent(third))
    assert operation.result == [[]], "two vouch: nobody waits for the silent one"
    assert not world.core.holders.is_avoided(member_of(silent.peer_id), world.now)
    world.answer(silent, None)
    assert world.core.holders.is_avoided(member_of(silent.peer_id), world.now), (
        "the next lookup asks others"
    )
    world.check_idle()


def test_a_put_does_not_wait_for_homes_that_just_died() -> None:
    world = partitioned()
    begin = world.now
    put = world.put(foreign_key(world), b"mine")
    asked = world.asks(DataKind.LOOKUP)
    while len(asked) < 3:
        assert world.now < begin + 1.0
        world.pass_time(0.01)
        asked += world.asks(DataKind.LOOKUP)
    assert len({ask.peer_id for ask in asked}) == 3
    world.answer(asked[2], absent(asked[2]))
    assert put.result.status is PutStatus.CREATED
    assert world.now - begin < 0.5 * NEXT_HOME_SECONDS


def test_the_third_home_is_asked_once_when_two_are_silent() -> None:
    world = partitioned()
    operation = look(world, foreign_key(world))
    asked = world.asks(DataKind.LOOKUP)
    world.pass_time(0.15)
    asked += world.asks(DataKind.LOOKUP)
    assert len(asked) == 2
    world.answer(asked[0], None)
    assert not world.asks(DataKind.LOOKUP), "the second one may answer yet"
    world.answer(asked[1], None)
    (third,) = world.asks(DataKind.LOOKUP)
    assert third.peer_id not in {ask.peer_id for ask in asked}
    world.answer(third, absent(third))
    assert operation.result == [[]]
    world.check_idle()


def test_an_unsure_answer_to_a_hedged_question_does_not_end_the_lookup() -> None:
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    operation = look(world, key)
    (first,) = world.asks(DataKind.LOOKUP)
    world.pass_time(0.15)
    (second,) = world.asks(DataKind.LOOKUP)
    world.answer(second, absent(second, [0]))
    assert not operation.done
    world.answer(first, Locations([[told(holder, remote_object(key, b"1"), world)]]))
    assert [[copy.peer_id for copy in copies] for copies in operation.result] == [[holder.peer_id]]


def test_a_key_whose_only_holder_died_is_not_one_that_never_was() -> None:
    """The home names the dead holder; who asked knows that it is dead."""
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    world.die(holder)
    outcomes = []
    for name, holdings in ((key, [told(holder, remote_object(key, b"1"), world)]), ("never", [])):
        fetch = FetchOperation(world.core, digest_of(name))
        world.start(fetch)
        for _ in range(BELIEVED):
            (ask,) = world.asks(DataKind.LOOKUP)
            world.answer(ask, Locations([holdings]))
        outcomes.append(type(fetch.result))
    assert outcomes == [Unavailable, NoSuchKey]


@pytest.mark.parametrize(
    ("answers", "error"),
    [((None, None, None), Unavailable), ((None, "unsure", None), NoSuchKey)],
    ids=["no home answers", "one answers, and may not know all"],
)
def test_a_key_of_which_nobody_could_tell_is_not_one_that_never_was(
    answers: tuple[str | None, ...], error: type[Exception]
) -> None:
    world = partitioned()
    fetch = FetchOperation(world.core, digest_of(foreign_key(world)))
    world.start(fetch)
    by_home: dict[PeerId, str | None] = {}
    begin = world.now
    while not fetch.done:
        assert world.now < begin + UNSURE_SECONDS + 3 * NEXT_HOME_SECONDS
        for ask in world.asks(DataKind.LOOKUP):
            if by_home.setdefault(ask.peer_id, answers[len(by_home) % 3]):
                world.answer(ask, absent(ask, [0]))
            else:
                world.answer(ask, None)
        world.pass_time(0.02)
    assert len(by_home) == 3
    assert isinstance(fetch.result, error)


def test_homes_that_are_all_silent_are_asked_again_within_the_deadline() -> None:
    world = partitioned()
    key, holder = foreign_key(world), world.others[0]
    world.start(FetchOperation(world.core, digest_of(key), progress_seconds=10.0))
    begin = world.now
    while world.now < begin + UNSURE_SECONDS + 1.0:
        for ask in world.asks(DataKind.LOOKUP):
            world.answer(ask, None)
        world.pass_time(0.02)
    while not (asks := world.asks(DataKind.LOOKUP)):
        assert world.now < begin + 6.0
        world.pass_time(0.02)
    world.answer(asks[0], Locations([[told(holder, remote_object(key, b"1"), world)]]))
    assert [copy.peer_id for copy in world.pull_wanted().copies] == [holder.peer_id]


def test_a_home_names_the_holder_that_died() -> None:
    world = acquainted(partitioned())
    key, owner = home_key(world), world.others[0]
    thing = remote_object(key, b"1")
    world.serve(owner, DataKind.PUSH, numbered(world, thing, 1, 50))
    world.die(owner)
    reply = world.serve(world.others[1], DataKind.LOOKUP, Lookup(digest_of(key)))
    assert [[each.member for each in holdings] for holdings in reply.items] == [[owner.member]]


def test_who_wants_all_copies_asks_a_home_that_knows_though_one_is_known_here() -> None:
    world = partitioned()
    key = foreign_key(world)
    first, second = world.others[:2]
    thing = remote_object(key, b"1")
    look(world, key)
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, Locations([[told(first, thing, world)]]))
    operation = look(world, key, ask_always=True)
    (ask,) = world.asks(DataKind.LOOKUP)
    world.answer(ask, Locations([[told(first, thing, world)]], [0]))
    (again,) = world.asks(DataKind.LOOKUP)
    assert again.peer_id != ask.peer_id, "the first one might not know all"
    world.answer(again, Locations([[told(first, thing, world), told(second, thing, world)]]))
    assert [{copy.peer_id for copy in copies} for copies in operation.result] == [
        {first.peer_id, second.peer_id}
    ]
    world.check_idle()


def test_who_wants_all_copies_asks_nobody_about_what_this_peer_vouches_for() -> None:
    world = acquainted(partitioned())
    assert look(world, home_key(world), ask_always=True).done
    assert not world.asks(DataKind.LOOKUP)
