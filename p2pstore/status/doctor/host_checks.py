"""All checks of this machine, in the order in which they are told. Shell."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from p2pstore.errors import ConfigError, PeerNotInstalled
from p2pstore.local.socket_paths import SOCKET_VARIABLE, socket_directories
from p2pstore.memory.mapped.mapped_memory import makes_huge_pages
from p2pstore.status.doctor import machine_rules, network_rules, readings, speed
from p2pstore.status.doctor.checks import Check, run_check
from p2pstore.status.doctor.finding import Finding
from p2pstore.status.doctor.local_peers import LocalPeers
from p2pstore.topology.sysfs import read_machine, read_matrix

DISK_SECONDS = 20.0
LIBRARIES = ("libp2p", "trio", "msgspec", "numpy", "xxhash")


def examine_machine(
    *, socket: str | None = None, directory: str | None = None, rdma_topology: str | None = None
) -> Iterator[Finding]:
    """What is found on this machine, as it is found. `directory`: where to try a disk. `rdma_topology`: the peer's
    setting of that name.

    Raises `ConfigError` when `socket` is too long to be one.
    """
    peers = LocalPeers()
    named = socket is not None or SOCKET_VARIABLE in os.environ
    groups: list[Callable[[], Sequence[Check]]] = [
        _software_checks,
        _memory_checks,
        _place_checks,
        lambda: peers.checks(socket, named),
        lambda: _network_checks(peers),
        lambda: _device_checks(rdma_topology),
        lambda: _speed_checks(directory),
    ]
    for group in groups:
        for check in group():
            yield from run_check(check)


def _software_checks() -> list[Check]:
    return [
        Check(
            "python",
            lambda: [
                machine_rules.judge_python(sys.version_info[:3], platform.python_implementation())
            ],
        ),
        Check(
            "kernel",
            lambda: [machine_rules.judge_kernel(platform.system(), platform.release())],
        ),
        Check("libraries", _check_libraries, 15.0),
        Check("clock", lambda: [machine_rules.judge_clock(readings.read_clock())]),
    ]


def _check_libraries() -> list[Finding]:
    problem = ""
    try:
        importlib.import_module("p2pstore.peer")
    except PeerNotInstalled:
        raise
    except ImportError as error:
        problem = f"a peer cannot be started: {error}"
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES} if not problem else {}
    return [machine_rules.judge_libraries(versions, problem)]


def _memory_checks() -> list[Check]:
    def locked() -> list[Finding]:
        soft, _ = readings.read_limit(resource.RLIMIT_MEMLOCK)
        unlimited = readings.may_lock_all_memory()
        rdma = bool(readings.read_rdma_ports())
        return [machine_rules.judge_memlock(soft, unlimited=unlimited, rdma=rdma)]

    def huge_pages() -> list[Finding]:
        rdma = bool(readings.read_rdma_ports())
        made = makes_huge_pages()
        return [machine_rules.judge_huge_pages(*readings.read_huge_pages(), made=made, rdma=rdma)]

    return [
        Check("memory", lambda: [machine_rules.judge_memory(readings.read_memory())]),
        Check("huge pages", huge_pages),
        Check("numa", lambda: [machine_rules.judge_numa(*readings.read_numa())]),
        Check("shared memory", lambda: [machine_rules.judge_memfd(readings.try_memfd())]),
        Check(
            "/dev/shm",
            lambda: [machine_rules.judge_shm_directory(*readings.read_shm_directory())],
        ),
        Check("locked memory", locked),
        Check(
            "open files",
            lambda: [machine_rules.judge_open_files(*readings.read_limit(resource.RLIMIT_NOFILE))],
        ),
    ]


def _place_checks() -> list[Check]:
    def state() -> list[Finding]:
        from p2pstore.state.places import state_root

        path = state_root()
        return [machine_rules.judge_state_directory(str(path), *readings.read_directory(path))]

    return [Check("socket directory", _check_socket_directories), Check("state directory", state)]


def _check_socket_directories() -> list[Finding]:
    reasons = []
    for directory in socket_directories():
        # The peer makes the directory itself, not the ones above it.
        place = directory if directory.exists() else directory.parent
        problem = "" if place.exists() else f"{place} is not there"
        problem = problem or readings.read_directory(place)[0]
        if not problem:
            return [machine_rules.judge_socket_directories(str(directory), [])]
        reasons.append(problem)
    return [machine_rules.judge_socket_directories("", reasons)]


def _network_checks(peers: LocalPeers) -> list[Check]:
    def port(number: int, what: str) -> Check:
        return Check(
            f"port {number}",
            lambda: [
                network_rules.judge_port(
                    number, what, readings.try_port(number), peers.ports.get(number, "")
                )
            ],
        )

    return [
        port(network_rules.CONTROL_PORT, "control"),
        port(network_rules.DATA_PORT, "data"),
        Check(
            "congestion control",
            lambda: [network_rules.judge_congestion_control(*readings.read_congestion_control())],
        ),
        Check(
            "somaxconn",
            lambda: [
                network_rules.judge_backlog(int(readings.read_text("/proc/sys/net/core/somaxconn")))
            ],
        ),
    ]


def _device_checks(rdma_topology: str | None) -> list[Check]:
    def rdma() -> list[Finding]:
        ports = readings.read_rdma_ports()
        problem = readings.read_pyverbs_problem() if ports else ""
        return network_rules.judge_rdma(ports, pyverbs_problem=problem)

    def topology() -> list[Finding]:
        machine = read_machine()
        try:
            matrix = read_matrix(rdma_topology, "rdma_topology")
        except ConfigError as error:
            return [network_rules.judge_wrong_topology(str(error))]
        return network_rules.judge_topology(machine, matrix, told=rdma_topology is not None)

    return [
        Check(
            "interfaces",
            lambda: [network_rules.judge_interface(each) for each in readings.read_interfaces()],
        ),
        Check("rdma", rdma),
        Check("rdma topology", topology),
        Check("gpus", lambda: [network_rules.judge_gpus(readings.read_gpus())]),
    ]


def _speed_checks(directory: str | None) -> list[Check]:
    checks = [
        Check("memory copy", lambda: [machine_rules.judge_copy(speed.measure_copy())]),
        Check("checksums", lambda: [machine_rules.judge_hash(speed.measure_hash())]),
    ]
    if directory is not None:
        checks.append(
            Check(
                "disk",
                lambda: [
                    machine_rules.judge_disk(
                        directory, *speed.measure_disk(Path(directory)), speed.DISK_BYTES
                    )
                ],
                DISK_SECONDS,
            )
        )
    return checks
