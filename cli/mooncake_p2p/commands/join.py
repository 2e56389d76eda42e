"""`join` runs a peer, in the foreground or detached; `config show` prints its settings with their origins."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import typer

from mooncake_p2p.join_settings import (
    CONFIG_VARIABLE,
    DETACHED_VARIABLE,
    INVITE_VARIABLE,
    gather,
    ready_for_people,
    refuse_name_of_another,
    refuse_socket_of_another,
    spelled_as_given,
    start_detached,
)
from mooncake_p2p.options import Json, argument, flag, importing
from mooncake_p2p.output import print_json, print_table, remark
from p2pstore.objects import format_bytes
from p2pstore.runtime.linux import survive_hangups

MAX_ATTEMPTS: Final = 8


class Setting(NamedTuple):
    """The option of one setting. `form` is the metavar of its value, the words to choose from (joined by |), or
    empty for a flag; `kind` the Python type of the value."""

    form: str
    help: str
    kind: type = str
    default: str = ""
    """Text behind the help: the default, in people's words."""


SETTINGS_BY_GROUP: Final[dict[str, dict[str, Setting]]] = {
    "Options": {
        "name": Setting("NAME", "The peer's name, unique on this machine", default="hostname"),
        "bootstrap": Setting("HOST:PORT", "Control address of any peer of the cluster", list),
        "invite": Setting(
            "LINE|-", "The line that `invite` printed on another machine; - reads it from stdin"
        ),
        "interface": Setting(
            "NAME|CIDR", "Listen on this interface's address, or the one in this network"
        ),
        "memory": Setting("SIZE", "Memory to offer; 0: none", default="an eighth, at most 4GiB"),
        "ssd": Setting("DIR|DEVICE", "SSD for objects that memory has no room for", default="none"),
        "cluster_key_file": Setting(
            "FILE", "The cluster's key, see keygen. Without one: own user, loopback only"
        ),
        "metrics": Setting(
            "[HOST:]PORT",
            "A status page for browsers, /metrics, /livez and /readyz, open to all who can reach it",
            default="none; a port alone: on loopback",
        ),
        "config": Setting("FILE.toml", "Settings: option names with underscores"),
    },
    "Cluster and network": {
        "cluster": Setting("NAME", "Only peers of one cluster meet", default="default"),
        "join_timeout": Setting("SECONDS", "How long to try bootstrap peers at first", default="5"),
        "network": Setting("lan|wan|local", "How soon silent peers are suspected", default="lan"),
        "listen": Setting("HOST:PORT", "Control address", default="where bootstrap peers can call back"),
        "data_listen": Setting("HOST:PORT", "Address for bulk data", list),
        "advertise": Setting("HOST[:PORT]", "Control address for others to use"),
        "data_advertise": Setting("HOST[:PORT]", "Data address for others to use", list),
        "transport": Setting(
            "auto|shm|rdma|tcp", "How to read from peers; all but auto are strict", default="auto"
        ),
        "rdma_device": Setting("NAME", "RDMA device to use", list, "any"),
        "rdma_topology": Setting(
            "FILE|JSON", "RDMA devices near each memory", default="as the machine says"
        ),
        "directory": Setting(
            "auto|full|partitioned", "How much this peer knows of where objects are", default="auto"
        ),
    },
    "Memory and SSD": {
        "memory_path": Setting("FILE", "File to have the memory in, removed at the end", default="none"),
        "keep_memory": Setting("", "Keep that file, and begin with it the next time", bool),
        "more_memory": Setting("SIZE@WHERE", "More memory, from node:N or in a FILE", list),
        "eviction_policy": Setting(
            "prefix|lru|s3-fifo", "Order of eviction when memory is full", default="prefix"
        ),
        "quota": Setting("NAMESPACE=SIZE", "Memory kept for a namespace", list, "none"),
        "cap": Setting("NAMESPACE=SIZE", "Most memory and SSD of a namespace with a quota", list),
        "ssd_capacity": Setting("SIZE", "How much of the SSD to take", default="half of what is free"),
        "ssd_writes_per_day": Setting("SIZE", "Most to write to the SSD in a day", default="no limit"),
        "huge_pages": Setting(
            "auto|never|require",
            "Huge pages for memory; auto: reserved ones if enough, else transparent",
            default="auto",
        ),
        "numa_node": Setting("N", "NUMA node that memory comes from", int, "any"),
        "max_objects": Setting("N", "Most objects to hold", int),
        "max_leased": Setting("SIZE|N%", "Most that one client may hold leased", default="50%"),
        "index_memory": Setting(
            "SIZE", "Memory that the full directory may take before auto partitions it", default="1GiB"
        ),
        "checkpoint_memory": Setting(
            "SIZE", "For checkpoints in memory", default="half of what is available"
        ),
    },
    "Access": {
        "data_tls": Setting("off|on", "Let others read this peer over TLS only", default="off"),
        "allow_file": Setting("FILE", "Peer ids that may come in, one a line; SIGHUP rereads it"),
        "insecure": Setting("", "Admit every peer that reaches this one: no key", bool),
        "socket": Setting("PATH", "Socket for clients on this machine"),
        "socket_mode": Setting("MODE", "Its permissions", default="0600; with a group 0660"),
        "socket_group": Setting("GROUP", "Its group"),
        "socket_others": Setting(
            "read|write", "Rights of users other than this peer's there", default="write"
        ),
    },
    "Operation": {
        "state_dir": Setting("DIR", "Keeps the peer's identity", default="one per name"),
        "drain_timeout": Setting("SECONDS", "How long a stopping peer may take to leave", default="10"),
        "metrics_keys": Setting("", "Show keys on the status page, not just namespaces", bool),
        "http_token_file": Setting(
            "FILE", "Token of routers' queries over HTTP; without one: on loopback only"
        ),
        "kv_events": Setting(
            "ENDPOINT",
            "Publish which keys are held at this ZeroMQ endpoint, such as tcp://127.0.0.1:5557, in Mooncake's format, "
            "to all who can reach it",
            default="none",
        ),
        "kv_events_replay": Setting(
            "ENDPOINT", "Endpoint where its consumers get what they missed, or all", default="none"
        ),
        "kv_events_of": Setting(
            "peer|fleet", "Publish what this peer holds, or what all peers hold together", default="peer"
        ),
        "kv_events_namespace": Setting("NAME", "Publish the keys of this namespace", default="default"),
        "slow_operation": Setting(
            "SECONDS", "Shortest operation that `stats --slow` keeps; 0: none", default="0.1"
        ),
        "log_level": Setting("debug|info|warning|error", "Least level to log", default="info"),
        "log_format": Setting("text|json", "Form of log lines", default="text"),
        "log_file": Setting("FILE", "Log there instead of stderr"),
    },
}
"""The settings of `PeerConfig` (which takes 0.1 s to load; a test compares them), `invite` and `config`. Only
--help-all shows those of the later groups."""
SETTINGS: Final = {
    name: setting for settings in SETTINGS_BY_GROUP.values() for name, setting in settings.items()
}


