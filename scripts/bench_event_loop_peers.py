"""What one step of a core takes for the largest requests of other peers, and for what time brings.

`python scripts/bench_event_loop_peers.py [objects] [members]`: a core that is driven by hand, with keys of ed25519.
"""

from __future__ import annotations

import gc
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tests.unit.core_harness as harness
from p2pstore.core.flush import FlushOperation
from p2pstore.core.put import PutOperation, PutSpec
from p2pstore.gossip.links.identity import Ed25519Verifier, Identity
from p2pstore.gossip.messages import REQUESTS as GOSSIP
from p2pstore.gossip.messages import Claim, ControlKind, Delta, Exchange, LogChunk, Ping, Status
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    ClusterRecord,
    ClusterRecordKind,
    FloorBody,
    LocationRecord,
    sign_cluster_record,
)
from p2pstore.objects import Version, chunk_sums, key_digest, root_checksum
from p2pstore.transfer.layout import Pin
from p2pstore.transfer.messages import (
    ClusterRecords,
    DataKind,
    ListKeys,
    Lookup,
    PinItem,
    Push,
    ReadCount,
    Reads,
    SetPins,
)
from p2pstore.wire import decode_body, encode_body

OBJECTS = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
MEMBERS = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000
VALUE = b"v"
SUMS = chunk_sums(VALUE)
ROOT = root_checksum(1, SUMS)


def measure(what: str, *steps: Callable[[], Any], times: int = 1) -> Any:
    """The longest of these steps."""
    longest = 0.0
    result = None
    for step in steps:
        began = time.thread_time()
        result = step()
        longest = max(longest, time.thread_time() - began)
    ms = 1000 * longest
    print(f"{'*' if ms > 5 else ' '} {what:<66} {ms:9.2f} ms", flush=True)
    return result


