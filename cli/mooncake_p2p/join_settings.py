"""What `join` and `config show` make of options, environment, file and invite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from mooncake_p2p.output import remark

if TYPE_CHECKING:
    from p2pstore.access.invite import Invite
    from p2pstore.settings import Settings

CONFIG_VARIABLE: Final = "MOONCAKE_P2P_CONFIG"
INVITE_VARIABLE: Final = "MOONCAKE_P2P_INVITE"
MAX_LINE: Final = 64 * 1024


def gather(given: Mapping[str, Any]) -> tuple[Settings, Invite | None]:
    """The settings with their origins, name and state directory among them, and the invite that was given.

    `given` holds `join`'s options, without those that were not given. Raises `ConfigError` naming origin,
    value and what is allowed.
    """
    from p2pstore.access.invite import parse_invite
    from p2pstore.settings import load_settings, refuse_empty
    from p2pstore.state.places import settle

    for name, variable in (("config", CONFIG_VARIABLE), ("invite", INVITE_VARIABLE)):
        refuse_empty(given.get(name), f"--{name}")
        refuse_empty(os.environ.get(variable), variable)
    flags = {name: value for name, value in given.items() if name not in ("config", "invite")}
    toml_path = given.get("config") or os.environ.get(CONFIG_VARIABLE)
    settings = load_settings(toml_path, os.environ, flags)
    line = given.get("invite") or os.environ.get(INVITE_VARIABLE)
    invite = parse_invite(read_line_of_invite() if line == "-" else line) if line else None
    return settle(settings, invite), invite


_from_stdin: list[str] = []


def read_line_of_invite() -> str:
    """What stands on stdin, of which only 64 KiB are read; the same when asked again."""
    if not _from_stdin:
        _from_stdin.append(sys.stdin.read(MAX_LINE))
    return _from_stdin[0]


@contextmanager
def spelled_as_given(settings: Settings) -> Iterator[None]:
    """Errors of the peer name a setting; people named an option, a variable or a line of a file."""
    from p2pstore.errors import AuthenticationFailed, ConfigError

    try:
        yield
    except AuthenticationFailed as error:
        kept = {n: o for n, o in settings.origins.items() if o.startswith("the invite kept in")}
        if not kept:
            raise
        options = ", ".join("--" + name.replace("_", "-") for name in sorted(kept))
        raise AuthenticationFailed(
            f"{error}; {next(iter(kept.values()))} says {options}: give other ones, or another --invite"
        ) from None
    except ConfigError as error:
        name, colon, rest = str(error).partition(": ")
        if not colon or name not in type(settings.config()).__struct_fields__:
            raise
        origin = settings.origins.get(name, "default")
        said = "--" + name.replace("_", "-") if origin.startswith("default") else origin
        raise ConfigError(f"{said}: {rest}") from None


def refuse_name_of_another(settings: Settings) -> None:
    """Raise `ConfigError` when a peer that runs has the name that was given. Say so on stderr when it has this host's
    name, so that this peer takes another one."""
    from p2pstore.state.places import HOST_NAME, chose_name, name_in_use

    problem = name_in_use(settings)
    if problem is not None:
        raise problem
    if chose_name(settings) and settings.origins["name"] != HOST_NAME:
        remark(
            f"a peer with this host's name runs here already; this one is called {settings.values['name']}, with an "
            "identity of its own"
        )


def refuse_socket_of_another(settings: Settings) -> None:
    """Raise `ConfigError` when environment or file name the socket of a peer that runs: a client's setting."""
    from p2pstore.errors import ConfigError
    from p2pstore.local.socket_paths import answers

    origin, path = settings.origins.get("socket"), settings.values.get("socket")
    if path and origin != "--socket" and answers(path):
        raise ConfigError(
            f"another peer already serves local clients at {path}, which {origin} names: unset it, or give "
            "this peer a --socket of its own"
        )
