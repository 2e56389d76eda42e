"""The results of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, get_args

from p2pstore.errors import P2PStoreError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

PutStatusName = Literal["created", "unchanged", "kept_existing"]
PinName = Literal["none", "soft", "hard"]
OnConflict = Literal["keep", "overwrite", "error"]
"""The action of a put for a key that exists with other bytes."""
Framework = Literal["numpy", "torch"]
"""Which library a tensor comes back in."""
Buffer = Any
"""Anything with the buffer protocol (contiguous), a dense torch tensor on the CPU or a GPU, or a `RegisteredBuffer`."""


@dataclass(frozen=True, slots=True)
class Location:
    """One known copy of an object. `tier` is `dram`, `ssd` or `both`; `reachable` whether its peer is
    believed alive; `size_hint` the length rounded up to 4 KiB."""

    peer_id: str
    peer: str
    tier: str
    size_hint: int
    version: tuple[int, int]
    soft: bool
    pin: PinName
    local: bool
    reachable: bool


@dataclass(slots=True, unsafe_hash=True)  # frozen, it takes three times as long to make
class PutResult:
    """The result of a put. A key that exists with other bytes is kept by default: `status` is then `kept_existing`, and
    nothing of the put was stored or applied.

    `status` is `created` for a new object, and `unchanged` where the key had these bytes: the put's pin and replicas
    were applied where they ask for more, and its `ttl`, where it gave one, replaced the object's.
    `copies` are known to exist now, `wanted` were asked for; fewer copies than wanted are repaired later.
    `location` is the peer that holds the first copy; `version` is (hybrid clock, writer hash).
    """

    key: str
    status: PutStatusName
    copies: int
    wanted: int
    location: str
    version: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """How much of a chain of blocks one peer has: the first `blocks` of them without a gap, `memory_blocks` of these in
    its memory, the others on its SSD. `local`: the local peer."""

    peer_id: str
    peer: str
    blocks: int
    memory_blocks: int
    local: bool


SourceKind = Literal["memory", "neighbour", "remote", "ssd"]
"""Of the local peer, of another one on this host, of one elsewhere; an SSD of any peer."""
SOURCE_KINDS: Final[tuple[SourceKind, ...]] = get_args(SourceKind)
"""In the order in which reads prefer them."""


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Objects that are expected to come from one holder: median of the seconds, and `spread`, the standard deviation of
    their logarithm."""

    peer_id: str
    peer: str
    kind: SourceKind
    blocks: int
    bytes: int
    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class FetchEstimate:
    """Expected time to bring objects here in one batch: median of the seconds, and `spread`, the standard deviation of
    their logarithm. `blocks` were found; `by_key` names the place in `sources` for each key, -1 where no peer has
    it."""

    seconds: float
    spread: float
    bytes: int
    blocks: int
    sources: list[FetchSource]
    by_key: list[int]

    @property
    def p90_seconds(self) -> float:
        """Nine of ten fetches take no longer."""
        return self.seconds * math.exp(P90 * self.spread)

    @staticmethod
    def of(sources: list[FetchSource], by_key: list[int]) -> FetchEstimate:
        """The sum of these sources: they are read at once, and share this host's link."""
        seconds, spread = total_time([(each.seconds, each.spread) for each in sources])
        length_bytes = sum(each.bytes for each in sources)
        blocks = sum(each.blocks for each in sources)
        return FetchEstimate(seconds, spread, length_bytes, blocks, sources, by_key)


P90: Final = 1.2816
"""Of a normal distribution, in standard deviations."""


