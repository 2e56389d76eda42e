"""A core with an SSD tier that is a dictionary, and a shell that writes and loads when it is told to. For tests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from p2pstore.core.operation import LoadObject, PullOutcome, WriteObject
from p2pstore.gossip.records import LocationRecord
from p2pstore.memory.segment_layout import (
    Pin,
    Slot,
    SlotState,
    TrailerBody,
    decode_trailer,
    encode_trailer,
)
from p2pstore.memory.segment_objects import SOFT_PIN_SECONDS
from p2pstore.objects import Version, namespace_digest
from p2pstore.ssd_tier.index import ColdEntry
from tests.unit.core_harness import Harness, clock_at, digest_of


@dataclass(frozen=True)
class Stored:
    """The dictionary's entry of an object."""

    entry: ColdEntry
    trailer: TrailerBody
    value: bytes


class DictionaryStore:
    """Satisfies `p2pstore.core.copies.cold_copies.ColdStore`."""

    def __init__(self) -> None:
        self.objects: dict[bytes, Stored] = {}
        self.steps_to_prepare = 0
        self.discarded: list[bytes] = []
        """Whatever it was told to discard, there or not."""

    def find(self, digest: bytes) -> ColdEntry | None:
        stored = self.objects.get(digest)
        return None if stored is None else stored.entry

    def discard(self, digest: bytes, up_to: Version) -> bool:
        self.discarded.append(digest)
        stored = self.objects.get(digest)
        if stored is None or not up_to.covers(stored.entry.version):
            return False
        del self.objects[digest]
        return True

    def set_care(
        self,
        digest: bytes,
        version: Version,
        *,
        pin: int,
        replicas: int,
        soft: bool,
        expires_unix_ms: int | None = None,
    ) -> bool:
        stored = self.objects.get(digest)
        if stored is None or stored.entry.version != version:
            return False
        entry = msgspec.structs.replace(stored.entry, pin=pin, replicas=replicas, soft=soft)
        trailer = msgspec.structs.replace(stored.trailer, pin=pin, replicas=replicas)
        if expires_unix_ms is not None:
            entry = msgspec.structs.replace(entry, expires_unix_ms=expires_unix_ms)
            trailer = msgspec.structs.replace(trailer, expires_unix_ms=expires_unix_ms)
        self.objects[digest] = Stored(entry, trailer, stored.value)
        return True

    def digests(self, namespace: bytes | None) -> Iterator[list[bytes]]:
        found = [
            digest
            for digest, stored in self.objects.items()
            if namespace in (None, namespace_digest(stored.entry.namespace))
        ]
        return iter([found[start : start + 64] for start in range(0, len(found), 64)])

    def prepare_entries(self, namespace: str) -> bool:
        self.steps_to_prepare -= 1
        return self.steps_to_prepare < 0

    def entries(
        self, namespace: str, prefix: str, after: str, limit: int
    ) -> tuple[Sequence[ColdEntry], bool]:
        entries = (stored.entry for stored in self.objects.values())
        found = sorted(
            (
                entry
                for entry in entries
                if entry.namespace == namespace and entry.key.startswith(prefix) and entry.key > after
            ),
            key=lambda entry: entry.key,
        )
        return found[:limit], len(found) > limit


class ColdWorld(Harness):
    """A core whose objects go to a dictionary, and come back from it, when the test says so."""

    def __init__(self, others: int = 0, memory_bytes: int = 256 * 1024) -> None:
        super().__init__(others, memory_bytes)
        self.store = DictionaryStore()
        self.core.cold.store = self.store
        self._fillers = 0

    @property
    def soon(self) -> Version:
        """A version above all there are."""
        return Version(clock_at(self.now - 100.0 + 5.0), 0)

    def write(self, *, accept: bool = True, retry_seconds: float = 60.0) -> list[str]:
        """Carry out what is to be written now; the keys."""
        keys = []
        for effect in self.effects(WriteObject):
            keys.append(effect.entry.key)
            if accept:
                self._keep(effect)
            self.core.write_back.ended(effect.entry, accept, retry_seconds, self.now)
        return keys

    def _keep(self, effect: WriteObject) -> None:
        held = effect.entry
        trailer = decode_trailer(self.segment.table.trailer_bytes(held))
        assert trailer is not None
        entry = ColdEntry(
            digest=held.digest,
            version=held.version,
            length=held.length,
            namespace=held.namespace,
            key=held.key,
            places=(),
            hits=0,
            expires_unix_ms=held.expires_unix_ms,
            replicas=held.replicas,
            pin=int(held.pin),
            soft=held.soft,
            stored=(),
            described=bool(held.dtype),
        )
        self.store.objects[held.digest] = Stored(entry, trailer, bytes(self.segment.payload(held)))

    def cool_again(self, key: str) -> None:
        """Others of its size take an object's place in memory."""
        while (entry := self.find(key)) is not None:
            self._fillers += 1
            assert self._fillers < 100_000, f"{key} stays in memory"
            self.fill(1_000_000 + self._fillers, 1, entry.length)

    def load(self, **outcome: Any) -> list[str]:
        """Carry out what is to be loaded now; with `fail` or `error` it does not work. The keys."""
        keys = []
        for effect in self.effects(LoadObject):
            stored = self.store.objects[effect.digest]
            keys.append(stored.entry.key)
            if outcome:
                failed = PullOutcome(False, (), outcome.get("error"), 0, "ssd")
                self.core.operations.pulled(effect.operation, failed, self.now)
                continue
            destination = self.core.operations.copy_destination(effect.operation, self.now)
            slot = Slot(
                SlotState.LIVE,
                effect.digest,
                stored.entry.version,
                0,
                len(stored.value),
                len(encode_trailer(stored.trailer)),
            )
            destination.prepare(slot, stored.trailer)
            destination.pages[: len(stored.value)] = stored.value
            destination.commit(self.now)
            self.core.operations.pulled(
                effect.operation, PullOutcome(True, (), None, self.core.member, "ssd"), self.now
            )
        return keys

    def fill(self, first: int, count: int, length: int = 16_000) -> None:
        """Put many objects, the SSD taking what it is given."""
        for number in range(first, first + count):
            self.stored(f"filler-{number}", bytes([number % 251]) * length)
            self.pass_time(0.05)
            self.write()

    def cool(self, key: str, value: bytes, **options: Any) -> LocationRecord:
        """An object that is on the SSD alone. The location that this peer announces of it."""
        self.stored(key, value, **options)
        if options.get("pin") == Pin.SOFT:
            self.pass_time(SOFT_PIN_SECONDS)
        self.cool_again(key)
        record = self.announced(key)
        assert record is not None, f"{key} left memory and is not on the SSD"
        assert digest_of(key) in self.store.objects
        self.forget_effects()
        return record

    def cool_all(self, values: Mapping[str, bytes]) -> None:
        """Many objects that are on the SSD alone."""
        for key, value in values.items():
            self.stored(key, value)
            self.pass_time(0.05)
            self.write()
        for key in values:
            self.cool_again(key)
            assert digest_of(key) in self.store.objects
        self.forget_effects()
