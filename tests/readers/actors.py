"""Processes that change values, and processes that read them and compare every byte.

`python -m tests.readers.actors PARENT ROLE SOCKETS COUNTS ROW SEED`: works until it is killed. What it did is in its
row of a file that its parent maps: a kill takes nothing of it.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from mooncake_p2p.tied import die_with_parent
from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import (
    BufferTooSmall,
    CapacityExceeded,
    DeadlineExceeded,
    LeaseLimitExceeded,
    NoLocalPeer,
    NoSuchKey,
    StoreClosed,
    Unavailable,
)
from p2pstore.local.local_messages import Planned
from p2pstore.memory.segment_layout import Slot, TrailerBody
from p2pstore.objects import key_digest
from p2pstore.results import ItemResult
from p2pstore.transfer.data_messages import SMALL_OBJECT_BYTES
from p2pstore.transfer.reading.segment_reader import SegmentReader, Spots
from tests.readers.values import KEYS_PER_PEER, LONGEST_BYTES, is_right, key_name, value_of

OWNERS: Final = 2
"""The first sockets are of peers with memory, the last one is of a peer without any."""
ROUND: Final = 50
"""Attempts with one client, before it goes on with the next peer."""
CLIENT_SECONDS: Final = 20.0
VIEWS: Final = 8
REMOTE_VIEWS: Final = 0.1
BRISK: Final = 32
"""Reads of one value, each right after the other: most of them are answered by a thread of the holder."""
BATCH: Final = 8
TOGETHER: Final = 0.2
"""Of the reads from the own peer's memory."""
READS, WRONG, FAILED, CHANGES, LIMIT = range(5)
"""Columns of the counts: values compared, those that were wrong, reads and puts without a result, puts and removals;
and how many values to compare before waiting for more to be wanted, which the parent says."""
COLUMNS: Final = 5
PREEMPTED: Final = 0.01
MAX_PREEMPTED_SECONDS: Final = 0.05
TRUSTING_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = 0.005

Counts = NDArray[np.uint64]

_TO_BE_EXPECTED = (
    *(NoSuchKey, Unavailable, StoreClosed, NoLocalPeer),
    *(CapacityExceeded, LeaseLimitExceeded, DeadlineExceeded),
)
"""Errors that evictions, removals and killed peers explain. Any other ends the actor."""


