"""Changes of what this peer holds, or the whole pool, as events about the keys of one namespace. Pure.

The source are the location logs. Each is followed by its number; where its ring has lost operations, all of its records
are looked at again, and all that was told. A look compares what is held of a key now with what was told: a change that
came back in between is no event, and the events add up to the truth whatever was missed. Logs name digests. The keys of
objects held here are known; a holder is asked for those of others (NAMES).
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from p2pstore.core.gets.lookup import split_digests
from p2pstore.core.operation import Operation, Reply
from p2pstore.gossip.locations.location_index import digests_of
from p2pstore.gossip.locations.views import ViewPlace
from p2pstore.gossip.records import Member, PeerId
from p2pstore.location_table import TIER_FLAGS
from p2pstore.objects import CLOCK_COUNTER_BITS, MIB
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import MAX_NAMED, Named, Names

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_AHEAD: Final = 65_536
"""Digests to look at, or without a key, from which on logs are not followed: their rings keep operations meanwhile."""
STEP_DIGESTS: Final = 2_048
"""Records of a log that is looked at whole, in one step."""
ASKED_AT_ONCE: Final = 8
"""Holders: no more are asked while that many have not answered."""
MAX_HOLDERS_ASKED: Final = 3
"""For one key: a digest of another namespace has no key anywhere."""
SILENT_SECONDS: Final = 1.0
"""Pause before a holder that did not answer is asked again."""
MEDIA: Final = ("cpu", "disk")
"""By bit: in memory, on the SSD."""
MEDIA_OF_TIER: Final = (1, 2, 3, 0)

MAX_EVENTS: Final = 256
"""In one batch."""
MAX_REPLAYED_EVENTS: Final = 4096
"""In one batch that tells what is held."""
RING_BATCHES: Final = 10_000
RING_BYTES: Final = 64 * MIB


class KeyEvent(NamedTuple):
    """A key came to be held in this medium, or is held there no longer."""

    key: str
    medium: str
    stored: bool


class KeyChanges:
    """Events of one namespace: of this peer's log alone, or with `fleet` of all logs that this peer has, where a key
    counts once however many members hold it."""

    def __init__(self, core: PeerCore, namespace: str, *, fleet: bool) -> None:
        self._core = core
        self._namespace = namespace
        self._fleet = fleet
        self.told: dict[bytes, tuple[str, int]] = {}
        """Key and media of each digest, as all events so far add up to."""
        self._places: dict[Member, ViewPlace] = {}
        """Up to where each log was followed."""
        self._to_look: OrderedDict[bytes, None] = OrderedDict()
        self._passes: OrderedDict[Member | None, Iterator[Sequence[bytes]]] = OrderedDict()
        """Logs whose records are all to be looked at; None stands for what was told."""
        self._lost_some = False
        """Since that pass over what was told began."""
        self._unnamed: OrderedDict[bytes, set[PeerId]] = OrderedDict()
        """Digests whose keys are wanted, and the holders that gave none."""
        self._named: dict[bytes, str] = {}
        self._silent_until: dict[PeerId, float] = {}
        self._ask_at = 0.0
        self._asking = 0

    @property
    def knows_all(self) -> bool:
        """Whether this peer has all logs that its events are about. Without, there are no events."""
        return not self._fleet or self._core.gossip.partitions.mode.knows_all

    @property
    def unnamed_count(self) -> int:
        return len(self._unnamed)

    def forget(self) -> None:
        """Nothing was told: consumers are told to clear."""
        self.told.clear()
        self._places.clear()
        self._to_look.clear()
        self._passes.clear()
        self._unnamed.clear()
        self._named.clear()

    def take(self, now: float, limit: int = MAX_EVENTS) -> list[KeyEvent]:
        """The next events, of up to `limit` digests."""
        if len(self._to_look) + len(self._unnamed) < MAX_AHEAD:
            self._follow()
            self._look_on()
        digests = [self._to_look.popitem(last=False)[0] for _ in range(min(limit, len(self._to_look)))]
        events: list[KeyEvent] = []
        for digest, media in zip(digests, self._media(digests), strict=True):
            events += self._compared(digest, media, now)
        self._core.counters["key_events"] += len(events)
        self._ask(now)
        return events

    @property
    def behind(self) -> bool:
        """Whether there is more to look at by now."""
        return bool(self._to_look or self._passes or (self._unnamed and self._asking < ASKED_AT_ONCE))

    def _follow(self) -> None:
        """Note what the logs say since the last call."""
        log, directory = self._core.gossip.log, self._core.gossip.directory
        places = {self._core.member: ViewPlace(log.incarnation, 0, False, log.sequence)}
        if self._fleet:
            places |= directory.places()
        for member, place in places.items():
            before = self._places.get(member)
            if place == before:
                continue
            operations = None
            if before is not None and place[:2] == before[:2]:
                if place.sequence == before.sequence:
                    operations = b""
                elif member == self._core.member:
                    operations = log.after(before.sequence)
                else:
                    operations = directory.operations_after(member, before.sequence)
            if operations is None:
                self._look_at_told()
            if operations is None or (before and before.hidden != place.hidden):
                self._passes[member] = self._chunks_of(member)
            if operations:
                self._to_look.update(dict.fromkeys(digests_of(operations)))
        if self._places.keys() - places.keys():
            self._look_at_told()
        self._places = places

    def _look_on(self) -> None:
        """Go on with logs that are looked at whole, in turns."""
        while self._passes and len(self._to_look) < STEP_DIGESTS:
            which, chunks = self._passes.popitem(last=False)
            if (chunk := next(chunks, None)) is not None:
                self._to_look.update(dict.fromkeys(chunk))
                self._passes[which] = chunks

    def _look_at_told(self) -> None:
        """Look at all that was told: again, when that is under way, so that it comes to an end."""
        self._lost_some = True
        self._passes.setdefault(None, self._chunks_told())

    def _chunks_told(self) -> Iterator[Sequence[bytes]]:
        while self._lost_some:
            self._lost_some = False
            everything = list(self.told)
            for start in range(0, len(everything), STEP_DIGESTS):
                yield everything[start : start + STEP_DIGESTS]

    def _chunks_of(self, member: Member) -> Iterator[Sequence[bytes]]:
        """From the last record to the first: one that takes the place of another comes from behind."""
        log, directory = self._core.gossip.log, self._core.gossip.directory
        own, left = member == self._core.member, 1 << 62
        while (left := min(left, log.count if own else directory.count_of(member))) > 0:
            start = max(0, left - STEP_DIGESTS)
            if own:
                yield digests_of(log.records(start, left))
            else:
                yield directory.digests_between(member, start, left)
            left = start

    def _media(self, digests: Sequence[bytes]) -> list[int]:
        """The media in which each is held now, a bit each."""
        log = self._core.gossip.log
        held = [log.held(digest) for digest in digests]
        own = [MEDIA_OF_TIER[each[-1] & TIER_FLAGS] if each else 0 for each in held]
        if not self._fleet or not digests:
            return own
        others = self._core.gossip.directory.logged_tiers(digests).tolist()
        return [mine | theirs for mine, theirs in zip(own, others, strict=True)]

    def _compared(self, digest: bytes, media: int, now: float) -> list[KeyEvent]:
        key, before = self.told.get(digest, ("", 0))
        if media == before:
            if not media:
                self._unnamed.pop(digest, None)
                self._named.pop(digest, None)
            return []
        if not key:
            name = name_here(self._core, digest, self._namespace, now)
            answered = self._named.pop(digest, "")
            key = answered if name is None else name
            if not key:
                if name is None and self._fleet:
                    self._unnamed.setdefault(digest, set())
                return []
        self._unnamed.pop(digest, None)
        if media:
            self.told[digest] = key, media
        else:
            del self.told[digest]
        # Removals come first: a consumer that knows no media ends with what is held.
        gone = [KeyEvent(key, MEDIA[bit], False) for bit in (0, 1) if before & ~media & 1 << bit]
        return gone + [KeyEvent(key, MEDIA[bit], True) for bit in (0, 1) if media & ~before & 1 << bit]

    def _ask(self, now: float) -> None:
        """Ask a holder each for the keys of some digests. Digests without a name are dropped until the logs mention
        them again."""
        busy = self._asking >= ASKED_AT_ONCE or self._core.closing
        if busy or not self._unnamed or now < self._ask_at:
            return
        wanted: dict[PeerId, dict[bytes, set[PeerId]]] = {}
        for _ in range(min(MAX_NAMED, len(self._unnamed))):
            digest, asked = self._unnamed.popitem(last=False)
            holders = [each for each in self._holders(digest) if each not in asked]
            if not holders or len(asked) >= MAX_HOLDERS_ASKED:
                self._core.counters["keys_not_named"] += 1
                continue
            able = [each for each in holders if self._silent_until.get(each, 0.0) <= now]
            if able:
                wanted.setdefault(able[0], {})[digest] = asked
            else:
                self._unnamed[digest] = asked  # behind the others
        if not wanted:
            self._ask_at = now + SILENT_SECONDS / 10
        for holder, digests in wanted.items():
            self._ask_one(holder, digests, now)

    def _ask_one(self, holder: PeerId, digests: dict[bytes, set[PeerId]], now: float) -> None:
        def answered(keys: Any, now: float) -> None:
            self._asking -= 1
            if not isinstance(keys, list):
                self._silent_until[holder] = now + SILENT_SECONDS
                self._unnamed.update(digests)
                return
            self._silent_until.pop(holder, None)
            for (digest, asked), key in zip(digests.items(), keys, strict=True):
                if key:
                    self._named[digest] = key
                    self._to_look[digest] = None
                else:
                    self._unnamed[digest] = asked | {holder}

        self._asking += 1
        operation = NamesOperation(self._core, holder, self._namespace, list(digests))
        self._core.operations.start(operation, now, answered)

    def _holders(self, digest: bytes) -> Iterable[PeerId]:
        for location in self._core.gossip.directory.holders(digest):
            state = self._core.gossip.membership.resolve(location.member)
            if state is not None and not (location.hidden or location.hearsay):
                yield state.peer_id


# --- the stream of Mooncake's master -------------------------------------------------------------


class EventFormat:
    """Batches as Mooncake's master publishes them: msgpack of `[milliseconds, events, 0]`, an event a map. Its own
    consumer refuses an event without any of these fields but `type`, `object_key` and `block_hashes`, and one with
    another time than its batch."""

    def __init__(self, backend_id: str) -> None:
        self._backend_id = backend_id
        self._next_event_id = 1

    def batch(self, events: Iterable[KeyEvent], unix_ms: int) -> bytes:
        return msgspec.msgpack.encode([unix_ms, [self._event(each, unix_ms) for each in events], 0])

    def cleared(self, unix_ms: int) -> bytes:
        return msgspec.msgpack.encode(
            [unix_ms, [self._envelope("cleared", "AllBlocksCleared", None, unix_ms)], 0]
        )

    def _event(self, event: KeyEvent, unix_ms: int) -> dict[str, Any]:
        types = ("stored", "BlockStored") if event.stored else ("removed", "BlockRemoved")
        number = block_hash(event.key)
        hashes = [] if number is None else [number]
        return {
            **self._envelope(*types, event.medium, unix_ms),
            "group_id": None,
            "object_key": event.key,
            "seq_hashes": hashes,
            "block_hashes": hashes,
            "base_block_idx": None,
        } | ({"parent_hash": None, "token_ids": None} if event.stored else {})

    def _envelope(self, kind: str, type_: str, medium: str | None, unix_ms: int) -> dict[str, Any]:
        number = self._next_event_id
        self._next_event_id += 1
        return {
            "event_id": number,
            "timestamp": unix_ms,
            "event_type": kind,
            "type": type_,
            "model_name": None,
            "block_size": None,
            "additional_salt": None,
            "lora_name": None,
            "tenant_id": "default",
            "backend_id": self._backend_id,
            "medium": medium,
            "dp_rank": 0,
        }


def block_hash(key: str) -> int | None:
    """The 64-bit number that a key is, decimal or with 0x; None for any other key."""
    digits, base = (key[2:], 16) if key[:2] in ("0x", "0X") else (key, 10)
    if not digits.isascii() or not digits.isalnum():
        return None
    try:
        number = int(digits, base)
    except ValueError:
        return None
    return number if number < 1 << 64 else None


class BatchRing:
    """The last batches of a stream, numbered without gaps from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._batches: deque[bytes] = deque()
        self._length_bytes = 0
        self._listed: tuple[int, list[bytes]] = 0, []

    @property
    def last(self) -> int:
        """Number of the newest batch; `first - 1` before there is one."""
        return self.first + len(self._batches) - 1

    def append(self, payload: bytes) -> int:
        """Number a batch."""
        self._batches.append(payload)
        self._length_bytes += len(payload)
        while len(self._batches) > RING_BATCHES or self._length_bytes > RING_BYTES:
            self._length_bytes -= len(self._batches.popleft())
            self.first += 1
        return self.last

    def get(self, number: int) -> bytes | None:
        return self._batches[number - self.first] if self.first <= number <= self.last else None

    def listed(self, told: Iterable[bytes]) -> tuple[int, list[bytes]]:
        """The digests that were told up to one of the last batches, and its number. Many replays share this list."""
        if self.last - self._listed[0] >= RING_BATCHES // 100:
            self._listed = self.last, list(told)
        return self._listed


