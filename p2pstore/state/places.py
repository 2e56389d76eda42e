"""Defaults of a peer of this host: a free name, and the state directory of that name,
with the invite that it joined by. A given name is taken as it is, or refused. Shell.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from p2pstore.access.invite import Invite, parse_kept_invite
from p2pstore.config import name_or_host
from p2pstore.errors import AuthenticationFailed, ConfigError, ProtocolMismatch
from p2pstore.local.socket_paths import distrust, live_sockets, own_directory
from p2pstore.settings import Settings
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
    return settled.over(
        _what_it_says(remembered, state_dir, there), f"the invite kept in {state_dir}"
    )


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
