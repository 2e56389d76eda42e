"""Which machine a request goes to, when its prefix is cached on some of them. Pure.

For schedulers in front of inference engines, one of which runs beside each peer. The idea is Mooncake's cache-aware
scheduling (FAST'25, section 5): the time to the first token is estimated for each machine, from what is queued there,
what of the prefix it has, what others have that it would have to fetch, and what it would have to compute. Without a
bound on the load all requests would go where the first block is, since all share that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from p2pstore.results import FetchEstimate, PeerInfo, PrefixHolder

DEFAULT_LOAD_BOUND: Final = 1.25
"""Of the mean of what is queued. The looser, the more each machine gets of what it has cached, and the longer queues
differ."""


DEFAULT_MOST_LOAD: Final = 1.0
"""Of a peer (`PeerInfo.load`): one whole core, or all of its upload slots."""


PROBE_DEVIATIONS: Final = 1.6
"""A source is read again where it is faster than computing with a chance of one in twenty."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a block takes. A block is whatever one key stands for, such as 512 tokens."""

    prefill_seconds_per_block: float
    """To compute its KV cache."""
    fetch_seconds_per_block: float
    """To bring it from another machine's memory."""
    load_seconds_per_block: float = 0.0
    """To bring it from this machine's memory to the device."""
    ssd_seconds_per_block: float = 0.0
    """The extra time from an SSD."""


