"""The facts of an object: its key's digest, its version, its chunk sums and their root.

Everything here is part of formats that peers exchange; docs/formats.md lists them, and golden bytes
(`tests/unit/test_golden_bytes_*.py`) pin them.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar, cast

import xxhash

from p2pstore.errors import CheckpointRefused, ConfigError, ObjectTooLarge

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

CHUNK_BYTES: Final = MIB
"""Unit of checksums: one xxh3-64 per chunk, the last chunk may be shorter."""

PART_BYTES: Final = 64 * MIB
"""Unit of network requests and of SSD records: a longer object moves as several parts."""

SIZE_UNIT_BYTES: Final = 4 * KIB
"""Unit of lengths in location records."""

MAX_OBJECT_BYTES: Final = 4 * GIB
MAX_KEY_BYTES: Final = 1024
MAX_NAMESPACE_BYTES: Final = 255
MAX_CHECKPOINT_NAME_BYTES: Final = 255
DIGEST_BYTES: Final = 16
MAX_KEPT_DIGESTS: Final = 16_384
"""Of a client's keys: some 4 MB."""
DEFAULT_NAMESPACE: Final = "default"

_KEY_PERSON: Final = b"p2pstore.key.1"
_NAMESPACE_PERSON: Final = b"p2pstore.ns.1"


def is_about_a_key(error: Exception) -> bool:
    """Whether `encode_key` raised this `ValueError`: the text cannot be a key."""
    return getattr(error, "is_about_a_key", False) is True


def _no_key(text: str) -> ValueError:
    error = ValueError(text)
    error.is_about_a_key = True  # type: ignore[attr-defined] # callers see a plain `ValueError`
    return error


def encode_key(key: str) -> bytes:
    """The key as UTF-8, checked. Raises `ValueError` when it is empty, too long or not encodable."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise _no_key("the key is not valid UTF-8 text (it holds a lone surrogate)") from error
    if not encoded:
        raise _no_key("the key is empty; a key is 1 to 1,024 bytes of UTF-8")
    if len(encoded) > MAX_KEY_BYTES:
        raise _no_key(f"the key is {len(encoded):,} bytes long; at most {MAX_KEY_BYTES:,} are allowed")
    return encoded


def encode_namespace(namespace: str) -> bytes:
    """The namespace as UTF-8, checked like a key (1 to 255 bytes)."""
    try:
        encoded = namespace.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the namespace is not valid UTF-8 text") from error
    if not 0 < len(encoded) <= MAX_NAMESPACE_BYTES:
        raise ValueError(f"a namespace is 1 to {MAX_NAMESPACE_BYTES} bytes of UTF-8, not {len(encoded)}")
    return encoded


def check_checkpoint_name(name: str) -> None:
    """Raises `CheckpointRefused` for an invalid name of a checkpoint: `@` separates name and version."""
    length = len(name.encode(errors="surrogatepass"))
    if not 1 <= length <= MAX_CHECKPOINT_NAME_BYTES or not name.isprintable() or set(name) & set("@ "):
        raise CheckpointRefused(
            f"a checkpoint's name is 1 to {MAX_CHECKPOINT_NAME_BYTES} bytes, printable, without spaces and @: "
            f"{name[:80]!r}"
        )


def key_digest(key: str, namespace: str = DEFAULT_NAMESPACE) -> bytes:
    """BLAKE2b-128 of namespace and key: the object's name between peers, in slots and in locations."""
    space = encode_namespace(namespace)
    return hashlib.blake2b(
        bytes((len(space),)) + space + encode_key(key), digest_size=DIGEST_BYTES, person=_KEY_PERSON
    ).digest()


def keys_hasher(namespace: str) -> Callable[[Sequence[str]], list[bytes]]:
    """`key_digest` of many keys of one namespace, at some 0.2 us each."""
    space = encode_namespace(namespace)
    begun = hashlib.blake2b(bytes((len(space),)) + space, digest_size=DIGEST_BYTES, person=_KEY_PERSON)

    def hashed(keys: Sequence[str]) -> list[bytes]:
        copy, found = begun.copy, list[bytes]()
        for key in keys:
            try:
                encoded = key.encode()
            except (AttributeError, UnicodeEncodeError):
                encoded = b""
            if not 0 < len(encoded) <= MAX_KEY_BYTES:
                encode_key(key)  # says what is wrong
            hasher = copy()  # half the time of a new one
            hasher.update(encoded)
            found.append(hasher.digest())
        return found

    return hashed


