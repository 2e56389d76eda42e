"""The keys of all peers: page by page, which of some are known, and how much of a chain of blocks there is."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from p2pstore.core.operation import InSteps, KnownCopy, Operation, Reply
from p2pstore.core.serving import MAX_LIST_LIMIT, listed_here
from p2pstore.gossip.locations.location_lookups import HeldKeys
from p2pstore.gossip.records import Member, PeerId, Tier
from p2pstore.objects import ZERO_VERSION, newest_accepted_clock
from p2pstore.put_facts import KeyEntry
from p2pstore.runtime.stepping import Steps
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import KeyInfo, Keys, ListKeys

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

LIST_TIMEOUT_SECONDS: Final = 2.0
ASKED_PER_STEP: Final = 64
"""Peers: each has a task of its own."""
MERGED_PER_STEP: Final = 512
"""Keys of all peers, put together at 3 us each."""
NAMED_PEERS: Final = 8
"""Holders named per key; `copies` counts them all."""


@dataclass(slots=True)
class ListedPage:
    """A page of keys, in order. `silent` peers did not answer in time."""

    items: list[KeyEntry]
    more: bool
    silent: list[PeerId] = field(default_factory=list)


class ListOperation(Operation):
    """One page of keys over all live peers."""

    def __init__(self, core: PeerCore, request: ListKeys, *, local: bool) -> None:
        super().__init__(core)
        self._request = request
        self._local = local
        self._to_ask: list[PeerId] = []
        self._answers: list[tuple[PeerId, Keys]] = []
        self._silent: list[PeerId] = []

    def start(self, now: float) -> None:
        if not self._local:
            self._to_ask = self.core.live_peers()[::-1]
        self.wake(now)
        here = listed_here(self.core, self._request, now)
        self.run(InSteps(self.core, here), self._listed_here, now)

    def wake(self, now: float) -> None:
        """Ask some more peers."""
        for _ in range(min(len(self._to_ask), ASKED_PER_STEP)):
            peer_id = self._to_ask.pop()
            self.ask(peer_id, peer_id, DataKind.LIST, self._request, LIST_TIMEOUT_SECONDS)
        if self._to_ask:
            self.set_alarm(now)

    def _listed_here(self, result: Any, now: float) -> None:
        if isinstance(result, Keys):
            self._answers.append((self.core.peer_id, result))
            self._settle(now)

    def answered(self, peer_id: PeerId, reply: Reply, now: float) -> None:
        if isinstance(reply, Keys) and is_page_of(reply, self._request):
            self._answers.append((peer_id, reply))
        else:
            self._silent.append(peer_id)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if not self.asked and not self._to_ask and not self.parts:
            limit = min(self._request.limit, MAX_LIST_LIMIT)
            merging = merge_pages(limit, self._answers, self._silent, self.core.name_of)
            self.run(InSteps(self.core, merging), self.finish, now)


def is_page_of(page: Keys, request: ListKeys) -> bool:
    """Whether a page is what was asked for: keys in order, each once, after `after`, with the prefix. Anything else
    could send a client that pages through the keys in circles."""
    keys = [item.key for item in page.items]
    return (
        all(earlier < later for earlier, later in pairwise([request.after, *keys]))
        and all(key.startswith(request.prefix) for key in keys)
        and (bool(keys) or not page.more)
    )


def merge_pages(
    limit: int,
    answers: Sequence[tuple[PeerId, Keys]],
    silent: list[PeerId],
    name_of: Callable[[PeerId], str],
) -> Steps[ListedPage]:
    """Merge sorted pages: the newest version of each key speaks for it. A page that says `more` ends the merged one at
    its last key, behind which that peer may hold keys that it did not list."""
    horizon = min((page.items[-1].key for _, page in answers if page.more and page.items), default=None)
    merged: list[KeyEntry] = []
    for number, (key, place, item) in enumerate(heapq.merge(*map(_in_order, count(), answers))):
        if number and number % MERGED_PER_STEP == 0:
            yield
        if horizon is not None and key > horizon:
            break
        name = name_of(answers[place][0])
        if not merged or merged[-1].key != key:
            if len(merged) >= limit:
                return ListedPage(merged, True, silent)
            merged.append(_entry(item, [name], 1))
            continue
        known = merged[-1]
        if (known.clock, known.writer) == (item.clock, item.writer):
            merged[-1] = _entry(item, [*known.peers, name][:NAMED_PEERS], known.copies + 1)
        elif (known.clock, known.writer) < (item.clock, item.writer):
            merged[-1] = _entry(item, [name], 1)
    return ListedPage(merged, horizon is not None, silent)


def _in_order(place: int, answer: tuple[PeerId, Keys]) -> Iterator[tuple[str, int, KeyInfo]]:
    return ((item.key, place, item) for item in answer[1].items)


def _entry(item: KeyInfo, peers: list[str], copies: int) -> KeyEntry:
    return KeyEntry(
        item.key,
        item.length,
        copies,
        peers,
        item.pin,
        item.soft,
        item.expires_unix_ms,
        item.clock,
        item.writer,
    )


def is_known(core: PeerCore, digest: bytes, now: float, namespace: bytes | None = None) -> bool:
    """`known_keys` for one key: in 5 us at most, for which that takes 40, made for many."""
    if digest in core.segment.digests() or core.cold.find(digest, now) is not None:
        return True
    copies = core.copies.believed(digest, now, namespace)
    return any(state.alive and not location.hidden for location, state in copies)


def known_keys(
    core: PeerCore, digests: Sequence[bytes], now: float, namespace: bytes | None = None
) -> set[bytes]:
    """Those of `digests` (of the namespace with this digest) of which `known_copies` would name a reachable
    copy, at a microsecond or so each. Objects that expired within the last second still count."""
    wanted = set(digests)
    here = wanted & core.segment.digests()
    here |= core.cold.held_only_here(wanted - here, now)

    elsewhere = core.gossip.directory.held(wanted - here, believed_clocks(core, now, namespace))
    floors = core.gossip.cluster_records.floors
    under_a_floor = (
        [digest for digest in elsewhere if floors.floor_for(digest) is not ZERO_VERSION]
        if floors.count
        else []
    )
    for digest in under_a_floor:  # few: their versions decide
        if not any(copy.reachable for copy in core.copies.known(digest, now, namespace)):
            elsewhere.discard(digest)
    return here | elsewhere


def believed_clocks(core: PeerCore, now: float, namespace: bytes | None) -> Callable[[Member], range]:
    """The clocks of versions that are believed of each member: none of one that is not alive."""
    flushed = core.gossip.cluster_records.floors.floor_for(b"", namespace).clock
    end = newest_accepted_clock(core.believed_unix(now)) + 1

    def believed(member: Member) -> range:
        state = core.gossip.membership.resolve(member)
        if state is None or not state.alive:
            return range(0)
        return range(max(flushed, core.gossip.doubted_up_to(member, now) + 1), end)

    return believed


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """A member has the first `blocks` of a chain without a gap, `memory_blocks` of these in its memory."""

    member: Member
    blocks: int
    memory_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`matched` blocks from the first on have a holder each. `runs`: of holders of the first one, the longest first."""

    matched: int
    runs: list[PrefixRun]


