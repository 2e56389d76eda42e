"""The state directory: what a peer keeps over a restart. Shell.

    lock            taken by the running peer; holds its process id
    identity.key    "p2pstore identity 1" and the 32-byte ed25519 seed in hexadecimal; mode 0600
    state.json      {"format": 1, "incarnation": ..., "clock": ..., "floors_seen": {...}, "floors_horizon": {...},
                    "memory": ..., "floors_bytes": ..., "sum": ...}: floors by writer (`gossip.floor_stamps`); the id of
                    the last segment in hexadecimal; how much of floors.bin was on the disk; xxh3-64 of the rest
    addresses.json  {"format": 1, "addresses": [...]}: where other peers were last seen. A cache
    publishers.json {"format": 1, "publishers": [[namespace, name, peer id]], "forgotten": [[namespace, name, peer id,
                    clock]]}: whom this peer trusts for the names of checkpoints, those used last coming last; which
                    ones it does not show, up to which clock
    published/      a file for each version of a checkpoint that this peer publishes from a directory
                    (`peer.checkpoints.publications`)
    floors.bin      signed floor records, appended, one checksum each (`floors_file`)
    invite          the invite that the peer joined by, without keys; mode 0600
    cluster.key     the keys of that invite, as a key file; mode 0600

Whole files are replaced atomically (temporary file, fsync, rename, fsync of the directory; `folder`). A format newer
than this program is refused, never overwritten, but for caches.

Damage is said, in the log and in `damage`, and costs what was damaged: of `floors.bin` single records, of `state.json`
single fields. A peer that lost floors does not claim any more that it has seen them: what it missed it hears from its
neighbours again, and objects that they may have forbidden are discarded (`gossip.floors.floor_sync`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NoReturn, TypeVar

import msgspec
import xxhash

from p2pstore.access.allowlist import parse_peer_id
from p2pstore.access.invite import Invite, KeptInvite, format_invite
from p2pstore.addresses import split_address
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.floors.floor_stamps import Stamps, stamps_as_text, stamps_from_text
from p2pstore.gossip.links.identity import SEED_BYTES, Identity
from p2pstore.gossip.members.member_table import MAX_INCARNATION
from p2pstore.gossip.members.membership import MAX_AHEAD_MS
from p2pstore.gossip.records import PeerId, SignedRecord, format_peer_id
from p2pstore.objects import newest_accepted_clock
from p2pstore.runtime.linux import is_shortage, shortage
from p2pstore.state.floors_file import NewerFormat, floor_frames, floors_file, read_floors
from p2pstore.state.folder import (
    SAFELY,
    Folder,
    refuse_files_of_others,
    refuse_folder_of_another,
)
from p2pstore.state.key_files import (
    FORMAT,
    IDENTITY_HEADER,
    check_format,
    parse_identity,
    read_private,
)

logger = logging.getLogger("p2pstore.state.state_directory")

T = TypeVar("T")

MAX_ADDRESSES: Final = 1024
MAX_DAMAGE: Final = 20

_INVITE: Final = "invite"
_KEYS: Final = "cluster.key"
_INVITE_FILES: Final = (_INVITE, _KEYS)
_FLOORS: Final = "floors.bin"
_PUBLISHED: Final = "published"
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


class _Addresses(msgspec.Struct):
    format: int
    addresses: list[str]


class _Publishers(msgspec.Struct):
    format: int
    publishers: list[tuple[str, str, str]]
    forgotten: list[tuple[str, str, str, int]] = []


class _FormatOnly(msgspec.Struct):
    format: int


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
        self.damage: list[str] = []
        """Damage found at the start, and its consequences; without paths."""
        self._state = self._load_state()
        self._floors_bytes = max(0, self._state.floors_bytes)
        """Of `floors.bin`, that are on the disk."""
        self.floors_in_file = 0
        """Records in `floors.bin`, superseded ones among them."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> StateDirectory:
        """Create the directory (0700) if need be and lock it. Raises `ConfigError` when another process has."""
        directory = Path(path)
        with contextlib.ExitStack() as undo:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder = undo.enter_context(Folder(directory))
                refuse_folder_of_another(folder, "state_dir")
                lock = folder.open("lock", os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise ConfigError(
                    f"the state directory {directory} cannot be used: {error.strerror}; choose another "
                    "with --state-dir"
                ) from None
            undo.callback(os.close, lock)
            _take_lock(directory, lock)
            refuse_files_of_others(folder, "state_dir")
            opened = cls(folder, lock)
            undo.pop_all()
        return opened

    def close(self) -> None:
        """Let the next process have it."""
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1
            self._folder.close()

    def __enter__(self) -> StateDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- identity ----------------------------------------------------------------------------

    def identity(self) -> Identity:
        """The identity kept here; a new one is made the first time."""
        path = self.path / "identity.key"
        try:
            text = read_private(path, "is this peer's identity", self._folder)
        except FileNotFoundError:
            seed = secrets.token_bytes(SEED_BYTES)
            self._replace(path.name, f"{IDENTITY_HEADER}{FORMAT}\n{seed.hex()}\n".encode())
            return Identity(seed)
        return Identity(parse_identity(path, text))

    # --- invite ------------------------------------------------------------------------------

    def save_invite(self, invite: Invite) -> list[bytes | None]:
        """Keep what the peer joins by; keys go to a file of their own, which may change later. Returns what these files
        held before, for `restore_invite`."""
        before = [self._content(name) for name in _INVITE_FILES]
        if invite.keys:
            self._replace(_KEYS, invite.key_file().encode())
        line = format_invite(KeptInvite(invite.cluster, invite.bootstrap, (), bool(invite.keys)))
        self._replace(_INVITE, f"{line}\n".encode())
        return before

    def restore_invite(self, before: list[bytes | None]) -> None:
        """Undo `save_invite`: no peer admitted this one by that invite."""
        for name, content in zip(_INVITE_FILES, before, strict=True):
            if content is not None:
                self._replace(name, content)
            else:
                self._folder.remove(name)

    # --- incarnation and clock ---------------------------------------------------------------

    @property
    def clock(self) -> int:
        """The hybrid clock's last saved reading."""
        return self._state.clock

    def next_incarnation(self, now_unix_ms: int, segment_id: bytes = b"") -> int:
        """An incarnation above all earlier ones, saved before it is returned, with the id of its memory segment."""
        incarnation = max(self._state.incarnation + 1, now_unix_ms)
        self._write_state(
            msgspec.structs.replace(self._state, incarnation=incarnation, memory=segment_id.hex())
        )
        return self._state.incarnation

    @property
    def last_segment_id(self) -> bytes:
        """Segment id of the last incarnation; empty when unknown."""
        try:
            return bytes.fromhex(self._state.memory)
        except ValueError:
            return b""

    def save_incarnation(self, incarnation: int) -> None:
        """Keep an incarnation that was raised while running, to refute a suspicion."""
        if incarnation > self._state.incarnation:
            self._save_incarnation(incarnation=incarnation)

    @property
    def floors_seen(self) -> Stamps:
        """Up to where floors had been seen when this was last saved."""
        return stamps_from_text(self._state.floors_seen)

    @property
    def floors_horizon(self) -> Stamps:
        """Up to where floors were dropped when this was last saved."""
        return stamps_from_text(self._state.floors_horizon)

    def save_clock(
        self, clock: int, floors_seen: Stamps | None = None, floors_horizon: Stamps | None = None
    ) -> None:
        """Keep the hybrid clock's reading, and up to where floors were seen and dropped (None: as before).

        The floors that were seen must be in `floors.bin` before, and those that were dropped may be taken
        out of it only afterwards.
        """
        changed = msgspec.structs.replace(self._state, clock=min(clock, _MAX_CLOCK))
        if floors_seen is not None:
            changed.floors_seen = stamps_as_text(floors_seen)
        if floors_horizon is not None:
            changed.floors_horizon = stamps_as_text(floors_horizon)
        changed.floors_bytes = self._floors_bytes
        if changed != self._state:
            self._write_state(changed)

    def _load_state(self) -> _State:
        path = self.path / "state.json"
        found = self._load_json("state.json", dict)
        if found is None:
            return _State(FORMAT, 0, 0)
        told = found.pop("sum", "")
        certain = told == _sum_of(found)
        if (told or "floors_bytes" in found) and not certain:
            self._note("state.json was changed or damaged: what it says of floors is not believed")
            found |= {"floors_seen": {}, "floors_horizon": {}, "floors_bytes": -1}
        now = time.time()
        now_ms = int(now * 1000)
        if not _is_stamp(found.get("incarnation"), MAX_INCARNATION - 1):
            self._note("state.json has no usable incarnation: that of the clock is taken")
            found["incarnation"] = 0
        elif (
            # One that was used is kept, though the clock was wrong: others know this peer by it.
            not (certain and found["incarnation"] <= MAX_INCARNATION // 2)
            and found["incarnation"] > now_ms + MAX_AHEAD_MS
            and now > _PLAUSIBLE_UNIX_SECONDS
        ):
            self._note(
                "state.json has an incarnation of the far future: that of the clock is taken"
            )
            found["incarnation"] = 0
        if not _is_stamp(found.get("clock"), _MAX_CLOCK):
            self._note(
                "state.json has no usable clock: it is made anew from what floors were seen of"
            )
            seen = found.get("floors_seen")
            stamps = seen.values() if isinstance(seen, dict) else ()
            found["clock"] = max((s for s in stamps if _is_stamp(s, _MAX_CLOCK)), default=0)
        limit = newest_accepted_clock(now) if now > _PLAUSIBLE_UNIX_SECONDS else _MAX_CLOCK
        for name in ("floors_seen", "floors_horizon"):
            # Of a clock that was fast: whoever has seen all up to a stamp has seen all before it.
            lower = certain and name == "floors_seen"
            found[name] = self._plausible_stamps(name, found.get(name, {}), limit, lower=lower)
        if not isinstance(found.get("memory", ""), str):
            found["memory"] = ""
        if not _is_stamp(found.get("floors_bytes", 0), _MAX_CLOCK):
            found["floors_bytes"] = -1
        try:
            return msgspec.convert(found, _State)
        except msgspec.ValidationError as error:
            raise _damaged(path, error) from None

    def _plausible_stamps(
        self, name: str, stamps: object, limit: int, *, lower: bool
    ) -> dict[str, int]:
        """A table without stamps above the limit, which nobody can have written by a clock that was right; or with
        these lowered. A writer that is left out stands at 0: less is believed."""
        try:
            known = stamps_from_text(msgspec.convert(stamps, dict[str, int]))
        except (ValueError, msgspec.ValidationError):
            self._note(f"state.json has no usable {name}: nothing of it is believed")
            return {}
        kept = {member: stamp for member, stamp in known.items() if stamp <= limit}
        if len(kept) < len(known):
            self._note(
                f"state.json has {name} of the future: {len(known) - len(kept)} of {len(known)} are not believed. Was "
                "this machine's clock wrong?"
            )
        if lower:
            kept = {member: min(stamp, limit) for member, stamp in known.items()}
        return stamps_as_text(kept)

    def _save_incarnation(self, incarnation: int) -> None:
        self._write_state(msgspec.structs.replace(self._state, incarnation=incarnation))

    def _write_state(self, state: _State) -> None:
        state.sum = _sum_of(msgspec.to_builtins(state))
        self._replace("state.json", msgspec.json.encode(state) + b"\n")
        self._state = state

    # --- addresses ---------------------------------------------------------------------------

    def load_addresses(self) -> list[str]:
        """`HOST:PORT` of peers seen earlier, best first. A file that cannot be read is written anew later on."""
        try:
            book = self._load_json("addresses.json", _Addresses)
        except (OSError, ConfigError) as error:
            self._note(
                "addresses.json cannot be read: others are found by bootstrap addresses, and remembered again",
                error,
            )
            return []
        addresses = book.addresses[:MAX_ADDRESSES] if book is not None else []
        usable = [each for each in addresses if _is_address(each)]
        if len(usable) < len(addresses):
            self._note(f"{len(addresses) - len(usable)} lines of addresses.json are no addresses")
        return usable

    def save_addresses(self, addresses: Sequence[str]) -> None:
        """Keep the first 1,024."""
        book = _Addresses(FORMAT, list(addresses[:MAX_ADDRESSES]))
        self._replace("addresses.json", msgspec.json.encode(book) + b"\n")

    # --- checkpoints -------------------------------------------------------------------------

    def load_publishers(self) -> list[tuple[str, str, PeerId]]:
        """Namespace, name of a checkpoint, and who is trusted for it."""
        path = self.path / "publishers.json"
        book = self._load_json(path.name, _Publishers)
        if book is None:
            return []
        return [
            (namespace, name, parse_peer_id(peer_id, str(path)))
            for namespace, name, peer_id in book.publishers
        ]

    def load_forgotten(self) -> list[tuple[str, str, PeerId, int]]:
        """Namespace, name, publisher and clock of checkpoints that are not shown."""
        path = self.path / "publishers.json"
        book = self._load_json(path.name, _Publishers)
        if book is None:
            return []
        return [
            (namespace, name, parse_peer_id(peer_id, str(path)), clock)
            for namespace, name, peer_id, clock in book.forgotten
        ]

    def save_publishers(
        self,
        publishers: Sequence[tuple[str, str, PeerId]],
        forgotten: Sequence[tuple[str, str, PeerId, int]] = (),
    ) -> None:
        """Keep these instead."""
        book = _Publishers(
            FORMAT,
            [(namespace, name, format_peer_id(each)) for namespace, name, each in publishers],
            [(space, name, format_peer_id(each), clock) for space, name, each, clock in forgotten],
        )
        self._replace("publishers.json", msgspec.json.encode(book) + b"\n")

    def save_publication(self, name: str, body: bytes) -> None:
        """Keep what is known of a version that is published here."""
        try:
            with self._folder.folder(_PUBLISHED, make=True) as folder:
                folder.replace(name, body)
        except OSError as error:
            _fail(self.path / _PUBLISHED / name, "written", error)

    def drop_publication(self, name: str) -> None:
        """Keep it no more."""
        try:
            with self._folder.folder(_PUBLISHED) as folder:
                folder.remove(name)
        except FileNotFoundError:
            return
        except OSError as error:
            _fail(self.path / _PUBLISHED / name, "removed", error)

    def load_publications(self) -> list[tuple[str, bytes]]:
        """All that are kept and can be read, by name, the oldest first."""
        found = []
        try:
            with self._folder.folder(_PUBLISHED) as folder:
                for name in folder.names():
                    if name.endswith(".new"):
                        continue
                    try:
                        found.append((name, folder.read(name)))
                    except (OSError, ConfigError) as error:
                        self._note(
                            f"publication {name[:80]} cannot be read, and is left alone", error
                        )
        except FileNotFoundError:
            return []
        except OSError as error:
            self._note("publications cannot be read: publish them again", error)
        return found

    # --- floors ------------------------------------------------------------------------------

    def load_floors(self) -> list[SignedRecord]:
        """All records in the order they were added. What is damaged is left out, and then this peer does not claim any
        more to have seen any floor; a torn tail is cut off."""
        path = self.path / _FLOORS
        try:
            data = self._folder.read(_FLOORS)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            _fail(path, "read", error)
        try:
            found = read_floors(data, self._state.floors_bytes)
        except NewerFormat as error:
            check_format(path, error.version)
            raise ConfigError(f"{path}: {error}") from None
        except ProtocolError:
            raise ConfigError(
                f"{path} is not a file of floors: move it away and restart the peer"
            ) from None
        if found.damaged_bytes:
            self.floors_lost(
                f"floors.bin has {found.damaged_bytes:,} damaged or missing bytes: {len(found.records):,} records are "
                "left"
            )
        if found.torn_bytes:
            logger.warning("%s: cut off %d bytes of a torn record", path, found.torn_bytes)
        if found.damaged_bytes or found.torn_bytes or not data:
            self.replace_floors(found.records)
        self.floors_in_file = len(found.records)
        return found.records

    def floors_lost(self, what: str) -> None:
        """Some floors are gone for good: until those that are left are compared with the neighbours', this peer has
        seen none."""
        self._note(
            f"{what}. What was lost is asked of other peers; objects that it forbade stay away meanwhile"
        )
        self._write_state(msgspec.structs.replace(self._state, floors_seen={}, floors_bytes=0))

    def append_floors(self, records: Sequence[SignedRecord]) -> None:
        """Add records; they are on the disk when this returns, or none of them is when it raises."""
        if not records:
            return
        frames = floor_frames(records)
        try:
            descriptor = self._folder.open(_FLOORS, os.O_RDWR)
        except FileNotFoundError:
            self._replace(_FLOORS, floors_file(records))
            self._floors_bytes = len(floors_file(records))
        except OSError as error:
            _fail(self.path / _FLOORS, "written", error)
        else:
            with os.fdopen(descriptor, "r+b") as file:
                self._append(file, frames)
        self.floors_in_file += len(records)

    def _append(self, file: BinaryIO, frames: bytes) -> None:
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
            _fail(self.path / _FLOORS, "written", error)
        self._floors_bytes = start + len(frames)

    def replace_floors(self, records: Iterable[SignedRecord]) -> None:
        """Keep these records and no others: what compaction left."""
        kept = list(records)
        data = floors_file(kept)
        if self._state.floors_bytes > len(data):  # else a crash after this would look like damage
            self._write_state(msgspec.structs.replace(self._state, floors_bytes=0))
        self._replace(_FLOORS, data)
        self.floors_in_file, self._floors_bytes = len(kept), len(data)

    # --- files -------------------------------------------------------------------------------

    def _note(self, what: str, error: Exception | None = None) -> None:
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

    def _replace(self, name: str, data: bytes) -> None:
        """Make `data` the file's content, or leave the file as it was."""
        try:
            self._folder.replace(name, data)
        except OSError as error:
            _fail(self.path / name, "written", error)

    def _content(self, name: str) -> bytes | None:
        try:
            return self._folder.read(name)
        except (OSError, ConfigError):
            return None

    def _load_json(self, name: str, kind: type[T]) -> T | None:
        path = self.path / name
        try:
            data = self._folder.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            _fail(path, "read", error)
        try:
            check_format(path, msgspec.json.decode(data, type=_FormatOnly).format)
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(path, error) from None


def is_in_use(path: str | os.PathLike[str]) -> bool:
    """Whether a running peer holds the state directory; False for one that does not exist."""
    try:
        lock = os.open(Path(path) / "lock", os.O_RDWR | os.O_NOFOLLOW | SAFELY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


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
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise StateDirectoryInUse(
            f"the state directory {directory} is in use by process {owner}: stop that peer, or give "
            "this one another directory with --state-dir"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the state directory {directory} cannot be locked: {error.strerror}; choose one on a "
            "local disk with --state-dir"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        _fail(directory / "lock", "written", error)


def _fail(path: Path, what: str, error: OSError) -> NoReturn:
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


def _is_stamp(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _is_address(text: str) -> bool:
    try:
        split_address(text, "addresses.json")
    except ConfigError:
        return False
    return True


def _sum_of(state: dict[str, Any]) -> str:
    """Of the fields of a state file, however they are spelled."""
    fields = {name: value for name, value in state.items() if name != "sum"}
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(fields, order="deterministic"))


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({error}): move it away; the peer then starts without what it held"
    )
