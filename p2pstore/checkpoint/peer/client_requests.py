"""Answers to clients about checkpoints. A connection has one job. Shell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import trio

from p2pstore.checkpoint import checkpoint_messages as local
from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.sources import SourceMemory
from p2pstore.checkpoint.peer.checkpoint_peer import MAX_WAIT_SECONDS, CheckpointPeer
from p2pstore.checkpoint.peer.fetching import Fetching, Finder
from p2pstore.checkpoint.peer.following import Following, Updating
from p2pstore.checkpoint.peer.piece_flow import Paces
from p2pstore.checkpoint.peer.piece_stores import HeldDirectory, Memories, MemoryTarget
from p2pstore.checkpoint.peer.publishing import Publications, Publishing
from p2pstore.checkpoint.peer.running_swarms import SwarmParts
from p2pstore.checkpoint.peer.version_fetch import Job
from p2pstore.checkpoint.swarm.group import Stage
from p2pstore.errors import NoSuchKey
from p2pstore.gossip.checkpoint_records import Head
from p2pstore.gossip.records import Participation, TakesPart
from p2pstore.local.local_protocol import LocalClient, LocalKind
from p2pstore.objects import check_checkpoint_name, unix_seconds_from_clock
from p2pstore.state.state_directory import StateDirectory
from p2pstore.wire import Empty, Message, Signer, Verifier

MAX_ENTRIES: Final = 4096
"""In one answer."""
PACE_SECONDS: Final = 0.5
"""Time between two samples of members' progress."""
STATE_NAMES: Final = {int(state): state.name.lower() for state in TakesPart}
_BUSY: Final = "this connection has a job already"


class ClientRequests:
    """All requests about checkpoints, by `LocalKind`, in `handlers`."""

    def __init__(self, service: PeerCheckpoints) -> None:
        self._service = service
        self._jobs = JobRequests(service)
        self._groups = GroupRequests(service)
        self._names = NameRequests(service)
        self.handlers: dict[LocalKind, Any] = {
            LocalKind.CHECKPOINT_PUBLISH: self._jobs.publish,
            LocalKind.CHECKPOINT_FETCH: self._jobs.fetch,
            LocalKind.CHECKPOINT_PROGRESS: self._jobs.progress,
            LocalKind.CHECKPOINT_FOLLOW: self._groups.follow,
            LocalKind.CHECKPOINT_FOLLOW_NEWS: self._groups.follow_news,
            LocalKind.CHECKPOINT_UPDATE: self._groups.update,
            LocalKind.CHECKPOINT_UPDATE_NEWS: self._groups.update_news,
            LocalKind.CHECKPOINT_LIST: self._names.list_names,
            LocalKind.CHECKPOINT_REMOVE: self._names.remove,
        }

    def use_memory(self, client: LocalClient) -> MemoryTarget:
        """The version in memory that a client's hello names. Raises `NoSuchKey`."""
        target = self._service.memories.use(client.checkpoint, client.session)
        if target is None:
            raise NoSuchKey("this version is not in this peer's memory any more")
        return target

    def client_gone(self, client: LocalClient) -> None:
        """Forget a client, whose job was cancelled, and free the memory that it used."""
        self._jobs.client_gone(client)
        self._groups.client_gone(client)
        self._service.fetching.memory_left(client.session)

    async def watch(self) -> None:
        """Serve gossip to swarms, sample members' progress, publish again after a restart; until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._service.parts.watch)
            nursery.start_soon(self._service.publishing.publish_again)
            nursery.start_soon(self._names.watch)


class JobRequests:
    """Publishing and fetching, and their progress."""

    def __init__(self, service: PeerCheckpoints) -> None:
        self._publishing = service.publishing
        self._fetching = service.fetching
        self._jobs: dict[int, Job] = {}
        """By client."""

    def client_gone(self, client: LocalClient) -> None:
        self._jobs.pop(client.session, None)

    def publish(self, client: LocalClient, message: local.Publish) -> Awaitable[Message]:
        """Publish the connection's directory, or its memory."""

        async def publish(directory: HeldDirectory, job: Job) -> Message:
            return _published(*await self._publishing.publish(message, directory, job))

        async def publish_memory(job: Job) -> Message:
            source = SourceMemory(client.directory, message.file)
            return _published(*await self._publishing.publish_memory(message, source, job))

        if message.file:
            return self._do(client, publish_memory)
        return self._do_in_directory(client, message.path, publish)

    def fetch(self, client: LocalClient, message: local.Fetch) -> Awaitable[Message]:
        """Fetch to the connection's directory, or to memory."""

        async def fetch(directory: HeldDirectory, job: Job) -> Message:
            return await self._fetching.fetch(message, directory, job)

        async def fetch_to_memory(job: Job) -> Message:
            return await self._fetching.fetch_to_memory(message, job, client.session)

        if message.memory:
            return self._do(client, fetch_to_memory)
        return self._do_in_directory(client, message.path, fetch)

    async def progress(self, client: LocalClient, message: local.AskNews) -> local.ProgressReply:
        job = self._jobs.get(client.session)
        if job is None:
            raise ValueError("nothing was begun on this connection")
        await job.wait(message.seen, message.wait_ms / 1000)
        return local.ProgressReply(
            job.number,
            str(job.phase),
            job.done_bytes,
            job.total_bytes,
            job.ended,
            job.members,
            job.version,
        )

    def _do(self, client: LocalClient, work: Callable[[Job], Awaitable[Message]]) -> Awaitable[Message]:
        if client.session in self._jobs:
            raise ValueError(_BUSY)
        job = self._jobs[client.session] = Job()

        async def run() -> Message:
            try:
                return await work(job)
            finally:
                job.end()

        return run()

    def _do_in_directory(
        self, client: LocalClient, shown: str, work: Callable[[HeldDirectory, Job], Awaitable[Message]]
    ) -> Awaitable[Message]:
        directory = HeldDirectory(client.directory, shown)

        async def run(job: Job) -> Message:
            try:
                with directory.users_words():
                    return await work(directory, job)
            except BaseException:
                directory.close()
                raise

        try:
            return self._do(client, run)
        except ValueError:
            directory.close()
            raise


