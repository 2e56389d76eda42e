"""A record as a row of 80 bytes: in footers on the disk, and with what it needs at run time in the index. Pure."""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from p2pstore.objects import PART_BYTES
from p2pstore.ssd_tier.log_layout import PAGE_BYTES

Rows = npt.NDArray[Any]
"""Rows of ROW."""

ROW: Final = np.dtype(
    [
        ("digest", "<u8", (2,)),
        ("clock", "<u8"),
        ("root", "<u8"),
        ("length", "<u8"),  # of the object
        ("sequence", "<u8"),
        ("expires_unix_ms", "<u8"),
        ("page", "<u4"),
        ("stored_bytes", "<u4"),
        ("key_offset", "<u4"),  # in the text of its segment
        ("writer", "<u2"),
        ("number", "<u2"),
        ("key_bytes", "<u2"),
        ("replicas", "<u2"),
        ("namespace", "<u2"),  # in a footer: which of its namespaces; in the index: see there
        ("part", "u1"),
        ("flags", "u1"),  # bits 0-1 pin, 2 soft, 3 described
    ]
)
ROW_BYTES: Final = ROW.itemsize
ROW_STRUCT: Final = struct.Struct("<16s5QIIIHHHHHBB")
assert ROW_STRUCT.size == ROW_BYTES == 80

FLAG_PIN: Final = 3
FLAG_SOFT: Final = 4
FLAG_DESCRIBED: Final = 8
"""The object has a dtype and a shape. Records of older versions never say so."""
MAX_REPLICAS: Final = 0xFFFF


def flags_of(pin: int, soft: bool, *, described: bool) -> int:
    """The flags of a row; a pin that is not known counts as hard."""
    return min(pin, 2) | (FLAG_SOFT if soft else 0) | (FLAG_DESCRIBED if described else 0)


def disk_bytes(rows: Rows) -> npt.NDArray[np.int64]:
    """What each record occupies on the disk, with its header page."""
    stored = rows["stored_bytes"].astype(np.int64)
    return (stored + (2 * PAGE_BYTES - 1)) // PAGE_BYTES * PAGE_BYTES


def parts_of(rows: Rows) -> npt.NDArray[np.int64]:
    """How many records each row's object has."""
    length = rows["length"].astype(np.int64)
    return np.maximum((length + PART_BYTES - 1) // PART_BYTES, 1)
