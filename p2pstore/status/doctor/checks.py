"""Runs checks one after the other, none longer than its deadline. Shell."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import p2pstore
from p2pstore import blocking
from p2pstore.addresses import split_address
from p2pstore.errors import ConfigError, NoLocalPeer, P2PStoreError, PeerNotInstalled
from p2pstore.local.socket_paths import SOCKET_VARIABLE, find_socket, live_sockets, socket_directories
from p2pstore.memory.mapped.mapped_memory import makes_huge_pages
from p2pstore.status.doctor import machine_rules as machine
from p2pstore.status.doctor import network_rules as network
from p2pstore.status.doctor import readings
from p2pstore.status.doctor.finding import Finding, broken, fine, skipped, warning
from p2pstore.status.doctor.network_rules import absent_local_peer, judge_local_peer, silent_local_peer
from p2pstore.transfer.rdma.rdma_hardware import read_machine, read_matrix

CHECK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """A reading and its judgement. `run` may block; what it cannot read it raises as `OSError`."""

    name: str
    run: Callable[[], Finding | Sequence[Finding]]
    seconds: float = CHECK_SECONDS


T = TypeVar("T")


def in_time(name: str, work: Callable[[], T], seconds: float) -> list[T]:
    """The outcome of `work`, which must not raise; none after `seconds`.

    It runs in a thread that is left behind when it hangs: nothing else helps against a file system whose server is
    gone. Being a daemon, it does not keep the process alive.
    """
    outcome: list[T] = []
    thread = threading.Thread(target=lambda: outcome.append(work()), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome


def run_check(check: Check) -> list[Finding]:
    """The check's findings. Never raises, and never takes longer than `check.seconds`."""
    cause = f"no answer within {check.seconds:g} s: a device or a file system hangs"
    cure = "look at `dmesg`, and for mounts whose server is gone"
    hangs = [warning(check.name, "", cause, cure)]
    return next(iter(in_time(f"doctor: {check.name}", lambda: _guarded(check), check.seconds)), hangs)


def _guarded(check: Check) -> list[Finding]:
    try:
        found = check.run()
        return [found] if isinstance(found, Finding) else list(found)
    except PeerNotInstalled as error:  # an environment of clients is whole without a peer
        return [skipped(check.name, str(error))]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return [skipped(check.name, f"{where}{error.strerror or error}")]
    except P2PStoreError as error:
        return [broken(check.name, "", str(error), "see above")]
    except Exception as error:
        cause = f"the check itself failed ({type(error).__name__}: {error})"
        return [broken(check.name, "", cause, "please report it")]


DISK_SECONDS = 20.0
LIBRARIES = ("libp2p", "trio", "msgspec", "numpy", "xxhash")


def examine_machine(
    *, socket: str | None = None, directory: str | None = None, rdma_topology: str | None = None
) -> Iterator[Finding]:
    """Findings on this machine, as they come. `directory`: where to try a disk. `rdma_topology`: the peer's
    setting of that name.

    Raises `ConfigError` when `socket` is too long to be one.
    """
    peers = LocalPeers()
    named = socket is not None or SOCKET_VARIABLE in os.environ
    for check in (*_MACHINE, *peers.checks(socket, named), *_network_checks(peers)):
        yield from run_check(check)
    topology = Check("rdma topology", lambda: _topology(rdma_topology))
    for check in (*_DEVICES, topology, Check("gpus", lambda: network.judge_gpus(readings.read_gpus()))):
        yield from run_check(check)
    for check in _SPEEDS:
        yield from run_check(check)
    if directory is not None:
        yield from run_check(Check("disk", lambda: _disk(directory), DISK_SECONDS))


def _libraries() -> Finding:
    problem = ""
    try:
        importlib.import_module("p2pstore.peer")
    except PeerNotInstalled:
        raise
    except ImportError as error:
        problem = f"a peer cannot be started: {error}"
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES} if not problem else {}
    return machine.judge_libraries(versions, problem)


def _locked_memory() -> Finding:
    soft, _ = readings.read_limit(resource.RLIMIT_MEMLOCK)
    unlimited = readings.may_lock_all_memory()
    return machine.judge_memlock(soft, unlimited=unlimited, rdma=bool(readings.read_rdma_ports()))


def _huge_pages() -> Finding:
    rdma, made = bool(readings.read_rdma_ports()), makes_huge_pages()
    return machine.judge_huge_pages(*readings.read_huge_pages(), made=made, rdma=rdma)


def _state_directory() -> Finding:
    from p2pstore.state.places import state_root

    path = state_root()
    return machine.judge_state_directory(str(path), *readings.read_directory(path))


