"""Shared memory on the real kernel: sealed, mapped twice, refused where there is not enough; several of them as one."""

import gc
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.memory.mapped.kept_file import create_file_memory
from p2pstore.memory.mapped.mapped_memory import (
    JoinedMemory,
    SharedMemory,
    available_memory,
    create_memory,
    makes_huge_pages,
    map_joined,
    map_read_only,
    map_writable,
    prefault,
)
from p2pstore.memory.mapped.mapping import address_of
from p2pstore.memory.segment_layout import SEGMENT_MAGIC
from p2pstore.objects import GIB, MIB
from p2pstore.peer.segment_memory import create_segment_memory

SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings_of(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


def resident_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_what_one_side_writes_the_other_reads() -> None:
    memory = create_memory(3 * MIB + 1, "p2pstore-both")
    assert len(memory.view) == 3 * MIB + 1
    assert not any(memory.view)
    descriptor = memory.read_only_descriptor()
    reading = map_read_only(descriptor, memory.length)
    writing = map_writable(memory.descriptor, memory.length)
    memory.view[5] = 1
    writing[-1] = 2
    assert (reading[5], reading[-1]) == (1, 2)
    assert reading.readonly
    with pytest.raises(ConfigError, match=r"cannot map .* \(Permission denied\)$"):
        map_writable(descriptor, memory.length)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)
    memory.close()
    assert (reading[5], writing[-1]) == (1, 2)


def test_memory_can_neither_shrink_nor_grow() -> None:
    memory = create_memory(MIB, "p2pstore-sealed", huge_pages="never")
    for length in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, length)
    memory.close()


def test_the_descriptor_is_not_inherited_and_not_reopened_by_others() -> None:
    memory = create_memory(MIB, "p2pstore-private")
    assert not os.get_inheritable(memory.descriptor)
    assert os.fstat(memory.descriptor).st_mode & 0o777 == 0o600
    memory.close()


def test_closing_leaves_nothing_behind() -> None:
    before = open_descriptors()
    memory = create_memory(MIB, "p2pstore-closed")
    memory.close()
    memory.close()
    assert open_descriptors() <= before
    assert mappings_of("p2pstore-closed") == 0
    assert memory.descriptor == -1


def test_a_view_in_use_keeps_the_mapping_until_it_is_dropped() -> None:
    memory = create_memory(MIB, "p2pstore-viewed")
    view = memory.view[10:20]
    array = np.frombuffer(memory.view, np.uint8)
    memory.close()
    view[0] = 7
    assert array[10] == 7
    assert mappings_of("p2pstore-viewed") == 1
    del view, array
    gc.collect()
    assert mappings_of("p2pstore-viewed") == 0


def test_memory_that_could_shrink_or_is_too_short_is_not_mapped() -> None:
    memory = create_memory(MIB, "p2pstore-short", huge_pages="never")
    with pytest.raises(ConfigError, match="announced"):
        map_read_only(memory.descriptor, MIB + mmap.PAGESIZE)
    with pytest.raises(ConfigError, match="announced"):
        map_read_only(memory.descriptor, 0)
    memory.close()
    unsealed = os.memfd_create("p2pstore-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    with pytest.raises(ConfigError, match="not sealed"):
        map_read_only(unsealed, MIB)
    os.close(unsealed)


def test_a_file_that_others_can_shrink_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    for mode, fine in ((0o600, True), (0o644, True), (0o620, False), (0o602, False)):
        path.chmod(mode)
        with path.open("rb") as file:
            if fine:
                assert len(map_read_only(file.fileno(), MIB)) == MIB
                continue
            with pytest.raises(ConfigError, match="a file that another user can shrink"):
                map_read_only(file.fileno(), MIB)


def test_a_file_of_another_user_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12_345)
    with path.open("rb") as file:
        with pytest.raises(ConfigError, match="a file that another user can shrink"):
            map_read_only(file.fileno(), MIB)
        with pytest.raises(ConfigError, match="a file that another user can shrink"):
            map_read_only(file.fileno(), MIB, trusted_user=54_321)
        owner = path.stat().st_uid
        assert len(map_read_only(file.fileno(), MIB, trusted_user=owner)) == MIB
        path.chmod(0o622)
        with pytest.raises(ConfigError, match="a file that another user can shrink"):
            map_read_only(file.fileno(), MIB, trusted_user=owner)


