"""Swarms on real connections: links, pieces, deaths, lies. Members of one process; directories on the disk."""

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from p2pstore.checkpoint.content import target_directory
from p2pstore.checkpoint.content.manifest import SignedManifest, format_version, version_of
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.target_directory import TargetDirectory
from p2pstore.checkpoint.peer.fetching import ask_for_manifest
from p2pstore.checkpoint.swarm.selection import SwarmConfig
from p2pstore.checkpoint.swarm.swarm_messages import MAX_NEW_PIECES, NewPieces
from p2pstore.errors import CheckpointChanged, NoSuchKey
from p2pstore.objects import MIB
from tests.contract.swarm_world import (
    PIECE,
    MemberHere,
    World,
    make_files,
    open_world,
    same_files,
    signed_directory,
)
from tests.waiting import until

FILES = {"model.safetensors": 40 * PIECE + 17, "config.json": 900, "deep/tokenizer.json": 70_000}


async def published(world: World, tmp_path: Path) -> tuple[MemberHere, SignedManifest]:
    """A member that publishes `FILES`."""
    make_files(tmp_path / "from", FILES)
    source = await world.add()
    signed, files = await signed_directory(tmp_path / "from", source.identity)
    source.publish(signed, files)
    return source, signed


async def complete(tmp_path: Path, members: Sequence[MemberHere]) -> None:
    """Wait until all have everything, and compare it."""
    await until(lambda: all(member.run.machine.complete for member in members))
    for member in members:
        run = member.run
        await run.transfers.written()
        assert isinstance(run.store, TargetDirectory)
        await trio.to_thread.run_sync(list, run.store.finishing(keep=2))
        place = tmp_path / f"to{member.number}" / format_version(run.version)
        assert same_files(tmp_path / "from", place)


def to(tmp_path: Path, member: MemberHere) -> Path:
    return tmp_path / f"to{member.number}"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_directory_reaches_each_member_once(tmp_path: Path, tls: bool) -> None:
    async with open_world(tls=tls) as world:
        source, signed = await published(world, tmp_path)
        fetchers = [await world.add() for _ in range(4)]
        for member in fetchers:
            member.fetch(signed, to(tmp_path, member))
        await complete(tmp_path, fetchers)
        assert all(
            member.run.progress.fetched_bytes == member.run.progress.total_bytes for member in fetchers
        )
        assert source.run.progress.failure is None
        await until(lambda: source.run.machine.dispensable)
        for member in [source, *fetchers]:
            await until(lambda run=member.run: not run.transfers._buffers._used)  # type: ignore[misc]


async def test_the_event_loop_writes_small_pieces_where_that_cannot_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, threads = TargetDirectory.write, dict[Path, set[int]]()

    def watched(target: TargetDirectory, piece: int, data: memoryview) -> bool:
        threads.setdefault(target.directory, set()).add(threading.get_ident())
        return write(target, piece, data)

    monkeypatch.setattr(TargetDirectory, "write", watched)
    async with open_world() as world:
        _, signed = await published(world, tmp_path)
        fetchers = [await world.add() for _ in range(2)]
        fetchers[0].fetch(signed, to(tmp_path, fetchers[0]))
        monkeypatch.setattr(target_directory, "is_local_directory", lambda path: False)
        fetchers[1].fetch(signed, to(tmp_path, fetchers[1]))
        await complete(tmp_path, fetchers)
    here, there = (threads[to(tmp_path, member)] for member in fetchers)
    assert threading.get_ident() in here
    assert threading.get_ident() not in there


async def test_neighbours_tell_of_each_other_before_gossip_does(tmp_path: Path) -> None:
    """Else all would have pieces of the source alone in the first second."""
    async with open_world() as world:
        world.gossips = False
        source, signed = await published(world, tmp_path)
        fetchers = [await world.add() for _ in range(3)]
        for member in fetchers:
            member.fetch(signed, to(tmp_path, member))
        everybody = {each.own for each in [source, *fetchers]}
        await until(lambda: all({*each.run.links.members, each.own} == everybody for each in fetchers))
        await complete(tmp_path, fetchers)


