"""Where a value goes that this peer has no room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from p2pstore.errors import CapacityExceeded
from p2pstore.gossip.gossip_messages import Status
from p2pstore.gossip.records import PeerId
from p2pstore.objects import format_bytes
from p2pstore.transfer.data_messages import STORE_VERSION

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_TARGETS: Final = 8
MAX_HOLDERS: Final = 3


@dataclass(frozen=True, slots=True)
class Room:
    """What a live peer offers, as gossip has it. `doubtful`: suspected, or a connection failed just now."""

    peer_id: PeerId
    capacity_bytes: int
    free_bytes: int
    same_host: bool = False
    doubtful: bool = False
    takes_values: bool = True


def choose_rooms(rooms: Sequence[Room], length: int, count: int, rng: Random) -> list[Room]:
    """Up to `count` rooms that could hold a value of `length` bytes, in the order to ask them.

    Those that are doubtful come last; before that, those that must evict; this host before others, as its
    network is free. Among equals, again and again the emptier of two chosen at random comes next:
    what gossip says of free room is a little old, and not everybody shall run to the emptiest.
    """
    fitting = [room for room in rooms if room.takes_values and room.capacity_bytes >= length]
    chosen: list[Room] = []
    for group in _grouped(fitting, length):
        while group and len(chosen) < count:
            pair = rng.sample(range(len(group)), min(2, len(group)))
            chosen.append(group.pop(max(pair, key=lambda index: group[index].free_bytes)))
    return chosen


def _grouped(rooms: Sequence[Room], length: int) -> list[list[Room]]:
    groups: dict[tuple[bool, bool, bool], list[Room]] = {}
    for room in rooms:
        rank = room.doubtful, room.free_bytes < length, not room.same_host
        groups.setdefault(rank, []).append(room)
    return [groups[rank] for rank in sorted(groups)]


def place(
    core: PeerCore,
    digest: bytes,
    length: int,
    host_id: bytes,
    now: float,
) -> list[PeerId]:
    """Peers to put a value on that this one has no room for, best first.

    Holders of the key come first, this peer among them: they know best whether the value is new, and
    nothing needs to move when it is not. Raises `CapacityExceeded`, naming the largest room there is, when
    no peer could hold the value.
    """
    rooms = _rooms(core, host_id, now)
    holders = [
        copy.peer_id
        for copy in core.copies.known(digest, now)
        if copy.reachable and (copy.local or _takes_values(rooms, copy.peer_id))
    ]
    others = [room.peer_id for room in choose_rooms(rooms, length, MAX_TARGETS, core.rng)]
    targets = list(dict.fromkeys(holders[:MAX_HOLDERS] + others))
    if not targets:
        raise CapacityExceeded(_no_room(core, rooms, length))
    return targets[:MAX_TARGETS]


def _takes_values(rooms: Sequence[Room], peer_id: PeerId) -> bool:
    return any(room.peer_id == peer_id and room.takes_values for room in rooms)


def _rooms(core: PeerCore, host_id: bytes, now: float) -> list[Room]:
    return [
        Room(
            state.peer_id,
            record.memory_capacity,
            record.memory_capacity - record.memory_used,
            same_host=record.host_id == host_id,
            doubtful=state.status != Status.ALIVE or core.holders.is_avoided(state.member, now),
            takes_values=record.max_protocol >= STORE_VERSION,
        )
        for state in core.gossip.membership.others()
        if (record := state.record) is not None
    ]


def _no_room(core: PeerCore, rooms: Sequence[Room], length: int) -> str:
    taking = [room for room in rooms if room.takes_values and room.capacity_bytes]
    if not taking:
        return "no other live peer takes values: start one with more --memory"
    largest = max(taking, key=lambda room: room.capacity_bytes)
    size, name = format_bytes(largest.capacity_bytes), core.name_of(largest.peer_id)
    return (
        f"no live peer can hold {format_bytes(length)}: the largest memory that another offers is "
        f"{size}, on {name}. Split the value over several keys, or give a peer more --memory"
    )
