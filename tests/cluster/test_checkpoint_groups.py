"""Groups that follow a checkpoint, between real peers of one process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from p2pstore import errors
from p2pstore.peer import Peer
from p2pstore.results import FollowedCheckpoint
from tests.cluster.test_open_peer import cluster
from tests.contract.swarm_world import make_files, same_files

DEADLINE = 60.0


class Follow:
    """One follow, and what it said."""

    def __init__(self, peer: Peer, directory: Path) -> None:
        self.peer, self.directory = peer, directory
        self.said: list[FollowedCheckpoint] = []
        self._news = trio.Event()

    def changed(self, now: FollowedCheckpoint) -> None:
        self.said.append(now)
        self._news.set()
        self._news = trio.Event()

    async def run(self, *, publisher: str | None = None) -> None:
        await self.peer.checkpoints.follow(
            "model", self.directory, self.changed, publisher=publisher
        )

    async def until(self, stage: str, version: str) -> None:
        with trio.fail_after(DEADLINE):
            while not self.said or (self.said[-1].stage, self.said[-1].version) != (stage, version):
                await self._news.wait()

    @property
    def current(self) -> str | None:
        link = self.directory / "current"
        return os.readlink(link) if link.is_symlink() else None


@asynccontextmanager
async def following(*follows: Follow) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        for follow in follows:
            nursery.start_soon(follow.run)
        yield nursery
        nursery.cancel_scope.cancel()


async def until_followed(peer: Peer, count: int) -> None:
    """The peer has heard of so many followers."""
    with trio.fail_after(DEADLINE):
        while True:
            infos = await peer.checkpoints.names()
            members = [
                m for i in infos for s in await peer.checkpoints.status(i.name) for m in s.members
            ]
            if sum(member.follows for member in members) == count:
                return
            await trio.sleep(0.05)


async def test_followers_prepare_and_switch_together(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as (a, b, c):
        make_files(tmp_path / "v1", {"weights": 300_000, "config.json": 100})
        make_files(tmp_path / "v2", {"weights": 300_001, "config.json": 101})
        one, two = Follow(b, tmp_path / "b"), Follow(c, tmp_path / "c")
        async with following(one, two):
            first = (await a.checkpoints.publish("model", tmp_path / "v1")).version
            for follow in (one, two):
                await follow.until("verified", first)
                assert follow.current is None, "nobody said that it is to be used"
            await until_followed(a, 2)
            done = await a.checkpoints.update("model", timeout=DEADLINE)
            assert (done.followers, done.ready, done.using, done.laggards) == (2, 2, 2, ())
            for follow in (one, two):
                assert follow.current == first
                assert same_files(tmp_path / "v1", follow.directory / "current")
            second = (await a.checkpoints.publish("model", tmp_path / "v2")).version
            for follow in (one, two):
                await follow.until("verified", second)
                assert follow.current == first
            (info,) = await c.checkpoints.status("model")
            assert (info.version, info.previous, info.switched) == (second, first, first)
            assert info.trusted
            assert (await a.checkpoints.update("model", timeout=DEADLINE)).using == 2
            assert {one.current, two.current} == {second}
            assert await a.checkpoints.remove("model") == second
            with pytest.raises(errors.NoSuchKey):
                await a.checkpoints.update("model")
        # Who comes late to a name that is gone has nothing to do, and who was there keeps what it has.
        assert same_files(tmp_path / "v2", tmp_path / "b/current")
