"""An update of a name that this peer publishes: the shell around `p2pstore.checkpoint.swarm.group.GroupUpdate`."""

from __future__ import annotations

import logging
from typing import Final

import trio

from p2pstore.checkpoint.content.manifest import format_version
from p2pstore.checkpoint.peer.news import News
from p2pstore.checkpoint.swarm.group import FollowerState, GroupUpdate, Laggard, Stage, Verdict
from p2pstore.gossip.checkpoint_records import Head, short_version
from p2pstore.gossip.records import Participation, TakesPart
from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

CONFIRM_SECONDS: Final = 10.0
"""After the switch, for those who have the version to say that they use it."""
LOOK_SECONDS: Final = 0.05
"""Between two looks at what followers say: 1.5 ms for a thousand of them, who all say it at about the same time."""
FIRST_FOLLOWER_SECONDS: Final = 3.0
"""Until some follower must have been heard of: one that began a moment ago says so within a second."""
ACQUAINTED_SECONDS: Final = 3.0
"""After a peer's start, until it may say that it knows of all followers."""
STAGES: Final = {
    int(TakesPart.FOLLOWING): Stage.WAITING,
    int(TakesPart.FETCHING): Stage.FETCHING,
    int(TakesPart.VERIFIED): Stage.VERIFIED,
    int(TakesPart.SEEDING): Stage.VERIFIED,
    int(TakesPart.PUBLISHING): Stage.VERIFIED,
    int(TakesPart.FAILED): Stage.FAILED,
}


class Updating:
    """One update, while `run` runs."""

    def __init__(
        self, node: Node, namespace: str, name: str, quorum: int | None, timeout_seconds: float
    ) -> None:
        self.news = News()
        self.version = b""
        self.switched = self.superseded = False
        self.using = 0
        """How many followers use the version."""
        self._node = node
        self._checkpoints = node.core.checkpoints
        self._namespace, self._name = namespace, name
        first_by = node.now + FIRST_FOLLOWER_SECONDS
        self.group = GroupUpdate(b"", node.now + timeout_seconds, quorum, first_by)

    async def run(self) -> None:
        """Wait until enough followers have the newest version, and have all switch; or find that it is too late, that
        there is a newer one, or nobody to wait for. Cancelled before that, nobody switches. Raises `NoSuchKey` when
        this peer does not publish the name."""
        head = self._checkpoints.own(self._namespace, self._name)
        self.version = head.version
        self.group.version = short_version(head.version)
        verdict = await self._judged(head)
        if verdict is Verdict.SWITCH:
            await self._switch(head)
        self.superseded = verdict is Verdict.SUPERSEDED

    async def _judged(self, of: Head) -> Verdict:
        seen: object = None
        while True:
            verdict = self._judge(of)
            acquainted = self._node.uptime_seconds >= ACQUAINTED_SECONDS
            if verdict is Verdict.SWITCH and self.group.quorum is None and not acquainted:
                await trio.sleep(ACQUAINTED_SECONDS - self._node.uptime_seconds)
                continue
            if verdict is not Verdict.WAIT:
                return verdict
            with trio.move_on_after(max(0.0, self.group.wake_at - self._node.now)):
                seen = await self._node.checkpoint_news(seen)
                await trio.sleep(LOOK_SECONDS)

    def _judge(self, of: Head) -> Verdict:
        """Once more, with what is known now."""
        digest = of.digest
        head = self._checkpoints.head(digest)
        gone = self._checkpoints.gone_from(digest, self.group.members)
        version = b"" if head is None or head.gone else short_version(head.version)
        living = {
            member: _state(part) for member, part in self._checkpoints.followers(digest).items()
        }
        self.using = sum(state.current == self.group.version for state in living.values())
        verdict = self.group.judge(version, living, gone, self._node.now)
        self.news.changed()
        return verdict

    async def _switch(self, head: Head) -> None:
        before = self._checkpoints.switched(head.digest)
        if before is None or before.version != head.version:
            self._checkpoints.switch(head.namespace, head.name, head.version, self._node.now)
            self._node.process()
        self.switched = True
        logger.info(
            "checkpoint %s@%s is to be used from now on: %d of %d followers have it",
            head.name,
            format_version(head.version),
            self.group.ready_count,
            self.group.follower_count,
            extra={"event": "checkpoint_switched"},
        )
        with trio.move_on_after(CONFIRM_SECONDS):
            seen: object = None
            while (
                self._judge(head) is not Verdict.SUPERSEDED and self.using < self.group.ready_count
            ):
                seen = await self._node.checkpoint_news(seen)
                await trio.sleep(LOOK_SECONDS)

    @property
    def laggards(self) -> list[Laggard]:
        """Who does not have the version; once switched, who does not use it."""
        return self.group.not_using if self.switched else self.group.laggards


def _state(part: Participation) -> FollowerState:
    stage = STAGES.get(part.state, Stage.WAITING)
    return FollowerState(part.version, stage, part.current, part.done_permille, part.why)
