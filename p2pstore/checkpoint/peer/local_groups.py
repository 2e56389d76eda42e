"""What is answered to clients about names of checkpoints: following them, switching, what is known of them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

import trio

from p2pstore.checkpoint.content.content_paths import check_checkpoint_name
from p2pstore.checkpoint.peer.checkpoint_service import PeerCheckpoints, in_users_words
from p2pstore.checkpoint.peer.following import Following, FollowOrder
from p2pstore.checkpoint.peer.held_directory import HeldDirectory
from p2pstore.checkpoint.peer.job import Job
from p2pstore.checkpoint.peer.orders import FetchOrder
from p2pstore.checkpoint.peer.paces import Paces
from p2pstore.checkpoint.peer.updating import Updating
from p2pstore.checkpoint.swarm.group import Laggard, Stage
from p2pstore.errors import NoSuchKey
from p2pstore.gossip.checkpoint_records import Head
from p2pstore.gossip.records import Participation, PeerId, TakesPart
from p2pstore.local import group_messages as local
from p2pstore.local.server import LocalClient
from p2pstore.objects import unix_seconds_from_clock
from p2pstore.peer.for_clients.local_queries import MAX_WAIT_SECONDS
from p2pstore.peer.node import Node
from p2pstore.wire import Empty, Message

PACE_SECONDS: Final = 0.5
"""Between two looks at how far members are."""
STATE_NAMES: Final = {int(state): state.name.lower() for state in TakesPart}


class LocalGroups:
    """CHECKPOINT_FOLLOW, CHECKPOINT_UPDATE, CHECKPOINT_LIST, CHECKPOINT_REMOVE, and news of them. A connection does one
    thing."""

    def __init__(self, node: Node, checkpoints: PeerCheckpoints) -> None:
        self._node = node
        self._service = checkpoints
        self._known = node.core.checkpoints
        self._follows: dict[int, Following] = {}
        self._updates: dict[int, Updating] = {}
        self._failed: set[int] = set()
        """Clients whose follow could not begin."""
        self._paces = Paces()

    async def watch(self) -> None:
        """See how fast members fetch, until cancelled."""
        seen: object = None
        while True:
            seen = await self._node.checkpoint_news(seen)
            await trio.sleep(PACE_SECONDS)
            self._paces.look(
                {
                    (state.member, part.version): part.done_permille
                    for state in self._node.core.gossip.membership.live()
                    for part in state.checkpoints
                    if part.state == TakesPart.FETCHING
                },
                self._node.now,
            )

    def client_gone(self, client: LocalClient) -> None:
        """What it had begun was cancelled."""
        self._follows.pop(client.holder, None)
        self._failed.discard(client.holder)
        self._updates.pop(client.holder, None)

    # --- following ---------------------------------------------------------------------------

    def follow(self, client: LocalClient, message: local.Follow) -> Awaitable[Message]:
        """Follow a name to its directory, until the client is gone."""
        self._check_idle(client)
        self._failed.add(client.holder)  # until it has begun
        check_checkpoint_name(message.name)
        order = FollowOrder(
            message.namespace,
            message.name,
            message.publisher or None,
            message.keep,
            message.include,
            message.exclude,
        )
        directory = HeldDirectory(client.directory, message.path)
        before = self._follows_already(order, directory)
        self._failed.discard(client.holder)
        following = Following(self._node, _Preparer(self._service), order, directory)
        self._follows[client.holder] = following

        async def run() -> Message:
            try:
                if before is not None:
                    await before.stop()
                with in_users_words(directory):
                    await following.run()
                return Empty()
            finally:
                directory.close()

        return run()

    def _follows_already(self, order: FollowOrder, directory: HeldDirectory) -> Following | None:
        """Whoever follows the name to the same directory: its client may be gone, and this peer not know it yet. To
        another one: raises `ValueError`, as a peer says of a name once how far it is."""
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

    async def follow_news(
        self, client: LocalClient, message: local.FollowNews
    ) -> local.FollowNewsReply:
        """How the follow of this connection is."""
        following = self._follows.get(client.holder)
        if client.holder in self._failed:  # the answer to the request itself says why
            return local.FollowNewsReply(0, b"", "", b"", Stage.WAITING.value, b"", ended=True)
        if following is None:
            raise ValueError("nothing is followed on this connection")
        await following.looked.wait()
        await following.news.wait(message.seen, message.wait_ms / 1000)
        said, head, job = following.follower.said, following.head, following.job
        publisher = b"" if head is None else head.publisher
        return local.FollowNewsReply(
            following.news.number,
            publisher,
            self._node.core.name_of(publisher) if publisher else "",
            said.version,
            said.stage.value,
            said.current,
            job.done_bytes,
            job.total_bytes,
            said.why or (following.waits_because if head is None else ""),
            following.news.ended,
        )

    # --- updating ----------------------------------------------------------------------------

    def update(self, client: LocalClient, message: local.Update) -> Awaitable[Message]:
        """Have the followers of a name switch to its newest version."""
        self._check_idle(client)
        seconds = min(max(0, message.timeout_ms) / 1000, MAX_WAIT_SECONDS)
        quorum = None if message.quorum < 0 else message.quorum
        updating = Updating(self._node, message.namespace, message.name, quorum, seconds)
        self._updates[client.holder] = updating

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

    async def update_news(
        self, client: LocalClient, message: local.UpdateNews
    ) -> local.UpdateNewsReply:
        """How far the update of this connection is."""
        updating = self._updates.get(client.holder)
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
        return [self._follower(each) for each in updating.laggards[:MAX_ENTRIES]]

    def _follower(self, laggard: Laggard) -> local.FollowerEntry:
        peer_id, name = self._who(laggard.member)
        return local.FollowerEntry(
            peer_id,
            name,
            laggard.stage.value,
            laggard.done_permille,
            laggard.why,
            laggard.dead,
        )

    # --- what is known -----------------------------------------------------------------------

    def list_names(self, client: LocalClient, message: local.ListCheckpoints) -> local.Checkpoints:
        """Names that are published; of one name, with what members have of it."""
        heads = self._known.heads(message.namespace or None, message.name or None)
        if message.name and not heads:
            raise NoSuchKey(
                f"no checkpoint {message.name!r} is known in namespace {message.namespace!r}: "
                "`mooncake-p2p checkpoint list --all` shows those that are"
            )
        return local.Checkpoints(
            [self._entry(head, members=bool(message.name)) for head in heads[:MAX_ENTRIES]]
        )

    def _entry(self, head: Head, *, members: bool) -> local.CheckpointEntry:
        core, body = self._node.core, head.body
        switch = self._known.switched(head.digest)
        state = core.gossip.membership.get(head.publisher)
        return local.CheckpointEntry(
            head.namespace,
            head.name,
            head.publisher,
            core.name_of(head.publisher),
            head.version,
            int(1000 * unix_seconds_from_clock(head.clock)),
            body.manifest_bytes,
            body.total_bytes,
            body.files,
            body.pieces,
            body.previous,
            b"" if switch is None else switch.version,
            self._known.trusts(head),
            head.publisher == core.peer_id,
            state is not None and state.alive,
            self._members(head) if members else [],
        )

    def _members(self, head: Head) -> list[local.MemberEntry]:
        return [
            self._member(member, part, head.body.total_bytes)
            for member, parts in self._known.parts_of(head.digest).items()
            for part in parts
        ][:MAX_ENTRIES]

    def _member(self, member: int, part: Participation, total: int) -> local.MemberEntry:
        peer_id, name = self._who(member)
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
            int(pace * total * part.needs_permille / 1_000_000),
            member == self._node.core.member,
            part.needs_permille,
        )

    def _who(self, member: int) -> tuple[PeerId, str]:
        state = self._node.core.gossip.membership.resolve(member)
        if state is None:
            return b"", f"{member:016x}"
        return state.peer_id, self._node.core.name_of(state.peer_id)

    # --- removing ----------------------------------------------------------------------------

    async def remove(
        self, client: LocalClient, message: local.RemoveCheckpoint
    ) -> local.CheckpointRemoved:
        """A name of this peer's is gone, or that of another is forgotten here."""
        if message.publisher:
            head = self._known.forget(message.namespace, message.name, message.publisher)
        else:
            head = self._known.remove(message.namespace, message.name, self._node.now)
        self._node.process()
        await self._service.stop_name(head.digest)
        return local.CheckpointRemoved(head.version)

    def _check_idle(self, client: LocalClient) -> None:
        if client.holder in self._follows or client.holder in self._updates:
            raise ValueError("this connection has something to do already")


MAX_ENTRIES: Final = 4096
"""In one answer."""


class _Preparer:
    """Brings versions by the swarm, and passes them on."""

    def __init__(self, service: PeerCheckpoints) -> None:
        self._service = service

    async def pass_on(
        self, order: FollowOrder, version: bytes, publisher: PeerId, directory: HeldDirectory
    ) -> None:
        try:
            with in_users_words(directory):
                kept = await self._service.pass_on(
                    _fetch_order(order, publisher), version, publisher, directory
                )
        except BaseException:
            directory.close()
            raise
        if not kept:
            directory.close()

    async def prepare(
        self,
        order: FollowOrder,
        version: bytes,
        publisher: PeerId,
        directory: HeldDirectory,
        job: Job,
    ) -> None:
        fetch = _fetch_order(order, publisher)
        try:
            with in_users_words(directory):
                await self._service.bring(fetch, version, publisher, directory, job, use=False)
        except BaseException:
            directory.close()
            raise
        finally:
            job.end()


def _fetch_order(order: FollowOrder, publisher: PeerId) -> FetchOrder:
    return FetchOrder(
        order.namespace,
        order.name,
        publisher=publisher,
        keep=order.keep,
        include=order.include,
        exclude=order.exclude,
    )
