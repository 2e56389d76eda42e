"""Groups that follow a checkpoint, between real peers of one process."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from p2pstore import errors
from p2pstore.checkpoint.peer import following as updating
from p2pstore.peer import Peer
from p2pstore.results import FollowedCheckpoint
from tests.cluster.peers import cluster
from tests.contract.swarm_world import make_files, same_files
from tests.waiting import until

DEADLINE = 60.0


class Follow:
    """One follow, and what it said."""

    def __init__(self, peer: Peer, directory: Path, *include: str) -> None:
        self.peer, self.directory, self.include = peer, directory, include
        self.said: list[FollowedCheckpoint] = []
        self._news = trio.Event()

    def changed(self, now: FollowedCheckpoint) -> None:
        self.said.append(now)
        self._news.set()
        self._news = trio.Event()

    async def run(self, *, publisher: str | None = None) -> None:
        await self.peer.checkpoints.follow(
            "model", self.directory, self.changed, publisher=publisher, include=self.include
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
    """The peer has heard of `count` followers."""
    with trio.fail_after(DEADLINE):
        while True:
            infos = await peer.checkpoints.names()
            members = [
                m for i in infos for s in await peer.checkpoints.status(i.name) for m in s.members
            ]
            if sum(member.follows for member in members) == count:
                return
            await trio.sleep(0.05)


async def until_published(peer: Peer, count: int) -> None:
    with trio.fail_after(DEADLINE):
        while len(await peer.checkpoints.names()) < count:
            await trio.sleep(0.05)


async def until_members(peer: Peer, wanted: list[tuple[Peer, str, str]]) -> None:
    """This and nothing else is known of what these peers have."""
    expected = {(each.peer_id, version[:16], state) for each, version, state in wanted}
    peers = {each.peer_id for each, _, _ in wanted}
    with trio.fail_after(DEADLINE):
        while True:
            members = [m for i in await peer.checkpoints.status("model") for m in i.members]
            found = {(m.peer_id, m.version, m.state) for m in members if m.peer_id in peers}
            if found == expected:
                return
            await trio.sleep(0.05)


async def test_followers_prepare_and_switch_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 3) as (a, b, c):
        make_files(tmp_path / "v1", {"weights": 300_000, "config.json": 100})
        make_files(tmp_path / "v2", {"weights": 300_001, "config.json": 101})
        one, two = Follow(b, tmp_path / "b"), Follow(c, tmp_path / "c")
        async with following(one, two):
            first = (await a.checkpoints.publish("model", tmp_path / "v1")).version
            for follow in (one, two):
                await follow.until("verified", first)
                assert follow.current is None, "there was no switch"
            (told,) = b.node.statistics.document()["follows"]
            assert (told["name"], told["ready"], told["current"]) == ("model", True, True)
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
            # A publisher that was just started may not know all followers yet, and takes its time.
            monkeypatch.setattr(updating, "ACQUAINTED_SECONDS", 3600.0)
            with trio.move_on_after(1.0) as given_up:
                await a.checkpoints.update("model", timeout=DEADLINE)
            assert given_up.cancelled_caught
            assert (await c.checkpoints.status("model"))[0].switched == first
            assert b.node.statistics.document()["follows"][0]["behind_seconds"] == 0
            monkeypatch.setattr(updating, "ACQUAINTED_SECONDS", 0.0)
            assert (await a.checkpoints.update("model", timeout=DEADLINE)).using == 2
            assert {one.current, two.current} == {second}
            assert await a.checkpoints.remove("model") == second
            with pytest.raises(errors.NoSuchKey):
                await a.checkpoints.update("model")
        # A late follower of a removed name has nothing to do; earlier ones keep what they have.
        assert same_files(tmp_path / "v2", tmp_path / "b/current")


async def test_some_files_of_each_version_are_followed(tmp_path: Path) -> None:
    make_files(tmp_path / "v1", {"weights": 300_000, "config.json": 100, "deep/config.json": 50})
    make_files(tmp_path / "v2", {"weights": 300_001})
    async with cluster(tmp_path, 2) as (a, b):
        first = (await a.checkpoints.publish("model", tmp_path / "v1")).version
        some = Follow(b, tmp_path / "b", "*config.json")
        async with following(some):
            await some.until("verified", first)
            await until_followed(a, 1)
            assert (await a.checkpoints.update("model", timeout=DEADLINE)).using == 1
        found = sorted(path.name for path in (tmp_path / "b/current").rglob("*") if path.is_file())
        assert found == ["config.json", "config.json"]
        # A follower with the same patterns has them already; one with more does not.
        again = Follow(b, tmp_path / "b", "config.json")
        async with following(again):
            await again.until("current", first)
            second = (await a.checkpoints.publish("model", tmp_path / "v2")).version
            await again.until("failed", second)
            assert "no file of checkpoint 'model' matches; it has 'weights'" in again.said[-1].why
        assert {each.stage for each in again.said if each.version == first} == {"current"}
        assert not (tmp_path / "b" / second).exists()


async def test_late_ones_pruned_versions_and_two_publishers(tmp_path: Path) -> None:
    """A follower that comes when its publisher is gone; versions that a directory drops; a stranger that publishes the
    same name; a second directory; a follower whose directory another process takes over."""
    async with cluster(tmp_path, 4) as (a, b, c, d):
        for number in range(1, 4):
            make_files(tmp_path / f"v{number}", {"weights": 100_000 + number})
        first = (await a.checkpoints.publish("model", tmp_path / "v1")).version
        one = Follow(b, tmp_path / "b")
        async with following(one):
            await one.until("verified", first)
            done = await a.checkpoints.update("model", timeout=DEADLINE)
            assert done.using == 1
            versions = [first]
            for number in (2, 3):
                made = await a.checkpoints.publish("model", tmp_path / f"v{number}")
                versions.append(made.version)
                await one.until("verified", made.version)
            assert one.current == first
            kept = {path.name for path in one.directory.iterdir() if len(path.name) == 32}
            assert kept == {first, versions[-1]}, "the version in use and the newest"
            await until_members(b, [(b, first, "seeding"), (b, versions[2], "seeding")])

            # A stranger publishes the name: b keeps to whom it knows, and d, which knows neither, is asked to choose.
            with pytest.raises(errors.CheckpointRefused, match=f"belongs to p0 .{a.peer_id}."):
                await c.checkpoints.publish("model", tmp_path / "v2")
            with pytest.raises(errors.CheckpointRefused, match="belongs to p0 "):
                await c.checkpoints.publish("model", {"w": np.zeros(3)})
            await c.checkpoints.forget("model", a.peer_id)
            await c.checkpoints.publish("model", tmp_path / "v2")
            await until_published(d, 2)
            still_its_own = await a.checkpoints.publish("model", tmp_path / "v3")
            assert f"p2 ({c.peer_id}) publishes 'model' as well" in still_its_own.notes[0]
            assert [info.mine for info in await b.checkpoints.status("model")] == [False, False]
            infos = await b.checkpoints.status("model")
            assert [info.trusted for info in infos] == [True, False]
            assert infos[0].publisher == a.peer_id
            with pytest.raises(ValueError, match="2 publishers"):
                await Follow(d, tmp_path / "d").run()

            # The publisher is gone: a late follower gets all from the others, and uses their version.
            late = Follow(d, tmp_path / "d")
            a.node.leave_requested.set()
            async with trio.open_nursery() as nursery:

                async def follow_late() -> None:
                    with pytest.raises(errors.Unavailable, match="followed by another process"):
                        await late.run(publisher=a.peer_id)

                nursery.start_soon(follow_late)
                await late.until("verified", versions[-1])
                assert late.current == first
                with pytest.raises(ValueError, match="follows checkpoint 'model' already"):
                    await Follow(d, tmp_path / "elsewhere").run()
                again = Follow(d, tmp_path / "d")
                nursery.start_soon(again.run)
                await again.until("verified", versions[-1])
                nursery.cancel_scope.cancel()


async def test_an_update_without_followers_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updating, "FIRST_FOLLOWER_SECONDS", 0.1)
    make_files(tmp_path / "v1", {"weights": 1000})
    async with cluster(tmp_path, 1) as (a,):
        await a.checkpoints.publish("model", tmp_path / "v1")
        with pytest.raises(errors.FollowersLag, match="has no followers, so none switches: run"):
            await a.checkpoints.update("model")  # not after ten minutes
        assert (await a.checkpoints.update("model", quorum=0)).using == 0


async def test_who_follows_another_publisher_than_there_is_hears_why_it_waits(tmp_path: Path) -> None:
    make_files(tmp_path / "v1", {"weights": 1000})
    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", tmp_path / "v1")
        await until_published(b, 1)
        one = Follow(b, tmp_path / "b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(one.run, publisher=b.peer_id))
            await until(lambda: any("to trust another one" in each.why for each in one.said))
            nursery.cancel_scope.cancel()


async def test_who_follows_a_publisher_that_is_forgotten_follows_the_next(tmp_path: Path) -> None:
    """As when a publisher came back with another identity, with the same files."""
    for number in (1, 2):
        make_files(tmp_path / f"v{number}", {"weights": 1000 * number})
    async with cluster(tmp_path, 3) as (a, b, c):
        first = (await a.checkpoints.publish("model", tmp_path / "v1")).version
        one = Follow(b, tmp_path / "b")
        async with following(one):
            await one.until("verified", first)
            await until_published(c, 1)
            await c.checkpoints.forget("model", a.peer_id)
            second = (await c.checkpoints.publish("model", tmp_path / "v2")).version
            assert second not in {each.version for each in one.said}
            await b.checkpoints.forget("model", a.peer_id)
            await one.until("verified", second)
            assert one.said[-1].publisher == c.peer_id
            again = (await c.checkpoints.publish("model", tmp_path / "v1")).version
            assert again == first
            await until_followed(c, 1)
            assert (await c.checkpoints.update("model", timeout=DEADLINE)).using == 1
            assert one.current == first
