"""The course of one read, for people who ask where it came from and where the time went. Pure.

A `Destination` may carry a `ReadWatch` in an attribute `watch`; the code that moves its bytes tells the watch.
Without one nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

DELIVERED: Final = "delivered"
NOT_NEEDED: Final = "not needed"

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all, at most once per MiB. After a failure it goes on, or
starts over when the next holder has another version. Called in the thread that moves the bytes; what it raises ends
the read."""


@dataclass(slots=True)
class TransportTry:
    """One transport to one holder. `outcome` is `delivered`, or why it failed, or, when not `tried`,
    why it was no choice."""

    peer: str
    transport: str
    tried: bool
    outcome: str
    seconds: float = 0.0
    length_bytes: int = 0
    """Verified bytes that it brought."""


@dataclass(slots=True)
class FetchTrace:
    """The course of one get. Pass a new one to `get_into` and read it afterwards, also after an error.

    Several holders may bring parts of a large object at once: `source` names all of them, and `tries` says what each
    brought. Seconds are those of the reading process. `verify_seconds` is None where copying and checking are one
    pass over memory (the local peer's segment, shm). `tier` is the tier its holder announced.
    """

    local: bool = False
    lookup_seconds: float = 0.0
    copies_known: int = 0
    copies_unreachable: int = 0
    homes_asked: int = 0
    tries: list[TransportTry] = field(default_factory=list)
    source: str = ""
    tier: str = ""
    transport: str = ""
    queue_seconds: float = 0.0
    transfer_seconds: float = 0.0
    verify_seconds: float | None = None
    length_bytes: int = 0


class ReadWatch:
    """Follows one read: fills a trace and calls `progress`. `clock` gives seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        progress: Progress | None = None,
        trace: FetchTrace | None = None,
    ) -> None:
        self.clock = clock
        self.trace = trace if trace is not None else FetchTrace()
        self._progress = progress
        self._holders: Mapping[int, tuple[str, str]] = {}
        self._begun = 0.0
        self._latest: TransportTry | None = None
        self._joined: dict[int, float] = {}
        self._queued = 0.0
        self._verified: float | None = None

    # --- what the client tells ----------------------------------------------------------------

    def looked_up(
        self, seconds: float, holders: Mapping[int, tuple[str, str]], unreachable: int, homes_asked: int
    ) -> None:
        """The local peer answered where the object is. `holders`: member -> (name, tier);
        `unreachable` counts copies on peers that are believed dead."""
        self._holders = {**self._holders, **holders}
        self.trace.lookup_seconds += seconds
        self.trace.copies_known = max(self.trace.copies_known, len(holders))
        self.trace.copies_unreachable = unreachable
        self.trace.homes_asked = max(self.trace.homes_asked, homes_asked)

    def was_here(self, name: str, length_bytes: int, seconds: float) -> None:
        """The local peer's segment had the object."""
        trace = self.trace
        trace.local, trace.source, trace.tier, trace.transport = True, name, "dram", "mapping"
        trace.length_bytes, trace.transfer_seconds = length_bytes, seconds
        trace.verify_seconds = None

    # --- what the loop over holders tells -------------------------------------------------------

    def passed_over(self, member: int, ways: Sequence[tuple[str, str]]) -> None:
        """Transports that are no choice for a holder: (name, reason) each."""
        for transport, reason in ways:
            self.trace.tries.append(
                TransportTry(self._holders.get(member, ("", ""))[0], transport, False, reason)
            )

    def attempt(self, member: int, transport: str) -> None:
        """A pull begins."""
        peer = self._holders.get(member, ("", ""))[0]
        self._latest = TransportTry(peer, transport, True, "")
        self.trace.tries.append(self._latest)
        self._begun, self._queued, self._verified = self.clock(), 0.0, None

    def joined(self, member: int, transport: str) -> TransportTry:
        """Another holder begins to bring parts of what the latest pull reads."""
        helper = TransportTry(self._holders.get(member, ("", ""))[0], transport, True, "")
        self.trace.tries.append(helper)
        self._joined[id(helper)] = self.clock()
        return helper

    def left(self, helper: TransportTry, reason: str, length_bytes: int) -> None:
        """It ended, for that reason or because all is there."""
        helper.outcome = reason or (DELIVERED if length_bytes else NOT_NEEDED)
        helper.length_bytes = length_bytes
        helper.seconds = self.clock() - self._joined.pop(id(helper))

    def failed(self, reason: str) -> None:
        """The pull that began last did not deliver."""
        assert self._latest is not None
        self._latest.outcome = reason
        self._latest.seconds = self.clock() - self._begun

    def delivered(
        self,
        member: int,
        length_bytes: int,
        brought_bytes: int | None = None,
        sources: Sequence[int] = (),
    ) -> None:
        """The latest pull delivered, `brought_bytes` of it itself; `sources` are the holders when several brought
        it."""
        trace, latest = self.trace, self._latest
        assert latest is not None
        seconds = self.clock() - self._begun
        if not latest.outcome:  # others may have done without it
            latest.outcome, latest.seconds = DELIVERED, seconds
            latest.length_bytes = length_bytes if brought_bytes is None else brought_bytes
        trace.source, trace.tier = self._holders.get(member, ("", ""))
        if sources:
            named = [self._holders.get(each, ("", "")) for each in sources]
            trace.source, trace.tier = ", ".join(name for name, _ in named), named[0][1]
        trace.transport, trace.length_bytes = latest.transport, length_bytes
        trace.queue_seconds, trace.verify_seconds = self._queued, self._verified
        trace.transfer_seconds = max(
            0.0, seconds - self._queued - (self._verified if self._verified else 0.0)
        )

    def brought(self, member: int, transport: str, length_bytes: int) -> None:
        """The pull that began last was the local peer's: from this member, into its segment, and from there."""
        latest = self._latest
        assert latest is not None
        latest.peer, latest.transport = self._holders.get(member, ("", ""))[0], transport
        self.trace.local = False
        self.delivered(member, length_bytes)

    # --- what a transport tells -----------------------------------------------------------------

    def connected(self) -> None:
        """There is a connection, and it is this read's turn on it."""
        self._queued = self.clock() - self._begun

    def advanced(self, done_bytes: int, total_bytes: int) -> None:
        """Verified bytes so far."""
        if self._progress is not None:
            self._progress(done_bytes, total_bytes)

    def verified(self, seconds: float) -> None:
        """Time of checking a chunk, apart from moving it."""
        self._verified = (self._verified or 0.0) + seconds
