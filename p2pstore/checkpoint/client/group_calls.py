"""Names of checkpoints through the local peer: following, updating, listing, removing. Written once for all drivers.

A follow or an update has a connection of its own and ends with it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from p2pstore import arguments
from p2pstore.access.keyring import parse_peer_id
from p2pstore.checkpoint import checkpoint_messages as local
from p2pstore.errors import CheckpointRefused, FollowersLag, P2PStoreError
from p2pstore.local.local_connection import LocalConnection, Request
from p2pstore.local.local_greeting import Opening
from p2pstore.local.local_protocol import Access, LocalKind
from p2pstore.objects import check_checkpoint_name, format_peer_id, listed
from p2pstore.results import (
    CheckpointFollower,
    CheckpointInfo,
    CheckpointMember,
    CheckpointUpdate,
    FollowedCheckpoint,
)
from p2pstore.runtime.streams import Driver
from p2pstore.wire import Empty, Message

M = TypeVar("M", bound=Message)
N = TypeVar("N", local.ProgressReply, local.FollowNewsReply, local.UpdateNewsReply)
T = TypeVar("T")

NEWS_SECONDS: Final = 1.0
"""Time between two requests for news when nothing changes."""
PAUSE_SECONDS: Final = 0.1
"""Minimum time between two requests for news."""
PATIENCE_SECONDS: Final = 60.0
"""A follow or update ends when the local peer does not answer for this long."""
POLL_SECONDS: Final = 0.5
UPDATE_SECONDS: Final = 600.0
NAMED_LAGGARDS: Final = 8

FollowWatch = Callable[[FollowedCheckpoint], None]
UpdateWatch = Callable[[CheckpointUpdate], None]
StatusWatch = Callable[[CheckpointInfo], None]
_PEER_IDS: Final = ("peer_id", "publisher")


class CheckpointGroups:
    """The part of `Checkpoints` about names and their followers."""

    def __init__(self, driver: Driver, path: str, namespace: str, timeout: float) -> None:
        self._driver = driver
        self._path = path
        self._namespace = namespace
        self._timeout = timeout

    async def follow(
        self,
        name: str,
        directory: str | os.PathLike[str],
        changed: FollowWatch,
        *,
        publisher: str | None = None,
        keep: int = 2,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        """Follow a name until cancelled, or `changed` raises: each published version is fetched to `directory/VERSION`
        and verified, and `directory/current` names it when its publisher says so (`update`).

        `changed` gets the state, at once and after every change. The name need not be published yet. The newest `keep`
        versions stay. `publisher` is the peer id that must have published it; by default the first publisher of the
        name that this peer saw. `include` and `exclude` are patterns for whole relative paths (`*` matches `/` too) of
        the files to fetch; a version without such files fails. A failure is retried.

        Raises `ValueError` when the name has several publishers and none is named, `ConfigError` for a directory that
        cannot be used, and `StoreClosed` when the local peer ends.
        """
        request = local.Follow(
            self._namespace,
            checkpoint_name(name),
            b"" if publisher is None else parse_peer_id(publisher, "publisher"),
            arguments.whole_number("keep", keep),
            os.fspath(directory),
            arguments.key_list(list(include)),
            arguments.key_list(list(exclude)),
        )
        make_directory(directory)
        connection = await self._open(directory)
        await self._do(
            Request(connection, LocalKind.CHECKPOINT_FOLLOW, request, Empty, self._timeout),
            LocalKind.CHECKPOINT_FOLLOW_NEWS,
            local.FollowNewsReply,
            _on_change(partial(result_of, FollowedCheckpoint), changed),
            max(self._timeout, PATIENCE_SECONDS),
        )

    async def _do(
        self,
        job: Request[M],
        news_kind: LocalKind,
        news_type: type[N],
        look: Callable[[N], None],
        patience_seconds: float,
        *,
        close: bool = True,
    ) -> M:
        """Have the peer do a job, look at its news until it ends, and return its end. Raises `DeadlineExceeded` when
        the peer does not answer within `patience_seconds`."""
        try:
            await job.send()
            seen = 0
            while True:
                reply = await job.connection.request(
                    news_kind,
                    local.AskNews(seen, round(1000 * NEWS_SECONDS)),
                    news_type,
                    progress_seconds=patience_seconds + NEWS_SECONDS,
                )
                if reply.ended:
                    return await job.receive()
                look(reply)
                if reply.number != seen:
                    seen = reply.number
                    await self._driver.sleep(PAUSE_SECONDS)
        finally:
            job.abandon()
            if close:
                job.connection.close()

    async def update(
        self,
        name: str,
        *,
        quorum: int | None = None,
        timeout: float = UPDATE_SECONDS,
        progress: UpdateWatch | None = None,
    ) -> CheckpointUpdate:
        """Switch all followers of this peer's `name` to its newest version, once all of them, or `quorum`, have
        verified it. Late followers switch when they have it.

        Followers are those alive now, and those that come meanwhile. Without a quorum one must be heard of within 3 s.
        If they do not have the version within `timeout` seconds, no follower switches. Returns some seconds after the
        switch at the latest.

        Raises `FollowersLag` after the timeout and without followers, `NoSuchKey` when this peer does not publish the
        name, and `P2PStoreError` when another version was published meanwhile.
        """
        request = local.Update(
            self._namespace,
            checkpoint_name(name),
            round(1000 * arguments.seconds("timeout", timeout)),
            -1 if quorum is None else arguments.whole_number("quorum", quorum, minimum=0),
        )

        connection = await self._open()
        done = await self._do(
            Request(connection, LocalKind.CHECKPOINT_UPDATE, request, local.Updated, self._timeout),
            LocalKind.CHECKPOINT_UPDATE_NEWS,
            local.UpdateNewsReply,
            _on_change(_update, progress or (lambda _: None)),
            max(self._timeout, PATIENCE_SECONDS),
        )
        if done.superseded:
            raise P2PStoreError(
                f"checkpoint {name!r}: another version was published, or the name removed, before all had "
                f"{done.version.hex()}: no follower switches to that"
            )
        result = _update(done)
        if not done.switched:
            raise FollowersLag(_too_late(name, result, quorum), result.laggards)
        return result

    async def names(self, *, everywhere: bool = False) -> list[CheckpointInfo]:
        """The published names of this client's namespace, or of all."""
        return await self._known(local.ListCheckpoints("" if everywhere else self._namespace))

    async def status(self, name: str) -> list[CheckpointInfo]:
        """A name and its members: an item a publisher, the trusted one first. Raises `NoSuchKey` without any."""
        found = await self._known(local.ListCheckpoints(self._namespace, checkpoint_name(name)))
        return sorted(found, key=lambda each: not each.trusted)

    async def wait_followers(
        self,
        name: str,
        version: str,
        count: int,
        *,
        timeout: float = UPDATE_SECONDS,
        progress: StatusWatch | None = None,
    ) -> None:
        """Wait until `count` followers of this peer's name have a version. Raises `FollowersLag` after the timeout."""
        deadline = time.monotonic() + arguments.seconds("timeout", timeout)
        while True:
            own = [each for each in await self.status(name) if each.mine]
            followers = [each for info in own for each in info.members if each.follows]
            ready = [each for each in followers if has_version(each, version)]
            if len(ready) >= count:
                return
            if own and progress is not None:
                progress(own[0])
            if time.monotonic() > deadline:
                lag = tuple(
                    CheckpointFollower(each.peer_id, each.name, each.state, each.done, each.why)
                    for each in followers
                    if each not in ready
                )
                raise FollowersLag(
                    f"checkpoint {name!r}: {len(ready)} of {count} followers have {version} after "
                    f"{timeout:g} s{_named(lag)}",
                    lag,
                )
            await self._driver.sleep(POLL_SECONDS)

    async def remove(self, name: str) -> str:
        """Remove a name that this peer publishes, and stop serving its versions; copies of others stay. Returns the
        last version. Raises `NoSuchKey` when this peer does not publish the name."""
        return await self._remove(name, b"")

    async def forget(self, name: str, publisher: str) -> str:
        """Hide and distrust a publisher's name, on this peer alone, and stop passing its versions on: for a publisher
        that is gone for good. The name counts again when it publishes a newer version. Returns the last version. Raises
        `NoSuchKey` when it publishes no such name, `ValueError` for the peer's own."""
        return await self._remove(name, parse_peer_id(publisher, "the publisher to forget"))

    async def _remove(self, name: str, publisher: bytes) -> str:
        request = local.RemoveCheckpoint(self._namespace, checkpoint_name(name), publisher)
        reply = await self._request(LocalKind.CHECKPOINT_REMOVE, request, local.CheckpointRemoved)
        return reply.version.hex()

    async def _known(self, request: local.ListCheckpoints) -> list[CheckpointInfo]:
        reply = await self._request(LocalKind.CHECKPOINT_LIST, request, local.ListedCheckpoints)
        return [_info(item) for item in reply.items]

    async def _request(self, kind: LocalKind, request: Message, reply_type: type[M]) -> M:
        connection = await self._open()
        try:
            return await connection.request(kind, request, reply_type, progress_seconds=self._timeout)
        finally:
            connection.close()

    async def _open(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        checkpoint: bytes = b"",
        descriptor: int = -1,
    ) -> LocalConnection:
        """A new connection, with a directory for the peer to work in, or memory (`descriptor`, which stays the
        caller's), or to a version in the peer's memory."""
        passed = descriptor
        if directory is not None:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return await LocalConnection.open(
                self._driver,
                self._path,
                Opening(self._namespace, Access.WRITE, directory=descriptor, checkpoint=checkpoint),
                self._timeout,
            )
        finally:
            if descriptor != passed:
                os.close(descriptor)


