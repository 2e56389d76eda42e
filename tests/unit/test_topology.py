"""Which network cards are near which memory: recorded trees of sysfs, and configured matrices."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pstore.errors import ConfigError
from p2pstore.transfer.rdma.rdma_hardware import location_of, read_machine, read_matrix
from p2pstore.transfer.rdma.rdma_topology import (
    Choice,
    DevicePlace,
    Machine,
    Nic,
    NumaNode,
    PciDistance,
    matrix_of,
    natural_order,
    overridden,
    parse_matrix,
    pci_distance,
)

NVIDIA, MELLANOX, ASPEED = "0x10de", "0x15b3", "0x1a03"


class Tree:
    """A tree like that under /sys, with the links that are there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def nodes(self, *distances: str) -> None:
        for number, line in enumerate(distances):
            self.write(f"devices/system/node/node{number}/distance", line)
        self.write("devices/system/node/online", f"0-{len(distances) - 1}")

    def pci(self, path: str, node: int | None, vendor: str, kind: str) -> str:
        """A PCI device below `devices`; returns where."""
        where = f"devices/{path}"
        self.write(f"{where}/vendor", vendor)
        self.write(f"{where}/class", kind)
        if node is not None:
            self.write(f"{where}/numa_node", str(node))
        self.link(f"bus/pci/devices/{path.rpartition('/')[2]}", where)
        return where

    def nic(self, name: str, path: str, node: int | None) -> None:
        where = self.pci(path, node, MELLANOX, "0x020700")
        self.write(f"{where}/infiniband/{name}/node_type", "1: CA")
        self.link(f"{where}/infiniband/{name}/device", where)
        self.link(f"class/infiniband/{name}", f"{where}/infiniband/{name}")

    def soft_nic(self, name: str, parent: str) -> None:
        where = f"devices/virtual/infiniband/{name}"
        self.write(f"{where}/parent", parent)
        self.link(f"class/infiniband/{name}", where)

    def interface(self, name: str, device: str | None) -> None:
        """A network interface; `device` is where its device is, None for one that has none."""
        where = f"{device}/net/{name}" if device else f"devices/virtual/net/{name}"
        self.write(f"{where}/mtu", "1500")
        if device:
            self.link(f"{where}/device", device)
        self.link(f"class/net/{name}", where)

    def gpu(self, path: str, node: int | None, vendor: str = NVIDIA, kind: str = "0x030200") -> str:
        return self.pci(path, node, vendor, kind)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def behind_switch(bus: int, slot: int, device: int) -> str:
    """A device behind a lower port of the one switch of a PCI root."""
    root = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    return f"{root}/0000:{bus + 2:02x}:{slot:02x}.0/0000:{device:02x}:00.0"


def hgx(tree: Tree) -> None:
    """Eight GPUs, a card beside each behind a switch of its own; four pairs a NUMA node. Numbered by address. A
    ninth card for storage, two of them for management, as on real ones."""
    tree.nodes("10 21", "21 10")
    for number, bus in enumerate((0x15, 0x37, 0x48, 0x5A, 0x97, 0xB7, 0xC7, 0xD7)):
        node = number // 4
        tree.nic(f"mlx5_{number}", behind_switch(bus, 0, bus + 3), node)
        tree.gpu(behind_switch(bus, 1, bus + 6), node)
    tree.nic("mlx5_10", "pci0000:26/0000:26:01.0/0000:27:00.0", 0)
    tree.gpu("pci0000:00/0000:00:1c.5/0000:01:00.0/0000:02:00.0", 0, ASPEED, "0x030000")


def numbered(*numbers: int) -> tuple[str, ...]:
    return tuple(f"mlx5_{number}" for number in numbers)


def test_eight_gpus_with_a_card_each(tree: Tree) -> None:
    hgx(tree)
    matrix = read_matrix(root=tree.root)
    assert list(matrix) == ["cpu:0", "cpu:1", *(f"cuda:{number}" for number in range(8))]
    assert matrix["cpu:0"] == Choice(numbered(0, 1, 2, 3, 10), numbered(4, 5, 6, 7))
    assert matrix["cpu:1"] == Choice(numbered(4, 5, 6, 7), numbered(0, 1, 2, 3, 10))
    for number in range(8):
        choice = matrix[f"cuda:{number}"]
        assert choice.preferred == (f"mlx5_{number}",)
        near, far = ((0, 1, 2, 3, 10), (4, 5, 6, 7))[:: 1 if number < 4 else -1]
        assert choice.fallback == numbered(*(n for n in (*near, *far) if n != number))


