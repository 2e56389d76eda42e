"""The state directory: what a peer keeps over a restart. Shell.

    lock            taken by the running peer; holds its process id
    identity.key    "p2pstore identity 1" and the 32-byte ed25519 seed in hexadecimal; mode 0600
    state.json      {"format": 1, "incarnation": ..., "clock": ..., "floors_seen": {...}, "floors_horizon": {...},
                    "memory": ...}: floors by writer (`gossip.floor_stamps`); the id of the last segment in hexadecimal
    addresses.json  {"format": 1, "addresses": [...]}: where other peers were last seen
    publishers.json {"format": 1, "publishers": [[namespace, name, peer id]], "forgotten": [[namespace, name, peer id,
                    clock]]}: whom this peer trusts for the names of checkpoints, those used last coming last; which
                    ones it does not show, up to which clock
    published/      a file for each version of a checkpoint that this peer publishes from a directory
                    (`peer.checkpoints.publications`)
    floors.bin      signed floor records, appended, one checksum each
    invite          the invite that the peer joined by, without keys; mode 0600
    cluster.key     the keys of that invite, as a key file; mode 0600

Whole files are replaced atomically (temporary file, fsync, rename, fsync of the directory). A torn tail of
`floors.bin`, left by a crash, is cut off. A format newer than this program is refused, never overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec
import xxhash

from p2pstore.allowlist import parse_peer_id
from p2pstore.errors import ConfigError, ProtocolError
from p2pstore.gossip.floors.floor_stamps import Stamps, stamps_as_text, stamps_from_text
from p2pstore.gossip.links.identity import SEED_BYTES, Identity
from p2pstore.gossip.members.membership import MAX_INCARNATION
from p2pstore.gossip.records import MAX_RECORD_BYTES, PeerId, SignedRecord, format_peer_id
from p2pstore.invite import Invite, KeptInvite, format_invite
from p2pstore.keyring import KeyRing, parse_cluster_keys
from p2pstore.regular_file import open_regular_file
from p2pstore.wire import decode_body, encode_body

logger = logging.getLogger("p2pstore.statedir")

T = TypeVar("T", bound=msgspec.Struct)

FORMAT: Final = 1
MAX_ADDRESSES: Final = 1024

_IDENTITY_HEADER: Final = "p2pstore identity "
_FLOORS_HEADER: Final = struct.Struct("<8sI")
_FLOORS_MAGIC: Final = b"P2PSFLR\0"
_FRAME: Final = struct.Struct("<IQ")  # length of the record, its xxh3-64
_MAX_FRAME_BYTES: Final = MAX_RECORD_BYTES + 256
_MAX_KEY_FILE_BYTES: Final = 64 * 1024
_MAX_CLOCK: Final = (1 << 63) - 1
"""Of a reading that was kept: far in the future, with room for all that follow in the 64 bits of the format."""


_MAX_SAVED_INCARNATION: Final = 1 << 48
"""Unix milliseconds of the year 10,889. Far below what other peers take for nonsense, with room to refute."""


class _State(msgspec.Struct):
    format: int
    incarnation: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INCARNATION)]
    clock: Annotated[int, msgspec.Meta(ge=0, le=_MAX_CLOCK)]
    floors_seen: dict[str, int] = {}
    floors_horizon: dict[str, int] = {}
    memory: str = ""


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

    def __init__(self, path: Path, lock: int) -> None:
        """Use `open`."""
        self.path = path
        self._lock = lock
        self._state = self._load_state()
        self.floors_in_file = 0
        """Records in `floors.bin`, superseded ones among them."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> StateDirectory:
        """Create the directory (0700) if need be and lock it. Raises `ConfigError` when another process has."""
        directory = Path(path)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the state directory {directory} cannot be used: {error.strerror}; choose another "
                "with --state-dir"
            ) from None
        try:
            _take_lock(directory, lock)
            return cls(directory, lock)
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Let the next process have it."""
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> StateDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- identity ----------------------------------------------------------------------------

    def identity(self) -> Identity:
        """The identity kept here; a new one is made the first time."""
        path = self.path / "identity.key"
        try:
            text = _read_private(path, "is this peer's identity", _MAX_KEY_FILE_BYTES)
        except FileNotFoundError:
            seed = secrets.token_bytes(SEED_BYTES)
            _replace(path, f"{_IDENTITY_HEADER}{FORMAT}\n{seed.hex()}\n".encode())
            return Identity(seed)
        return Identity(_parse_identity(path, text))

    # --- invite ------------------------------------------------------------------------------

    def save_invite(self, invite: Invite) -> None:
        """Keep what the peer joined by; keys go to a file of their own, which may change later."""
        if invite.keys:
            _replace(kept_cluster_key(self.path), invite.key_file().encode())
        line = format_invite(KeptInvite(invite.cluster, invite.bootstrap, (), bool(invite.keys)))
        _replace(self.path / "invite", f"{line}\n".encode())

    # --- incarnation and clock ---------------------------------------------------------------

    @property
    def clock(self) -> int:
        """The hybrid clock's last saved reading."""
        return self._state.clock

    def next_incarnation(self, now_unix_ms: int, segment_id: bytes = b"") -> int:
        """An incarnation above all earlier ones, saved before it is returned, with the id of its memory segment."""
        saved = self._state.incarnation
        if saved > _MAX_SAVED_INCARNATION:
            logger.warning(
                "%s: the saved incarnation (%d) is none that a clock gives: it is made anew",
                *(self.path / "state.json", saved),
            )
            saved = 0
        incarnation = max(saved + 1, now_unix_ms)
        self._write_state(
            msgspec.structs.replace(self._state, incarnation=incarnation, memory=segment_id.hex())
        )
        return self._state.incarnation

    @property
    def last_segment_id(self) -> bytes:
        """What the last incarnation had as its memory segment; empty when it is not known."""
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
        if changed != self._state:
            self._write_state(changed)

    def _load_state(self) -> _State:
        path = self.path / "state.json"
        state = _load_json(path, _State, _mend_clock)
        if state is None:
            return _State(FORMAT, 0, 0)
        try:
            stamps_from_text(state.floors_seen | state.floors_horizon)
        except ValueError as error:
            raise _damaged(path, error) from None
        return state

    def _save_incarnation(self, incarnation: int) -> None:
        self._write_state(msgspec.structs.replace(self._state, incarnation=incarnation))

    def _write_state(self, state: _State) -> None:
        _replace(self.path / "state.json", msgspec.json.encode(state) + b"\n")
        self._state = state

    # --- addresses ---------------------------------------------------------------------------

    def load_addresses(self) -> list[str]:
        """`HOST:PORT` of peers seen earlier, best first."""
        book = _load_json(self.path / "addresses.json", _Addresses)
        return book.addresses[:MAX_ADDRESSES] if book is not None else []

    def save_addresses(self, addresses: Sequence[str]) -> None:
        """Keep the first 1,024."""
        book = _Addresses(FORMAT, list(addresses[:MAX_ADDRESSES]))
        _replace(self.path / "addresses.json", msgspec.json.encode(book) + b"\n")

    # --- checkpoints -------------------------------------------------------------------------

    def load_publishers(self) -> list[tuple[str, str, PeerId]]:
        """Namespace, name of a checkpoint, and who is trusted for it."""
        path = self.path / "publishers.json"
        book = _load_json(path, _Publishers)
        if book is None:
            return []
        return [
            (namespace, name, parse_peer_id(peer_id, str(path)))
            for namespace, name, peer_id in book.publishers
        ]

    def load_forgotten(self) -> list[tuple[str, str, PeerId, int]]:
        """Namespace, name, publisher and clock of checkpoints that are not shown."""
        path = self.path / "publishers.json"
        book = _load_json(path, _Publishers)
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
        _replace(self.path / "publishers.json", msgspec.json.encode(book) + b"\n")

    def save_publication(self, name: str, body: bytes) -> None:
        """Keep what is known of a version that is published here."""
        folder = self.path / "published"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            _fail(folder, "made", error)
        _replace(folder / name, body)

    def drop_publication(self, name: str) -> None:
        """Keep it no more."""
        path = self.path / "published" / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _fail(path, "removed", error)

    def load_publications(self) -> list[tuple[str, bytes]]:
        """All that are kept, by name, the oldest first."""
        folder = self.path / "published"
        found = [path for path in folder.glob("*") if path.suffix != ".new"]
        found.sort(key=lambda path: path.stat().st_mtime_ns)
        try:
            return [(path.name, path.read_bytes()) for path in found]
        except OSError as error:
            _fail(folder, "read", error)

    # --- floors ------------------------------------------------------------------------------

    def load_floors(self) -> list[SignedRecord]:
        """All records in the order they were added. A torn tail is cut off."""
        path = self.path / "floors.bin"
        try:
            with open_regular_file(path) as file:
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            _fail(path, "read", error)
        if len(data) < _FLOORS_HEADER.size:
            _replace(path, _floors_header())  # torn in its very first write
            return []
        magic, version = _FLOORS_HEADER.unpack_from(data)
        if magic != _FLOORS_MAGIC:
            raise ConfigError(f"{path} is not a file of floors: move it away and restart the peer")
        _check_format(path, version)
        records: list[SignedRecord] = []
        end = _FLOORS_HEADER.size
        for record, record_end in _frames(data):
            records.append(record)
            end = record_end
        if end < len(data):
            logger.warning("%s: cut off %d bytes of a torn record", path, len(data) - end)
            _truncate(path, end)
        self.floors_in_file = len(records)
        return records

    def append_floors(self, records: Sequence[SignedRecord]) -> None:
        """Add records; they are on the disk when this returns, or none of them is when it raises."""
        if not records:
            return
        path = self.path / "floors.bin"
        if not path.exists():
            _replace(path, _floors_header())
        try:
            with path.open("r+b") as file:
                start = file.seek(0, os.SEEK_END)
                try:
                    file.write(b"".join(map(_frame, records)))
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    with contextlib.suppress(OSError):  # else loading cuts it off
                        os.ftruncate(file.fileno(), start)
                    raise
        except OSError as error:
            _fail(path, "written", error)
        self.floors_in_file += len(records)

    def replace_floors(self, records: Sequence[SignedRecord]) -> None:
        """Keep these records and no others: what compaction left."""
        _replace(self.path / "floors.bin", _floors_header() + b"".join(map(_frame, records)))
        self.floors_in_file = len(records)


