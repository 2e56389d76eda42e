"""A `PullObject` or `TakeCopiesOperation` of a simulated peer, through the engine that real peers and clients use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from p2pstore.core.copies.copy_destination import RoomDestination, TakeCopiesOperation
from p2pstore.core.operation import PullObject, PullOutcome
from p2pstore.errors import NoSuchKey, P2PStoreError
from p2pstore.gossip.records import member_of, writer_of
from p2pstore.objects import Announced
from p2pstore.runtime.stepping import run_through
from p2pstore.transfer.data_messages import Keeps
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.transport import PullReport, RemoteCopy, pull_with_failover
from p2pstore.wire import Code
from simulation.transport import SimulatedTransport

if TYPE_CHECKING:
    from simulation.peer import SimulatedPeer

PROGRESS_SECONDS: Final = 5.0


async def pull_object(peer: SimulatedPeer, effect: PullObject) -> PullOutcome | None:
    """Bring the object into the peer's memory from the first of its copies that delivers it, best first.

    Runs as a task, which ends with the peer's process. None when no read waits for the object any more.
    """
    core, cluster = peer.core, peer.cluster
    assert core is not None
    try:
        destination = core.operations.copy_destination(effect.operation, cluster.kernel.now)
    except NoSuchKey:
        return None
    transport = _transport(peer, effect.progress_seconds)
    copies = [
        RemoteCopy(
            copy.peer_id,
            member=copy.member,
            slot=copy.record.slot,
            version=copy.record.version,
            keeps=Keeps.NO if effect.insist else Keeps.YES,
            announced=Announced(writer_of(copy.peer_id), copy.announced),
        )
        for copy in effect.copies
    ]
    try:
        report = await pull_with_failover(copies, [transport], effect.digest, destination)
        if report.pulled is not None:
            destination.commit(cluster.kernel.now)
    except (P2PStoreError, ValueError) as error:
        return PullOutcome(delivered=False, error=error)
    finally:
        destination.abort()
    cluster.refused_copies += sum(failure.code is Code.STALE for failure in report.failures)
    return _outcome(report)


async def take_copies(peer: SimulatedPeer, operation: TakeCopiesOperation) -> PullOutcome:
    """Bring copies that their writer wants kept, one after the other. Runs as a task, too."""
    core, cluster, copies = peer.core, peer.cluster, operation.copies
    assert core is not None
    transport = _transport(peer, PROGRESS_SECONDS)
    holder = RemoteCopy(operation.sender, member=member_of(operation.sender))
    brought: set[int] = set()
    try:
        run_through(copies.reserve(cluster.kernel.now))
        for room in copies.rooms:
            try:
                await transport.pull(holder, room.slot.digest, RoomDestination(room))
            except (P2PStoreError, ValueError) as error:
                cluster.refused_copies += isinstance(error, PullFailed) and error.code is Code.STALE
            else:
                brought.add(room.place)
        copies.publish(brought, cluster.kernel.now)
    finally:
        copies.abort()
    return PullOutcome(delivered=True)


def _transport(peer: SimulatedPeer, progress_seconds: float) -> SimulatedTransport:
    cluster = peer.cluster
    return SimulatedTransport(
        cluster.network, peer.number, cluster.by_peer_id, cluster.pull_seconds, progress_seconds
    )


def _outcome(report: PullReport) -> PullOutcome:
    if report.pulled is None or report.copy is None:
        return PullOutcome(False, report.failures)
    return PullOutcome(
        True, report.failures, source=report.copy.member, transport=report.pulled.transport
    )
