"""Which failure of a transport is a fallback to another one."""

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