def is_in_use(path: str | os.PathLike[str]) -> bool:
    """Whether a running peer holds the state directory; False for one that does not exist."""
    try:
        lock = os.open(Path(path) / "lock", os.O_RDWR | os.O_CLOEXEC)
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
    try:
        return _read_private(Path(path) / "invite", "is how this peer joined", _MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        return None


def kept_cluster_key(path: str | os.PathLike[str]) -> Path:
    """Where the keys of that invite are, if it came with any."""
    return Path(path) / "cluster.key"


def ephemeral() -> Identity:
    """A new identity that is kept nowhere: for a peer without a state directory."""
    return Identity(secrets.token_bytes(SEED_BYTES))


def load_cluster_key_file(path: str | os.PathLike[str]) -> KeyRing:
    """The cluster's keys: one in hexadecimal a line, the first one proves, `#` comments.

    Raises `ConfigError` when the file cannot be read, may be read by others, or holds something else.
    """
    where = Path(path)
    try:
        text = _read_private(where, "is the cluster's key", _MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"the cluster key file {where} does not exist; `mooncake-p2p keygen {where}` makes one"
        ) from None
    return parse_cluster_keys(text, str(where))


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
    }.get(error.errno or 0, "check that disk")
    raise OSError(
        error.errno, f"{path} cannot be {what}: {os.strerror(error.errno or 0)}; {advice}"
    ) from None


