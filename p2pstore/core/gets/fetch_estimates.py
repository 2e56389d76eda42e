"""Expected time to bring objects to this host, from what their holders delivered lately. Pure.

A read takes `requests * latency + bytes * slowness` seconds. Both figures are tracked per holder and kind of source, as
logarithms, because links differ by factors, by a Kalman filter: exponentially weighted means, whose weight follows from
the variance of the observations and from the age of the last one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from p2pstore.gossip.locations.location_lookups import HeldKeys
from p2pstore.gossip.records import Member, PeerId
from p2pstore.objects import SIZE_UNIT_BYTES, put_newest
from p2pstore.results import SOURCE_KINDS, SourceKind, total_time

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

PRIORS: Final[dict[SourceKind, tuple[float, float]]] = {
    "memory": (20e-6, 1 / 4e9),
    "neighbour": (50e-6, 1 / 4e9),
    "remote": (300e-6, 1 / 1e9),
    "ssd": (200e-6, 1 / 1e9),
}
"""Seconds a request and seconds a byte of sources that were never read."""
PRIOR_VARIANCE: Final = 1.0
"""Of the logarithm of a figure that was never observed: a factor of 2.7."""
MAX_VARIANCE: Final = 2.0
DRIFT_PER_SECOND: Final = 0.01
"""Variance that the slowness gains with age: after 100 s it is as uncertain as an unknown one."""
LATENCY_DRIFT: Final = 0.1
"""Share of it that the latency gains."""
NOISE: Final = 0.05
"""Variance of the logarithm of one observation, until it is known: a quarter of the figure."""
MIN_NOISE: Final = 0.002
MAX_NOISE: Final = 0.15
"""A larger difference is a change."""
NOISE_GAIN: Final = 0.1
SURPRISE: Final = 9.0
"""Squared standard deviations, from which on an observation counts no more than that; whether it was a hiccup or a new
speed, the next one decides."""
ITERATIONS: Final = 4
MAX_WAYS: Final = 4096


@dataclass(slots=True)
class Way:
    """The logarithms of both figures of one source, their variances, and the `noise` of one observation."""

    latency: float
    slowness: float
    latency_variance: float = PRIOR_VARIANCE
    slowness_variance: float = PRIOR_VARIANCE
    noise: float = NOISE
    at: float = -math.inf

    def observe(self, requests: int, length_bytes: int, seconds: float, now: float) -> None:
        """Requests for that number of bytes took that time, one after the other: an extended Kalman filter, iterated
        because the time is far from linear in the logarithms."""
        latency, slowness = self._variances(now)
        expected, share = self._time(requests, length_bytes, self.latency, self.slowness)
        error = math.log(seconds / expected)
        usual = self._variance(share, latency, slowness)
        surprise = error * error if error * error > SURPRISE * usual else 0.0
        if surprise:
            error = math.copysign(math.sqrt(SURPRISE * usual), error)
        elif math.isfinite(self.at):
            noise = self.noise + NOISE_GAIN * (error * error - usual)
            self.noise = min(max(noise, MIN_NOISE), MAX_NOISE)
        wanted = math.log(expected) + error
        first, second = self.latency, self.slowness
        for _ in range(ITERATIONS):
            expected, share = self._time(requests, length_bytes, first, second)
            total = self._variance(share, latency, slowness)
            error = wanted - math.log(expected)
            error += share * (first - self.latency) + (1 - share) * (second - self.slowness)
            first = self.latency + latency * share / total * error
            second = self.slowness + slowness * (1 - share) / total * error
        self.latency, self.slowness = first, second
        self.latency_variance = latency * (1 - latency * share**2 / total)
        self.slowness_variance = slowness * (1 - slowness * (1 - share) ** 2 / total)
        self.latency_variance = max(self.latency_variance, share**2 * surprise)
        self.slowness_variance = max(self.slowness_variance, surprise)
        self.at = now

    def expect(self, requests: int, length_bytes: int, now: float, load: float) -> Expected:
        """Time of such reads. The holder's load counts as far as its speed was not measured under it."""
        latency, slowness = self._variances(now)
        slower = math.log1p(load) * min(1.0, slowness / PRIOR_VARIANCE)
        seconds, share = self._time(requests, length_bytes, self.latency, self.slowness + slower)
        return Expected(seconds, math.sqrt(self._variance(share, latency, slowness)))

    def _variances(self, now: float) -> tuple[float, float]:
        """Variances of both figures, which grow with the age of the last observation."""
        if self.at == -math.inf:
            return self.latency_variance, self.slowness_variance
        drift = DRIFT_PER_SECOND * max(0.0, now - self.at)
        return (
            min(MAX_VARIANCE, self.latency_variance + LATENCY_DRIFT * drift),
            min(MAX_VARIANCE, self.slowness_variance + drift),
        )

    def _variance(self, share: float, latency: float, slowness: float) -> float:
        """Of the logarithm of an observation, by the variances of both figures and the latency's share in it."""
        return share**2 * latency + (1 - share) ** 2 * slowness + self.noise

    @staticmethod
    def _time(requests: int, length_bytes: int, latency: float, slowness: float) -> tuple[float, float]:
        """Seconds, and the share of the latency in them."""
        first = requests * math.exp(latency)
        seconds = first + length_bytes * math.exp(slowness)
        return seconds, first / seconds


