"""Why an object cannot be had from the tier. Pure."""

from __future__ import annotations

from enum import Enum

from p2pstore.errors import P2PStoreError


class Miss(Enum):
    """See `ColdMiss`."""

    ABSENT = "absent"
    EXPIRED = "expired"
    DAMAGED = "damaged"
    """What the disk gave is not what was written; the object was dropped."""
    READ_ERROR = "read_error"
    """The disk gave nothing, twice; the object was dropped."""
    SILENT = "silent"
    """The disk does not answer just now. It may again, and the object is still there."""
    OFF = "off"
    """The tier is off: the disk failed too often."""


class ColdMiss(P2PStoreError):
    """The tier does not have the object, or has it no longer; `reason` says why. Ask another peer."""

    def __init__(self, reason: Miss, message: str) -> None:
        super().__init__(message)
        self.reason = reason
