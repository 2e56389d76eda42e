"""Forgeries of another's log that are refused: removals, additions, tails, replays, snapshots, pushes and hints."""

from typing import Any

import pytest
from msgspec.structs import replace

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.digests import Run, pack_runs
from p2pstore.gossip.gossip_messages import ControlKind, Delta, FetchSnapshot, LogChunk, SnapshotHead
from p2pstore.gossip.locations.log import MAX_OWN_RECORDS, REMOVED, SignedRun, sign_run
from p2pstore.gossip.locations.snapshots import UNSIGNED_RECORDS, check_snapshot
from p2pstore.gossip.records import LOCATION_BYTES, LogHead, PeerId, sign_peer_record
from p2pstore.home_messages import Push
from simulation.gossip_data import take_push
from simulation.signer import SimulatedVerifier
from tests.present import present
from tests.unit.gossip_network import Network, digest_of, location, operations_after, peer_record


class World:
    """An owner, a reader and a relay that all agree; then the relay lies."""

    def __init__(self, **config: Any) -> None:
        self.net = Network(1)
        self.owner, self.reader, self.liar = self.net.start_all(3)
        assert self.net.run(20, self.net.converged)
        for key in range(3):
            self.owner.hold(location(key))
        assert self.net.run(5, self.net.converged)
        self.net.problems.clear()

    @property
    def next_sequence(self) -> int:
        return self.owner.gossip.log.sequence + 1

    def tell(self, delta: Delta) -> None:
        """The liar tells the reader."""
        self.net.serve(self.liar, self.reader, ControlKind.DELTA, delta)

    def chunk(self, operations: bytes, signature: bytes | None = None, **place: int) -> LogChunk:
        incarnation = place.get("incarnation", self.owner.gossip.incarnation)
        first = place.get("first", self.next_sequence)
        if signature is None:  # its own
            signature = sign_run(self.liar.signer, incarnation, first, operations)
        return LogChunk(self.owner.gossip.member, incarnation, first, operations, signature)

    def forge(self, *chunks: LogChunk) -> None:
        self.tell(Delta([], list(chunks), [], []))

    def forge_in_runs(self, chunk: LogChunk) -> None:
        """The same in the form that peers use who know the same members."""
        of = self.reader.gossip.knowledge.table.current().of
        place = of.members.tolist().index(chunk.member)
        run = SignedRun(chunk.first_sequence, chunk.operations, chunk.signature)
        self.tell(Delta([], [], [], [], of.hash, *pack_runs([Run(place, run)])))

    def holders(self, key: int) -> list[bytes]:
        found = self.reader.gossip.directory.holders(digest_of(key))
        return [self.name(each.member) for each in found if each.record == location(key)]

    def name(self, member: int) -> bytes:
        state = present(self.reader.gossip.membership.resolve(member))
        return state.peer_id

    def check(self) -> None:
        """The reader knows exactly what the owner holds, for itself and for peers that ask it."""
        assert self.reader.knows(self.owner)
        for key in range(3):
            assert self.holders(key) == [self.owner.peer_id]


def removal(key: int) -> bytes:
    packed = location(key).encode()
    return packed[:-1] + bytes((packed[-1] | REMOVED,))


FORGERIES = {
    "removal": removal(1),
    "addition": location(9).encode(),
    "newer version": location(1, 99, 7).encode(),
    "much of it": b"".join(location(key, 50).encode() for key in range(100, 400)),
}


@pytest.mark.parametrize("operations", FORGERIES.values(), ids=list(FORGERIES))
def test_what_the_owner_did_not_sign_counts_for_nothing(operations: bytes) -> None:
    for signature in (b"", bytes(64), b"x" * 63, None):
        world = World()
        world.forge(world.chunk(operations, signature))
        world.check()
        assert world.holders(9) == []
        world.forge_in_runs(world.chunk(operations, bytes(64)))
        world.check()


def test_a_forged_tail_does_not_keep_the_true_one_out() -> None:
    world = World()
    world.forge(world.chunk(removal(1) + location(8).encode()))
    world.owner.hold(location(4))
    assert world.net.run(1, lambda: world.reader.knows(world.owner))
    world.check()
    assert world.holders(4) == [world.owner.peer_id]
    assert world.net.snapshots == 0


