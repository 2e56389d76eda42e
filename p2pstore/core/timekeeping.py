"""Checks that other peers accept this peer's stamps, and renews its stamps after its clock was wrong. Pure.

Versions are ordered by wall clocks, and every peer refuses stamps over 10 s ahead of its own clock. So a peer writes
nothing (`check`) in three cases:

1. Its wall clock is ahead of at least half of all, by readings of theirs (`gossip.members.peer_clocks`).
2. Its wall clock is behind more than half of all: it refuses what they write, so its own writes would be lost.
3. Its wall clock is right, but its hybrid clock is ahead: the wall clock was fast, or a saved reading is wrong.

A peer that is alone has no other peer to refuse its writes: it goes on above its last stamp.

Renewal. A peer in the third case whose wall clock the others confirm lowers what no other can have taken: cluster
records of its own, objects in memory, and its statements on floors. All are lowered by the same amount, the error of
the clock, so their order stays; none comes to lie before the time at which it was written. Floors come first: an
object is above the floor that it was above. Objects on the SSD alone are given up. Then the hybrid clock begins anew
at the wall clock. The new state is saved whole, floors before the clock: a crash in between renews again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from p2pstore.errors import Unavailable
from p2pstore.gossip.records import ClusterRecord, ClusterRecordKind, PeerId
from p2pstore.objects import (
    CLOCK_COUNTER_BITS,
    MAX_CLOCK_SKEW_SECONDS,
    clock_from_unix_seconds,
    newest_accepted_clock,
)
from p2pstore.runtime.stepping import Steps
from p2pstore.wire import decode_body

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

SOON_SECONDS: Final = 5.0
"""Stamps that will be taken so soon are waited for."""
UNITS_PER_STEP: Final = 8
"""Units of work in one step of the renewal, each of at most 0.3 ms."""
RECORDS_PER_UNIT: Final = 64
"""Records that are looked at; a signature costs a unit."""
SLOTS_PER_UNIT: Final = 500
COLD_PER_UNIT: Final = 16
WAIT_SECONDS: Final = 0.25
LOOK_SECONDS: Final = 0.2
"""How often it is looked whether a clock is wrong. A write asks by itself."""
MAX_CLOCK: Final = (1 << 63) - 1
"""Of what is believed of an earlier life: with room for all that follows in the 64 bits of the format."""
CURE: Final = (
    "set it right (`timedatectl`, chrony, ntpd); this peer then goes on by itself, without a restart"
)


class Timekeeping:
    """See the module's docstring. `tick` makes the steps."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._highest = 0
        """The highest reading of the hybrid clock, or of the wall clock, since that was last right."""
        self._highest_offset = core.unix_offset_seconds
        self.newest_found = 0
        """The highest stamp of what is left of an earlier life."""
        self._work: Iterator[float | None] | None = None
        self._work_at = 0.0
        self._look_at = -math.inf
        self._now = 0.0
        self._said = ""
        self._said_kind = (False, False)
        self._said_of: set[PeerId] = set()
        self.renewals = 0
        """Grows with every renewal that has ended: floors and clock are to be saved whole."""

    def check(self, now: float) -> None:
        """Raise `Unavailable`, with the reason and the cure, when others would refuse this peer's writes now."""
        problem = self.problem(now)
        if problem:
            self._core.counters["writes_refused_by_clock"] += 1
            raise Unavailable(f"nothing can be written through this peer now: {problem}")

    def check_key(self, digest: bytes, namespace: bytes, now: float) -> None:
        """As `check`, for one key: where half of the clocks are ahead, a write below what they have would be lost."""
        self.check(now)
        if not self._core.gossip.time.view(now).may_be_behind:
            return
        core = self._core
        limit = newest_accepted_clock(core.unix(now))
        if core.gossip.future_stamps.has_floor_of(digest, namespace, limit) or any(
            holding.record.version.clock > limit and not (holding.hidden or holding.hearsay)
            for holding in core.gossip.directory.holders(digest)
        ):
            raise Unavailable(self._unsure("it has a version, or was removed,", now))

    def check_all(self, now: float) -> None:
        """As `check_key`, for all keys at once."""
        self.check(now)
        limit = newest_accepted_clock(self._core.unix(now))
        if (
            self._core.gossip.time.view(now).may_be_behind
            and self._core.gossip.future_stamps.newest > limit
        ):
            raise Unavailable(self._unsure("other peers have objects", now))

    def may_write_all(self, now: float) -> bool:
        """Whether `check_key` raises for no key."""
        view = self._core.gossip.time.view(now)
        return (
            self._work is None
            and self.stamps_ahead_seconds(now) <= view.lead
            and not (view.is_behind or view.may_be_behind)
        )

    def _unsure(self, what: str, now: float) -> str:
        ahead = self._core.gossip.time.view(now).middle or 0.0
        return (
            f"nothing can be written there now: {what} stamped ahead of this machine's clock, which differs from the "
            f"other peers' by {span(abs(ahead))}, and there are too few to tell whose is wrong: set the wrong one right"
        )

    def problem(self, now: float) -> str:
        """Why others would refuse this peer's writes now, with the cure; empty where they would not."""
        if self._work is not None:
            return "its clock was fast, and the objects stamped meanwhile get new stamps: try again in a moment"
        view, lead = self._core.gossip.time.view(now), self.stamps_ahead_seconds(now)
        if lead <= view.lead and not view.is_behind:
            return ""
        if view.is_behind:
            return (
                f"this machine's clock is {span(abs(view.middle or 0.0))} behind the other peers', so that it refuses "
                f"what they write: {CURE}"
            )
        if view.lead < 0:
            return (
                f"this machine's clock is {span(abs(view.middle or 0.0))} ahead of the other peers', which refuse "
                f"stamps over {MAX_CLOCK_SKEW_SECONDS:g} s ahead of theirs: {CURE}"
            )
        over = lead - view.lead
        if over <= SOON_SECONDS:
            cure = f"wait {max(1, round(over + 0.5))} s"
        elif view.may_be_behind:
            cure = f"it differs from the other peers', too: {CURE}"
        else:
            cure = "they get new stamps as soon as another peer has told the time: try again in some seconds"
        return (
            f"this peer's stamps are {span(lead)} ahead of its clock, which was fast before, and the other peers "
            f"refuse them: {cure}"
        )

    def ahead_of(self, peer_id: PeerId) -> float:
        """How far this machine's clock is ahead of a peer's at least, in seconds; 0 where that is not known."""
        core = self._core
        return core.gossip.time.clocks.ahead_of(peer_id, core.unix_offset_seconds) or 0.0

    def stamps_ahead_seconds(self, now: float) -> float:
        """How far the next stamp is ahead of the wall clock, in seconds."""
        return self._core.clock.lead_seconds(self._core.unix(now))

    def wrong_peers(self, now: float) -> list[tuple[PeerId, float]]:
        """Members whose clock differs from this peer's by over 10 s, and how far this peer's is ahead. None where it is
        this peer's clock that is wrong, or may be."""
        view = self._core.gossip.time.view(now)
        if view.is_behind or view.may_be_behind or view.lead < 0:
            return []
        offset = self._core.unix_offset_seconds
        clocks = self._core.gossip.time.clocks
        aheads = [
            (peer_id, clocks.ahead_of(peer_id, offset)) for peer_id in self._core.gossip.time.compared
        ]
        return [
            (peer_id, ahead)
            for peer_id, ahead in aheads
            if ahead is not None and abs(ahead) > MAX_CLOCK_SKEW_SECONDS
        ]

    def _note(self, text: str) -> None:
        self._core.notes.add("clock", text)

    def found(self, clock: int) -> None:
        """A record or object of an earlier life has this stamp: new ones are above it, whatever was saved."""
        self.newest_found = max(self.newest_found, min(clock, MAX_CLOCK))
        self._core.clock.latest = max(self._core.clock.latest, self.newest_found)

    def started(self, now: float) -> None:
        """Look at the clock that was saved, once all was `found` that is of an earlier life: where nothing has such
        stamps, a reading that is far ahead protects nothing and is dropped."""
        core = self._core
        unix = core.unix(now)
        limit = newest_accepted_clock(unix)
        if core.clock.latest > limit:
            ahead = span(core.clock.lead_seconds(unix))
            if self.newest_found <= limit:
                core.clock.restart(unix)
                self._note(
                    f"the clock that was saved is {ahead} ahead of this machine's clock, and nothing here is stamped "
                    "so: it is dropped"
                )
            else:
                self._note(
                    f"stamps of this peer's earlier life are {ahead} ahead of this machine's clock: they are renewed "
                    "when another peer has told the time"
                )
        self._highest = core.clock.latest

    def tick(self, now: float) -> None:
        """Say what has changed, and begin or go on with a renewal."""
        self._now = now
        core = self._core
        wall = clock_from_unix_seconds(core.unix(now))
        self._highest = max(self._highest, core.clock.latest, wall)
        self._highest_offset = max(self._highest_offset, core.unix_offset_seconds)
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._say(now)
            if self._work is None and self._is_renewal_due(now):
                self._work = self._renew(self._error(now))
                self._work_at = now
        if self._work is not None and now >= self._work_at:
            self._step(self._work, now)

    @property
    def due_at(self) -> float:
        return math.inf if self._work is None else self._work_at

    def _step(self, work: Iterator[float | None], now: float) -> None:
        self._work_at = now
        for _ in range(UNITS_PER_STEP):
            try:
                wait_seconds = next(work)
            except StopIteration:
                self._work = None
                return
            if wait_seconds is not None:
                self._work_at = now + wait_seconds
                return

    def _is_renewal_due(self, now: float) -> bool:
        over = self._highest - newest_accepted_clock(self._core.unix(now))
        if over <= clock_from_unix_seconds(SOON_SECONDS):
            return False
        view = self._core.gossip.time.view(now)
        confirmed = view.middle is not None and not (view.is_behind or view.may_be_behind)
        return confirmed and 0 <= view.lead < math.inf

    def _error(self, now: float) -> int:
        """By how much the clock was fast, as a difference of stamps. Where it was set back while this peer ran, that is
        whole seconds: others whose clocks were set back with it lower stamps of the same objects by as much."""
        core = self._core
        unix = core.unix(now)
        jump = clock_from_unix_seconds(round(self._highest_offset - core.unix_offset_seconds))
        if core.clock.accepts(self._highest - jump, unix):
            return jump
        return self._highest - clock_from_unix_seconds(unix)

    def _say(self, now: float) -> None:
        problem = "" if self._work is not None else self.problem(now)
        view = self._core.gossip.time.view(now)
        kind = view.is_behind, view.lead < 0  # the text itself changes every second
        if problem and (not self._said or kind != self._said_kind):
            self._note(f"nothing can be written through this peer: {problem}")
        if self._said and not problem and self._work is None:
            self._note("this peer's clock is right again: it writes")
        if self._work is None:
            self._said, self._said_kind = problem, kind
        wrong = dict(self.wrong_peers(now))
        for peer_id in sorted(wrong.keys() - self._said_of):
            ahead = wrong[peer_id]
            self._note(
                f"the clock of {self._core.name_of(peer_id)} is {span(abs(ahead))} "
                f"{'behind' if ahead > 0 else 'ahead of'} this machine's and most others': a stamp over "
                f"{MAX_CLOCK_SKEW_SECONDS:g} s ahead is refused until that is set right there"
            )
        self._said_of = set(wrong)

    def _renew(self, by: int) -> Iterator[float | None]:
        """All units of work; one may give the seconds to wait before the next."""
        core = self._core
        counters = core.counters
        before = counters["stamps_renewed"], counters["stamps_dropped"]
        limit = newest_accepted_clock(core.unix(self._now))
        core.gossip.floors.clock_was_fast(limit, by)
        yield from self._renew_records(limit, by)
        while core.earlier_life.returning:
            yield WAIT_SECONDS
        yield from self._renew_memory(limit, by)
        yield from self._drop_cold(limit)
        core.publishers.clock_was_fast(limit, by)
        core.clock.restart(core.unix(self._now))
        self._highest, self._highest_offset = core.clock.latest, core.unix_offset_seconds
        self.renewals += 1
        renewed, dropped = counters["stamps_renewed"], counters["stamps_dropped"]
        self._note(
            f"this machine's clock was {span(by / (1000 << CLOCK_COUNTER_BITS))} fast and is right again: "
            f"{renewed - before[0]:,} objects and records got new stamps, {dropped - before[1]:,} were dropped"
        )

    def _renew_records(self, limit: int, by: int) -> Steps[None]:
        records = self._core.gossip.cluster_records
        found = yield from records.dump_in_steps()
        for number, signed in enumerate(found):
            if number % RECORDS_PER_UNIT == 0:
                yield
            record = decode_body(ClusterRecord, signed.body)  # it was verified when it came
            if record.clock > limit:
                records.take_out(record, signed)
                self._renew_record(record, self._lowered(record.clock, by))
                yield

    def _lowered(self, clock: int, by: int) -> int:
        wall = clock_from_unix_seconds(self._core.unix(self._now))
        return max(1, min(clock - by, wall))

    def _renew_record(self, record: ClusterRecord, clock: int) -> None:
        """This peer becomes the floor's writer. A record that only its publisher may write is left to the publisher."""
        core = self._core
        if record.kind == ClusterRecordKind.FLOOR:
            writer = core.writer
            core.floors.keep(replace(record, clock=clock, writer=writer, signer=core.peer_id), self._now)
        elif record.signer == core.peer_id:
            core.floors.keep(replace(record, clock=clock), self._now)
        else:
            core.counters["stamps_dropped"] += 1
            return
        core.counters["stamps_renewed"] += 1

    def _renew_memory(self, limit: int, by: int) -> Steps[None]:
        core = self._core
        for first in range(0, core.segment.geometry.slots, SLOTS_PER_UNIT):
            yield
            for number, entry in enumerate(core.segment.objects.in_slots(first, SLOTS_PER_UNIT)):
                if entry.version.clock <= limit:
                    continue
                if number % COLD_PER_UNIT == 0:
                    yield
                if core.segment.find(entry.digest, core.unix(self._now)) is entry:
                    clock = self._lowered(entry.version.clock, by)
                    core.objects.renew_version(entry, clock, self._now)
                    core.counters["stamps_renewed"] += 1

    def _drop_cold(self, limit: int) -> Steps[None]:
        core = self._core
        store = core.cold.store
        if store is None:
            return
        for some in store.digests(None):
            for number, digest in enumerate(some):
                if number % COLD_PER_UNIT == 0:
                    yield
                cold = store.find(digest)
                if cold is not None and cold.version.clock > limit:
                    core.cold.discard(digest, cold.version, self._now)
                    core.counters["stamps_dropped"] += 1


def span(seconds: float) -> str:
    """A length of time for people: `3.2 s`, `60 min`, `2.5 h`, `365 days`."""
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:,.0f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s"