def test_what_is_no_file_is_not_mapped() -> None:
    with Path("/dev/zero").open("rb") as file, pytest.raises(ConfigError, match="and no file"):
        map_read_only(file.fileno(), MIB)


def test_prefault_provides_pages_and_changes_nothing() -> None:
    memory = create_memory(10 * MIB + 5, "p2pstore-prefault", huge_pages="never")
    memory.view[7] = 7
    assert resident_bytes(memory.descriptor) < MIB
    pauses: list[None] = []
    assert prefault(memory.view, lambda: False, lambda: pauses.append(None)) == 10 * MIB + 5
    assert resident_bytes(memory.descriptor) >= 10 * MIB
    assert len(pauses) == 3
    assert memory.view[7] == 7
    assert not any(memory.view[8:100])
    memory.close()


def huge_page_bytes(view: memoryview) -> int:
    """Bytes of the view that are mapped by huge pages, as /proc says."""
    begin, inside, found = address_of(view), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= begin < high
        elif inside and first in ("ShmemPmdMapped:", "FilePmdMapped:"):
            found += int(rest.split()[0]) * 1024
    return found


def kernel_collapses() -> bool:
    kernel = tuple(int(each) for each in re.findall(r"\d+", os.uname().release)[:2])
    return kernel >= (6, 1) and SHMEM_ENABLED.exists() and "[deny]" not in SHMEM_ENABLED.read_text()


@pytest.mark.skipif(not kernel_collapses(), reason="the kernel makes no huge pages of what is there")
def test_prefault_with_huge_pages_changes_nothing_and_all_have_them() -> None:
    assert makes_huge_pages()
    memory = create_memory(10 * MIB + 5, "p2pstore-huge")
    early = map_writable(memory.descriptor, memory.length)  # it has small pages, at first
    early[7], early[3 * MIB] = 7, 8
    assert prefault(memory.view, lambda: False, lambda: None, huge_pages=True) == 10 * MIB + 5
    assert resident_bytes(memory.descriptor) >= 10 * MIB
    assert (memory.view[7], memory.view[3 * MIB], memory.view[-1]) == (7, 8, 0)
    assert not any(memory.view[8 : 3 * MIB])
    reading = map_read_only(memory.descriptor, memory.length)
    assert [each[7] for each in (early, reading)] == [7, 7]
    assert huge_page_bytes(memory.view) == 10 * MIB
    assert [huge_page_bytes(each) for each in (early, reading)] == [2 * MIB] * 2
    memory.close()


def test_memory_is_mapped_where_huge_pages_can_be() -> None:
    for length in (2 * MIB, 5 * MIB + 1):
        memory = create_memory(length, "p2pstore-aligned", huge_pages="never")
        views = [how(memory.descriptor, length) for how in (map_read_only, map_writable)]
        for view in (memory.view, *views):
            assert address_of(view) % (2 * MIB) == 0
            assert len(view) == length
        assert huge_page_bytes(memory.view) == 0
        memory.close()


def test_prefault_stops_when_told() -> None:
    memory = create_memory(16 * MIB, "p2pstore-stop", huge_pages="never")
    asked = iter([False, False, True])
    assert prefault(memory.view, lambda: next(asked), lambda: None) == 8 * MIB
    assert resident_bytes(memory.descriptor) <= 9 * MIB
    memory.close()


def test_prefault_on_a_kernel_without_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pstore.memory.mapped.mapped_memory._MADV_POPULATE_WRITE", 9999)
    memory = create_memory(8 * MIB, "p2pstore-old-kernel", huge_pages="never")
    memory.view[0] = 3
    assert prefault(memory.view, lambda: False, lambda: None) == 8 * MIB
    assert resident_bytes(memory.descriptor) >= 8 * MIB
    assert memory.view[0] == 3
    memory.close()


def test_more_than_there_is_names_the_figures() -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"1024\.0 TiB of memory .* GiB left: choose a smaller"):
        create_memory(1024 * 1024 * GIB, "p2pstore-huge")
    with pytest.raises(ConfigError, match="huge pages were required"):
        create_memory(1024 * 1024 * GIB, "p2pstore-huge", huge_pages="require")
    assert open_descriptors() <= before


def free_huge_pages() -> int:
    folder = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    free, kept = ((folder / name).read_text() for name in ("free_hugepages", "resv_hugepages"))
    return int(free) - int(kept)


