"""Defaults of a peer of this host: a free name, the state directory of that name with the invite that it joined by,
and the user's key. A given name is taken as it is, or refused. Shell.

The user's key is for peers without a cluster key: one secret per user and machine. A loopback port is open to every
user of the machine, unlike the local socket. Peers of one user find the key in that user's files, so they admit each
other without any option. Other users cannot read it. It lies beside the state
directories, or beside the sockets where the first place cannot be written to. It never counts as a cluster key:
without one, a peer listens on loopback only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from p2pstore.access.invite import Invite, parse_kept_invite
from p2pstore.access.keyring import KEYLESS, KeyRing, new_cluster_key, parse_cluster_keys
from p2pstore.config import USER_KEY_NAME, name_or_host
from p2pstore.errors import AuthenticationFailed, ConfigError, ProtocolMismatch
from p2pstore.local.socket_paths import distrust, live_sockets, own_directory
from p2pstore.settings import Settings
from p2pstore.state.folder import Folder, read_private, refuse_folder_of_another
from p2pstore.state.state_directory import StateDirectory, is_in_use, kept_cluster_key, kept_invite

STATE_DIRECTORY_NAME: Final = "mooncake-p2p"
MAX_LOCAL_PEERS: Final = 64
HOST_NAME: Final = "default: this host's name"
BY_NAME: Final = "default: by name"
"""The origin of a state directory chosen by name."""


def settle(settings: Settings, invite: Invite | None = None) -> Settings:
    """The settings with a name and a state directory, and below them what `invite` says, or the one that the state
    directory keeps of an earlier join. Without a name in the settings no other peer of this host uses them; a name
    that was said may be in use (`name_in_use`).

    Raises `ConfigError` when a kept file is damaged or no name is free.
    """
    settled = _with_places(settings)
    state_dir = Path(settled.values["state_dir"])
    if invite is not None:
        return settled.over(_what_it_says(invite, state_dir, bool(invite.keys)), "the invite")
    kept = kept_invite(state_dir)
    if kept is None:
        return settled
    remembered, key_file = parse_kept_invite(kept), kept_cluster_key(state_dir)
    there = os.path.lexists(key_file)
    if remembered.came_with_keys and not there and not settled.values.get("cluster_key_file"):
        raise ConfigError(
            f"{key_file} is missing, which held the cluster key of the invite kept in {state_dir}: restore it, "
            "join with an invite again, or give --cluster-key-file"
        )
    return settled.over(_what_it_says(remembered, state_dir, there), f"the invite kept in {state_dir}")


@contextlib.contextmanager
def kept(invite: Invite | None, state_dir: str | None) -> Iterator[None]:
    """Have the state directory remember the invite, so that a restart needs none, unless the block ends by an error
    that keeps a peer from joining: then it remembers what it did before. Raises `ConfigError` when another peer uses
    the directory, `OSError` when it cannot be written."""
    if invite is None or state_dir is None:
        yield
        return
    with StateDirectory.open(state_dir) as state:
        before = state.save_invite(invite)
    try:
        yield
    except (AuthenticationFailed, ProtocolMismatch, ConfigError):
        with contextlib.suppress(OSError, ConfigError), StateDirectory.open(state_dir) as state:
            state.restore_invite(before)
        raise


def chose_name(settings: Settings) -> bool:
    """Whether `settle` chose the name."""
    return settings.origins.get("name", "").startswith(HOST_NAME)


def name_in_use(settings: Settings) -> ConfigError | None:
    """The problem of a name that a live peer of this host uses; None when it is free. The state
    directory and the socket of that name tell, where no other ones were said."""
    name, state_dir = settings.values.get("name"), settings.values["state_dir"]
    if chose_name(settings) or not name:
        return None
    socket = next((str(path) for path in live_sockets() if path.stem == name), "")
    by_name = settings.origins["state_dir"] == BY_NAME and is_in_use(state_dir)
    if not by_name and (not socket or settings.values.get("socket")):
        return None
    where = f"state directory {state_dir}" if by_name else f"socket {socket}"
    return ConfigError(
        f"{settings.origins['name']}: a peer named {name} runs on this machine already ({where}): give this one "
        f"another --name, or end that one with `mooncake-p2p leave --socket {shlex.quote(socket or 'PATH')}`"
    )


def state_root() -> Path:
    """Where state directories go by default: the user's state home, or /var/lib for root. A user without a home has
    them beside its sockets, in a directory that a restart of the machine removes."""
    home = os.environ.get("XDG_STATE_HOME")
    if home:
        return Path(home) / STATE_DIRECTORY_NAME
    if os.getuid() == 0:
        return Path("/var/lib") / STATE_DIRECTORY_NAME
    with contextlib.suppress(RuntimeError):  # neither HOME nor an entry in passwd
        own = Path.home()
        if own.is_absolute() and own != Path("/"):  # "/": HOME of a container's arbitrary user
            return own / ".local" / "state" / STATE_DIRECTORY_NAME
    return _without_home()


def _without_home() -> Path:
    directory = own_directory()
    if os.path.lexists(directory) and (reason := distrust(directory)):
        raise ConfigError(
            f"this user has no home directory, and {directory} {reason}: name a place with --state-dir, or set "
            "XDG_STATE_HOME"
        )
    return directory / "state"


def _what_it_says(invite: Invite, state_dir: Path, with_key: bool) -> dict[str, Any]:
    says: dict[str, Any] = {"cluster": invite.cluster, "bootstrap": list(invite.bootstrap)}
    if with_key:
        says["cluster_key_file"] = str(kept_cluster_key(state_dir))
    return says


def _with_places(settings: Settings) -> Settings:
    if settings.values.get("state_dir"):
        absolute = os.path.abspath(settings.values["state_dir"])
        return Settings({**settings.values, "state_dir": absolute}, settings.origins)
    said = settings.values.get("name", "")
    name = name_or_host(said, settings.origins.get("name", "name"))
    root = state_root()
    for number in range(1, MAX_LOCAL_PEERS + 1):
        free = name if number == 1 else f"{name}-{number}"
        if not said and is_in_use(root / free):
            continue
        origin = settings.origins["name"] if said else HOST_NAME
        if number > 1:
            origin += f", as {number - 1} of that name run here"
        return Settings(
            {**settings.values, "name": free, "state_dir": str(root / free)},
            {**settings.origins, "name": origin, "state_dir": BY_NAME},
        )
    raise ConfigError(f"{MAX_LOCAL_PEERS} peers named {name} run here; give --name and --state-dir")


_HEADER: Final = "# Peers of this user that have no cluster key admit each other with this one.\n"


def user_ring() -> KeyRing:
    """The ring with this user's key, made at the first call. Raises `ConfigError` when it cannot be read or placed."""
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
        refuse_folder_of_another(folder)
        if place == own_directory() and (reason := distrust(place)):
            raise OSError(0, reason)
        yield folder


def _read(folder: Folder) -> KeyRing:
    path = folder.path / USER_KEY_NAME
    if folder.owner(USER_KEY_NAME) != os.geteuid():
        raise ConfigError(
            f"{path} belongs to another user, who knows this key: remove it, and the next peer makes a new one"
        )
    text = read_private(path, "is the key of this user's peers", folder)
    return KeyRing(parse_cluster_keys(text, str(path)).keys, of_user=True)