def test_true_runs_count_only_at_their_place_of_their_log() -> None:
    world = World()
    log = world.owner.gossip.log
    first = log.since(0, 1 << 20)[0]
    world.forge(world.chunk(first.operations, first.signature, first=1))  # known
    world.check()
    assert world.net.problems == []
    world.forge(world.chunk(first.operations, first.signature))
    world.check()
    assert len(world.net.problems) == 1
    for incarnation in (log.incarnation - 1, log.incarnation + 1):
        world.forge(world.chunk(first.operations, first.signature, first=1, incarnation=incarnation))
        world.check()


def test_a_run_of_an_earlier_life_is_none_of_the_next() -> None:
    world = World()
    earlier = world.owner.gossip.log.since(0, 1 << 20)[0]
    world.owner.release(digest_of(0))
    world.owner.gossip.log.restart(world.owner.gossip.incarnation + 5)
    world.owner.rest()
    state = present(world.reader.gossip.membership.get(world.owner.peer_id))
    assert world.net.run(5, lambda: state.record_incarnation == world.owner.gossip.incarnation)
    world.forge(world.chunk(earlier.operations, earlier.signature, first=1))
    assert world.net.run(5, lambda: world.reader.knows(world.owner))
    assert world.holders(0) == []


def test_who_forged_once_costs_nothing_any_more_and_is_named_once() -> None:
    world = World()
    checked: list[PeerId] = []

    class Counting(SimulatedVerifier):
        def verify(self, peer_id: PeerId, message: bytes, signature: bytes) -> bool:
            checked.append(peer_id)
            return super().verify(peer_id, message, signature)

    world.reader.gossip.checks.verifier = Counting()
    for step in range(300):
        world.net.now += 0.02
        world.forge(*[world.chunk(FORGERIES["much of it"])] * (1 + step % 3))
        world.check()
    assert len(checked) == 1
    wrong = world.reader.gossip.checks.wrong_runs
    assert wrong.take_news() == {world.liar.peer_id: world.owner.peer_id}
    assert wrong.take_news() == {}
    # Neither the owner nor any other peer is blamed; and operations that the liar signs itself are taken.
    world.owner.hold(location(4))
    world.liar.hold(location(5))
    world.owner.rest()
    world.liar.rest()
    assert world.net.run(3, world.net.converged)
    assert wrong.take_news() == {}


def test_a_sender_that_starts_again_is_believed_again() -> None:
    world = World()
    world.forge(world.chunk(removal(1)))
    world.net.stop(2)
    world.liar = world.net.start(2)
    assert world.net.run(20, world.net.converged)
    world.owner.hold(location(4))
    run_at = world.next_sequence
    operations = operations_after(world.owner.gossip.log, run_at - 2)
    signature = sign_run(world.owner.signer, world.owner.gossip.incarnation, run_at - 1, operations)
    world.forge(world.chunk(operations, signature, first=run_at - 1))
    assert world.holders(4) == [world.owner.peer_id]


def test_a_relay_passes_on_runs_of_which_it_knew_the_beginning() -> None:
    """A snapshot may end in the middle of a run: its reader passes the whole run on all the same."""
    world = World()
    run = world.owner.gossip.log.since(0, 1 << 20)[0]
    assert len(run.operations) == 3 * LOCATION_BYTES
    directory, member = world.reader.gossip.directory, world.owner.gossip.member
    directory.forget(member)
    snapshot = check_snapshot(location(0).encode())
    assert directory.install_snapshot(
        member, world.owner.gossip.incarnation, 1, snapshot.set_hash, snapshot
    )
    assert directory.since(member, 1, 1 << 20) == []
    world.forge(world.chunk(run.operations, run.signature, first=1))
    world.check()
    assert directory.since(member, 2, 1 << 20) == [run]


# --- snapshots -------------------------------------------------------------------------------


def fetching(world: World, count: int) -> FetchSnapshot:
    """The reader is behind a head of `count` records that the owner signed, and fetches its snapshot."""
    gossip = world.reader.gossip
    state = present(gossip.membership.get(world.owner.peer_id))
    incarnation = world.owner.gossip.incarnation
    record = peer_record(
        0,
        incarnation=incarnation,
        sequence=state.record_sequence + 1_000,
        head=LogHead(1_000_000, count, 5),
    )
    signed = sign_peer_record(record, world.owner.signer)
    world.net.serve(world.owner, world.reader, ControlKind.DELTA, Delta([signed], [], [], []))
    for _ in range(20):
        world.net.now += 0.25
        for effect in gossip.tick(world.net.now):
            if isinstance(effect, FetchSnapshot):
                return effect
    raise AssertionError("no snapshot was asked for")