def first_sequence(core: PeerCore) -> int:
    """The number of a life's first batch: above all of earlier lives, whatever the clock did since. Incarnations rise
    with each start and count milliseconds, the hybrid clock is saved; both are far faster than batches."""
    return max(core.clock.latest, core.incarnation << CLOCK_COUNTER_BITS)


def replayed(
    changes: KeyChanges, ring: BatchRing, form: EventFormat, start: int, unix_ms: int
) -> Iterator[tuple[int, bytes]]:
    """Numbered batches for a consumer that wants those from `start` on. Where the ring has lost them, or `start` is 0,
    they begin with `cleared` and all that is held, numbered so that the ring's go on from there. Of keys that change
    meanwhile the ring tells again."""
    number = start
    if not ring.first <= start <= ring.last + 1:
        last, digests = ring.listed(changes.told)
        room = max(1, last - start - 1) if 0 < start < last else len(digests) + 1
        size = max(MAX_EVENTS, min(MAX_REPLAYED_EVENTS, -(-len(digests) // room)))
        number = last - -(-len(digests) // size)
        yield number, form.cleared(unix_ms)
        for begin in range(0, len(digests), size):
            number += 1
            held = [changes.told[each] for each in digests[begin : begin + size] if each in changes.told]
            events = (
                KeyEvent(key, MEDIA[bit], True)
                for key, media in held
                for bit in (0, 1)
                if media & 1 << bit
            )
            yield number, form.batch(events, unix_ms)
        number += 1
    while (payload := ring.get(number)) is not None:
        yield number, payload
        number += 1


SEQUENCE: Final = struct.Struct(">Q")
"""Of a batch, in its second frame."""
REPLAY_END: Final = b"\xff" * 8
"""In place of a number: the end of a replay."""

NAMES_TIMEOUT_SECONDS: Final = 2.0


def name_here(core: PeerCore, digest: bytes, namespace: str, now: float) -> str | None:
    """The key of an object held here; empty when it is of another namespace, None when none is held."""
    entry = core.segment.find(digest, core.unix(now)) or core.cold.stored(digest)
    if entry is None:
        return None
    return entry.key if entry.namespace == namespace else ""


def serve_names(core: PeerCore, request: Names, now: float) -> Named:
    """Answer NAMES: some 2 us a digest, 20 on the SSD. Raises `ProtocolError` when digests are not whole."""
    digests = split_digests(request.digests)
    return Named([name_here(core, digest, request.namespace, now) or "" for digest in digests])


class NamesOperation(Operation):
    """Ask a holder for the keys of at most 256 digests. The result: a key for each, empty where the holder named none
    or a wrong one; None when it did not answer."""

    def __init__(self, core: PeerCore, holder: PeerId, namespace: str, digests: Sequence[bytes]) -> None:
        super().__init__(core)
        self._holder = holder
        self._namespace = namespace
        self._digests = digests

    def start(self, now: float) -> None:
        request = Names(self._namespace, b"".join(self._digests))
        self.ask(None, self._holder, DataKind.NAMES, request, NAMES_TIMEOUT_SECONDS)

    def answered(self, about: None, reply: Reply, now: float) -> None:
        keys = reply.keys if isinstance(reply, Named) else []
        if reply is None:
            self.finish(None, now)
        elif len(keys) != len(self._digests):  # a version that knows no NAMES, or nonsense
            self.finish([""] * len(self._digests), now)
        else:
            self.finish(list(map(self._checked, self._digests, keys)), now)

    def _checked(self, digest: bytes, key: str) -> str:
        """The key, if the digest is its own: no holder can give a key that is not."""
        try:
            return key if self.core.digests_of(self._namespace, [key]) == [digest] else ""
        except ValueError:
            return ""
