"""Parts of the checkpoint shell: rates, buffers, introductions, queues of links, and versions in memory."""

from typing import cast

import pytest
import trio
import trio.testing

from p2pstore.checkpoint.content.pieces import ALIGNMENT, full_map, plan_memory
from p2pstore.checkpoint.peer.checkpoint_peer import CheckpointPeer
from p2pstore.checkpoint.peer.piece_flow import (
    BELIEVED_SECONDS,
    BURST_SECONDS,
    MAX_BELIEVED,
    Introductions,
    PieceBuffers,
    TokenBucket,
)
from p2pstore.checkpoint.peer.piece_stores import Memories, MemoryTarget
from p2pstore.checkpoint.peer.swarm_links import SwarmLinks, _Link
from p2pstore.checkpoint.swarm.swarm_messages import MAX_INTRODUCED, Grant, Members, NewPieces, kind_of
from p2pstore.errors import CapacityExceeded, StoreClosed
from p2pstore.memory.mapped.mapped_memory import map_read_only
from p2pstore.objects import MIB
from p2pstore.transfer.data_frames import FrameLink
from p2pstore.wire import ONE_WAY, encode_frame
from tests.unit.test_target_directory import BASE, piece_of, signed


def test_bytes_move_at_the_rate_and_no_faster() -> None:
    bucket = TokenBucket(1000, 0.0)
    now = 0.0
    for _ in range(20):
        now += bucket.take(500, now)
    assert now == pytest.approx(19 * 0.5)
    assert bucket.take(500, now + 100) == 0.0  # a pause saves little
    assert bucket.take(500, now + 100) == pytest.approx(0.5 - BURST_SECONDS)


def test_what_did_not_move_costs_nothing() -> None:
    bucket = TokenBucket(1000, 0.0)
    assert bucket.take(5000, 0.0) == 0.0
    bucket.give_back(5000)
    assert bucket.take(5000, 0.0) == 0.0
    assert bucket.take(1, 0.0) == pytest.approx(5.0)


def test_buffers_are_used_again_while_any_is_in_use() -> None:
    buffers = PieceBuffers(100)
    first, second = buffers.take(), buffers.take()
    assert len(first) == 100
    buffers.give_back(first)
    assert buffers.take() is first
    buffers.give_back(first)
    assert buffers.kept == 1
    buffers.give_back(second)
    assert not buffers.kept  # no transfer is under way: the memory is free


def test_who_comes_is_told_of_all_and_all_of_it() -> None:
    meeting = Introductions()
    meeting.linked(1)
    assert not meeting.due  # there is no other member to tell
    meeting.linked(2)
    assert meeting.due
    assert meeting.take() == [([1, 2], Members([1, 2]))]
    assert not meeting.due
    meeting.linked(3)
    assert meeting.take() == [([3], Members([3, 2, 1])), ([1, 2], Members([3]))]
    meeting.unlinked(1)
    meeting.linked(4)
    meeting.unlinked(4)
    assert not meeting.due


def test_a_crowd_is_told_in_part() -> None:
    meeting = Introductions()
    for member in range(2 * MAX_INTRODUCED):
        meeting.linked(member)
    ((_, told),) = meeting.take()
    assert len(told.members) == MAX_INTRODUCED


def test_what_neighbours_tell_is_believed_for_a_while_and_not_without_end() -> None:
    meeting = Introductions()
    assert meeting.hear([1, 2], 0.0)
    assert not meeting.hear([2, 1], 1.0)
    assert meeting.believed == {1, 2}
    assert meeting.hear([3], BELIEVED_SECONDS)
    assert meeting.believed == {3}
    meeting.hear(range(10 * MAX_BELIEVED), BELIEVED_SECONDS)
    assert len(meeting.believed) == MAX_BELIEVED


class _Frames(FrameLink):
    """Records the frames that are sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def enqueue(self, frame: bytes) -> bool:
        self.sent.append(frame)
        return True

    @property
    def has_unsent(self) -> bool:
        return False

    def end(self) -> None: ...


async def test_what_a_member_is_told_in_one_step_is_sent_together() -> None:
    around = cast(CheckpointPeer, None)  # only dialing needs it
    links = SwarmLinks(bytes(16), around, lambda _: None, lambda _: None)
    frames = {member: _Frames() for member in (1, 2, 3)}
    links._links = {member: _Link(each, True, 0.0) for member, each in frames.items()}
    news, grant = (
        encode_frame(kind_of(message), 0, message, flags=ONE_WAY)
        for message in (NewPieces([7]), Grant())
    )
    links.enqueue((1, 2, 3, 4), NewPieces([7]))
    links.enqueue((1,), Grant())
    assert not frames[1].sent
    links.drop(3)
    links.send_queued()
    assert [each.sent for each in frames.values()] == [[news + grant], [news], []]
    links.send_queued()
    assert len(frames[1].sent) == 1


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
