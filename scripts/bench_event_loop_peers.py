"""The time of one step of a core, for the largest requests of other peers and for timed work.

`python scripts/bench_event_loop_peers.py [objects] [members]`: a core that is driven by hand. Its
signatures are simulated: a real one takes 60 us to check.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.unit.core_harness as harness
from p2pstore.core.remove import FlushOperation
from p2pstore.gossip.gossip_messages import REQUESTS as GOSSIP
from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Exchange, LogChunk, Ping, Status
from p2pstore.gossip.locations.log import MAX_SIGNED_OPERATIONS, sign_run
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    LOCATION_BYTES,
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    LocationRecord,
    SignedRecord,
    sign_cluster_record,
)
from p2pstore.home_messages import Push
from p2pstore.memory.segment_layout import Pin
from p2pstore.objects import Version, key_digest
from p2pstore.transfer.data_messages import REQUESTS, DataKind
from p2pstore.transfer.peer_messages import (
    ClusterRecords,
    ListKeys,
    Lookup,
    PinItem,
    ReadCount,
    Reads,
    SetPins,
)
from p2pstore.wire import decode_body, encode_body
from simulation.signer import SimulatedSigner, peer_id_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VALUE = b"v"


def report(what: str, seconds: float, more: str = "") -> None:
    ms = 1000 * seconds
    print(f"{'*' if ms > 5 else ' '} {what:<60} {ms:9.2f} ms{more}", flush=True)


def measure(what: str, step: Callable[[], Any]) -> Any:
    """The step's result; prints its time."""
    began = time.thread_time()
    result = step()
    report(what, time.thread_time() - began)
    return result