@dataclass(frozen=True, slots=True)
class Route:
    """A machine for a request, and what is expected there. `reused_blocks` are not computed; `fetched_blocks` of these
    come from other machines."""

    peer_id: str
    reused_blocks: int
    fetched_blocks: int
    queue_seconds: float
    work_seconds: float
    is_over_bound: bool
    """It has more to do than the load bound allows: take it only when there is no other."""
    trouble: str = ""
    """Why its peer would be late, or refuse, by what it says of itself: it is busy, leaves, or is not alive. Empty
    where nothing is the matter."""

    @property
    def first_token_seconds(self) -> float:
        """Until the first token, as estimated."""
        return self.queue_seconds + self.work_seconds


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a request goes, or why it is better rejected now, before any work was spent on it."""

    route: Route | None
    reason: str = ""


@dataclass(slots=True)
class Router:
    """Ranks machines for requests, and remembers what it sent to each until that has `finished`.

    Knows nothing but what it is told, so several routers that serve the same machines should each tell the others'
    queues by `queued`.
    """

    costs: Costs
    load_bound: float = DEFAULT_LOAD_BOUND
    most_load: float = DEFAULT_MOST_LOAD
    _queued: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.load_bound < 1:
            raise ValueError("the load bound is a multiple of the mean: 1 at least")

    def rank(
        self,
        block_count: int,
        holders: Iterable[PrefixHolder],
        peers: Sequence[str],
        queued: Mapping[str, float] | None = None,
        infos: Iterable[PeerInfo] | None = None,
        estimates: Mapping[str, FetchEstimate] | None = None,
    ) -> list[Route]:
        """Routes of a request of `block_count` blocks to `peers` (ids of those beside which an engine runs), best
        first. `holders` is what `match_prefix_by_peer` said of its keys; `queued` the seconds of work that wait at
        each peer, instead of what this router has sent there. `infos` is what `peers()` said of them: where one is in
        trouble, it comes after all others. `estimates` is what `estimate` said at some of these peers of the request's
        keys: there it counts instead of the costs of fetching.
        """
        waiting = self._queued if queued is None else queued
        known = list(holders)
        own = {holder.peer_id: holder for holder in known}
        bound = self.load_bound * sum(waiting.get(peer, 0.0) for peer in peers) / max(1, len(peers))
        routes = []
        for peer in peers:
            fetch_costs = self._fetch_costs(peer, (estimates or {}).get(peer))
            queue = waiting.get(peer, 0.0)
            routes.append(
                self._route(peer, block_count, own.get(peer), known, queue, bound, fetch_costs)
            )
        if infos is not None:
            told = {info.peer_id: info for info in infos}
            routes = [replace(each, trouble=self._trouble(told.get(each.peer_id))) for each in routes]
        return sorted(
            routes, key=lambda each: (bool(each.trouble), each.is_over_bound, each.first_token_seconds)
        )

    def _trouble(self, info: PeerInfo | None) -> str:
        if info is None:
            return "no such peer"
        if info.leaving:
            return "it is leaving"
        if info.status != "alive":
            return f"it is {info.status}"
        if info.load >= self.most_load:
            return f"it is busy: {info.load:.2f} of a core, or of its upload slots"
        return ""

    def _fetch_costs(self, peer: str, estimate: FetchEstimate | None) -> tuple[float, float]:
        """Seconds to fetch a block, and in addition from an SSD. Where there is an estimate, its mean says both."""
        away = [each for each in estimate.sources if each.peer_id != peer] if estimate else []
        if not away:
            return self.costs.fetch_seconds_per_block, self.costs.ssd_seconds_per_block
        return sum(each.seconds for each in away) / sum(each.blocks for each in away), 0.0

    def _route(
        self,
        peer: str,
        block_count: int,
        own: PrefixHolder | None,
        holders: Sequence[PrefixHolder],
        queue_seconds: float,
        bound: float,
        fetch_costs: tuple[float, float],
    ) -> Route:
        """The cheapest of: using what is here, and also fetching what the others have beyond that."""
        costs, (fetch_seconds, ssd_seconds) = self.costs, fetch_costs
        here = min(own.blocks, block_count) if own is not None else 0
        best: tuple[float, int, int] | None = None
        for reused, slow_blocks in [(here, 0), *_runs(holders, peer, here, block_count)]:
            seconds = (
                (block_count - reused) * costs.prefill_seconds_per_block
                + (reused - here) * fetch_seconds
                + here * costs.load_seconds_per_block
                + slow_blocks * ssd_seconds
                + _on_ssd(own, here) * costs.ssd_seconds_per_block
            )
            if best is None or seconds < best[0]:
                best = seconds, reused, reused - here
        assert best is not None
        work_seconds, reused, fetched = best
        return Route(peer, reused, fetched, queue_seconds, work_seconds, queue_seconds > bound)

    def sent(self, route: Route) -> None:
        """A request goes there: its work waits there from now on."""
        self._queued[route.peer_id] = self._queued.get(route.peer_id, 0.0) + route.work_seconds

    def finished(self, route: Route) -> None:
        """The first token of a request is there, or the request was given up."""
        left = self._queued.get(route.peer_id, 0.0) - route.work_seconds
        if left > 1e-9:
            self._queued[route.peer_id] = left
        else:
            self._queued.pop(route.peer_id, None)

    @staticmethod
    def admit(routes: Sequence[Route], first_token_seconds: float) -> Admission:
        """The best of these routes that is in no trouble and expected to keep this limit; or the reason for which the
        request is better rejected (early rejection). `routes` are those of `rank`."""
        if not routes:
            return Admission(None, "there is no machine")
        in_time = [each for each in routes if each.first_token_seconds <= first_token_seconds]
        if not in_time:
            best = min(each.first_token_seconds for each in routes)
            limit = f"{first_token_seconds:g} s are allowed"
            return Admission(None, f"late: {best:.1f} s at best, and {limit}")
        fit = next((each for each in in_time if not each.trouble), None)
        if fit is None:
            return Admission(None, f"refused: of the best machine's peer, {in_time[0].trouble}")
        return Admission(fit)

    @staticmethod
    def accepts(routes: Sequence[Route], first_token_seconds: float) -> bool:
        """Whether some route is expected to keep this limit: if not, better reject the request before any work was
        spent on it (early rejection)."""
        return any(route.first_token_seconds <= first_token_seconds for route in routes)


def worth_fetching(estimate: FetchEstimate, prefill_seconds: Sequence[float]) -> int:
    """How many keys of a chain, from the first on, to fetch so that fetching them and computing the others takes the
    least time. `estimate` is that of the chain; `prefill_seconds` is the time to compute each of its blocks.

    One more block is fetched from a source that is too slow, but, not having been read for long, may be fast again:
    a link that recovered would not be noticed otherwise."""
    seconds = [each.seconds / each.blocks for each in estimate.sources]
    most, saved, cut = 0.0, 0.0, 0
    for place, (number, prefill) in enumerate(zip(estimate.by_key, prefill_seconds, strict=True), 1):
        if number < 0:
            break
        saved += prefill - seconds[number]
        if saved > most:
            most, cut = saved, place
    number = estimate.by_key[cut] if cut < len(estimate.by_key) else -1
    if number < 0:
        return cut
    source = estimate.sources[number]
    best_seconds = source.seconds * math.exp(-PROBE_DEVIATIONS * source.spread)
    return cut + (best_seconds < source.blocks * prefill_seconds[cut])


def _runs(
    holders: Iterable[PrefixHolder], peer: str, here: int, block_count: int
) -> list[tuple[int, int]]:
    """How far others' runs reach beyond what is here, and how many of those blocks are on an SSD."""
    runs = []
    for holder in holders:
        reach = min(holder.blocks, block_count)
        if holder.peer_id != peer and reach > here:
            runs.append((reach, _on_ssd(holder, reach) - _on_ssd(holder, here)))
    return runs


def _on_ssd(holder: PrefixHolder | None, blocks: int) -> int:
    """Of the first blocks of a holder's run, those that are not in its memory, at most."""
    if holder is None:
        return 0
    return min(blocks, holder.blocks - holder.memory_blocks)
