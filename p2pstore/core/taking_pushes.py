"""Taking in large pushes from other peers, a step at a time: thousands of operations would hold the loop for
tenths of a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.gets.lookup import holding_record
from p2pstore.core.operation import Operation
from p2pstore.errors import CapacityExceeded, ProtocolError
from p2pstore.gossip.gossip_effects import Push
from p2pstore.gossip.homes.home_updates import PushIntake
from p2pstore.gossip.locations.views import Location
from p2pstore.gossip.records import Member
from p2pstore.transfer import peer_messages

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_COMING_OF_ONE: Final = 8
"""Large pushes of one sender that may wait."""


class PushesComing:
    """The pushes that are being taken in: one step a tick, of one sender after the other, and of each the one that
    came first. So a sender of many pushes delays only itself."""

    def __init__(self) -> None:
        self._of: dict[Member, deque[TakePushOperation]] = {}
        """In the order of their turns; the first one's first push has its step next."""

    @property
    def next(self) -> TakePushOperation | None:
        """The push that goes on next."""
        return next((pushes[0] for pushes in self._of.values()), None)

    def add(self, push: TakePushOperation) -> None:
        """Raises `CapacityExceeded` for a sender of which too many wait."""
        pushes = self._of.setdefault(push.sender, deque())
        if len(pushes) >= MAX_COMING_OF_ONE:
            raise CapacityExceeded(f"{len(pushes)} pushes of yours are being taken in already")
        pushes.append(push)

    def turn(self, sender: Member) -> None:
        """A sender had its step: the others come before it does again."""
        self._of[sender] = self._of.pop(sender)

    def remove(self, push: TakePushOperation) -> None:
        """A push has ended."""
        pushes = self._of[push.sender]
        pushes.remove(push)
        if not pushes:
            del self._of[push.sender]


class TakePushOperation(Operation):
    """Takes a push in. The result is what to answer, or the error that says why not."""

    def __init__(self, core: PeerCore, sender: Member, intake: PushIntake) -> None:
        super().__init__(core)
        self.sender = sender
        self._intake = intake
        self._waits = False

    def start(self, now: float) -> None:
        coming = self.core.pushes_coming
        idle = coming.next is None
        try:
            coming.add(self)
        except CapacityExceeded as error:
            self.finish(error, now)
            return
        self._waits = True
        if idle:
            self.set_alarm(now)

    def wake(self, now: float) -> None:
        try:
            done = self._intake.step(now)
        except ProtocolError as error:
            self.finish(error, now)
            return
        if done:
            self.finish(reply_of(self._intake.behind, self._intake.rivals), now)
            return
        coming = self.core.pushes_coming
        coming.turn(self.sender)
        following = coming.next
        assert following is not None
        following.set_alarm(now)

    def finish(self, result: Any, now: float) -> None:
        if self.done:
            return
        super().finish(result, now)
        if not self._waits:
            return
        coming = self.core.pushes_coming
        first = coming.next is self
        coming.remove(self)
        if first and (following := coming.next) is not None:
            following.set_alarm(now)


def message_of(push: Push) -> peer_messages.Push:
    """The wire message of a push."""
    sets = [
        peer_messages.PartitionSet(each.partition, each.number, each.set_hash, each.records)
        for each in push.sets
    ]
    return peer_messages.Push(
        push.incarnation,
        push.sequences,
        push.operations,
        push.numbers,
        push.sequence,
        sets,
        push.audit,
        push.audit_seconds,
    )


def holding_of(location: Location) -> peer_messages.Holding:
    """A location as it travels."""
    return peer_messages.Holding(
        location.member, location.incarnation, location.sequence, location.record.encode()
    )


def reply_of(behind: list[int], rivals: Iterable[Location]) -> peer_messages.Pushed:
    """A home's reply, from the results of `Gossip.take_push`."""
    return peer_messages.Pushed(behind, [holding_of(rival) for rival in rivals])


def rivals_of(reply: peer_messages.Pushed) -> list[Location]:
    """The other versions that a home named."""
    return [
        Location(rival.member, rival.incarnation, rival.sequence, record, hearsay=True)
        for rival in reply.rivals
        if (record := holding_record(rival.record)) is not None
    ]