@pytest.mark.skipif(free_huge_pages() < 2, reason="no huge pages are reserved (vm.nr_hugepages)")
def test_reserved_huge_pages_are_used() -> None:
    for wanted in ("auto", "require"):
        memory = create_memory(3 * MIB, "p2pstore-reserved", huge_pages=wanted)
        assert os.fstat(memory.descriptor).st_blksize == 2 * MIB
        assert len(memory.view) == 3 * MIB
        descriptor = memory.read_only_descriptor()
        reading = map_read_only(descriptor, memory.length)
        memory.view[-1] = 5
        assert reading[-1] == 5
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, 0)
        assert prefault(memory.view, lambda: False, lambda: None) == 3 * MIB
        os.close(descriptor)
        memory.close()
        del reading
    memory = create_memory(3 * MIB, "p2pstore-ordinary", huge_pages="never")
    assert os.fstat(memory.descriptor).st_blksize < 2 * MIB
    memory.close()


@pytest.mark.skipif(free_huge_pages() > 0, reason="huge pages are reserved: they can be had")
def test_reserved_huge_pages_that_others_took_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "p2pstore.memory.mapped.mapped_memory._free_huge_page_bytes", lambda node: 1 << 40
    )
    before = open_descriptors()
    memory = create_memory(3 * MIB, "p2pstore-taken")
    assert os.fstat(memory.descriptor).st_blksize < 2 * MIB
    memory.close()
    with pytest.raises(ConfigError, match=r"huge_pages: 3\.0 MiB of them cannot be had: "):
        create_memory(3 * MIB, "p2pstore-taken", huge_pages="require")
    assert len(open_descriptors()) <= len(before)


# --- how much there is -----------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc", meminfo="MemTotal: 9000000 kB\nMemAvailable: 8388608 kB\n")
    write(tmp_path / "proc/self", cgroup="")
    return tmp_path / "proc"


def test_without_a_cgroup_the_host_is_the_limit(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, tmp_path / "none") == (8 * GIB, "this host")


def test_the_tightest_cgroup_is_the_limit(proc: Path, tmp_path: Path) -> None:
    """Version 2; page cache that can be dropped counts as available."""
    groups = tmp_path / "cgroup"
    write(proc / "self", cgroup="0::/pod/container\n")
    write(groups / "pod", memory__max=f"{4 * GIB}\n", memory__current=f"{3 * GIB}\n")
    write(groups / "pod", memory__stat=f"anon 5\ninactive_file {GIB}\n")
    write(groups / "pod/container", memory__max="max\n", memory__current="5\n", memory__stat="")
    assert available_memory(proc, groups) == (2 * GIB, "the cgroup (limit 4.0 GiB)")