@dataclass(frozen=True, slots=True)
class Expected:
    """Median of a time, and the standard deviation of its logarithm."""

    seconds: float
    spread: float


class ReadRates:
    """Figures of all sources that the peer `own` and its clients read. A source without any starts with what others of
    its kind showed."""

    def __init__(self, own: Member) -> None:
        self._own = own
        self._ways: OrderedDict[tuple[Member, SourceKind], Way] = OrderedDict()
        self._usual = {
            kind: Way(math.log(latency), math.log(slowness))
            for kind, (latency, slowness) in PRIORS.items()
        }

    def observe(
        self,
        member: Member,
        kind: SourceKind,
        requests: int,
        length_bytes: int,
        seconds: float,
        now: float,
        round_trip_seconds: float = 0.0,
    ) -> None:
        """Requests to a source took that time together."""
        if requests <= 0 or length_bytes <= 0 or not 0 < seconds < math.inf:
            return
        way = self._way(member, kind, round_trip_seconds)
        put_newest(self._ways, (member, kind), way, MAX_WAYS)
        way.observe(requests, length_bytes, seconds, now)
        if kind != "ssd" or member == self._own:  # of others it is a link as well
            self._usual[kind].observe(requests, length_bytes, seconds, now)

    def knows(self, member: Member, kind: SourceKind) -> bool:
        return (member, kind) in self._ways

    def expect(
        self,
        member: Member,
        kind: SourceKind,
        requests: int,
        length_bytes: int,
        now: float,
        load: float = 0.0,
        round_trip_seconds: float = 0.0,
    ) -> Expected:
        return self._way(member, kind, round_trip_seconds).expect(requests, length_bytes, now, load)

    def _way(self, member: Member, kind: SourceKind, round_trip_seconds: float) -> Way:
        known = self._ways.get((member, kind))
        if known is not None:
            return known
        usual = self._usual[kind]
        latency = max(usual.latency, math.log(max(round_trip_seconds, 1e-9)))
        return Way(latency, usual.slowness)


@dataclass(frozen=True, slots=True)
class Source:
    """Keys, by their places, that are expected to come from one holder."""

    peer_id: PeerId
    kind: SourceKind
    places: npt.NDArray[np.intp]
    length_bytes: int
    expected: Expected