def holdings_here(
    core: PeerCore, digests: Sequence[bytes], now: float, namespace: bytes
) -> dict[Member, HeldKeys] | None:
    """Holders of keys whose locations this peer knows all, at a microsecond or so a key. None: ask homes
    (`LookupOperation`), and use `holdings_of`."""
    if not core.gossip.partitions.mode.knows_all:
        return None
    found = core.gossip.directory.holdings(digests, believed_clocks(core, now, namespace))
    floors = core.gossip.cluster_records.floors
    found[core.member] = _own_holding(core, digests, now)
    for place, digest in enumerate(digests) if floors.count else ():
        if floors.floor_for(digest) is not ZERO_VERSION:  # few: their versions decide
            for holding in found.values():
                holding.held[place] = holding.in_memory[place] = False
            _note_copies(found, place, len(digests), core.copies.known(digest, now, namespace))
    return found


def holdings_of(copies: Sequence[Sequence[KnownCopy]]) -> dict[Member, HeldKeys]:
    """Holders of keys with these copies each."""
    found: dict[Member, HeldKeys] = {}
    for place, some in enumerate(copies):
        _note_copies(found, place, len(copies), some)
    return found


def _own_holding(core: PeerCore, digests: Sequence[bytes], now: float) -> HeldKeys:
    own, here = HeldKeys.of_none(len(digests)), core.segment.digests()
    own.in_memory[:] = [digest in here for digest in digests]
    own.held[:] = own.in_memory
    if core.cold.store is not None:
        cold = core.cold.held_only_here(set(digests) - here, now)
        own.held[:] |= np.array([digest in cold for digest in digests], np.bool_)
    return own


def _note_copies(
    found: dict[Member, HeldKeys], place: int, count: int, copies: Sequence[KnownCopy]
) -> None:
    for copy in copies:
        if copy.reachable:
            holding = found.setdefault(copy.member, HeldKeys.of_none(count))
            holding.held[place] = True
            holding.in_memory[place] = copy.record.tier is not Tier.SSD
            holding.size_units[place] = copy.record.size_units


def match(found: Mapping[Member, HeldKeys], count: int, pieces: int = 1) -> PrefixMatch:
    """The match of a chain of `count` keys with these holders. A block is `pieces` keys in a row, all of one member."""
    runs = []
    pooled = np.zeros(count // pieces, np.bool_)
    for member, holding in found.items():
        held = _whole(holding.held, pieces)
        pooled |= held
        blocks = _run_length(held)
        if blocks:
            in_memory = _whole(holding.in_memory, pieces)
            runs.append(PrefixRun(member, blocks, int(np.count_nonzero(in_memory[:blocks]))))
    runs.sort(key=lambda run: (-run.blocks, -run.memory_blocks, run.member))
    return PrefixMatch(_run_length(pooled), runs)


def _whole(keys: npt.NDArray[np.bool_], pieces: int) -> npt.NDArray[np.bool_]:
    """Whether all pieces of each block are there."""
    whole: npt.NDArray[np.bool_] = np.logical_and.reduce(keys.reshape(-1, pieces), axis=1)
    return keys if pieces == 1 else whole


def _run_length(blocks: npt.NDArray[np.bool_]) -> int:
    """The number of blocks before the first that is missing."""
    return int(blocks.argmin()) if not blocks.all() else len(blocks)
