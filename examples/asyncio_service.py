"""A service under asyncio that shares what it computed with every other machine of the cluster.

Many requests at once; each result is computed by whoever is first to need it, and read by everybody
else. Needs a running peer: `mooncake-p2p join`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter

import p2pstore
from p2pstore import aio

REQUESTS = 40
TOPICS = 8
PATIENCE_SECONDS = 2.0


class Service:
    """Answers requests; `outcomes` counts how."""

    def __init__(self, store: p2pstore.AioClient) -> None:
        self.outcomes: Counter[str] = Counter()
        self._store = store

    async def answer(self, topic: str) -> bytes:
        """The answer to one request: from the cluster, or computed and shared."""
        key = f"answer/{hashlib.sha256(topic.encode()).hexdigest()}"
        try:
            found = await self._store.get(key)
        except p2pstore.NoSuchKey:
            pass
        else:
            self.outcomes["found"] += 1
            return found
        computed = await self._compute(topic)
        self.outcomes["computed"] += 1
        await self._store.put(key, computed, ttl=3600)  # a cache: an hour is enough
        return computed

    async def _compute(self, topic: str) -> bytes:
        await asyncio.sleep(0.02)  # something expensive
        return f"all about {topic}".encode() * 1000


async def main() -> None:
    async with aio.connect(namespace="examples/asyncio") as store:
        service = Service(store)
        rng = random.Random(1)
        for _ in range(2):  # two waves of requests
            async with asyncio.TaskGroup() as wave:
                for _ in range(REQUESTS):
                    wave.create_task(service.answer(f"topic {rng.randrange(TOPICS)}"))
        print(dict(service.outcomes))
        assert service.outcomes["found"] >= REQUESTS

        # Cancellation and time limits are asyncio's own; the client stays usable.
        try:
            async with asyncio.timeout(0.1):
                await store.get("never put", wait=PATIENCE_SECONDS)
        except TimeoutError:
            print("gave up waiting")
        await store.flush()
        print("flushed; left:", len((await store.list_keys()).keys))


if __name__ == "__main__":
    asyncio.run(main())