async def test_the_source_goes_once_the_others_have_everything(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        first = await world.add()
        first.fetch(signed, to(tmp_path, first))
        await source.run.until_dispensable(lambda done, members: None)
        source.die()
        late = await world.add()
        late.fetch(signed, to(tmp_path, late))
        await complete(tmp_path, [first, late])


async def test_a_death_in_the_middle_holds_up_no_other_and_the_fetch_goes_on_later(
    tmp_path: Path,
) -> None:
    async with open_world() as world:
        _, signed = await published(world, tmp_path)
        dying, other = await world.add(), await world.add()
        run = dying.fetch(signed, to(tmp_path, dying))
        other.fetch(signed, to(tmp_path, other))
        await until(lambda: run.machine.have.bit_count() >= 3)
        dying.die()
        await run.progress.ended.wait()
        await complete(tmp_path, [other])
        had = run.progress.done_bytes
        again = await world.add()
        resumed = again.fetch(signed, to(tmp_path, dying))
        assert resumed.progress.done_bytes == had
        await until(lambda: resumed.machine.complete)
        assert resumed.progress.fetched_bytes == resumed.progress.total_bytes - had


class _Lying:
    """A store whose bytes are never what they should be."""

    def __init__(self, count: int) -> None:
        self.have = self.needed = (1 << count) - 1
        self.copies: dict[int, list[Extent]] = {}
        self.is_local = False
        self.reads = 0

    def read(self, piece: int, room: memoryview | None = None) -> bytearray:
        self.reads += 1
        return bytearray(PIECE if piece < 40 else 17)

    def write(self, piece: int, data: memoryview) -> bool:
        raise AssertionError("it has everything")

    def close(self) -> None: ...


async def test_a_sender_of_bad_pieces_is_banned_and_the_others_complete(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        liar = await world.add()
        lies = _Lying(source.run.manifest.layout.count)
        liar.join(signed, lies)
        fetcher = await world.add()
        config = SwarmConfig(retry_seconds=0.05)
        run = fetcher.fetch(signed, to(tmp_path, fetcher), config)
        run.machine.state.senders._first_deadline = 5.0
        await complete(tmp_path, [fetcher])
        assert lies.reads <= 4
        assert run.machine.state.senders.is_ignored(liar.own, trio.current_time()) or not lies.reads


async def test_a_map_beyond_the_last_piece_bans_its_sender(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        liar = await world.add()
        run = liar.fetch(signed, to(tmp_path, liar))
        await until(lambda: source.own in run.links.members)
        run.links.enqueue([source.own], NewPieces([4000]))
        await until(lambda: source.run.machine.state.senders.is_banned(liar.own))
        await until(lambda: liar.own not in source.run.links.members)
        run.links.begin_dialing(source.own)
        await run.links.dial(source.own)
        assert source.own not in run.links.members


async def test_two_that_dial_at_once_have_one_link(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        members = [source, *[await world.add() for _ in range(4)]]
        for member in members[1:]:
            member.fetch(signed, to(tmp_path, member))  # all hear of each other at once, and dial
        await complete(tmp_path, members[1:])
        everybody = {each.own for each in members}
        for member in members:
            assert {*member.run.links.members, member.own} == everybody
        await until(lambda: sum(each.server.connections for each in members) >= 10)


async def test_who_does_not_read_is_cut_off(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        other = await world.add()
        run = other.fetch(signed, to(tmp_path, other))
        await until(lambda: other.own in source.run.links.members)
        news = NewPieces([40] * MAX_NEW_PIECES)
        for _ in range(20 * MIB // MAX_NEW_PIECES):  # without a turn for who reads
            source.run.links.enqueue([other.own], news)
        await until(lambda: other.own not in source.run.links.members)
        await until(lambda: not run.links.members)


async def test_a_file_that_changed_ends_the_source_and_never_a_bad_piece(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        (tmp_path / "from" / "model.safetensors").write_bytes(b"other")
        fetcher = await world.add()
        run = fetcher.fetch(signed, to(tmp_path, fetcher))
        await source.run.progress.ended.wait()
        assert isinstance(source.run.progress.failure, CheckpointChanged)
        await until(lambda: not run.links.members)
        assert run.machine.have.bit_count() <= 2


async def test_a_full_disk_ends_the_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_world() as world:
        _, signed = await published(world, tmp_path)
        fetcher = await world.add()
        run = fetcher.fetch(signed, to(tmp_path, fetcher))
        write = run.store.write

        def full(piece: int, data: memoryview) -> bool:
            if run.machine.have.bit_count() > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(piece, data)

        monkeypatch.setattr(run.store, "write", full)
        with pytest.raises(OSError, match="No space left"):
            await run.progress.until(lambda: run.machine.complete)
        await run.progress.ended.wait()


async def test_peers_of_one_host_bring_each_piece_once(tmp_path: Path) -> None:
    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        fetchers = [await world.add("one host") for _ in range(3)]
        for member in fetchers:
            member.fetch(signed, to(tmp_path, member))
        await complete(tmp_path, fetchers)
        total = fetchers[0].run.progress.total_bytes
        assert source.sent_bytes < 2.5 * total


async def test_a_manifest_comes_from_any_member_that_has_it(tmp_path: Path) -> None:
    from p2pstore.gossip.links.identity import Ed25519Verifier

    async with open_world() as world:
        source, signed = await published(world, tmp_path)
        version = version_of(signed.body)
        other = await world.add()
        nobody = await world.add()
        ways = [way for each in (nobody, source) if (way := other.way_to(each.own)) is not None]
        publisher = source.identity.peer_id
        found = await ask_for_manifest(other.pool, ways, version, publisher, Ed25519Verifier())
        assert found == signed
        assert (
            await ask_for_manifest(other.pool, ways[:1], version, publisher, Ed25519Verifier()) is None
        )
        with pytest.raises(NoSuchKey):
            nobody.swarms.take_link(version, publisher)
