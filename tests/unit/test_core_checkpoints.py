"""A peer's records of checkpoints, sent and received: heads, switches, participants, trusted publishers."""

from typing import Any

import msgspec
import pytest

from p2pstore.core.checkpoints import MAX_PINS
from p2pstore.core.operation import SaveClusterRecord
from p2pstore.errors import CheckpointRefused, NoSuchKey
from p2pstore.gossip.checkpoint_records import HeadBody, SwitchBody, checkpoint_digest
from p2pstore.gossip.gossip_messages import ControlKind, Delta
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    MAX_PARTICIPATIONS,
    ClusterRecord,
    ClusterRecordKind,
    Participation,
    TakesPart,
    format_peer_id,
    read_peer_record,
    sign_cluster_record,
)
from p2pstore.objects import unix_seconds_from_clock
from p2pstore.wire import Message, encode_body
from tests.unit.core_harness import NAMESPACE, Harness, Other, clock_at

V1, V2, V3 = b"1" * 16, b"2" * 16, b"3" * 16


@pytest.fixture
def world() -> Harness:
    return Harness(others=3)


def digest(other: Any, name: str = "model") -> bytes:
    return checkpoint_digest(NAMESPACE, name, other.peer_id)


def head(version: bytes = V1, name: str = "model", **more: Any) -> HeadBody:
    return HeadBody(NAMESPACE, name, version, 100, 1 << 30, 3, 256, **more)


def hear(
    world: Harness,
    signer: Other,
    body: Message,
    clock: int = 1,
    name: bytes | None = None,
    kind: int = ClusterRecordKind.CHECKPOINT_HEAD,
) -> None:
    """Gossip brings a signed record."""
    record = ClusterRecord(
        CLUSTER_RECORD_FORMAT,
        int(kind),
        digest(signer) if name is None else name,
        clock_at(clock),
        1,
        signer.peer_id,
        body=encode_body(body),
    )
    delta = Delta([], [], [sign_cluster_record(record, signer.signer)], [])
    world.gossip.serve(world.others[0].peer_id, ControlKind.DELTA, delta, world.now)
    world.core.gossip_arrived(world.now)


def publish(world: Harness, version: bytes = V1, name: str = "model") -> Any:
    return world.core.checkpoints.publish(head(version, name), world.now)


# --- heads and switches ------------------------------------------------------------------------


def test_what_is_published_is_kept_spread_and_found(world: Harness) -> None:
    checkpoints = world.core.checkpoints
    seen = checkpoints.version
    published = publish(world)
    assert checkpoints.version != seen, "waiters for news hear of it"
    assert checkpoints.find(NAMESPACE, "model") == published
    assert (published.version, published.publisher) == (V1, world.core.peer_id)
    assert published.body.total_bytes == 1 << 30
    assert len(world.effects(SaveClusterRecord)) == 1
    assert world.gossip.cluster_records.has_rumors


def test_a_newer_version_takes_the_place_and_names_the_one_before(world: Harness) -> None:
    first = publish(world)
    world.now -= 5.0  # the wall clock went back
    world.core.clock.latest = 0
    second = publish(world, V2)
    assert second.clock > first.clock
    assert second.body.previous == V1
    assert publish(world, V2).body.previous == V1, "the same again is no newer version"
    assert [each.version for each in world.core.checkpoints.heads()] == [V2]


def test_a_removed_name_is_gone_until_it_is_published_again(world: Harness) -> None:
    checkpoints = world.core.checkpoints
    published = publish(world)
    checkpoints.switch(NAMESPACE, "model", V1, world.now)
    assert checkpoints.remove(NAMESPACE, "model", world.now).gone
    assert checkpoints.switched(published.digest) is None, "a removed version is not fetched"
    assert checkpoints.heads() == []
    with pytest.raises(NoSuchKey):
        checkpoints.find(NAMESPACE, "model")
    with pytest.raises(NoSuchKey):
        checkpoints.remove(NAMESPACE, "model", world.now)
    publish(world, V2)
    assert checkpoints.find(NAMESPACE, "model").version == V2


