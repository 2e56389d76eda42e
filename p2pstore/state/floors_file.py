"""The file `floors.bin` of the state directory: its bytes, and how it is appended to and replaced. Shell.

    header   "P2PSFLR\\0", format (u32)
    record   length of the body (u32), xxh3-64 of the body (u64), the body: a `SignedRecord` in msgpack

Records are appended in batches, with one `fsync` each. A damaged record costs itself only: the reader looks for the
next one at its end by length, then at all bytes that look like the beginning of a record. Bytes after the last whole
record are the torn tail of a crash, unless the writer had saved (`promised_bytes`) that they were on the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import xxhash

from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.records import MAX_RECORD_BYTES, SignedRecord
from p2pstore.state.folder import StateFiles, check_format, fail
from p2pstore.state.state_record import StateRecord
from p2pstore.wire import decode_body, encode_body

logger = logging.getLogger("p2pstore.state.state_directory")

NAME: Final = "floors.bin"
FORMAT: Final = 1
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
    """A whole file."""
    return _HEADER.pack(_MAGIC, FORMAT) + floor_frames(records)


def floor_frames(records: Iterable[SignedRecord]) -> bytes:
    """Records to append. Raises `ValueError` for one that is too large to be read again."""
    return b"".join(map(_frame, records))


def read_floors(data: bytes, promised_bytes: int = -1) -> FoundFloors:
    """The records in a file. `promised_bytes` were on the disk for certain when the writer last said so; -1 when it
    never did.

    Raises `NewerFormat`, and `ProtocolError` for what is not a file of floors.
    """
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
    elif version != FORMAT:
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
    """The open `floors.bin` of a state directory. Methods raise as those of `StateDirectory`."""

    def __init__(self, files: StateFiles, record: StateRecord) -> None:
        self._files = files
        self._record = record
        self.bytes_on_disk = max(0, record.promised_floors_bytes)
        self.record_count = 0
        """Records in the file, superseded ones among them."""

    def load(self) -> list[SignedRecord]:
        """All records in the order they were added. Damaged ones are left out, and this peer then withdraws its claim
        to have seen floors. A torn tail is cut off."""
        path = self._files.path / NAME
        try:
            data = self._files.folder.read(NAME)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            fail(path, "read", error)
        try:
            found = read_floors(data, self._record.promised_floors_bytes)
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
        """Note that some floors are lost: this peer claims to have seen none until its own are compared with the
        neighbours'."""
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
            descriptor = self._files.folder.open(NAME, os.O_RDWR)
        except FileNotFoundError:
            self._files.replace(NAME, floors_file(records))
            self.bytes_on_disk = len(floors_file(records))
        except OSError as error:
            fail(self._files.path / NAME, "written", error)
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
            fail(self._files.path / NAME, "written", error)
        self.bytes_on_disk = start + len(frames)

    def replace(self, records: Iterable[SignedRecord]) -> None:
        """Keep these records and no others, after compaction."""
        kept = list(records)
        data = floors_file(kept)
        self._record.floors_shrink(len(data))
        self._files.replace(NAME, data)
        self.record_count, self.bytes_on_disk = len(kept), len(data)