def key_hasher(namespace: str) -> Callable[[str], bytes]:
    """`key_digest` for one namespace."""
    hashed = keys_hasher(namespace)
    return lambda key: hashed((key,))[0]


def batch_key_hasher(namespace: str) -> Callable[[Sequence[str]], list[bytes]]:
    """`keys_hasher` that keeps the digests of small batches for a while: a caller that asks which keys exist gets those
    next."""
    hashed = keys_hasher(namespace)
    kept: dict[str, bytes] = {}

    def digests(keys: Sequence[str]) -> list[bytes]:
        if len(keys) > MAX_KEPT_DIGESTS // 4:
            return hashed(keys)
        try:
            known = list(map(kept.get, keys))
        except TypeError:  # what cannot be looked up is no key
            return hashed(keys)
        if None not in known:
            return cast(list[bytes], known)
        found = hashed(keys)
        if len(kept) + len(found) > MAX_KEPT_DIGESTS:
            kept.clear()
        kept.update(zip(keys, found, strict=True))
        return found

    return digests


@lru_cache(maxsize=1024)
def namespace_digest(namespace: str) -> bytes:
    """BLAKE2b-128 of the namespace alone: the name of its floor."""
    return hashlib.blake2b(
        encode_namespace(namespace), digest_size=DIGEST_BYTES, person=_NAMESPACE_PERSON
    ).digest()


class Version(NamedTuple):
    """(hybrid logical clock, writer's hash, root checksum): the highest wins everywhere.

    `clock` is 48 bits of Unix milliseconds and 16 bits of counter. `writer` is a 16-bit hash of the
    peer id. `root` breaks the remaining ties, and travels only where the object itself does.
    """

    clock: int
    writer: int
    root: int = 0

    def covers(self, other: Version) -> bool:
        """Whether a floor of this version forbids `other`: it is not newer (roots do not count)."""
        return (other.clock, other.writer) <= (self.clock, self.writer)


ZERO_VERSION: Final = Version(0, 0, 0)


class Announced(NamedTuple):
    """The versions that a holder may send of an object: the announced one, with the root that its writer vouches for;
    or a newer one that the holder wrote itself. `writer` is the holder's hash, as versions carry it."""

    writer: int
    version: Version = ZERO_VERSION

    def allows(self, version: Version) -> bool:
        """Whether this is one of them."""
        return version == self.version or (
            version.writer == self.writer and version.covers(self.version)
        )


CLOCK_COUNTER_BITS: Final = 16
MAX_CLOCK_SKEW_SECONDS: Final = 10.0


def clock_from_unix_seconds(unix_seconds: float) -> int:
    """The hybrid clock's reading for a wall-clock time. Its counter begins with the part below a
    millisecond: else what two peers write within one would be ordered by who they are."""
    return int(unix_seconds * (1000 << CLOCK_COUNTER_BITS))


def unix_seconds_from_clock(clock: int) -> float:
    """The wall-clock part of a hybrid clock reading."""
    return (clock >> CLOCK_COUNTER_BITS) / 1000


def newest_accepted_clock(unix_seconds: float) -> int:
    """The highest stamp that is taken from elsewhere: 10 s in the future."""
    return clock_from_unix_seconds(unix_seconds + MAX_CLOCK_SKEW_SECONDS)


class HybridClock:
    """A hybrid logical clock (Kulkarni et al. 2014): never behind wall time nor behind what it saw.

    `latest` persists in the state directory, so that a peer whose wall clock jumped back still
    writes versions above its old ones.
    """

    def __init__(self, latest: int = 0) -> None:
        self.latest = latest

    def tick(self, unix_seconds: float) -> int:
        """A reading above all earlier ones."""
        self.latest = max(self.latest + 1, clock_from_unix_seconds(unix_seconds))
        return self.latest

    def accepts(self, clock: int, unix_seconds: float) -> bool:
        """Whether a stamp from elsewhere is at most 10 s in the future."""
        return clock <= newest_accepted_clock(unix_seconds)

    def observe(self, clock: int, unix_seconds: float) -> bool:
        """Take in a stamp from elsewhere. False, and no effect, when it is over 10 s in the future."""
        if not self.accepts(clock, unix_seconds):
            return False
        self.latest = max(self.latest, clock)
        return True

    def lead_seconds(self, unix_seconds: float) -> float:
        """How far `latest` is ahead of the wall clock; 0 where it is not. The next stamp is that far ahead, too."""
        return max(0, self.latest - clock_from_unix_seconds(unix_seconds)) / (1000 << CLOCK_COUNTER_BITS)

    def restart(self, unix_seconds: float) -> None:
        """Begin anew at the wall clock. Only where no stamp above it is kept: see `core.timekeeping`."""
        self.latest = clock_from_unix_seconds(unix_seconds)