class World(harness.Harness):
    """A core, and objects in its memory."""

    def ticks(self, what: str, seconds: float) -> None:
        """Let time pass; print the longest step."""
        longest, total, count, until = 0.0, 0.0, 0, self.now + seconds
        while (due := self.core.next_tick(self.now)) <= until:
            self.now = max(due, self.now + 1e-6)
            for step in (self.core.tick, self.core.gossip_arrived):
                began = time.thread_time()
                step(self.now)
                took = time.thread_time() - began
                longest, total = max(longest, took), total + took
            count += 1
            self.core.take_effects()
        report(what, longest, f"  ({count:,} ticks, {total:.2f} s)")

    def fill(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.put(f"k{number:08d}", VALUE)
            if number % 1000 == 0:
                self.core.take_effects()


def digest(number: int) -> bytes:
    return key_digest(f"k{number:08d}", harness.NAMESPACE)


def floor_of(number: int, clock: int, other: harness.Other) -> SignedRecord:
    body = encode_body(FloorBody(bytes(16)))
    record = ClusterRecord(
        *(CLUSTER_RECORD_FORMAT, int(ClusterRecordKind.FLOOR), digest(number), clock, 9),
        *(other.peer_id, 0, body),
    )
    return sign_cluster_record(record, other.signer)


def packed(first: int, count: int, clock: int) -> bytes:
    """`count` operations, one per key."""
    return b"".join(
        LocationRecord(digest(first + n), Version(clock + n, 9), n, 1).encode() for n in range(count)
    )


class Requests:
    """Requests and messages of another member."""

    def __init__(self, world: World, objects: int, members: int) -> None:
        self.world = world
        self.objects = objects
        self.members = members
        self.other = world.join(1)
        self.clock = harness.clock_at(0.0)

    def ask(self, what: str, kind: int, request: Any) -> None:
        core, world, sender = self.world.core, self.world, self.other.peer_id
        body = encode_body(request)
        decoded = measure(f"{what}, decoded", lambda: decode_body(REQUESTS[kind], body))
        measure(what, lambda: core.serve(sender, kind, decoded, world.now))
        world.ticks(f"{what}, later", 2.0)

    def tell(self, what: str, kind: ControlKind, request: Any) -> None:
        core, world, sender = self.world.core, self.world, self.other.peer_id
        body = encode_body(request)
        decoded = measure(f"{what}, decoded", lambda: decode_body(GOSSIP[kind], body))
        measure(what, lambda: core.gossip.serve(sender, kind, decoded, world.now))
        measure(f"{what}, arrived", lambda: core.gossip_arrived(world.now))
        world.ticks(f"{what}, later", 2.0)

    def of_data(self) -> None:
        known = b"".join(digest(n) for n in range(4096))
        unknown = b"".join(digest(n) for n in range(10**7, 10**7 + 4096))
        self.ask("LOOKUP of 4,096 known", DataKind.LOOKUP, Lookup(known))
        self.ask("LOOKUP of 4,096 unknown", DataKind.LOOKUP, Lookup(unknown))
        entries = self.world.segment.entries()[:64]
        pins = [PinItem(e.digest, e.version.clock, e.version.writer) for e in entries]
        for pin in (Pin.HARD, Pin.NONE):
            self.ask(f"SET_PINS of 64, {pin.name}", DataKind.SET_PINS, SetPins(pins, int(pin), 0))
        reads = [ReadCount(digest(n), 3) for n in range(1024)]
        self.ask("READS of 1,024", DataKind.READS, Reads(reads))
        for prefix in ("", "zzz"):
            request = ListKeys(harness.NAMESPACE, prefix, "", 2000, False)
            self.ask(f"LIST of {prefix!r}", DataKind.LIST, request)
        push = Push(
            harness.OTHER_INCARNATION,
            list(range(1, 20_001)),
            packed(10**7, 20_000, self.clock),
            sequence=20_000,
        )
        self.ask("PUSH of 20,000", DataKind.PUSH, push)
        floors = [floor_of(n, self.clock, self.other) for n in range(256)]
        pushed = ClusterRecords([f.body for f in floors], [f.signature for f in floors])
        self.ask("CLUSTER_RECORDS of 256 floors", DataKind.CLUSTER_RECORDS, pushed)

    def of_gossip(self) -> None:
        first = 1
        for count, begin, clock in (
            (90_000, 2 * 10**7, self.clock),
            (min(self.objects, 50_000), 0, 1 << 20),
        ):
            chunks = []
            for start in range(0, count, MAX_SIGNED_OPERATIONS):
                operations = packed(begin + start, min(MAX_SIGNED_OPERATIONS, count - start), clock)
                place = harness.OTHER_INCARNATION, first
                signature = sign_run(self.other.signer, *place, operations)
                chunks.append(LogChunk(self.other.member, *place, operations, signature))
                first += len(operations) // LOCATION_BYTES
            what = f"DELTA of {count:,} operations"
            self.tell(what, ControlKind.DELTA, Delta([], chunks, [], []))
        for begin in range(2, self.members, 500):
            numbers = range(begin, min(begin + 500, self.members))
            records = [harness.peer_record(SimulatedSigner(peer_id_of(n))) for n in numbers]
            what = f"DELTA of {len(records)} new members"
            self.tell(what, ControlKind.DELTA, Delta(records, [], [], []))
        claims = [
            Claim(*(peer_id_of(n), harness.OTHER_INCARNATION), *(int(Status.SUSPECT), 1))
            for n in range(2, min(1026, self.members))
        ]
        self.tell("PING with 1,024 suspicions", ControlKind.PING, Ping(1, claims))
        self.world.ticks(f"10 s with {self.members:,} members", 10.0)
        self.tell("EXCHANGE", ControlKind.EXCHANGE, Exchange(b"", 1, b"", []))
        floors = [floor_of(1_000 + n, self.clock, self.other) for n in range(1024)]
        self.tell("DELTA of 1,024 floors", ControlKind.DELTA, Delta([], [], floors, []))

    def of_time(self) -> None:
        core, world = self.world.core, self.world
        dead = Claim(self.other.peer_id, harness.OTHER_INCARNATION, int(Status.DEAD), 1)
        witness = peer_id_of(3)
        measure(
            "a member with 100,000 locations dies",
            lambda: core.gossip.serve(witness, ControlKind.PING, Ping(1, [dead]), world.now),
        )
        world.ticks("its death, later", 60.0)
        operation = FlushOperation(core, harness.NAMESPACE)
        measure("FLUSH", lambda: core.operations.start(operation, world.now))
        world.ticks("FLUSH, later", 10.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", type=int, nargs="?", default=65_536)
    parser.add_argument("members", type=int, nargs="?", default=1_000)
    options = parser.parse_args()
    gc.disable()
    world = World(
        memory_bytes=options.objects * 16_384,
        new_memory=lambda length: memoryview(mmap.mmap(-1, length)),
    )
    world.fill(0, options.objects)
    requests = Requests(world, options.objects, options.members)
    requests.of_data()
    requests.of_gossip()
    requests.of_time()


if __name__ == "__main__":
    main()
