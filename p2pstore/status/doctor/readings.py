"""Readings of this machine: /proc, /sys, limits, clock, speeds. Shell; needs no root.

Every function raises `OSError` for what it cannot read.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import mmap
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from p2pstore.errors import ConfigError, Unavailable
from p2pstore.memory.mapped import numa
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.objects import CHUNK_BYTES, MIB, chunk_sum
from p2pstore.runtime.linux import memory_limits
from p2pstore.runtime.streams import tune_tcp
from p2pstore.status.doctor.machine_rules import ClockReading, MemoryReading
from p2pstore.status.doctor.network_rules import GpuReading, InterfaceReading, RdmaPortReading
from p2pstore.transfer.rdma.rdma_rules import GidEntry, GidKind

MAX_FILE_BYTES: Final = 64 * 1024
_TIME_ERROR: Final = 5
_STA_UNSYNC: Final = 0x40
_CAP_IPC_LOCK: Final = 14
_GID_KINDS: Final = {"IB/RoCE v1": GidKind.ROCE_V1, "RoCE v2": GidKind.ROCE_V2}
"""As the kernel writes them; others are of no use here."""
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_PCI_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1d0f": "AWS"}
_DISPLAY_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and other display controllers, and processing accelerators."""
_VIRTUAL_VENDORS: Final = frozenset({"0x1013", "0x1234", "0x15ad", "0x1af4", "0x1b36", "0x80ee"})
"""Screens of virtual machines: no accelerators."""


def read_text(path: Path | str) -> str:
    """The stripped text of a small file."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_FILE_BYTES).strip()


def _read_or(path: Path, default: str = "") -> str:
    try:
        return read_text(path)
    except OSError:  # a driver that does not say
        return default


def _number_or_none(path: Path, *, at_least: int = 0) -> int | None:
    """A number in a file; None where it is missing, or stands for "not known"."""
    text = _read_or(path)
    try:
        number = int(text)
    except ValueError:
        return None
    return number if number >= at_least else None


# --- memory ----------------------------------------------------------------------------------


def _memory_fields() -> dict[str, int]:
    """The fields of /proc/meminfo; those that are no counts are in KiB."""
    lines = (line.partition(":") for line in read_text("/proc/meminfo").splitlines())
    return {name: int(rest.split()[0]) for name, _, rest in lines}


def read_memory() -> MemoryReading:
    """Of the machine, and of the tightest cgroup around this process."""
    fields = _memory_fields()
    limit, used = min(memory_limits(), key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return MemoryReading(1024 * fields["MemTotal"], 1024 * fields["MemAvailable"], limit, used)


def read_huge_pages() -> tuple[int, int, int, str]:
    """(reserved, free, bytes each) of the default size, and the mode for shared memory."""
    fields = _memory_fields()
    modes = _read_or(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    chosen = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else ""
    return (
        fields.get("HugePages_Total", 0),
        fields.get("HugePages_Free", 0),
        fields.get("Hugepagesize", 0) * 1024,
        chosen,
    )


def read_numa() -> tuple[dict[int, int], str]:
    """Bytes available by node, and why memory cannot be bound to one, or nothing; tried where there are several."""
    nodes = numa.read_nodes()
    available = {number: node.available_bytes for number, node in nodes.items()}
    if len(nodes) < 2:
        return available, ""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = memoryview(page)
        try:
            numa.bind(address_of(view), len(view), next(iter(nodes)))
        except ConfigError as error:
            return available, str(error).partition(": ")[2]
        finally:
            view.release()
    return available, ""


def try_memfd() -> str:
    """Why memory cannot be shared the way p2pstore does it, or nothing."""
    try:
        descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return f"sealing and reopening it: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def read_shm_directory() -> tuple[int | None, int, bool]:
    """(size, free bytes, writable) of /dev/shm; size None when it is not there."""
    try:
        status = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return None, 0, False
    size = status.f_frsize
    return status.f_blocks * size, status.f_bavail * size, os.access("/dev/shm", os.W_OK)


# --- limits ----------------------------------------------------------------------------------


def read_limit(kind: int) -> tuple[int | None, int | None]:
    """(soft, hard) of a resource limit, None for unlimited."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(kind)
    )
    return soft, hard


