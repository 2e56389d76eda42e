"""Runs of operations that their owner signed: only those count of another peer's log. Pure.

A relay passes runs on whole, with their signatures, so no member can speak for the log of another. A signature costs
64 bytes and a check of 0.07 ms at every reader. The owner signs what it wrote since its last signature when it is
about to tell of it: a lone operation at once, and many of them together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import LOCATION_BYTES, PeerId, Signer, Verifier
from p2pstore.objects import MIB

SIGNATURE_BYTES: Final = 64
MAX_SIGNED_OPERATIONS: Final = 1_800
"""In one run. Two of them are as much work as one delta brings, and fit into it."""
SIGNED_AT_ONCE: Final = 4
"""Runs that are signed in one step, at 0.05 to 0.2 ms each."""
RUNS_PER_SECOND: Final = 150.0
"""Of all owners together, about: 1 % of a core for their readers."""
LEAST_SECONDS: Final = 0.05
LEAST_SECONDS_UNDER_LOAD: Final = 0.4
"""Shortest time between two signatures of one owner. Under load the bytes of signatures are to stay few beside those of
operations."""
MOST_SECONDS: Final = 2.0
"""Owners wait no longer than that, however many there are."""

_CONTEXT: Final = b"p2pstore log run 1\0"
_PLACE: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class SignedRun:
    """Packed operations of one log, contiguous from `first_sequence`, and their owner's signature."""

    first_sequence: int
    operations: bytes
    signature: bytes

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.operations) // LOCATION_BYTES - 1


def sign_run(signer: Signer, incarnation: int, first_sequence: int, operations: bytes) -> bytes:
    """The owner's signature of operations at this place of its log."""
    return signer.sign(_message(incarnation, first_sequence, operations))


def is_signed(verifier: Verifier, owner: PeerId, incarnation: int, run: SignedRun) -> bool:
    """Whether the owner signed the run, at that place of that log."""
    message = _message(incarnation, run.first_sequence, run.operations)
    return verifier.verify(owner, message, run.signature)


def _message(incarnation: int, first_sequence: int, operations: bytes) -> bytes:
    return _CONTEXT + _PLACE.pack(incarnation, first_sequence) + operations


class SigningPace:
    """When an owner may sign a run again."""

    def __init__(self, is_loaded: Callable[[], bool], writers: Callable[[], int]) -> None:
        """`writers`: about how many owners write just now, this one included."""
        self._is_loaded = is_loaded
        self._writers = writers
        self._signed_at = -math.inf

    def may_sign(self, now: float) -> bool:
        """Whether it is time; then say that it was done with `signed`."""
        return now >= self._signed_at + self._interval_seconds()

    def signed(self, now: float) -> None:
        self._signed_at = now

    def _interval_seconds(self) -> float:
        least = LEAST_SECONDS_UNDER_LOAD if self._is_loaded() else LEAST_SECONDS
        return min(MOST_SECONDS, max(least, self._writers() / RUNS_PER_SECOND))


LEAST_PACKED: Final = 3
MAX_OPERATION_BYTES: Final = 4 * MIB
"""Of all that one message brings, unpacked."""
MASK_BYTES: Final = (LOCATION_BYTES + 7) // 8
_NO_BITS: Final = -1 << LOCATION_BYTES


def pack_operations(operations: bytes) -> bytes:
    """The packed form of a run of whole records."""
    count = len(operations) // LOCATION_BYTES
    if count < LEAST_PACKED:
        return operations
    rows = np.frombuffer(operations, np.uint8).reshape(count, LOCATION_BYTES)
    shared: NDArray[np.bool_] = (rows == rows[0]).all(axis=0)
    mask = np.packbits(shared, bitorder="little").tobytes()
    return b"".join((mask, rows[0][shared].tobytes(), rows[:, ~shared].tobytes()))


def unpack_operations(packed: bytes, start: int, count: int) -> tuple[bytes, int]:
    """The operations of a run of `count` whose packed form begins at `start`, and where that ends. Raises
    `ProtocolError` when it is cut short, or no such form."""
    if count < LEAST_PACKED:
        end = start + count * LOCATION_BYTES
        return _whole(packed, start, end), end
    begin = start + MASK_BYTES
    bits = int.from_bytes(_whole(packed, start, begin), "little")
    if bits & _NO_BITS:
        raise ProtocolError("a mask of more bytes than a location record has")
    shared = np.unpackbits(
        np.frombuffer(packed, np.uint8, MASK_BYTES, start), count=LOCATION_BYTES, bitorder="little"
    ).astype(np.bool_)
    in_common = bits.bit_count()
    middle = begin + in_common
    end = middle + (LOCATION_BYTES - in_common) * count
    rest: NDArray[Any] = np.frombuffer(_whole(packed, begin, end), np.uint8)
    rows = np.empty((count, LOCATION_BYTES), np.uint8)
    rows[:, shared] = rest[:in_common]
    rows[:, ~shared] = rest[in_common:].reshape(count, -1)
    return rows.tobytes(), end


def _whole(packed: bytes, start: int, end: int) -> bytes:
    if end > len(packed):
        raise ProtocolError("packed operations that are cut short")
    return packed[start:end]
