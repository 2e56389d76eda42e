"""Replies to other peers that wait for a third one."""

import trio
import trio.testing

from p2pstore.gossip.gossip_messages import Ack, Answer, Later
from p2pstore.peer.for_peers.control_traffic import LaterReplies
from p2pstore.wire import Code, Failure, Message


async def waiting(replies: LaterReplies, got: list[Message], token: int, seconds: float) -> None:
    got.append(await replies.wait(Later(token, seconds)))


async def test_each_answer_goes_to_whom_it_is_for(autojump_clock: trio.testing.MockClock) -> None:
    replies, got = LaterReplies(), list[Message]()
    async with trio.open_nursery() as nursery:
        for token in (1, 2):
            nursery.start_soon(waiting, replies, got, token, 5.0)
        await trio.testing.wait_all_tasks_blocked()
        assert len(replies) == 2
        replies.give(Answer(2, Ack(2, [])))
        await trio.testing.wait_all_tasks_blocked()
        replies.give(Answer(1, Ack(1, [])))
    assert got == [Ack(2, []), Ack(1, [])]
    assert len(replies) == 0


async def test_nobody_waits_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    replies, got = LaterReplies(), list[Message]()
    await waiting(replies, got, 1, 5.0)
    assert isinstance(got[0], Failure)
    assert got[0].code == Code.DEADLINE_EXCEEDED
    assert 5.0 <= trio.current_time() <= 7.0


async def test_an_answer_that_nobody_waits_for_leaves_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    replies = LaterReplies()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting, replies, [], 1, 5.0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    replies.give(Answer(1, Ack(1, [])))
    assert len(replies) == 0
    assert not replies._replies
