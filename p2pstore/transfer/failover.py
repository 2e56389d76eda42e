"""Which copy to read next, and when to give up. Pure.

Clients and peers share it: a holder that refuses, lags or delivers wrong bytes costs one more attempt,
and the caller sees an error only when no copy is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from p2pstore.errors import NoSuchKey, P2PStoreError, Unavailable
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.transfer.transport import RemoteCopy, Transport

MAX_ATTEMPTS: Final = 16
"""Holders that are asked for one object before the caller hears of it."""


class PullFailed(P2PStoreError):
    """One holder did not deliver. `code` is a `wire.Code`; (`incarnation`, `sequence`) is how far its log
    was when it said that it does not have the object. `retriable`: the way to the holder failed rather
    than the holder, so that another transport may still reach it. `keep`: the object is hot, and the peer that brings
    it is to keep it; `others` (short names) have it, or will have it in a moment."""

    def __init__(
        self,
        code: Code,
        text: str,
        *,
        incarnation: int = 0,
        sequence: int = 0,
        retriable: bool = False,
        keep: bool = False,
        others: Sequence[int] = (),
    ) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.incarnation = incarnation
        self.sequence = sequence
        self.retriable = retriable
        self.keep = keep
        self.others = tuple(others)


class TooSlow(PullFailed):
    """The holder delivers, but another one is expected to be done sooner."""

    def __init__(self, text: str) -> None:
        super().__init__(Code.DEADLINE_EXCEEDED, text)


class AnotherVersion(PullFailed):
    """The holder has another version than the one that is being read, as others have."""

    def __init__(self) -> None:
        super().__init__(Code.STALE, "the holder replaced the object while it was read")


class Unannounced(PullFailed):
    """The holder has a version that it did not write, and that is not the one which its writer vouches for."""

    def __init__(self) -> None:
        super().__init__(
            Code.STALE, "the holder has another version than the one that its writer vouches for"
        )


@dataclass(frozen=True, slots=True)
class HolderReport:
    """The failure of one holder, for the peer that believed in its copy."""

    member: int
    code: int
    """As in `Code`."""
    text: str = ""
    transport: str = ""
    incarnation: int = 0
    sequence: int = 0
    has_alternatives: bool = False
    """Whether it had little time to begin with its answer, as others were left to ask."""
    keep: bool = False
    others: tuple[int, ...] = ()
    """As in `PullFailed`."""


def is_silence(failure: object) -> bool:
    """Whether a holder failed by not answering in time."""
    return isinstance(failure, PullFailed | HolderReport) and failure.code == Code.DEADLINE_EXCEEDED


class _Held(Protocol):
    @property
    def member(self) -> int: ...


H = TypeVar("H", bound=_Held)


class SilentHolders:
    """Holders that did not answer in time, over the reads of a batch: each is waited for once."""

    def __init__(self) -> None:
        self._had_alternatives: dict[int, bool] = {}

    def add(self, member: int, *, has_alternatives: bool) -> None:
        """A holder did not answer; `with_alternatives`: though it may have, given more time."""
        self._had_alternatives[member] = has_alternatives and self._had_alternatives.get(member, True)

    def learn(self, reports: Iterable[HolderReport]) -> None:
        """`add` for those among the reports that say so."""
        for report in reports:
            if is_silence(report):
                self.add(report.member, has_alternatives=report.has_alternatives)

    def last(self, holders: Sequence[H]) -> list[H]:
        """The holders to try, in order: those that had little time come last, others are left out."""
        tried = [each for each in holders if self._had_alternatives.get(each.member, True)]
        return sorted(tried, key=lambda each: each.member in self._had_alternatives)


def order_copies(copies: Sequence[RemoteCopy], rng: Random) -> list[RemoteCopy]:
    """Copies in the order to try them: this host, then the less loaded of two random ones.

    Always taking the least loaded would send every reader to the same holder until its next report.
    """
    left = list(copies)
    rng.shuffle(left)
    left.sort(key=_is_near, reverse=True)
    ordered: list[RemoteCopy] = []
    while left:
        equals = [copy for copy in left[:2] if _is_near(copy) == _is_near(left[0])]
        choice = min(equals, key=lambda copy: copy.load_permille)
        left.remove(choice)
        ordered.append(choice)
    return ordered


def _is_near(copy: RemoteCopy) -> bool:
    """Whether it is in the memory of this host."""
    return copy.same_host and not copy.on_ssd


@dataclass(frozen=True, slots=True)
class Attempt:
    """Pull from this copy over the transport at this place of the list."""

    copy: RemoteCopy
    transport: int
    has_alternatives: bool = False
    """Whether another holder is better than a long wait for this one, or than this one while it is busy."""
    soon: bool = False
    """Whether that other holder was not asked yet."""
    others: tuple[RemoteCopy, ...] = ()
    """Copies to read instead when this holder is slower than those are expected to be."""


class PullAttempts:
    """The course of one read over several holders.

    `next()` says what to try; after it failed, `failed()` takes the reason. Transports of one holder are
    tried cheapest first, and the next one only when the way failed and not the holder. Holders that were busy
    are asked once more when no other delivered; they do not refuse then. So are those that replaced the object while it
    was read, for what they have now, and those that were too slow: then only each other's speed counts.
    """

    def __init__(self, copies: Sequence[RemoteCopy], transports: Sequence[Transport]) -> None:
        self._copies = list(copies[:MAX_ATTEMPTS])
        self._transports = transports
        self._ways: list[Attempt] = []
        self._again: list[RemoteCopy] = []
        self._slow: set[int] = set()
        """Members that were too slow while others were left."""
        self._second_round = False
        self._current: Attempt | None = None
        self.reports: list[HolderReport] = []
        self.fallbacks: list[HolderReport] = []
        """Ways that failed where the next transport to the same holder took over."""

    def next(self) -> Attempt | None:
        """The attempt to make now; None when nothing is left."""
        while not self._ways:
            if not self._copies and not self._second_round:
                self._copies, self._again, self._second_round = self._again, [], True
            if not self._copies:
                self._current = None
                return None
            copy = self._copies.pop(0)
            offered = self._offered(copy)
            has_alternatives = not self._second_round and bool(self._copies or self._again)
            soon, others = has_alternatives and bool(self._copies), self._others()
            self._ways = [Attempt(copy, number, has_alternatives, soon, others) for number in offered]
            if not offered:
                self.reports.append(
                    HolderReport(copy.member, Code.UNAVAILABLE, "no transport reaches this peer", "")
                )
        self._current = self._ways.pop(0)
        return self._current

    def _others(self) -> tuple[RemoteCopy, ...]:
        """The copies left to try. In a second round, busy holders promise nothing."""
        if self._second_round:
            return tuple(copy for copy in self._copies if copy.member in self._slow)
        return (*self._copies, *self._again)

    def _offered(self, copy: RemoteCopy) -> list[int]:
        """The transports that reach a copy, cheapest first."""
        offered = [number for number, each in enumerate(self._transports) if not each.why_not(copy)]
        return sorted(offered, key=lambda number: self._transports[number].cost(copy))

    def failed(self, failure: PullFailed) -> None:
        """The attempt that `next` returned last ended like this."""
        attempt = self._current
        assert attempt is not None, "failed() without an attempt"
        self._current = None
        report = self._report_of(attempt.copy, attempt.transport, failure, attempt.has_alternatives)
        if failure.retriable and self._ways:
            self.fallbacks.append(report)  # the holder itself is not to blame yet
            return
        self._ways = []
        was_busy = failure.code is Code.BUSY and attempt.has_alternatives and not failure.keep
        if was_busy or (isinstance(failure, AnotherVersion) and not self._second_round):
            self._again.append(attempt.copy)
            return
        self._report(attempt.copy, report, failure)

    def _report_of(
        self, copy: RemoteCopy, transport: int, failure: PullFailed, has_alternatives: bool
    ) -> HolderReport:
        return HolderReport(
            copy.member,
            failure.code,
            failure.text,
            self._transports[transport].name,
            failure.incarnation,
            failure.sequence,
            has_alternatives,
            failure.keep,
            failure.others,
        )

    def _report(self, copy: RemoteCopy, report: HolderReport, failure: PullFailed) -> None:
        """Tell of a holder, the last time that it failed. One that was too slow may do when no other delivers."""
        if copy.member in self._slow:
            self.reports = [each for each in self.reports if each.member != copy.member]
        elif isinstance(failure, TooSlow):
            self._slow.add(copy.member)
            self._again.append(copy)
        self.reports.append(report)

    # --- those that help with a large object -------------------------------------------------

    def next_helper(self) -> RemoteCopy | None:
        """A copy that may bring parts of what the attempt reads that `next` returned last: of the same version, over
        the same transport. It is asked no more after that, but when it was busy."""
        copy = self._helper()
        if copy is not None:
            self._copies.remove(copy)
        return copy

    @property
    def has_helper(self) -> bool:
        """Whether `next_helper` returns one."""
        return self._helper() is not None

    def _helper(self) -> RemoteCopy | None:
        current = self._current
        if current is None or self._second_round:
            return None
        for copy in self._copies:
            if copy.version == current.copy.version and self._offered(copy)[:1] == [current.transport]:
                return copy
        return None

    def helper_failed(self, copy: RemoteCopy, transport: int, failure: PullFailed) -> None:
        """A helper, or the attempt itself when its helpers did without it, ended like this."""
        if failure.code is Code.BUSY or isinstance(failure, AnotherVersion):
            self._again.append(copy)
            return
        self._report(copy, self._report_of(copy, transport, failure, has_alternatives=True), failure)

    def error(self) -> NoSuchKey | Unavailable:
        """The error for the caller after `next` returned None."""
        if all(report.code is Code.NO_SUCH_KEY for report in self.reports):
            return NoSuchKey(
                "no live peer holds the key: every peer that was known to hold it has dropped it"
                if self.reports
                else "no live peer is known to hold the key"
            )
        reasons = "; ".join(
            f"{report.text}{f' ({report.transport})' if report.transport else ''}"
            for report in self.reports[:4]
        )
        more = f"; and {len(self.reports) - 4} more" if len(self.reports) > 4 else ""
        return Unavailable(
            f"none of {len(self.reports)} known copies could be read: {reasons}{more}. "
            "Retry, or see `mooncake-p2p peers`"
        )