def test_a_snapshot_is_bounded_by_the_signed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    fetch = fetching(world, 30_000)
    assert fetch.most_bytes == (30_000 + UNSIGNED_RECORDS) * LOCATION_BYTES
    decoded: list[int] = []
    monkeypatch.setattr(
        "p2pstore.gossip.machine.check_snapshot", lambda packed: decoded.append(len(packed))
    )
    head = SnapshotHead(world.owner.gossip.incarnation, 1_000_001, 5)
    with pytest.raises(ProtocolError, match="a snapshot of"):
        world.reader.gossip.snapshot_fetched(
            fetch.token, head, bytes(fetch.most_bytes + LOCATION_BYTES), world.net.now
        )
    assert decoded == []
    assert not world.reader.gossip.directory.staging(fetch.member)


def test_a_snapshot_has_the_count_that_was_signed_with_its_place() -> None:
    world = World()
    fetch = fetching(world, 4)
    packed = location(7).encode()
    checked = check_snapshot(packed)
    head = SnapshotHead(world.owner.gossip.incarnation, 1_000_000, checked.set_hash)
    with pytest.raises(ProtocolError, match="hash that its owner signed"):
        world.reader.gossip.snapshot_fetched(fetch.token, head, packed, world.net.now)
    world.check()


def test_large_snapshots_are_fetched_one_at_a_time() -> None:
    net = Network(2)
    nodes = net.start_all(4)
    assert net.run(20, net.converged)
    reader = nodes[0].gossip
    for node in nodes[1:]:
        state = present(reader.membership.get(node.peer_id))
        head = LogHead(1 << 40, MAX_OWN_RECORDS, 5)
        reader.directory.observe_head(node.gossip.member, state.record_incarnation, head)
    now = net.now
    for _ in range(40):
        now += 0.1
        reader.tick(now)
        assert len(reader.questions.fetching()) <= 1
    assert len(reader.questions.fetching()) == 1


# --- pushes and hints ------------------------------------------------------------------------


def test_a_push_speaks_for_its_sender_only() -> None:
    world = World()
    own = world.liar.gossip.incarnation
    push = Push(own, [99], removal(1))
    take_push(world.reader.gossip, world.liar.gossip.member, push, world.net.now)
    world.check()
    push = Push(own, [99], location(9).encode())
    take_push(world.reader.gossip, world.liar.gossip.member, push, world.net.now)
    assert world.holders(9) == [world.liar.peer_id]


def test_what_a_home_says_of_another_member_shows_where_to_look_and_nothing_else() -> None:
    world = World()
    gossip, member, now = world.reader.gossip, world.owner.gossip.member, world.net.now
    far = world.owner.gossip.incarnation + 9, [1 << 50]
    for each in (location(1, 99).encode(), location(9).encode(), removal(2)):
        gossip.directory.heard(member, *far, each, now, hearsay=True)
    world.check()
    assert gossip.directory.holders(digest_of(9)) == []  # which is what others are answered
    digests = {digest_of(1), digest_of(9)}
    assert gossip.directory.held(digests, lambda _: range(100)) == {digest_of(1)}
    (hint,) = gossip.directory.holders(digest_of(9), hearsay=True)
    assert (hint.member, hint.hearsay) == (member, True)
    assert [each.record for each in gossip.directory.holders(digest_of(1), hearsay=True)] == [
        location(1)
    ]
    # The owner denies it, at the place where its log is: that ends the hint, whatever place it claimed.
    place = world.owner.gossip.incarnation, world.owner.gossip.log.sequence
    gossip.directory.mark_stale(member, digest_of(9), *place)
    assert gossip.directory.holders(digest_of(9), hearsay=True) == []
    gossip.directory.heard(member, far[0], [1 << 51], location(9).encode(), now, hearsay=True)
    assert gossip.directory.holders(digest_of(9), hearsay=True) == []


def test_a_hint_does_not_push_out_what_the_owner_said_itself() -> None:
    world = World()
    gossip, member, now = world.reader.gossip, world.owner.gossip.member, world.net.now
    incarnation = world.owner.gossip.incarnation
    own, forged = replace(location(7), slot=5), location(7, 99).encode()
    gossip.directory.heard(member, incarnation, [world.next_sequence], own.encode(), now)
    gossip.directory.heard(member, incarnation, [1 << 50], forged, now, hearsay=True)
    for hearsay in (False, True):
        (known,) = gossip.directory.holders(digest_of(7), hearsay=hearsay)
        assert known.record == own
