"""The cost of members and of past events: memory, garbage collections, and time a few times a second."""

import gc
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import msgspec
import pytest

from p2pstore.gossip import incoming
from p2pstore.gossip.exchange.digests import DigestTable
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import (
    REQUESTS,
    Ask,
    Claim,
    ControlKind,
    Delta,
    Effect,
    Ping,
    Status,
)
from p2pstore.gossip.homes import partition_homes
from p2pstore.gossip.homes.partition_homes import HomeTable, choose_homes
from p2pstore.gossip.homes.partitioned_directory import FOLLOWED_AT_ONCE
from p2pstore.gossip.locations.views import DirectoryConfig
from p2pstore.gossip.members.member_table import PARSED_RECORDS, MembershipConfig
from p2pstore.gossip.members.membership import Membership
from p2pstore.gossip.members.suspicion import JUDGED_AT_ONCE
from p2pstore.gossip.records import (
    LogHead,
    PeerRecord,
    SegmentOffer,
    SignedRecord,
    TransportOffer,
    sign_peer_record,
)
from p2pstore.wire import decode_body, encode_body
from simulation.signer import SimulatedSigner, peer_id_of
from tests.unit.gossip_network import Network, bury, digest_of, inform_of_death, location, peer_record

MEMBERS = 1000
LIVING_BYTES = 2000
GONE_BYTES = 1600
"""Half of it is the signed record."""


def full_record(number: int) -> PeerRecord:
    """As a peer of two interfaces describes itself."""
    hosts = [f"10.0.{number >> 8}.{number & 255}", f"192.168.{number >> 8}.{number & 255}"]
    return peer_record(
        number,
        incarnation=1_800_000_000_000 + number,
        sequence=5,
        host_id=b"h%031d" % number,
        control=[f"{host}:17946" for host in hosts],
        data=[f"{host}:17947" for host in hosts],
        socket=f"/run/user/1000/p2pstore/peer-{number}.sock",
        transports=[TransportOffer("tcp"), TransportOffer("shm", b"parameters")],
        segments=[SegmentOffer(b"s%015d" % number, 64 << 30)],
        memory_capacity=64 << 30,
        memory_used=number * 12345,
        software="p2pstore 0.1.0",
    )


