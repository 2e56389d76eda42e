"""The key that peers without a cluster key use: one secret per user and machine. Shell.

A loopback port is open to every user of the machine, unlike the local socket. Peers of one user find this key in that
user's files, so they admit each other without any option. Other users cannot read it. It lies beside the state
directories, or beside the sockets where the first place cannot be written to. It never counts as a cluster key:
without one, a peer listens on loopback only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from p2pstore.access.keyring import KEYLESS, KeyRing, new_cluster_key
from p2pstore.config import USER_KEY_NAME
from p2pstore.errors import ConfigError
from p2pstore.local.socket_paths import distrust, own_directory
from p2pstore.state.folder import Folder, refuse_folder_of_another
from p2pstore.state.key_files import parse_private_keys
from p2pstore.state.places import state_root

_HEADER: Final = "# Peers of this user that have no cluster key admit each other with this one.\n"


def user_ring() -> KeyRing:
    """The ring with this user's key, which is made at the first call.

    Raises `ConfigError` when the key cannot be read, or no place can hold one.
    """
    found = find_user_ring()
    if found is not None:
        return found
    reasons = []
    for place in _places():
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(place) as folder:
                folder.create_once(USER_KEY_NAME, (_HEADER + new_cluster_key() + "\n").encode())
                return _read(folder)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
    raise ConfigError(
        f"peers without a cluster key share a key of their user, which cannot be kept ({'; '.join(reasons)}): give "
        "--cluster-key-file, or set XDG_STATE_HOME to a directory that this user can write to"
    )


def find_user_ring() -> KeyRing | None:
    """The ring with this user's key; None before a peer has made it. Raises `ConfigError` when it cannot be read."""
    for place in _places():
        with contextlib.suppress(OSError), _opened(place) as folder:
            return _read(folder)
    return None


def ring_of_the_keyless() -> KeyRing:
    """For asking a peer that may have no cluster key: this user's key, if there is one, and what --insecure takes."""
    found = find_user_ring()
    return KeyRing([*(found.keys if found is not None else ()), KEYLESS], of_user=True)


def _places() -> Iterator[Path]:
    """Directories that the key may be in, best first."""
    yield state_root()
    yield own_directory()


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[Folder]:
    """The directory, which no other user can write to in this user's name. Raises `OSError` where there is none."""
    with Folder(place) as folder:
        refuse_folder_of_another(folder, "state_dir")
        if place == own_directory() and (reason := distrust(place)):
            raise OSError(0, reason)
        yield folder


def _read(folder: Folder) -> KeyRing:
    path = folder.path / USER_KEY_NAME
    if folder.owner(USER_KEY_NAME) != os.geteuid():
        raise ConfigError(
            f"{path} belongs to another user, who knows this key: remove it, and the next peer makes a new one"
        )
    ring = parse_private_keys(folder, USER_KEY_NAME, "is the key of this user's peers")
    return KeyRing(ring.keys, of_user=True)