def test_pairs_of_gpus_share_two_cards_below_two_switches(tree: Tree) -> None:
    """As in a machine of eight A100: two GPUs and two cards below one port, a switch below a switch."""
    tree.nodes(*(" ".join("10" if a == b else "12" for b in range(4)) for a in range(4)))
    for quarter, bus in enumerate((0x00, 0x40, 0x80, 0xC0)):
        port = f"pci0000:{bus:02x}/0000:{bus:02x}:01.1/0000:{bus + 1:02x}:00.0"
        for side in (0, 1):
            below = f"{port}/0000:{bus + 2:02x}:{side:02x}.0/0000:{bus + 3 + 8 * side:02x}:00.0"
            slot = f"{bus + 4 + 8 * side:02x}"
            tree.nic(
                f"mlx5_{2 * quarter + side}",
                f"{below}/0000:{slot}:00.0/0000:{bus + 5 + 8 * side:02x}:00.0",
                quarter,
            )
            tree.gpu(f"{below}/0000:{slot}:10.0/0000:{bus + 7 + 8 * side:02x}:00.0", quarter)
    machine = read_machine(tree.root)
    assert [pci_distance(machine.gpus[0], nic.place) for nic in machine.nics[:3]] == [
        PciDistance.PIX,
        PciDistance.PXB,
        PciDistance.SYS,
    ]
    matrix = matrix_of(machine)
    assert matrix["cuda:3"] == Choice(numbered(3), numbered(2, 0, 1, 4, 5, 6, 7))
    assert matrix["cpu:2"] == Choice(numbered(4, 5), numbered(0, 1, 2, 3, 6, 7))


