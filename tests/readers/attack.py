"""Owners, readers and clients against each other, and killed while they work; no reader may see a wrong byte."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster
from tests.readers.actors import CHANGES, COLUMNS, FAILED, LIMIT, OWNERS, READS, WRONG
from tests.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
CAST: Final = {
    **{"copy": 0.80, "shm": 0.02, "tcp": 0.02, "brisk": 0.06, "together": 0.04, "view": 0.06},
    **{"change": 0.0, "trust": 0.0},
}
"""Roles, and their shares of all reads. Most copy from the mapping, which takes microseconds; for the others a peer
has to be asked, and it is busy. Writers, and the reader that trusts, work as long as the others do."""
MEMORY: Final = "4MiB"
"""About as much as the values of a peer's keys take, and views and fetched copies besides: it is always full."""
POLL_SECONDS: Final = 0.02
STALL_SECONDS: Final = 60.0
NO_LIMIT: Final = 1 << 63
TIDY_SECONDS: Final = 30.0
END_SECONDS: Final = 15.0


@dataclass
class Outcome:
    """The result of an attack. `reads` are values compared to the last byte, by role."""

    reads: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    failed: int = 0
    """Reads and puts without a result: no peer had the value, or its holder was killed."""
    changes: int = 0
    torn: int = 0
    """Wrong values that a reader saw which trusts the memory: how well the attack works."""
    killed_actors: int = 0
    killed_peers: int = 0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.reads.values())

    def describe(self) -> str:
        """One paragraph for people."""
        by_role = ", ".join(f"{role} {count:,}" for role, count in self.reads.items())
        return (
            f"{self.total:,} reads ({by_role}), {self.wrong} wrong; {self.failed:,} without a value; "
            f"{self.changes:,} puts and removals; a reader without checks saw {self.torn:,} wrong values; killed: "
            f"{self.killed_actors:,} clients, {self.killed_peers:,} peers; {self.seconds:.1f} s"
        )


@dataclass
class _Part:
    """An actor's place in the cast; its process changes with every kill."""

    role: str
    row: int
    process: subprocess.Popen[bytes] | None = None


