"""A trace of requests replayed on a cluster of real peers, all on this machine, with blocks scaled down.

Requests are served one after the other, as fast as that goes: what took an hour takes minutes. Only what is stored
matters: nothing computes. Each block is filled by its number, and each that comes back is compared with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mooncake_p2p.errors import CommandFailed
from mooncake_p2p.local_cluster import LocalCluster, wait_until
from p2pstore.trace.prefix_hits import HitCounts, Model
from p2pstore.trace.routing import make_router

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.trace.pool import PoolSettings
    from p2pstore.trace.requests import Request

TRAILER_BYTES: Final = 512
"""Key, sums and header of a block in memory: so much shorter is its value, so that it takes what was asked for."""


@dataclass(slots=True)
class RealOutcome:
    """What a replay on real peers came to."""

    counts: HitCounts = field(default_factory=HitCounts)
    seconds: float = 0.0
    lost: int = 0
    """Blocks that were known to be somewhere, and could not be read."""
    read_bytes: Counter[str] = field(default_factory=Counter)
    """Of scaled blocks, by how they came."""


def replay(
    cluster: LocalCluster,
    requests: Sequence[Request],
    settings: PoolSettings,
    model: Model,
    block_bytes: int,
    advanced: Callable[[int], None],
) -> RealOutcome:
    """Start the peers and replay the trace. `advanced` is told after each request how many were served."""
    peers = [cluster.add(f"peer{number}") for number in range(settings.peers)]
    cluster.start(peers[0])
    cluster.start(*peers[1:], bootstrap=peers[0].ready["control"])
    with ExitStack() as stack:
        clients = [stack.enter_context(peer.connect()) for peer in peers]
        wait_until(lambda: all(len(each.peers()) == len(peers) for each in clients), "the cluster")
        replayed = _Replay(clients, settings, model, block_bytes - TRAILER_BYTES)
        begin = time.monotonic()
        for number, request in enumerate(requests, 1):
            replayed.serve(request)
            advanced(number)
        replayed.outcome.seconds = time.monotonic() - begin
        replayed.count_bytes()
    return replayed.outcome


class _Replay:
    def __init__(
        self,
        clients: Sequence[BlockingClient],
        settings: PoolSettings,
        model: Model,
        value_bytes: int,
    ) -> None:
        self.outcome = RealOutcome()
        self._clients = clients
        self._model = model
        self._value_bytes = value_bytes
        self._router = make_router(settings.routing, settings.load_bound, Random(settings.seed))
        self._affine = settings.routing == "affine"
        self._rooms: list[bytearray] = []

    def serve(self, request: Request) -> None:
        """Read what is anywhere, put the rest where the request went."""
        keys = [str(block) for block in request.hash_ids]
        client = self._clients[self._router.choose(self._local(keys))]
        hits = self._read(client, request.hash_ids, keys[: client.match_prefix(keys)])
        self.outcome.counts.count(request, hits, self._model)
        missing = request.hash_ids[hits:]
        puts = client.put_many([(str(block), self._value(block)) for block in missing])
        for each in puts:
            each.unwrap()

    def _local(self, keys: Sequence[str]) -> list[int]:
        """Of how many blocks each peer has the run, where that matters."""
        runs = [0] * len(self._clients)
        if self._affine and keys:
            names = {f"peer{number}": number for number in range(len(runs))}
            for holder in self._clients[0].match_prefix_by_peer(keys):
                runs[names[holder.peer]] = holder.blocks
        return runs

    def _read(self, client: BlockingClient, blocks: Sequence[int], keys: Sequence[str]) -> int:
        """How many of the blocks came, from the first on. Each is compared."""
        while len(self._rooms) < len(keys):
            self._rooms.append(bytearray(self._value_bytes))
        results = client.get_many_into(list(zip(keys, self._rooms, strict=False)))
        for place, result in enumerate(results):
            if not result.ok:
                self.outcome.lost += 1
                return place
            if self._rooms[place] != self._value(blocks[place]):
                raise CommandFailed(f"block {blocks[place]} came back wrong; please report it")
        return len(results)

    def _value(self, block: int) -> bytes:
        return block.to_bytes(8, "little") * (self._value_bytes // 8)

    def count_bytes(self) -> None:
        """What came how, as the peers counted it."""
        for client in self._clients:
            peer: dict[str, Any] = client.statistics()["peer"]
            moved = 0
            for transport, use in peer["received"].items():
                self.outcome.read_bytes[transport] += use["bytes"]
                moved += use["bytes"]
            own = peer["counters"].get("client_read_bytes", 0) - moved
            self.outcome.read_bytes["own memory"] += max(0, own)
