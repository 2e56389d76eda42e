"""The parts of a machine that matter to transfers, and how far apart they are. Pure.

Preferred and fallback network cards of each memory location: from distances, or as configured.

A location is `cpu:N`, the memory of NUMA node N, or `cuda:N`, that of a GPU. As JSON a matrix is
`{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`: the preferred cards, then the fallback ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from p2pstore.errors import ConfigError

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
class DevicePlace:
    """Where a device is: bridges from the PCI root (`pci0000:16`) down to the device itself. No `bridges` for what is
    not on PCI, no `numa_node` where the firmware does not say."""

    bridges: tuple[str, ...] = ()
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device."""

    name: str
    place: DevicePlace


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
    gpus: tuple[DevicePlace, ...] = ()


def pci_distance(one: DevicePlace, other: DevicePlace) -> PciDistance:
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


def memory_distance(node: NumaNode, device: DevicePlace) -> int:
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


_LOCATION: Final = re.compile(r"[a-z]+:[0-9]{1,4}")
_EXAMPLE: Final = '{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}'


@dataclass(frozen=True, slots=True)
class Choice:
    """Cards for one memory location: all `preferred` ones are used; then the `fallback` ones, best first."""

    preferred: tuple[str, ...]
    fallback: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Preferred ones first."""
        return self.preferred + self.fallback

    def only(self, usable: Collection[str]) -> Choice:
        """Of these cards alone: the best of them are preferred when no other is left."""
        preferred = tuple(name for name in self.preferred if name in usable)
        fallback = tuple(name for name in self.fallback if name in usable)
        return Choice(preferred, fallback) if preferred else Choice(fallback)


Matrix = Mapping[str, Choice]


def matrix_of(machine: Machine) -> Matrix:
    """The nearest cards of each location are preferred, all others are its fallback. Empty without cards."""
    if not machine.nics:
        return {}
    matrix = {}
    for node in machine.nodes:
        distances = {nic.name: memory_distance(node, nic.place) for nic in machine.nics}
        matrix[f"cpu:{node.number}"] = _nearest(distances)
    for number, gpu in enumerate(machine.gpus):
        steps = {nic.name: int(pci_distance(gpu, nic.place)) for nic in machine.nics}
        matrix[f"cuda:{number}"] = _nearest(steps)
    return matrix


def _nearest(distances: Mapping[str, int]) -> Choice:
    ordered = sorted(distances, key=lambda name: (distances[name], natural_order(name)))
    least = distances[ordered[0]]
    near = [name for name in ordered if distances[name] == least]
    return Choice(tuple(near), tuple(ordered[len(near) :]))


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """Sorts mlx5_10 behind mlx5_2."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return tuple((text, int(number or 0)) for text, number in parts)


def overridden(machine: Machine, text: str, where: str) -> Matrix:
    """The machine's matrix, with the locations that the JSON `text` names as it has them. Raises `ConfigError`,
    beginning with `where`, for what is no matrix or names what the machine lacks."""
    matrix = dict(matrix_of(machine))
    told = parse_matrix(text, where)
    names = sorted((nic.name for nic in machine.nics), key=natural_order)
    nodes = [f"cpu:{node.number}" for node in machine.nodes]
    for location, choice in told.items():
        for name in choice.all:
            if name not in names:
                raise ConfigError(
                    f"{where}: {location} names {name}, and this machine has no such RDMA device; it has "
                    f"{', '.join(names) or 'none'}"
                )
        if location.startswith("cpu:") and location not in nodes:
            raise ConfigError(
                f"{where}: {location} is no memory of this machine, which has {', '.join(nodes)}"
            )
    matrix.update(told)
    return matrix


def is_matrix(text: str) -> bool:
    """Whether a setting is meant as a matrix, rather than as the path of a file."""
    return text.lstrip().startswith("{")


def parse_matrix(text: str, where: str) -> dict[str, Choice]:
    """A matrix written as JSON. Raises `ConfigError` that begins with `where` and says what is wrong."""
    try:
        told = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); write it like {_EXAMPLE}") from None
    if not isinstance(told, dict) or not told:
        raise ConfigError(f"{where}: not an object with memory locations; write it like {_EXAMPLE}")
    return {location: _choice(location, value, where) for location, value in told.items()}


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{where}: {twice} is there twice")
    return told


def _choice(location: str, value: Any, where: str) -> Choice:
    if not _LOCATION.fullmatch(location):
        raise ConfigError(f"{where}: {location!r} is no memory location such as cpu:0 or cuda:0")
    lists = isinstance(value, list) and len(value) == 2 and all(isinstance(x, list) for x in value)
    if not lists or not all(isinstance(name, str) for names in value for name in names):
        raise ConfigError(
            f"{where}: {location} must be two lists of names of RDMA devices, the preferred ones and the "
            f"fallback, like in {_EXAMPLE}"
        )
    preferred, fallback = value
    names = [*preferred, *fallback]
    if not names:
        raise ConfigError(f"{where}: {location} names no RDMA device")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{where}: {location} names {twice[0]} twice")
    return Choice(tuple(preferred), tuple(fallback))
