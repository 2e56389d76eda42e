"""Replies to other peers that wait for a third one. Shell.

Each wait has the deadline that gossip named; who asked may go away meanwhile, and the answer is then dropped.
"""

from __future__ import annotations

from typing import Final

import trio

from p2pstore.gossip.gossip_effects import Answer, Later
from p2pstore.wire import Code, Failure, Message

GRACE_SECONDS: Final = 1.0
"""The answer itself is due within the named time; this much more may pass until this process comes to it."""


class LaterReplies:
    """Brings `Later` and `Answer` of the gossip machine together."""

    def __init__(self) -> None:
        self._waiting: dict[int, trio.Event] = {}
        self._replies: dict[int, Message] = {}

    def __len__(self) -> int:
        """How many are waited for."""
        return len(self._waiting)

    async def wait(self, later: Later) -> Message:
        """The reply that `give` brings, a `Failure` when it does not come in time."""
        event = self._waiting[later.token] = trio.Event()
        try:
            with trio.move_on_after(later.timeout_seconds + GRACE_SECONDS):
                await event.wait()
        finally:
            del self._waiting[later.token]
            reply = self._replies.pop(later.token, None)
        if reply is None:
            return Failure(int(Code.DEADLINE_EXCEEDED), "the other peer was not asked in time")
        return reply

    def give(self, answer: Answer) -> None:
        """The reply is there; dropped when nobody waits any more."""
        event = self._waiting.get(answer.token)
        if event is not None:
            self._replies[answer.token] = answer.reply
            event.set()
