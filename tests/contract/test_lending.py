"""Objects that a peer lends to the threads that answer reads, and reads left to its event loop."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from p2pstore.core.gets.hot_objects import HOT_READS
from p2pstore.objects import MIB, key_digest
from p2pstore.peer.for_peers.data_backend import PeerDataBackend
from p2pstore.transfer.data_messages import GetItem, GetSmall, Keeps
from p2pstore.transfer.serving.read_answers import LentObject
from tests.contract.worlds import Cluster, open_cluster

CHUNK, LONGER = key_digest("chunk"), key_digest("longer")
STRANGER = b"a peer that nobody knows"


class Lender:
    """The near peer of a cluster, as its threads see it."""

    def __init__(self, cluster: Cluster) -> None:
        self.segment = cluster.near.node.core.segment
        self.other = cluster.far.node.core.peer_id
        self._cluster = cluster
        self._backend = PeerDataBackend(cluster.near.node, cast(Any, None), cast(Any, None))

    def lends(self, item: GetItem, reader: bytes = STRANGER, keeps: int = Keeps.NO) -> bytes | None:
        """The bytes that it lends."""
        lent = self._backend.lend(item, reader, keeps, decides=False)
        if lent is None:
            return None
        assert isinstance(lent, LentObject)
        try:
            return bytes(item.of(lent.value))
        finally:
            self._backend.end_loan(lent.handle)

    def lends_small(
        self, digest: bytes, most_bytes: int, reader: bytes = STRANGER, keeps: int = Keeps.NO
    ) -> bytes:
        """The bytes that it lends for GET_SMALL."""
        lent = self._backend.lend_small(GetSmall(digest, most_bytes, keeps), reader)
        assert lent is not None
        try:
            return b"".join(lent.payloads)
        finally:
            if lent.handle is not None:
                self._backend.end_loan(lent.handle)


@pytest.fixture
def lender() -> Iterator[Lender]:
    with open_cluster() as cluster:
        store = cluster.stores["blocking"]
        store.put("chunk", b"c" * MIB)
        store.put("longer", b"l" * 2 * MIB)
        lender = Lender(cluster)
        yield lender

        def nothing_is_lent() -> bool:
            lender.segment.objects.expire(0)  # takes in which loans are over
            return not lender.segment.references.loans.any_known

        assert cluster.on_near(nothing_is_lent)


def test_it_lends_objects_and_parts_of_them(lender: Lender) -> None:
    assert lender.lends(GetItem(CHUNK)) == b"c" * MIB
    assert lender.lends(GetItem(LONGER)) == b"l" * 2 * MIB
    assert lender.lends(GetItem(LONGER, 1, 1)) == b"l" * MIB
    assert lender.lends(GetItem(key_digest("absent"))) is None


def test_what_is_hot_is_left_to_the_event_loop(lender: Lender) -> None:
    """That tells the reader to have its own peer keep it. Each reading counts, the parts of one do not."""
    for _ in range(int(HOT_READS) + 1):
        assert lender.lends(GetItem(LONGER), lender.other, Keeps.BY_PEER)
        for _ in range(3):
            assert lender.lends(GetItem(LONGER, 1, 1), lender.other, Keeps.BY_PEER)
    assert lender.lends(GetItem(LONGER), lender.other, Keeps.BY_PEER) is None
    assert lender.lends(GetItem(LONGER, 1, 1), lender.other, Keeps.BY_PEER)
    assert lender.lends(GetItem(LONGER), lender.other, Keeps.NO)


def test_by_small_reads_it_lends_one_chunk_at_most(lender: Lender) -> None:
    assert lender.lends_small(CHUNK, MIB) == b"c" * MIB
    assert lender.lends_small(CHUNK, MIB - 1) == b""
    assert lender.lends_small(LONGER, 1 << 62) == b""
    assert lender.lends_small(CHUNK, 1 << 62) == b"c" * MIB
    assert lender.lends_small(CHUNK, -1) == b""


def test_what_is_hot_is_not_lent_by_small_reads(lender: Lender) -> None:
    """GET is to say who keeps it."""
    for _ in range(int(HOT_READS) + 1):
        assert lender.lends_small(CHUNK, MIB, lender.other, Keeps.BY_PEER)
    assert lender.lends_small(CHUNK, MIB, lender.other, Keeps.BY_PEER) == b""
    assert lender.lends(GetItem(CHUNK), lender.other, Keeps.BY_PEER) is None
    assert lender.lends_small(CHUNK, MIB, lender.other, Keeps.NO)