def _replace(path: Path, data: bytes) -> None:
    """Make `data` the file's content, or leave the file as it was."""
    temporary = path.with_name(path.name + ".new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _fail(path, "written", error)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _truncate(path: Path, length: int) -> None:
    try:
        os.truncate(path, length)
    except OSError as error:
        _fail(path, "repaired", error)


def _read_private(path: Path, what: str, limit_bytes: int) -> str:
    """The text of a file with a secret in it. Raises `FileNotFoundError`, and `ConfigError` for the rest."""
    try:
        with open_regular_file(path) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path} {what}, but others may read it (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"run `chmod 600 {path}`; if it was exposed, make a new one"
                )
            data = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > limit_bytes:
        raise ConfigError(f"{path} is too long to be a key file")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


def _parse_identity(path: Path, text: str) -> bytes:
    header, _, rest = text.partition("\n")
    version = header.removeprefix(_IDENTITY_HEADER)
    if header.startswith(_IDENTITY_HEADER) and version.isdigit():
        _check_format(path, int(version))
        with contextlib.suppress(ValueError):
            seed = bytes.fromhex(rest.strip())
            if len(seed) == SEED_BYTES:
                return seed
    raise ConfigError(
        f'{path} is not an identity ("{_IDENTITY_HEADER}{FORMAT}" and 64 hexadecimal digits): restore '
        "it from a backup, or move it away and this peer starts as a new one"
    )


