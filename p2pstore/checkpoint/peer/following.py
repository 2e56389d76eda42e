"""A name that this peer follows to a directory: the shell around `p2pstore.checkpoint.swarm.group.Follower`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import trio

from p2pstore.checkpoint.content.directory_versions import (
    current_version,
    switch_current,
    versions_with,
)
from p2pstore.checkpoint.content.manifest import format_version
from p2pstore.checkpoint.peer.jobs import Job, News
from p2pstore.checkpoint.peer.stores import HeldDirectory
from p2pstore.checkpoint.swarm.group import (
    Abandon,
    Effect,
    Event,
    Follower,
    FollowerState,
    GroupUpdate,
    Heard,
    Laggard,
    NotPrepared,
    NotSwitched,
    Prepare,
    Prepared,
    Stage,
    Switched,
    SwitchTo,
    Tick,
    Verdict,
)
from p2pstore.errors import ConfigError, NoSuchKey, P2PStoreError, Unavailable
from p2pstore.gossip.checkpoint_records import Head, short_version
from p2pstore.gossip.records import Participation, PeerId, TakesPart
from p2pstore.peer.node import Node

logger = logging.getLogger("p2pstore.peer")

TOLD: Final = {
    Stage.WAITING: TakesPart.FOLLOWING,
    Stage.FETCHING: TakesPart.FOLLOWING,  # who fetches says so itself
    Stage.VERIFIED: TakesPart.VERIFIED,
    Stage.CURRENT: TakesPart.VERIFIED,
    Stage.FAILED: TakesPart.FAILED,
}


@dataclass(frozen=True, slots=True)
class FollowOrder:
    """What to follow; see `local.group_messages.Follow`."""

    namespace: str
    name: str
    publisher: PeerId | None = None
    keep: int = 2
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)


class Preparer(Protocol):
    """Brings versions."""

    async def prepare(
        self,
        order: FollowOrder,
        version: bytes,
        publisher: PeerId,
        directory: HeldDirectory,
        job: Job,
    ) -> None:
        """Fetch a version to the directory, verify it and put it in its place; `current` stays as it is. The directory
        is closed when it is not used any more. Raises `P2PStoreError`, and `OSError`."""
        ...

    async def pass_on(
        self, order: FollowOrder, version: bytes, publisher: PeerId, directory: HeldDirectory
    ) -> None:
        """Give a version that is complete in the directory to others, if that is not done already. As `prepare`."""
        ...


class Following:
    """One follow, while `run` runs."""

    def __init__(
        self, node: Node, preparer: Preparer, order: FollowOrder, directory: HeldDirectory
    ) -> None:
        self.order = order
        self.news = News()
        self.head: Head | None = None
        self.job = Job()
        """Of the version that is being fetched."""
        self.ended = trio.Event()
        self.directory = directory
        self._scope = trio.CancelScope()
        self._told: object = None
        self._node = node
        self._checkpoints = node.core.checkpoints
        self._preparer = preparer
        self.follower = Follower(b"", ())
        self.waits_because = ""
        """Why what others publish under the name is not followed, as long as nothing is."""
        self.looked = trio.Event()
        """It is known what there is of an earlier life."""
        self._nursery: trio.Nursery
        self._wake = trio.Event()
        self._fetching = trio.CancelScope()

    async def run(self) -> None:
        """Follow until cancelled. Raises `ValueError` when the name has several publishers and none is trusted,
        `ConfigError` when the directory cannot be read, and `Unavailable` after `stop`."""
        try:
            with self._scope:
                await self._follow()
        finally:
            self.looked.set()
            self.ended.set()
            self.news.end()
        raise Unavailable(f"{self.order.name} is followed by another process now")

    async def stop(self) -> None:
        """End it; somebody else takes over."""
        self._scope.cancel()
        await self.ended.wait()

    async def _follow(self) -> None:
        """One publisher after the other: each until this peer is to forget it."""
        while True:
            self.follower = await trio.to_thread.run_sync(_look, self.directory.path, self.order)
            self.head = self._told = None
            self.news.changed()
            self.looked.set()
            head = self.head = await self._first_head()
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._pass_on, head)
                    nursery.start_soon(self._tick_forever)
                    await self._listen(head)
                    nursery.cancel_scope.cancel()
            finally:
                self._checkpoints.follow_no_more(head.digest, self._node.now)
                self._node.process()

    async def _first_head(self) -> Head:
        """Once somebody publishes the name."""
        order = self.order
        seen: object = None
        while True:
            try:
                return self._checkpoints.find(order.namespace, order.name, order.publisher)
            except NoSuchKey as error:
                others = self._checkpoints.heads(order.namespace, order.name)
                why = str(error) if others else ""
                if why != self.waits_because:
                    self.waits_because = why
                    self.news.changed()
            seen = await self._node.checkpoint_news(seen)

    async def _listen(self, first: Head) -> None:
        """Until the publisher is forgotten."""
        seen: object = None
        while not self._checkpoints.is_forgotten(self.head or first):
            head = self._checkpoints.head(first.digest)
            switch = self._checkpoints.switched(first.digest)
            self.head = head or first
            self._happens(
                Heard(
                    head.version if head is not None and not head.gone else b"",
                    switch.version if switch is not None else b"",
                )
            )
            seen = await self._node.checkpoint_news(seen)

    async def _pass_on(self, head: Head) -> None:
        """What is here of an earlier life others may need, above all when all peers were started again."""
        for version in {self.follower.current, head.version} & self.follower.complete:
            try:
                await self._preparer.pass_on(
                    self.order, version, head.publisher, self.directory.again()
                )
            except (P2PStoreError, OSError, ValueError) as error:
                why = self.directory.say(str(error))
                logger.info("%s is not passed on: %s", self._called(version), why, extra=_EVENT)

    async def _tick_forever(self) -> None:
        while True:
            self._wake = trio.Event()
            with trio.move_on_after(max(0.0, self.follower.wake_at - self._node.now)):
                await self._wake.wait()
            if self._node.now >= self.follower.wake_at:
                self._happens(Tick())

    def _happens(self, event: Event) -> None:
        for effect in self.follower.handle(event, self._node.now):
            self._carry_out(effect)
        self._say()
        self._wake.set()

    def _say(self) -> None:
        assert self.head is not None
        said = self.follower.said
        if self._told == (said, self.head.digest):
            return
        self._told = said, self.head.digest
        self._checkpoints.follow(
            self.head.digest, said.version, TOLD[said.stage], said.current, self._node.now, said.why
        )
        self._node.process()
        self.news.changed()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Prepare(version):
                self._fetching = trio.CancelScope()
                self._nursery.start_soon(self._prepare, version, self._fetching)
            case Abandon():
                self._fetching.cancel()
            case SwitchTo(version):
                self._nursery.start_soon(self._switch_to, version)

    async def _prepare(self, version: bytes, scope: trio.CancelScope) -> None:
        assert self.head is not None
        self.job = Job()
        event: Event = NotPrepared(version)
        with scope:
            try:
                await self._preparer.prepare(
                    self.order, version, self.head.publisher, self.directory.again(), self.job
                )
                event = Prepared(version)
                logger.info("%s is verified", self._called(version), extra=_EVENT)
            except (P2PStoreError, OSError, ValueError) as error:
                why = self.directory.say(str(error))
                logger.warning("%s cannot be had: %s", self._called(version), why, extra=_EVENT)
                event = NotPrepared(version, why)
        self._happens(event)

    async def _switch_to(self, version: bytes) -> None:
        event: Event
        try:
            await trio.to_thread.run_sync(switch_current, self.directory.path, version)
            event = Switched(version)
            logger.info("%s is in use", self._called(version), extra=_EVENT)
        except OSError as error:
            why = self.directory.say(str(error))
            logger.warning("%s cannot be switched to: %s", self._called(version), why, extra=_EVENT)
            event = NotSwitched(version, why, isinstance(error, FileNotFoundError))
        self._happens(event)

    def _called(self, version: bytes) -> str:
        return f"checkpoint {self.order.name}@{format_version(version)} in {self.directory.shown}"


_EVENT: Final = {"event": "checkpoint_followed"}


def _look(directory: Path, order: FollowOrder) -> Follower:
    """What there is of an earlier life."""
    try:
        current = current_version(directory)
        complete = versions_with(directory, order.include, order.exclude)
        return Follower(current if current in complete else b"", complete)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from error


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
