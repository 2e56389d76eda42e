"""Events about keys: what a consumer makes of them is what is held, whatever is lost on the way."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.core import key_events
from p2pstore.core.key_events import (
    BatchRing,
    EventFormat,
    KeyChanges,
    KeyEvent,
    block_hash,
    first_sequence,
    replayed,
)
from p2pstore.core.operation import AskPeer
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.records import LocationRecord, LogHead, Tier
from p2pstore.objects import Version, key_digest
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Named, Names
from p2pstore.wire import Code, Failure
from tests.event_consumer import EventSet
from tests.unit.cold_world import ColdWorld
from tests.unit.core_harness import NAMESPACE, OTHER_INCARNATION, Harness, digest_of
from tests.unit.gossip_network import operations_after, run_at
from tests.unit.location_set import iterate_locations

UNIX_MS = 1_800_000_000_000

# --- the format, by hand from its list of fields ---------------------------------------------------


def text(value: str) -> bytes:
    return bytes([0xA0 | len(value)]) + value.encode()


def envelope(number: int, kind: str, type_: str, medium: bytes) -> bytes:
    now = b"\xcf" + UNIX_MS.to_bytes(8)
    fields = [
        *((text("event_id"), bytes([number])), (text("timestamp"), now)),
        *((text("event_type"), text(kind)), (text("type"), text(type_))),
        *(
            (text(name), b"\xc0")
            for name in ("model_name", "block_size", "additional_salt", "lora_name")
        ),
        *((text("tenant_id"), text("default")), (text("backend_id"), text("a peer's id"))),
        *((text("medium"), medium), (text("dp_rank"), b"\0")),
    ]
    return b"".join(name + value for name, value in fields)


def about(key: str, hashes: bytes) -> bytes:
    return b"".join(
        (
            *(text("group_id"), b"\xc0", text("object_key"), text(key)),
            *(text("seq_hashes"), hashes, text("block_hashes"), hashes),
            *(text("base_block_idx"), b"\xc0"),
        )
    )


def test_golden_bytes_of_mooncakes_format() -> None:
    form = EventFormat("a peer's id")
    batch = form.batch([KeyEvent("0x2a", "cpu", True), KeyEvent("k/1", "disk", False)], UNIX_MS)
    stored = (
        b"\xde\0\x13" + envelope(1, "stored", "BlockStored", text("cpu")) + about("0x2a", b"\x91\x2a")
    )
    stored += text("parent_hash") + b"\xc0" + text("token_ids") + b"\xc0"
    removed = (
        b"\xde\0\x11" + envelope(2, "removed", "BlockRemoved", text("disk")) + about("k/1", b"\x90")
    )
    now = b"\xcf" + UNIX_MS.to_bytes(8)
    assert batch == b"\x93" + now + b"\x92" + stored + removed + b"\0"
    cleared = b"\x8c" + envelope(3, "cleared", "AllBlocksCleared", b"\xc0")
    assert form.cleared(UNIX_MS) == b"\x93" + now + b"\x91" + cleared + b"\0"
    assert form.batch([], UNIX_MS) == b"\x93" + now + b"\x90\0"


@pytest.mark.parametrize(
    ("key", "number"),
    [
        *(("12345", 12345), ("0x2a", 42), ("0XFF", 255), (str((1 << 64) - 1), (1 << 64) - 1)),
        *(
            (key, None)
            for key in ("", "0x", "-1", "123abc", " 1", "1_0", "not a hash", str(1 << 64), "²")
        ),
    ],
)
def test_keys_that_are_hashes(key: str, number: int | None) -> None:
    assert block_hash(key) == number


# --- a stream in a world of logs -------------------------------------------------------------------


class World:
    """A core, the logs of other members, the stream of its events, and a consumer behind a bad line."""

    def __init__(self, *, fleet: bool, others: int = 3) -> None:
        self.harness = Harness(others=others)
        self.directory = self.harness.gossip.directory
        self.fleet = fleet
        self.names: dict[bytes, tuple[str, str]] = {}
        self.logs = {other.member: OwnLog(OTHER_INCARNATION) for other in self.harness.others}
        self.hidden: set[int] = set()
        self.clock = 1
        self.consumer = EventSet()
        self.delayed: list[tuple[int, bytes]] = []
        self.fate = "arrives"
        self.pending: list[AskPeer] = []
        """Not answered yet."""
        self.start_stream()
        self.consumer.replayed(self.replay())

    def start_stream(self) -> None:
        """The peer's next life."""
        self.changes = KeyChanges(self.harness.core, NAMESPACE, fleet=self.fleet)
        self.form = EventFormat("id")
        self.ring = BatchRing(first_sequence(self.harness.core))
        self.publish(self.form.cleared(UNIX_MS))

    # --- what is held ------------------------------------------------------------------------

    def put(self, member: int, key: str, tier: Tier = Tier.DRAM, namespace: str = NAMESPACE) -> None:
        digest = key_digest(key, namespace)
        self.names[digest] = namespace, key
        self.clock += 1
        self.logs[member].add(LocationRecord(digest, Version(self.clock, 1, 1), 1, 1, tier))

    def drop(self, member: int, key: str, namespace: str = NAMESPACE) -> None:
        for record in iterate_locations(self.logs[member].snapshot()):
            if record.digest == key_digest(key, namespace):
                self.logs[member].remove_many([(record.digest, record.version)])

    def put_here(self, key: str) -> None:
        self.names[digest_of(key)] = NAMESPACE, key
        self.pending += self.harness.asks(DataKind.NAMES)
        self.harness.stored(key, b"value")

    def drop_here(self, key: str) -> None:
        if (entry := self.harness.find(key)) is not None:
            self.harness.core.objects.withdraw(entry, self.harness.now)

    def deliver(self, member: int) -> None:
        """The rest of a log reaches this peer."""
        log = self.logs[member]
        self.directory.observe_head(member, log.incarnation, LogHead())
        incarnation, sequence = self.directory.position(member)
        if incarnation == log.incarnation and (operations := operations_after(log, sequence)):
            self.directory.apply(member, incarnation, run_at(sequence + 1, operations))

    def install(self, member: int) -> None:
        """A snapshot reaches it in place of the operations."""
        log, head = self.logs[member], self.logs[member].head
        self.directory.observe_head(member, log.incarnation, head)
        snapshot = check_snapshot(log.snapshot())
        self.directory.install_snapshot(member, log.incarnation, head.sequence, head.set_hash, snapshot)

    def restart(self, member: int) -> None:
        """The member's next life holds half of what it held."""
        records = list(iterate_locations(self.logs[member].snapshot()))
        self.logs[member] = OwnLog(self.logs[member].incarnation + 1)
        for record in records[1::2]:
            self.logs[member].add(record)
        self.directory.observe_head(member, self.logs[member].incarnation, LogHead())

    def hide(self, member: int) -> None:
        self.directory.hide(member)
        self.hidden ^= {member}
        if member not in self.hidden:
            self.directory.show(member)

    @property
    def truth(self) -> set[tuple[str, str]]:
        """By the logs, as if told by an oracle."""
        logs = [self.harness.gossip.log]
        if self.fleet:
            logs += [log for member, log in self.logs.items() if member not in self.hidden]
        found = set()
        for log in logs:
            for record in iterate_locations(log.snapshot()):
                namespace, key = self.names[record.digest]
                media = {Tier.DRAM: ["cpu"], Tier.SSD: ["disk"], Tier.BOTH: ["cpu", "disk"]}[record.tier]
                found |= {(key, medium) for medium in media if namespace == NAMESPACE}
        return found

    # --- the stream --------------------------------------------------------------------------

    def take(self) -> None:
        events = self.changes.take(self.harness.now, 4)
        if events:
            self.publish(self.form.batch(events, UNIX_MS))

    def publish(self, payload: bytes) -> None:
        batch = self.ring.append(payload), payload
        match self.fate:
            case "arrives":
                self.arrive(batch)
            case "arrives twice":
                self.arrive(batch)
                self.arrive(batch)
            case "late":
                self.delayed.insert(0, batch)

    def arrive(self, batch: tuple[int, bytes]) -> None:
        if not self.consumer.live(*batch):
            self.consumer.replayed(self.replay())

    def replay(self) -> Iterator[tuple[int, bytes]]:
        return replayed(self.changes, self.ring, self.form, self.consumer.next, UNIX_MS)

    def late_ones(self) -> None:
        late, self.delayed = self.delayed, []
        for batch in late:
            self.arrive(batch)

    def tell(self) -> None:
        self.take()
        for ask in self.asks():
            self.answer(ask)
        self.take()

    def asks(self) -> list[AskPeer]:
        pending, self.pending = self.pending, []
        return pending + self.harness.asks(DataKind.NAMES)

    def answer(self, ask: AskPeer, reply: Any = "truth") -> None:
        if reply == "truth":
            assert isinstance(ask.request, Names)
            packed, wanted = ask.request.digests, ask.request.namespace
            found = [self.names[packed[at : at + 16]] for at in range(0, len(packed), 16)]
            reply = Named([key if namespace == wanted else "" for namespace, key in found])
        self.harness.answer(ask, reply)

    def settle(self) -> None:
        """All is told, and a last batch reaches the consumer."""
        for member in self.logs:
            self.deliver(member)
        while self.directory.work_pending:
            self.directory.work()
        self.fate = "arrives"
        for _ in range(1000):
            self.harness.now += 2.0
            self.take()
            asks = self.asks()
            for ask in asks:
                self.answer(ask)
            if not asks and not self.changes.behind and not self.changes.unnamed_count:
                break
        self.late_ones()
        self.publish(self.form.batch([], UNIX_MS))


