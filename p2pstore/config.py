"""The peer's settings, typed and checked; `p2pstore.settings` says where they come from."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec

from p2pstore.addresses import (
    is_loopback,
    on_loopback,
    refuse_link_local,
    refuse_wildcard,
    split_address,
    split_peer_address,
)
from p2pstore.errors import ConfigError
from p2pstore.memory.areas import MAX_QUOTAS
from p2pstore.memory.policies import DEFAULT_POLICY, PolicyName
from p2pstore.memory.segment_layout import GRANULE_BYTES, round_up
from p2pstore.objects import GIB, MIB, encode_namespace, format_bytes, parse_bytes
from p2pstore.runtime.linux import memory_limits

ENVIRONMENT_PREFIX: Final = "MOONCAKE_P2P_"
MINIMUM_MEMORY_BYTES: Final = 1 * MIB
MIN_MEMORY_BYTES: Final = 64 * MIB
MAX_MEMORY_BYTES: Final = 4 * GIB
"""Bounds of the default memory."""
MEMORY_PIECE_BYTES: Final = 2 * MIB
"""Memory that is added has a multiple of this, as huge pages need."""
MAX_MEMORY_PIECES: Final = 7
MINIMUM_SSD_BYTES: Final = 256 * MIB
MAX_NAME_BYTES: Final = 64
USER_KEY_NAME: Final = "user.key"
"""A file among the state directories, which are named by peers (`p2pstore.state.places`)."""

NEEDS: Final[Mapping[str, tuple[str, str]]] = {
    "ssd_capacity": ("ssd", "there is no SSD"),
    "ssd_writes_per_day": ("ssd", "there is no SSD"),
    "keep_memory": ("memory_path", "only memory in a file can be kept"),
    "http_token_file": ("metrics", "no HTTP server"),
    "kv_events_replay": ("kv_events", "there is no stream of events"),
}
"""Setting -> the one that it needs, and what is lacking without."""

TransportName = Literal["auto", "shm", "rdma", "tcp"]
NetworkName = Literal["lan", "wan", "local"]
DirectoryName = Literal["auto", "full", "partitioned"]
HugePagesName = Literal["auto", "never", "require"]
SwitchName = Literal["off", "on"]
OthersMay = Literal["read", "write"]
EventsOf = Literal["peer", "fleet"]


class _NamesAreChecked(msgspec.StructMeta):
    """A `TypeError` for an unknown setting names the nearest known one."""

    def __call__(cls, *arguments: Any, **settings: Any) -> Any:
        for name in settings:
            if name not in cls.__struct_fields__:
                import difflib  # takes 7 ms: only after a mistake

                near = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                meant = f"did you mean {near[0]}?" if near else "see help(p2pstore.PeerConfig)"
                raise TypeError(f"PeerConfig has no setting {name!r}: {meant}")
        return super().__call__(*arguments, **settings)


class MemoryPiece(NamedTuple):
    """Memory to add: `size` bytes from a NUMA node, or in a file."""

    size: int
    node: int | None = None
    path: str | None = None

    def with_absolute_path(self) -> str:
        """As a setting, independent of the working directory."""
        where = f"node:{self.node}" if self.path is None else os.path.abspath(self.path)
        return f"{self.size}@{where}"


def _bytes_above_0(text: str | int, spelled: str) -> int:
    size = parse_bytes(text, spelled)
    if not size:
        raise ConfigError(f"{spelled}: {text!r} must be above 0 bytes")
    return size


def _memory_piece(text: str, spelled: str) -> MemoryPiece:
    size_text, _, where = text.partition("@")
    size = _bytes_above_0(size_text, spelled)
    size += -size % MEMORY_PIECE_BYTES
    if "/" in where:
        return MemoryPiece(size, path=where)
    node = where.removeprefix("node:")
    if node == where or not re.fullmatch("[0-9]{1,4}", node):
        raise ConfigError(
            f"{spelled}: {text!r} does not say where: write SIZE@node:N, or SIZE@FILE with a slash in its path"
        )
    return MemoryPiece(size, node=int(node))


def _check_namespace(name: str, spelled: str) -> None:
    try:
        encode_namespace(name)
    except ValueError as error:
        raise ConfigError(f"{spelled}: {error}") from None


def _sizes(setting: list[str] | dict[str, str | int], spelled: str) -> dict[str, int]:
    if isinstance(setting, dict):
        return {name: parse_bytes(size, spelled) for name, size in setting.items()}
    found: dict[str, int] = {}
    for text in setting:
        namespace, equals, size = text.rpartition("=")  # a namespace may have a `=` in it
        if not equals:
            raise ConfigError(f"{spelled}: {text!r} is not NAMESPACE=SIZE, such as default=1GiB")
        bytes_of_it = parse_bytes(size, spelled)
        if namespace in found:
            raise ConfigError(f"{spelled}: {namespace!r} has two of them")
        found[namespace] = bytes_of_it
    return found


class PeerConfig(msgspec.Struct, metaclass=_NamesAreChecked, forbid_unknown_fields=True, kw_only=True):
    """Settings of one peer. Field names are the command line's option names with underscores.

    Sizes are bytes or text such as `4GiB`. Addresses are `HOST:PORT` (`[v6]:PORT`); port 0 means any free one.

    Network. `interface` (a name, or a CIDR with one address of this machine): where the peer listens without `listen`.
    Neither given: with a cluster key or `insecure`, the address that leads to a bootstrap peer; else loopback. The port
    is then 17946, or any free one when that is taken. `network`: timing of suspicion and of new copies after a death,
    `lan` within a data centre, `wan` between data centres, `local` on one machine. `transport`: how this peer reads
    from others; `auto` takes the best that works, the rest are strict. `rdma_device`: the RDMA devices to use; unset:
    any. `rdma_topology`: which of them are near which memory, as a JSON matrix or a file with one (`{"cpu:0":
    [["mlx5_0"], ["mlx5_1"]]}`: preferred and fallback), in place of the machine's own description. `data_tls`: `on`
    serves reads over TLS only, and not by RDMA; each holder decides this for reads of it. `directory`: this peer knows
    the locations of all objects (`full`), or of its part and asks others for the rest (`partitioned`); `auto` decides
    by `index_memory` and the size of the cluster.

    Memory. `memory` unset: an eighth of what this process may use, at most 4 GiB; 0: none, for a peer that only serves
    clients of its host. `huge_pages`: reserved ones when there are enough, else transparent ones (`auto`), neither
    (`never`), reserved ones only (`require`). `memory_path`: the file of this memory, created at the start and removed
    at the end: on tmpfs, hugetlbfs, or a file system of CXL or persistent memory. `keep_memory`: the file stays, and a
    restart on the same boot with the same state directory begins with its objects; `leave` removes it. `numa_node`: its
    node; unset: the kernel's choice. `more_memory`: further parts, `SIZE@node:N`, or `SIZE@FILE` as `memory_path` (a
    path with a slash). `eviction_policy`: `prefix` evicts chains of blocks from their tails and keeps what is read
    again; `lru` evicts the least recently used; `s3-fifo` new objects that were not read twice. `quota`: memory
    reserved for a namespace (`NAMESPACE=SIZE`, or a table); others use it while it is free. `cap`: upper limit of such
    a namespace in this peer's memory and SSD together. `checkpoint_memory`: limit of checkpoints that clients fetch to
    memory, beside `memory`; unset: half of what is available then.

    SSD and state. `ssd`: a directory on a local SSD, or a block device, for objects that memory has no room for; its
    objects come back after a restart. `ssd_capacity`: taken at the start; unset: half of what is free, or the whole
    device. `ssd_writes_per_day`: write budget; unset: no limit. `state_dir` unset: an identity for this run only.

    Access. `socket_others`: rights of other users at the socket, where its mode admits them. `metrics` (`http` in
    options and files): HTTP address of the status page, `/metrics`, `/livez` and `/readyz`, without authentication; a
    port alone: on loopback; unset: none. `metrics_keys`: the page shows the most-read keys, not only namespaces.
    `http_token_file`: the token that queries of routers must show there; unset: they are answered on loopback only.
    `kv_events`: ZeroMQ endpoint (`tcp://127.0.0.1:5557`) of events about the keys of `kv_events_namespace` that this
    peer holds, or (`kv_events_of`) the fleet, open to all who can reach it; `kv_events_replay`: for what they missed.
    """

    name: str = ""
    cluster: str = "default"
    listen: str | None = None
    interface: str | None = None
    data_listen: list[str] = []
    advertise: str | None = None
    data_advertise: list[str] = []
    bootstrap: list[str] = []
    join_timeout: float = 5.0
    network: NetworkName = "lan"
    memory: str | int | None = None
    memory_path: str | None = None
    keep_memory: bool = False
    more_memory: list[str] = []
    eviction_policy: PolicyName = DEFAULT_POLICY
    quota: list[str] | dict[str, str | int] = []
    cap: list[str] | dict[str, str | int] = []
    ssd: str | None = None
    ssd_capacity: str | int | None = None
    ssd_writes_per_day: str | int | None = None
    huge_pages: HugePagesName = "auto"
    numa_node: int | None = None
    max_objects: int | None = None
    transport: TransportName = "auto"
    rdma_device: list[str] = []
    rdma_topology: str | None = None
    data_tls: SwitchName = "off"
    directory: DirectoryName = "auto"
    index_memory: str | int = "1GiB"
    checkpoint_memory: str | int | None = None
    cluster_key_file: str | None = None
    allow_file: str | None = None
    insecure: bool = False
    state_dir: str | None = None
    socket: str | None = None
    socket_mode: str | None = None
    socket_group: str | None = None
    socket_others: OthersMay = "write"
    max_leased: str | int = "50%"
    drain_timeout: float = 10.0
    metrics: str | None = None
    metrics_keys: bool = False
    http_token_file: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_of: EventsOf = "peer"
    kv_events_namespace: str = "default"
    slow_operation: float = 0.1
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_file: str | None = None

    def checked(self, spelled: Mapping[str, str] | None = None) -> PeerConfig:
        """A copy with defaults. Raises `ConfigError` naming the wrong setting as `spelled` (setting -> text) has it."""
        says = {field: field for field in self.__struct_fields__} | dict(spelled or {})
        check_types(msgspec.structs.asdict(self), says, strict=True)
        name = name_or_host(self.name, says["name"])
        _check_namespace(self.cluster, says["cluster"])
        for setting, (needed, what) in NEEDS.items():
            if getattr(self, setting) not in (None, False) and getattr(self, needed) is None:
                raise ConfigError(f"{says[setting]}: {what}; say where with {says[needed]}")
        self._check_addresses(says)
        memory = self._memory_bytes(says["memory"])
        if 0 != memory < MINIMUM_MEMORY_BYTES:
            raise ConfigError(
                f"{says['memory']}: {self.memory!r} is too little; give at least 1MiB, or 0 for a peer that "
                "offers none"
            )
        self._check_where_memory_is(memory, says)
        self._check_ssd(memory, says)
        pieces = self._memory_pieces(says["more_memory"])
        if pieces and not memory:
            raise ConfigError(f"{says['more_memory']}: with memory 0 there is nothing to add to")
        self._check_quotas(memory + sum(each.size for each in pieces), says["quota"])
        self._check_caps(says["cap"], says["quota"])
        _check_namespace(self.kv_events_namespace, says["kv_events_namespace"])
        if self.kv_events_of == "fleet" and self.directory == "partitioned":
            raise ConfigError(
                f"{says['kv_events_of']}: a peer with a partitioned directory does not know the fleet; let one with a "
                "full directory publish it"
            )
        if self.max_objects is not None and self.max_objects < 1:
            raise ConfigError(f"{says['max_objects']}: {self.max_objects} must be at least 1")
        for setting in ("rdma_device", "rdma_topology"):
            if getattr(self, setting) and self.transport not in ("auto", "rdma"):
                raise ConfigError(
                    f"{says[setting]}: transport {self.transport} uses no RDMA device; use auto or rdma"
                )
            if getattr(self, setting) and self.data_tls == "on":
                raise ConfigError(
                    f"{says['data_tls']}: what RDMA moves is not encrypted; leave out {setting}"
                )
        if self.data_tls == "on" and self.transport == "rdma":
            raise ConfigError(
                f"{says['data_tls']}: what RDMA moves is not encrypted; use transport auto or tcp"
            )
        for setting in ("join_timeout", "drain_timeout", "slow_operation"):
            value = getattr(self, setting)
            if not 0 <= value <= 86_400:
                raise ConfigError(f"{says[setting]}: {value!r} must be 0 to 86400 seconds")
        _bytes_above_0(self.index_memory, says["index_memory"])
        if self.checkpoint_memory is not None:
            parse_bytes(self.checkpoint_memory, says["checkpoint_memory"])
        self.socket_mode_bits(says["socket_mode"])
        self.max_leased_bytes(memory + sum(each.size for each in pieces), says["max_leased"])
        metrics = None if self.metrics is None else on_loopback(self.metrics)
        return msgspec.structs.replace(self, name=name, memory=memory, metrics=metrics)

    def _check_ssd(self, memory: int, says: Mapping[str, str]) -> None:
        if self.ssd is None:
            return
        if not self.ssd:
            raise ConfigError(f"{says['ssd']}: name a directory, or a block device")
        if not memory:
            raise ConfigError(
                f"{says['ssd']}: with memory 0 there is nothing that objects could be read into"
            )
        if self.ssd_capacity is not None:
            capacity = parse_bytes(self.ssd_capacity, says["ssd_capacity"])
            if capacity < MINIMUM_SSD_BYTES:
                raise ConfigError(
                    f"{says['ssd_capacity']}: {self.ssd_capacity!r} is too little; give at least 256MiB"
                )
        if self.ssd_writes_per_day is not None:
            _bytes_above_0(self.ssd_writes_per_day, says["ssd_writes_per_day"])

    def _check_quotas(self, memory: int, spelled: str) -> None:
        quotas = _sizes(self.quota, spelled)
        for namespace, size in quotas.items():
            _check_namespace(namespace, spelled)
            if not size:
                raise ConfigError(f"{spelled}: that of {namespace!r} must be above 0 bytes")
        if len(quotas) > MAX_QUOTAS:
            raise ConfigError(f"{spelled}: at most {MAX_QUOTAS} namespaces can have one")
        whole = sum(round_up(size, GRANULE_BYTES) for size in quotas.values())
        if whole > memory:
            raise ConfigError(
                f"{spelled}: {format_bytes(whole)} together are more than the memory, {format_bytes(memory)}; "
                "give less to some, or more --memory"
            )

    def _check_caps(self, spelled: str, quota: str) -> None:
        quotas = _sizes(self.quota, quota)
        for namespace, size in _sizes(self.cap, spelled).items():
            reserved = quotas.get(namespace)
            if reserved is None:
                raise ConfigError(f"{spelled}: {namespace!r} has no {quota}")
            if size < round_up(reserved, GRANULE_BYTES):
                raise ConfigError(
                    f"{spelled}: {format_bytes(size)} for {namespace!r} are less than its {quota}"
                )

    def _check_where_memory_is(self, memory: int, says: Mapping[str, str]) -> None:
        if self.numa_node is not None and self.numa_node < 0:
            raise ConfigError(
                f"{says['numa_node']}: {self.numa_node} is no NUMA node; they count from 0"
            )
        if self.keep_memory and self.more_memory:
            raise ConfigError(
                f"{says['keep_memory']}: memory can be kept in one file only; leave out {says['more_memory']}"
            )
        if self.memory_path is None:
            return
        if not memory:
            raise ConfigError(f"{says['memory_path']}: with memory 0 there is nothing to put there")
        if self.numa_node is not None:
            raise ConfigError(
                f"{says['numa_node']}: memory in a file is where its file system has it; leave out one of the two"
            )
        if self.huge_pages == "require":
            raise ConfigError(
                f"{says['huge_pages']}: the pages of a file are those of its file system; put it on hugetlbfs instead"
            )

    def _check_addresses(self, says: Mapping[str, str]) -> None:
        listening = [("listen", self.listen)] if self.listen is not None else []
        listening += [("data_listen", address) for address in self.data_listen]
        for setting, address in listening:
            host, _ = split_address(address, says[setting])
            refuse_link_local(host, says[setting])
            if not is_loopback(host):
                self.refuse_without_key(f"{says[setting]}: {address}")
        if self.metrics is not None:
            split_address(on_loopback(self.metrics), says["metrics"])
        for address in self.bootstrap:
            split_peer_address(address, says["bootstrap"])
        told = [("advertise", self.advertise)] if self.advertise is not None else []
        told += [("data_advertise", address) for address in self.data_advertise]
        for setting, address in told:
            host, _ = split_address(address, says[setting], default_port=0)
            refuse_link_local(host, says[setting])
            refuse_wildcard(host, says[setting])

    def refuse_without_key(self, what: str) -> None:
        """Raise `ConfigError` when strangers could reach `what` without a key."""
        if not self.cluster_key_file and not self.insecure:
            raise ConfigError(
                f"{what} is reachable by others, but there is no cluster key. Make one with `mooncake-p2p "
                "keygen FILE` and pass --cluster-key-file on every peer, or say --insecure if the network "
                "keeps strangers out"
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory to offer, all together."""
        return self._memory_bytes("memory") + sum(each.size for each in self.memory_pieces)

    @property
    def memory_pieces(self) -> list[MemoryPiece]:
        """The parts of `more_memory`."""
        return self._memory_pieces("more_memory")

    @property
    def quotas(self) -> dict[str, int]:
        """Bytes of memory that are reserved, by namespace."""
        return _sizes(self.quota, "quota")

    @property
    def caps(self) -> dict[str, int]:
        """Limits in bytes of memory and SSD together, of some of these namespaces."""
        return _sizes(self.cap, "cap")

    @property
    def ssd_capacity_bytes(self) -> int | None:
        """Bytes to take of the SSD; None by default."""
        return None if self.ssd_capacity is None else parse_bytes(self.ssd_capacity, "ssd_capacity")

    @property
    def ssd_bytes_per_day(self) -> int | None:
        """Write budget of the SSD per day; None for no limit."""
        limit = self.ssd_writes_per_day
        return None if limit is None else parse_bytes(limit, "ssd_writes_per_day")

    def _memory_pieces(self, spelled: str) -> list[MemoryPiece]:
        if len(self.more_memory) > MAX_MEMORY_PIECES:
            raise ConfigError(f"{spelled}: at most {MAX_MEMORY_PIECES} may be added")
        return [_memory_piece(each, spelled) for each in self.more_memory]

    def _memory_bytes(self, spelled: str) -> int:
        if self.memory is None:
            return min(MAX_MEMORY_BYTES, max(MIN_MEMORY_BYTES, usable_memory_bytes() // 8))
        return parse_bytes(self.memory, spelled)

    def max_leased_bytes(self, memory: int, spelled: str = "max_leased") -> int:
        """Bytes that one client may hold leased at once."""
        if isinstance(self.max_leased, str) and self.max_leased.endswith("%"):
            try:
                percent = float(self.max_leased[:-1])
            except ValueError:
                raise ConfigError(f"{spelled}: {self.max_leased!r} is not a percentage") from None
            if not 0 < percent <= 100:
                raise ConfigError(f"{spelled}: {self.max_leased!r} must be above 0% and at most 100%")
            return int(memory * percent / 100)
        return _bytes_above_0(self.max_leased, spelled)

    def socket_mode_bits(self, spelled: str = "socket_mode") -> int:
        """The local socket's permission bits; by default this user's, and those of `socket_group`."""
        if self.socket_mode is None:
            return 0o660 if self.socket_group else 0o600
        try:
            mode = int(self.socket_mode, 8)
        except ValueError:
            mode = -1
        if not 0 <= mode <= 0o777:
            raise ConfigError(f"{spelled}: {self.socket_mode!r} is not an octal mode such as 0600")
        return mode


def name_or_host(name: str, spelled: str) -> str:
    """A peer's name: this host's when it has none. Raises `ConfigError` when it cannot be shown, or name files."""
    name = name or socket.gethostname() or "peer"
    if (
        not name.isprintable()  # nor what cannot be encoded
        or len(name.encode()) > MAX_NAME_BYTES
        or "/" in name
        or name in (".", "..", USER_KEY_NAME)
    ):
        raise ConfigError(
            f"{spelled}: {name!r} must be 1 to 64 bytes without '/' and control characters, and not ., .. or "
            f"{USER_KEY_NAME}"
        )
    return name


def usable_memory_bytes() -> int:
    """Memory for this process: the smallest of the host's memory and the limits of its cgroups."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit, _ in memory_limits())])


def check_types(settings: Mapping[str, Any], spelled: Mapping[str, str], *, strict: bool) -> PeerConfig:
    """Settings of the right types. Raises `ConfigError` naming the setting, the value and what is allowed."""
    try:
        return msgspec.convert(settings, PeerConfig, strict=strict)
    except msgspec.ValidationError as error:
        parts = _VALIDATION_ERROR.fullmatch(str(error))
        if parts is None:
            raise ConfigError(str(error)) from None
    name, index = parts["name"], parts["index"]
    value = settings[name]
    where = spelled.get(name, name)
    if index:
        where, value = f"{where}[{index}]", value[int(index)]
    if parts["member"]:
        raise ConfigError(f"{where}: each value must be {_wanted(parts['problem'])}")
    kinds = {field.name: field.type for field in msgspec.structs.fields(PeerConfig)}
    if get_origin(kinds[name]) is Literal:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(get_args(kinds[name]))}")
    raise ConfigError(f"{where}: {value!r} must be {_wanted(parts['problem'])}")


_VALIDATION_ERROR: Final = re.compile(
    r"(?P<problem>.*) - at `\$\.(?P<name>\w+)(?:\[(?P<index>\d+)\]|(?P<member>\[\.\.\.\]))?`"
)
_KINDS: Final = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
}


def _wanted(problem: str) -> str:
    """The type that msgspec expected (``Expected `int | str`, got `float` ``), in plain words."""
    expected = re.match(r"Expected `([^`]*)`", problem)
    if expected is None:
        return f"right: {problem.lower()}"
    kinds = [kind for kind in expected[1].split(" | ") if kind != "null"]
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds)