class Observer:
    """One peer that hears of many others, and gets no answers."""

    def __init__(self) -> None:
        self.now = 1.0
        self.gossip = Network(1, GossipConfig(forget_seconds=1.0)).start(0, None).gossip
        self.gossip.membership._met = MEMBERS  # others' word for those that it has not met is enough
        self.gossip.tick(self.now)
        self.turn_after_each = True

    def answer(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.gossip.answered(effect.token, None, self.now)

    def turn(self, seconds: float = 0.26) -> None:
        self.now += seconds
        self.answer(self.gossip.tick(self.now))
        self.gossip.next_tick(self.now)
        self.gossip.take_changes()

    def hear_of(self, first: int, last: int) -> None:
        for start in range(first, last, 40):
            records = [full_record(number) for number in range(start, min(start + 40, last))]
            signed = [sign_peer_record(each, SimulatedSigner(each.peer_id)) for each in records]
            body = encode_body(Delta(signed, [], [], []))
            delta = decode_body(REQUESTS[ControlKind.DELTA], body)
            self.gossip.serve(peer_id_of(1), ControlKind.DELTA, delta, self.now)
            if self.turn_after_each:
                self.turn(0.05)

    def bury(self, kept: int) -> None:
        """Hear that all but `kept` members are dead."""
        membership = self.gossip.membership
        for state in membership.others()[kept:]:
            inform_of_death(membership, state.peer_id, self.now)


def traced_bytes() -> int:
    gc.collect()
    ours = tracemalloc.Filter(True, "*/p2pstore/*")
    homes = tracemalloc.Filter(False, "*/partition_homes.py")  # as many as there are partitions
    snapshot = tracemalloc.take_snapshot().filter_traces([ours, homes])
    return sum(trace.size for trace in snapshot.traces)


def test_what_a_member_takes_of_memory_and_what_one_that_is_gone() -> None:
    observer = Observer()
    observer.hear_of(1, 300)  # as many as are parsed at once, and more
    assert PARSED_RECORDS < 299
    gc.collect()
    tracemalloc.start()
    try:
        before = traced_bytes()
        observer.hear_of(300, MEMBERS + 300)
        for _ in range(20):
            observer.turn()
        assert len(observer.gossip.membership.live()) == MEMBERS + 300
        living = (traced_bytes() - before) / MEMBERS
        assert living < LIVING_BYTES
        observer.bury(299)
        while observer.gossip.membership.has_rumors:
            observer.gossip.membership.claims(to=peer_id_of(1))
            observer.gossip.membership.claims(to=peer_id_of(2))
        for _ in range(20):
            observer.turn()
        assert observer.gossip.membership.dead_count >= MEMBERS
        assert (traced_bytes() - before) / MEMBERS < GONE_BYTES
    finally:
        tracemalloc.stop()


def calls_made(action: Callable[[], None]) -> Counter[str]:
    """Which functions were called (generators: entered) how often: time that a busy machine does not change."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_what_is_done_a_few_times_a_second_is_not_done_for_every_member() -> None:
    """But for a load that is added up once a second (`directory_mode`)."""
    for kept in (10_000, 20):  # all alive, or nearly all dead
        costs = []
        for members in (150, 450):
            observer = Observer()
            observer.hear_of(1, members)
            observer.bury(kept)
            for _ in range(10):
                observer.turn()

            def rest(observer: Observer = observer) -> None:
                for _ in range(5):
                    observer.now += 0.26
                    observer.gossip._housekeeping._work(observer.now)
                    observer.gossip.partitions._followed.mark(observer.now)
                    observer.gossip.probing.next_dead()

            calls = calls_made(rest)
            calls = Counter({name: n for name, n in calls.items() if "ClusterLoad" not in name})
            costs.append(sum(calls.values()))
        assert costs[1] < 1.2 * costs[0], costs


def test_the_dead_are_forgotten_in_time_whatever_became_of_them_meanwhile() -> None:
    observer = Observer()
    observer.hear_of(1, 6)
    membership: Membership = observer.gossip.membership
    kept = membership.config.dead_kept_seconds

    def dies_at(number: int, at: float) -> None:
        observer.now = at
        bury(membership, [number], at)

    dies_at(1, 10.0)
    dies_at(2, 20.0)
    observer.now = 25.0  # nothing else is known of the next one
    claim = Claim(peer_id_of(77), 1, int(Status.DEAD), 5)
    membership.observe_claims([claim], observer.now)
    dies_at(3, 30.0)
    observer.now = 40.0
    farewell = msgspec.structs.replace(full_record(1), sequence=6, leaving=True)
    membership.observe_record(farewell, SignedRecord(b"", b""), observer.now)
    state = membership.get(peer_id_of(2))
    assert state is not None
    no_news = Claim(peer_id_of(2), state.incarnation, int(Status.DEAD), 5)
    membership.observe_claims([no_news], 50.0)
    gone = [peer_id_of(number) for number in (2, 77, 3, 1)]
    assert {state.peer_id for state in membership.states() if not state.alive} == set(gone)
    for at, peer_id in zip((20.0, 25.0, 30.0, 40.0), gone, strict=True):
        assert membership.expire(at + kept) == []
        assert [state.peer_id for state in membership.expire(at + kept + 0.5)] == [peer_id]
        assert membership.get(peer_id) is None
    assert membership.dead_count == 0
    assert len(membership.live()) == 3


def test_the_log_of_one_that_was_forgotten_counts_again_when_it_is_back() -> None:
    """Though it signs nothing new."""
    observer = Observer()
    observer.hear_of(1, 3)
    gossip, (back, _) = observer.gossip, observer.gossip.membership.others()
    record = msgspec.structs.replace(full_record(1), sequence=6, head=LogHead(70, 7, 20))
    signed = sign_peer_record(record, SimulatedSigner(record.peer_id))
    gossip.serve(peer_id_of(1), ControlKind.DELTA, Delta([signed], [], [], []), observer.now)
    assert gossip.directory.head(back.member) == record.head
    inform_of_death(gossip.membership, back.peer_id, observer.now)
    for _ in range(8):
        observer.turn()
    assert not gossip.directory.has_view(back.member)
    alive = Claim(back.peer_id, back.incarnation + 1, int(Status.ALIVE), back.member)
    gossip.serve(peer_id_of(1), ControlKind.PING, Ping(1, [alive]), observer.now)
    assert gossip.directory.head(back.member) == record.head
    assert back.member in gossip.directory.unsettled


def test_the_table_of_homes_follows_before_many_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing else is due meanwhile: 10,000 at once would hold the event loop."""
    joined: list[int] = []
    made_for = HomeTable._made_for

    def noting(table: HomeTable, members: frozenset[int]) -> HomeTable:
        joined.append(len(members - table.members))
        return made_for(table, members)

    monkeypatch.setattr(HomeTable, "_made_for", noting)
    observer = Observer()
    observer.turn_after_each = False
    observer.hear_of(1, 1000)
    observer.turn()
    assert sum(joined) == 1000
    assert max(joined) < FOLLOWED_AT_ONCE + 40


def test_homes_are_not_chosen_in_the_step_that_makes_digest_rows_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 10,000 members each takes 3.5 ms of the event loop."""
    monkeypatch.setattr(incoming, "MANY_ROWS", 100)
    steps: list[set[str]] = [set()]

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            steps[-1].add(name)
            return original(*arguments)

        return noted

    monkeypatch.setattr(DigestTable, "_rebuild", noting("rows", DigestTable._rebuild))
    monkeypatch.setattr(partition_homes, "choose_homes", noting("homes", choose_homes))
    observer = Observer()
    observer.turn_after_each = False
    observer.hear_of(1, 120)
    for first in range(120, 600, 8):  # both are due after every second delta
        steps.append(set())
        observer.hear_of(first, first + 8)
        if first % 16 == 0:
            observer.gossip.contacted(peer_id_of(1), ["10.0.0.1:1"], observer.now)
        observer.now += 0.05
        steps.append(set())
        observer.answer(observer.gossip.tick(observer.now))
        observer.gossip.partitions.take_pushes(observer.now)
    done = Counter(name for step in steps for name in step)
    assert done["rows"] > 20
    assert done["homes"] > 20
    assert all(len(step) < 2 for step in steps)


def test_members_that_die_together_are_judged_some_at_a_time() -> None:
    observer = Observer()
    observer.hear_of(1, 500)
    membership = observer.gossip.membership
    others = membership.others()
    for state in others:
        claim = Claim(state.peer_id, state.incarnation, int(Status.DEAD), 7)
        membership.observe_claims([claim], observer.now)
        membership.suspect(state.peer_id, observer.now)
    left = [len(membership.others())]
    while left[-1]:
        assert membership.next_tick() <= observer.now
        membership.tick(observer.now)
        left.append(len(membership.others()))
    steps = [before - after for before, after in pairwise(left)]
    assert max(steps) == JUDGED_AT_ONCE
    assert steps[:-1] == [JUDGED_AT_ONCE] * (len(steps) - 1)


KEYS = 50
DEAD_KEPT_SECONDS = 10.0
KEPT_SECONDS = 5.0
"""Memory that may be needed again for a while."""
MAX_LEFT_BYTES_AN_OPERATION = 20
MAX_LEFT_BYTES_A_MEMBER = 4000
"""An observer keeps a few numbers of who wrote; its member's record alone takes 3,000 bytes."""


@pytest.fixture
def network() -> Iterator[Network]:
    config = GossipConfig(
        ring_limit=KEYS,
        forget_seconds=KEPT_SECONDS,
        membership=MembershipConfig(dead_kept_seconds=DEAD_KEPT_SECONDS),
        directory=DirectoryConfig(relay_limit=KEYS, relay_least=KEYS, word_seconds=KEPT_SECONDS),
    )
    gc.collect()  # what another test left, and what is shared with it, would not be traced
    tracemalloc.start()
    yield Network(seed=1, config=config)
    tracemalloc.stop()


def settled_bytes(network: Network) -> int:
    """Bytes allocated by gossip's own lines when nothing is under way any more."""
    assert network.run(30, network.converged)
    for node in network.nodes.values():
        node.gossip.take_changes()
    network.run(DEAD_KEPT_SECONDS + KEPT_SECONDS + 1)
    gc.collect()
    ours = tracemalloc.Filter(True, "*/p2pstore/gossip/*")
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)