class Attack:
    """Peers with their actors, until all reads were compared."""

    def __init__(self, cluster: ProcessCluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = Random(seed)
        self._counts_path = cluster.folder / "counts"
        self._counts_path.write_bytes(bytes(8 * COLUMNS * len(CAST)))
        self._log = cluster.folder / "actors.log"
        self._counts = np.memmap(self._counts_path, np.uint64, "r+").reshape(-1, COLUMNS)
        self._parts = [_Part(role, row) for row, role in enumerate(CAST)]
        ssd = cluster.folder / "ssd"
        ssd.mkdir()
        self._options = [
            ("--ssd", str(ssd), "--ssd-capacity", "256MiB"),
            ("--memory-path", str(cluster.folder / "memory"), "--keep-memory"),
        ]
        """Of the peers with memory: the first one comes back with what is on its SSD; the second one with its memory,
        which the readers of before have mapped."""
        self._outcome = Outcome()

    def run(self, reads: int, actor_kills: int, peer_kills: int, tell: Callable[[str], None]) -> Outcome:
        """Attack until `reads` values were compared, with this number of kills on the way; then look for remains of
        the dead."""
        began = time.monotonic()
        *owners, without = self._cluster.peers
        self._cluster.start(owners[:1], *self._options[0])
        self._cluster.start(owners[1:], "--bootstrap", owners[0].control, *self._options[1])
        self._cluster.start([without], "--bootstrap", owners[0].control, "--memory", "0")
        self._cluster.wait_until_whole()
        for part in self._parts:
            self._cast(part)
        kills = self._rng.sample(range(actor_kills + peer_kills), peer_kills)
        steps = actor_kills + peer_kills + 1
        for step in range(steps):
            self._wait_for(reads * (step + 1) / steps)
            if self._outcome.complaints:
                break
            if step == steps - 1:
                break
            if step in kills:
                self._kill_peer()
            else:
                self._kill_actor()
            if step % 20 == 0:
                tell(self._count().describe())
        self._end_actors()
        if not self._outcome.complaints:
            self._look_for_leaks(owners)
        self._outcome.seconds = time.monotonic() - began
        return self._count()

    def end(self) -> None:
        """Kill what still runs."""
        self._end_actors()
        del self._counts

    # --- steps -------------------------------------------------------------------------------

    def _wait_for(self, reads: float) -> None:
        """Let every reader go on until its share of these reads is compared."""
        for part in self._parts:
            share = CAST[part.role]
            self._counts[part.row, LIMIT] = math.ceil(share * reads) if share else NO_LIMIT
        seen, since = -1, time.monotonic()
        while self._waits():
            total = int(self._counts[:, READS].sum())
            if total > seen:
                seen, since = total, time.monotonic()
            if time.monotonic() > since + STALL_SECONDS:
                self._complain(f"no read for {STALL_SECONDS:g} s")
                return
            time.sleep(POLL_SECONDS)

    def _waits(self) -> bool:
        """Whether a reader is behind its limit, and nothing went wrong."""
        for part in self._parts:
            assert part.process is not None
            if part.process.poll() is not None:
                self._complain(f"the actor {part.role!r} ended by itself")
                return False
        if self._count().wrong:
            self._complain("a reader got wrong bytes")
            return False
        counted = self._counts[[part.row for part in self._parts if CAST[part.role]]]
        return bool((counted[:, READS] < counted[:, LIMIT]).any())

    def _complain(self, what: str) -> None:
        self._outcome.complaints.append(f"{what}:\n{self._log.read_text()[-4000:]}")

    def _count(self) -> Outcome:
        outcome = self._outcome
        trusting = [part.row for part in self._parts if part.role == "trust"]
        honest = [part.row for part in self._parts if part.role != "trust"]
        outcome.torn = int(self._counts[trusting, WRONG].sum())
        outcome.wrong = int(self._counts[honest, WRONG].sum())
        outcome.failed = int(self._counts[honest, FAILED].sum())
        outcome.changes = int(self._counts[honest, CHANGES].sum())
        outcome.reads = {}
        for part in self._parts:
            if part.role not in ("trust", "change"):
                count = int(self._counts[part.row, READS])
                outcome.reads[part.role] = outcome.reads.get(part.role, 0) + count
        return outcome

    def _cast(self, part: _Part) -> None:
        sockets = ",".join(str(peer.socket) for peer in self._cluster.peers)
        arguments = [str(os.getpid()), part.role, sockets, str(self._counts_path), str(part.row)]
        arguments.append(str(self._rng.getrandbits(32)))
        with self._log.open("ab") as log:
            part.process = subprocess.Popen(
                [sys.executable, "-m", "tests.readers.actors", *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _kill_actor(self) -> None:
        part = self._rng.choice(self._parts)
        self._end(part)
        self._cast(part)
        self._outcome.killed_actors += 1

    def _kill_peer(self) -> None:
        """kill -9 one of the peers with memory; the same one comes back, with its SSD if it has one."""
        number = self._rng.randrange(OWNERS)
        peer, other = self._cluster.peers[number], self._cluster.peers[1 - number]
        peer.kill()
        self._cluster.start([peer], "--bootstrap", other.control, *self._options[number])
        self._outcome.killed_peers += 1

    def _end(self, part: _Part) -> None:
        if part.process is not None:
            part.process.kill()
            part.process.wait(END_SECONDS)
            part.process = None

    def _end_actors(self) -> None:
        for part in self._parts:
            self._end(part)

    def _look_for_leaks(self, owners: list[PeerProcess]) -> None:
        """No holder is left: all memory can be had again."""
        for peer in owners:
            try:
                eventually(partial(_is_idle, peer), TIDY_SECONDS, partial(_held, peer))
            except AssertionError as error:
                self._outcome.complaints.append(f"{peer.name} still holds what was of the dead: {error}")


def _held(peer: PeerProcess) -> dict[str, int]:
    document = peer.client.statistics(cluster=False)["peer"]
    return {name: document[name] for name in ("leased_bytes", "memory_used_bytes", "operations")}


def _is_idle(peer: PeerProcess) -> bool:
    peer.client.flush()
    return not any(_held(peer).values())


def attack_readers(
    reads: int,
    seed: int,
    *,
    actor_kills: int,
    peer_kills: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run an attack on peers of its own, on loopback. See `Outcome` for what comes of it."""
    with ExitStack() as stack:
        cluster = stack.enter_context(new_cluster(OWNERS + 1, MEMORY, halves=False))
        attack = Attack(cluster, seed)
        stack.callback(attack.end)
        return attack.run(reads, actor_kills, peer_kills, tell)
