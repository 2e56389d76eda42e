"""`join`: run a peer in the foreground."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer


class Transport(StrEnum):
    auto = "auto"
    shm = "shm"
    tcp = "tcp"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


def _option(metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=False)


def join(
    name: Annotated[str | None, _option("NAME", "What people call it [default: hostname].")] = None,
    cluster: Annotated[
        str | None, _option("NAME", "Only peers of one cluster meet [default: default].")
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        _option("HOST:PORT", "Control address of any peer of the cluster; may be repeated."),
    ] = None,
    join_timeout: Annotated[
        str | None,
        _option("SECONDS", "How long to try bootstrap peers at first [default: 5]."),
    ] = None,
    listen: Annotated[
        str | None,
        _option("HOST:PORT", "Control address [default: 127.0.0.1:17946, or a free port]."),
    ] = None,
    data_listen: Annotated[
        list[str] | None, _option("HOST:PORT", "Address for bulk data; may be repeated.")
    ] = None,
    advertise: Annotated[
        str | None, _option("HOST[:PORT]", "Control address for others to use.")
    ] = None,
    data_advertise: Annotated[
        list[str] | None,
        _option("HOST:PORT", "Data address for others to use; may be repeated."),
    ] = None,
    memory: Annotated[
        str | None,
        _option("SIZE", "Memory to offer [default: an eighth, at most 4GiB]."),
    ] = None,
    max_objects: Annotated[int | None, _option("N", "Most objects to hold.")] = None,
    max_leased: Annotated[
        str | None, _option("SIZE|N%", "Most that one client may hold leased [default: 50%].")
    ] = None,
    transport: Annotated[
        Transport | None,
        typer.Option(help="Anything but auto is strict [default: auto].", show_default=False),
    ] = None,
    cluster_key_file: Annotated[
        str | None, _option("FILE", "The cluster's key, see keygen. Without one: loopback only.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Serve a network without a cluster key.", show_default=False
        ),
    ] = None,
    state_dir: Annotated[
        str | None, _option("DIR", "Keeps the peer's identity [default: one per name].")
    ] = None,
    socket: Annotated[str | None, _option("PATH", "Socket for clients on this machine.")] = None,
    socket_mode: Annotated[str | None, _option("MODE", "Its permissions [default: 0600].")] = None,
    socket_group: Annotated[str | None, _option("GROUP", "Its group.")] = None,
    drain_timeout: Annotated[
        str | None, _option("SECONDS", "How long a stopping peer may take to leave [default: 10].")
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="[default: info].", show_default=False)
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="[default: text].", show_default=False)
    ] = None,
    log_file: Annotated[str | None, _option("FILE", "Log there instead of stderr.")] = None,
    config: Annotated[
        str | None, _option("FILE.toml", "Settings: option names with underscores.")
    ] = None,
) -> None:
    """Run a peer in the foreground; Ctrl-C or SIGTERM leaves the cluster.

    Without any option it serves this machine alone. When it can serve it prints `ready ` and a line
    of JSON: peer_id, name, control, data, socket, metrics, joined, peers.

    Every option can also be given as MOONCAKE_P2P_ and its name in capitals, such as
    MOONCAKE_P2P_DATA_LISTEN (several values with commas), or in the file of --config. An option
    wins over the environment, and the environment over the file.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    toml_path = given.pop("config", None) or os.environ.get("MOONCAKE_P2P_CONFIG")
    from p2pstore.config import load_config
    from p2pstore.errors import ConfigError
    from p2pstore.local.paths import answers

    settings = load_config(toml_path, os.environ, given)
    if socket is None and settings.socket and answers(settings.socket):
        raise ConfigError(
            f"another peer already serves local clients at {settings.socket}, which MOONCAKE_P2P_SOCKET or "
            "the file of --config names: unset it, or give this peer a --socket of its own"
        )
    settings.checked()  # a mistake is told at once: a second before the peer's modules are loaded
    from p2pstore.peer import run_peer

    run_peer(settings)
