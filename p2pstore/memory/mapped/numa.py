"""NUMA nodes: the memory of each of them, and binding memory to one. Shell.

glibc has no `mbind`, and libnuma is not everywhere: the system call is made by its number.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.mapping import HUGE_PAGE_BYTES
from p2pstore.objects import KIB
from p2pstore.runtime.linux import text_of

NODES: Final = Path("/sys/devices/system/node")
MAX_NODES: Final = 1024
"""The most that Linux can be built for."""
_SMALL_HUGE_PAGES: Final = "hugepages/hugepages-2048kB/free_hugepages"

_MPOL_BIND: Final = 2
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_MBIND_NUMBERS: Final[Mapping[str, int]] = MappingProxyType(
    {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
)

Bind = Callable[[int, int, ctypes.Array[ctypes.c_ulong], int], int]
"""(address, length in bytes, mask of nodes, bits in the mask) -> errno, 0 when it is done."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node with memory, in bytes. `available_bytes` are free, or hold files that were not used lately."""

    number: int
    total_bytes: int
    available_bytes: int
    free_huge_page_bytes: int


def read_nodes(folder: Path = NODES) -> dict[int, Node]:
    """The nodes that have memory, by number; none where the kernel knows nothing of nodes."""
    numbers = parse_list(text_of(folder / "has_memory") or text_of(folder / "online"))
    return {number: _read_node(number, folder / f"node{number}") for number in numbers}


def parse_list(text: str) -> list[int]:
    """The numbers in a list such as `0-1,4`. Raises `ValueError` for anything else, and for too many of them."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            span = range(int(first), int(last or first) + 1)
            if len(numbers) + len(span) > MAX_NODES:
                raise ValueError(f"{text!r} are more than {MAX_NODES:,} nodes")
            numbers += span
    return numbers


def chosen_node(number: int, folder: Path = NODES) -> Node | None:
    """The node to bind to; None where it is the only one, and there is nothing to choose. Raises `ConfigError` when
    there is no such node, or it has no memory."""
    nodes = read_nodes(folder)
    if number not in nodes:
        known = ", ".join(map(str, nodes)) or "none"
        raise ConfigError(
            f"numa_node: this machine has no NUMA node {number} with memory; it has {known}"
        )
    return nodes[number] if len(nodes) > 1 else None


def _mbind(address: int, length: int, mask: ctypes.Array[ctypes.c_ulong], mask_bits: int) -> int:
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise ConfigError(
            f"numa_node: how to bind memory on {platform.machine()} is not known: use "
            "`numactl --membind=N mooncake-p2p join ...`"
        )
    code = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_ulong(_MPOL_BIND),
        mask,
        ctypes.c_ulong(mask_bits),
        ctypes.c_ulong(0),
    )
    return 0 if code == 0 else ctypes.get_errno()


def bind(address: int, length: int, node: int, call: Bind = _mbind) -> None:
    """Have all pages of a mapping that are not there yet come from one node. For shared memory it counts for all who
    map it. Raises `ConfigError` when the kernel refuses."""
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    problem = call(address, length, mask, _WORD_BITS * len(mask) + 1)  # the kernel takes one off
    if problem:
        raise ConfigError(
            f"numa_node: the kernel does not bind memory to node {node} ({os.strerror(problem)}): a container needs "
            "CAP_SYS_NICE or a seccomp profile that allows mbind, and a cpuset with this node"
        )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _read_node(number: int, folder: Path) -> Node:
    fields = {}
    for line in text_of(folder / "meminfo").splitlines():
        label, _, rest = line.partition(":")  # "Node 0 MemTotal:  1024 kB"
        fields[label.rpartition(" ")[2]] = int(rest.split()[0]) * KIB
    huge = text_of(folder / _SMALL_HUGE_PAGES).strip()
    return Node(
        number,
        fields.get("MemTotal", 0),
        fields.get("MemFree", 0) + fields.get("Inactive(file)", 0),
        int(huge) * HUGE_PAGE_BYTES if huge.isdigit() else 0,
    )
