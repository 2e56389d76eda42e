"""Files with secrets: identities and cluster keys. Shell."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2pstore.access.keyring import KeyRing, parse_cluster_keys, reader_keys
from p2pstore.errors import ConfigError
from p2pstore.gossip.records import format_peer_id
from p2pstore.state.folder import FORMAT, Folder, check_format, open_regular_file

if TYPE_CHECKING:
    from p2pstore.gossip.links.identity import Identity

# `identity` is imported late: it needs the peer's libraries, and `invite` only reads a cluster's keys.


IDENTITY_HEADER: Final = "p2pstore identity "
_MAX_KEY_FILE_BYTES: Final = 64 * 1024


def ephemeral() -> Identity:
    """A new identity that is kept nowhere: for a peer without a state directory."""
    from p2pstore.gossip.links.identity import SEED_BYTES, Identity

    return Identity(secrets.token_bytes(SEED_BYTES))


def load_cluster_key_file(path: str | os.PathLike[str]) -> KeyRing:
    """The cluster's keys: one in hexadecimal a line, the first one proves, `#` comments.

    Raises `ConfigError` when the file cannot be read, may be read by others, or holds something else.
    """
    where = Path(path)
    try:
        text = read_private(where, "is the cluster's key")
    except FileNotFoundError:
        raise ConfigError(
            f"the cluster key file {where} does not exist; `mooncake-p2p keygen {where}` makes one"
        ) from None
    return parse_cluster_keys(text, str(where))


def load_token_file(path: str | os.PathLike[str]) -> str:
    """The token in a file of its own. Raises `ConfigError` when the file cannot be read, may be read by others, or
    holds no line of 16 to 1,024 printable characters."""
    where = Path(path)
    try:
        token = read_private(where, "holds a token").strip()
    except FileNotFoundError:
        raise ConfigError(f"the token file {where} does not exist") from None
    if not 16 <= len(token) <= 1024 or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where}: one line of 16 to 1,024 printable ASCII characters is wanted")
    return token


def readers_key_file(path: str | os.PathLike[str], namespaces: Sequence[str] = ()) -> str:
    """The text of the key file for readers, or for writers of `namespaces`, that goes with a cluster key file. Raises
    as `load_cluster_key_file` and `reader_keys`."""
    from p2pstore.gossip.links.identity import Identity

    ring = load_cluster_key_file(path)
    return reader_keys(ring, lambda seed: format_peer_id(Identity(seed).peer_id), namespaces)


def parse_private_keys(folder: Folder, name: str, what: str) -> KeyRing:
    """The keys of a file in `folder`, which is `what`. Raises as `load_cluster_key_file`, and `OSError`."""
    path = folder.path / name
    return parse_cluster_keys(read_private(path, what, folder), str(path))


def read_private(path: Path, what: str, folder: Folder | None = None) -> str:
    """The text of a file with a secret in it, which lies in that folder or where a user said. Raises
    `FileNotFoundError`, and `ConfigError` for the rest."""
    try:
        with (
            open_regular_file(path)
            if folder is None
            else os.fdopen(folder.open(path.name, os.O_RDONLY), "rb")
        ) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{path} {what}, but others may read it (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"run `chmod 600 {path}`; if it was exposed, make a new one"
                )
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{path} is too long to be a key file")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


def parse_identity(path: Path, text: str) -> bytes:
    from p2pstore.gossip.links.identity import SEED_BYTES

    header, _, rest = text.partition("\n")
    version = header.removeprefix(IDENTITY_HEADER)
    if header.startswith(IDENTITY_HEADER) and version.isdigit():
        check_format(path, int(version))
        with contextlib.suppress(ValueError):
            seed = bytes.fromhex(rest.strip())
            if len(seed) == SEED_BYTES:
                return seed
    raise ConfigError(
        f'{path} is not an identity ("{IDENTITY_HEADER}{FORMAT}" and 64 hexadecimal digits): restore '
        "it from a backup, or move it away and this peer starts as a new one"
    )
