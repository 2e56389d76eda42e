"""Having copies of an object made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.core_effects import Reply
from p2pstore.core.operation import Operation
from p2pstore.gossip.records import PeerId
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Replicate, Replicated

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore
    from p2pstore.memory.segment import ObjectEntry

REPLICATE_BYTES_PER_SECOND: Final = 50e6
"""A target that copies slower than this is given up for the next candidate."""

MOST_ANNOUNCED: Final = 4
"""Location records count wanted copies up to here."""


class ReplicateOperation(Operation):
    """Have `wanted` copies of a local object made; the result is how many there are.

    Targets pull. They are asked in rendezvous order, those on hosts that have no copy yet before others, and those
    with a soft copy, which only has to be kept, before those without; one that fails is replaced by the next. Holders
    that have not heard how many copies are wanted are told. With `candidates`, these peers are asked instead of all
    others, in their order. `made` are peers that have just made a copy, `tried` are those that failed to.
    """

    def __init__(
        self,
        core: PeerCore,
        entry: ObjectEntry,
        wanted: int,
        on_finish: Callable[[Any, float], None] | None = None,
        *,
        candidates: Sequence[PeerId] | None = None,
        made: Sequence[PeerId] = (),
        tried: Sequence[PeerId] = (),
    ) -> None:
        super().__init__(core, on_finish)
        self.made = 0
        """How many peers said that they hold a copy now."""
        self._made_before = made
        self._tried_before = tried
        self._entry = entry
        self._wanted = wanted
        self._holders: list[PeerId] = []
        """Of the other copies."""
        self._pending: dict[int, PeerId] = {}
        self._chosen = candidates
        self._candidates: list[PeerId] = []
        self._next_tag = 0

    @property
    def _copies(self) -> int:
        return 1 + len(self._holders)

    def start(self, now: float) -> None:
        entry = self._entry
        copies = [
            copy
            for copy in self.core.copies.known(entry.digest, now)
            if copy.reachable and not copy.local and copy.record.version == entry.version
        ]
        holding = [copy for copy in copies if not copy.record.soft]
        soft = [copy.peer_id for copy in copies if copy.record.soft]
        told = min(entry.replicas, MOST_ANNOUNCED)
        holders = [copy.peer_id for copy in holding if copy.record.replicas >= told]
        self._holders = list(dict.fromkeys((*holders, *self._made_before)))
        to_tell = [copy.peer_id for copy in holding if copy.record.replicas < told]
        known = {copy.peer_id for copy in holding}.union(self._made_before, self._tried_before)
        ranked = self.core.ranked_peers(entry.digest) if self._chosen is None else self._chosen
        self._candidates = [
            peer_id
            for peer_id in dict.fromkeys((*soft, *ranked))
            if peer_id not in known and offers_memory(self.core, peer_id)
        ]
        self.core.segment.references.acquire(
            entry
        )  # the source of copies is not evicted before they are made
        for peer_id in to_tell:
            self._ask(peer_id, now)
        self._proceed(now)

    def _proceed(self, now: float) -> None:
        while self._copies + len(self._pending) < self._wanted and self._candidates:
            self._ask(self._next_candidate(), now)
        if not self._pending:
            self.core.segment.references.let_go(self._entry)
            self.finish(self._copies, now)

    def _next_candidate(self) -> PeerId:
        if self._chosen is not None:
            return self._candidates.pop(0)
        return take_target(self.core, self._candidates, [*self._holders, *self._pending.values()])

    def _ask(self, target: PeerId, now: float) -> None:
        entry = self._entry
        me = self.core.gossip.record(now)
        request = Replicate(
            entry.digest,
            entry.version.clock,
            entry.version.writer,
            entry.length,
            record_body=me.body,
            record_signature=me.signature,
            replicas=entry.replicas,
            root=entry.version.root,
            proof=self.core.proofs.of(entry, now),
        )
        self._next_tag += 1
        self._pending[self._next_tag] = target
        timeout = 5.0 + entry.length / REPLICATE_BYTES_PER_SECOND
        self.ask(self._next_tag, target, DataKind.REPLICATE, request, timeout)

    def answered(self, tag: int, reply: Reply, now: float) -> None:
        target = self._pending.pop(tag)
        if isinstance(reply, Replicated):
            self._holders.append(target)
            self.made += 1
        elif reply is None:
            self.core.holders.peer_failed(target, now)
        self._proceed(now)

    def cancel(self, now: float) -> None:
        if not self.done:
            self.core.segment.references.let_go(self._entry)
        super().cancel(now)


def offers_memory(core: PeerCore, peer_id: PeerId) -> bool:
    """Whether the member can hold copies at all."""
    state = core.gossip.membership.get(peer_id)
    return state is not None and state.memory_capacity > 0


def take_target(core: PeerCore, candidates: list[PeerId], taken: Sequence[PeerId]) -> PeerId:
    """Take out the first candidate that is on a host without a copy; where there is none, the first. `taken` have, or
    make, the other copies."""
    own = core.gossip.membership.own.record
    hosts = {_host_of(core, peer_id) for peer_id in taken}
    hosts.add(own.host_id if own is not None else b"")
    elsewhere = (
        place for place, peer_id in enumerate(candidates) if _host_of(core, peer_id) not in hosts
    )
    return candidates.pop(next(elsewhere, 0))


def _host_of(core: PeerCore, peer_id: PeerId) -> bytes:
    state = core.gossip.membership.get(peer_id)
    record = None if state is None else state.record
    return peer_id if record is None else record.host_id
