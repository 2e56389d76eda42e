"""Operations as they travel: what all records of a run have in common goes once. Pure.

Records of one run have their writer in common, most bytes of their clocks, slots and lengths, and often their flags.
The packed form is a mask of the bytes that all records share (6 bytes, little-endian, a bit a byte of a record), these
bytes, and then the others of each record. Fewer than `LEAST_PACKED` operations travel as they are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2pstore.errors import ProtocolError
from p2pstore.gossip.records import LOCATION_BYTES
from p2pstore.objects import MIB

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