def test_two_cards_one_for_each_processor(tree: Tree) -> None:
    tree.nodes("10 32", "32 10")
    tree.nic("mlx5_0", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", 0)
    tree.nic("mlx5_1", "pci0000:ae/0000:ae:00.0/0000:af:00.0", 1)
    for bus in (0x17, 0x65):
        tree.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:00.0", 0)
    tree.gpu("pci0000:ae/0000:ae:02.0/0000:b1:00.0", 1)
    near, far = ("mlx5_0",), ("mlx5_1",)
    assert read_matrix(root=tree.root) == {
        "cpu:0": Choice(near, far),
        "cpu:1": Choice(far, near),
        "cuda:0": Choice(near, far),
        "cuda:1": Choice(near, far),
        "cuda:2": Choice(far, near),  # below one PCI root
    }


def test_both_ports_of_a_card_are_alike(tree: Tree) -> None:
    tree.nodes("10")
    for function in (0, 1):
        tree.nic(f"mlx5_{function}", f"pci0000:17/0000:17:02.0/0000:18:00.{function}", 0)
    tree.gpu("pci0000:17/0000:17:00.0/0000:19:00.0", 0)
    both = Choice(numbered(0, 1))
    assert read_matrix(root=tree.root) == {"cpu:0": both, "cuda:0": both}
    one, other = (nic.place for nic in read_machine(tree.root).nics)
    assert pci_distance(one, other) is PciDistance.PIX


def test_a_kernel_without_numa(tree: Tree) -> None:
    tree.nic("mlx5_0", "pci0000:00/0000:00:02.0/0000:01:00.0", None)
    tree.nic("mlx5_1", "pci0000:00/0000:00:03.0/0000:02:00.0", -1)
    assert read_matrix(root=tree.root) == {"cpu:0": Choice(numbered(0, 1))}


def test_a_card_whose_node_is_not_known_comes_last(tree: Tree) -> None:
    tree.nodes("10 21", "21 10")
    tree.nic("mlx5_0", "pci0000:00/0000:00:02.0/0000:01:00.0", -1)
    tree.nic("mlx5_1", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", 1)
    matrix = read_matrix(root=tree.root)
    assert matrix == dict.fromkeys(("cpu:0", "cpu:1"), Choice(("mlx5_1",), ("mlx5_0",)))


def test_a_machine_that_tells_nothing_of_its_nodes_distances(tree: Tree) -> None:
    for number in (0, 3):
        tree.write(f"devices/system/node/node{number}/cpulist", str(number))
    tree.write("devices/system/node/nodes", "not a node")
    tree.nic("mlx5_0", "pci0000:00/0000:00:02.0/0000:01:00.0", 0)
    tree.nic("mlx5_1", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", 3)
    assert read_matrix(root=tree.root) == {
        "cpu:0": Choice(numbered(0), numbered(1)),
        "cpu:3": Choice(numbered(1), numbered(0)),
    }


def test_devices_that_are_not_on_pci(tree: Tree) -> None:
    """Soft-RoCE is where the network interface under it is; on a virtual interface it is nowhere."""
    tree.nodes("10 21", "21 10")
    tree.interface("veth0", None)
    path = "pci0000:80/0000:80:03.0/0000:81:00.0"
    where = tree.pci(path, 1, "0x1af4", "0x020000")
    tree.write(f"{where}/virtio4/device", "0x0001")
    tree.interface("eth0", f"{where}/virtio4")
    tree.soft_nic("rxe0", "veth0")
    tree.soft_nic("rxe1", "eth0")
    tree.soft_nic("rxe2", "eth9")
    machine = read_machine(tree.root)
    assert [nic.place for nic in machine.nics] == [
        DevicePlace(),
        DevicePlace(("pci0000:80", "0000:80:03.0", "0000:81:00.0"), 1),
        DevicePlace(),
    ]
    assert matrix_of(machine)["cpu:0"] == Choice(("rxe1",), ("rxe0", "rxe2"))


def test_machines_without_cards(tree: Tree) -> None:
    assert read_machine(tree.root) == Machine((NumaNode(0, {0: 10}),))
    assert read_matrix(root=tree.root) == {}
    tree.nodes("10 21", "21 10")
    tree.gpu("pci0000:17/0000:17:00.0/0000:18:00.0", 0)
    assert read_matrix(root=tree.root) == {}


def test_unfinished_entries_are_no_devices_with_a_place(tree: Tree) -> None:
    tree.nodes("10")
    tree.link("class/infiniband/mlx5_0", "devices/gone")
    tree.link("bus/pci/devices/0000:18:00.0", "devices/gone")
    (tree.root / "class/infiniband/mlx5_1").mkdir()
    tree.write("class/infiniband/mlx5_1/parent/oops", "a folder")
    machine = read_machine(tree.root)
    assert [nic.name for nic in machine.nics] == ["mlx5_0", "mlx5_1"]
    assert {nic.place for nic in machine.nics} == {DevicePlace()}
    assert machine.gpus == ()


def test_gpus_are_numbered_by_address(tree: Tree) -> None:
    tree.nodes("10 21", "21 10")
    tree.nic("mlx5_0", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", 0)
    tree.gpu("pci10000:00/10000:00:00.0", 1)
    tree.gpu("pci0000:3a/0000:3a:02.0/0000:3c:00.0", 0)
    assert [gpu.numa_node for gpu in read_machine(tree.root).gpus] == [0, 1]


def test_names_sort_as_people_count() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "bnxt_re0", "mlx5_bond_0"], key=natural_order) == [
        "bnxt_re0",
        "mlx5_2",
        "mlx5_10",
        "mlx5_bond_0",
    ]


def test_some_of_the_cards() -> None:
    choice = Choice(("a", "b"), ("c", "d"))
    assert choice.only(["a", "c"]) == Choice(("a",), ("c",))
    assert choice.only(["d", "c"]) == Choice(("c", "d"))
    assert choice.only([]) == Choice(())


# --- as configured ---------------------------------------------------------------------------


def two_cards() -> Machine:
    nodes = (NumaNode(0, {0: 10, 1: 21}), NumaNode(1, {0: 21, 1: 10}))
    nics = tuple(Nic(f"mlx5_{node}", DevicePlace((), node)) for node in (0, 1))
    return Machine(nodes, nics, (DevicePlace((), 1),))


def test_what_is_told_goes_before_what_was_found() -> None:
    text = '{"cpu:0": [["mlx5_1", "mlx5_0"], []], "hip:3": [[], ["mlx5_0"]]}'
    matrix = overridden(two_cards(), text, "--rdma-topology")
    assert matrix["cpu:0"] == Choice(numbered(1, 0))
    assert matrix["hip:3"] == Choice((), numbered(0))
    for location in ("cpu:1", "cuda:0"):
        assert matrix[location] == matrix_of(two_cards())[location]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
        ("{}", "not an object"),
        ('{"cpu": [["mlx5_0"], []]}', "'cpu' is no memory location"),
        ('{"cpu:0": "mlx5_0"}', "cpu:0 must be two lists"),
        ('{"cpu:0": ["mlx5_0"]}', "cpu:0 must be two lists"),
        ('{"cpu:0": [["mlx5_0"]]}', "cpu:0 must be two lists"),
        ('{"cpu:0": [["mlx5_0"], "mlx5_1"]}', "cpu:0 must be two lists"),
        ('{"cpu:0": [["mlx5_0"], [7]]}', "cpu:0 must be two lists"),
        ('{"cpu:0": [[], []]}', "cpu:0 names no RDMA device"),
        ('{"cpu:0": [["mlx5_0"], ["mlx5_0"]]}', "cpu:0 names mlx5_0 twice"),
        ('{"cpu:0": [["mlx5_0"], []], "cpu:0": [[], []]}', "cpu:0 is there twice"),
        ('{"cpu:0": [["mlx5_7"], []]}', "mlx5_7, and .* has mlx5_0, mlx5_1"),
        ('{"cpu:2": [["mlx5_0"], []]}', "cpu:2 is no memory .* has cpu:0, cpu:1"),
    ],
)
def test_mistakes_in_a_matrix(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: .*{complaint}"):
        overridden(two_cards(), text, "here")


def test_a_matrix_in_a_file(tree: Tree) -> None:
    hgx(tree)
    text = '{"cpu:0": [["mlx5_7"], ["mlx5_0"]]}'
    file = tree.root / "matrix.json"
    file.write_text(text)
    wanted = Choice(("mlx5_7",), ("mlx5_0",))
    for told in (str(file), text, f"\n {text}"):
        assert read_matrix(told, "rdma_topology", tree.root)["cpu:0"] == wanted
    assert parse_matrix(text, "") == {"cpu:0": wanted}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "is not text"),
        (b" " * (1024 * 1024 + 1), "has more than"),
        (b"[]", "matrix.json: not an object"),
    ],
)
def test_files_that_hold_no_matrix(tree: Tree, content: bytes | None, complaint: str) -> None:
    file = tree.root / "matrix.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^rdma_topology: .*{complaint}"):
        read_matrix(str(file), "rdma_topology", tree.root)


