"""A transport that gives way to another one is told once, and again only after it worked."""

from __future__ import annotations

from typing import cast

from p2pstore.peer.fallbacks import MAX_REMEMBERED, Fallbacks
from p2pstore.transfer.failover import HolderReport, PullAttempts, PullFailed
from p2pstore.transfer.layout import Slot, TrailerBody
from p2pstore.transfer.transport import Pulled, PullReport, RemoteCopy
from p2pstore.wire import Code


class FakeTransport:
    def __init__(self, name: str, cost: float) -> None:
        self.name = name
        self._cost = cost

    def offers(self, copy: RemoteCopy) -> bool:
        return True

    def cost(self, copy: RemoteCopy) -> float:
        return self._cost


def copy_of(member: int) -> RemoteCopy:
    return RemoteCopy(b"peer", ("10.0.0.1:1",), member=member)


def pulled(member: int, by: str, *failed: str) -> PullReport:
    """A read from `member` over `by`, after these transports had failed."""
    fallbacks = tuple(HolderReport(member, Code.UNAVAILABLE, "refused", each) for each in failed)
    delivered = Pulled(cast(Slot, None), cast(TrailerBody, None), 1, by)
    return PullReport(delivered, copy_of(member), (), fallbacks=fallbacks)


def test_the_next_transport_to_a_holder_is_a_fallback_and_the_next_holder_is_not() -> None:
    attempts = PullAttempts(
        [copy_of(1), copy_of(2)], [FakeTransport("tcp", 1), FakeTransport("shm", 0)]
    )
    for code, retriable in (
        (Code.UNAVAILABLE, True),
        (Code.UNAVAILABLE, True),
        (Code.STALE, False),
    ):
        assert attempts.next() is not None
        attempts.failed(PullFailed(code, "refused", retriable=retriable))
    assert [(each.member, each.transport) for each in attempts.fallbacks] == [(1, "shm")]
    assert [(each.member, each.transport) for each in attempts.reports] == [(1, "tcp"), (2, "shm")]


def test_it_is_said_once_for_each_peer() -> None:
    fallbacks = Fallbacks()
    first = pulled(1, "tcp", "shm")
    assert fallbacks.news(first) == list(first.fallbacks)
    assert fallbacks.news(first) == []
    assert len(fallbacks.news(pulled(2, "tcp", "shm"))) == 1
    assert fallbacks.news(pulled(1, "shm")) == []  # it works again
    assert fallbacks.news(first) == list(first.fallbacks)


def test_memory_is_bounded() -> None:
    fallbacks = Fallbacks()
    for member in range(MAX_REMEMBERED + 1):
        assert len(fallbacks.news(pulled(member, "tcp", "shm"))) == 1
    assert len(fallbacks.news(pulled(0, "tcp", "shm"))) == 1  # forgotten, so said again
