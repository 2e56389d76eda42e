"""Judgements about this machine's software, memory, limits and clock. Pure: readings in, findings out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from p2pstore.objects import GIB, MIB, format_bytes
from p2pstore.status.doctor.finding import Finding, broken, fine, skipped, warning

MINIMUM_KERNEL: Final = (3, 17)
"""memfd_create."""
GOOD_KERNEL: Final = (5, 14)
"""MADV_POPULATE_WRITE: memory is prefaulted without being written."""
FEW_FILES: Final = 256
ENOUGH_FILES: Final = 4096
"""1,024 data connections, 1,024 clients with a segment each, control connections, files."""
LITTLE_MEMORY_BYTES: Final = 64 * MIB
LITTLE_DISK_BYTES: Final = 64 * MIB
NO_DISK_BYTES: Final = 1 * MIB
SLOW_COPY: Final = 2e9
SLOW_HASH: Final = 5e9
SLOW_DISK: Final = 100e6
CLOCK_ERROR_SECONDS: Final = 1.0
"""Hybrid clock stamps 10 s ahead are refused; tickets last 120 s."""


def judge_python(version: tuple[int, int, int], implementation: str) -> Finding:
    text = f"{implementation} {'.'.join(map(str, version))}"
    if version < (3, 11, 0):
        return broken("python", text, "p2pstore needs Python 3.11", "install Python 3.11 or newer")
    return fine("python", text)


def judge_kernel(system: str, release: str) -> Finding:
    numbers = re.match(r"(\d+)\.(\d+)", release)
    text = f"{system} {release}"
    if system != "Linux":
        return broken("kernel", text, "p2pstore runs on Linux only", "use a Linux machine or VM")
    if numbers is None:
        return skipped("kernel", f"{release!r} is not a version")
    version = (int(numbers[1]), int(numbers[2]))
    if version < MINIMUM_KERNEL:
        return broken("kernel", text, "memfd_create is missing", "upgrade to Linux 5.14 or newer")
    if version < GOOD_KERNEL:
        cause = "memory cannot be prefaulted in the background: first puts are slow"
        cure = "upgrade to Linux 5.14 or newer"
        return warning("kernel", text, cause, cure)
    return fine("kernel", text)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes. `limit_bytes` and `limit_used_bytes` are of the tightest cgroup, None without a limit."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    limit_used_bytes: int = 0


def judge_memory(reading: MemoryReading) -> Finding:
    left = reading.available_bytes
    text = f"{format_bytes(left)} of {format_bytes(reading.total_bytes)} available"
    place = "this machine"
    if reading.limit_bytes is not None and reading.limit_bytes < reading.total_bytes:
        in_group = max(0, reading.limit_bytes - reading.limit_used_bytes)
        text += f", {format_bytes(in_group)} of the cgroup's {format_bytes(reading.limit_bytes)}"
        if in_group < left:
            left, place = in_group, "this cgroup (container)"
    default = min(4 * GIB, max(LITTLE_MEMORY_BYTES, _usable(reading) // 8))
    if left < LITTLE_MEMORY_BYTES:
        cause = f"{place} has next to nothing left for a peer"
        cure = "stop something, or raise the container's memory limit"
        return broken("memory", text, cause, cure)
    if left < default:
        cause = f"a peer offers {format_bytes(default)} here by default, and {place} has less left"
        cure = f"join with --memory {max(1, left // 2 // MIB)}MiB, or make room"
        return warning("memory", text, cause, cure)
    return fine("memory", text)


def _usable(reading: MemoryReading) -> int:
    return min(reading.total_bytes, reading.limit_bytes or reading.total_bytes)


def judge_memlock(soft_bytes: int | None, *, unlimited: bool, rdma: bool) -> Finding:
    """`soft_bytes` None: no limit; `unlimited`: the limit does not count for this process. Only RDMA locks memory."""
    text = "unlimited" if soft_bytes is None else format_bytes(soft_bytes)
    if unlimited and soft_bytes is not None:
        text += ", which does not count for this user (CAP_IPC_LOCK)"
    elif rdma and soft_bytes is not None:
        cause = "registering memory with the RDMA device locks it: a segment above this limit is not read by RDMA"
        cure = "`ulimit -l unlimited`, LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1"
        return warning("locked memory", text, cause, cure)
    return fine("locked memory", text + ("" if rdma else " (only RDMA needs it)"))


def judge_open_files(soft: int | None, hard: int | None) -> Finding:
    """None: unlimited."""
    text = f"{_count(soft)}, at most {_count(hard)}"
    cure = "`ulimit -n 65536`, or LimitNOFILE=65536 in the unit"
    if soft is not None and soft < FEW_FILES:
        return broken("open files", text, "too few for a peer with some clients", cure)
    if soft is not None and soft < ENOUGH_FILES:
        return warning(
            "open files", text, "a peer may have 1,024 data connections and 1,024 clients", cure
        )
    return fine("open files", text)


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"


def judge_huge_pages(
    total: int, free: int, page_bytes: int, shmem: str, *, made: bool, rdma: bool = False
) -> Finding:
    """`shmem`: the bracketed word of shmem_enabled. `made`: the kernel makes transparent ones when it is asked to,
    whatever that says. With an RDMA device, every page of a segment has to be pinned and known to it."""
    if total:
        size = format_bytes(page_bytes)
        return fine("huge pages", f"{free:,} of {total:,} of {size} free; shared memory: {shmem}")
    if made:
        return fine("huge pages", "none reserved; peers have transparent ones made")
    text = f"none reserved; transparent ones for shared memory: {shmem or '?'}"
    if shmem not in ("never", "deny"):
        return fine("huge pages", text)
    advise = (
        "Linux 6.1 makes transparent ones for peers, before that `advise` in "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled does"
    )
    if rdma:
        cause = (
            "an RDMA device keeps an entry for each page: of 4 KiB they are many, and its cache is small"
        )
        cure = f"{advise}; or reserve some: `sysctl vm.nr_hugepages`"
        return warning("huge pages", text, cause, cure)
    return fine("huge pages", f"{text} ({advise})")


def judge_numa(available_bytes: Mapping[int, int], problem: str) -> Finding:
    """By node, of those that have memory. `problem`: why the kernel does not bind memory to one, or nothing."""
    if len(available_bytes) < 2:
        return fine("numa", "one node")
    text = ", ".join(f"{node}: {format_bytes(left)}" for node, left in available_bytes.items())
    if problem:
        cause = f"memory cannot be bound to a node: {problem}"
        cure = "do without --numa-node, or allow mbind (containers: --cap-add SYS_NICE)"
        return warning("numa", text, cause, cure)
    return fine("numa", f"available by node, see --numa-node: {text}")


def judge_memfd(problem: str) -> Finding:
    if problem:
        cause = f"memory cannot be shared between processes: {problem}"
        cure = "allow memfd_create and its seals (a seccomp profile may forbid them)"
        return broken("shared memory", "", cause, cure)
    return fine("shared memory", "memfd with seals")


def judge_shm_directory(size_bytes: int | None, free_bytes: int, writable: bool) -> Finding:
    """/dev/shm: p2pstore does not use it, engines beside it do. `size_bytes` None: not there."""
    if size_bytes is None or not writable:
        state = "missing" if size_bytes is None else "not writable"
        cause = "p2pstore does without, but NCCL and inference engines on this machine need it"
        cure = "mount a tmpfs there (containers: --ipc=host or --shm-size)"
        return warning("/dev/shm", state, cause, cure)
    return fine("/dev/shm", f"{format_bytes(free_bytes)} of {format_bytes(size_bytes)} free")


def judge_state_directory(path: str, problem: str, free_bytes: int) -> Finding:
    name = "state directory"
    if problem:
        return broken(name, path, problem, "choose another with --state-dir, or mend its owner")
    text = f"{path}, {format_bytes(free_bytes)} free"
    if free_bytes < NO_DISK_BYTES:
        return broken(name, text, "the disk is full", "free some space, or choose --state-dir")
    if free_bytes < LITTLE_DISK_BYTES:
        return warning(name, text, "the disk is nearly full", "free some space")
    return fine(name, text)


def judge_socket_directories(usable: str, reasons: list[str]) -> Finding:
    """`usable`: the first directory where a socket can be made, or nothing."""
    if usable:
        return fine("socket directory", usable)
    cause = f"there is no place for the local socket ({'; '.join(reasons)})"
    cure = "set XDG_RUNTIME_DIR, or name one with --socket"
    return broken("socket directory", "", cause, cure)


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The kernel's clock: whether it is disciplined, and its maximum error."""

    synchronised: bool
    maximum_error_seconds: float


