"""A large location set fetched whole from its owner, between real peers."""

import logging
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from p2pstore.errors import P2PStoreError
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.locations.views import STEP_RECORDS
from p2pstore.gossip.records import LOCATION_BYTES, LocationRecord
from p2pstore.objects import Version
from p2pstore.peer import Peer
from p2pstore.peer.for_peers import data_requests
from p2pstore.peer.for_peers.data_backend import PeerDataBackend
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Snapshot
from tests.cluster.peers import cluster
from tests.unit.gossip_network import digest_of
from tests.waiting import until

COUNT = 3 * STEP_RECORDS


def hold(owner: Peer) -> None:
    """Have a peer say that it holds many keys."""
    core = owner.node.core
    version = core.new_version(0, owner.node.now)
    for number in range(COUNT):
        stamp = Version(version.clock, version.writer)
        core.gossip.hold(LocationRecord(digest_of(number), stamp, number, 1), owner.node.now)
    owner.node.process()


def knows_all(reader: Peer, owner: Peer) -> bool:
    mine, theirs = reader.node.core.gossip, owner.node.core.gossip
    return mine.directory.position(theirs.member) == (theirs.incarnation, theirs.log.sequence)


def lose(reader: Peer, owner: Peer) -> None:
    """The reader's view is not what its owner signed."""
    directory, gossip = reader.node.core.gossip.directory, owner.node.core.gossip
    wrong = replace(gossip.log.head, set_hash=1)
    directory.observe_head(gossip.member, gossip.incarnation, wrong)
    assert directory.diverged(gossip.member)
    directory.observe_head(gossip.member, gossip.incarnation, gossip.log.head)


async def test_a_lost_view_is_fetched_whole_and_checked_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_in: list[int] = []

    def check(packed: bytes) -> object:
        checked_in.append(threading.get_ident())
        return check_snapshot(packed)

    monkeypatch.setattr(data_requests, "check_snapshot", check)
    async with cluster(tmp_path, 2) as (a, b):
        hold(a)
        await until(lambda: knows_all(b, a))
        directory, member = b.node.core.gossip.directory, a.node.core.gossip.member
        lose(b, a)
        assert directory.holders(digest_of(1)) == []
        await until(lambda: knows_all(b, a) and not directory.work_pending)
        assert directory.record_count == COUNT
        assert [each.member for each in directory.holders(digest_of(COUNT - 1))] == [member]
    assert checked_in
    assert threading.get_ident() not in checked_in


@pytest.mark.parametrize(
    ("added", "said", "is_received"),
    [(None, "names a key twice", True), (bytes(100 << 20), "at most", False)],
    ids=["nonsense", "more than its owner signed"],
)
async def test_a_wrong_snapshot_is_dropped_and_fetched_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    added: bytes | None,
    said: str,
    is_received: bool,
) -> None:
    checked: list[int] = []

    def check(packed: bytes) -> object:
        checked.append(len(packed))
        return check_snapshot(packed)

    monkeypatch.setattr(data_requests, "check_snapshot", check)
    async with cluster(tmp_path, 2) as (a, b):
        hold(a)
        await until(lambda: knows_all(b, a))
        real, served = PeerDataBackend._own_snapshot, 0

        async def first_wrong(backend: PeerDataBackend) -> object:
            nonlocal served
            served += 1
            reply, parts = await real(backend)
            return reply, [*parts, added or parts[0][:LOCATION_BYTES]] if served == 1 else parts

        monkeypatch.setattr(PeerDataBackend, "_own_snapshot", first_wrong)
        with caplog.at_level(logging.WARNING, "p2pstore.peer"):
            lose(b, a)
            await until(lambda: knows_all(b, a))
        assert served >= 2
        assert said in caplog.text
        assert any(length != COUNT * LOCATION_BYTES for length in checked) == is_received


async def test_a_peer_gives_a_snapshot_of_its_own_log_only(tmp_path: Path) -> None:
    """No peer asks it for another's: that would be a second way, which holds the event loop."""
    async with cluster(tmp_path, 2) as (a, b):
        hold(a)
        await until(lambda: knows_all(b, a))
        asked = Snapshot(a.node.core.gossip.member)
        with pytest.raises(P2PStoreError, match="its own log only"):
            await a.node.pool.request_bulk(
                a.node.routes.remote_peer(b.node.core.peer_id), DataKind.SNAPSHOT, asked, 1 << 20
            )