class GroupRequests:
    """Following and updating, and news of them."""

    def __init__(self, service: PeerCheckpoints) -> None:
        self._peer = service.peer
        self._fetching = service.fetching
        self._follows: dict[int, Following] = {}
        self._updates: dict[int, Updating] = {}
        self._failed: set[int] = set()
        """Clients whose follow could not begin."""

    def client_gone(self, client: LocalClient) -> None:
        self._follows.pop(client.session, None)
        self._failed.discard(client.session)
        self._updates.pop(client.session, None)

    def follow(self, client: LocalClient, message: local.Follow) -> Awaitable[Message]:
        """Follow a name to the connection's directory, until the client is gone."""
        self._check_idle(client)
        self._failed.add(client.session)  # until it has begun
        check_checkpoint_name(message.name)
        directory = HeldDirectory(client.directory, message.path)
        before = self._same_follow(message, directory)
        self._failed.discard(client.session)
        following = Following(self._peer, self._fetching, message, directory)
        self._follows[client.session] = following

        async def run() -> Message:
            try:
                if before is not None:
                    await before.stop()
                with directory.users_words():
                    await following.run()
                return Empty()
            finally:
                directory.close()

        return run()

    def _same_follow(self, order: local.Follow, directory: HeldDirectory) -> Following | None:
        """The running follow of the same name to the same directory: its client may be gone unnoticed. Raises
        `ValueError` when the name is followed to another directory: a peer announces one state a name."""
        for other in self._follows.values():
            if (other.order.namespace, other.order.name) != (order.namespace, order.name):
                continue
            if other.ended.is_set():
                continue
            if other.directory.identity == directory.identity:
                return other
            directory.close()
            raise ValueError(
                f"this peer follows checkpoint {order.name!r} already, to {other.directory.shown}"
            )
        return None

    async def follow_news(self, client: LocalClient, message: local.AskNews) -> local.FollowNewsReply:
        """State of the connection's follow."""
        following = self._follows.get(client.session)
        if client.session in self._failed:  # the answer to the follow itself says why
            return local.FollowNewsReply(0, b"", "", b"", Stage.WAITING.value, b"", ended=True)
        if following is None:
            raise ValueError("nothing is followed on this connection")
        await following.looked.wait()
        await following.news.wait(message.seen, message.wait_ms / 1000)
        said, head, job = following.follower.state, following.head, following.job
        publisher = b"" if head is None else head.publisher
        return local.FollowNewsReply(
            following.news.number,
            publisher,
            self._peer.core.name_of(publisher) if publisher else "",
            said.version,
            said.stage.value,
            said.current,
            job.done_bytes,
            job.total_bytes,
            said.why or (following.waits_because if head is None else ""),
            following.news.ended,
        )

    def update(self, client: LocalClient, message: local.Update) -> Awaitable[Message]:
        """Switch the followers of a name to its newest version."""
        self._check_idle(client)
        seconds = min(max(0, message.timeout_ms) / 1000, MAX_WAIT_SECONDS)
        quorum = None if message.quorum < 0 else message.quorum
        updating = Updating(self._peer, message.namespace, message.name, quorum, seconds)
        self._updates[client.session] = updating

        async def run() -> Message:
            try:
                await updating.run()
            finally:
                updating.news.end()
            group = updating.group
            return local.Updated(
                updating.version,
                updating.switched,
                updating.superseded,
                group.follower_count,
                group.ready_count,
                updating.using,
                self._laggards(updating),
            )

        return run()

    async def update_news(self, client: LocalClient, message: local.AskNews) -> local.UpdateNewsReply:
        """State of the connection's update."""
        updating = self._updates.get(client.session)
        if updating is None:
            raise ValueError("nothing is updated on this connection")
        await updating.news.wait(message.seen, message.wait_ms / 1000)
        return local.UpdateNewsReply(
            updating.news.number,
            updating.version,
            updating.group.follower_count,
            updating.group.ready_count,
            updating.using,
            updating.switched,
            self._laggards(updating),
            updating.news.ended,
        )

    def _laggards(self, updating: Updating) -> list[local.FollowerEntry]:
        return [
            local.FollowerEntry(
                *self._peer.identify(each.member),
                each.stage.value,
                each.done_permille,
                each.why,
                each.dead,
            )
            for each in updating.laggards[:MAX_ENTRIES]
        ]

    def _check_idle(self, client: LocalClient) -> None:
        if client.session in self._follows or client.session in self._updates:
            raise ValueError(_BUSY)