def chunk_count(length: int) -> int:
    """How many chunks (and checksums) a value of `length` bytes has; an empty value has none."""
    return (length + CHUNK_BYTES - 1) // CHUNK_BYTES


def chunk_bounds(length: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each chunk in order."""
    for start in range(0, length, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, length)


def chunk_sum(chunk: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of one chunk."""
    return xxhash.xxh3_64_intdigest(chunk)


def chunk_sums(value: bytes | bytearray | memoryview) -> bytes:
    """The checksums of all chunks, packed as little-endian u64."""
    view = memoryview(value)
    return b"".join(
        chunk_sum(view[start:end]).to_bytes(8, "little") for start, end in chunk_bounds(len(view))
    )


_pack_length: Final = struct.Struct("<Q").pack
_checksum: Final = xxhash.xxh3_64_intdigest


def root_checksum(length: int, sums: bytes) -> int:
    """xxh3-64 over the length and all chunk sums: it identifies a value's bytes."""
    return _checksum(_pack_length(length) + sums)


def root_checksums(lengths: Iterable[int], sums: Iterable[bytes]) -> list[int]:
    """`root_checksum` of each value."""
    return list(map(_checksum, map(bytes.__add__, map(_pack_length, lengths), sums)))


def are_sums_of(sums: bytes, length: int, root: int) -> bool:
    """Whether these are the sums of all chunks of a value of that length, and give its root."""
    return len(sums) == 8 * chunk_count(length) and root_checksum(length, sums) == root


def check_object_length(length: int) -> None:
    """Raise `ObjectTooLarge` for what no peer can store, `ValueError` for what is no length."""
    if length < 0:
        raise ValueError(f"a value of {length:,} bytes")
    if length > MAX_OBJECT_BYTES:
        raise ObjectTooLarge(
            f"the value has {length:,} bytes; an object has at most {MAX_OBJECT_BYTES:,} (4 GiB): "
            "split it over several keys"
        )


_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def format_peer_id(peer_id: bytes) -> str:
    """A peer id in base58, as libp2p prints it (`12D3KooW...`)."""
    number = int.from_bytes(peer_id, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(peer_id) - len(peer_id.lstrip(b"\0"))) + digits


def printable(text: str) -> str:
    """Text of strangers (keys, names) with control characters made visible: it must neither steer a terminal
    nor pass for another line of a log."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


_UNITS: Final = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}


def parse_bytes(text: str | int, setting: str = "size") -> int:
    """Bytes from an int or from text such as `4GiB`, `512 MiB`, `100GB`. Raises `ConfigError`."""
    if isinstance(text, int):
        size: float = text
    else:
        stripped = text.strip().lower().replace("_", "").replace(",", "")
        number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = stripped[len(number) :].strip()
        try:
            size = float(number) * _UNITS[unit]
            if size != size or size in (float("inf"), float("-inf")):
                raise ValueError
        except (ValueError, KeyError):
            raise ConfigError(
                f"{setting}: {text!r} is not a size; write a number and a unit, such as 512MiB or 4GiB"
            ) from None
    if size < 0:
        raise ConfigError(f"{setting}: {text!r} is negative")
    return int(size)


_UNIT_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII)


def parse_duration(text: str, setting: str) -> float:
    """Seconds from `90`, `250ms`, `10m`, `2h` or `1d`. Raises `ValueError` naming the setting."""
    match = _DURATION.fullmatch(text.strip().lower())
    unit = match and _UNIT_SECONDS.get(match[2])
    if not match or unit is None:
        raise ValueError(f"{setting}: {text!r} is not a duration; write seconds, or 250ms, 10m, 2h, 1d")
    return float(match[1]) * unit


def size_units(length: int) -> int:
    """A length as location records tell it, which have 24 bits for it."""
    return min(-(-length // SIZE_UNIT_BYTES), 0xFFFFFF)


def counted(count: int, one: str, several: str = "") -> str:
    """A number with its noun: `1 file`, `1,200 files`; `several` where an s does not do."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def listed(names: Sequence[str], most: int, count: int = 0) -> str:
    """The first `most` of some names, or of `count` names that begin with these, and how many more there are."""
    more = max(count, len(names)) - min(most, len(names))
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def format_bytes(count: float) -> str:
    """`5.0 MiB` and the like, for people."""
    for unit, factor in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{int(count)} B"


Key = TypeVar("Key")
Value = TypeVar("Value")


def put_newest(table: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Keep an entry as the newest of at most `most`."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
