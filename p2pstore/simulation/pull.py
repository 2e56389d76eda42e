"""A `PullObject` of a simulated peer, through the engine that real peers and clients use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pstore.core.effects import PullFailure, PullObject, PullOutcome
from p2pstore.errors import NoSuchKey, P2PStoreError
from p2pstore.gossip.records import writer_of
from p2pstore.simulation.transport import SimulatedTransport
from p2pstore.transfer.arriving import Announced
from p2pstore.transfer.messages import Keeps
from p2pstore.transfer.transport import PullReport, RemoteCopy, pull_with_failover
from p2pstore.wire import Code

if TYPE_CHECKING:
    from p2pstore.simulation.peer import SimulatedPeer


async def pull_object(peer: SimulatedPeer, effect: PullObject) -> PullOutcome | None:
    """Bring the object into the peer's memory from the first of its copies that delivers it, best first.

    Runs as a task, which ends with the peer's process. None when nobody waits for the object any more.
    """
    core, cluster = peer.core, peer.cluster
    assert core is not None
    try:
        destination = core.copy_destination(effect.operation, cluster.kernel.now)
    except NoSuchKey:
        return None
    transport = SimulatedTransport(
        cluster.network,
        peer.number,
        cluster.by_peer_id,
        cluster.pull_seconds,
        effect.progress_seconds,
    )
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


def _outcome(report: PullReport) -> PullOutcome:
    failures = tuple(
        PullFailure(
            failure.member,
            int(failure.code),
            failure.text,
            failure.incarnation,
            failure.sequence,
            failure.keep,
            failure.others,
        )
        for failure in report.failures
    )
    if report.pulled is None or report.copy is None:
        return PullOutcome(False, failures)
    return PullOutcome(True, failures, source=report.copy.member, transport=report.pulled.transport)
