"""The state directory: the files that a peer keeps over a restart. Shell.

    lock            taken by the running peer; holds its process id
    identity.key    "p2pstore identity 1" and the 32-byte ed25519 seed in hexadecimal; mode 0600
    state.json      {"format": 1, "incarnation": ..., "clock": ..., "floors_seen": {...}, "floors_horizon": {...},
                    "memory": ..., "floors_bytes": ..., "sum": ...} (`state_files`): floors by writer
                    (`gossip.floors.floor_stamps`); the id of the last segment in hexadecimal; bytes of floors.bin that
                    were on the disk; xxh3-64 of the rest
    addresses.json  {"format": 1, "addresses": [...]}: where other peers were last seen. A cache
    publishers.json {"format": 1, "publishers": [[namespace, name, peer id]], "forgotten": [[namespace, name, peer id,
                    clock]]}: the trusted publisher of each checkpoint name, the one used last at the end; checkpoints
                    that this peer does not show, up to a clock
    published/      a file for each version of a checkpoint that this peer publishes from a directory
                    (`checkpoint.peer.publishing`)
    floors.bin      signed floor records, appended, one checksum each (`floors_file`)
    invite          the invite that the peer joined by, without keys; mode 0600
    cluster.key     the keys of that invite, as a key file; mode 0600

Whole files are replaced atomically (temporary file, fsync, rename, fsync of the directory; `folder`). A format newer
than this program is refused, never overwritten, but for caches.

Damage is reported, in the log and in `damage`, and costs only the damaged part: single records of `floors.bin`, single
fields of `state.json`. A peer that lost floors withdraws its claim to have seen them: its neighbours send them again,
and objects that they may forbid are discarded (`gossip.floors.floor_sync`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from p2pstore.access.invite import Invite, KeptInvite, format_invite
from p2pstore.access.keyring import parse_peer_id
from p2pstore.addresses import split_address
from p2pstore.errors import ConfigError
from p2pstore.gossip.floors.floor_stamps import Stamps
from p2pstore.gossip.links.identity import SEED_BYTES, Identity
from p2pstore.gossip.records import PeerId, format_peer_id
from p2pstore.runtime.linux import take_lock
from p2pstore.state.folder import (
    FORMAT,
    IDENTITY_HEADER,
    SAFELY,
    Folder,
    StateFiles,
    fail,
    parse_identity,
    read_private,
    refuse_files_of_others,
    refuse_folder_of_another,
)
from p2pstore.state.state_files import FloorsFile, StateRecord

MAX_ADDRESSES: Final = 1024

_INVITE: Final = "invite"
_KEYS: Final = "cluster.key"
_INVITE_FILES: Final = (_INVITE, _KEYS)
_PUBLISHED: Final = "published"


class _Addresses(msgspec.Struct):
    format: int
    addresses: list[str]


class _Publishers(msgspec.Struct):
    format: int
    publishers: list[tuple[str, str, str]]
    forgotten: list[tuple[str, str, str, int]] = []


class StateDirectoryInUse(ConfigError):
    """Another process holds the state directory."""


class StateDirectory:
    """An open, locked state directory. Close it, or use it as a context manager.

    Methods raise `ConfigError` when a file is unreadable, malformed or of a newer format, and `OSError`
    with a text that names the file when the disk is full, read-only or failing.
    """

    def __init__(self, folder: Folder, lock: int) -> None:
        """Use `open`."""
        self.path = folder.path
        self._folder = folder
        self._lock = lock
        self._files = StateFiles(folder)
        self.damage = self._files.damage
        """Damage found at the start, and its consequences; without paths."""
        self.record = StateRecord(self._files)
        self.floors = FloorsFile(self._files, self.record)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> StateDirectory:
        """Create the directory (0700) if need be and lock it. Raises `ConfigError` when another process has."""
        directory = Path(path)
        with contextlib.ExitStack() as undo:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder = undo.enter_context(Folder(directory))
                refuse_folder_of_another(folder)
                lock = folder.open("lock", os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise ConfigError(
                    f"the state directory {directory} cannot be used: {error.strerror}; choose another "
                    "with --state-dir"
                ) from None
            undo.callback(os.close, lock)
            _take_lock(directory, lock)
            refuse_files_of_others(folder)
            opened = cls(folder, lock)
            undo.pop_all()
        return opened

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1
            self._folder.close()

    def __enter__(self) -> StateDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def identity(self) -> Identity:
        """The identity kept here; a new one is made the first time."""
        path = self.path / "identity.key"
        try:
            text = read_private(path, "is this peer's identity", self._folder)
        except FileNotFoundError:
            seed = secrets.token_bytes(SEED_BYTES)
            self._files.replace(path.name, f"{IDENTITY_HEADER}{FORMAT}\n{seed.hex()}\n".encode())
            return Identity(seed)
        return Identity(parse_identity(path, text))

    def save_invite(self, invite: Invite) -> list[bytes | None]:
        """Save the invite that the peer joins by; keys go to a file of their own, which may change later. Returns the
        former contents of these files, for `restore_invite`."""
        before = [self._files.content(name) for name in _INVITE_FILES]
        if invite.keys:
            self._files.replace(_KEYS, invite.key_file().encode())
        line = format_invite(KeptInvite(invite.cluster, invite.bootstrap, (), bool(invite.keys)))
        self._files.replace(_INVITE, f"{line}\n".encode())
        return before

    def restore_invite(self, before: list[bytes | None]) -> None:
        """Undo `save_invite`: no peer admitted this one by that invite."""
        for name, content in zip(_INVITE_FILES, before, strict=True):
            if content is not None:
                self._files.replace(name, content)
            else:
                self._folder.remove(name)

    def save_clock(
        self, clock: int, floors_seen: Stamps | None = None, floors_horizon: Stamps | None = None
    ) -> None:
        """Save the hybrid clock's reading, and up to where floors were seen and dropped (None: as before).

        Append the floors that were seen before, and remove those that were dropped only afterwards.
        """
        self.record.save_clock(clock, floors_seen, floors_horizon, self.floors.bytes_on_disk)

    def load_addresses(self) -> list[str]:
        """`HOST:PORT` of peers seen earlier, best first. A file that cannot be read is written anew later on."""
        try:
            book = self._files.load_json("addresses.json", _Addresses)
        except (OSError, ConfigError) as error:
            self._files.note(
                "addresses.json cannot be read: others are found by bootstrap addresses, and remembered again",
                error,
            )
            return []
        addresses = book.addresses[:MAX_ADDRESSES] if book is not None else []
        usable = [each for each in addresses if _is_address(each)]
        if len(usable) < len(addresses):
            self._files.note(f"{len(addresses) - len(usable)} lines of addresses.json are no addresses")
        return usable

    def save_addresses(self, addresses: Sequence[str]) -> None:
        """Keep the first 1,024."""
        book = _Addresses(FORMAT, list(addresses[:MAX_ADDRESSES]))
        self._files.replace("addresses.json", msgspec.json.encode(book) + b"\n")

    def load_publishers(
        self,
    ) -> tuple[list[tuple[str, str, PeerId]], list[tuple[str, str, PeerId, int]]]:
        """Namespace, name and trusted publisher of checkpoints; and of those that are not shown, with the clock."""
        path = self.path / "publishers.json"
        book = self._files.load_json(path.name, _Publishers) or _Publishers(FORMAT, [])
        source = str(path)
        return (
            [(space, name, parse_peer_id(each, source)) for space, name, each in book.publishers],
            [
                (space, name, parse_peer_id(each, source), clock)
                for space, name, each, clock in book.forgotten
            ],
        )

    def save_publishers(
        self,
        publishers: Sequence[tuple[str, str, PeerId]],
        forgotten: Sequence[tuple[str, str, PeerId, int]] = (),
    ) -> None:
        """Replace both lists."""
        book = _Publishers(
            FORMAT,
            [(namespace, name, format_peer_id(each)) for namespace, name, each in publishers],
            [(space, name, format_peer_id(each), clock) for space, name, each, clock in forgotten],
        )
        self._files.replace("publishers.json", msgspec.json.encode(book) + b"\n")

    def save_publication(self, name: str, body: bytes) -> None:
        """Save a version that is published here."""
        try:
            with self._folder.folder(_PUBLISHED, make=True) as folder:
                folder.replace(name, body)
        except OSError as error:
            fail(self.path / _PUBLISHED / name, "written", error)

    def drop_publication(self, name: str) -> None:
        """Remove a saved version, if there is one."""
        try:
            with self._folder.folder(_PUBLISHED) as folder:
                folder.remove(name)
        except FileNotFoundError:
            return
        except OSError as error:
            fail(self.path / _PUBLISHED / name, "removed", error)

    def load_publications(self) -> list[tuple[str, bytes]]:
        """Name and content of all that can be read, oldest first."""
        found = []
        try:
            with self._folder.folder(_PUBLISHED) as folder:
                for name in folder.names():
                    if name.endswith(".new"):
                        continue
                    try:
                        found.append((name, folder.read(name)))
                    except (OSError, ConfigError) as error:
                        self._files.note(
                            f"publication {name[:80]} cannot be read, and is left in place", error
                        )
        except FileNotFoundError:
            return []
        except OSError as error:
            self._files.note("publications cannot be read: publish them again", error)
        return found


def is_in_use(path: str | os.PathLike[str]) -> bool:
    """Whether a running peer holds the state directory; False for one that does not exist."""
    try:
        lock = os.open(Path(path) / "lock", os.O_RDWR | os.O_NOFOLLOW | SAFELY)
    except OSError:
        return False
    try:
        return not take_lock(lock)
    finally:
        os.close(lock)


def kept_invite(path: str | os.PathLike[str]) -> str | None:
    """The line of the invite that the peer of this state directory joined by. Raises `ConfigError`."""
    if not os.path.isdir(path):  # `StateDirectory.open` makes it, or says what is wrong
        return None
    try:
        return read_private(Path(path) / _INVITE, "is how this peer joined")
    except FileNotFoundError:
        return None


def kept_cluster_key(path: str | os.PathLike[str]) -> Path:
    """Where the keys of that invite are, if it came with any."""
    return Path(path) / _KEYS


# --- files -----------------------------------------------------------------------------------


def _take_lock(directory: Path, lock: int) -> None:
    try:
        if not take_lock(lock):
            owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StateDirectoryInUse(
                f"the state directory {directory} is in use by process {owner}: stop that peer, or give "
                "this one another directory with --state-dir"
            )
    except OSError as error:
        raise ConfigError(
            f"the state directory {directory} cannot be locked: {error.strerror}; choose one on a "
            "local disk with --state-dir"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        fail(directory / "lock", "written", error)


def _is_address(text: str) -> bool:
    try:
        split_address(text, "addresses.json")
    except ConfigError:
        return False
    return True