def test_only_the_publisher_switches(world: Harness) -> None:
    checkpoints = world.core.checkpoints
    hear(world, world.others[0], head())
    with pytest.raises(NoSuchKey, match="peer-1 does: ask there"):
        checkpoints.switch(NAMESPACE, "model", V1, world.now)
    published = publish(world)
    checkpoints.switch(NAMESPACE, "model", V1, world.now)
    switch = checkpoints.switched(published.digest)
    assert switch is not None
    assert (switch.version, switch.publisher) == (V1, world.core.peer_id)


def test_names_that_cannot_be(world: Harness) -> None:
    for name in ("", "a b", "a@b", "x" * 256, "a\n"):
        with pytest.raises(CheckpointRefused):
            publish(world, name=name)
    with pytest.raises(ValueError, match="16 bytes"):
        publish(world, b"short")


def test_no_peer_takes_the_place_of_another_publisher(world: Harness) -> None:
    """A member that signs a head for another's name digest is ignored, and what came with it is not."""
    good, bad = world.others[:2]
    records = world.gossip.cluster_records
    hear(world, good, head())
    hear(world, bad, head(V2), clock=2, name=digest(good))
    hear(
        world,
        bad,
        SwitchBody(NAMESPACE, "model", V2),
        clock=2,
        name=digest(good),
        kind=ClusterRecordKind.CHECKPOINT_SWITCH,
    )
    for nonsense in (head(b"short"), head(name="other"), head(name="")):
        hear(world, good, nonsense, clock=3)
    assert world.core.checkpoints.find(NAMESPACE, "model").version == V1
    assert len(records) == 1
    hear(world, good, SwitchBody(NAMESPACE, "model", V1), kind=ClusterRecordKind.CHECKPOINT_SWITCH)
    assert len(records) == 2


# --- whom to trust -----------------------------------------------------------------------------


def test_of_several_publishers_none_is_guessed(world: Harness) -> None:
    one, two, _ = world.others
    checkpoints = world.core.checkpoints
    hear(world, one, head())
    assert list(map(checkpoints.trusts, checkpoints.heads())) == [True], "no other publisher to choose"
    hear(world, two, head(V2))
    assert list(map(checkpoints.trusts, checkpoints.heads())) == [False, False]
    with pytest.raises(ValueError, match=r"2 publishers: .*\(peer-\d\), .*\(peer-\d\); choose"):
        checkpoints.find(NAMESPACE, "model")
    assert checkpoints.find(NAMESPACE, "model", two.peer_id).version == V2
    assert checkpoints.find(NAMESPACE, "model").version == V2, "it is trusted from now on"
    trusted = [each.publisher for each in checkpoints.heads() if checkpoints.trusts(each)]
    assert trusted == [two.peer_id]


def test_the_first_publisher_that_was_seen_stays_the_only_one(world: Harness) -> None:
    one, two, _ = world.others
    checkpoints, publishers = world.core.checkpoints, world.core.publishers
    hear(world, one, head())
    assert checkpoints.find(NAMESPACE, "model").publisher == one.peer_id
    version = publishers.version
    hear(world, two, head(V2), clock=2)
    (note,) = world.notes("publisher")
    assert "is ignored" in note
    assert checkpoints.find(NAMESPACE, "model").version == V1
    assert publishers.version == version
    checkpoints.find(NAMESPACE, "model")
    assert world.notes("publisher") == [], "said once"
    hear(world, one, head(gone=True), clock=3)
    with pytest.raises(NoSuchKey, match="the one that this peer trusts for that name; to trust"):
        checkpoints.find(NAMESPACE, "model")
    assert checkpoints.find(NAMESPACE, "model", two.peer_id).version == V2
    (note,) = world.notes("publisher")
    assert "is trusted from now on" in note


