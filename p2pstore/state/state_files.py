"""The files `state.json` (incarnation, hybrid clock, how far floors were seen) and `floors.bin`. Shell.

Every write of `state.json` replaces the whole file. A field that is damaged or implausible costs itself only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Final

import msgspec
import xxhash

from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.floors.floor_stamps import Stamps, stamps_as_text, stamps_from_text
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.members.membership import MAX_AHEAD_MS
from p2pstore.gossip.records import MAX_RECORD_BYTES, SignedRecord
from p2pstore.objects import newest_accepted_clock
from p2pstore.state.folder import FORMAT, StateFiles, check_format, damaged, fail
from p2pstore.wire import decode_body, encode_body

_PLAUSIBLE_UNIX_SECONDS: Final = 1_700_000_000.0
"""An earlier clock was not set yet: it does not judge records written by a right one."""
_MAX_CLOCK: Final = (1 << 63) - 1
"""Of a reading that was kept: far in the future, with room for all that follow in the 64 bits of the format."""


class _State(msgspec.Struct):
    format: int
    incarnation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INCARNATION)]
    clock: Annotated[int, msgspec.Meta(ge=0, le=_MAX_CLOCK)]
    floors_seen: dict[str, int] = {}
    floors_horizon: dict[str, int] = {}
    memory: str = ""
    floors_bytes: int = -1
    """Of `floors.bin`, that were on the disk when this was written; -1: an earlier version wrote this."""
    sum: str = ""
    """Of the other fields; empty: an earlier version wrote this."""


class StateRecord:
    """The open `state.json`."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self.state = self._load_state()

    @property
    def clock(self) -> int:
        return self.state.clock

    def next_incarnation(self, now_unix_ms: int, segment_id: bytes = b"") -> int:
        """An incarnation above all earlier ones, saved before it is returned, with the id of its memory segment."""
        incarnation = max(self.state.incarnation + 1, now_unix_ms)
        self._write_state(
            msgspec.structs.replace(self.state, incarnation=incarnation, memory=segment_id.hex())
        )
        return self.state.incarnation

    @property
    def last_segment_id(self) -> bytes:
        """Segment id of the last incarnation; empty when unknown."""
        try:
            return bytes.fromhex(self.state.memory)
        except ValueError:
            return b""

    def save_incarnation(self, incarnation: int) -> None:
        """Keep an incarnation that was raised while running, to refute a suspicion."""
        if incarnation > self.state.incarnation:
            self._write_state(msgspec.structs.replace(self.state, incarnation=incarnation))

    @property
    def floors_seen(self) -> Stamps:
        """Up to where floors had been seen when this was last saved."""
        return stamps_from_text(self.state.floors_seen)

    @property
    def floors_horizon(self) -> Stamps:
        """Up to where floors were dropped when this was last saved."""
        return stamps_from_text(self.state.floors_horizon)

    def save_clock(
        self, clock: int, floors_seen: Stamps | None, floors_horizon: Stamps | None, floors_bytes: int
    ) -> None:
        """Save clock, stamps of floors seen and dropped (None: as before), and `floors_bytes` on the disk."""
        changed = msgspec.structs.replace(self.state, clock=min(clock, _MAX_CLOCK))
        if floors_seen is not None:
            changed.floors_seen = stamps_as_text(floors_seen)
        if floors_horizon is not None:
            changed.floors_horizon = stamps_as_text(floors_horizon)
        changed.floors_bytes = floors_bytes
        if changed != self.state:
            self._write_state(changed)

    def floors_lost(self) -> None:
        """Save that this peer has seen no floors: some of its own are gone."""
        self._write_state(msgspec.structs.replace(self.state, floors_seen={}, floors_bytes=0))

    def floors_shrink(self, floors_bytes: int) -> None:
        """Promise nothing of `floors.bin` before it shrinks to `floors_bytes`: a crash would look like damage."""
        if self.state.floors_bytes > floors_bytes:
            self._write_state(msgspec.structs.replace(self.state, floors_bytes=0))

    def _load_state(self) -> _State:
        path = self._files.path / "state.json"
        found = self._files.load_json("state.json", dict)
        if found is None:
            return _State(FORMAT, 0, 0)
        told = found.pop("sum", "")
        certain = told == _sum_of(found)
        if (told or "floors_bytes" in found) and not certain:
            self._files.note("state.json was changed or damaged: its stamps of floors are not believed")
            found |= {"floors_seen": {}, "floors_horizon": {}, "floors_bytes": -1}
        now = time.time()
        now_ms = int(now * 1000)
        if not _is_stamp(found.get("incarnation"), MAX_INCARNATION - 1):
            self._files.note("state.json has no usable incarnation: the clock gives a new one")
            found["incarnation"] = 0
        elif (
            # An incarnation in use is kept even if the clock was wrong: others know this peer by it.
            not (certain and found["incarnation"] <= MAX_INCARNATION // 2)
            and found["incarnation"] > now_ms + MAX_AHEAD_MS
            and now > _PLAUSIBLE_UNIX_SECONDS
        ):
            self._files.note(
                "state.json has an incarnation of the far future: the clock gives a new one"
            )
            found["incarnation"] = 0
        if not _is_stamp(found.get("clock"), _MAX_CLOCK):
            self._files.note(
                "state.json has no usable clock: the newest stamp of seen floors takes its place"
            )
            seen = found.get("floors_seen")
            stamps = seen.values() if isinstance(seen, dict) else ()
            found["clock"] = max((s for s in stamps if _is_stamp(s, _MAX_CLOCK)), default=0)
        limit = newest_accepted_clock(now) if now > _PLAUSIBLE_UNIX_SECONDS else _MAX_CLOCK
        for name in ("floors_seen", "floors_horizon"):
            # A clock was fast: a peer that has seen all floors up to a stamp has seen all before it.
            lower = certain and name == "floors_seen"
            found[name] = self._plausible_stamps(name, found.get(name, {}), limit, lower=lower)
        if not isinstance(found.get("memory", ""), str):
            found["memory"] = ""
        if not _is_stamp(found.get("floors_bytes", 0), _MAX_CLOCK):
            found["floors_bytes"] = -1
        try:
            return msgspec.convert(found, _State)
        except msgspec.ValidationError as error:
            raise damaged(path, error) from None

    def _plausible_stamps(self, name: str, stamps: object, limit: int, *, lower: bool) -> dict[str, int]:
        """A table without stamps above the limit, which no correct clock can have written, or with these lowered. A
        writer without a stamp counts as 0, which claims less."""
        try:
            known = stamps_from_text(msgspec.convert(stamps, dict[str, int]))
        except (ValueError, msgspec.ValidationError):
            self._files.note(f"state.json has no usable {name}: it counts as empty")
            return {}
        kept = {member: stamp for member, stamp in known.items() if stamp <= limit}
        if len(kept) < len(known):
            self._files.note(
                f"state.json has {name} of the future: {len(known) - len(kept)} of {len(known)} are not believed. Was "
                "this machine's clock wrong?"
            )
        if lower:
            kept = {member: min(stamp, limit) for member, stamp in known.items()}
        return stamps_as_text(kept)

    def _write_state(self, state: _State) -> None:
        state.sum = _sum_of(msgspec.to_builtins(state))
        self._files.replace("state.json", msgspec.json.encode(state) + b"\n")
        self.state = state


def _is_stamp(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _sum_of(state: dict[str, Any]) -> str:
    fields = {name: value for name, value in state.items() if name != "sum"}
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(fields, order="deterministic"))


logger = logging.getLogger("p2pstore.state.state_directory")

FLOORS_NAME: Final = "floors.bin"
FLOORS_FORMAT: Final = 1
"""A later format has other frames, too: a header with another number before frames of this format is damaged."""
MAX_FRAME_BYTES: Final = MAX_RECORD_BYTES + 256

_HEADER: Final = struct.Struct("<8sI")
_MAGIC: Final = b"P2PSFLR\0"
_FRAME: Final = struct.Struct("<IQ")
_BEGINNING: Final = re.compile(rb"..[\x00-\x01]\x00.{8}\x92", re.DOTALL)
"""Of a record: a length below 128 KiB, a checksum, and an array of the two fields of a `SignedRecord`."""


@dataclass(slots=True)
class FoundFloors:
    """Content of a floors file. `end` is where its last whole record ends."""

    records: list[SignedRecord] = field(default_factory=list)
    end: int = 0
    damaged_bytes: int = 0
    """Of records that were on the disk and cannot be read, or are missing."""
    torn_bytes: int = 0
    """Left by a write that a crash interrupted."""


class NewerFormat(Exception):
    """`version` is a format of a later program."""

    def __init__(self, version: int) -> None:
        super().__init__(f"format {version}")
        self.version = version


def floors_file(records: Iterable[SignedRecord]) -> bytes:
    return _HEADER.pack(_MAGIC, FLOORS_FORMAT) + floor_frames(records)


def floor_frames(records: Iterable[SignedRecord]) -> bytes:
    """Records to append. Raises `ValueError` for one that is too large to be read again."""
    return b"".join(map(_frame, records))


def read_floors(data: bytes, promised_bytes: int = -1) -> FoundFloors:
    """The records in a file, of which `promised_bytes` were surely on the disk (-1: the writer never said so). Raises
    `NewerFormat`, and `ProtocolError` for what is not a file of floors."""
    found = FoundFloors(end=min(len(data), _HEADER.size))
    _read_frames(data, found, promised_bytes)
    if len(data) < promised_bytes:
        found.damaged_bytes += promised_bytes - len(data)
    if len(data) < _HEADER.size:
        found.torn_bytes += len(data)
        return found
    magic, version = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        if not found.records:
            raise ProtocolError("it is not a file of floors")
        found.damaged_bytes += len(_MAGIC)
    elif version != FLOORS_FORMAT:
        if not found.records or found.damaged_bytes or found.torn_bytes:
            raise NewerFormat(version)
        found.damaged_bytes += _HEADER.size - len(_MAGIC)
    return found


def _read_frames(data: bytes, found: FoundFloors, promised_bytes: int) -> None:
    position = _HEADER.size
    while position < len(data):
        record, end = _record_at(data, position)
        if record is None:
            following = _next_record(data, position, end)
            if following is None:
                rest = len(data) - position
                if position < promised_bytes:
                    found.damaged_bytes += rest
                else:
                    found.torn_bytes += rest
                return
            found.damaged_bytes += following - position
            position = following
            continue
        found.records.append(record)
        position = found.end = end


def _next_record(data: bytes, damaged: int, end: int) -> int | None:
    """Where the first whole record after a damaged one begins; `end` is where that one should end."""
    if damaged < end < len(data) and _record_at(data, end)[0] is not None:
        return end
    at = damaged
    while (looks := _BEGINNING.search(data, at + 1)) is not None:
        at = looks.start()
        if _record_at(data, at)[0] is not None:
            return at
    return None


def _record_at(data: bytes, position: int) -> tuple[SignedRecord | None, int]:
    """The record that begins there, if it is whole, and where it ends or should."""
    if len(data) - position < _FRAME.size:
        return None, len(data)
    length, checksum = _FRAME.unpack_from(data, position)
    start = position + _FRAME.size
    end = start + length
    if length > MAX_FRAME_BYTES or end > len(data):
        return None, end
    body = data[start:end]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None, end
    try:
        return decode_body(SignedRecord, body), end
    except ProtocolError:
        return None, end


def _frame(record: SignedRecord) -> bytes:
    body = encode_body(record)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a record of {len(body):,} bytes; at most {MAX_FRAME_BYTES:,} are kept")
    return _FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


class FloorsFile:
    """The open `floors.bin` of a state directory. Methods raise as those of `StateDirectory`.

        header   "P2PSFLR\\0", format (u32)
        record   length of the body (u32), xxh3-64 of the body (u64), the body: a `SignedRecord` in msgpack

    Records are appended in batches, with one `fsync` each. A damaged record costs itself only: the reader looks for the
    next one at its end by length, then at all bytes that look like the beginning of a record. Bytes after the last
    whole record are the torn tail of a crash, unless `promised_bytes` says that they were on the disk.
    """

    def __init__(self, files: StateFiles, record: StateRecord) -> None:
        self._files = files
        self._record = record
        self.bytes_on_disk = max(0, record.state.floors_bytes)
        self.record_count = 0
        """Records in the file, superseded ones among them."""

    def load(self) -> list[SignedRecord]:
        """All records in the order they were added. Damaged ones are left out, and this peer then withdraws its claim
        to have seen floors. A torn tail is cut off."""
        path = self._files.path / FLOORS_NAME
        try:
            data = self._files.folder.read(FLOORS_NAME)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            fail(path, "read", error)
        try:
            found = read_floors(data, self._record.state.floors_bytes)
        except NewerFormat as error:
            check_format(path, error.version)
            raise ConfigError(f"{path}: {error}") from None
        except ProtocolError:
            raise ConfigError(
                f"{path} is not a file of floors: move it away and restart the peer"
            ) from None
        if found.damaged_bytes:
            self.lost(
                f"floors.bin has {found.damaged_bytes:,} damaged or missing bytes: {len(found.records):,} records are "
                "left"
            )
        if found.torn_bytes:
            logger.warning("%s: cut off %d bytes of a torn record", path, found.torn_bytes)
        if found.damaged_bytes or found.torn_bytes or not data:
            self.replace(found.records)
        self.record_count = len(found.records)
        return found.records

    def lost(self, what: str) -> None:
        """Note that some floors are lost: this peer claims to have seen none before it compared its own."""
        self._files.note(
            f"{what}. The lost ones are asked of other peers; objects that they forbade stay away meanwhile"
        )
        self._record.floors_lost()

    def append(self, records: Sequence[SignedRecord]) -> None:
        """Add records: all are on the disk when this returns, none when it raises."""
        if not records:
            return
        frames = floor_frames(records)
        try:
            descriptor = self._files.folder.open(FLOORS_NAME, os.O_RDWR)
        except FileNotFoundError:
            self._files.replace(FLOORS_NAME, floors_file(records))
            self.bytes_on_disk = len(floors_file(records))
        except OSError as error:
            fail(self._files.path / FLOORS_NAME, "written", error)
        else:
            with os.fdopen(descriptor, "r+b") as file:
                self._write_end(file, frames)
        self.record_count += len(records)

    def _write_end(self, file: BinaryIO, frames: bytes) -> None:
        try:
            start = file.seek(0, os.SEEK_END)
            try:
                file.write(frames)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # else loading cuts it off
                    os.ftruncate(file.fileno(), start)
                raise
        except OSError as error:
            fail(self._files.path / FLOORS_NAME, "written", error)
        self.bytes_on_disk = start + len(frames)

    def replace(self, records: Iterable[SignedRecord]) -> None:
        """Keep these records and no others, after compaction."""
        kept = list(records)
        data = floors_file(kept)
        self._record.floors_shrink(len(data))
        self._files.replace(FLOORS_NAME, data)
        self.record_count, self.bytes_on_disk = len(kept), len(data)
