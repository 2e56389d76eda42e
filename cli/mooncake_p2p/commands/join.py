"""`join`: run a peer, in the foreground or, detached, in the background."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from mooncake_p2p.detach import DETACHED_VARIABLE, start_detached
from mooncake_p2p.join_settings import (
    gather,
    refuse_name_of_another,
    refuse_socket_of_another,
    spelled_as_given,
)
from p2pstore.runtime.linux import survive_hangups

MAX_ATTEMPTS: Final = 8


class Transport(StrEnum):
    auto = "auto"
    shm = "shm"
    rdma = "rdma"
    tcp = "tcp"


class Network(StrEnum):
    lan = "lan"
    wan = "wan"
    local = "local"


class HugePages(StrEnum):
    auto = "auto"
    never = "never"
    require = "require"


class EvictionPolicy(StrEnum):
    prefix = "prefix"
    lru = "lru"
    s3_fifo = "s3-fifo"


class DirectoryKept(StrEnum):
    auto = "auto"
    full = "full"
    partitioned = "partitioned"


class Switch(StrEnum):
    off = "off"
    on = "on"


class OthersMay(StrEnum):
    read = "read"
    write = "write"


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
    name: Annotated[
        str | None,
        _option(
            "NAME",
            "What people call it; no live peer of this machine may have it [default: hostname].",
        ),
    ] = None,
    cluster: Annotated[
        str | None, _option("NAME", "Only peers of one cluster meet [default: default].")
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        _option("HOST:PORT", "Control address of any peer of the cluster; may be repeated."),
    ] = None,
    invite: Annotated[
        str | None,
        _option("LINE|-", "What `invite` printed on another machine; - reads it from stdin."),
    ] = None,
    join_timeout: Annotated[
        str | None,
        _option("SECONDS", "How long to try bootstrap peers at first [default: 5]."),
    ] = None,
    network: Annotated[
        Network | None,
        typer.Option(
            help="How soon silent peers are suspected [default: lan].", show_default=False
        ),
    ] = None,
    listen: Annotated[
        str | None,
        _option("HOST:PORT", "Control address [default: where bootstrap peers can call back]."),
    ] = None,
    interface: Annotated[
        str | None,
        _option("NAME|CIDR", "Listen on this interface's address, or the one in this network."),
    ] = None,
    data_listen: Annotated[
        list[str] | None, _option("HOST:PORT", "Address for bulk data; may be repeated.")
    ] = None,
    advertise: Annotated[
        str | None, _option("HOST[:PORT]", "Control address for others to use.")
    ] = None,
    data_advertise: Annotated[
        list[str] | None,
        _option("HOST[:PORT]", "Data address for others to use; may be repeated."),
    ] = None,
    memory: Annotated[
        str | None,
        _option("SIZE", "Memory to offer; 0: none [default: an eighth, at most 4GiB]."),
    ] = None,
    memory_path: Annotated[
        str | None,
        _option("FILE", "File to have that memory in, removed at the end [default: none]."),
    ] = None,
    keep_memory: Annotated[
        bool | None,
        typer.Option(
            "--keep-memory",
            help="Keep that file, and begin with it the next time.",
            show_default=False,
        ),
    ] = None,
    more_memory: Annotated[
        list[str] | None,
        _option("SIZE@WHERE", "More of it, from node:N or in a FILE; may be repeated."),
    ] = None,
    eviction_policy: Annotated[
        EvictionPolicy | None,
        typer.Option(
            help="What goes first when memory is full [default: prefix].", show_default=False
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        _option("NAMESPACE=SIZE", "Memory kept for a namespace; may be repeated [default: none]."),
    ] = None,
    cap: Annotated[
        list[str] | None,
        _option("NAMESPACE=SIZE", "Most memory and SSD of one with a quota; may be repeated."),
    ] = None,
    ssd: Annotated[
        str | None,
        _option("DIR|DEVICE", "SSD for what memory has no room for [default: none]."),
    ] = None,
    ssd_capacity: Annotated[
        str | None, _option("SIZE", "How much of it to take [default: half of what is free].")
    ] = None,
    ssd_writes_per_day: Annotated[
        str | None, _option("SIZE", "Most to write to it in a day [default: no limit].")
    ] = None,
    huge_pages: Annotated[
        HugePages | None,
        typer.Option(
            help="Huge pages for it; auto: reserved ones if enough, else transparent [default: auto].",
            show_default=False,
        ),
    ] = None,
    numa_node: Annotated[
        int | None, _option("N", "NUMA node that memory comes from [default: any].")
    ] = None,
    max_objects: Annotated[int | None, _option("N", "Most objects to hold.")] = None,
    max_leased: Annotated[
        str | None, _option("SIZE|N%", "Most that one client may hold leased [default: 50%].")
    ] = None,
    transport: Annotated[
        Transport | None,
        typer.Option(help="Anything but auto is strict [default: auto].", show_default=False),
    ] = None,
    rdma_device: Annotated[
        list[str] | None,
        _option("NAME", "RDMA device to use; may be repeated [default: any]."),
    ] = None,
    rdma_topology: Annotated[
        str | None,
        _option("FILE|JSON", "RDMA devices near each memory [default: as the machine says]."),
    ] = None,
    data_tls: Annotated[
        Switch | None,
        typer.Option(
            help="Let others read this peer over TLS only [default: off].", show_default=False
        ),
    ] = None,
    directory: Annotated[
        DirectoryKept | None,
        typer.Option(
            help="How much this peer knows of where objects are [default: auto].",
            show_default=False,
        ),
    ] = None,
    index_memory: Annotated[
        str | None,
        _option("SIZE", "What the full directory may take before auto lets go [default: 1GiB]."),
    ] = None,
    checkpoint_memory: Annotated[
        str | None,
        _option("SIZE", "For checkpoints in memory [default: half of what is available]."),
    ] = None,
    cluster_key_file: Annotated[
        str | None,
        _option("FILE", "The cluster's key, see keygen. Without one: own user, loopback only."),
    ] = None,
    allow_file: Annotated[
        str | None, _option("FILE", "Peer ids that may come in, one a line; SIGHUP rereads it.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Let in whoever reaches the peer: no key.", show_default=False
        ),
    ] = None,
    state_dir: Annotated[
        str | None, _option("DIR", "Keeps the peer's identity [default: one per name].")
    ] = None,
    socket: Annotated[str | None, _option("PATH", "Socket for clients on this machine.")] = None,
    socket_mode: Annotated[
        str | None, _option("MODE", "Its permissions [default: 0600; with a group 0660].")
    ] = None,
    socket_group: Annotated[str | None, _option("GROUP", "Its group.")] = None,
    socket_others: Annotated[
        OthersMay | None,
        typer.Option(
            help="What users other than this peer's may do there [default: write].",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[
        str | None, _option("SECONDS", "How long a stopping peer may take to leave [default: 10].")
    ] = None,
    metrics: Annotated[
        str | None,
        _option(
            "HOST:PORT",
            "A status page for browsers, /metrics, /livez and /readyz, to anybody who can reach it.",
        ),
    ] = None,
    metrics_keys: Annotated[
        bool | None,
        typer.Option(
            "--metrics-keys",
            help="Show keys on the status page, not just namespaces.",
            show_default=False,
        ),
    ] = None,
    slow_operation: Annotated[
        str | None,
        _option(
            "SECONDS", "What `stats --slow` keeps took at least so long; 0: none [default: 0.1]."
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="[default: info].", show_default=False)
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="[default: text].", show_default=False)
    ] = None,
    log_file: Annotated[str | None, _option("FILE", "Log there instead of stderr.")] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Return when it serves and has tried to join; `leave` ends it."
        ),
    ] = False,
    config: Annotated[
        str | None, _option("FILE.toml", "Settings: option names with underscores.")
    ] = None,
) -> None:
    """Run a peer in the foreground; Ctrl-C or SIGTERM leaves the cluster.

    Without any option it serves this machine and user alone. Peers on several machines need one cluster key:
    `keygen` makes it, the first peer gets it with --cluster-key-file and an address of its own with
    --interface or --listen, and `invite` there prints the line that starts a peer on the next machine.
    Without that line a peer needs a copy of the key file, and --bootstrap with the address of another.

    With a cluster key it listens where the bootstrap
    peers can call back: on the address that leads to them. When it can serve it prints `ready ` and a
    line of JSON: peer_id, name, control, data, socket, metrics, joined, peers. SIGHUP opens the log
    file anew and rereads key and allow files.

    An invite says cluster, bootstrap peers and key, unless other options do. The peer keeps it in its
    state directory, so that a restart needs none. --detach logs to peer.log there.

    Every setting can also be given as MOONCAKE_P2P_ and its name in capitals, such as
    MOONCAKE_P2P_DATA_LISTEN (several values with commas), or in the file of --config. An option
    wins over the environment, the environment over the file, and the file over the invite;
    `config show` tells what comes of it.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    del given["detach"]
    detached = os.environ.pop(DETACHED_VARIABLE, None) is not None
    if detach and not detached:
        start_detached(given)
    else:
        _run(given, detached)


def _run(given: Mapping[str, Any], detached: bool) -> None:
    """Run the peer in this process. Of several that start at once and take the same free name, one gets it."""
    survive_hangups()
    from p2pstore.state.places import chose_name, name_in_use
    from p2pstore.state.state_directory import StateDirectoryInUse

    for attempt in range(MAX_ATTEMPTS):
        settings, invite = gather(given)
        if not detached:
            refuse_name_of_another(settings)
        refuse_socket_of_another(settings)
        config = settings.checked()  # a mistake is told before the peer's modules are loaded
        gc.disable()  # what the modules make stays: looking for garbage in it takes a tenth of the start
        from p2pstore.peer import run_peer

        gc.enable()
        try:
            with spelled_as_given(settings):
                run_peer(config, invite, detached=detached)
            return
        except StateDirectoryInUse as error:
            if not chose_name(settings) or attempt == MAX_ATTEMPTS - 1:
                raise (name_in_use(settings) or error) from None