def test_a_matrix_for_a_machine_without_cards(tree: Tree) -> None:
    with pytest.raises(ConfigError, match=r"names mlx5_0, .* it has none"):
        read_matrix('{"cpu:0": [["mlx5_0"], []]}', "rdma_topology", tree.root)


# --- memory ----------------------------------------------------------------------------------

MAPS: Sequence[str] = (
    "7f0000000000 default file=/usr/lib/libc.so.6 mapped=3 N1=3 kernelpagesize_kB=4",
    "7f0000010000 default file=/memfd:p2pstore\\040(deleted) dirty=9 N0=4 N1=5 kernelpagesize_kB=4",
    "7f0000020000 default",
    "7f0000030000 bind:0 anon=7 dirty=7 N0=7 kernelpagesize_kB=4",
)


@pytest.mark.parametrize(
    ("address", "length", "location"),
    [
        (0x7F0000010000, 0x10000, "cpu:1"),
        (0x7F0000011000, 0x1000, "cpu:1"),
        (0x7F0000010000, 0x20001, "cpu:0"),  # 11 pages of node 0
        (0x7F0000020000, 0x10000, "cpu:0"),
        (0x7F0000030000, 0x10000, "cpu:0"),
        (0x1000, 0x1000, "cpu:0"),
    ],
)
def test_where_memory_is(tmp_path: Path, address: int, length: int, location: str) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text("\n".join(MAPS) + "\n")
    assert location_of(address, length, maps) == location


def test_where_memory_is_without_numa(tmp_path: Path) -> None:
    assert location_of(0x7F0000010000, 1, tmp_path / "none") == "cpu:0"
