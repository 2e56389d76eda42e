"""Access to the files of a state directory: whole files in JSON, and damage that is found in them. Shell."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import msgspec

from p2pstore.errors import ConfigError
from p2pstore.runtime.linux import is_shortage, shortage
from p2pstore.state.folder import Folder
from p2pstore.state.key_files import check_format

logger = logging.getLogger("p2pstore.state.state_directory")

T = TypeVar("T")

MAX_DAMAGE: Final = 20


class _FormatOnly(msgspec.Struct):
    format: int


class StateFiles:
    """The files of an open state directory. Methods raise `OSError` and `ConfigError` as `StateDirectory` does."""

    def __init__(self, folder: Folder) -> None:
        self.path = folder.path
        self.folder = folder
        self.damage: list[str] = []
        """Damage found so far, and its consequences; without paths; at most 20 texts."""

    def note(self, what: str, error: Exception | None = None) -> None:
        """Note damage in the log and for this peer's problems."""
        logger.error(
            "the state directory %s is damaged: %s%s",
            self.path,
            what,
            f" ({error})" if error is not None else "",
            extra={"event": "state_damaged"},
        )
        if len(self.damage) < MAX_DAMAGE:
            self.damage.append(what)

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` the file's content, or leave the file as it was."""
        try:
            self.folder.replace(name, data)
        except OSError as error:
            fail(self.path / name, "written", error)

    def content(self, name: str) -> bytes | None:
        """The file's bytes; None when it cannot be read."""
        try:
            return self.folder.read(name)
        except (OSError, ConfigError):
            return None

    def load_json(self, name: str, kind: type[T]) -> T | None:
        """The file's content decoded; None when there is no file."""
        path = self.path / name
        try:
            data = self.folder.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            fail(path, "read", error)
        try:
            check_format(path, msgspec.json.decode(data, type=_FormatOnly).format)
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise damaged(path, error) from None


def fail(path: Path, what: str, error: OSError) -> NoReturn:
    """Raise an `OSError` that says what could not be done and what to do."""
    advice = {
        errno.ENOSPC: "free some space on that disk",
        errno.EDQUOT: "free some space, or raise this user's quota",
        errno.EROFS: "the disk is mounted read-only",
        errno.EACCES: "give this user access, or choose another --state-dir",
    }.get(error.errno or 0, shortage(error) if is_shortage(error) else "check that disk")
    raise OSError(
        error.errno, f"{path} cannot be {what}: {os.strerror(error.errno or 0)}; {advice}"
    ) from None


def damaged(path: Path, error: Exception) -> ConfigError:
    """The error of a file that cannot be decoded."""
    return ConfigError(
        f"{path} is damaged ({error}): move it away; the peer then starts without what it held"
    )
