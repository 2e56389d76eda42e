"""A transport that gives way to another one is told once, and again only after it worked."""

from __future__ import annotations

from p2pstore.status.measures import MAX_REMEMBERED, Fallbacks
from p2pstore.transfer.failover import PullAttempts, PullFailed
from p2pstore.transfer.transport import RemoteCopy
from p2pstore.wire import Code
from tests.unit.test_failover import SHM, TCP


def copy_of(member: int) -> RemoteCopy:
    return RemoteCopy(b"peer", ("10.0.0.1:1",), member=member, same_host=True)


def test_the_next_transport_to_a_holder_is_a_fallback_and_the_next_holder_is_not() -> None:
    attempts = PullAttempts([copy_of(1), copy_of(2)], [TCP, SHM])
    for code, retriable in ((Code.UNAVAILABLE, True), (Code.UNAVAILABLE, True), (Code.STALE, False)):
        assert attempts.next() is not None
        attempts.failed(PullFailed(code, "refused", retriable=retriable))
    assert [(each.member, each.transport) for each in attempts.fallbacks] == [(1, "shm")]
    assert [(each.member, each.transport) for each in attempts.reports] == [(1, "tcp"), (2, "shm")]


def test_it_is_said_once_for_each_peer() -> None:
    fallbacks = Fallbacks()
    assert fallbacks.failed(1, "shm")
    assert not fallbacks.failed(1, "shm")
    assert fallbacks.failed(2, "shm")
    fallbacks.worked(1, "shm")
    assert fallbacks.failed(1, "shm")


def test_memory_is_bounded() -> None:
    fallbacks = Fallbacks()
    for member in range(MAX_REMEMBERED + 1):
        assert fallbacks.failed(member, "shm")
    assert fallbacks.failed(0, "shm")  # forgotten, so said again
