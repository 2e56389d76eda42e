"""A scheduler in front of three inference engines: each request goes where most of its prefix is, unless too much waits
there. Beside each engine runs a peer; here all are in one program, and the engines only pretend to compute.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import trio

import p2pstore
from p2pstore.routing import Costs, Route, Router

ENGINES = 3
CONVERSATIONS = 12
TURNS = 5
BLOCKS_PER_TURN = 4
BLOCK_BYTES = 64 * 1024
COSTS = Costs(prefill_seconds_per_block=0.050, fetch_seconds_per_block=0.004)
LIMIT_SECONDS = 10.0


def conversation_keys(conversation: int, blocks: int) -> list[str]:
    """All conversations begin with the same system prompt."""
    return ["system prompt", *(f"conversation {conversation}/{each}" for each in range(blocks))]


async def serve(engine: p2pstore.Peer, keys: Sequence[str]) -> tuple[int, int]:
    """Bring what is cached anywhere, compute the rest, share it. How many blocks each."""
    cached = await engine.match_prefix(keys)
    rooms = [(key, bytearray(BLOCK_BYTES)) for key in keys[:cached]]
    brought = sum(item.ok for item in await engine.get_many_into(rooms))
    computed = [(key, random.randbytes(BLOCK_BYTES)) for key in keys[brought:]]
    await engine.put_many(computed)
    return brought, len(computed)


async def schedule(engines: Sequence[p2pstore.Peer]) -> None:
    """Serve all turns of all conversations, and say what that took."""
    by_id = {engine.peer_id: engine for engine in engines}
    router = Router(COSTS)
    waiting: list[Route] = []
    reused = fetched = computed = 0
    for turn in range(1, TURNS + 1):
        for conversation in random.sample(range(CONVERSATIONS), CONVERSATIONS):
            keys = conversation_keys(conversation, turn * BLOCKS_PER_TURN)
            holders = await engines[0].match_prefix_by_peer(keys)
            infos = await engines[0].peers()  # where there are many requests, once a second will do
            admission = Router.admit(
                router.rank(len(keys), holders, list(by_id), infos=infos), LIMIT_SECONDS
            )
            route = admission.route
            if route is None:
                print(f"conversation {conversation}: rejected, {admission.reason}")
                continue
            router.sent(route)
            waiting.append(route)
            if len(waiting) > 2 * ENGINES:  # the engines are that far behind
                router.finished(waiting.pop(0))
            brought, added = await serve(by_id[route.peer_id], keys)
            reused, fetched, computed = (
                reused + brought,
                fetched + route.fetched_blocks,
                computed + added,
            )
    print(f"{reused} blocks reused, {fetched} of them from other machines; {computed} computed")


async def main() -> None:
    random.seed(7)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="p2p"))
        engines: list[p2pstore.Peer] = []
        for number in range(ENGINES):
            config = p2pstore.PeerConfig(
                name=f"engine{number}",
                listen="127.0.0.1:0",
                bootstrap=[engines[0].control] if engines else [],
                memory="64MiB",
                socket=str(Path(folder) / f"{number}.sock"),
            )
            engines.append(await stack.enter_async_context(p2pstore.open_peer(config)))
        with trio.fail_after(10):
            while len(await engines[0].peers()) < ENGINES:  # they are getting to know each other
                await trio.sleep(0.01)
        await schedule(engines)


if __name__ == "__main__":
    trio.run(main)
