"""Mooncake's error codes, enumerations and `ReplicateConfig`, and their meaning in this store. Pure."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from p2pstore import errors


class ErrorCode(IntEnum):
    """The codes that calls return instead of raising: 0 is success, all others are negative."""

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
    (errors.GpuCopyFailed, ErrorCode.TRANSFER_FAIL),
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
    return len({len(each) for each in lists}) <= 1


MAX_MILLISECONDS: Final = 2**64


class _Plain(IntEnum):
    """Shown as Mooncake's are: class and name."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class SoftPinAction(_Plain):
    """The effect of a put on an object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(_Plain):
    """The kind of an object, for statistics; it has no effect here."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(_Plain):
    """The state of a copy. Here copies that are listed are complete."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(_Plain):
    """The kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(_Plain):
    """How far a task is."""

    PENDING = 0
    PROCESSING = 1
    SUCCESS = 3
    FAILED = 2


def _count(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"not a count: {value!r}")
    number = operator.index(value)
    if number < 0:
        raise TypeError(f"a count is at least 0, not {number}")
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"True or False, not {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a str, not {value!r}")
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        raise TypeError("a list of str, not one str")
    return [_text(each) for each in value]


def _maybe_texts(value: Any) -> list[str] | None:
    return None if value is None else _texts(value)


def _maybe_milliseconds(value: Any) -> int | None:
    if value is None:
        return None
    number = _count(value)
    if number >= MAX_MILLISECONDS:
        raise TypeError(f"milliseconds below 2**64, not {number}")
    return number


_FIELDS: Final[dict[str, tuple[Any, Any]]] = {
    "replica_num": (1, _count),
    "nof_replica_num": (0, _count),
    "dfs_replica_num": (0, _count),
    "soft_pin_action": (SoftPinAction.PRESERVE, SoftPinAction),
    "soft_pin_ttl_ms": (None, _maybe_milliseconds),
    "with_hard_pin": (False, _flag),
    "preferred_segment": ("", _text),
    "preferred_segments": ([], _texts),
    "preferred_nof_segments": ([], _texts),
    "prefer_alloc_in_same_node": (False, _flag),
    "data_type": (ObjectDataType.UNKNOWN, ObjectDataType),
    "group_ids": (None, _maybe_texts),
}
"""Default, and what checks a value."""


P = ParamSpec("P")
Store = TypeVar("Store")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Store, P], Answer]


def put_and_upsert(
    method: Callable[Concatenate[Store, bool, P], Answer],
) -> tuple[Method[Store, P, Answer], Method[Store, P, Answer]]:
    """The calls `put...` and `upsert...` of a method `_put...`, whose first argument says whether to replace an object
    that exists. (`_pub...` gives `pub...` and `upsert_pub...`.)"""
    name = method.__name__.removeprefix("_")
    twin = name.replace("pub", "upsert_pub") if "pub" in name else name.replace("put", "upsert")
    return (
        _with_first(method, False, name, method.__doc__),
        _with_first(method, True, twin, f"`{name}` that replaces an object that exists."),
    )


def _with_first(
    method: Callable[Concatenate[Store, bool, P], Answer], first: bool, name: str, doc: str | None
) -> Method[Store, P, Answer]:
    def call(self: Store, /, *arguments: P.args, **named: P.kwargs) -> Answer:
        return method(self, first, *arguments, **named)

    signature = inspect.signature(method)
    (own, _, *rest) = signature.parameters.values()
    call.__name__, call.__doc__, call.__module__ = name, doc, method.__module__
    call.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{name}"
    call.__signature__ = signature.replace(parameters=[own, *rest])  # type: ignore[attr-defined]
    return call


class ReplicateConfig:
    """How a put is to keep its object: Mooncake's fields, checked when they are set (`TypeError`).

    `replica_num`: copies that the put waits for, as far as there are peers; a copy that is lost later is made again.
    `with_hard_pin`: never evicted. `soft_pin_action`: ENABLE has the object evicted last, for `soft_pin_ttl_ms` or half
    an hour. There is no master that places objects: a put goes to the memory of the writer's own peer (so
    `prefer_alloc_in_same_node` is always so), and copies to peers that the object's key chooses. The preferred
    segments, `nof_replica_num`, `dfs_replica_num`, `group_ids` and `data_type` change nothing; the log says so once.
    """

    __slots__ = tuple(_FIELDS)

    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    with_hard_pin: bool
    preferred_segment: str
    preferred_segments: list[str]
    preferred_nof_segments: list[str]
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType
    group_ids: list[str] | None

    def __init__(self) -> None:
        for name, (default, check) in _FIELDS.items():
            object.__setattr__(self, name, default if default is None else check(default))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise AttributeError(f"ReplicateConfig has no field {name!r}")
        try:
            object.__setattr__(self, name, _FIELDS[name][1](value))
        except (TypeError, ValueError) as error:
            raise TypeError(f"ReplicateConfig.{name}: {error}") from None

    def __str__(self) -> str:
        return f"ReplicateConfig({', '.join(f'{name}={getattr(self, name)}' for name in _FIELDS)})"

    __repr__ = __str__


DEFAULT_CONFIG: Final = ReplicateConfig()

_PLACED: Final = "a put goes to this machine's peer, and copies to peers that the key chooses"
_UNUSED: Final[dict[str, str]] = {
    "nof_replica_num": "there are no copies on NVMe-oF; peers with an SSD keep some there by themselves",
    "dfs_replica_num": "there are no copies in a file system; peers with an SSD keep some there by themselves",
    "preferred_segment": _PLACED,
    "preferred_segments": _PLACED,
    "preferred_nof_segments": _PLACED,
    "data_type": "all objects are kept alike",
    "group_ids": "each object is kept and evicted for itself, the later blocks of a batch before the earlier ones",
}
"""Fields that change nothing -> why."""


def unused_fields(config: ReplicateConfig) -> list[str]:
    """Messages about fields that were set and change nothing."""
    if config is DEFAULT_CONFIG:
        return []
    return [
        f"ReplicateConfig.{name} changes nothing: {why}"
        for name, why in _UNUSED.items()
        if getattr(config, name) != getattr(DEFAULT_CONFIG, name)
    ]


class ExistOptions:
    """Options of Mooncake 0.3.14's existence queries: the leases to extend. Fields
    of any name are taken, as here there are no leases to extend."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    @property
    def asked(self) -> bool:
        return any(self.__dict__.values())

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"ExistOptions({fields})"


def put_options(config: ReplicateConfig, *, same_node: bool = False) -> dict[str, Any]:
    """The options for `put`. Raises `ValueError` for fields that contradict each other, and for
    `prefer_alloc_in_same_node` where that is not allowed (`same_node`), `TypeError` for what is no config."""
    if config is DEFAULT_CONFIG:
        return {}
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    if config.replica_num == 0:
        raise ValueError("replica_num is 0: there is no store without a copy in memory")
    if config.soft_pin_ttl_ms is not None and config.soft_pin_action != SoftPinAction.ENABLE:
        raise ValueError("soft_pin_ttl_ms needs soft_pin_action ENABLE")
    if config.prefer_alloc_in_same_node and not same_node:
        raise ValueError("prefer_alloc_in_same_node is for calls with several buffers an object")
    options: dict[str, Any] = {"replicas": config.replica_num}
    if config.with_hard_pin:
        options["pin"] = "hard"
    elif config.soft_pin_action == SoftPinAction.ENABLE:
        options["pin"] = "soft"
    return options