def total_time(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Sum of independent times with a spread each."""
    seconds = sum(each for each, _ in times)
    deviation = math.sqrt(sum((each * spread) ** 2 for each, spread in times))
    return seconds, deviation / seconds if seconds else 0.0


class ItemResult(NamedTuple, Generic[T_co]):
    """One item of a batch: `value` when it worked, `error` when it did not (and then no value)."""

    key: str
    value: T_co | None = None
    error: P2PStoreError | ValueError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> T_co:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        value: T_co = self.value  # type: ignore[assignment] # there is one where there is no error
        return value


TransferOperation = Literal["get", "put"]
TransferState = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, eq=False)
class TransferRequest:
    """One transfer of a batch: the value of `key` into `buffer`, or with `operation="put"` what is in `buffer` under
    `key`. `wait` (seconds) is for gets, `replicas`, `overwrite` and `on_conflict` for puts, as in `get_into` and
    `put`: a key that exists with other bytes is kept by default. The buffer is the batch's until the transfer has
    ended."""

    key: str
    buffer: Buffer = field(repr=False)
    operation: TransferOperation = "get"
    wait: float = field(default=0.0, kw_only=True)
    replicas: int = field(default=1, kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)
    on_conflict: OnConflict | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """How a transfer fares. `moved_bytes` grows while it runs, from 4 MiB of buffer on; else it is told at the end.
    `error` says why it failed, or that it was cancelled (`TransferCancelled`)."""

    key: str
    state: TransferState
    moved_bytes: int
    error: P2PStoreError | ValueError | None = None


@dataclass(frozen=True, slots=True)
class PinResult:
    """The result of `pin` or `unpin`: `copies` have that pin now, of `known` that there are."""

    key: str
    pin: PinName
    copies: int
    known: int


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One key of `list_keys`: `copies` among the peers that answered, `peers` their names."""

    key: str
    length: int
    copies: int
    peers: list[str]
    pin: PinName
    soft: bool
    expires_unix: float | None


@dataclass(frozen=True, slots=True)
class KeyPage:
    """A page of keys in order. `more`: ask again with `after` the last key. `silent_peers` did not answer."""

    keys: list[ListedKey]
    more: bool
    silent_peers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A member of the cluster as this peer sees it. `status`: alive, suspect, dead or left."""

    peer_id: str
    name: str
    status: str
    incarnation: int
    control: list[str]
    data: list[str]
    memory_capacity: int
    memory_used: int
    objects: int
    me: bool
    software: str
    heard_seconds_ago: float
    round_trip_seconds: float | None = None
    """Of a ping; None where none was answered yet."""
    transports: dict[str, dict[str, int]] = field(default_factory=dict)
    """Reads of this peer and its clients from it, by transport: objects, bytes, failures; and for objects read one by
    one P50 (`median_microseconds`) and P99 (`p99_microseconds`), powers of two; 0 without any."""
    directory: str = ""
    """How much it knows of where objects are: `full` or `partitioned`."""
    load: float = 0.0
    """Its share of a core, or of its upload slots in use, whichever is more, as reported some seconds
    ago. From 1 on, further requests are late, or sent elsewhere."""
    leaving: bool = False
    """It hands over what only it has, and takes nothing new."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """How far a publish or fetch is. `phase`: waiting, hashing, seeding, checking, fetching, finishing, done. `members`
    are the peers with whom pieces are exchanged."""

    phase: str
    done_bytes: int
    total_bytes: int
    members: int


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A version that others can fetch now: 32 hexadecimal digits."""

    version: str
    files: int
    total_bytes: int
    pieces: int
    piece_bytes: int
    notes: tuple[str, ...] = ()
    """Remarks about files: left out, broken, patterns that match none."""


@dataclass(frozen=True, slots=True)
class FetchedCheckpoint:
    """A version that is in `directory`: `whole`, or the files of it that were asked for. Of `total_bytes`,
    `fetched_bytes` came over the network; the others were there, on this host, or in equal files. `unmatched`: patterns
    that match no file of it."""

    version: str
    directory: str
    total_bytes: int
    fetched_bytes: int
    whole: bool = True
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FollowedCheckpoint:
    """How a follow is. `stage`: waiting, fetching, verified (it will be used when the publisher says so), current,
    failed (`why`; it is tried again). `version` is the one to be used next, or in use, `current` the one in use: 32
    hexadecimal digits, or nothing. `publisher` is a peer id, empty while the name is not published."""

    stage: str
    version: str
    current: str
    done_bytes: int
    total_bytes: int
    publisher: str
    publisher_name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFollower:
    """A follower that an update waits for. `stage`: waiting, fetching, verified, failed (`why`). `dead`: nothing is
    heard of its peer any more."""

    peer_id: str
    name: str
    stage: str
    done: float
    why: str = ""
    dead: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointUpdate:
    """How an update is: of all `followers`, `ready` have the version and `using` use it. `laggards` are those
    that are waited for: that do not have it, or, once it is `switched`, do not use it yet."""

    version: str
    switched: bool
    followers: int
    ready: int
    using: int
    laggards: tuple[CheckpointFollower, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointMember:
    """The state of a name at a peer. `state`: following (it waits), fetching, verified, seeding, publishing, failed
    (`why`). `version` and `current` (what a follower uses) are the first 16 hexadecimal digits, or nothing. It `needs`
    a share of the version, most often all of it: 1; `done` is a share of that. `bytes_per_second` is what it fetched at
    so far, 0 where that is not known yet."""

    peer_id: str
    name: str
    state: str
    version: str
    done: float
    follows: bool
    current: str
    why: str
    bytes_per_second: int
    me: bool
    needs: float = 1.0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A published name. `switched` is the version that followers are to use, empty when none was named.
    `trusted`: this peer takes the name from this publisher; `mine`: it is the publisher; `alive`: the publisher is.
    `published` is in seconds since 1970."""

    namespace: str
    name: str
    publisher: str
    publisher_name: str
    version: str
    published: float
    total_bytes: int
    files: int
    pieces: int
    previous: str
    switched: str
    trusted: bool
    mine: bool
    alive: bool
    members: tuple[CheckpointMember, ...] = ()
