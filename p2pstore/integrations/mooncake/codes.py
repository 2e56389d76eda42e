"""Mooncake's error codes, and which of them an error of this package is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from p2pstore import errors


class ErrorCode(IntEnum):
    """What a call returns instead of raising: 0 is success, all others are negative."""

    OK = 0
    INTERNAL_ERROR = -1
    BUFFER_OVERFLOW = -10
    SHARD_INDEX_OUT_OF_RANGE = -100
    SEGMENT_NOT_FOUND = -101
    SEGMENT_ALREADY_EXISTS = -102
    CLIENT_NOT_FOUND = -103
    NO_AVAILABLE_HANDLE = -200
    INVALID_VERSION = -300
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_WRITE = -700
    INVALID_READ = -701
    INVALID_REPLICA = -702
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    OBJECT_HAS_REPLICATION_TASK = -708
    OBJECT_NO_REPLICATION_TASK = -709
    REPLICA_NOT_FOUND = -710
    REPLICA_ALREADY_EXISTS = -711
    REPLICA_IS_GONE = -712
    REPLICA_NOT_IN_LOCAL_MEMORY = -713
    OBJECT_REPLICA_BUSY = -714
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    FILE_NOT_FOUND = -1100
    TASK_NOT_FOUND = -1400
    TASK_PENDING_LIMIT_EXCEEDED = -1401


_CODES: Final[Sequence[tuple[type[Exception], ErrorCode]]] = (
    (errors.NoSuchKey, ErrorCode.OBJECT_NOT_FOUND),
    (errors.KeyExists, ErrorCode.OBJECT_ALREADY_EXISTS),
    (errors.Unavailable, ErrorCode.TRANSFER_FAIL),
    (errors.DeadlineExceeded, ErrorCode.RPC_TIMEOUT),
    (errors.BufferTooSmall, ErrorCode.INVALID_PARAMS),
    (errors.ObjectTooLarge, ErrorCode.INVALID_PARAMS),
    (errors.CapacityExceeded, ErrorCode.NO_AVAILABLE_HANDLE),
    (errors.LeaseLimitExceeded, ErrorCode.NO_AVAILABLE_HANDLE),
    (errors.StoreClosed, ErrorCode.RPC_FAIL),
    (errors.NoLocalPeer, ErrorCode.RPC_FAIL),
    (errors.ClientForked, ErrorCode.ILLEGAL_CLIENT),
    (errors.ConfigError, ErrorCode.INVALID_PARAMS),
    (ValueError, ErrorCode.INVALID_PARAMS),
)


def code_of(error: Exception) -> int:
    """The code for an error. Raises `TypeError` again: Mooncake's methods raise it for arguments of a wrong type."""
    if isinstance(error, TypeError):
        raise error
    for kind, code in _CODES:
        if isinstance(error, kind):
            return int(code)
    return int(ErrorCode.INTERNAL_ERROR)


def alike(*lists: Any) -> bool:
    """Whether these lists have one length."""
    return len({len(each) for each in lists}) <= 1
