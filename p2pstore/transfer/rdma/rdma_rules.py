"""Rules of RDMA that need no device: addresses, sizes, room, and the meaning of failures. Pure.

The numbers of `WorkStatus` and `GidKind` are those of libibverbs (ibv_wc_status, ibv_gid_type), which never
change.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Final

from p2pstore.errors import ProtocolError

NAME: Final = "rdma"
"""The transport's name, in records and for people."""
GID_BYTES: Final = 16
MAX_QUEUE_PAIR_NUMBER: Final = (1 << 24) - 1
MAX_PACKET_NUMBER: Final = (1 << 24) - 1
PATH_MTU_BYTES: Final = (256, 512, 1024, 2048, 4096)
MAX_OUTSTANDING_READS: Final = 16
"""Reads that the two devices have under way at once between two queue pairs."""
TAKEN_IN_BYTES_PER_SECOND: Final = 1e10
"""Rate at which one core sums and copies, about (10.8 GB/s measured on an AMD EPYC)."""
PARTED_AT_BYTES: Final = 4096
RETRY_COUNT: Final = 6
"""Times that a device sends again before it gives up. Never 7: soft-RoCE takes it for "for ever"."""
RECEIVER_RETRY_COUNT: Final = 7
RETRY_TIMEOUT_EXPONENT: Final = 14
"""A packet counts as lost after 4.096 us x 2^14: 67 ms."""


# --- addresses -------------------------------------------------------------------------------


class GidKind(IntEnum):
    """How packets to a GID travel: InfiniBand, or RoCE over Ethernet or over UDP."""

    INFINIBAND = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


@dataclass(frozen=True, slots=True)
class GidEntry:
    """A row of a port's table of addresses. `kind` may be a number that `GidKind` does not know."""

    index: int
    gid: bytes
    kind: int


def choose_gid(entries: Iterable[GidEntry]) -> GidEntry | None:
    """The address to use: RoCE v2 over IPv4, else over a global IPv6 address; the first of each.

    None when there is neither: link-local addresses are routed nowhere, RoCE v1 not beyond a switch, and
    InfiniBand needs more than a GID to find its way.
    """
    usable: list[tuple[bool, int, GidEntry]] = []
    for entry in entries:
        address = ipaddress.IPv6Address(entry.gid)
        if entry.kind == GidKind.ROCE_V2 and not address.is_unspecified and not address.is_link_local:
            usable.append((address.ipv4_mapped is None, entry.index, entry))
    return min(usable, key=lambda each: each[:2])[2] if usable else None


def same_network(own: bytes, network_bits: int | None, other: bytes) -> bool:
    """Whether another machine's GID is in the network of an own one, whose leading bits name it."""
    if network_bits is None or len(other) != GID_BYTES:
        return False
    differing = int.from_bytes(own, "big") ^ int.from_bytes(other, "big")
    return differing >> (8 * GID_BYTES - network_bits) == 0


@dataclass(frozen=True, slots=True)
class ServingDevice:
    """The facts by which a device is chosen to be read through. `readers`: lines of the same reader that it has."""

    active: bool
    same_network: bool
    preferred: bool
    readers: int


def choose_serving(devices: Sequence[ServingDevice]) -> int | None:
    """The number of the device that a reader's line goes to: in the network of the reader's own, where there is one,
    for others may not be reached; then near the memory; then the one with the fewest of the reader's lines. None when
    all are down."""
    usable = [number for number, device in enumerate(devices) if device.active]

    def rank(number: int) -> tuple[bool, bool, int, int]:
        device = devices[number]
        return not device.same_network, not device.preferred, device.readers, number

    return min(usable, key=rank, default=None)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a connection, as the other end has to know it. `reads` is how many reads it takes at once."""

    queue_pair: int
    packet_number: int
    gid: bytes
    path_mtu_bytes: int
    reads: int


@dataclass(frozen=True, slots=True)
class Path:
    """Parameters of both ends."""

    mtu_bytes: int
    reads: int


def agree(own: Endpoint, other: Endpoint) -> Path:
    """The largest packets and the most reads that both ends take. Raises `ProtocolError` when what the other
    one says cannot be."""
    address = len(other.gid) == GID_BYTES and any(other.gid)
    if (
        not address
        or not 0 < other.queue_pair <= MAX_QUEUE_PAIR_NUMBER
        or not 0 <= other.packet_number <= MAX_PACKET_NUMBER
        or other.path_mtu_bytes not in PATH_MTU_BYTES
        or other.reads < 1
    ):
        raise ProtocolError("the other peer describes an RDMA queue pair that cannot be")
    return Path(
        min(own.path_mtu_bytes, other.path_mtu_bytes), min(own.reads, other.reads, MAX_OUTSTANDING_READS)
    )


# --- sizes and room --------------------------------------------------------------------------


def split_read(length_bytes: int, max_message_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each work request of a read, in order."""
    if max_message_bytes < 1:
        raise ValueError("a device that takes no bytes in a message can read nothing")
    for start in range(0, length_bytes, max_message_bytes):
        yield start, min(max_message_bytes, length_bytes - start)