def test_a_cgroup_over_its_limit_has_nothing_left(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(proc / "self", cgroup="0::/\n")
    write(groups, memory__max="100\n", memory__current="200\n", memory__stat="")
    assert available_memory(proc, groups)[0] == 0


SIZES = (4 * MIB, 2 * MIB, 6 * MIB)
LENGTH = sum(SIZES) - 5


def memories(folder: Path) -> list[SharedMemory]:
    """The second one in a file."""
    return [
        create_memory(SIZES[0], "p2pstore-joined"),
        create_file_memory(folder / "piece", SIZES[1], marked_after=True),
        create_memory(SIZES[2], "p2pstore-joined", huge_pages="never"),
    ]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def close_all(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def test_all_see_the_same_bytes_across_the_seams(tmp_path: Path) -> None:
    before = descriptors()
    joined = JoinedMemory(memories(tmp_path), LENGTH)
    assert len(joined.view) == joined.length == LENGTH
    assert not any(joined.view[:: 4096 + 1])
    read_only = joined.read_only_descriptors()
    reading = map_joined(read_only, joined.pieces, LENGTH, writable=False)
    writing = map_joined(joined.descriptors, joined.pieces, LENGTH, writable=True)
    pattern = np.random.default_rng(1).integers(0, 256, LENGTH, np.uint8)
    joined.view[:] = pattern.data
    assert (np.frombuffer(reading, np.uint8) == pattern).all()
    for seam in (SIZES[0], SIZES[0] + SIZES[1]):
        writing[seam - 3 : seam + 3] = b"abcdef"
        for view in (reading, joined.view):
            assert view[seam - 3 : seam + 3].tobytes() == b"abcdef"
    assert reading.readonly
    with pytest.raises(ConfigError, match="Permission denied"):
        map_joined(read_only, joined.pieces, LENGTH, writable=True)
    assert prefault(joined.view, lambda: False, lambda: None) == LENGTH
    close_all(read_only)
    joined.close()
    joined.close()
    assert not (tmp_path / "piece").exists()
    assert bytes(reading[:10]) == bytes(pattern[:10])  # a mapping keeps the memory
    del reading, writing
    gc.collect()
    assert descriptors() <= before
    assert mappings("p2pstore-joined") == mappings(str(tmp_path)) == 0


def test_a_view_in_use_keeps_the_mapping(tmp_path: Path) -> None:
    joined = JoinedMemory(memories(tmp_path), LENGTH)
    part = np.frombuffer(joined.view, np.uint8)[SIZES[0] - 1 : SIZES[0] + 1]
    joined.close()
    part[:] = 7
    assert mappings("p2pstore-joined") == 2
    del part
    gc.collect()
    assert mappings("p2pstore-joined") == 0


@pytest.mark.parametrize(
    ("pieces", "length"),
    [
        ((), 1),
        ((2 * MIB,) * 9, 17 * MIB),
        ((3 * MIB, 2 * MIB), 5 * MIB),
        ((2 * MIB, 2 * MIB), 2 * MIB),  # the last one would be of no use
        ((2 * MIB, 2 * MIB), 4 * MIB + 1),
        ((2 * MIB, -2 * MIB, 4 * MIB), 4 * MIB),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces: tuple[int, ...], length: int) -> None:
    with pytest.raises(ConfigError, match="cannot be a segment"):
        map_joined([0] * len(pieces), pieces, length, writable=False)


def test_memory_that_is_too_short_or_could_shrink_is_not_mapped(tmp_path: Path) -> None:
    memory = create_memory(2 * MIB, "p2pstore-joined")
    path = tmp_path / "loose"
    path.write_bytes(bytes(2 * MIB))
    path.chmod(0o666)
    loose = os.open(path, os.O_RDONLY)
    for other in (memory.descriptor, loose):
        with pytest.raises(ConfigError, match="can be mapped safely"):
            map_joined([memory.descriptor, other], [2 * MIB, 4 * MIB], 5 * MIB, writable=False)
    os.close(loose)
    memory.close()
    assert mappings("p2pstore-joined") == 0


# --- as a peer's settings say -------------------------------------------------------------------


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "more"
    config = PeerConfig(memory="8MiB", more_memory=["3MiB@node:0", f"4MiB@{file}"])
    assert config.checked().memory_bytes == (8 + 4 + 4) * MIB
    memory = create_segment_memory(config)
    assert memory.pieces[1:] == [4 * MIB, 4 * MIB]
    assert memory.length > 16 * MIB  # the tables as well
    assert file.stat().st_size > 4 * MIB
    memory.close()
    assert not file.exists()


def test_what_a_dead_peer_left_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "more"
    settings = PeerConfig(memory="2MiB", more_memory=[f"2MiB@{file}"])
    memory = create_segment_memory(settings)
    memory.view[-2 * MIB :] = b"\xff" * (2 * MIB)  # objects lie where a first memory has its header
    left = file.read_bytes()
    assert left.count(SEGMENT_MAGIC) == 1
    with pytest.raises(ConfigError, match=r"more_memory: .* is the memory of another peer"):
        create_segment_memory(settings)
    memory.close()
    file.write_bytes(left)
    create_segment_memory(settings).close()
    file.write_bytes(left.replace(SEGMENT_MAGIC, b"somebody"))
    with pytest.raises(ConfigError, match=r"more_memory: .* holds something"):
        create_segment_memory(settings)
    assert file.exists()


def test_together_they_may_not_be_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "p2pstore.memory.mapped.mapped_memory.available_memory", lambda: (24 * MIB, "this host")
    )
    create_segment_memory(PeerConfig(memory="8MiB", more_memory=["8MiB@node:0"])).close()
    with pytest.raises(ConfigError, match=r"this host has .* left"):
        create_segment_memory(PeerConfig(memory="8MiB", more_memory=["16MiB@node:0"]))