class Actor:
    """The common part of all actors: random numbers, counts, a client of one peer after the other."""

    def __init__(self, sockets: list[str], counts: Counts, rng: Random) -> None:
        self.sockets = sockets
        self.counts = counts
        self.rng = rng
        self.buffer = memoryview(bytearray(LONGEST_BYTES))

    def run(self, client_of: Callable[[], int], work: Callable[[BlockingClient, int], None]) -> None:
        """`work` again and again, `ROUND` times with one client, of a peer that `client_of` names."""
        while True:
            peer = client_of()
            try:
                with blocking.connect(self.sockets[peer], timeout=CLIENT_SECONDS) as client:
                    for _ in range(ROUND):
                        self._attempt(work, client, peer)
            except (NoLocalPeer, StoreClosed):
                time.sleep(0.02)  # it was killed, and comes back

    def _attempt(
        self, work: Callable[[BlockingClient, int], None], client: BlockingClient, peer: int
    ) -> None:
        while self.counts[READS] >= self.counts[LIMIT]:
            time.sleep(PAUSE_SECONDS)
        try:
            work(client, peer)
        except (NoLocalPeer, StoreClosed):
            raise
        except _TO_BE_EXPECTED:
            self.counts[FAILED] += 1
            time.sleep(PAUSE_SECONDS)  # leave it to others to bring it

    def owner(self) -> int:
        """Any peer with memory."""
        return self.rng.randrange(OWNERS)

    def compare(self, key: str, value: memoryview, how: str) -> None:
        """Count a read; one that is wrong is told on stderr, too."""
        self.counts[READS] += 1
        if not is_right(key, value):
            self.counts[WRONG] += 1
            print(f"WRONG {how}: {key!r}, {len(value):,} bytes", file=sys.stderr, flush=True)

    def key(self, peer: int) -> str:
        return key_name(peer, self.rng.randrange(KEYS_PER_PEER))

    def key_here(self, client: BlockingClient, peer: int) -> str:
        """One that the peer of this client lists: an unknown key costs round trips."""
        reader = client._session._live.link.readers[0]
        for _ in range(KEYS_PER_PEER):
            key = self.key(peer)
            if reader.contains(key_digest(key)):
                return key
        raise NoSuchKey(key)

    # --- roles -------------------------------------------------------------------------------

    def change(self, client: BlockingClient, peer: int) -> None:
        """Put new values over old ones, remove one, or put others that drive out what is there."""
        kind = self.rng.choices(("replace", "remove", "drive out"), (2, 1, 4))[0]
        keys = [self.key(peer) for _ in range(BATCH)]
        if kind == "remove":
            client.remove(keys[0])
            self.counts[CHANGES] += 1
            return
        if kind == "drive out":
            keys = [f"{key} {self.rng.getrandbits(63)}" for key in keys]
        values = [(key, value_of(key, self.rng.getrandbits(63))) for key in keys]
        for result in client.put_many(values, overwrite=kind == "replace"):
            if result.error is not None and not isinstance(result.error, _TO_BE_EXPECTED):
                raise result.error
            self.counts[CHANGES if result.error is None else FAILED] += 1

    def copy(self, client: BlockingClient, peer: int, how: str) -> None:
        """Copy a value of that peer's."""
        key = self.key_here(client, peer) if how == "copy" else self.key(peer)
        length = client.get_into(key, self.buffer)
        self.compare(key, self.buffer[:length], how)

    def copy_here(self, client: BlockingClient, peer: int) -> None:
        """Copy a value of the own peer's, or all of them at once."""
        if self.rng.random() < TOGETHER:
            self.copy_together(client, peer)
        else:
            self.copy(client, peer, "copy")

    def copy_briskly(self, client: BlockingClient, peer: int) -> None:
        """Copy one value of that peer's again and again, while others change it."""
        key = self.key(peer)
        for _ in range(BRISK):
            length = client.get_into(key, self.buffer)
            self.compare(key, self.buffer[:length], "brisk")

    def copy_together(self, client: BlockingClient, peer: int) -> None:
        """Copy all of that peer's values at once, into buffers for small ones: they come in few answers, without
        messages of their own. Or to new memory, whatever they have."""
        if self.rng.random() < 0.3:
            names = [key_name(peer, number) for number in range(KEYS_PER_PEER)]
            for each in client.get_many(names):
                self.compare_result(each, "together, new")
            return
        rooms = {
            key_name(peer, number): self.buffer[number * SMALL_OBJECT_BYTES :][:SMALL_OBJECT_BYTES]
            for number in range(KEYS_PER_PEER)
        }
        for result in client.get_many_into(list(rooms.items())):
            if isinstance(result.error, _TO_BE_EXPECTED):
                self.counts[FAILED] += 1
            elif not isinstance(result.error, BufferTooSmall):
                self.compare(result.key, rooms[result.key][: result.unwrap()], "together")

    def compare_result(self, result: ItemResult[Any], how: str) -> bool:
        """One of a batch; whether there was a value."""
        if isinstance(result.error, _TO_BE_EXPECTED):
            self.counts[FAILED] += 1
            return False
        self.compare(result.key, memoryview(result.unwrap()), how)
        return True

    def view_together(self, client: BlockingClient, keys: list[str]) -> None:
        """Hold views of several values, taken as one, and compare them twice."""
        views = [each for each in client.take_leases(keys) if self.compare_result(each, "views")]
        for each in views:
            self.compare(each.key, each.unwrap(), "views, later")

    def view(self, client: BlockingClient, peer: int) -> None:
        """Hold views of several values, some of them fetched from the other peer for that, and compare each of
        them when it is taken and when all are there: nothing may have moved."""
        if self.rng.random() < 0.3:
            owner = 1 - peer if self.rng.random() < REMOTE_VIEWS else peer
            self.view_together(client, [self.key(owner) for _ in range(VIEWS)])
            return
        held: list[tuple[str, memoryview]] = []
        for _ in range(VIEWS):
            try:
                remote = self.rng.random() < REMOTE_VIEWS
                key = self.key(1 - peer) if remote else self.key_here(client, peer)
                value = client.take_lease(key)
            except _TO_BE_EXPECTED as error:
                if isinstance(error, StoreClosed):
                    break  # held views keep their bytes
                self.counts[FAILED] += 1
                continue
            self.compare(key, value, "view")
            held.append((key, value))
        for key, value in held:
            self.compare(key, value, "view, later")

    def trust(self, client: BlockingClient, peer: int) -> None:
        """Look a value up, and go on copying it from there for a while, without a lease or a look at checksums. It
        shows what the others are protected from: its wrong values are counted, and are no failure."""
        reader = client._session._live.link.readers[0]
        key = self.key_here(client, peer)
        found = reader.find(key_digest(key))
        if found is None:
            raise NoSuchKey(key)
        slot, _ = found
        view = self.buffer[: slot.length]
        right, deadline = True, time.monotonic() + TRUSTING_SECONDS
        while right and time.monotonic() < deadline:
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(reader.view_of(slot), np.uint8))
            right = is_right(key, view)
            time.sleep(PAUSE_SECONDS)
        self.counts[READS] += 1
        self.counts[WRONG] += not right


