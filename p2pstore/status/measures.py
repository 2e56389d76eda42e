"""How long things took, how large they were and whose they were: what a peer counts for its metrics alone. Pure.

Whatever is counted here costs a few hundred nanoseconds, and its labels are few: transports, kinds of requests, and
the namespaces that were used first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from p2pstore.local.local_messages import PullCount
from p2pstore.runtime.histograms import Histogram

MAX_NAMESPACES: Final = 32
"""Namespaces with labels of their own: those that were used first. What all others do counts as that of `OTHERS`."""
OTHERS: Final = "other"
IN_PLACE: Final = "local"
"""In place of a transport: read in this peer's own memory."""
ON_SSD: Final = "ssd"


@dataclass(slots=True)
class NamespaceUse:
    """What clients of this machine did in one namespace. `misses` are gets that found nothing."""

    puts: int = 0
    put_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    misses: int = 0


class Measures:
    """Since the peer's start."""

    def __init__(self) -> None:
        self.requests: dict[str, Histogram] = {}
        """Of clients, by kind, answered without waiting for something that they asked to wait for: microseconds."""
        self.reads: dict[str, Histogram] = {}
        """Objects read one by one, by transport, or from the own SSD (`ON_SSD`): microseconds."""
        self.read_bytes: dict[str, Histogram] = {}
        """How long they were, those read in place (`IN_PLACE`) included."""
        self.put_bytes = Histogram()
        self.asked: dict[str, Histogram] = {}
        """Other peers, by what they were asked for: microseconds until they answered."""
        self.asked_in_vain: Counter[str] = Counter()
        """Those that refused, or did not answer in time."""
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
        """What counts for a namespace."""
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
        """A client's request was answered."""
        _of(self.requests, kind).add_seconds(seconds)

    def put(self, namespace: str, length: int, count: int = 1) -> None:
        """A client put so many objects of this length."""
        self.put_bytes.add(length, count)
        use = self.namespace(namespace)
        use.puts += count
        use.put_bytes += length * count

    def was_read(self, namespace: str, transport: str, objects: int, length_bytes: int) -> None:
        """A client read objects of about the same length, together so many bytes."""
        if objects > 0:
            _of(self.read_bytes, transport).add(length_bytes // objects, objects)
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

    def pulled(self, transport: str, seconds: float, length: int) -> None:
        """An object came to this peer's memory, from another peer or from its own SSD."""
        _of(self.reads, transport).add_seconds(seconds)
        _of(self.read_bytes, transport).add(length)

    def client_pulled(self, transport: str, pulls: PullCount) -> None:
        """A client read objects of another peer by itself, by a transport that is one of few."""
        if pulls.durations:
            _of(self.reads, transport).merge(pulls.durations, pulls.microseconds)
        lengths = _of(self.read_bytes, transport)
        if pulls.lengths:
            lengths.merge(pulls.lengths, pulls.bytes)
        elif pulls.objects > 0:  # an older client
            lengths.add(max(0, pulls.bytes) // pulls.objects, pulls.objects)

    def answered(self, what: str, seconds: float, *, served: bool) -> None:
        """Another peer was asked for something; `served` unless it refused or was silent."""
        if served:
            _of(self.asked, what).add_seconds(seconds)
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


def _of(histograms: dict[str, Histogram], label: str) -> Histogram:
    histogram = histograms.get(label)
    if histogram is None:
        histogram = histograms[label] = Histogram()
    return histogram


def _quantiles(histograms: dict[str, Histogram]) -> dict[str, dict[str, float]]:
    return {
        label: {
            "count": histogram.count,
            "p50_ms": histogram.quantile(0.5) / 1000,
            "p99_ms": histogram.quantile(0.99) / 1000,
        }
        for label, histogram in sorted(histograms.items())
    }