def _socket_directories() -> Finding:
    reasons = []
    for directory in socket_directories():
        # The peer makes the directory itself, not the ones above it.
        place = directory if directory.exists() else directory.parent
        problem = "" if place.exists() else f"{place} is not there"
        problem = problem or readings.read_directory(place)[0]
        if not problem:
            return machine.judge_socket_directories(str(directory), [])
        reasons.append(problem)
    return machine.judge_socket_directories("", reasons)


def _rdma() -> list[Finding]:
    ports = readings.read_rdma_ports()
    problem = readings.read_pyverbs_problem() if ports else ""
    return network.judge_rdma(ports, pyverbs_problem=problem)


def _topology(told: str | None) -> Finding | list[Finding]:
    hardware = read_machine()
    try:
        matrix = read_matrix(told, "rdma_topology")
    except ConfigError as error:
        return network.judge_wrong_topology(str(error))
    return network.judge_topology(hardware, matrix, told=told is not None)


def _disk(directory: str) -> Finding:
    rates = readings.measure_disk(Path(directory))
    return machine.judge_disk(directory, *rates, readings.DISK_BYTES)


def _network_checks(peers: LocalPeers) -> Iterator[Check]:
    ports = ((network.CONTROL_PORT, "control"), (network.DATA_PORT, "data"))
    for number, what in ports:

        def port(number: int = number, what: str = what) -> Finding:
            user = peers.ports.get(number, "")
            return network.judge_port(number, what, readings.try_port(number), user)

        yield Check(f"port {number}", port)
    yield from _NETWORK


_NETWORK: Final = (
    Check(
        "congestion control",
        lambda: network.judge_congestion_control(*readings.read_congestion_control()),
    ),
    Check(
        "somaxconn",
        lambda: network.judge_backlog(int(readings.read_text("/proc/sys/net/core/somaxconn"))),
    ),
)
_MACHINE: Final = (
    Check(
        "python", lambda: machine.judge_python(sys.version_info[:3], platform.python_implementation())
    ),
    Check("kernel", lambda: machine.judge_kernel(platform.system(), platform.release())),
    Check("libraries", _libraries, 15.0),
    Check("clock", lambda: machine.judge_clock(readings.read_clock())),
    Check("memory", lambda: machine.judge_memory(readings.read_memory())),
    Check("huge pages", _huge_pages),
    Check("numa", lambda: machine.judge_numa(*readings.read_numa())),
    Check("shared memory", lambda: machine.judge_memfd(readings.try_memfd())),
    Check("/dev/shm", lambda: machine.judge_shm_directory(*readings.read_shm_directory())),
    Check("locked memory", _locked_memory),
    Check("open files", lambda: machine.judge_open_files(*readings.read_limit(resource.RLIMIT_NOFILE))),
    Check("socket directory", _socket_directories),
    Check("state directory", _state_directory),
)
_DEVICES: Final = (
    Check("interfaces", lambda: [network.judge_interface(each) for each in readings.read_interfaces()]),
    Check("rdma", _rdma),
)
_SPEEDS: Final = (
    Check("memory copy", lambda: machine.judge_copy(readings.measure_copy())),
    Check("checksums", lambda: machine.judge_hash(readings.measure_hash())),
)
ANSWER_SECONDS: Final = 2.0


@dataclass(slots=True)
class LocalPeers:
    """Ports of the local peers; filled by the checks."""

    ports: dict[int, str] = field(default_factory=dict)

    def checks(self, socket: str | None, named: bool) -> list[Check]:
        """A check per peer. `named`: the socket was named, by option or environment, so it must answer."""
        paths = [find_socket(socket)] if named else live_sockets()
        if not paths:
            return [Check("peer", lambda: fine("peer", "none runs on this machine"))]
        return [
            Check(f"peer at {path}", lambda path=path: self._examine(path), 2 * CHECK_SECONDS)  # type: ignore[misc]  # bound now
            for path in paths
        ]

    def _examine(self, path: Path) -> Sequence[Finding]:
        try:
            with blocking.connect(path, timeout=ANSWER_SECONDS) as client:
                document = client.statistics()
        except NoLocalPeer as error:
            return [absent_local_peer(str(path), str(error))]
        except (P2PStoreError, OSError) as error:
            return [silent_local_peer(str(path), str(error) or type(error).__name__)]
        peer = document["peer"]
        for address in (*peer.get("control", ()), *peer.get("data", ())):
            self.ports[split_address(address, "address")[1]] = peer["name"]
        return judge_local_peer(document, p2pstore.__version__)