KEYS = [f"k{number}" for number in range(6)]
TIERS = [Tier.DRAM, Tier.SSD, Tier.BOTH]
FATES = ["arrives", "arrives twice", "late", "lost"]
places = st.integers(0, 2)
steps = st.one_of(
    st.tuples(st.just("put"), places, st.sampled_from(KEYS), st.sampled_from(TIERS)),
    st.tuples(st.just("put"), places, st.sampled_from(KEYS), st.sampled_from(TIERS), st.just("other")),
    st.tuples(st.just("drop"), places, st.sampled_from(KEYS)),
    st.tuples(st.sampled_from(["put_here", "drop_here"]), st.sampled_from(KEYS)),
    st.tuples(st.sampled_from(["deliver", "deliver", "install", "restart", "hide"]), places),
    st.tuples(st.sampled_from(["tell", "tell", "take", "answer", "silence"])),
    st.tuples(st.sampled_from(["late_ones", "start_stream"])),
    st.tuples(st.just("fate"), st.sampled_from(FATES)),
    st.tuples(st.just("replay"), st.integers(0, 3)),
)


@pytest.mark.parametrize("fleet", [False, True])
@settings(max_examples=200)
@given(st.lists(steps, max_size=60))
def test_a_consumer_has_exactly_what_is_held(fleet: bool, history: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_events, "STEP_DIGESTS", 2)
        live_through(World(fleet=fleet), history)


