"""Hardware by the kernel's account: devices in sysfs, the node of a memory address, networks of RDMA ports. Shell.

A file that is missing or says nothing is not an error: machines differ in what their firmware and drivers tell.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.state.folder import open_regular_file
from p2pstore.transfer.rdma.rdma_topology import (
    DevicePlace,
    Machine,
    Matrix,
    Nic,
    NumaNode,
    is_matrix,
    matrix_of,
    natural_order,
    overridden,
)

SYSFS: Final = Path("/sys")
NUMA_MAPS: Final = Path("/proc/self/numa_maps")
MAX_OVERRIDE_BYTES: Final = 1024 * 1024
LOCAL_DISTANCE: Final = 10
"""Of a node's memory to itself, by the firmware's convention."""
_PCI_ROOT: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PCI_DEVICE: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASS: Final = "0x03"


# --- the machine -----------------------------------------------------------------------------


def read_machine(root: Path = SYSFS) -> Machine:
    """Read this machine's devices from sysfs, mounted at `root`."""
    return Machine(tuple(_read_nodes(root)), tuple(_read_nics(root)), tuple(_read_gpus(root)))


def read_matrix(override: str | None = None, where: str = "", root: Path = SYSFS) -> Matrix:
    """The machine's matrix, as `override` changes it: JSON, or the path of a file with it. Raises `ConfigError` naming
    `where` the override was given, for one that does not fit."""
    machine = read_machine(root)
    if override is None:
        return matrix_of(machine)
    if is_matrix(override):
        return overridden(machine, override, where)
    return overridden(machine, _read_file(override, where), f"{where}: {override}")


def _read_file(path: str, where: str) -> str:
    try:
        with open_regular_file(Path(path)) as file:
            data = file.read(MAX_OVERRIDE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_OVERRIDE_BYTES:
        raise ConfigError(f"{where}: {path} has more than {MAX_OVERRIDE_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {path} is not text") from None


def _read_nodes(root: Path) -> Iterator[NumaNode]:
    """The NUMA nodes; one, where the kernel knows of none."""
    found = {}
    for folder in _entries(root / "devices/system/node"):
        if matched := re.fullmatch(r"node([0-9]+)", folder.name):
            found[int(matched[1])] = _text(folder / "distance").split()
    if not found:
        yield NumaNode(0, {0: LOCAL_DISTANCE})
    for number in sorted(found):
        told = dict(zip(sorted(found), found[number], strict=False))
        distances = {other: int(text) for other, text in told.items() if text.isdecimal()}
        yield NumaNode(number, {number: LOCAL_DISTANCE, **distances})


def _read_nics(root: Path) -> Iterator[Nic]:
    for entry in sorted(_entries(root / "class/infiniband"), key=lambda e: natural_order(e.name)):
        device = entry / "device"
        if not device.exists():  # soft-RoCE: where the network interface under it is
            parent = _text(entry / "parent")
            device = root / "class/net" / (parent or "none") / "device"
        yield Nic(entry.name, _place(device))


def _read_gpus(root: Path) -> Iterator[DevicePlace]:
    """NVIDIA's display and 3D controllers, in the order of their addresses."""
    devices = [each for each in _entries(root / "bus/pci/devices") if _is_gpu(each)]
    for device in sorted(devices, key=lambda each: _pci_number(each.name)):
        yield _place(device)


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY_CLASS)


def _pci_number(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-f]+", address))


def _place(device: Path) -> DevicePlace:
    """Where a device is: of one that is no PCI device itself (virtio), that below which it is."""
    path = device.resolve()
    while path.name and not _PCI_DEVICE.fullmatch(path.name):
        path = path.parent
    parts = path.parts
    root = next((at for at, part in enumerate(parts) if _PCI_ROOT.fullmatch(part)), len(parts))
    node = _text(path / "numa_node")
    return DevicePlace(parts[root:], int(node) if node.isdecimal() else None)  # -1: not known


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


# --- memory ----------------------------------------------------------------------------------


def location_of(address: int, length_bytes: int, maps: Path = NUMA_MAPS) -> str:
    """The location of most pages of this process's memory there; `cpu:0` where the kernel does not tell. Blocks: the
    kernel looks at every page that this process has mapped."""
    pages: dict[int, int] = {}
    for line in _text(maps).splitlines():
        start_text, _, rest = line.partition(" ")
        start = int(start_text, 16)
        if start >= address + length_bytes:
            break
        if start <= address:  # the last of these holds the address
            pages = {}
        for node, count in re.findall(r"\bN([0-9]+)=([0-9]+)", rest):
            pages[int(node)] = pages.get(int(node), 0) + int(count)
    return f"cpu:{max(pages, key=lambda node: pages[node], default=0)}"


DEVICES: Final = Path("/sys/class/infiniband")
DISCARD_PORT: Final = 9
_ACTIVE: Final = "4:"
GIGABIT_BYTES: Final = 1e9 / 8
_MAPPED_BITS: Final = 96
"""Before the IPv4 address in the GID that maps it."""
ANSWER_SECONDS: Final = 0.005
"""A neighbour answers within a millisecond."""


def interface_of(device: str, port: int, gid_index: int) -> str:
    """The network interface under an address of an RDMA device; nothing where there is none (InfiniBand)."""
    path = DEVICES / f"{device}/ports/{port}/gid_attrs/ndevs/{gid_index}"
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def port_is_active(device: str, port: int) -> bool:
    """Whether a port's link is up; not for a device that is gone."""
    try:
        state = (DEVICES / f"{device}/ports/{port}/state").read_text()
    except OSError:
        return False
    return state.startswith(_ACTIVE)


def port_bytes_per_second(device: str, port: int) -> float:
    """The rate of a port's link by its own account; 0 where the system does not say."""
    try:
        rate = (DEVICES / f"{device}/ports/{port}/rate").read_text()
        return float(rate.split()[0]) * GIGABIT_BYTES  # such as "100 Gb/sec (4X EDR)"
    except (OSError, ValueError, IndexError):
        return 0.0


def network_bits(interface: str, gid: bytes) -> int | None:
    """How many leading bits of a RoCE address name its network; None where no interface has that address."""
    import ifaddr  # a client's doctor reads the topology without the peer's libraries

    address = ipaddress.IPv6Address(gid)
    wanted = str(address.ipv4_mapped or address)
    for adapter in ifaddr.get_adapters():
        for each in adapter.ips if adapter.name == interface else []:
            if (each.ip if each.is_IPv4 else each.ip[0]) == wanted:
                return int(each.network_prefix) + (_MAPPED_BITS if each.is_IPv4 else 0)
    return None


async def wake_neighbour(interface: str, gid: bytes, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Send one datagram, to the discard port, to a RoCE address through that interface, and wait a moment: so the
    kernel finds the machine's Ethernet address. Connecting a queue pair would wait for that, a second at the first
    time, with the interpreter lock held. Does nothing for addresses of other kinds."""
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    if address is None or not interface:
        return
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock, contextlib.suppress(OSError):  # no way there: connecting will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        sock.sendto(b"\0", (str(address), DISCARD_PORT))
    await sleep(ANSWER_SECONDS)