def test_who_publishes_a_name_trusts_itself_for_it(world: Harness) -> None:
    hear(world, world.others[0], head())
    world.core.checkpoints.find(NAMESPACE, "model")
    publish(world, V2)
    assert world.core.checkpoints.find(NAMESPACE, "model").version == V2


def test_a_publisher_that_is_gone_for_good_may_be_forgotten_here(world: Harness) -> None:
    one, two, _ = world.others
    checkpoints, publishers = world.core.checkpoints, world.core.publishers
    hear(world, one, head())
    checkpoints.find(NAMESPACE, "model")
    hear(world, two, head(V2), clock=2)
    before = checkpoints.version, publishers.version
    assert checkpoints.forget(NAMESPACE, "model", one.peer_id).version == V1
    assert checkpoints.version != before[0], "waiters for the name look again"
    assert publishers.version > before[1], "to be saved"
    assert [each.publisher for each in checkpoints.heads(NAMESPACE)] == [two.peer_id]
    assert checkpoints.find(NAMESPACE, "model").version == V2
    with pytest.raises(NoSuchKey, match="publishes no checkpoint 'model'"):
        checkpoints.forget(NAMESPACE, "model", one.peer_id)
    with pytest.raises(NoSuchKey, match="publishes no checkpoint 'model'"):
        checkpoints.find(NAMESPACE, "model", one.peer_id)
    hear(world, one, head(V3), clock=9)
    assert checkpoints.find(NAMESPACE, "model", one.peer_id).version == V3, "it is there again"
    publish(world, V1)
    with pytest.raises(ValueError, match="this peer's own: remove it"):
        checkpoints.forget(NAMESPACE, "model", world.core.peer_id)

    again = Harness().core.publishers
    again.load([], publishers.forgotten)
    assert again.forgotten == publishers.forgotten


def test_pins_are_bounded_and_survive(world: Harness) -> None:
    publishers, again = world.core.publishers, Harness().core.publishers
    peer_id = world.others[0].peer_id
    for number in range(MAX_PINS + 1):
        publishers.pin(NAMESPACE, f"name-{number}", peer_id)
        publishers.pin(NAMESPACE, "name-0", peer_id)
    again.load(publishers.pins, [])
    assert len(again.pins) == MAX_PINS
    assert again.pinned(NAMESPACE, "name-0") == peer_id, "used all the time"
    assert again.pinned(NAMESPACE, "name-1") is None
    assert again.version == 0, "nothing to save"


# --- who takes part ----------------------------------------------------------------------------


def part(version: bytes = V1, state: int = TakesPart.FETCHING, **more: Any) -> Participation:
    return Participation(b"n" * 16, version[:8], int(state), **more)


def test_participants_are_the_living_that_move_pieces(world: Harness) -> None:
    one, two, three = world.others
    checkpoints, parts = world.core.checkpoints, world.core.participations
    seen = checkpoints.version
    world.offer(one, checkpoints=[part(), part(V2, TakesPart.SEEDING)])
    world.offer(two, checkpoints=[part(state=TakesPart.FAILED), part(b"", TakesPart.FOLLOWING)])
    world.offer(three, checkpoints=[part(state=99)])
    assert checkpoints.version != seen
    seen = checkpoints.version
    world.offer(three, checkpoints=[part(state=99)], load_permille=7)
    assert checkpoints.version == seen, "nothing new of checkpoints"
    assert parts.participants(V1) == {one.member: part()}
    assert parts.participants(V2) == {one.member: part(V2, TakesPart.SEEDING)}
    assert set(parts.parts_of(b"n" * 16)) == {one.member, two.member, three.member}
    seen = checkpoints.version
    world.die(one)
    assert parts.participants(V1) == {}
    assert checkpoints.version != seen, "a death is news"