def live_through(world: World, history: list[tuple[Any, ...]]) -> None:
    members = list(world.logs)
    for name, *arguments in history:
        match name:
            case "put" | "drop":
                getattr(world, name)(members[arguments[0]], *arguments[1:])
            case "deliver" | "install" | "restart" | "hide":
                getattr(world, name)(members[arguments[0]])
            case "fate":
                world.fate = arguments[0]
            case "answer" | "silence":
                for ask in world.asks():
                    world.answer(ask, "truth" if name == "answer" else None)
            case "replay":  # while more is published
                world.consumer.next = 0 if arguments[0] else world.consumer.next
                batches = []
                for batch in world.replay():
                    batches.append(batch)
                    if len(batches) <= arguments[0]:
                        world.fate = "lost"
                        world.put_here(f"while {len(batches)}")
                        world.take()
                world.consumer.replayed(batches)
            case _:
                if name == "start_stream":
                    world.harness.core.clock.latest = world.ring.last + 1
                getattr(world, name)(*arguments)
    world.settle()
    assert world.consumer.held == world.truth


def test_large_logs_are_looked_at_in_steps_and_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_events, "RING_BATCHES", 50)
    world = World(fleet=True)
    first, second, third = world.logs
    for number in range(1000):
        world.put(first, f"a{number}")
        world.put(second, f"a{number}", Tier.SSD)
        world.put(third, f"b{number}", namespace="other")
    world.install(first)
    world.settle()
    assert world.consumer.held == world.truth
    assert len(world.truth) == 2000
    late = EventSet()
    late.replayed(replayed(world.changes, world.ring, world.form, 0, UNIX_MS))
    assert (late.held, late.next) == (world.truth, world.ring.last + 1)
    # Behind the ring: begins above what it asked for, so that it is seen, and ends where the stream is.
    batches = list(replayed(world.changes, world.ring, world.form, world.ring.last - 60, UNIX_MS))
    assert world.ring.last - 60 < batches[0][0]
    assert [number for number, _ in batches] == list(range(batches[0][0], world.ring.last + 1))
    # Ahead of the stream, as after another one at the same endpoint.
    ahead = EventSet()
    ahead.next = world.ring.last + 100
    ahead.replayed(replayed(world.changes, world.ring, world.form, ahead.next, UNIX_MS))
    assert (ahead.held, ahead.next) == (world.truth, world.ring.last + 1)
    world.hide(first)
    world.settle()
    assert world.consumer.held == world.truth
    assert len(world.truth) == 1000
    world.directory.drop(second)
    del world.logs[second]
    world.settle()
    assert world.consumer.held == set()