def _parameter(name: str, setting: Setting, group: str) -> inspect.Parameter:
    """The option as a parameter for typer: None where it was not given."""
    text = setting.help
    names: tuple[str, ...] = ("--http", "--metrics") if name == "metrics" else ()
    if setting.kind is list:
        text += "; may be repeated"
    text += f" [default: {setting.default}]." if setting.default else "."
    words = setting.form.split("|")
    kind: Any = list[str] if setting.kind is list else setting.kind
    enumeration: Any = StrEnum
    metavar: str | None = setting.form
    if setting.form.islower():
        kind = enumeration(name, {word.replace("-", "_"): word for word in words})
        metavar = None
    elif setting.kind is bool:
        names = ("--" + name.replace("_", "-"),)
        metavar = None
    option = typer.Option(*names, metavar=metavar, help=text, show_default=False, rich_help_panel=group)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**given` all settings as options, before its own."""
    own = inspect.signature(command, eval_str=True)
    plain = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    arguments = [each for each in plain if each.default is each.empty]
    options = [each.replace(kind=each.KEYWORD_ONLY) for each in plain if each not in arguments]
    settings = [
        _parameter(name, setting, group)
        for group, members in SETTINGS_BY_GROUP.items()
        for name, setting in members.items()
    ]
    parameters = [*arguments, *settings, *options]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@_with_settings
def join(
    detach: Annotated[
        bool, flag("--detach", "Return when it serves and has tried to join; `leave` ends it.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the `ready` line on a terminal as well.", rich_help_panel="Operation"
        ),
    ] = False,
    **given: Any,
) -> None:
    """Run a peer in the foreground; Ctrl-C or SIGTERM leaves the cluster.

    Without any option it serves this machine and user alone. Peers on several machines need one cluster key:
    `keygen` makes it, the first peer gets it with --cluster-key-file and an address of its own with
    --interface or --listen, and `invite` there prints the line that starts a peer on the next machine.
    Without that line a peer needs a copy of the key file, and --bootstrap with the address of another.

    With a cluster key it listens where the bootstrap
    peers can call back: on the address that leads to them. When it can serve it says so: on a terminal
    for people; into a pipe, or with --json, by `ready ` and a line of JSON: peer_id, name, control, data,
    socket, metrics, joined, peers. SIGHUP opens the log file anew and rereads key and allow files.

    An invite says cluster, bootstrap peers and key, unless other options do. The peer keeps it in its
    state directory, so that a restart needs none. --detach logs to peer.log there.

    Every setting can also be given as MOONCAKE_P2P_ and its name in capitals, such as
    MOONCAKE_P2P_DATA_LISTEN (several values with commas), or in the file of --config. An option
    wins over the environment, the environment over the file, and the file over the invite;
    `config show` tells what comes of it.
    """
    given = {name: value for name, value in given.items() if value is not None}
    detached = os.environ.pop(DETACHED_VARIABLE, None) is not None
    for_people = not json and sys.stdout.isatty()
    if detach and not detached:
        start_detached(given, for_people)
    else:
        _run(given, detached, for_people)


def _run(given: Mapping[str, Any], detached: bool, for_people: bool) -> None:
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
        with importing():
            from p2pstore.peer import run_peer
        try:
            with spelled_as_given(settings):
                if for_people:
                    run_peer(config, invite, detached=detached, ready_text=ready_for_people)
                else:
                    run_peer(config, invite, detached=detached)
            return
        except StateDirectoryInUse as error:
            if not chose_name(settings) or attempt == MAX_ATTEMPTS - 1:
                raise (name_in_use(settings) or error) from None


CLIENT_VARIABLES: Final = tuple(
    f"MOONCAKE_P2P_{name}" for name in ("NAMESPACE", "TIMEOUT", "DEBUG", "DETACHED")
)


class Action(StrEnum):
    show = "show"


@_with_settings
def config(
    action: Annotated[Action, argument("show", "The only action.")], json: Json = False, **given: Any
) -> None:
    """Show every setting of a peer with its origin.

    Takes the options of `join`, and shows what `join` would make of them here: flags over MOONCAKE_P2P_*
    over the file of --config over the invite over defaults. Nothing is started, and no secret is shown: of
    the cluster key only the file's path.
    """
    from p2pstore.settings import misspelled_variables, shown_settings

    settings, _ = gather({name: value for name, value in given.items() if value is not None})
    shown = shown_settings(settings)
    known = (*CLIENT_VARIABLES, CONFIG_VARIABLE, INVITE_VARIABLE)
    for variable, meant in misspelled_variables(os.environ, known).items():
        remark(f"{variable} is no setting; did you mean {meant}?")
    if json:
        print_json([asdict(each) for each in shown])
        return
    print_table(
        shown,
        {
            "SETTING": lambda each: each.name,
            "~VALUE": lambda each: _text(each.name, each.value),
            "~ORIGIN": lambda each: each.origin,
        },
    )


def _text(name: str, value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    if name == "memory" and isinstance(value, int):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
