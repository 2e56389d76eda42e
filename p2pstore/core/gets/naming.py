"""Keys of digests: of objects held here, and of those at other peers, whose logs name digests alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from p2pstore.core.gets.lookup import split_digests
from p2pstore.core.operation import Operation, Reply
from p2pstore.gossip.records import PeerId
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Named, Names

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.entries import ObjectEntry
    from p2pstore.ssd_tier.index import ColdEntry

NAMES_TIMEOUT_SECONDS: Final = 2.0


def name_here(core: PeerCore, digest: bytes, namespace: str, now: float) -> str | None:
    """The key of an object held here; empty when it is of another namespace, None when none is held."""
    entry: ObjectEntry | ColdEntry | None = core.segment.find(digest, core.unix(now))
    if entry is None and core.cold.store is not None:
        entry = core.cold.store.find(digest)
    if entry is None:
        return None
    return entry.key if entry.namespace == namespace else ""


def serve_names(core: PeerCore, request: Names, now: float) -> Named:
    """Answer NAMES: some 2 us a digest, 20 on the SSD. Raises `ProtocolError` when digests are not whole."""
    digests = split_digests(request.digests)
    return Named([name_here(core, digest, request.namespace, now) or "" for digest in digests])


class NamesOperation(Operation):
    """Ask a holder for the keys of at most 256 digests. The result: a key for each, empty where the holder named none
    or a wrong one; None when it did not answer."""

    def __init__(self, core: PeerCore, holder: PeerId, namespace: str, digests: Sequence[bytes]) -> None:
        super().__init__(core)
        self._holder = holder
        self._namespace = namespace
        self._digests = digests

    def start(self, now: float) -> None:
        request = Names(self._namespace, b"".join(self._digests))
        self.ask(None, self._holder, DataKind.NAMES, request, NAMES_TIMEOUT_SECONDS)

    def answered(self, about: None, reply: Reply, now: float) -> None:
        keys = reply.keys if isinstance(reply, Named) else []
        if reply is None:
            self.finish(None, now)
        elif len(keys) != len(self._digests):  # a version that knows no NAMES, or nonsense
            self.finish([""] * len(self._digests), now)
        else:
            self.finish(list(map(self._checked, self._digests, keys)), now)

    def _checked(self, digest: bytes, key: str) -> str:
        """The key, if the digest is its own: no holder can give a key that is not."""
        try:
            return key if self.core.digests_of(self._namespace, [key]) == [digest] else ""
        except ValueError:
            return ""
