"""Messages on the local socket, between a client and the peer of its host; `local_protocol` has their kinds. Pure."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from p2pstore.put_facts import KeyEntry, PutOptions
from p2pstore.wire import Message

MAX_BATCH: Final = 16_384
"""Items of one request. Of lists it is checked before anything is done per element."""
MANY: Final = Meta(max_length=MAX_BATCH)


class ItemError(Message, frozen=True):
    """Why one item of a batch failed. `code` 0 means it did not."""

    code: int = 0
    text: str = ""
    detail: int = 0


OK = ItemError()

Rooms = Annotated[list[tuple[int, int, int]], MANY]
"""Rooms for values, in runs of alike ones: length, trailer length (an upper bound), how many."""


class Reserve(Message, frozen=True):
    """`namespace` is that of the values; a client may not say it, and gets no room that is kept for one."""

    rooms: Rooms
    namespace: str = ""


class Span(Message, frozen=True):
    """Rooms for `count` values one after the other: reservations `first`, `first` + 1 and so on, for `length` bytes
    each at the `offsets` (packed u64) of the segment; or why there are none. A reservation ends with COMMIT, ABORT or
    the connection."""

    count: int
    first: int = 0
    length: int = 0
    offsets: bytes = b""
    error: ItemError = OK


class Reserved(Message, frozen=True):
    spans: list[Span]


class Commit(Message, frozen=True):
    """Values that were written, in columns: `reservations` in runs (the first number, how many), `lengths` and
    `options` one for all or one each, `sums` of all chunks (packed u64). `follows` is the digest of the block before
    the first key, where the client knows of a chain of prefix blocks; each other key follows the one before it.

    `again` are reservations to make in the same step for puts to come: with them a put costs one round trip. They
    are made where room can be spared; for values that are `at_hand`, as by RESERVE."""

    namespace: str
    keys: Annotated[list[str], MANY]
    reservations: Annotated[list[tuple[int, int]], MANY]
    lengths: Annotated[list[int], MANY]
    sums: bytes
    options: Annotated[list[PutOptions], MANY]
    follows: bytes = b""
    again: Rooms = []
    at_hand: bool = False


class PutOutcome(Message, frozen=True):
    status: int
    copies: int
    wanted: int
    clock: int
    writer: int
    error: ItemError = OK


class Committed(Message, frozen=True):
    """Outcomes in runs of equal ones: how many, and what each is."""

    outcomes: list[tuple[int, PutOutcome]]
    again: list[Span] = []


class Abort(Message, frozen=True):
    reservations: Annotated[list[int], MANY]


class Place(Message, frozen=True):
    """Ask for peers that could hold a value without room here. Older clients say neither namespace nor pin."""

    digest: bytes
    length: int
    namespace: str = ""
    pin: int = 0


class Target(Message, frozen=True):
    """A peer to store at, over a data connection of version 2, with a ticket that allows it."""

    peer_id: bytes
    name: str
    data: list[str]
    ticket_claims: bytes
    ticket_signature: bytes
    ticket_secret: bytes


class Placed(Message, frozen=True):
    """Peers to try, best first; or why there are none. `clock` is this peer's hybrid clock: the version
    made there must be above all that was seen here."""

    targets: list[Target]
    clock: int = 0
    error: ItemError = OK


class StoredElsewhere(Message, frozen=True):
    """The client stored an object at another peer, which says this of it: for `contains` and `get` to know at
    once."""

    peer_id: bytes
    incarnation: int
    sequence: int
    record: bytes


class Remove(Message, frozen=True):
    namespace: str
    keys: Annotated[list[str], MANY]
    deadline_ms: int = 5000


class Removed(Message, frozen=True):
    """Per key whether any copy was known."""

    existed: list[bool]


class ListKeys(Message, frozen=True):
    namespace: str
    prefix: str
    after: str
    limit: int
    local: bool = False
    pinned: bool = False
    deadline_ms: int = 5000


class Keys(Message, frozen=True):
    items: list[KeyEntry]
    more: bool
    silent_peers: list[str]


class Peers(Message, frozen=True):
    everyone: bool = False


class TransportUse(Message, frozen=True):
    """Reads of this peer and its clients from a member by one transport. Of those objects that were read one by one,
    half took at most `median_microseconds`, 99 % at most `p99_microseconds`, by powers of two; 0 where there were
    none."""

    name: str
    objects: int
    bytes: int
    failures: int
    median_microseconds: int = 0
    p99_microseconds: int = 0


class PeerEntry(Message, frozen=True):
    """A member. `round_trip_seconds` is a ping's, below 0 where none was answered yet; `directory` says how much
    it knows of where objects are: `full`, `partitioned`, or empty where that is not known. `load_permille`: what it
    last said that it takes of a core, or of its upload slots."""

    peer_id: bytes
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
    round_trip_seconds: float = -1.0
    transports: list[TransportUse] = []
    directory: str = ""
    load_permille: int = 0
    leaving: bool = False


class PeersReply(Message, frozen=True):
    items: list[PeerEntry]


class Statistics(Message, frozen=True):
    cluster: bool = True


class StatisticsReply(Message, frozen=True):
    """A JSON document: `{"peer": {...}, "cluster": {...}}`; it only grows."""

    document: bytes


class Leave(Message, frozen=True):
    drain_seconds: float


class Replicate(Message, frozen=True):
    digest: bytes
    copies: int
    deadline_ms: int = 5000


class SetPin(Message, frozen=True):
    digests: bytes
    pin: int
    ttl_ms: int = 0


class Pinned(Message, frozen=True):
    """Per item: whether that was done, how many copies have the pin now, of how many that are known. Older peers pin
    their own copy alone, and do not say how many there are."""

    items: list[ItemError] = []
    copies: list[int] = []
    known: list[int] = []


class Flush(Message, frozen=True):
    namespace: str
    deadline_ms: int = 10_000


class Flushed(Message, frozen=True):
    """`told` other peers have dropped what they held; those in `not_told` (names) did not answer in time and
    will when they hear of it by gossip."""

    told: int = 0
    not_told: list[str] = []


class Prefetch(Message, frozen=True):
    digests: bytes


class Lease(Message, frozen=True):
    """Hold these objects in local memory while the client looks at them. `digests` packed. With `fetch`,
    an object that is elsewhere is brought into local memory first. `key` is the text of the first one."""

    digests: bytes
    fetch: bool = True
    wait_ms: int = 0
    deadline_ms: int = 5000
    key: str = ""


class LeaseGrant(Message, frozen=True):
    """`lease` is the number to give back. The object's slot and trailer are in the mapping. Where it was brought for
    this lease, `source` is the member that it came from, by `transport`."""

    lease: int
    segment: int
    offset: int
    length: int
    trailer_length: int
    clock: int = 0
    writer: int = 0
    root: int = 0
    error: ItemError = OK
    source: int = 0
    transport: str = ""


class Leased(Message, frozen=True):
    items: list[LeaseGrant]


class Release(Message, frozen=True):
    """One way. Each number once."""

    leases: Annotated[list[int], MANY]


OWN_COPY: Final = 0
"""Stands for the answering peer itself where holders are named by their short names."""


class Plan(Message, frozen=True):
    """Where can these objects be read? With `wait_ms`, waits that long for the first holder.
    `exclude` are holders (short names, or OWN_COPY) that just failed for the client. `namespace` is the
    digest of the namespace of all of them: what a flush has removed is not named. `key` is the text of the
    first one, for people who look at slow operations."""

    digests: bytes
    wait_ms: int = 0
    deadline_ms: int = 5000
    exclude: Annotated[list[int], MANY] = []
    namespace: bytes = b""
    key: str = ""


class Holder(Message, frozen=True):
    """One copy: its holder and how to get there. A ticket is good for every object of that peer."""

    member: int
    peer_id: bytes
    name: str
    data: list[str]
    socket: str
    same_host: bool
    slot: int
    size_units: int
    clock: int
    writer: int
    tier: int
    ticket_claims: bytes
    ticket_signature: bytes
    ticket_secret: bytes
    through_peer_bytes: int = 0
    """From this length on the local peer has a faster way to the holder than clients have; 0 where it has none."""
    root: int = 0


class PlanItem(Message, frozen=True):
    """Holders, best first. `known_unreachable` counts those that are known but believed dead. `through_peer`: the local
    peer reads from them faster, or it alone can (their `data` and `socket` are empty then), so that the client is to
    ask for a lease with `fetch`. `on_ssd`: the local peer has it on its SSD, and brings it to its memory for that."""

    holders: list[Holder]
    local: bool = False
    known_unreachable: int = 0
    error: ItemError = OK
    through_peer: bool = False
    on_ssd: bool = False


class Planned(Message, frozen=True):
    """`homes_asked` peers were asked for holders, because this one knew of none."""

    items: list[PlanItem]
    homes_asked: int = 0


class AccessCount(Message, frozen=True):
    """Reads of one object; `views` of them were no copies, but views that were taken without a request."""

    digest: bytes
    count: int
    bytes_read: int = 0
    views: int = 0


class HolderFailure(Message, frozen=True):
    """A holder (or OWN_COPY) that did not deliver. `code` is a `wire.Code`, or `NO_SUCH_KEY` with how far
    its log was."""

    digest: bytes
    member: int
    code: int
    incarnation: int = 0
    sequence: int = 0


class PullCount(Message, frozen=True):
    """Reads of a client from one holder by itself: objects and bytes that came, attempts that failed. `durations` and
    `lengths` count by powers of two (`p2pstore.runtime.histograms`) how many microseconds those took that were read
    one by one, `microseconds` in all, and how long the objects were, those of a batch as its mean."""

    member: int
    transport: str
    objects: int = 0
    bytes: int = 0
    failures: int = 0
    durations: list[int] = []
    microseconds: int = 0
    lengths: list[int] = []


class SlowRead(Message, frozen=True):
    """A read from a holder that took long. `code` is the `wire.Code` of how it failed, 0 when it did not.
    `key` is the text of the key, in the namespace of the client's session."""

    digest: bytes
    member: int
    transport: str
    seconds: float
    code: int = 0
    key: str = ""