def preempt(rng: Random) -> None:
    """Have some reads of this process wait, after they looked up where a value is, until it is not there any more (or
    for a while): as when the kernel lets others run at the worst moment, which it does too seldom for a test."""
    find, spots = SegmentReader.find, SegmentReader.spots

    def wait_for_change(reader: SegmentReader, digests: Sequence[bytes]) -> None:
        if not digests or rng.random() >= PREEMPTED:
            return
        before = find(reader, digest := rng.choice(digests))
        deadline = time.monotonic() + rng.uniform(0, MAX_PREEMPTED_SECONDS)
        while time.monotonic() < deadline and find(reader, digest) == before is not None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.005))  # its place is used again

    def find_and_wait(reader: SegmentReader, digest: bytes) -> tuple[Slot, TrailerBody] | None:
        found = find(reader, digest)
        wait_for_change(reader, [digest] if found is not None else ())
        return found

    def spots_and_wait(reader: SegmentReader, digests: Sequence[bytes], *more: Any) -> Spots:
        found = spots(reader, digests, *more)
        wait_for_change(reader, [digests[place] for place in found.places])
        return found

    SegmentReader.find = find_and_wait  # type: ignore[method-assign, assignment] # on purpose
    SegmentReader.spots = spots_and_wait  # type: ignore[method-assign, assignment] # on purpose


def move_holders_away() -> None:
    """Have the clients of this process take every holder for one on another host."""
    request = PeerLink.request

    async def request_and_move(link: PeerLink, *rest: Any, **more: Any) -> Any:
        reply = await request(link, *rest, **more)
        if not isinstance(reply, Planned):
            return reply
        for place, item in enumerate(reply.items):
            away = [replace(each, same_host=False, socket="") for each in item.holders]
            reply.items[place] = replace(item, holders=away)
        return reply

    PeerLink.request = request_and_move  # type: ignore[method-assign, assignment] # on purpose


def play(role: str, actor: Actor) -> None:
    """Work in that role, without end."""
    match role:
        case "change":
            actor.run(actor.owner, actor.change)
        case "copy":
            actor.run(actor.owner, actor.copy_here)
        case "view":
            actor.run(actor.owner, actor.view)
        case "trust":
            actor.run(actor.owner, actor.trust)
        case "shm" | "tcp" | "brisk" | "together":

            def read(client: BlockingClient, _: int) -> None:
                if role == "shm" and actor.rng.random() < 0.1:
                    keys = [actor.key(actor.owner()) for _ in range(BATCH)]
                    actor.view_together(client, keys)
                elif role == "shm" and actor.rng.random() < 0.1:
                    actor.copy_together(client, actor.owner())
                elif role == "brisk":
                    actor.copy_briskly(client, actor.owner())
                elif role == "together":
                    actor.copy_together(client, actor.owner())
                else:
                    actor.copy(client, actor.owner(), role)

            if role != "shm":
                move_holders_away()
            actor.run(lambda: OWNERS, read)
        case _:
            raise ValueError(f"there is no role {role!r}")


def main() -> None:
    parent, role, sockets, counts, row, seed = sys.argv[1:]
    die_with_parent(int(parent))
    rows = np.memmap(Path(counts), dtype=np.uint64, mode="r+").reshape(-1, COLUMNS)
    rng = Random(int(seed))
    preempt(rng)
    play(role, Actor(sockets.split(","), rows[int(row)], rng))


if __name__ == "__main__":
    main()