class World(harness.Harness):
    def ticks(self, what: str, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        longest, total, count, until = 0.0, 0.0, 0, self.now + seconds
        while not done():
            due = self.core.next_tick(self.now)
            if due > until:
                break
            self.now = max(due, self.now + 1e-6)
            for step in (lambda: self.core.tick(self.now), lambda: self.core.gossip_arrived(self.now)):
                began = time.thread_time()
                step()
                took = time.thread_time() - began
                longest, total = max(longest, took), total + took
            count += 1
            self.core.take_effects()
        ms = 1000 * longest
        print(f"{'*' if ms > 5 else ' '} {what:<66} {ms:9.2f} ms  ({count:,} ticks, {total:.2f} s)", flush=True)

    def fill(self, first: int, count: int, **facts: Any) -> None:
        for number in range(first, first + count):
            room = self.segment.reserve(1, 200, holder="c", now=self.core.unix(self.now))
            spec = PutSpec("c", room.number, harness.NAMESPACE, f"k{number:08d}", 1, SUMS, ROOT, **facts)
            operation = PutOperation(self.core, spec)
            self.core.start(operation, self.now)
            assert operation.done
            if number % 1000 == 0:
                self.core.take_effects()
                self.core.announce_withdrawn(self.now)


def digest(number: int) -> bytes:
    return key_digest(f"k{number:08d}", harness.NAMESPACE)


def main() -> None:
    gc.disable()
    world = World(memory_bytes=OBJECTS * 16384, new_memory=lambda n: memoryview(mmap.mmap(-1, n)))
    core, now = world.core, world.now
    other = world.join(1)
    world.fill(0, OBJECTS)
    known = b"".join(digest(n) for n in range(4096))
    unknown = b"".join(digest(n) for n in range(10**7, 10**7 + 4096))

    def ask(what: str, kind: int, request: Any) -> Any:
        body = encode_body(request)
        decoded = measure(what + ", decoded", lambda: decode_body(harness.REQUESTS[kind], body))
        reply = measure(what, lambda: core.serve(other.peer_id, kind, decoded, world.now))
        if hasattr(reply, "__struct_fields__"):
            measure(what + ", reply encoded", lambda: encode_body(reply))
        return reply

    ask("LOOKUP of 4,096 known", DataKind.LOOKUP, Lookup(known))
    ask("LOOKUP of 4,096 unknown", DataKind.LOOKUP, Lookup(unknown))
    entries = world.segment.entries()[:64]
    pins = [PinItem(e.digest, e.version.clock, e.version.writer) for e in entries]
    ask("SET_PINS of 64", DataKind.SET_PINS, SetPins(pins, int(Pin.HARD), 0))
    ask("SET_PINS of 64, unpin", DataKind.SET_PINS, SetPins(pins, int(Pin.NONE), 0))
    ask("READS of 1,024", DataKind.READS, Reads([ReadCount(digest(n), 3) for n in range(1024)]))
    ask("LIST", DataKind.LIST, ListKeys(harness.NAMESPACE, "", "", 2000, False))
    world.ticks("LIST, later", 1.0)
    ask("LIST nothing", DataKind.LIST, ListKeys(harness.NAMESPACE, "zzz", "", 2000, False))
    world.ticks("LIST, later", 1.0)
    clock = harness.clock_at(0.0)
    records = [LocationRecord(digest(10**7 + n), Version(clock + n, 9), n, 1) for n in range(20_000)]
    operations = b"".join(r.encode() for r in records)
    push = Push(harness.OTHER_INCARNATION, list(range(1, 20_001)), operations, sequence=20_000)
    ask("PUSH of 20,000", DataKind.PUSH, push)
    world.ticks("PUSH, later", 2.0)

    def gossip(what: str, kind: ControlKind, request: Any) -> Any:
        body = encode_body(request)
        if len(body) > 4 << 20:
            print("    too large", len(body))
        decoded = measure(what + ", decoded", lambda: decode_body(GOSSIP[kind], body))
        reply, effects = measure(what, lambda: core.gossip.serve(other.peer_id, kind, decoded, world.now))
        measure(what + ", arrived", lambda: core.gossip_arrived(world.now))
        if hasattr(reply, "__struct_fields__"):
            measure(what + ", reply encoded", lambda: encode_body(reply))
        core.take_effects()
        world.ticks(what + ", later", 2.0)

    logs = [LogChunk(other.member, harness.OTHER_INCARNATION, 1, b"".join(r.encode() for r in records))]
    gossip("DELTA of 20,000 operations", ControlKind.DELTA, Delta([], logs, [], []))
    many = b"".join(
        LocationRecord(digest(2 * 10**7 + n), Version(clock + n, 9), n, 1).encode() for n in range(90_000)
    )
    chunk = LogChunk(other.member, harness.OTHER_INCARNATION, 20_001, many)
    gossip("DELTA of 90,000 operations", ControlKind.DELTA, Delta([], [chunk], [], []))
    same = b"".join(
        LocationRecord(digest(n), Version(1 << 20, 9), n, 1).encode() for n in range(min(OBJECTS, 50_000))
    )
    chunk = LogChunk(other.member, harness.OTHER_INCARNATION, 110_001, same)
    gossip("DELTA of 50,000 operations on own keys", ControlKind.DELTA, Delta([], [chunk], [], []))
    for first in range(2, MEMBERS, 500):
        signers = [harness.SimulatedSigner(n) for n in range(first, min(first + 500, MEMBERS))]
        gossip(f"DELTA of {len(signers)} new members", ControlKind.DELTA, Delta([harness.peer_record(s) for s in signers], [], [], []))
    claims = [Claim(harness.SimulatedSigner(n).peer_id, harness.OTHER_INCARNATION, int(Status.SUSPECT), 1) for n in range(2, min(1026, MEMBERS))]
    gossip("PING with 1,024 suspicions", ControlKind.PING, Ping(1, claims))
    world.ticks(f"10 s with {MEMBERS:,} members, suspicions end", 10.0)
    gossip("EXCHANGE", ControlKind.EXCHANGE, Exchange(b"", 1, b"", []))
    ask("LOOKUP of 4,096 known, many members", DataKind.LOOKUP, Lookup(known))
    floors = []
    for n in range(256):
        record = ClusterRecord(CLUSTER_RECORD_FORMAT, int(ClusterRecordKind.FLOOR), digest(n), clock, 9, other.peer_id, 0, encode_body(FloorBody(bytes(16))))
        floors.append(sign_cluster_record(record, other.signer))
    ask("CLUSTER_RECORDS of 256 floors of what is here (no real signatures)", DataKind.CLUSTER_RECORDS, ClusterRecords([f.body for f in floors], [f.signature for f in floors]))
    flooring = []
    for n in range(1024):
        record = ClusterRecord(CLUSTER_RECORD_FORMAT, int(ClusterRecordKind.FLOOR), digest(1000 + n), clock, 9, other.peer_id, 0, encode_body(FloorBody(bytes(16))))
        flooring.append(sign_cluster_record(record, other.signer))
    gossip("DELTA of 1,024 floors of what is here (no real signatures)", ControlKind.DELTA, Delta([], [], flooring, []))
    signer = Identity.generate() if hasattr(Identity, "generate") else None
    if signer is not None:
        verifier = Ed25519Verifier()
        signed = sign_cluster_record(record, signer)
        measure("one ed25519 signature verified", lambda: verifier.verify(signer.peer_id, signed.body, signed.signature))
    measure("snapshot of the own log, one step", lambda: core.gossip.log.copy_on(core.gossip.log.copying().__enter__()))
    measure("a member dies that holds 160,000 locations", lambda: world.die(other) if other in world.others else core.gossip.serve(harness.SimulatedSigner(3).peer_id, ControlKind.PING, Ping(1, [Claim(other.peer_id, harness.OTHER_INCARNATION, int(Status.DEAD), 1)]), world.now))
    world.ticks("its death, later", 60.0)
    operation = FlushOperation(core, harness.NAMESPACE)
    measure("FLUSH", lambda: core.start(operation, world.now))
    world.ticks("FLUSH, later", 10.0)
    print(world.segment.object_count, "objects left")


main()