def test_memory_and_ssd_are_two_media() -> None:
    world = ColdWorld()
    changes = KeyChanges(world.core, NAMESPACE, fleet=False)
    world.cool("k", b"v" * 9000)
    told = [event for event in changes.take(world.now, 100) if event.key == "k"]
    assert told == [KeyEvent("k", "disk", True)]


def test_each_life_counts_above_the_one_before_though_the_clock_went_back() -> None:
    harness = Harness()
    harness.core.clock.latest = 1 << 59
    assert first_sequence(harness.core) == 1 << 59
    harness.core.clock.latest = 0
    assert first_sequence(harness.core) == harness.core.incarnation << 16
    assert (1 << 42) << 16 < 1 << 63  # an incarnation of the year 2109


# --- names from others -----------------------------------------------------------------------------


def test_a_lying_holder_renames_nothing_and_another_is_asked() -> None:
    world = World(fleet=True)
    first, second, _ = world.logs
    for member in (first, second):
        world.put(member, "k")
        world.deliver(member)
    lies = [Named(["other key"]), Named(["k", "k"]), Named(["x" * 5000]), Named([""])]
    world.take()
    for lie in lies:
        (ask,) = world.asks()
        world.answer(ask, lie)
        world.take()
        (again,) = world.asks()
        assert again.peer_id != ask.peer_id
        assert not world.consumer.held
        world.answer(again)
        world.take()
        assert world.consumer.held == {("k", "cpu")}
        for change in (world.drop, world.put):
            for member in (first, second):
                change(member, "k")
                world.deliver(member)
            world.take()


def test_holders_of_an_older_version_are_asked_once() -> None:
    world = World(fleet=True)
    first = next(iter(world.logs))
    world.put(first, "k")
    world.deliver(first)
    world.take()
    (ask,) = world.asks()
    world.answer(ask, Failure(int(Code.UNSUPPORTED), "kind 42 is unknown to this version"))
    for _ in range(3):
        world.take()
    assert not world.asks()
    assert not world.changes.unnamed_count


def test_a_silent_holder_is_asked_again_later() -> None:
    world = World(fleet=True)
    first = next(iter(world.logs))
    world.put(first, "k")
    world.deliver(first)
    world.take()
    (ask,) = world.asks()
    world.answer(ask, None)
    world.take()
    assert not world.asks()
    world.harness.now += 1.0
    world.take()
    (ask,) = world.asks()
    world.answer(ask)
    world.take()
    assert world.consumer.held == {("k", "cpu")}


def test_names_are_given_of_what_is_held_in_that_namespace() -> None:
    world = ColdWorld(others=1)
    world.stored("k", b"value")
    world.cool("cold", b"v" * 9000)
    digests = digest_of("k") + digest_of("cold") + digest_of("absent")
    asker = world.others[0]
    assert world.serve(asker, DataKind.NAMES, Names(NAMESPACE, digests)) == Named(["k", "cold", ""])
    assert world.serve(asker, DataKind.NAMES, Names("other", digests)) == Named(["", "", ""])


def test_a_peer_that_does_not_know_the_fleet_tells_nothing_of_it() -> None:
    assert KeyChanges(Harness(directory="partitioned").core, NAMESPACE, fleet=False).knows_all
    assert not KeyChanges(Harness(directory="partitioned").core, NAMESPACE, fleet=True).knows_all


def test_after_a_pause_all_is_told_anew() -> None:
    world = World(fleet=True)
    world.put_here("here")
    world.put(next(iter(world.logs)), "there", Tier.BOTH)
    world.settle()
    assert len(world.consumer.held) == 3
    world.changes.forget()
    world.publish(world.form.cleared(UNIX_MS))
    assert not world.consumer.held
    world.settle()
    assert world.consumer.held == world.truth
    assert world.harness.core.counters["key_events"] == 6


def test_a_number_of_another_stream_is_answered_in_batches_of_a_size_to_send() -> None:
    world = World(fleet=False)
    world.start_stream()
    keys = [f"key {number}" for number in range(10_000)]
    world.changes.told |= {digest_of(key): (key, 1) for key in keys}
    for start in (0, 1, world.ring.first - 1, world.ring.last + 100, (1 << 64) - 1):
        batches = [*replayed(world.changes, world.ring, world.form, start, UNIX_MS)]
        assert max(len(payload) for _, payload in batches) < 2 << 20
        numbers = [number for number, _ in batches]
        assert numbers == [*range(numbers[0], world.ring.last + 1)]
        consumer = EventSet()
        consumer.replayed(batches)
        assert consumer.keys == set(keys)