def first_of_two(length_bytes: int, link_bytes_per_second: float) -> int:
    """Where to part a payload that comes in two reads, each of which is summed and copied on when it is there: so that
    the first is done with when the second comes. With more in the first, the core would begin too late; with less,
    more is left to do when all has come. In the middle for a link of unknown rate (0)."""
    if not link_bytes_per_second:
        return length_bytes // 2
    share = TAKEN_IN_BYTES_PER_SECOND / (TAKEN_IN_BYTES_PER_SECOND + link_bytes_per_second)
    return max(1, int(length_bytes * share) // PARTED_AT_BYTES) * PARTED_AT_BYTES


class WorkRoom:
    """Counts work requests under way, for a queue that must never hold more than it has room for.

    A completion queue that overflows loses completions without a word on some devices. Every request
    takes one place from before it is posted until its completion was seen, or cannot come any more.
    """

    def __init__(self, places: int) -> None:
        if places < 1:
            raise ValueError("a queue needs room for at least one request")
        self.places = places
        self.taken = 0

    @property
    def left(self) -> int:
        """Places that are free."""
        return self.places - self.taken

    def take(self, requests: int = 1) -> bool:
        """Take a place for each request, or none; whether there were enough."""
        if self.taken + requests > self.places:
            return False
        self.taken += requests
        return True

    def give_back(self) -> None:
        """A place is free again."""
        if not self.taken:
            raise AssertionError("more completions than requests")
        self.taken -= 1


# --- failures --------------------------------------------------------------------------------


class WorkStatus(IntEnum):
    """How a work request ended."""

    SUCCESS = 0
    LOCAL_LENGTH = 1
    LOCAL_OPERATION = 2
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    BAD_RESPONSE = 7
    LOCAL_ACCESS = 8
    REMOTE_INVALID_REQUEST = 9
    REMOTE_ACCESS = 10
    REMOTE_OPERATION = 11
    RETRIES_EXCEEDED = 12
    RECEIVER_RETRIES_EXCEEDED = 13
    REMOTE_ABORTED = 16
    FATAL = 19
    RESPONSE_TIMEOUT = 20
    GENERAL = 21


class Meaning(Enum):
    """The meaning of a work request's status for the reader."""

    DONE = auto()
    FLUSHED = auto()
    """An earlier request of the same queue pair failed, and tells why."""
    STALE = auto()
    """The holder does not let this memory be read (any more): its segment is another one by now."""
    GONE = auto()
    """The holder does not answer: connect anew, or take another transport."""
    BROKEN = auto()
    """This side's device or its use is at fault: take another transport."""


_MEANING: Final[dict[int, Meaning]] = {
    WorkStatus.SUCCESS: Meaning.DONE,
    WorkStatus.FLUSHED: Meaning.FLUSHED,
    WorkStatus.REMOTE_ACCESS: Meaning.STALE,
    WorkStatus.REMOTE_INVALID_REQUEST: Meaning.STALE,
    WorkStatus.REMOTE_OPERATION: Meaning.STALE,
    WorkStatus.RETRIES_EXCEEDED: Meaning.GONE,
    WorkStatus.RECEIVER_RETRIES_EXCEEDED: Meaning.GONE,
    WorkStatus.REMOTE_ABORTED: Meaning.GONE,
    WorkStatus.RESPONSE_TIMEOUT: Meaning.GONE,
}


def meaning_of(status: int) -> Meaning:
    """Meaning of a completion's status; an unknown one is a fault of this side. After all but DONE the queue
    pair is of no use any more."""
    return _MEANING.get(status, Meaning.BROKEN)


def describe_status(status: int) -> str:
    """For people."""
    if status in WorkStatus._value2member_map_:
        return WorkStatus(status).name.lower().replace("_", " ")
    return f"status {status}"


# --- where things are ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory of another peer that may be read: `address` there, and the key that its device asks for."""

    address: int
    length_bytes: int
    key: int

    def at(self, offset: int, length_bytes: int) -> int:
        """The address of a part. Raises `ProtocolError` for one that is not inside."""
        if offset < 0 or length_bytes < 0 or offset + length_bytes > self.length_bytes:
            raise ProtocolError("an object's slot points outside of its owner's segment")
        return self.address + offset
