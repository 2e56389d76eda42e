"""What is answered to clients about checkpoints: publishing and fetching the directory of their connection, or to
memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from p2pstore.checkpoint import checkpoint_messages as local
from p2pstore.checkpoint.content.manifest import Manifest, format_version
from p2pstore.checkpoint.content.sources import SourceMemory
from p2pstore.checkpoint.peer.checkpoint_service import PeerCheckpoints, in_users_words
from p2pstore.checkpoint.peer.jobs import Job
from p2pstore.checkpoint.peer.orders import FetchOrder, PublishOrder
from p2pstore.checkpoint.peer.stores import HeldDirectory, MemoryTarget
from p2pstore.errors import NoSuchKey
from p2pstore.local.server import LocalClient
from p2pstore.wire import Message


class LocalCheckpoints:
    """CHECKPOINT_PUBLISH, CHECKPOINT_FETCH and CHECKPOINT_PROGRESS. A connection does one thing."""

    def __init__(self, checkpoints: PeerCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._jobs: dict[int, Job] = {}
        """Of each client."""

    def client_gone(self, client: LocalClient) -> None:
        """What it had begun was cancelled; memory that it looked at is given back."""
        self._jobs.pop(client.holder, None)
        self._checkpoints.memory_left(client.holder)

    def use_memory(self, client: LocalClient) -> MemoryTarget:
        """The version in memory that a client's hello asks for. Raises `NoSuchKey`."""
        target = self._checkpoints.memories.use(client.checkpoint, client.holder)
        if target is None:
            raise NoSuchKey("this version is in this peer's memory no more")
        return target

    def publish(self, client: LocalClient, message: local.Publish) -> Awaitable[Message]:
        """Publish its directory."""
        order = PublishOrder(
            message.namespace,
            message.name,
            message.include,
            message.exclude,
            message.piece_bytes,
            message.wait_seeded,
        )

        async def publish(directory: HeldDirectory, job: Job) -> Message:
            return _published(*await self._checkpoints.publish(order, directory, job))

        if message.file:
            return self._publish_memory(client, order, message.file)
        return self._do(client, message.path, publish)

    def _publish_memory(
        self, client: LocalClient, order: PublishOrder, file: str
    ) -> Awaitable[Message]:
        job = self._begin_job(client)

        async def run() -> Message:
            try:
                source = SourceMemory(client.directory, file)
                return _published(*await self._checkpoints.publish_memory(order, source, job))
            finally:
                job.end()

        return run()

    def fetch(self, client: LocalClient, message: local.Fetch) -> Awaitable[Message]:
        """Fetch to its directory."""
        order = FetchOrder(
            message.namespace,
            message.name,
            message.version,
            message.publisher or None,
            message.flat,
            message.keep,
            message.limit_bytes_per_second,
            message.verify,
            message.wait_ms / 1000,
            message.include,
            message.exclude,
            message.pieces,
        )

        async def fetch(directory: HeldDirectory, job: Job) -> Message:
            done = await self._checkpoints.fetch(order, directory, job)
            where = "" if order.flat else format_version(done.version)
            return local.Fetched(
                done.version,
                where,
                done.total_bytes,
                done.fetched_bytes,
                done.whole,
                list(done.unmatched),
            )

        if message.memory:
            return self._fetch_to_memory(client, order)
        return self._do(client, message.path, fetch)

    def _fetch_to_memory(self, client: LocalClient, order: FetchOrder) -> Awaitable[Message]:
        job = self._begin_job(client)

        async def run() -> Message:
            try:
                done = await self._checkpoints.fetch_to_memory(order, job, client.holder)
            finally:
                job.end()
            return local.Fetched(done.version, "", done.total_bytes, done.fetched_bytes)

        return run()

    def _begin_job(self, client: LocalClient) -> Job:
        if client.holder in self._jobs:
            raise ValueError("this connection has something to do already")
        job = self._jobs[client.holder] = Job()
        return job

    async def progress(self, client: LocalClient, message: local.Progress) -> local.ProgressReply:
        """How far what its connection asked for is."""
        job = self._jobs.get(client.holder)
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

    def _do(
        self,
        client: LocalClient,
        shown: str,
        work: Callable[[HeldDirectory, Job], Awaitable[Message]],
    ) -> Awaitable[Message]:
        directory = HeldDirectory(client.directory, shown)
        try:
            job = self._begin_job(client)
        except ValueError:
            directory.close()
            raise

        async def run() -> Message:
            try:
                with in_users_words(directory):
                    return await work(directory, job)
            except BaseException:
                directory.close()
                raise
            finally:
                job.end()

        return run()


def _published(version: bytes, manifest: Manifest) -> local.Published:
    layout = manifest.layout
    return local.Published(
        version, len(manifest.files), layout.total_bytes, layout.count, layout.piece_bytes
    )
