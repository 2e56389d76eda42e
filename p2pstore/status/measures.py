"""How long things took, how large they were and whose they were; and which requests took long. Pure.

Whatever is counted here costs a few hundred nanoseconds, and its labels are few: transports, kinds of requests, and
the namespaces that were used first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from p2pstore.gossip.records import Member, PeerId
from p2pstore.local.local_messages import PullCount
from p2pstore.runtime.histograms import Histogram, milliseconds

MAX_NAMESPACES: Final = 32
"""Namespaces with labels of their own: those that were used first. All others count as `OTHERS`."""
OTHERS: Final = "other"
IN_PLACE: Final = "local"
"""In place of a transport: read in this peer's own memory."""
ON_SSD: Final = "ssd"


@dataclass(slots=True)
class NamespaceUse:
    """Use of one namespace by clients of this machine. `misses` are gets that found nothing."""

    puts: int = 0
    put_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    misses: int = 0


class Measures:
    """Since the peer's start."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Of clients, by kind, answered without waiting for something that they asked to wait for: microseconds."""
        self.reads: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Objects read one by one, by transport, or from the own SSD (`ON_SSD`): microseconds."""
        self.read_bytes: defaultdict[str, Histogram] = defaultdict(Histogram)
        """How long they were, those read in place (`IN_PLACE`) included."""
        self.put_bytes = Histogram()
        self.asked: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Other peers, by what they were asked for: microseconds until they answered."""
        self.asked_in_vain: Counter[str] = Counter()
        """Peers that refused, or did not answer in time."""
        self.pings = Histogram()
        """Microseconds."""
        self.loop_lag = Histogram()
        """How much later than due the event loop woke up a task: microseconds."""
        self.messages: Counter[tuple[str, str]] = Counter()
        """Of gossip, by kind and `sent` or `received`; replies are not counted apart."""
        self.message_failures: Counter[str] = Counter()
        self.member_changes: Counter[str] = Counter()
        """How often some member was found to be `alive`, `suspect`, `dead` or `left`."""
        self.strangers_refused = 0
        """Connections on the control port that were dropped for what the other side did, or was."""
        self.refused_by_members = 0
        self._namespaces: dict[str, NamespaceUse] = {}

    def namespace(self, name: str) -> NamespaceUse:
        use = self._namespaces.get(name)
        if use is None:
            if len(self._namespaces) >= MAX_NAMESPACES and name != OTHERS:
                return self.namespace(OTHERS)
            use = self._namespaces[name] = NamespaceUse()
        return use

    def namespaces(self) -> dict[str, NamespaceUse]:
        """All that have something to say."""
        return dict(sorted(self._namespaces.items()))

    def requested(self, kind: str, seconds: float) -> None:
        self.requests[kind].add_seconds(seconds)

    def put(self, namespace: str, length: int, count: int = 1) -> None:
        """A client put objects of this length."""
        self.put_bytes.add(length, count)
        use = self.namespace(namespace)
        use.puts += count
        use.put_bytes += length * count

    def was_read(self, namespace: str, transport: str, objects: int, length_bytes: int) -> None:
        """A client read objects of about the same length; `length_bytes` in all."""
        if objects > 0:
            self.read_bytes[transport].add(length_bytes // objects, objects)
            self.read_of(namespace, objects, length_bytes)

    def read_of(self, namespace: str, objects: int, length_bytes: int) -> None:
        """A client read objects; how they were read is counted elsewhere."""
        use = self.namespace(namespace)
        use.reads += objects
        use.read_bytes += length_bytes

    def missed(self, namespace: str, count: int) -> None:
        """Gets of a client found nothing."""
        if count:
            self.namespace(namespace).misses += count

    def pulled(self, transport: str, seconds: float, length: int, count: int = 1) -> None:
        """`count` objects of this length came to this peer's memory, from another peer or from its own SSD, each in so
        many seconds."""
        self.reads[transport].add_seconds(seconds, count)
        self.read_bytes[transport].add(length, count)

    def client_pulled(self, transport: str, pulls: PullCount) -> None:
        """A client read objects of another peer by itself, by a transport that is one of few."""
        if pulls.durations:
            self.reads[transport].merge(pulls.durations, pulls.microseconds)
        lengths = self.read_bytes[transport]
        if pulls.lengths:
            lengths.merge(pulls.lengths, pulls.bytes)
        elif pulls.objects > 0:  # an older client
            lengths.add(max(0, pulls.bytes) // pulls.objects, pulls.objects)

    def answered(self, what: str, seconds: float, *, served: bool) -> None:
        """Another peer was asked for something; `served` unless it refused or was silent."""
        if served:
            self.asked[what].add_seconds(seconds)
        else:
            self.asked_in_vain[what] += 1

    def document(self) -> dict[str, Any]:
        """For JSON: medians and 99th percentiles by name, in milliseconds."""
        return {
            "requests": _quantiles(self.requests),
            "reads": _quantiles(self.reads),
            "asked": _quantiles(self.asked),
            "pings": _quantiles({"ping": self.pings}),
            "event_loop_lag": _quantiles({"lag": self.loop_lag}),
        }


def _quantiles(histograms: dict[str, Histogram]) -> dict[str, dict[str, float]]:
    return {
        label: {"count": histogram.count, **milliseconds(histogram)}
        for label, histogram in sorted(histograms.items())
    }


MAX_PEERS: Final = 10_000
"""As many as a cluster may have members."""
ROUND_TRIPS: Final = 8
"""Round trips remembered per peer; the shortest of them is the way itself, the others met a busy process."""


@dataclass(slots=True)
class Use:
    """One transport's use: objects and bytes that came, failures, and microseconds of single reads."""

    objects: int = 0
    bytes: int = 0
    failures: int = 0
    durations: Histogram = field(default_factory=Histogram)

    def add(self, came: Came) -> None:
        self.objects += came.objects
        self.bytes += came.length_bytes
        self.failures += came.failures
        if came.durations:
            self.durations.merge(came.durations, came.microseconds)

    def document(self) -> dict[str, int]:
        return {"objects": self.objects, "bytes": self.bytes, "failures": self.failures}


class Came(NamedTuple):
    """Objects that came from a member, and attempts that failed. `durations`: counts of a `Histogram`."""

    objects: int = 0
    length_bytes: int = 0
    failures: int = 0
    durations: Sequence[int] = ()
    microseconds: int = 0


class Traffic:
    """Traffic from other peers to this one and its clients, and round trips."""

    def __init__(self) -> None:
        self.totals: dict[str, Use] = {}
        """By transport, over all peers."""
        self._by_member: dict[Member, dict[str, Use]] = {}
        self._round_trips: dict[PeerId, deque[float]] = {}

    def came(self, member: Member, transport: str, came: Came) -> None:
        """Objects arrived from a member, or attempts to get them failed."""
        if member not in self._by_member and len(self._by_member) >= MAX_PEERS:
            del self._by_member[next(iter(self._by_member))]
        for uses in (self.totals, self._by_member.setdefault(member, {})):
            uses.setdefault(transport, Use()).add(came)

    def took(self, member: Member, transport: str, seconds: float) -> None:
        """Duration of one object that `came` counted."""
        for uses in (self.totals, self._by_member.get(member, {})):
            if transport in uses:
                uses[transport].durations.add_seconds(seconds)

    def used(self, member: Member) -> dict[str, Use]:
        return self._by_member.get(member, {})

    def pinged(self, peer_id: PeerId, seconds: float) -> None:
        """A peer answered a ping over a connection that was open before."""
        if peer_id not in self._round_trips and len(self._round_trips) >= MAX_PEERS:
            del self._round_trips[next(iter(self._round_trips))]
        self._round_trips.setdefault(peer_id, deque(maxlen=ROUND_TRIPS)).append(seconds)

    def round_trip_seconds(self, peer_id: PeerId) -> float | None:
        """The shortest of the latest round trips; None when there was none."""
        return min(self._round_trips.get(peer_id, ()), default=None)

    def document(self) -> dict[str, Any]:
        """Totals for the statistics document."""
        return {name: use.document() for name, use in sorted(self.totals.items())}


INTERVAL_SECONDS: Final = 2.0
WORTH_TELLING_PERMILLE: Final = 250
"""An announcement costs a signature here, and a check at each other peer."""


class LoadMeter:
    """Measures what the process takes of a core, and its large answers of the upload slots, over some seconds each. The
    larger share is its load: at 1000 permille of either, further requests are late. Readers take the less loaded of
    two holders, and schedulers look at it (`p2pstore.routing`)."""

    def __init__(self, now: float, cpu_seconds: float, upload_slots: int) -> None:
        self.told_permille = 0
        self._slots = upload_slots
        self._since = now
        self._cpu_seconds = cpu_seconds
        self._upload_seconds = 0.0

    def sample(self, now: float, cpu_seconds: float, upload_seconds: float) -> bool:
        """Take a sample: processor seconds of the process since its start, and seconds that large answers took of all
        slots together. Returns whether `told_permille` changed."""
        elapsed = now - self._since
        if elapsed < INTERVAL_SECONDS:
            return False
        of_a_core = (cpu_seconds - self._cpu_seconds) / elapsed
        of_slots = (upload_seconds - self._upload_seconds) / elapsed / self._slots
        permille = round(1000 * max(0.0, of_a_core, of_slots))
        self._since, self._cpu_seconds, self._upload_seconds = now, cpu_seconds, upload_seconds
        if abs(permille - self.told_permille) < WORTH_TELLING_PERMILLE:
            return False
        self.told_permille = permille
        return True


# --- slow operations -----------------------------------------------------------------------------

RING_ENTRIES: Final = 128
MAX_STAGES: Final = 16
"""Stages kept of one operation; later ones only add to its time."""
MAX_DIGESTS: Final = 16
"""Keys of a batch that stages are matched with."""
LOG_INTERVAL_SECONDS: Final = 10.0
"""A peer that is slow as a whole must not fill its disk with lines that say so."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing done for an operation: `lookup`, `replicate`, `pull` (from another peer) or `load` (from the own SSD),
    with which peer, how it ended. `parts` are seconds of it by what they went to: of a pull the `queue` for a
    connection, the `transfer`, and `verify` where checking is a pass of its own."""

    what: str
    seconds: float
    peer: str = ""
    transport: str = ""
    outcome: str = "ok"
    parts: tuple[tuple[str, float], ...] = ()

    def document(self) -> dict[str, Any]:
        """For JSON; fields that say nothing are left out."""
        whole = {
            "what": self.what,
            "seconds": round(self.seconds, 6),
            "peer": self.peer,
            "transport": self.transport,
            "outcome": self.outcome,
            "parts": {name: round(seconds, 6) for name, seconds in self.parts},
        }
        return {name: value for name, value in whole.items() if value not in ("", {})}


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request that has ended. `key` is its text where the peer knows it, else the digest in hexadecimal;
    `keys` counts those of a batch. `unix` is when it ended."""

    what: str
    key: str
    keys: int
    client: str
    unix: float
    outcome: str = "ok"


@dataclass(frozen=True, slots=True)
class SlowOperation:
    """A slow request, and where its time went."""

    request: Request
    seconds: float
    waiting_seconds: float
    stages: tuple[Stage, ...] = ()

    def document(self) -> dict[str, Any]:
        """For the statistics document."""
        return {
            **asdict(self.request),
            "unix": round(self.request.unix, 3),
            "seconds": round(self.seconds, 6),
            "waiting_seconds": round(self.waiting_seconds, 6),
            "stages": [stage.document() for stage in self.stages],
        }


@dataclass(slots=True, eq=False)
class Watched:
    """An operation under way. `began` is monotonic; `may_wait_seconds` the waiting that was asked for."""

    began: float
    digests: Sequence[bytes] = ()
    may_wait_seconds: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)


class SlowOperations:
    """A ring of the latest operations that took `threshold_seconds` or more. Zero keeps none.

    While an answer is being found, what the peer does for it (asking other peers, pulling bytes) is noted as stages
    under the digests it concerns. Time outside all stages was spent waiting: for a key that did not exist yet, for
    room, or for this process itself. Waiting that the client asked for (`get --wait`) is not slow.
    """

    def __init__(self, threshold_seconds: float, entries: int = RING_ENTRIES) -> None:
        self.threshold_seconds = threshold_seconds
        self.total = 0
        """How many there were, those that have left the ring included."""
        self._ring: deque[SlowOperation] = deque(maxlen=entries)
        self._under_way: dict[bytes, list[Watched]] = {}
        self._log_at = -math.inf
        self._unlogged = 0

    def begin(self, digests: Sequence[bytes], now: float, *, may_wait_seconds: float = 0.0) -> Watched:
        """An operation whose answer takes more than one step; `end` must follow."""
        watched = Watched(now, digests[:MAX_DIGESTS], may_wait_seconds)
        for digest in watched.digests:
            self._under_way.setdefault(digest, []).append(watched)
        return watched

    def stage(self, digests: Iterable[bytes], stage: Stage, now: float) -> None:
        """Something was done for these digests, and ended at `now`."""
        concerned = {
            id(watched): watched for digest in digests for watched in self._under_way.get(digest, ())
        }
        for watched in concerned.values():
            if len(watched.stages) < MAX_STAGES:
                watched.stages.append(stage)
            watched.busy.append((max(watched.began, now - stage.seconds), now))

    def end(self, watched: Watched, request: Request, now: float) -> SlowOperation | None:
        """The operation is over; returned if it was slow."""
        for digest in watched.digests:
            others = self._under_way[digest]
            others.remove(watched)
            if not others:
                del self._under_way[digest]
        seconds = now - watched.began
        waiting = seconds - _covered(watched.busy)
        return self.add(
            SlowOperation(request, seconds, waiting, tuple(watched.stages)),
            asked_to_wait_seconds=min(waiting, watched.may_wait_seconds),
        )

    def add(
        self, operation: SlowOperation, *, asked_to_wait_seconds: float = 0.0
    ) -> SlowOperation | None:
        """Keep an operation, if it was slow: then it is returned."""
        if not 0 < self.threshold_seconds <= operation.seconds - asked_to_wait_seconds:
            return None
        self.total += 1
        self._ring.append(operation)
        return operation

    def may_log(self, now: float) -> int | None:
        """None when no line about a slow operation may be written now, else how many had none since the last line."""
        if now - self._log_at < LOG_INTERVAL_SECONDS:
            self._unlogged += 1
            return None
        self._log_at = now
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged

    def latest(self, number: int) -> list[SlowOperation]:
        """The latest `number`, newest first."""
        return list(islice(reversed(self._ring), number))

    def document(self) -> dict[str, Any]:
        """For the statistics document; the latest comes first."""
        return {
            "threshold_seconds": self.threshold_seconds,
            "total": self.total,
            "operations": [operation.document() for operation in reversed(self._ring)],
        }


def describe(operation: SlowOperation) -> str:
    """One line for the log."""
    stages = "".join(f", {_described(stage)}" for stage in operation.stages)
    request = operation.request
    many = f" and {request.keys - 1:,} more" if request.keys > 1 else ""
    return (
        f"slow {request.what} of {request.key or '-'}{many}: {operation.seconds:.3f} s, "
        f"waiting {operation.waiting_seconds:.3f} s{stages}; {request.outcome}"
    )


def _described(stage: Stage) -> str:
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stage.parts)
    return (
        f"{stage.what}{' from ' + stage.peer if stage.peer else ''}"
        f"{' by ' + stage.transport if stage.transport else ''} {stage.seconds:.3f} s"
        f"{f' ({parts})' if parts else ''}"
        f"{'' if stage.outcome == 'ok' else ' (' + stage.outcome + ')'}"
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, -math.inf
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
