"""How much of a chain of blocks the peers have: together, and each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from p2pstore.core.core_effects import KnownCopy
from p2pstore.core.gets.key_pages import believed_clocks
from p2pstore.gossip.locations.location_lookups import Holding
from p2pstore.gossip.records import Member, Tier
from p2pstore.objects import ZERO_VERSION

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """A member has the first `blocks` of a chain without a gap, `memory_blocks` of these in its memory."""

    member: Member
    blocks: int
    memory_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`matched` blocks, from the first one on, have a holder each. `runs`: of the members that have the first one, the
    longest run first."""

    matched: int
    runs: list[PrefixRun]


def holdings_here(
    core: PeerCore, digests: Sequence[bytes], now: float, namespace: bytes
) -> dict[Member, Holding] | None:
    """Holders of keys whose locations this peer knows all, at a microsecond or so a key. None: ask homes
    (`LookupOperation`), and use `holdings_of`."""
    found = core.gossip.locations.holdings(digests, believed_clocks(core, now, namespace))
    if found is None:
        return None
    floors = core.gossip.cluster_records.floors
    found[core.member] = _own_holding(core, digests, now)
    for place, digest in enumerate(digests) if floors.count else ():
        if floors.floor_for(digest) is not ZERO_VERSION:  # few: their versions decide
            for holding in found.values():
                holding.held[place] = holding.in_memory[place] = False
            _note_copies(found, place, len(digests), core.copies.known(digest, now, namespace))
    return found


def holdings_of(copies: Sequence[Sequence[KnownCopy]]) -> dict[Member, Holding]:
    """Holders of keys with these copies each."""
    found: dict[Member, Holding] = {}
    for place, some in enumerate(copies):
        _note_copies(found, place, len(copies), some)
    return found


def _own_holding(core: PeerCore, digests: Sequence[bytes], now: float) -> Holding:
    own, here = Holding.of_none(len(digests)), core.segment.digests()
    own.in_memory[:] = [digest in here for digest in digests]
    own.held[:] = own.in_memory
    if core.cold.store is not None:
        cold = core.cold.held_only_here(set(digests) - here, now)
        own.held[:] |= np.array([digest in cold for digest in digests], np.bool_)
    return own


def _note_copies(
    found: dict[Member, Holding], place: int, count: int, copies: Sequence[KnownCopy]
) -> None:
    for copy in copies:
        if copy.reachable:
            holding = found.setdefault(copy.member, Holding.of_none(count))
            holding.held[place] = True
            holding.in_memory[place] = copy.record.tier is not Tier.SSD
            holding.size_units[place] = copy.record.size_units


def match(found: Mapping[Member, Holding], count: int, pieces: int = 1) -> PrefixMatch:
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
