"""Judges clients' observations by the promises of the store. Pure: fed with observations in the order of their times.

Every key has one writer, a client of one peer, which does one thing after the other: so the values that may be there,
and those that may not, are known. The promises:

- A read delivers a value that was put under this key, whole (`right bytes`), not one that a put kept out
  (`refused puts stay out`), and none whose time to live is over (`expired is gone`).
- What an acknowledged overwrite, remove or flush replaced is not read on the same peer any more
  (`own changes are seen`), nor, once both peers ran for `SPREAD_SECONDS` with nothing between them, on another one
  (`nothing removed comes back`). A put that failed may have been done, or be done later: its value may always be read.
- A hard-pinned object stays in each peer that was seen to hold it, as long as that lives (`pins hold`), and a reader
  that could reach one of these for a while reads it (`what is kept is read`). A durable object is there again after
  the peer came back (`durable survives`).
- Every operation ends in time (`operations end`), with a result or an error of this package (`errors are clear`); when
  nothing is disturbed, with no other error than one of capacity (`no failure without a cause`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from p2pstore.gossip.homes.partition_homes import HOME_COUNT
from tests.soak.timeline import Life, Timeline

SPREAD_SECONDS: Final = 60.0
"""As in `simulation.oracle`; not scaled: gossip takes a second."""
EXPIRY_SECONDS: Final = 2.0
"""Maximum lag of clocks and tickets."""

RIGHT_BYTES: Final = "right bytes"
REFUSED: Final = "refused puts stay out"
EXPIRED: Final = "expired is gone"
OWN_CHANGES: Final = "own changes are seen"
REMOVED: Final = "nothing removed comes back"
PINS: Final = "pins hold"
KEPT: Final = "what is kept is read"
DURABLE: Final = "durable survives"
ENDS: Final = "operations end"
CLEAR: Final = "errors are clear"
CAUSE: Final = "no failure without a cause"
INVARIANTS: Final = (
    *(RIGHT_BYTES, REFUSED, EXPIRED, OWN_CHANGES, REMOVED, PINS, KEPT, DURABLE),
    *(ENDS, CLEAR, CAUSE),
)
OF_CAPACITY: Final = ("CapacityExceeded", "LeaseLimitExceeded")
NOT_BROUGHT: Final = "cannot bring it from its SSD"
"""Part of the error for a holder whose memory, full of pinned objects, has no room for an object of its SSD."""
UNAVAILABLE: Final = "Unavailable"
OF_THE_OWN_PEER: Final = ("NoLocalPeer", "StoreClosed")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; those that say so are scaled by how slow the machine is."""

    operation: float = 60.0
    """Any operation (scaled)."""
    reach: float = 30.0
    """Time that a holder was up and in reach before a read relies on it (scaled)."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """A promise that was not kept: which one, when, and what was seen."""

    invariant: str
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class _Floor:
    """Numbers below `number` were replaced, as was said at `at`."""

    number: int
    at: float
    how: str


@dataclass
class _Key:
    writer: int
    issued: dict[int, float] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """Puts that have not ended, or failed: their values may come at any time."""
    refused: set[int] = field(default_factory=set)
    expires: dict[int, float] = field(default_factory=dict)
    floors: list[_Floor] = field(default_factory=list)
    ends: float = math.inf
    """When a removal, or another put, of what is kept began."""
    kept: int = 0
    """The number that is pinned hard, or durable."""
    wanted: int = 1
    durable_at: float = math.inf
    holders: dict[int, tuple[Life, float]] = field(default_factory=dict)
    """Of a kept object: its known holders, in which life, and when first seen."""


class Ledger:
    """Takes observations and keeps complaints, and counts how often each promise was put to the test. `askers` are
    peers that keep a part of the directory, and ask others for the rest."""

    def __init__(self, timeline: Timeline, limits: Limits, askers: frozenset[int] = frozenset()) -> None:
        self.complaints: list[Complaint] = []
        self.checked: Counter[str] = Counter()
        self.longest_seconds = 0.0
        """Of all operations, without standstills."""
        self._timeline = timeline
        self._limits = limits
        self._askers = askers
        self._keys: dict[str, _Key] = {}
        self._calm_from = math.inf
        self._calms: list[tuple[float, float]] = []
        self._reclaims: dict[int, list[float]] = {}

    # --- writers ---------------------------------------------------------------------------------

    def issued(self, writer: int, key: str, number: int, at: float) -> None:
        """A put of that number begins; numbers of a key rise."""
        record = self._keys.setdefault(key, _Key(writer))
        record.issued[number] = at
        record.open.add(number)

    def stored(
        self, key: str, number: int, at: float, *, overwrite: bool = False, expires: float = math.inf
    ) -> None:
        """A put said `created`."""
        record = self._keys[key]
        record.open.discard(number)
        record.expires[number] = expires
        if overwrite:
            record.floors.append(_Floor(number, at, "overwritten"))

    def refused(self, key: str, number: int) -> None:
        """A put said `kept_existing`: its value is nowhere."""
        record = self._keys[key]
        record.open.discard(number)
        record.refused.add(number)

    def removal_begins(self, keys: Iterable[str], at: float) -> None:
        """From now on, no peer has to hold these keys."""
        for key in keys:
            if key in self._keys:
                self._keys[key].ends = min(self._keys[key].ends, at)

    def removed(self, keys: Iterable[str], at: float, how: str = "removed") -> None:
        """It was acknowledged. Nothing was put under these keys since it began."""
        for key in keys:
            record = self._keys.get(key)
            if record is not None and record.issued:
                record.floors.append(_Floor(max(record.issued) + 1, at, how))

    def kept(
        self,
        key: str,
        number: int,
        at: float,
        *,
        wanted: int = 1,
        here: bool = True,
        durable: bool = False,
    ) -> None:
        """The put of a hard-pinned value was acknowledged: the writer's own peer has it (`here`) or another one, where
        there was room, and there are to be `wanted` copies."""
        record = self._keys[key]
        record.kept, record.wanted = number, wanted
        if here:
            self._saw_holder(record, record.writer, at)
        if here and durable:
            record.durable_at = at

    # --- readers ---------------------------------------------------------------------------------

    def read(self, reader: int, key: str, number: int | None, begun: float, ended: float) -> None:
        """A read delivered that value, or said (None) that there is none."""
        record = self._keys.get(key)
        if number is None:
            if record is not None:
                self._missed(record, reader, key, begun, ended, "found nothing")
            return
        self.checked[RIGHT_BYTES] += 1
        if record is None or number not in record.issued:
            self._complain(
                RIGHT_BYTES, ended, f"{key!r} read at {reader}: number {number:#x} was never put"
            )
            return
        self.checked[REFUSED] += bool(record.refused)
        if number in record.refused:
            self._complain(REFUSED, ended, f"{key!r} read at {reader}: number {number:#x} was kept out")
        self._check_expiry(record, reader, key, number, begun)
        self._check_floors(record, reader, key, number, begun)

    def wrong(self, reader: int, key: str, what: str, at: float) -> None:
        """A client compared bytes, and they were not those of any value."""
        self._complain(RIGHT_BYTES, at, f"{key!r} at {reader}: {what}")

    def failed(self, reader: int, key: str, error: str, begun: float, ended: float) -> None:
        """A read ended with an error of that name."""
        record = self._keys.get(key)
        excused = error == UNAVAILABLE and self._may_reach_no_home(reader, begun, ended)
        if record is not None and error not in (*OF_CAPACITY, *OF_THE_OWN_PEER) and not excused:
            self._missed(record, reader, key, begun, ended, error)

    def listed(self, peer: int, keys: Iterable[str], asked: float, answered: float) -> None:
        """The peer itself listed all that it holds pinned hard."""
        there = set(keys)
        for key, record in self._keys.items():
            if not record.kept:
                continue
            if key in there:
                self.checked[PINS] += peer in record.holders
                self._saw_holder(record, peer, asked)
            elif peer in record.holders and record.ends > answered:
                life, since = record.holders[peer]
                if since < asked and life is self._timeline.life_at(peer, answered):
                    self._complain(
                        PINS, answered, f"{key!r} is no longer held by {peer}, which lives since it was"
                    )
                    del record.holders[peer]

    def is_kept(self, key: str) -> bool:
        """Whether a peer must hold the key: it is hard-pinned, and its removal has not begun."""
        record = self._keys.get(key)
        return record is not None and record.kept > 0 and record.ends == math.inf

    def lacking(self, copies: Mapping[str, int]) -> list[str]:
        """Kept objects that exist (`copies`: hard-pinned ones, by key) and have fewer copies than wanted."""
        return [
            key for key, count in copies.items() if self.is_kept(key) and count < self._keys[key].wanted
        ]

    # --- operations ------------------------------------------------------------------------------

    def ended(
        self,
        who: int,
        what: str,
        errors: Iterable[str],
        begun: float,
        ended: float,
        unclear: str = "",
        said: Iterable[str] = (),
    ) -> None:
        """An operation of a client of peer `who` ended, with these errors by name, which `said` this. `unclear`: one
        that is none of this package."""
        seconds = ended - begun - self._timeline.standstill(begun, ended)
        self.longest_seconds = max(self.longest_seconds, seconds)
        self.checked[ENDS] += 1
        if seconds > self._limits.operation:
            self._complain(ENDS, ended, f"{what} at {who} took {seconds:.1f} s")
        self.checked[CLEAR] += bool(unclear) or any(True for _ in errors)
        if unclear:
            self._complain(CLEAR, ended, f"{what} at {who}: {unclear}")
        if self._is_calm(begun, ended):
            self.checked[CAUSE] += 1
            strange = [error for error in errors if error not in OF_CAPACITY]
            unexplained = [text for text in said if NOT_BROUGHT not in text]
            if strange and (unexplained or not said):
                told = f"{', '.join(strange)}: {'; '.join(said)}"
                self._complain(CAUSE, ended, f"{what} at {who}, with nothing disturbed: {told}")

    def hangs(self, who: int, what: str, begun: float, now: float) -> bool:
        """Whether an operation that has not ended is over its limit, which is complained of."""
        seconds = now - begun - self._timeline.standstill(begun, now)
        if seconds > self._limits.operation:
            self._complain(ENDS, now, f"{what} at {who} has not ended after {seconds:.1f} s")
            return True
        return False

    def calm_begins(self, at: float) -> None:
        """All peers live and see each other, and nothing is disturbed."""
        self._calm_from = at

    def calm_ends(self, at: float) -> None:
        """Something is about to be disturbed."""
        if self._calm_from < at:
            self._calms.append((self._calm_from, at))
        self._calm_from = math.inf

    def reclaimed(self, peer: int, at: float) -> None:
        """Since the look before, the peer's SSD gave up objects for others: none is certain any more."""
        self._reclaims.setdefault(peer, []).append(at)

    # --- rules -----------------------------------------------------------------------------------

    def _check_expiry(self, record: _Key, reader: int, key: str, number: int, begun: float) -> None:
        expires = record.expires.get(number, math.inf)
        if expires == math.inf:
            return
        self.checked[EXPIRED] += 1
        if begun > expires + EXPIRY_SECONDS:
            late = begun - expires
            self._complain(
                EXPIRED, begun, f"{key!r} read at {reader}, {late:.1f} s after its time to live"
            )

    def _check_floors(self, record: _Key, reader: int, key: str, number: int, begun: float) -> None:
        earlier = [floor for floor in record.floors if floor.at <= begun]
        if not earlier:
            return
        own = reader == record.writer
        self.checked[OWN_CHANGES if own else REMOVED] += 1
        if number in record.open:
            return
        life = self._timeline.life_at(reader, begun)
        for floor in reversed(earlier):
            if number >= floor.number:
                continue
            ago = f"{floor.how} {begun - floor.at:.3f} s before by a client of {record.writer}"
            if own and life is not None and life is self._timeline.life_at(reader, floor.at):
                self._complain(
                    OWN_CHANGES, begun, f"{key!r} read at {reader}: number {number:#x} was {ago}"
                )
                return
            if self._timeline.together(record.writer, reader, floor.at, begun, SPREAD_SECONDS):
                self._complain(REMOVED, begun, f"{key!r} read at {reader}: number {number:#x} was {ago}")
                return

    def _saw_holder(self, record: _Key, peer: int, at: float) -> None:
        life = self._timeline.life_at(peer, at)
        if life is not None and (peer not in record.holders or record.holders[peer][0] is not life):
            record.holders[peer] = (life, at)

    def _missed(
        self, record: _Key, reader: int, key: str, begun: float, ended: float, what: str
    ) -> None:
        """A kept object was not delivered: check whether a holder should have delivered it."""
        if not record.kept or record.ends <= ended:
            return
        since = begun - self._limits.reach
        for holder, (life, seen) in record.holders.items():
            there = seen <= since and life is self._timeline.life_at(holder, ended)
            if there and self._timeline.undisturbed(holder, reader, since, ended):
                text = f"{key!r} read at {reader}: {what}; {holder} holds it"
                self._complain(KEPT, ended, text)
                return
        writer = record.writer
        safe = record.durable_at <= since and not self._reclaimed_since(writer, record.durable_at)
        if safe and self._timeline.undisturbed(writer, reader, since, ended):
            text = f"{key!r} read at {reader}: {what}; it is on the SSD of {writer}"
            self._complain(DURABLE, ended, text)

    def _may_reach_no_home(self, reader: int, begun: float, ended: float) -> bool:
        """Whether who must ask others where a key is may have found none of them. It is to say so then, and not that
        there is no such key."""
        if reader not in self._askers:
            return False
        since = begun - self._limits.reach
        others = (peer for peer in range(self._timeline.peers) if peer != reader)
        away = sum(not self._timeline.undisturbed(peer, reader, since, ended) for peer in others)
        return away >= HOME_COUNT

    def delivered(self, reader: int, key: str) -> None:
        """Count that what is kept was read."""
        record = self._keys.get(key)
        if record is not None and record.kept:
            self.checked[KEPT] += 1
            life = self._timeline.lives.get(record.writer, [])
            if record.durable_at < math.inf and len(life) > 1 and record.durable_at < life[-1].began:
                self.checked[DURABLE] += 1

    def _reclaimed_since(self, peer: int, at: float) -> bool:
        return any(each >= at for each in self._reclaims.get(peer, []))

    def _is_calm(self, begun: float, ended: float) -> bool:
        if self._timeline.standstill(begun, ended):
            return False
        if begun >= self._calm_from:
            return True
        return any(calm <= begun and ended <= end for calm, end in self._calms)

    def _complain(self, invariant: str, at: float, text: str) -> None:
        self.complaints.append(Complaint(invariant, at, text))