def _check_format(path: Path, version: int) -> None:
    if version > FORMAT:
        raise ConfigError(
            f"{path} has format {version}, this program knows up to {FORMAT}: upgrade it, or use "
            "another --state-dir"
        )
    if version < 1:
        raise ConfigError(f"{path} has format {version}, which never existed: move it away")


def _mend_clock(path: Path, document: dict[str, Any]) -> None:
    """A clock that was edited keeps no peer from starting: what floors were seen of says as much."""
    clock = document.get("clock")
    if type(clock) is int and 0 <= clock <= _MAX_CLOCK:
        return
    seen = document.get("floors_seen")
    stamps = seen.values() if isinstance(seen, dict) else ()
    document["clock"] = max(
        (each for each in stamps if type(each) is int and 0 <= each <= _MAX_CLOCK), default=0
    )
    logger.warning(
        "%s: the saved clock (%.40r) is none that this program writes: it is made anew", path, clock
    )


def _load_json(
    path: Path,
    kind: type[T],
    mend: Callable[[Path, dict[str, Any]], None] | None = None,
) -> T | None:
    try:
        with open_regular_file(path) as file:
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _fail(path, "read", error)
    try:
        _check_format(path, msgspec.json.decode(data, type=_FormatOnly).format)
        if mend is None:
            return msgspec.json.decode(data, type=kind)
        document = msgspec.json.decode(data, type=dict[str, Any])
        mend(path, document)
        return msgspec.convert(document, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({error}): move it away; the peer then starts without what it held"
    )


def _floors_header() -> bytes:
    return _FLOORS_HEADER.pack(_FLOORS_MAGIC, FORMAT)


def _frame(record: SignedRecord) -> bytes:
    body = encode_body(record)
    if len(body) > _MAX_FRAME_BYTES:
        raise ValueError(f"a record of {len(body):,} bytes; at most {_MAX_FRAME_BYTES:,} are kept")
    return _FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _frames(data: bytes) -> Iterator[tuple[SignedRecord, int]]:
    """Each whole record and where it ends; stops before the first one that is not."""
    position = _FLOORS_HEADER.size
    while len(data) - position >= _FRAME.size:
        length, checksum = _FRAME.unpack_from(data, position)
        start = position + _FRAME.size
        body = data[start : start + length]
        if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
            return
        try:
            record = decode_body(SignedRecord, body)
        except ProtocolError:
            return
        position = start + length
        yield record, position
