"""A trace of requests replayed on a cluster of real peers, all on this machine, with blocks scaled down.

Requests are served one after the other, as fast as possible: an hour takes minutes. Nothing computes; only storage
matters. Each block is filled by its number, and each that comes back is compared with it. Peers may be killed and
started again meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mooncake_p2p.output import CommandFailed
from p2pstore.errors import P2PStoreError
from p2pstore.local.peer_processes import LocalCluster, PeerProcess, wait_until
from p2pstore.objects import MIB
from p2pstore.trace.one_cache import HitCounts, Model
from p2pstore.trace.pool import PeerChange, make_router, next_up

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.trace.one_cache import Request
    from p2pstore.trace.pool import PoolSettings

T = TypeVar("T")
MIN_PEERS: Final = 2
PAGE_BYTES: Final = 4096
TRAILER_BYTES: Final = PAGE_BYTES
"""Key, sums and header of a block in memory: the value is shorter by that, so that a block takes whole pages."""
BLOCK_BYTES: Final = 16 * 1024
MIN_BLOCK_BYTES: Final = 2 * PAGE_BYTES
MIN_COLD_BLOCK_BYTES: Final = 32 * 1024
"""The SSD tier does not take less than 16 KiB."""
SSD_HEADER_BYTES: Final = PAGE_BYTES
SSD_UNUSED: Final = 0.35
"""Of an SSD as small as here: segments that are being written, or kept free, and what does not fill them."""
MIN_SSD_BYTES: Final = 512 * MIB
LOOK_SECONDS: Final = 1.0
"""Counters of a peer that is killed are those of the last look."""


@dataclass(frozen=True, slots=True)
class OutagePlan:
    """Every `kill_every_seconds` one peer is killed (0: none), and started again after `down_seconds`."""

    kill_every_seconds: float = 0.0
    down_seconds: float = 5.0
    seed: int = 1


class Outages:
    """A timer kills a peer at any moment; it comes back between two requests of the replay (`between`). One peer at a
    time is away; the next one is killed once it is back."""

    def __init__(self, cluster: LocalCluster, clients: list[BlockingClient], plan: OutagePlan) -> None:
        self.up = [True] * len(clients)
        self.changes: list[PeerChange] = []
        self._cluster = cluster
        self._clients = clients
        self._plan = plan
        self._rng = Random(plan.seed)
        self._request = 0
        self._away: int | None = None
        self._killed_at = time.monotonic()
        self._starting = False
        self._timer: threading.Timer | None = None
        if plan.kill_every_seconds and len(clients) >= MIN_PEERS:
            self._arm()

    def between(self, request: int) -> None:
        """Before this request is served: start a peer that was away long enough; take back one that is ready."""
        self._request = request
        if self._away is None or self.up[self._away]:
            return
        peer = self._cluster.peers[self._away]
        if not self._starting:
            if time.monotonic() >= self._killed_at + self._plan.down_seconds:
                living = self._cluster.peers[self.up.index(True)]
                self._cluster.begin(peer, living.ready["control"])
                self._starting = True
        elif peer.has_spoken:
            peer.wait_until_ready()
            self._take_back(self._away, peer)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _take_back(self, number: int, peer: PeerProcess) -> None:
        with contextlib.suppress(Exception):  # of a peer that was killed
            self._clients[number].close()
        self._clients[number] = peer.connect()
        self.changes.append(PeerChange(self._request, number, up=True))
        self.up[number] = True
        self._away, self._starting = None, False
        self._arm()

    def _arm(self) -> None:
        due = self._killed_at + self._plan.kill_every_seconds
        self._timer = threading.Timer(max(0.0, due - time.monotonic()), self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        number = self._rng.randrange(len(self.up))
        self._killed_at = time.monotonic()
        self.changes.append(PeerChange(self._request, number, up=False))
        self._away = number
        self.up[number] = False  # before it dies, so that failures to reach it are expected
        self._cluster.peers[number].kill()


@dataclass(frozen=True, slots=True)
class Scale:
    """How large things are here."""

    block_bytes: int

    @property
    def value_bytes(self) -> int:
        return self.block_bytes - TRAILER_BYTES

    def memory_bytes(self, blocks: int) -> int:
        return blocks * self.block_bytes

    def ssd_bytes(self, blocks: int) -> int:
        """An SSD with room for at least `blocks` blocks beside the free segments of its log."""
        pages = -(-self.value_bytes // PAGE_BYTES)
        record = SSD_HEADER_BYTES + pages * PAGE_BYTES
        return max(MIN_SSD_BYTES, round(blocks * record / (1 - SSD_UNUSED)))


@dataclass(slots=True)
class RealOutcome:
    """The outcome of a replay on real peers."""

    counts: HitCounts = field(default_factory=HitCounts)
    seconds: float = 0.0
    served_at: list[float] = field(default_factory=list)
    """Seconds since the beginning, of each request."""
    ratios: list[float] = field(default_factory=list)
    """The hit rate so far, before each of them."""
    changes: list[PeerChange] = field(default_factory=list)
    """Peers killed and started again."""
    unreadable: int = 0
    """Blocks with a known holder that could not be read: the holder was gone, or had dropped them."""
    failed: int = 0
    """Those of them that a living peer had."""
    first_failure: str = ""
    """The message of the first of these."""
    last_copies_dropped: int = 0
    """While a peer had nothing else to evict, or its SSD did not keep up."""
    read_bytes: Counter[str] = field(default_factory=Counter)
    """Of scaled blocks, by how they came."""

    @property
    def kills(self) -> int:
        return sum(not change.up for change in self.changes)


def replay(
    cluster: LocalCluster,
    requests: Sequence[Request],
    settings: PoolSettings,
    model: Model,
    scale: Scale,
    plan: OutagePlan,
    advanced: Callable[[int], None],
) -> RealOutcome:
    """Start the peers and replay the trace. `advanced` is told after each request how many were served."""
    peers = [
        cluster.add(name, *_ssd_options(cluster, settings, scale, name))
        for name in (f"peer{number}" for number in range(settings.peers))
    ]
    cluster.start_all()
    with ExitStack() as stack:
        clients = [stack.enter_context(peer.connect()) for peer in peers]
        wait_until(lambda: all(len(each.peers()) == len(peers) for each in clients), "the cluster")
        outages = Outages(cluster, clients, plan)
        stack.callback(outages.close)
        replayed = _Replay(clients, outages, settings, model, scale.value_bytes)
        replayed.serve_all(requests, advanced)
    return replayed.outcome


def _ssd_options(
    cluster: LocalCluster, settings: PoolSettings, scale: Scale, name: str
) -> tuple[str, ...]:
    if not settings.ssd_blocks:
        return ()
    folder = cluster.folder / f"{name}.ssd"
    folder.mkdir()
    return "--ssd", str(folder), "--ssd-capacity", str(scale.ssd_bytes(settings.ssd_blocks))


class _Replay:
    def __init__(
        self,
        clients: Sequence[BlockingClient],
        outages: Outages,
        settings: PoolSettings,
        model: Model,
        value_bytes: int,
    ) -> None:
        self.outcome = RealOutcome(changes=outages.changes)
        self._clients = clients
        self._outages = outages
        self._model = model
        self._values = _Values(value_bytes)
        self._router = make_router(settings.routing, settings.load_bound, Random(settings.seed))
        self._affine = settings.routing == "affine"
        self._rooms: list[bytearray] = []
        self._counters = _Counters(len(clients))
        self._look_at = 0.0

    def serve_all(self, requests: Sequence[Request], advanced: Callable[[int], None]) -> None:
        begin = time.monotonic()
        for number, request in enumerate(requests):
            self._outages.between(number)
            self._look()
            self.outcome.served_at.append(time.monotonic() - begin)
            self.outcome.ratios.append(self.outcome.counts.ratio)
            self._serve(request)
            advanced(number + 1)
        self.outcome.seconds = time.monotonic() - begin
        self._outages.close()
        self._look_at = 0.0
        self._look()
        self.outcome.read_bytes = self._counters.read_bytes
        self.outcome.last_copies_dropped = self._counters.last_copies_dropped

    # --- one request ---------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        """Read what is anywhere, put the rest where the request went; elsewhere, when that peer dies meanwhile."""
        keys = [str(block) for block in request.hash_ids]
        chosen, hits = self._router(self._local(keys)), None
        while hits is None:
            chosen = next_up(chosen, self._outages.up)
            hits = self._ask(chosen, lambda client: self._serve_with(client, request, keys))
        self.outcome.counts.count(request, hits, self._model)

    def _serve_with(self, client: BlockingClient, request: Request, keys: Sequence[str]) -> int:
        hits = self._read(client, request.hash_ids, keys[: client.match_prefix(keys)])
        missing = request.hash_ids[hits:]
        for each in client.put_many([(str(block), self._values[block]) for block in missing]):
            each.unwrap()
        return hits

    def _ask(self, peer: int, question: Callable[[BlockingClient], T]) -> T | None:
        """The answer of a peer; None when it was killed meanwhile."""
        try:
            return question(self._clients[peer])
        except P2PStoreError:
            if self._outages.up[peer]:
                raise
            return None

    def _local(self, keys: Sequence[str]) -> list[int]:
        """Of how many blocks each peer has the run, where that matters."""
        runs = [0] * len(self._clients)
        if not self._affine or not keys:
            return runs
        names = {f"peer{number}": number for number in range(len(runs))}
        asked = self._outages.up.index(True)
        holders = self._ask(asked, lambda client: client.match_prefix_by_peer(keys))
        if holders is None:
            return self._local(keys)
        for holder in holders:
            runs[names[holder.peer]] = holder.blocks
        return runs

    def _read(self, client: BlockingClient, blocks: Sequence[int], keys: Sequence[str]) -> int:
        """How many of the blocks came, from the first on. Each is compared."""
        while len(self._rooms) < len(keys):
            self._rooms.append(bytearray(self._values.size_bytes))
        results = client.get_many_into(list(zip(keys, self._rooms, strict=False)))
        for place, result in enumerate(results):
            if not result.ok:
                if not self._outages.up[self._clients.index(client)]:
                    result.unwrap()
                self.outcome.unreadable += 1
                if self._is_held(keys[place]):
                    self.outcome.failed += 1
                    self.outcome.first_failure = self.outcome.first_failure or str(result.error)
                return place
            if self._rooms[place] != self._values[blocks[place]]:
                raise CommandFailed(f"block {blocks[place]} came back wrong; please report it")
        return len(results)

    def _is_held(self, key: str) -> bool:
        """Whether a living peer says that it holds the block itself."""
        living = (number for number, is_up in enumerate(self._outages.up) if is_up)
        found = (self._ask(number, lambda client: client.locate(key)) for number in living)
        return any(copy.local for copies in found for copy in copies or ())

    # --- what the peers counted ----------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        for number, is_up in enumerate(self._outages.up):
            document = self._ask(number, lambda client: client.statistics()) if is_up else None
            if document is not None:
                self._counters.take(number, document["peer"])


class _Values:
    """The contents of blocks: different for each, and incompressible."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._random = Random(1).randbytes(size_bytes + MIB)

    def __getitem__(self, block: int) -> bytes:
        start = block * 7919 % MIB
        return block.to_bytes(8, "little") + self._random[start : start + self.size_bytes - 8]