@pytest.mark.slow
def test_operations_leave_nothing_behind(network: Network) -> None:
    first, second = network.start_all(2)
    assert network.run(20, network.converged)
    for number in range(KEYS):
        first.hold(location(number, clock=number + 1))

    def hold_and_release(numbers: range) -> None:
        for number in numbers:
            first.hold(location(number, clock=number + 1))
            first.release(digest_of(number - KEYS))
            if number % KEYS == 0:
                network.run(0.3)

    hold_and_release(range(KEYS, 1250))  # tables are as large as they get
    before = settled_bytes(network)
    hold_and_release(range(1250, 2500))
    growth = settled_bytes(network) - before
    assert second.knows(first)
    assert growth < 2 * 1250 * MAX_LEFT_BYTES_AN_OPERATION


@pytest.mark.slow
def test_members_that_joined_and_left_are_forgotten(network: Network) -> None:
    network.start_all(2)
    assert network.run(20, network.converged)

    def come_and_go(numbers: range) -> None:
        for number in numbers:
            guest = network.start(number)
            assert network.run(20, network.converged)
            guest.hold(location(number))
            assert network.run(20, network.converged)
            guest.carry_out(guest.gossip.leave(network.now))
            network.run(0.1)
            network.stop(number)

    come_and_go(range(10, 18))
    before = settled_bytes(network)
    come_and_go(range(20, 28))
    growth = settled_bytes(network) - before
    assert [len(node.gossip.membership) for node in network.nodes.values()] == [2, 2]
    assert growth < 2 * 8 * MAX_LEFT_BYTES_A_MEMBER