def test_a_member_has_a_limited_number_of_parts(world: Harness) -> None:
    parts = [part(bytes([number]) * 16) for number in range(MAX_PARTICIPATIONS + 1)]
    world.offer(world.others[0], checkpoints=parts)
    assert world.core.participations.participants(bytes([MAX_PARTICIPATIONS - 1]) * 16)
    assert not world.core.participations.participants(bytes([MAX_PARTICIPATIONS]) * 16)


def told(world: Harness) -> list[Participation]:
    return list(read_peer_record(world.gossip.record(world.now)).checkpoints)


def sequence(world: Harness) -> int:
    return read_peer_record(world.gossip.record(world.now)).sequence


def test_own_parts_are_told_but_not_each_step_of_them(world: Harness) -> None:
    parts = world.core.participations
    world.pass_time(5.0)
    before = sequence(world)
    parts.take_part(part(), world.now)
    world.pass_time(0.01)
    assert told(world) == [part()], "the first at once"
    for done in range(1, 501):
        parts.take_part(part(done_permille=done), world.now)
        world.pass_time(0.01)
    assert 1 <= sequence(world) - before <= 3
    world.pass_time(5.0)
    assert told(world) == [part(done_permille=500)]
    before = sequence(world)
    parts.take_part(part(done_permille=509), world.now)
    world.pass_time(5.0)
    assert sequence(world) == before, "less than a percent is no news"
    parts.take_part(part(state=TakesPart.VERIFIED, done_permille=1000), world.now)
    world.pass_time(0.01)
    assert told(world) == [part(state=TakesPart.VERIFIED, done_permille=1000)]
    parts.take_no_part(b"n" * 16, V1, world.now)
    world.pass_time(1.1)
    assert told(world) == []


def test_a_follower_says_what_it_is_to_use_beside_what_moves(world: Harness) -> None:
    parts, name, now = world.core.participations, b"n" * 16, world.now
    parts.follow(name, b"", TakesPart.FOLLOWING, b"", now)
    assert parts.own == [Participation(name, b"", TakesPart.FOLLOWING, 0, True)]
    parts.follow(name, V1, TakesPart.FOLLOWING, b"", now)
    parts.take_part(part(V1, done_permille=300), now)
    assert parts.own == [part(V1, done_permille=300, follows=True)]
    parts.follow(name, V1, TakesPart.FAILED, b"", now, "disk full")
    assert parts.own == [part(V1, TakesPart.FAILED, follows=True, why="disk full")]
    parts.take_part(part(V1, TakesPart.SEEDING, done_permille=1000), now)
    parts.follow(name, V1, TakesPart.FOLLOWING, b"", now)
    assert parts.own == [part(V1, follows=True)], "it was fetched to another directory"
    parts.follow(name, V1, TakesPart.VERIFIED, b"", now)
    used = part(V1, TakesPart.SEEDING, done_permille=1000, follows=True)
    assert parts.own == [used]
    parts.follow(name, V2, TakesPart.FOLLOWING, V1, now)
    assert parts.own == [
        part(V1, TakesPart.SEEDING, done_permille=1000),
        part(V2, TakesPart.FOLLOWING, follows=True, current=V1[:8]),
    ]
    parts.take_no_part(name, V1, now)
    parts.follow_no_more(name, now)
    assert parts.own == []


def test_a_follower_knows_how_far_behind_it_is(world: Harness) -> None:
    one = world.others[0]
    checkpoints, parts, now = world.core.checkpoints, world.core.participations, world.now
    hear(world, one, head())
    (newest,) = checkpoints.heads()
    assert parts.followed == []
    parts.follow(newest.digest, V1, TakesPart.FOLLOWING, b"", now)
    (followed,) = parts.followed
    assert (followed.ready, followed.current) == (False, True), "nothing was switched to so far"
    parts.follow(newest.digest, V1, TakesPart.VERIFIED, b"", now)
    assert parts.followed[0].ready
    switch = SwitchBody(NAMESPACE, "model", V1)
    hear(world, one, switch, clock=2, kind=ClusterRecordKind.CHECKPOINT_SWITCH)
    (followed,) = parts.followed
    assert not followed.current
    assert followed.behind_since == unix_seconds_from_clock(clock_at(2))
    parts.follow(newest.digest, V1, TakesPart.VERIFIED, V1, now)
    (followed,) = parts.followed
    assert (followed.current, followed.behind_since) == (True, None)
    hear(world, one, head(V2), clock=3)
    (followed,) = parts.followed
    assert (followed.ready, followed.current) == (False, True), "the others use the old one, too"
    hear(world, one, head(V2, gone=True), clock=4)
    assert parts.followed == []


