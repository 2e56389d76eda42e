"""Memory in a file that outlives its peer: taken up again, or begun anew with a reason; never another peer's, and never
memory still in use."""

import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from p2pstore.errors import ConfigError
from p2pstore.memory.kept_memory import Expected, checksum_of
from p2pstore.memory.mapped.kept_file import KeptMemory, boot_id, create_file_memory, open_kept_memory
from p2pstore.memory.mapped.mapped_memory import map_read_only
from p2pstore.memory.segment import Segment
from p2pstore.memory.segment_layout import plan_geometry
from p2pstore.objects import MIB
from simulation.segment_checks import check_segment
from tests.unit.test_segment import NAMESPACE, put

FIRST, SECOND, THIRD = (bytes([number]) * 16 for number in (1, 2, 3))
VALUE = bytes(range(256)) * 40


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    before = descriptors()
    yield tmp_path / "segment"
    assert descriptors() <= before
    assert os.listdir(tmp_path) in ([], ["segment"])


def expected(last: bytes = b"") -> Expected:
    return Expected(plan_geometry(MIB), last, boot_id(), checksum_of("cluster"), 0)


def segment_in(memory: KeptMemory, segment_id: bytes) -> Segment:
    return Segment(
        memory.view,
        segment_id=segment_id,
        incarnation=segment_id[0],
        geometry=plan_geometry(MIB),
        marks=memory.marks,
        kept=memory.kept,
    )


def one_life(path: Path, last: bytes, own: bytes, *keys: str) -> list[str]:
    """Begin with what is there, put these keys, and end; the keys that were there."""
    memory = open_kept_memory(path, expected(last))
    assert memory.is_kept == bool(memory.kept.lives), "of a peer that never ran, nothing stays"
    memory.is_kept = True
    segment = segment_in(memory, own)
    found = sorted(entry.key for entry in segment.returned.entries())
    for entry in segment.returned.entries():
        assert segment.payload(entry) == VALUE
        segment.returned.publish(entry, 100.0)
    for number, key in enumerate(keys):
        put(segment, key, VALUE, clock=number + 1)
    segment.close()
    segment.detach()
    memory.close()
    memory.close()
    return found


def test_a_life_begins_with_what_the_last_one_had(path: Path) -> None:
    assert one_life(path, b"", FIRST, "a", "b") == []
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert one_life(path, FIRST, SECOND, "c") == ["a", "b"]
    assert path.stat().st_ino == status.st_ino
    assert one_life(path, SECOND, THIRD) == ["a", "b", "c"]


def test_what_is_not_kept_any_more_is_removed_at_the_end(path: Path) -> None:
    memory = open_kept_memory(path, expected())
    memory.is_kept = False
    memory.close()
    assert not path.exists()


def test_a_peer_lived_meanwhile_without_the_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one_life(path, b"", FIRST, "a")
    with path.open("rb") as old:
        before = old.read()
        assert one_life(path, SECOND, THIRD, "b") == []
        old.seek(0)
        assert old.read() == before, "whoever has it mapped keeps it as it is"
    assert "not what this peer's last life had" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "hole", "header", "empty"])
def test_a_damaged_file_is_replaced(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    one_life(path, b"", FIRST, "a")
    size = path.stat().st_size
    if damage == "truncated":
        os.truncate(path, size // 2)
    elif damage == "hole":
        os.truncate(path, size - MIB // 2)
        os.truncate(path, size)
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        with path.open("r+b") as file:
            file.seek(40)
            file.write(b"\xff" * 8)
    with caplog.at_level(logging.WARNING):
        assert one_life(path, FIRST, SECOND, "b") == []
    assert ("memory begins empty" in caplog.text) == (damage != "empty")
    assert one_life(path, SECOND, THIRD) == ["b"]


def test_what_is_not_this_peers_is_refused_and_left_alone(path: Path) -> None:
    one_life(path, b"", FIRST, "a")
    before = path.read_bytes()
    other = replace(expected(FIRST), cluster=checksum_of("other"))
    with pytest.raises(ConfigError, match=r"memory_path: .*of a peer of another cluster"):
        open_kept_memory(path, other)
    path.write_bytes(before[:8] + b"\2" + before[9:])
    with pytest.raises(ConfigError, match=r"memory_path: .*format 2, this version knows 1"):
        open_kept_memory(path, expected(FIRST))
    path.write_bytes(b"somebody's letters" * 400)
    with pytest.raises(ConfigError, match="holds something that no peer put there"):
        open_kept_memory(path, expected(FIRST))
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be made"):
        open_kept_memory(path, expected(FIRST))
    path.rmdir()


def test_a_file_in_use_is_refused_by_both_kinds(path: Path) -> None:
    memory = open_kept_memory(path, expected())
    memory.is_kept = True
    with pytest.raises(ConfigError, match="is the memory of another peer"):
        open_kept_memory(path, expected())
    with pytest.raises(ConfigError, match="is the memory of another peer"):
        create_file_memory(path, MIB)
    memory.close()
    create_file_memory(path, MIB).close()  # a peer that does not keep memory begins anew
    assert not path.exists()


def test_it_is_known_who_still_has_the_memory_of_earlier_lives(path: Path) -> None:
    first = open_kept_memory(path, expected())
    first.is_kept = True
    segment = segment_in(first, FIRST)
    assert not first.is_used_by_earlier(), "who uses it now is not of earlier"
    descriptor = first.read_only_descriptor()
    view = map_read_only(descriptor, first.length)
    os.close(descriptor)
    segment.leases.lease(put(segment, "k", VALUE), session="client", now=100.0)
    segment.detach()
    first.close()

    second = open_kept_memory(path, expected(FIRST))
    segment = segment_in(second, SECOND)
    assert second.is_used_by_earlier()
    assert segment.returned.has_earlier_clients
    # A client that is another process, and is killed. What it was given to write is shared in the same way.
    client = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import mmap, sys; held = mmap.mmap(int(sys.argv[1]), 0); print(flush=True); input()",
            str(second.descriptor),
        ],
        pass_fds=[second.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    client.stdout.readline()
    segment.detach()
    second.close()
    del view

    third = open_kept_memory(path, expected(SECOND))
    assert third.is_used_by_earlier()
    segment = segment_in(third, THIRD)
    client.kill()
    client.communicate()
    assert not third.is_used_by_earlier()
    assert segment.returned.has_earlier_clients
    segment.returned.end_earlier_clients()
    assert [entry.key for entry in segment.returned.entries()] == ["k"]
    check_segment(segment)
    segment.detach()
    third.close()


def test_without_clients_nothing_is_kept_in_place(path: Path) -> None:
    memory = open_kept_memory(path, expected())
    memory.is_kept = True
    segment = segment_in(memory, FIRST)
    segment.leases.lease(put(segment, "k", VALUE), session="client", now=100.0)
    segment.reserve(5_000, 200, session="client", now=100.0, namespace=NAMESPACE)
    segment.detach()
    memory.close()
    memory = open_kept_memory(path, expected(FIRST))
    segment = segment_in(memory, SECOND)
    assert not segment.returned.has_earlier_clients
    assert segment.leased_bytes == 0
    check_segment(segment)
    segment.detach()
    memory.close()


def test_a_file_system_without_such_locks_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: bytes | int = 0) -> bytes | int:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr("p2pstore.memory.mapped.kept_file.fcntl.fcntl", refuse)
    with pytest.raises(ConfigError, match=r"memory_path: .* cannot be locked .*Invalid argument"):
        open_kept_memory(path, expected())
    assert not path.exists()
