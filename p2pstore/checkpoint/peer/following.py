"""Following a name to a directory, and updating the followers of a name: shells around `swarm.group`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import trio

from p2pstore.checkpoint.checkpoint_messages import Fetch, Follow
from p2pstore.checkpoint.content.directory_versions import current_version, switch_current, versions_with
from p2pstore.checkpoint.content.manifest import format_version
from p2pstore.checkpoint.peer.checkpoint_peer import ACQUAINTED_SECONDS, CheckpointPeer
from p2pstore.checkpoint.peer.fetching import Fetching
from p2pstore.checkpoint.peer.piece_stores import HeldDirectory
from p2pstore.checkpoint.peer.version_fetch import ChangeSignal, Job
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

logger = logging.getLogger("p2pstore.peer")

CONFIRM_SECONDS: Final = 10.0
"""How long an update waits, after the switch, for followers to report that they use the version."""
LOOK_SECONDS: Final = 0.05
"""Minimum time between two looks at the followers: 1.5 ms for a thousand, whose reports arrive together."""
FIRST_FOLLOWER_SECONDS: Final = 3.0
"""An update without a quorum fails when no follower is heard of by then. A new follower is heard of within 1 s."""
TOLD: Final = {
    Stage.WAITING: TakesPart.FOLLOWING,
    Stage.FETCHING: TakesPart.FOLLOWING,  # the fetch announces itself
    Stage.VERIFIED: TakesPart.VERIFIED,
    Stage.CURRENT: TakesPart.VERIFIED,
    Stage.FAILED: TakesPart.FAILED,
}
STAGES: Final = {
    int(TakesPart.FOLLOWING): Stage.WAITING,
    int(TakesPart.FETCHING): Stage.FETCHING,
    int(TakesPart.VERIFIED): Stage.VERIFIED,
    int(TakesPart.SEEDING): Stage.VERIFIED,
    int(TakesPart.PUBLISHING): Stage.VERIFIED,
    int(TakesPart.FAILED): Stage.FAILED,
}
_FOLLOWED: Final = {"event": "checkpoint_followed"}


def _fetch_order(order: Follow, publisher: PeerId) -> Fetch:
    return Fetch(
        order.namespace,
        order.name,
        publisher=publisher,
        keep=order.keep,
        include=order.include,
        exclude=order.exclude,
    )


class Following:
    """One follow, while `run` runs."""

    def __init__(
        self, peer: CheckpointPeer, fetching: Fetching, order: Follow, directory: HeldDirectory
    ) -> None:
        self.order = order
        self.directory = directory
        self.follower = Follower(b"", ())
        self.head: Head | None = None
        self.job = Job()
        """The fetch of the next version."""
        self.news = ChangeSignal()
        self.waits_because = ""
        """Why no publisher of the name is followed, while none is."""
        self.looked = trio.Event()
        """The versions in the directory are known."""
        self.ended = trio.Event()
        self._peer = peer
        self._records = peer.records
        self._fetching = fetching
        self._scope = trio.CancelScope()
        self._told: object = None
        self._nursery: trio.Nursery
        self._wake = trio.Event()
        self._preparing = trio.CancelScope()

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
        """End the follow, because another connection takes over."""
        self._scope.cancel()
        await self.ended.wait()

    async def _follow(self) -> None:
        """Follow one publisher after the other, each until this peer is told to forget it."""
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
                self._peer.parts.follow_no_more(head.digest, self._peer.now)
                self._peer.process()

    async def _first_head(self) -> Head:
        """Wait until a trusted publisher has published the name."""
        order = self.order
        seen: object = None
        while True:
            try:
                return self._records.find(order.namespace, order.name, order.publisher or None)
            except NoSuchKey as error:
                others = self._records.heads(order.namespace, order.name)
                why = str(error) if others else ""
                if why != self.waits_because:
                    self.waits_because = why
                    self.news.changed()
            seen = await self._peer.news(seen)

    async def _listen(self, first: Head) -> None:
        """Hand heads and switches to the follower, until the publisher is forgotten."""
        seen: object = None
        while not self._records.is_forgotten(self.head or first):
            head = self._records.head(first.digest)
            switch = self._records.switched(first.digest)
            self.head = head or first
            self._happens(
                Heard(
                    head.version if head is not None and not head.gone else b"",
                    switch.version if switch is not None else b"",
                )
            )
            seen = await self._peer.news(seen)

    async def _pass_on(self, head: Head) -> None:
        """Serve the versions of the previous run: after a restart of all peers, others may need them."""
        for version in {self.follower.current, head.version} & self.follower.complete:
            try:
                with self._again() as directory:
                    order = _fetch_order(self.order, head.publisher)
                    await self._fetching.pass_on(order, version, head.publisher, directory)
            except (P2PStoreError, OSError, ValueError) as error:
                why = self.directory.with_shown_name(str(error))
                logger.info("%s is not passed on: %s", self._called(version), why, extra=_FOLLOWED)

    async def _tick_forever(self) -> None:
        while True:
            self._wake = trio.Event()
            with trio.move_on_after(max(0.0, self.follower.wake_at - self._peer.now)):
                await self._wake.wait()
            if self._peer.now >= self.follower.wake_at:
                self._happens(Tick())

    def _happens(self, event: Event) -> None:
        for effect in self.follower.handle(event, self._peer.now):
            self._carry_out(effect)
        self._say()
        self._wake.set()

    def _say(self) -> None:
        assert self.head is not None
        said = self.follower.state
        if self._told == (said, self.head.digest):
            return
        self._told = said, self.head.digest
        self._peer.parts.follow(
            self.head.digest, said.version, TOLD[said.stage], said.current, self._peer.now, said.why
        )
        self._peer.process()
        self.news.changed()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Prepare(version):
                self._preparing = trio.CancelScope()
                self._nursery.start_soon(self._prepare, version, self._preparing)
            case Abandon():
                self._preparing.cancel()
            case SwitchTo(version):
                self._nursery.start_soon(self._switch_to, version)

    async def _prepare(self, version: bytes, scope: trio.CancelScope) -> None:
        assert self.head is not None
        self.job = Job()
        event: Event = NotPrepared(version)
        with scope:
            try:
                await self._bring(version, self.head.publisher, self.job)
                event = Prepared(version)
                logger.info("%s is verified", self._called(version), extra=_FOLLOWED)
            except (P2PStoreError, OSError, ValueError) as error:
                why = self.directory.with_shown_name(str(error))
                logger.warning("%s cannot be fetched: %s", self._called(version), why, extra=_FOLLOWED)
                event = NotPrepared(version, why)
        self._happens(event)

    async def _bring(self, version: bytes, publisher: PeerId, job: Job) -> None:
        """Fetch and verify a version, and put it in its place; `current` stays. Raises `P2PStoreError`."""
        try:
            with self._again() as directory:
                order = _fetch_order(self.order, publisher)
                await self._fetching.bring(order, version, publisher, directory, job, use=False)
        finally:
            job.end()

    @contextmanager
    def _again(self) -> Iterator[HeldDirectory]:
        """Another handle of the directory, closed at the end unless a swarm has it; errors name it as its user does."""
        with closing(self.directory.again()) as directory, directory.users_words():
            yield directory

    async def _switch_to(self, version: bytes) -> None:
        event: Event
        try:
            await trio.to_thread.run_sync(switch_current, self.directory.path, version)
            event = Switched(version)
            logger.info("%s is in use", self._called(version), extra=_FOLLOWED)
        except OSError as error:
            why = self.directory.with_shown_name(str(error))
            logger.warning("%s cannot be switched to: %s", self._called(version), why, extra=_FOLLOWED)
            event = NotSwitched(version, why, isinstance(error, FileNotFoundError))
        self._happens(event)

    def _called(self, version: bytes) -> str:
        return f"checkpoint {self.order.name}@{format_version(version)} in {self.directory.shown}"


def _look(directory: Path, order: Follow) -> Follower:
    try:
        current = current_version(directory)
        complete = versions_with(directory, order.include, order.exclude)
        return Follower(current if current in complete else b"", complete)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from error


class Updating:
    """One update of a name that this peer publishes, while `run` runs."""

    def __init__(
        self, peer: CheckpointPeer, namespace: str, name: str, quorum: int | None, timeout_seconds: float
    ) -> None:
        self.news = ChangeSignal()
        self.version = b""
        self.switched = self.superseded = False
        self.using = 0
        """Followers that use the version."""
        self._peer = peer
        self._records = peer.records
        self._namespace, self._name = namespace, name
        first_by = peer.now + FIRST_FOLLOWER_SECONDS
        self.group = GroupUpdate(b"", peer.now + timeout_seconds, quorum, first_by)

    async def run(self) -> None:
        """Wait until enough followers have the newest version, then write the switch. Ends without a switch after the
        timeout, without followers, and when a newer version is published; cancelled, no follower switches. Raises
        `NoSuchKey` when this peer does not publish the name."""
        head = self._records.own(self._namespace, self._name)
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
            acquainted = self._peer.uptime_seconds >= ACQUAINTED_SECONDS
            if verdict is Verdict.SWITCH and self.group.quorum is None and not acquainted:
                await trio.sleep(ACQUAINTED_SECONDS - self._peer.uptime_seconds)
                continue
            if verdict is not Verdict.WAIT:
                return verdict
            with trio.move_on_after(max(0.0, self.group.wake_at - self._peer.now)):
                seen = await self._peer.news(seen)
                await trio.sleep(LOOK_SECONDS)

    def _judge(self, of: Head) -> Verdict:
        digest = of.digest
        head = self._records.head(digest)
        gone = self._peer.parts.gone_from(digest, self.group.members)
        version = b"" if head is None or head.gone else short_version(head.version)
        living = {member: _state(part) for member, part in self._peer.parts.followers(digest).items()}
        self.using = sum(state.current == self.group.version for state in living.values())
        verdict = self.group.judge(version, living, gone, self._peer.now)
        self.news.changed()
        return verdict

    async def _switch(self, head: Head) -> None:
        before = self._records.switched(head.digest)
        if before is None or before.version != head.version:
            self._records.switch(head.namespace, head.name, head.version, self._peer.now)
            self._peer.process()
        self.switched = True
        logger.info(
            "followers switch to checkpoint %s@%s: %d of %d have it",
            head.name,
            format_version(head.version),
            self.group.ready_count,
            self.group.follower_count,
            extra={"event": "checkpoint_switched"},
        )
        with trio.move_on_after(CONFIRM_SECONDS):
            seen: object = None
            while self._judge(head) is not Verdict.SUPERSEDED and self.using < self.group.ready_count:
                seen = await self._peer.news(seen)
                await trio.sleep(LOOK_SECONDS)

    @property
    def laggards(self) -> list[Laggard]:
        """Followers without the version; after the switch, those that do not use it."""
        return self.group.not_using if self.switched else self.group.laggards


def _state(part: Participation) -> FollowerState:
    stage = STAGES.get(part.state, Stage.WAITING)
    return FollowerState(part.version, stage, part.current, part.done_permille, part.why)