def _on_change(state_of: Callable[[Any], T], changed: Callable[[T], None]) -> Callable[[Any], None]:
    """Tells `changed` each state that differs from the one before."""
    last: T | None = None

    def look(reply: Any) -> None:
        nonlocal last
        before, last = last, state_of(reply)
        if last != before:
            changed(last)

    return look


def checkpoint_name(name: str) -> str:
    """Check a checkpoint's name. Raises `TypeError` and `ValueError`."""
    try:
        check_checkpoint_name(arguments.text("name", name))
    except CheckpointRefused as error:
        raise ValueError(str(error)) from None
    return name


def make_directory(directory: str | os.PathLike[str]) -> None:
    """Make a directory. Raises `OSError`; `NotADirectoryError` for a file in its place."""
    try:
        os.makedirs(directory, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(
            errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(directory)
        ) from error


def has_version(member: CheckpointMember, version: str) -> bool:
    """Whether a member has all of a version, by 16 hexadecimal digits or more of it."""
    short = version[:16]
    if member.follows and member.current == short:
        return True
    if member.needs < 1:
        return False
    return member.version == short and member.state in ("verified", "seeding", "publishing")


def result_of(kind: type[T], message: Message, **more: Any) -> T:
    """A result with the fields of a message: peer ids as text, other bytes as hexadecimal digits; `..._permille` and
    `..._ms` as shares and seconds. `more`: fields that differ otherwise."""
    found: dict[str, Any] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, bytes):
            value = format_peer_id(value) if value and name in _PEER_IDS else value.hex()
        elif name.endswith(("_permille", "_ms")):
            name, value = name.rpartition("_")[0], value / 1000
        found[name] = value
    return kind(**{name: value for name, value in found.items() if name in kind.__annotations__} | more)