# --- directories -----------------------------------------------------------------------------


def nearest_existing(path: Path) -> Path:
    """The path itself, or the first directory above it that is there."""
    for each in (path, *path.parents):
        if each.exists():
            return each
    return Path("/")


def read_directory(path: Path) -> tuple[str, int]:
    """(why this user cannot write there, or nothing; free bytes) of a directory, or of where it would be made."""
    place = nearest_existing(path)
    status = os.statvfs(place)
    free_bytes = status.f_bavail * status.f_frsize
    if not place.is_dir():
        return f"{place} is not a directory", free_bytes
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not writable for this user", free_bytes
    return "", free_bytes


# --- clock -----------------------------------------------------------------------------------


class _Timex(ctypes.Structure):
    """`struct timex` of adjtimex(2), as far as it is read, with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> ClockReading:
    """From adjtimex, which only reads when `modes` is 0; else from the mark of systemd-timesyncd."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:  # a container's seccomp profile forbids it
        code = ctypes.get_errno()
        if Path("/run/systemd/timesync/synchronized").exists():
            return ClockReading(True, 0.0)
        raise OSError(code, f"adjtimex: {os.strerror(code)}, and there is no systemd-timesyncd")
    synchronised = state != _TIME_ERROR and not timex.status & _STA_UNSYNC
    return ClockReading(synchronised, timex.maxerror / 1e6)


# --- network ---------------------------------------------------------------------------------


def try_port(port: int) -> str:
    """Why a peer cannot listen on a port of every interface, or nothing."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the peer does
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            return os.strerror(error.errno or 0)
    return ""


def read_congestion_control() -> tuple[str, str]:
    """(the system's default, what p2pstore's data connections use)."""
    default = read_text("/proc/sys/net/ipv4/tcp_congestion_control")
    with socket.socket() as probe:
        tune_tcp(probe)
        raw = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return default, raw.partition(b"\0")[0].decode()


def read_interfaces() -> list[InterfaceReading]:
    """Interfaces with a device behind them, and bonds; where there are none, all but loopback."""
    folder = Path("/sys/class/net")
    entries = [each for each in sorted(folder.iterdir()) if each.name != "lo" and each.is_dir()]
    real = [each for each in entries if (each / "device").exists() or (each / "bonding").exists()]
    return [_read_interface(each) for each in real or entries]


def _read_interface(entry: Path) -> InterfaceReading:
    driver = entry / "device" / "driver"
    return InterfaceReading(
        name=entry.name,
        up=_read_or(entry / "operstate") == "up",
        mtu_bytes=_number_or_none(entry / "mtu") or 0,
        speed_megabits=_number_or_none(entry / "speed", at_least=1),
        numa_node=_number_or_none(entry / "device" / "numa_node"),
        driver=driver.resolve().name if driver.exists() else "",
    )


def read_rdma_ports() -> list[RdmaPortReading]:
    """Ports of RDMA devices."""
    ports = []
    for device in sorted(_RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []:
        for port in sorted((device / "ports").iterdir()):
            ports.append(read_rdma_port(device.name, int(port.name)))
    return ports


def read_pyverbs_problem() -> str:
    """Why pyverbs does not load; nothing when it does."""
    from p2pstore.transfer.rdma.rdma_verbs import load_verbs

    try:
        load_verbs()
    except Unavailable as error:
        return str(error)
    return ""


def may_lock_all_memory() -> bool:
    """Whether this process has the capability that the limit of locked memory does not count for."""
    lines = read_text("/proc/self/status").splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(effective >> _CAP_IPC_LOCK & 1)


def read_rdma_port(device: str, number: int) -> RdmaPortReading:
    """One port of an RDMA device."""
    port = _RDMA_DEVICES / device / "ports" / str(number)
    code, _, state = _read_or(port / "state", "0: UNKNOWN").partition(":")
    return RdmaPortReading(
        device=device,
        port=number,
        active=code.strip() == "4",
        state=state.strip(),
        link_layer=_read_or(port / "link_layer", "InfiniBand"),
        rate=_read_or(port / "rate", "rate not known"),
        gids=tuple(_read_gids(port)),
    )


def _read_gids(port: Path) -> Iterator[GidEntry]:
    types = port / "gid_attrs" / "types"
    for each in sorted(types.iterdir()) if types.is_dir() else []:
        kind = _read_or(each)  # of a row that is not in use it cannot be read
        if kind:
            gid = ipaddress.IPv6Address(_read_or(port / "gids" / each.name, "::")).packed
            yield GidEntry(int(each.name), gid, _GID_KINDS.get(kind, -1))


def read_gpus() -> list[GpuReading]:
    """Display and 3D controllers, without those of virtual machines."""
    gpus = []
    folder = Path("/sys/bus/pci/devices")
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        vendor = _read_or(device / "vendor")
        if _read_or(device / "class")[:6] in _DISPLAY_CLASSES and vendor not in _VIRTUAL_VENDORS:
            node = _number_or_none(device / "numa_node")
            gpus.append(GpuReading(device.name, _PCI_VENDORS.get(vendor, vendor), node))
    return gpus


COPY_BYTES: Final = 64 * MIB
"""More than a processor's caches."""
HASH_BYTES: Final = 4 * MIB
DISK_BYTES: Final = 64 * MIB
DISK_PIECE_BYTES: Final = 4 * MIB
SECONDS: Final = 0.25


