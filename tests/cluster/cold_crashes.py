"""Killing a process in the middle of writing to an SSD tier, and looking at what is there after."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import trio

from p2pstore.objects import MIB
from p2pstore.ssd_tier.disk import FileDisk, open_disk
from p2pstore.ssd_tier.health import ColdMiss
from tests.cluster.cold_writer import CAPACITY_BYTES, KEYS
from tests.unit.cold_harness import Harness, running, value_of

ROOT = Path(__file__).parents[2]
CLOCKS_A_ROUND = 1_000_000
START_SECONDS = 30.0
LONGEST_LIFE_SECONDS = 0.4


@dataclass
class Known:
    """A process's last word on one key before it was killed, or the state found after that."""

    stored: int | None = None
    length: int = 0
    withdrawn: int = 0
    discarding: int = 0
    discarded: int = 0


@dataclass
class Outcome:
    """The results of all rounds."""

    rounds: int = 0
    stored: int = 0
    discarded: int = 0
    withdrawn: int = 0
    found: int = 0
    complaints: list[str] = field(default_factory=list)

    def describe(self) -> str:
        return (
            f"{self.rounds} kills, {self.stored:,} values stored, {self.discarded:,} discarded durably, "
            f"{self.withdrawn:,} given up, {self.found:,} found and compared after a kill"
        )


class Crashes:
    """One directory, over many lives of the process that writes there."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.outcome = Outcome()
        self._directory = directory
        self._random = Random(seed)
        self._known = {key: Known() for key in KEYS}

    def run(self, rounds: int, tell: Callable[[str], None]) -> Outcome:
        for number in range(rounds):
            self._kill_one((number + 1) * CLOCKS_A_ROUND)
            trio.run(self._look)
            self.outcome.rounds += 1
            if self.outcome.complaints:
                break
            if not (number + 1) % 50:
                tell(self.outcome.describe())
        return self.outcome

    def _kill_one(self, clock: int) -> None:
        command = [sys.executable, "-m", "tests.cluster.cold_writer"]
        arguments = [str(self._directory), str(clock), str(self._random.getrandbits(32))]
        with subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = process.stdout.readline()
            if first != b"ready\n":
                process.kill()
                raise AssertionError(f"{first!r}: {process.stderr.read().decode()}")
            time.sleep(self._random.uniform(0, LONGEST_LIFE_SECONDS))
            if process.poll() is not None:
                self.outcome.complaints.append(f"it ended: {process.stderr.read().decode()}")
            process.kill()
            for line in process.stdout.read().decode().splitlines(keepends=True):
                if line.endswith("\n"):
                    self._heard(line.split())

    def _heard(self, words: list[str]) -> None:
        known, clock = self._known[words[1].replace("_", " ")], int(words[2])
        match words[0]:
            case "stored":
                known.stored, known.length = clock, int(words[3])
                self.outcome.stored += 1
            case "withdrawn":
                known.withdrawn = max(known.withdrawn, clock)
                self.outcome.withdrawn += 1
            case "discarding":
                known.discarding = clock
            case "discarded":
                known.discarded = clock
                self.outcome.discarded += 1

    async def _look(self) -> None:
        disk: FileDisk = await trio.to_thread.run_sync(open_disk, self._directory, CAPACITY_BYTES)
        with closing(disk):
            async with running(disk, segment_bytes=MIB) as harness:
                for key in KEYS:
                    await self._look_at(harness, key)
            self._take_withdrawn(harness)

    async def _look_at(self, harness: Harness, key: str) -> None:
        self._take_withdrawn(harness)
        known = self._known[key]
        try:
            facts, value = await harness.load(key)
        except ColdMiss as miss:
            self._take_withdrawn(harness)
            gone = max(known.withdrawn, known.discarding)
            if known.stored is not None and known.stored > gone:
                self._complain(f"{key!r} of {known.stored} is lost: {miss.reason.value}")
            self._known[key] = Known(discarded=known.discarded)
            return
        clock = facts.version.clock
        self.outcome.found += 1
        if clock <= known.discarded:
            self._complain(f"{key!r} of {clock} was discarded up to {known.discarded}")
        stored = known.stored or 0
        if clock < stored and stored > known.withdrawn and stored > known.discarding:
            self._complain(f"{key!r} of {clock} is older than {stored}")
        if value not in (
            value_of(key, clock, facts.length),
            value_of(key, clock, facts.length, compressible=True),
        ):
            self._complain(f"{key!r} of {clock} has wrong bytes")
        self._known[key] = Known(clock, facts.length, discarded=known.discarded)

    def _take_withdrawn(self, harness: Harness) -> None:
        """Take in the objects that the tier gives up in the background, until it is closed."""
        for entry in harness.withdrawn:
            known = self._known[entry.key]
            known.withdrawn = max(known.withdrawn, entry.version.clock)

    def _complain(self, complaint: str) -> None:
        self.outcome.complaints.append(f"round {self.outcome.rounds}: {complaint}")