def judge_clock(reading: ClockReading) -> Finding:
    cure = "run chrony, ntpd or systemd-timesyncd on every machine"
    if not reading.synchronised:
        cause = "peers refuse stamps over 10 s ahead, and tickets last 2 minutes: clocks must agree"
        return warning("clock", "not synchronised", cause, cure)
    text = f"synchronised, at most {reading.maximum_error_seconds * 1000:.1f} ms off"
    if reading.maximum_error_seconds > CLOCK_ERROR_SECONDS:
        return warning("clock", text, "the clock was not corrected for long", cure)
    return fine("clock", text)


def judge_copy(bytes_per_second: float) -> Finding:
    cause = "every get and put copies: this machine is busy, or its memory is slow"
    cure = "look for other load (`top`); a virtual machine may lack huge pages on its host"
    return _judge_speed("memory copy", "", bytes_per_second, SLOW_COPY, cause, cure)


def judge_hash(bytes_per_second: float) -> Finding:
    cause = "xxh3 should be faster than memory: this machine is busy, or xxhash was built without SIMD"
    cure = "look for other load (`top`), or install the xxhash wheel from PyPI"
    return _judge_speed("checksums", "xxh3 ", bytes_per_second, SLOW_HASH, cause, cure)


def _judge_speed(name: str, how: str, rate: float, slow: float, cause: str, cure: str) -> Finding:
    text = f"{rate / 1e9:.1f} GB/s"
    if rate < slow:
        return warning(name, text, cause, cure, bytes_per_second=round(rate))
    return fine(name, how + text, bytes_per_second=round(rate))


def judge_disk(
    directory: str, direct: bool, write_rate: float, read_rate: float, length_bytes: int
) -> Finding:
    """Rates in bytes per second, over `length_bytes`."""
    how = "O_DIRECT" if direct else "buffered"
    text = (
        f"{directory}: {how}, writes {write_rate / 1e6:,.0f} MB/s, reads {read_rate / 1e6:,.0f} MB/s "
        f"({length_bytes // MIB} MiB)"
    )
    measured = {"write_bytes_per_second": round(write_rate), "read_bytes_per_second": round(read_rate)}
    if not direct:
        cause = "this file system takes no O_DIRECT: values would go through the page cache"
        cure = "choose a directory on ext4 or xfs on local NVMe"
        return warning("disk", text, cause, cure, **measured)
    if min(write_rate, read_rate) < SLOW_DISK:
        return warning("disk", text, "slower than any SSD", "choose local NVMe", **measured)
    return fine("disk", text, **measured)


def judge_libraries(versions: dict[str, str], problem: str) -> Finding:
    if problem:
        return broken(
            "libraries", "", problem, "install p2pstore again, with the versions of its lock file"
        )
    return fine("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()))
