"""NUMA nodes: read from recorded trees, and bound to by the real kernel where it has nodes."""

import ctypes
import errno
from pathlib import Path

import pytest

from p2pstore.errors import ConfigError
from p2pstore.memory.mapped import numa
from p2pstore.memory.mapped.mapped_memory import create_memory, prefault
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.objects import GIB, KIB, MIB


def record(folder: Path, has_memory: str, **nodes: str) -> Path:
    """A tree such as /sys/devices/system/node: `node0` and so on with their `meminfo`."""
    folder.mkdir(exist_ok=True)
    (folder / "has_memory").write_text(has_memory)
    for name, meminfo in nodes.items():
        huge = folder / name / "hugepages" / "hugepages-2048kB"
        huge.mkdir(parents=True)
        (huge / "free_hugepages").write_text("3\n")
        (folder / name / "meminfo").write_text(meminfo)
    return folder


def meminfo(node: int, total_gib: int, free_gib: int, inactive_gib: int) -> str:
    return (
        f"Node {node} MemTotal:       {total_gib * 1024 * 1024} kB\n"
        f"Node {node} MemFree:        {free_gib * 1024 * 1024} kB\n"
        f"Node {node} Active(file):    4096 kB\n"
        f"Node {node} Inactive(file): {inactive_gib * 1024 * 1024} kB\n"
        f"Node {node} HugePages_Total:     0\n"
    )


def two_sockets(folder: Path) -> Path:
    """Two sockets, and CXL memory as node 4, which has no CPU; nodes 2 and 3 have no memory."""
    return record(
        folder,
        "0-1,4\n",
        node0=meminfo(0, 1000, 900, 20),
        node1=meminfo(1, 1000, 5, 1),
        node4=meminfo(4, 256, 256, 0),
    )


def test_a_machine_with_several_nodes(tmp_path: Path) -> None:
    nodes = numa.read_nodes(two_sockets(tmp_path))
    assert list(nodes) == [0, 1, 4]
    assert nodes[0] == numa.Node(0, 1000 * GIB, 920 * GIB, 6 * MIB)
    assert nodes[1].available_bytes == 6 * GIB
    assert numa.chosen_node(4, tmp_path) == nodes[4]
    for absent in (2, 3, 5):
        with pytest.raises(ConfigError, match=f"no NUMA node {absent} with memory; it has 0, 1, 4"):
            numa.chosen_node(absent, tmp_path)


def test_a_machine_with_one_node_has_nothing_to_choose(tmp_path: Path) -> None:
    folder = record(tmp_path, "0\n", node0=meminfo(0, 16, 8, 1))
    assert numa.chosen_node(0, folder) is None
    with pytest.raises(ConfigError, match="no NUMA node 1 with memory; it has 0"):
        numa.chosen_node(1, folder)


def test_a_kernel_without_nodes(tmp_path: Path) -> None:
    assert numa.read_nodes(tmp_path / "none") == {}
    with pytest.raises(ConfigError, match="no NUMA node 0 with memory; it has none"):
        numa.chosen_node(0, tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("0\n", [0]), ("0-3", [0, 1, 2, 3]), ("0,2-3,9\n", [0, 2, 3, 9])]
)
def test_lists(text: str, numbers: list[int]) -> None:
    assert numa.parse_list(text) == numbers


@pytest.mark.parametrize("text", ["x", "-1", "0-99999999"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|are more than"):
        numa.parse_list(text)


@pytest.mark.parametrize("node", [0, 1, 63, 64, 200])
def test_what_the_kernel_is_asked(node: int) -> None:
    calls: list[tuple[int, int, list[int], int]] = []

    def call(address: int, length: int, mask: ctypes.Array[ctypes.c_ulong], bits: int) -> int:
        calls.append((address, length, list(mask), bits))
        return 0

    numa.bind(4096, 2 * KIB, node, call)
    ((address, length, mask, bits),) = calls
    assert (address, length) == (4096, 2 * KIB)
    assert sum(word << 64 * place for place, word in enumerate(mask)) == 1 << node
    assert bits == 64 * len(mask) + 1 > node + 1


def test_a_kernel_that_refuses_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"numa_node: .* node 1 \(Operation not permitted\): a con"):
        numa.bind(4096, 4096, 1, lambda *arguments: errno.EPERM)


# --- the real kernel -------------------------------------------------------------------------

needs_nodes = pytest.mark.skipif(not numa.read_nodes(), reason="this kernel has no NUMA nodes")


def policies_of(name: str) -> list[str]:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line.split()[1] for line in lines if f"memfd:{name}" in line]


@needs_nodes
def test_memory_is_bound_to_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    (number, node), *_ = numa.read_nodes().items()
    # As if there were more than one of them: else nothing is bound.
    monkeypatch.setattr(numa, "chosen_node", lambda wanted: node)
    memory = create_memory(4 * MIB, "p2pstore-bound", huge_pages="never", numa_node=number)
    assert prefault(memory.view, lambda: False, lambda: None) == 4 * MIB
    assert policies_of("p2pstore-bound") == [f"bind:{number}"]
    memory.close()


@needs_nodes
def test_a_node_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    node = numa.Node(0, GIB, 3 * MIB, 0)
    monkeypatch.setattr(numa, "chosen_node", lambda wanted: node)
    with pytest.raises(ConfigError, match=r"NUMA node 0 has 3\.0 MiB left: choose a smaller"):
        create_memory(4 * MIB, "p2pstore-no-room", numa_node=0)


@needs_nodes
def test_a_node_that_the_kernel_does_not_have_is_refused_by_it() -> None:
    memory = create_memory(MIB, "p2pstore-no-node", huge_pages="never")
    with pytest.raises(ConfigError, match="does not bind memory to node 1000"):
        numa.bind(address_of(memory.view), len(memory.view), 1000)
    memory.close()