PROGRAM = """
import gc, time
from p2pstore.peer.lifetime import run as garbage

class Holder:
    def __init__(self):
        self.me = self

garbage.LONG_SECONDS = 0.0
with garbage.short_collections():
    kept = [[number] for number in range(200_000)]
    for _ in range(2):  # the first one is long, and so the second one thorough
        gc.collect()
    frozen = gc.get_freeze_count()
    assert frozen > 200_000, frozen
    del kept
    assert gc.get_freeze_count() < frozen - 150_000, "what nothing refers to is freed all the same"
    for _ in range(100):
        Holder()
    assert gc.collect() >= 100, "cycles that are made later are found"
    garbage.LONG_SECONDS = 3600.0
    before = gc.get_freeze_count()
    kept = [[number] for number in range(1_000)]
    gc.collect()
    assert gc.get_freeze_count() <= before, "a short collection leaves nothing out"
assert not gc.callbacks
"""


def test_what_a_long_collection_found_alive_is_left_out_of_later_ones() -> None:
    """In a process of its own: frozen objects stay frozen."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


CYCLES = """
import gc, weakref
from p2pstore.peer.lifetime import run as garbage

class Holder:
    def __init__(self):
        self.me = self

garbage.LONG_SECONDS = 0.0
with garbage.short_collections():
    at_begin = gc.get_freeze_count()
    ended = []
    for _ in range(20):
        holders = [Holder() for _ in range(at_begin // 8)]
        ended.append(weakref.ref(holders[0]))
        gc.collect()
        del holders
    assert gc.get_freeze_count() < 2 * at_begin, "cycles pile up that were alive at long collections"
    assert sum(each() is not None for each in ended) <= 6
"""


def test_cycles_that_were_alive_at_long_collections_are_found_by_thorough_ones() -> None:
    subprocess.run([sys.executable, "-c", CYCLES], check=True, timeout=60)