class TransportFallback(Message, frozen=True):
    """A transport to a holder that failed where the next one took over: how often, and why the last time."""

    member: int
    transport: str
    count: int = 1
    text: str = ""


class UnseenRead(Message, frozen=True):
    """How often an object was read in a holder's memory, which did not see it."""

    digest: bytes
    member: int
    count: int = 1


class ReadTiming(Message, frozen=True):
    """Requests to one holder (or OWN_COPY), one after the other, brought bytes of its memory or SSD in that time."""

    member: int
    on_ssd: bool
    requests: int
    bytes: int
    microseconds: int


class Report(Message, frozen=True):
    """One way, at most every 100 ms: reads that the peer did not see, and holders that failed. `misses` counts
    reads that ended without the value: it had no holder, or none that could be reached."""

    accesses: Annotated[list[AccessCount], MANY]
    failures: Annotated[list[HolderFailure], MANY] = []
    pulls: Annotated[list[PullCount], MANY] = []
    slow: Annotated[list[SlowRead], MANY] = []
    fallbacks: Annotated[list[TransportFallback], MANY] = []
    misses: int = 0
    unseen: Annotated[list[UnseenRead], MANY] = []
    timings: Annotated[list[ReadTiming], MANY] = []


class Contains(Message, frozen=True):
    digests: bytes


class ContainsReply(Message, frozen=True):
    """One byte per digest: 1 when some live peer is known to hold it."""

    present: bytes


class Locate(Message, frozen=True):
    digests: bytes


class Copy(Message, frozen=True):
    """One known copy, for people and schedulers."""

    peer_id: bytes
    name: str
    tier: int
    length_hint: int
    clock: int
    writer: int
    soft: bool
    pin: int
    local: bool
    reachable: bool


class Located(Message, frozen=True):
    items: list[list[Copy]]


class MatchPrefix(Message, frozen=True):
    """How many of these keys, from the first on, are held by some live peer?"""

    digests: bytes


class MatchedPrefix(Message, frozen=True):
    length: int


class ExpectedFetch(Message, frozen=True):
    """`results.FetchSource`; `kind` is a place in `SOURCE_KINDS`."""

    peer_id: bytes
    name: str
    kind: int
    objects: int
    length_bytes: int
    seconds: float
    spread: float


class Estimated(Message, frozen=True):
    sources: list[ExpectedFetch]
    by_key: list[int]
