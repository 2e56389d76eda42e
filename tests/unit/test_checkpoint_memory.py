"""A version in memory: where it lies, what is written to it and what is not."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from p2pstore.checkpoint.content.pieces import ALIGNMENT, full_map, plan_memory
from p2pstore.checkpoint.peer.stores import Memories, MemoryTarget
from p2pstore.errors import CapacityExceeded, StoreClosed
from p2pstore.memory.mapped.mapped_memory import map_read_only
from p2pstore.objects import MIB
from tests.unit.test_target_directory import BASE, piece_of, signed


def filled() -> MemoryTarget:
    target = MemoryTarget(signed(BASE))
    for piece in range(target.manifest.layout.count):
        assert target.write(piece, piece_of(target.manifest, BASE, piece))
    return target


def test_files_lie_one_behind_the_other_aligned_and_the_manifest_behind_them() -> None:
    layout = plan_memory([1, 0, ALIGNMENT, ALIGNMENT + 1], 10)
    assert layout.files == (0, 64, 64, 128)
    assert (layout.manifest, layout.total_bytes) == (256, 266)


def test_what_is_written_is_what_clients_map() -> None:
    target = filled()
    assert target.have == full_map(target.manifest.layout.count)
    layout = target.layout
    view = map_read_only(target.descriptor, layout.total_bytes)
    for begin, file in zip(layout.files, target.manifest.files, strict=True):
        assert view[begin : begin + file.size] == BASE[file.path]
    assert view[layout.manifest :] == signed(BASE).body
    for piece in range(target.manifest.layout.count):
        assert target.read(piece) == piece_of(target.manifest, BASE, piece)
    target.close()
    target.close()
    assert bytes(view[: len(BASE["b.safetensors"])]) == BASE["b.safetensors"], "it stays mapped"
    with pytest.raises(StoreClosed):
        target.read(0)
    view.release()


async def test_room_that_a_client_gives_back_this_moment_is_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    target = filled()
    memories = Memories(target.used_bytes + 10)
    memories.add(target, 1)
    began = trio.current_time()
    await memories.until_room(10)
    await memories.until_room(target.used_bytes + 11)
    assert trio.current_time() == began, "there is room, or there never will be"
    await memories.until_room(11)
    assert trio.current_time() == pytest.approx(began + 1), "the client stays"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memories.until_room, 11)
        await trio.testing.wait_all_tasks_blocked()
        assert memories.left(1) == [target]
    assert trio.current_time() == pytest.approx(began + 1), "at once when it is gone"
    with memories.room_for(target.version, 11):
        target.close()


def test_other_bytes_are_no_piece_and_change_nothing() -> None:
    target = filled()
    good = target.read(0)
    assert not target.write(0, bytes(len(good)))
    assert target.read(0) == good
    target.close()


def test_memory_is_held_while_a_client_uses_it_and_no_more_than_allowed() -> None:
    memories = Memories(MIB)
    target = filled()
    memories.add(target, 1)
    assert memories.use(target.version, 2) is target
    assert memories.use(bytes(16), 2) is None
    rest = MIB - target.layout.total_bytes
    with memories.room_for(b"other", rest - 10):
        with pytest.raises(CapacityExceeded, match="--checkpoint-memory"), memories.room_for(b"", 11):
            raise AssertionError("there is no room for both")
        with memories.room_for(b"third", 10):
            assert memories.used_bytes == MIB
    with memories.room_for(b"", rest):
        pass
    assert memories.left(1) == []
    assert memories.left(2) == [target]
    assert memories.used_bytes == 0
    assert memories.use(target.version, 3) is None
    target.close()


async def test_of_two_who_want_one_version_one_brings_it() -> None:
    memories = Memories(None)
    order: list[str] = []
    may_end = trio.Event()

    async def bring(name: str, version: bytes) -> None:
        async with memories.turn(version):
            order.append(name)
            if name == "first":
                await may_end.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bring, "first", b"v")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(bring, "second", b"v")
        nursery.start_soon(bring, "another version", b"w")
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["first", "another version"]
        may_end.set()
    assert order[-1] == "second"
    assert memories._turns == {}
