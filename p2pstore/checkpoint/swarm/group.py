"""A group of peers that use the same version of a checkpoint: when each fetches, and when all switch. Pure.

A follower fetches and verifies each version that its publisher announces (head), and says so. It uses the version when
the publisher says so to all (switch). The publisher writes the switch when all followers, or a quorum, have the
version: so the switch takes each of them a moment. A late follower first fetches what the others use, then what is new.

Head and switch are records that reach every peer in the end, the newest of each. So only the newest of both count,
whatever was missed, and nothing depends on the publisher being alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

import msgspec

FIRST_RETRY_SECONDS: Final = 5.0
LAST_RETRY_SECONDS: Final = 300.0

Version = bytes
"""Empty for none."""


class Stage(Enum):
    """How far a follower is with its next version, or the one in use."""

    WAITING = "waiting"
    """No version is known."""
    FETCHING = "fetching"
    VERIFIED = "verified"
    """Ready for the switch."""
    CURRENT = "current"
    FAILED = "failed"
    """To be retried after a while."""


# --- events of a follower ----------------------------------------------------------------------


class Heard(msgspec.Struct, frozen=True):
    """The newest announced version, and the one that all are to use, as far as is known here."""

    head: Version
    switch: Version


class Prepared(msgspec.Struct, frozen=True):
    """The version is complete and verified on the disk."""

    version: Version


class NotPrepared(msgspec.Struct, frozen=True):
    """It is not, and no work is under way: it failed (`why`), or was abandoned."""

    version: Version
    why: str = ""


class Switched(msgspec.Struct, frozen=True):
    """The version is in use."""

    version: Version


class NotSwitched(msgspec.Struct, frozen=True):
    """The switch failed. `missing`: the version is not on the disk any more."""

    version: Version
    why: str
    missing: bool = False


class Tick(msgspec.Struct, frozen=True):
    """The time of `wake_at` has come."""


Event = Heard | Prepared | NotPrepared | Switched | NotSwitched | Tick


# --- effects of a follower ---------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True):
    """Fetch and verify the version: one `Prepared` or `NotPrepared` follows. There is one at a time."""

    version: Version


class Abandon(msgspec.Struct, frozen=True):
    """Stop that; the answer to `Prepare` still follows."""

    version: Version


class SwitchTo(msgspec.Struct, frozen=True):
    """Use the version: one `Switched` or `NotSwitched` follows. There is one at a time."""

    version: Version


Effect = Prepare | Abandon | SwitchTo


class FollowerState(msgspec.Struct, frozen=True):
    """A follower's announcement: its next version, or the one in use, and how far it is. Where others hear of it,
    versions may be cut to their first bytes, all alike."""

    version: Version
    stage: Stage
    current: Version
    done_permille: int = 0
    why: str = ""


class _Failure(msgspec.Struct):
    why: str
    retry_at: float
    wait_seconds: float


class Follower:
    """One peer that follows a name."""

    def __init__(self, current: Version, complete: Iterable[Version]) -> None:
        """`current` is the version in use, `complete` are those on the disk, from the previous run."""
        self.current = current
        self._complete = set(complete)
        self._head: Version = b""
        self._switch: Version = b""
        self._preparing: Version = b""
        self._abandoned = False
        self._switching: Version = b""
        self._failures: dict[Version, _Failure] = {}

    @property
    def complete(self) -> frozenset[Version]:
        return frozenset(self._complete)

    @property
    def wake_at(self) -> float:
        return min((failure.retry_at for failure in self._failures.values()), default=math.inf)

    @property
    def state(self) -> FollowerState:
        wanted = self._wanted()
        able = [version for version in wanted if version not in self._failures]
        version = next(iter(able or wanted), self.current)
        failure = self._failures.get(version)
        if not version:
            stage = Stage.WAITING
        elif version == self.current:
            stage = Stage.CURRENT
        elif failure is not None:
            return FollowerState(version, Stage.FAILED, self.current, why=failure.why)
        else:
            stage = Stage.VERIFIED if version in self._complete else Stage.FETCHING
        return FollowerState(version, stage, self.current)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Heard(head, switch):
                self._head, self._switch = head, switch
                wanted = (head, switch)
                self._failures = {v: f for v, f in self._failures.items() if v in wanted}
            case Prepared(version):
                self._complete.add(version)
                self._failures.pop(version, None)
                self._preparing = b""
            case NotPrepared(version, why):
                self._preparing = b""
                if not self._abandoned:
                    self._failed(version, why, now)
            case Switched(version):
                self.current, self._switching = version, b""
                self._failures.pop(version, None)
            case NotSwitched(version, why, missing):
                self._switching = b""
                if missing:
                    self._complete.discard(version)
                self._failed(version, why, now)
            case Tick():
                pass
        return self._go_on(now)

    # --- inside ------------------------------------------------------------------------------

    def _wanted(self) -> list[Version]:
        """Versions to have, the more urgent first: the one of the switch, then the newest."""
        wanted = [self._switch] if self._switch != self.current else []
        wanted.append(self._head)
        return [version for version in wanted if version]

    def _go_on(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        switch = self._switch
        if (
            switch not in (b"", self.current)
            and switch in self._complete
            and not self._switching
            and self._may_try(switch, now)
        ):
            self._switching = switch
            effects.append(SwitchTo(switch))
        aim = self._aim(now)
        if self._preparing:
            if aim != self._preparing and not self._abandoned:
                self._abandoned = True
                effects.append(Abandon(self._preparing))
        elif aim:
            self._preparing, self._abandoned = aim, False
            effects.append(Prepare(aim))
        return effects

    def _aim(self, now: float) -> Version:
        """The version to prepare now. A failed one waits, and does not block the other."""
        for version in self._wanted():
            if version not in self._complete and self._may_try(version, now):
                return version
        return b""

    def _may_try(self, version: Version, now: float) -> bool:
        failure = self._failures.get(version)
        return failure is None or now >= failure.retry_at

    def _failed(self, version: Version, why: str, now: float) -> None:
        before = self._failures.get(version)
        wait = FIRST_RETRY_SECONDS if before is None else 2 * before.wait_seconds
        wait = min(wait, LAST_RETRY_SECONDS)
        self._failures[version] = _Failure(why, now + wait, wait)


# --- the publisher -----------------------------------------------------------------------------


class Verdict(Enum):
    """Outcome of an update."""

    WAIT = "wait"
    SWITCH = "switch"
    TOO_LATE = "too late"
    NO_FOLLOWERS = "no followers"
    """There is no follower, and the time to wait for the first one is over."""
    SUPERSEDED = "superseded"
    """The name has a newer version, or none any more."""


class Laggard(msgspec.Struct, frozen=True):
    """A follower without the version. `dead`: it counts as dead now."""

    member: int
    stage: Stage
    done_permille: int
    why: str
    dead: bool


class GroupUpdate:
    """The publisher's side of one update: all followers switch to `version`, or none.

    Followers are those alive at its beginning, and those that come during it. A follower that dies meanwhile is still
    waited for: it may be on the other side of a split, with an engine that goes on. One that unfollows or leaves does
    not count. With `quorum` that number suffices; without, at least one follower must be heard of by `first_by`.
    """

    def __init__(
        self, version: Version, deadline: float, quorum: int | None = None, first_by: float = math.inf
    ) -> None:
        self.version = version
        self.deadline = deadline
        self.quorum = quorum
        self._first_by = first_by
        self._followers: dict[int, FollowerState] = {}
        self._alive: frozenset[int] = frozenset()

    def judge(
        self, head: Version, living: Mapping[int, FollowerState], gone: Iterable[int], now: float
    ) -> Verdict:
        """The verdict, given the newest announced version, the live followers, and members that follow no more."""
        for member in gone:
            self._followers.pop(member, None)
        self._followers.update(living)
        self._alive = frozenset(living)
        if head != self.version:
            return Verdict.SUPERSEDED
        if self._has_enough():
            return Verdict.SWITCH
        if self._lacks_the_first and now >= self._first_by:
            return Verdict.NO_FOLLOWERS
        return Verdict.TOO_LATE if now >= self.deadline else Verdict.WAIT

    @property
    def wake_at(self) -> float:
        return min(self.deadline, self._first_by) if self._lacks_the_first else self.deadline

    @property
    def _lacks_the_first(self) -> bool:
        return self.quorum is None and not self._followers

    @property
    def follower_count(self) -> int:
        """Followers waited for, with or without the version."""
        return len(self._followers)

    @property
    def ready_count(self) -> int:
        return sum(map(self._is_ready, self._followers.values()))

    @property
    def members(self) -> list[int]:
        return list(self._followers)

    @property
    def laggards(self) -> list[Laggard]:
        """Followers without the version, the furthest behind first."""
        return self._lagging(
            {m: state for m, state in self._followers.items() if not self._is_ready(state)}
        )

    @property
    def not_using(self) -> list[Laggard]:
        """Followers that do not use the version."""
        return self._lagging(
            {m: state for m, state in self._followers.items() if state.current != self.version}
        )

    def _lagging(self, states: Mapping[int, FollowerState]) -> list[Laggard]:
        found = []
        for member, state in states.items():
            same = state.version == self.version
            found.append(
                Laggard(
                    member,
                    state.stage if same else Stage.WAITING,
                    state.done_permille if same else 0,
                    state.why if same else "",
                    member not in self._alive,
                )
            )
        return sorted(found, key=lambda each: (each.done_permille, each.member))

    def _has_enough(self) -> bool:
        if self.quorum is not None:
            return self.ready_count >= self.quorum
        return bool(self._followers) and self.ready_count == self.follower_count

    def _is_ready(self, state: FollowerState) -> bool:
        if state.current == self.version:
            return True
        return state.version == self.version and state.stage in (Stage.VERIFIED, Stage.CURRENT)
