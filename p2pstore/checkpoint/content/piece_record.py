"""Which pieces of a version are on the disk, in a file that outlives the process. Shell; blocking.

A bit a piece, set after the piece was written. The kernel keeps what a killed process wrote, so after a kill each bit
is true. After a crash of the machine it may not be: the file also says in which boot it was written, and what another
boot wrote is to be verified (`is_certain`) before the file says that it is of this one.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Final

from p2pstore.checkpoint.content.manifest import VERSION_BYTES
from p2pstore.checkpoint.content.piece_map import NO_PIECES, PieceMap, full_map, pack_map
from p2pstore.state.folder import Folder

MAGIC: Final = b"P2PSPCS\0"
FORMAT: Final = 1
_HEADER: Final = struct.Struct(f"<8sII{VERSION_BYTES}s36s")
"""Magic, format, pieces, version, boot id."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes:
    """36 bytes that are others after each start of the machine."""
    return BOOT_ID.read_bytes().strip()


class PieceRecord:
    """The record of one version; made when there is none, or one of something else. May be used by several threads."""

    def __init__(self, path: Path, version: bytes, count: int, boot: bytes) -> None:
        """Raises `OSError`, and `ConfigError` for what is not a regular file."""
        self._count = count
        self._lock = threading.Lock()
        with Folder(path.parent) as folder:
            self._descriptor = folder.open(path.name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            header = self._header = _HEADER.pack(MAGIC, FORMAT, count, version, boot)
            found = os.pread(self._descriptor, _HEADER.size + -(-count // 8), 0)
            self.have = NO_PIECES
            """The pieces that are there."""
            self.is_certain = found[: _HEADER.size] == header
            """Whether all of them were written since the machine was started; what was not is to be verified."""
            if found[: _HEADER.size - 36] == header[:-36]:
                self.have = int.from_bytes(found[_HEADER.size :], "little") & full_map(count)
            else:
                os.ftruncate(self._descriptor, 0)
                self.remove(NO_PIECES)
                self.now_certain()
        except BaseException:
            os.close(self._descriptor)
            raise

    def add(self, piece: int) -> None:
        """The piece is written."""
        with self._lock:
            self.have |= 1 << piece
            place = piece // 8
            byte = self.have >> 8 * place & 0xFF
            os.pwrite(self._descriptor, bytes([byte]), _HEADER.size + place)

    def now_certain(self) -> None:
        """All pieces that are left were verified, or there are none."""
        os.pwrite(self._descriptor, self._header, 0)
        self.is_certain = True

    def remove(self, pieces: PieceMap) -> None:
        """These pieces are not there after all."""
        with self._lock:
            self.have &= ~pieces
            os.pwrite(self._descriptor, pack_map(self.have, self._count), _HEADER.size)

    def close(self) -> None:
        """The file stays."""
        os.close(self._descriptor)