class _Counters:
    """Sums over the lives of all peers: each begins again at 0."""

    def __init__(self, peers: int) -> None:
        self._seen: list[Counter[str]] = [Counter() for _ in range(peers)]
        self._sums: Counter[str] = Counter()

    def take(self, peer: int, statistics: dict[str, Any]) -> None:
        counted = statistics["counters"]
        now = Counter({f"read {name}": use["bytes"] for name, use in statistics["received"].items()})
        now["life"] = statistics["incarnation"]
        now["dropped"] = counted.get("last_copies_dropped", 0)
        now["read"] = counted.get("client_read_bytes", 0)
        now["ssd"] = statistics.get("ssd", {}).get("bytes_read", 0)
        if now["life"] != self._seen[peer]["life"]:
            self._sums += self._seen[peer]
        self._seen[peer] = now

    def _sum(self, name: str) -> int:
        return self._sums[name] + sum(seen[name] for seen in self._seen)

    @property
    def last_copies_dropped(self) -> int:
        return self._sum("dropped")

    @property
    def read_bytes(self) -> Counter[str]:
        names = {name for seen in (*self._seen, self._sums) for name in seen}
        by_way = Counter({name[5:]: self._sum(name) for name in names if name.startswith("read ")})
        by_way["own memory"] = self._sum("read")
        by_way["SSD to memory"] = self._sum("ssd")
        return by_way
