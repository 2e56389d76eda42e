"""Which requests took long, and where their time went. Pure.

While an answer is being found, what the peer does for it (asking other peers, pulling bytes) is noted as
stages under the digests it concerns. Time outside all stages was spent waiting: for a key that did not exist
yet, for room, or for this process itself. Waiting that the client asked for (`get --wait`) is not slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Final

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
    """A ring of the latest operations that took `threshold_seconds` or more. Zero keeps none."""

    def __init__(self, threshold_seconds: float, entries: int = RING_ENTRIES) -> None:
        self.threshold_seconds = threshold_seconds
        self.total = 0
        """How many there were, those that have left the ring included."""
        self._ring: deque[SlowOperation] = deque(maxlen=entries)
        self._under_way: dict[bytes, list[Watched]] = {}
        self._log_at = float("-inf")
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
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