class Estimator:
    """Estimates of one peer."""

    def __init__(
        self, core: PeerCore, host_id: bytes, round_trip_seconds: Callable[[PeerId], float | None]
    ) -> None:
        """`host_id`: of this host. `round_trip_seconds`: the least of the latest pings to a peer."""
        self._core = core
        self._host_id = host_id
        self._round_trip_seconds = round_trip_seconds
        self.rates = ReadRates(core.member)

    def observe(
        self,
        member: Member,
        *,
        on_ssd: bool,
        requests: int,
        length_bytes: int,
        seconds: float,
        now: float,
    ) -> None:
        """Reads from a member (this peer among them) took that time together, one after the other."""
        kind, _, round_trip = self._facts(member)
        kind = "ssd" if on_ssd else kind
        self.rates.observe(member, kind, requests, length_bytes, seconds, now, round_trip)

    def estimate(
        self, digests: Sequence[bytes], found: Mapping[Member, HeldKeys], now: float
    ) -> list[Source]:
        """Where each of the keys with a holder would be read, and how long that takes: of several sources at once,
        the share of each."""
        sizes = self._sizes(digests, found, now)
        sources = []
        for member, kind, places in self._choose(found, len(digests)):
            state = self._core.gossip.membership.resolve(member)
            peer_id = self._core.peer_id if state is None else state.peer_id
            length_bytes = int(sizes[places].sum())
            expected = self._expect(member, kind, len(places), length_bytes, now)
            sources.append(Source(peer_id, kind, places, length_bytes, expected))
        return sources

    def _expect(
        self, member: Member, kind: SourceKind, count: int, length_bytes: int, now: float
    ) -> Expected:
        """Time of a batch, which is one request; objects on an SSD are read one by one."""
        memory, load, round_trip = self._facts(member)
        requests = count if kind == "ssd" else 1
        rates, asked = self.rates, (requests, length_bytes, now, load, round_trip)
        expected = rates.expect(member, kind, *asked)
        if kind != "ssd" or member == self._core.member or rates.knows(member, kind):
            return expected
        link = rates.expect(member, memory, *asked)
        return Expected(*total_time([(expected.seconds, expected.spread), (link.seconds, link.spread)]))

    def _facts(self, member: Member) -> tuple[SourceKind, float, float]:
        """The kind of a member's memory, its load, and its round trip."""
        core = self._core
        if member == core.member:
            return "memory", 0.0, 0.0
        state = core.gossip.membership.resolve(member)
        if state is None or state.record is None:
            return "remote", 0.0, 0.0
        load = state.record.load_permille / 1000
        if state.record.host_id == self._host_id:
            return "neighbour", load, 0.0
        return "remote", load, self._round_trip_seconds(state.peer_id) or 0.0

    def _choose(
        self, found: Mapping[Member, HeldKeys], count: int
    ) -> Iterator[tuple[Member, SourceKind, npt.NDArray[np.intp]]]:
        """The places of each source. Of several holders of one kind each gets its share: readers choose at random."""
        by_kind: dict[SourceKind, list[tuple[Member, npt.NDArray[np.bool_]]]] = {}
        for member, holding in found.items():
            by_kind.setdefault(self._facts(member)[0], []).append((member, holding.in_memory))
            by_kind.setdefault("ssd", []).append((member, holding.held & ~holding.in_memory))
        open_places = np.ones(count, np.bool_)
        for kind in SOURCE_KINDS:
            some = by_kind.get(kind)
            if not some:
                continue
            masks = np.array([mask for _, mask in some]) & open_places
            holders = masks.sum(axis=0)
            turn = 1 + np.arange(count) % np.maximum(holders, 1)
            chosen = masks & (masks.cumsum(axis=0) == turn)
            open_places &= holders == 0
            for (member, _), mask in zip(some, chosen, strict=True):
                places = mask.nonzero()[0]
                if places.size:
                    yield member, kind, places

    def _sizes(
        self, digests: Sequence[bytes], found: Mapping[Member, HeldKeys], now: float
    ) -> npt.NDArray[np.int64]:
        """Length of each object in bytes; in units of 4 KiB where another peer holds it."""
        sizes = np.zeros(len(digests), np.int64)
        for holding in found.values():
            np.maximum(sizes, holding.size_units.astype(np.int64) * SIZE_UNIT_BYTES, out=sizes)
        core, own = self._core, found.get(self._core.member)
        for place in () if own is None else own.held.nonzero()[0].tolist():
            digest = digests[place]
            entry = core.segment.find(digest, core.unix(now)) or core.cold.find(digest, now)
            if entry is not None:
                sizes[place] = entry.length
        return sizes
