"""The deciding parts of a swarm's shell: a limit on bytes a second, and members that neighbours tell of."""

from __future__ import annotations

from typing import cast

import pytest

from p2pstore.checkpoint.peer.piece_flow import (
    BELIEVED_SECONDS,
    BURST_SECONDS,
    MAX_BELIEVED,
    Introductions,
    PieceBuffers,
    TokenBucket,
)
from p2pstore.checkpoint.peer.surroundings import Surroundings
from p2pstore.checkpoint.peer.swarm_links import SwarmLinks, _Link
from p2pstore.checkpoint.swarm.swarm_messages import MAX_INTRODUCED, Grant, Members, NewPieces, kind_of
from p2pstore.transfer.data_frames import FrameLink
from p2pstore.wire import ONE_WAY, encode_frame


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

    def say(self, frame: bytes) -> bool:
        self.sent.append(frame)
        return True

    @property
    def has_unsent(self) -> bool:
        return False

    def end(self) -> None: ...


async def test_what_a_member_is_told_in_one_step_is_sent_together() -> None:
    around = cast(Surroundings, None)  # only dialing needs it
    links = SwarmLinks(bytes(16), around, lambda _: None, lambda _: None)
    frames = {member: _Frames() for member in (1, 2, 3)}
    links._links = {member: _Link(each, True, 0.0) for member, each in frames.items()}
    news, grant = (
        encode_frame(kind_of(message), 0, message, flags=ONE_WAY)
        for message in (NewPieces([7]), Grant())
    )
    links.say((1, 2, 3, 4), NewPieces([7]))
    links.say((1,), Grant())
    assert not frames[1].sent
    links.drop(3)
    links.send_said()
    assert [each.sent for each in frames.values()] == [[news + grant], [news], []]
    links.send_said()
    assert len(frames[1].sent) == 1
