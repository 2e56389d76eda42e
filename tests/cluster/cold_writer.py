"""A process that stores and discards in an SSD tier until it is killed.

    python -m tests.cluster.cold_writer DIR CLOCK SEED

It says on standard output what it was told, a line each, before it does anything that depends on it:

    ready
    stored KEY CLOCK LENGTH        `store` returned true
    withdrawn KEY CLOCK            the tier is about to give it up
    discarding KEY CLOCK           `discard` is about to be called
    discarded KEY CLOCK            `discards_durable` returned
"""

import os
import sys
from collections.abc import Sequence
from random import Random

import trio

from p2pstore.objects import MIB, Version, key_digest
from p2pstore.ssd_tier.cold_log import TierHooks
from p2pstore.ssd_tier.disk import open_disk
from p2pstore.ssd_tier.index import ColdEntry
from p2pstore.ssd_tier.log_layout import LOG_START_BYTES
from p2pstore.ssd_tier.tier import SsdTier, open_tier
from p2pstore.ssd_tier.write_admission import AdmissionPolicy
from tests.unit.cold_harness import NAMESPACE, aligned, facts_of, value_of

SEGMENTS = 6
CAPACITY_BYTES = LOG_START_BYTES + SEGMENTS * MIB
KEYS = [f"key {number}" for number in range(20)]
LENGTHS = (0, 5000, 70_000, 70_000, 400_000)
WRITERS = 4


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)).replace("key ", "key_") + "\n").encode())


class Work:
    def __init__(self, tier: SsdTier, clock: int, seed: int) -> None:
        self.tier = tier
        self.clock = clock
        self.random = Random(seed)
        self.busy: set[str] = set()

    async def write(self) -> None:
        """Store under keys that no other writer uses now."""
        while True:
            key = self.take()
            self.clock += 1
            clock, length = self.clock, self.random.choice(LENGTHS)
            value = value_of(key, clock, length, compressible=self.random.random() < 0.3)
            facts = facts_of(key, clock, value)
            if await self.tier.store(facts, aligned(value), durable=self.random.random() < 0.2):
                say("stored", key, clock, length)
            self.busy.discard(key)

    async def discard(self) -> None:
        while True:
            await trio.sleep(self.random.uniform(0, 0.01))
            key = self.take()
            self.clock += 1
            clock = self.clock
            say("discarding", key, clock)
            self.tier.discard(key_digest(key, NAMESPACE), Version(clock, 0))
            await self.tier.discards_durable()
            say("discarded", key, clock)
            self.busy.discard(key)

    def take(self) -> str:
        key = self.random.choice([key for key in KEYS if key not in self.busy])
        self.busy.add(key)
        return key


def withdraw(entries: Sequence[ColdEntry]) -> None:
    for entry in entries:
        say("withdrawn", entry.key, entry.version.clock)


async def main(directory: str, clock: int, seed: int) -> None:
    disk = open_disk(directory, CAPACITY_BYTES)
    async with open_tier(
        disk,
        AdmissionPolicy(),
        TierHooks(withdraw=withdraw, is_last_copy=lambda digest: digest[0] < 40),
        segment_bytes=MIB,
    ) as tier:
        say("ready")
        work = Work(tier, clock, seed)
        async with trio.open_nursery() as nursery:
            for _ in range(WRITERS):
                nursery.start_soon(work.write)
            nursery.start_soon(work.discard)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