class NameRequests:
    """Listing and removing names."""

    def __init__(self, service: PeerCheckpoints) -> None:
        self._peer = service.peer
        self._records = service.peer.records
        self._parts = service.parts
        self._paces = Paces()

    async def watch(self) -> None:
        """Sample members' progress, until cancelled."""
        seen: object = None
        while True:
            seen = await self._peer.news(seen)
            await trio.sleep(PACE_SECONDS)
            self._paces.look(
                {
                    (member, part.version): part.done_permille
                    for member, parts in self._peer.participations()
                    for part in parts
                    if part.state == TakesPart.FETCHING
                },
                self._peer.now,
            )

    def list_names(self, client: LocalClient, message: local.ListCheckpoints) -> local.ListedCheckpoints:
        """The published names; a single name with what members have of it."""
        heads = self._records.heads(message.namespace or None, message.name or None)
        if message.name and not heads:
            raise NoSuchKey(
                f"no checkpoint {message.name!r} is known in namespace {message.namespace!r}: "
                "`mooncake-p2p checkpoint list --all` shows those that are"
            )
        return local.ListedCheckpoints(
            [self._entry(head, members=bool(message.name)) for head in heads[:MAX_ENTRIES]]
        )

    def _entry(self, head: Head, *, members: bool) -> local.CheckpointEntry:
        body, switch = head.body, self._records.switched(head.digest)
        return local.CheckpointEntry(
            head.namespace,
            head.name,
            head.publisher,
            self._peer.core.name_of(head.publisher),
            head.version,
            int(1000 * unix_seconds_from_clock(head.clock)),
            body.manifest_bytes,
            body.total_bytes,
            body.files,
            body.pieces,
            body.previous,
            b"" if switch is None else switch.version,
            self._records.trusts(head),
            head.publisher == self._peer.peer_id,
            self._peer.is_alive(head.publisher),
            self._members(head) if members else [],
        )

    def _members(self, head: Head) -> list[local.MemberEntry]:
        return [
            self._member(member, part, head.body.total_bytes)
            for member, parts in self._peer.parts.parts_of(head.digest).items()
            for part in parts
        ][:MAX_ENTRIES]

    def _member(self, member: int, part: Participation, total_bytes: int) -> local.MemberEntry:
        peer_id, name = self._peer.identify(member)
        pace = self._paces.permille_per_second((member, part.version))
        return local.MemberEntry(
            peer_id,
            name,
            part.version,
            STATE_NAMES.get(part.state, "unknown"),
            part.done_permille,
            part.follows,
            part.current,
            part.why,
            int(pace * total_bytes * part.needs_permille / 1_000_000),
            member == self._peer.own,
            part.needs_permille,
        )

    async def remove(
        self, client: LocalClient, message: local.RemoveCheckpoint
    ) -> local.CheckpointRemoved:
        """Remove a name of this peer, or forget another publisher's."""
        if message.publisher:
            head = self._records.forget(message.namespace, message.name, message.publisher)
        else:
            head = self._records.remove(message.namespace, message.name, self._peer.now)
        self._peer.process()
        await self._parts.stop_name(head.digest)
        return local.CheckpointRemoved(head.version)


def _published(version: bytes, manifest: Manifest) -> local.Published:
    layout = manifest.layout
    return local.Published(
        version, len(manifest.files), layout.total_bytes, layout.count, layout.piece_bytes
    )


class PeerCheckpoints:
    """The services of one peer: `publishing`, `fetching`, and its `parts` in swarms."""

    def __init__(
        self,
        peer: CheckpointPeer,
        signer: Signer,
        verifier: Verifier,
        rng: Random,
        memory_limit_bytes: int | None = None,
        state: StateDirectory | None = None,
    ) -> None:
        """`memory_limit_bytes`: see `Memories`. `state` keeps what is published for the next run."""
        publications = Publications(state)
        self.peer = peer
        self.memories = Memories(memory_limit_bytes)
        self.parts = SwarmParts(peer, rng, publications.forget)
        self.publishing = Publishing(peer, self.parts, self.memories, publications, signer)
        finder = Finder(peer, self.parts, verifier, rng)
        self.fetching = Fetching(peer, self.parts, self.memories, finder)

    def close(self) -> None:
        """Free all memory when the peer ends and no swarm runs any more."""
        self.memories.close()