def _update(reply: local.UpdateNewsReply | local.Updated) -> CheckpointUpdate:
    laggards = tuple(result_of(CheckpointFollower, each) for each in reply.laggards)
    return result_of(CheckpointUpdate, reply, laggards=laggards)


def _too_late(name: str, result: CheckpointUpdate, quorum: int | None) -> str:
    if not result.followers:
        waits = "" if quorum is None else f", and {quorum} were asked for"
        return (
            f"checkpoint {name!r} has no followers{waits}, so none switches: run `checkpoint follow {name} DIR` where "
            "it is to be used, or wait for followers (--quorum N --timeout 10m)"
        )
    wanted = result.followers if quorum is None else quorum
    return (
        f"checkpoint {name!r}: {result.ready} of {wanted} followers have {result.version}, so none "
        f"switches{_named(result.laggards)}"
    )


def _named(laggards: tuple[CheckpointFollower, ...]) -> str:
    if not laggards:
        return ""
    texts = [f"{each.name} ({laggard_state(each)})" for each in laggards]
    return f"; behind: {listed(texts, NAMED_LAGGARDS)}"


def laggard_state(each: CheckpointFollower) -> str:
    words = {
        "fetching": f"fetching, {each.done:.0%}",
        "waiting": "has not begun",
        "following": "has not begun",
        "verified": "has not switched yet",
        "current": "has it",
    }
    text = words.get(each.stage, each.stage)
    text += f": {each.why}" if each.why else ""
    return f"dead, {text}" if each.dead else text


def _info(item: local.CheckpointEntry) -> CheckpointInfo:
    members = tuple(result_of(CheckpointMember, each) for each in item.members)
    return result_of(CheckpointInfo, item, members=members)
