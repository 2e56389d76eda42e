"""`join` runs a peer, in the foreground or detached; `config show` prints its settings with their origins."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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


SETTINGS_TEXT: Final = """\
Options
    name NAME: The peer's name, unique on this machine [hostname]
    bootstrap HOST:PORT...: Control address of any peer of the cluster
    invite LINE|-: The line that `invite` printed on another machine; - reads it from stdin
    interface NAME|CIDR: Listen on this interface's address, or the one in this network
    memory SIZE: Memory to offer; 0: none [an eighth, at most 4GiB]
    ssd DIR|DEVICE: SSD for objects that memory has no room for [none]
    cluster_key_file FILE: The cluster's key, see keygen. Without one: own user, loopback only
    metrics [HOST:]PORT: A status page for browsers, /metrics, /livez and /readyz, open to all who can reach it [none;
        a port alone: on loopback]
    config FILE.toml: Settings: option names with underscores
Cluster and network
    cluster NAME: Only peers of one cluster meet [default]
    join_timeout SECONDS: How long to try bootstrap peers at first [5]
    network lan|wan|local: How soon silent peers are suspected [lan]
    listen HOST:PORT: Control address [where bootstrap peers can call back]
    data_listen HOST:PORT...: Address for bulk data
    advertise HOST[:PORT]: Control address for others to use
    data_advertise HOST[:PORT]...: Data address for others to use
    transport auto|shm|rdma|tcp: How to read from peers; all but auto are strict [auto]
    rdma_device NAME...: RDMA device to use [any]
    rdma_topology FILE|JSON: RDMA devices near each memory [as the machine says]
    directory auto|full|partitioned: How much this peer knows of where objects are [auto]
Memory and SSD
    memory_path FILE: File to have the memory in, removed at the end [none]
    keep_memory: Keep that file, and begin with it the next time
    more_memory SIZE@WHERE...: More memory, from node:N or in a FILE
    eviction_policy prefix|lru|s3-fifo: Order of eviction when memory is full [prefix]
    quota NAMESPACE=SIZE...: Memory kept for a namespace [none]
    cap NAMESPACE=SIZE...: Most memory and SSD of a namespace with a quota
    ssd_capacity SIZE: How much of the SSD to take [half of what is free]
    ssd_writes_per_day SIZE: Most to write to the SSD in a day [no limit]
    huge_pages auto|never|require: Huge pages for memory; auto: reserved ones if enough, else transparent [auto]
    numa_node N: NUMA node that memory comes from [any]
    max_objects N: Most objects to hold
    max_leased SIZE|N%: Most that one client may hold leased [50%]
    index_memory SIZE: Memory that the full directory may take before auto partitions it [1GiB]
    checkpoint_memory SIZE: For checkpoints in memory [half of what is available]
Access
    data_tls off|on: Let others read this peer over TLS only [off]
    allow_file FILE: Peer ids that may come in, one a line; SIGHUP rereads it
    insecure: Admit every peer that reaches this one: no key
    socket PATH: Socket for clients on this machine
    socket_mode MODE: Its permissions [0600; with a group 0660]
    socket_group GROUP: Its group
    socket_others read|write: Rights of users other than this peer's there [write]
Operation
    state_dir DIR: Keeps the peer's identity [one per name]
    drain_timeout SECONDS: How long a stopping peer may take to leave [10]
    metrics_keys: Show keys on the status page, not just namespaces
    http_token_file FILE: Token of routers' queries over HTTP; without one: on loopback only
    kv_events ENDPOINT: Publish which keys are held at this ZeroMQ endpoint, such as tcp://127.0.0.1:5557, in
        Mooncake's format, to all who can reach it [none]
    kv_events_replay ENDPOINT: Endpoint where its consumers get what they missed, or all [none]
    kv_events_of peer|fleet: Publish what this peer holds, or what all peers hold together [peer]
    kv_events_namespace NAME: Publish the keys of this namespace [default]
    slow_operation SECONDS: Shortest operation that `stats --slow` keeps; 0: none [0.1]
    log_level debug|info|warning|error: Least level to log [info]
    log_format text|json: Form of log lines [text]
    log_file FILE: Log there instead of stderr
"""
"""The settings of `PeerConfig` (which takes 0.1 s to load; a test compares them), `invite` and `config`, by group; only
--help-all shows those of the later groups. Each has its metavar, or the words to choose from, or nothing for a flag;
... where it may be repeated; its help; and in brackets its default, in people's words."""
CLIENT_VARIABLES: Final = tuple(
    f"MOONCAKE_P2P_{name}" for name in ("NAMESPACE", "TIMEOUT", "DEBUG", "DETACHED")
)


class Setting(NamedTuple):
    """The option of one setting. `kind`: the Python type of its value."""

    group: str
    form: str
    kind: type
    help: str
    default: str


def _parsed(text: str) -> Iterator[tuple[str, Setting]]:
    group = ""
    for line in text.replace("\n        ", " ").splitlines():
        if not line.startswith(" "):
            group = line
            continue
        head, _, help = line.strip().partition(": ")
        name, _, form = head.partition(" ")
        kind = list if form.endswith("...") else int if form == "N" else str if form else bool
        help, _, default = help.rstrip("]").partition(" [")
        yield name, Setting(group, form.removesuffix("..."), kind, help, default)


SETTINGS: Final = dict(_parsed(SETTINGS_TEXT))


def _parameter(name: str, setting: Setting) -> inspect.Parameter:
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
    option = typer.Option(
        *names, metavar=metavar, help=text, show_default=False, rich_help_panel=setting.group
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**given` all settings as options, before its own."""
    own = inspect.signature(command, eval_str=True)
    plain = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    arguments = [each for each in plain if each.default is each.empty]
    options = [each.replace(kind=each.KEYWORD_ONLY) for each in plain if each not in arguments]
    settings = [_parameter(*each) for each in SETTINGS.items()]
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
