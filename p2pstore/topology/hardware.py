"""The parts of a machine that matter to transfers, and how far apart they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

NOT_KNOWN: Final = 1 << 16
"""Farther than any distance between NUMA nodes that firmware tells (10 to 255)."""
SAME_SWITCH_STEPS: Final = 2
"""From a device up to the upper port of its switch: the switch's lower port, the upper one."""


class PciDistance(IntEnum):
    """Distance between two devices, by the names of `nvidia-smi topo -m`; nearer is less."""

    PIX = 0
    """One switch, or nothing."""
    PXB = 1
    """Several switches below one port of the processor."""
    PHB = 2
    """The PCI root of the processor."""
    NODE = 3
    """The processor's own connections within a NUMA node."""
    SYS = 4
    """The connection between NUMA nodes; also where it is not known."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is: bridges from the PCI root (`pci0000:16`) down to the device itself. No `bridges` for what is
    not on PCI, no `numa_node` where the firmware does not say."""

    bridges: tuple[str, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node, and how far each node's memory is from it."""

    number: int
    distances: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a machine. `gpus` are in the order of their PCI addresses: `gpus[0]` is `cuda:0` to programs
    that run with `CUDA_DEVICE_ORDER=PCI_BUS_ID`, and on machines whose GPUs are alike."""

    nodes: tuple[NumaNode, ...]
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Place, ...] = ()


def pci_distance(one: Place, other: Place) -> PciDistance:
    """The distance between two devices."""
    shared = _shared_steps(one.bridges, other.bridges)
    if shared > 1:  # below one port of the processor
        steps = max(len(one.bridges), len(other.bridges)) - shared
        return PciDistance.PIX if steps <= SAME_SWITCH_STEPS else PciDistance.PXB
    if shared == 1:
        return PciDistance.PHB
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return PciDistance.NODE
    return PciDistance.SYS


def memory_distance(node: NumaNode, device: Place) -> int:
    """How far a node's memory is from a device, as firmware counts (10 is near)."""
    if device.numa_node is None:
        return NOT_KNOWN
    return node.distances.get(device.numa_node, NOT_KNOWN)


def _shared_steps(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many steps from the root two devices share."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    return shared