def test_followers_and_those_who_follow_no_more(world: Harness) -> None:
    one, two, three = world.others
    parts, name = world.core.participations, b"n" * 16
    follows = part(V1, TakesPart.VERIFIED, follows=True)
    for each in (one, two, three):
        world.offer(each, checkpoints=[part(V2, TakesPart.SEEDING), follows])
    assert parts.participants(V1) == {}, "a verified part serves no pieces"
    assert parts.followers(name) == dict.fromkeys((one.member, two.member, three.member), follows)
    world.die(one)
    world.offer(two, checkpoints=[])
    world.offer(three, leaving=True, checkpoints=[follows])
    assert parts.followers(name) == {}
    members = [one.member, two.member, three.member]
    assert parts.gone_from(name, members) == [two.member, three.member]


def test_progress_is_told_less_often_in_a_large_cluster() -> None:
    world = Harness(others=190)
    parts = world.core.participations
    parts.take_part(part(), world.now)
    moments = []
    for done in range(1, 400):
        parts.take_part(part(done_permille=done), world.now)
        before = told(world)
        world.pass_time(0.1)
        if told(world) != before and done > 20:
            moments.append(round(world.core.unix(world.now), 1))
    assert [round(moment % 100) for moment in moments] == [10, 20, 30], "as at all others"


def test_what_failed_says_why_in_few_words(world: Harness) -> None:
    world.core.participations.take_part(part(state=TakesPart.FAILED, why="ä" * 1000), world.now)
    world.pass_time(0.01)
    (said,) = told(world)
    assert said.why == "ä" * 60
    world.pass_time(602.0)
    assert told(world) == [], "it is told for a while"


def test_older_peers_take_no_part(world: Harness) -> None:
    record = read_peer_record(world.gossip.record(world.now))
    shorter = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_body(record))[:-1])
    assert msgspec.msgpack.decode(shorter, type=type(record)).checkpoints == []


def test_a_name_of_another_publisher_is_not_free_until_that_is_forgotten(world: Harness) -> None:
    one, two, _ = world.others
    checkpoints, publishers = world.core.checkpoints, world.core.publishers
    checkpoints.check_free(NAMESPACE, "model")
    hear(world, one, head())
    hear(world, two, head(V2), clock=2)
    publishers.pin(NAMESPACE, "model", two.peer_id)
    with pytest.raises(CheckpointRefused, match=f"forget .*--forget {format_peer_id(two.peer_id)}"):
        checkpoints.check_free(NAMESPACE, "model")
    checkpoints.check_free(NAMESPACE, "other")
    checkpoints.check_free("another", "model")
    checkpoints.forget(NAMESPACE, "model", two.peer_id)
    with pytest.raises(CheckpointRefused, match="belongs to"):
        checkpoints.check_free(NAMESPACE, "model")
    hear(world, one, head(gone=True), clock=5)
    checkpoints.check_free(NAMESPACE, "model")
    # Others keep their copies; the peer that removed it has none.
    publish(world, V3)
    hear(world, one, head(V2), clock=6)
    checkpoints.check_free(NAMESPACE, "model")
    checkpoints.remove(NAMESPACE, "model", world.now)
    with pytest.raises(CheckpointRefused, match="belongs to"):
        checkpoints.check_free(NAMESPACE, "model")