def _best_rate(step: Callable[[], int]) -> float:
    """Bytes per second of the fastest step within a quarter of a second: others met other load."""
    best, end = 0.0, time.perf_counter() + SECONDS
    while True:
        begin = time.perf_counter()
        length_bytes = step()
        now = time.perf_counter()
        best = max(best, length_bytes / max(now - begin, 1e-9))
        if now >= end:
            return best


def measure_copy() -> float:
    """Bytes per second of one thread between pages that are there already."""
    source, target = (np.ones(COPY_BYTES, dtype=np.uint8) for _ in range(2))

    def step() -> int:
        np.copyto(target, source)
        return COPY_BYTES

    return _best_rate(step)


def measure_hash() -> float:
    """Bytes per second of chunk sums."""
    chunks = memoryview(bytearray(b"\1" * HASH_BYTES))

    def step() -> int:
        for start in range(0, HASH_BYTES, CHUNK_BYTES):
            chunk_sum(chunks[start : start + CHUNK_BYTES])
        return HASH_BYTES

    return _best_rate(step)


def measure_disk(directory: Path) -> tuple[bool, float, float]:
    """(O_DIRECT works, bytes per second written with fdatasync, read back) of a file in `directory` that
    has no name by the time anything is written. Raises `OSError`."""
    descriptor, path = tempfile.mkstemp(prefix=".p2pstore-doctor-", dir=directory)
    try:
        try:
            fast = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            direct = True
        except OSError:
            fast, direct = os.dup(descriptor), False
    finally:
        os.unlink(path)
        os.close(descriptor)
    piece = mmap.mmap(-1, DISK_PIECE_BYTES)  # aligned to pages, as O_DIRECT wants it
    try:
        piece.write(os.urandom(DISK_PIECE_BYTES))
        pieces = DISK_BYTES // DISK_PIECE_BYTES
        begin = time.perf_counter()
        for number in range(pieces):
            _whole(os.pwrite(fast, piece, number * DISK_PIECE_BYTES))
        os.fdatasync(fast)
        written = time.perf_counter()
        for number in range(pieces):
            _whole(os.preadv(fast, [piece], number * DISK_PIECE_BYTES))
        read = time.perf_counter()
    finally:
        os.close(fast)
        piece.close()
    return direct, DISK_BYTES / (written - begin), DISK_BYTES / (read - written)


def _whole(count: int) -> None:
    if count != DISK_PIECE_BYTES:
        raise OSError(f"only {count:,} of {DISK_PIECE_BYTES:,} bytes were moved: is the disk full?")
