"""A member with the cluster's key that announces other bytes under a version that another member wrote, and serves
them with the project's own data server. No reader may get them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from p2pstore import errors
from p2pstore.memory.entries import Written
from p2pstore.memory.segment_layout import TrailerBody, encode_trailer
from p2pstore.objects import Version, chunk_sums, key_digest, root_checksum
from p2pstore.peer import Peer
from p2pstore.peer.api import open_peer
from tests.cluster.peers import cluster, config
from tests.waiting import until

KEYS = [f"key/{number}" for number in range(8)]
SECONDS = 30.0
ROUNDS = 6
"""Readers choose among holders at random."""
WAYS = ("tcp", "shm")


def value_of(key: str) -> bytes:
    return f"{key} as its writer wrote it ".encode() * 50


def other_value_of(key: str) -> bytes:
    return f"{key} as somebody else has it".encode() * 50


def announce(liar: Peer, key: str, value: bytes, version: Version) -> None:
    """Have a member hold, announce and serve a value under any version, with a proof that is none: without one, its own
    core would become the writer of it after a while, which is an overwrite like any other."""
    core, now, sums = liar.node.core, liar.node.now, chunk_sums(value)
    trailer = TrailerBody("default", key, sums, proof=bytes(98))
    length = len(encode_trailer(trailer))
    room = core.segment.reserve(
        len(value), length, session="liar", now=core.unix(now), namespace="default"
    )
    core.segment.reservation_view(room.number, session="liar")[:] = value
    named = Version(version.clock, version.writer, root_checksum(len(value), sums))
    digest = key_digest(key)
    written = Written(room.number, digest, named, trailer, len(value))
    core.objects.publish(written, session="liar", soft=False, now=now)
    liar.node.process()


def version_at(peer: Peer, key: str) -> Version:
    """Of what a peer holds."""
    entry = peer.node.core.objects.find(key_digest(key), peer.node.now)
    assert entry is not None
    return entry.version


async def poison(writer: Peer, liar: Peer, keys: Sequence[str] = KEYS) -> None:
    """The liar announces other bytes under the versions of the writer."""
    for key in keys:
        announce(liar, key, other_value_of(key), version_at(writer, key))


def holders_known(reader: Peer, key: str) -> int:
    return len(reader.node.core.gossip.directory.holders(key_digest(key)))


async def put_all(writer: Peer) -> None:
    for key in KEYS:
        await writer.put(key, value_of(key))


def lose(holder: Peer) -> None:
    """Have a holder drop what it has, as if it had been evicted."""
    core, now = holder.node.core, holder.node.now
    for key in KEYS:
        if (entry := core.objects.find(key_digest(key), now)) is not None:
            core.objects.withdraw(entry, now)
    holder.node.process()


async def read_all(reader: Peer) -> list[bytes | None]:
    """The reader's value of each key, in each of the ways to read; None where it gets nothing."""
    found: list[bytes | None] = []
    for key in KEYS:
        try:
            found.append(await reader.get(key))
        except (errors.NoSuchKey, errors.Unavailable):
            found.append(None)
        buffer = bytearray(len(value_of(key)) + 10)
        try:
            length = await reader.get_into(key, buffer)
        except (errors.NoSuchKey, errors.Unavailable):
            found.append(None)
        else:
            found.append(bytes(buffer[:length]))
    found += [None if each.error else bytes(each.unwrap()) for each in await reader.get_many(KEYS)]
    items = [(key, bytearray(len(value_of(key)))) for key in KEYS]
    lengths = await reader.get_many_into(items)
    found += [
        None if length.error else bytes(buffer[: length.unwrap()])
        for (_, buffer), length in zip(items, lengths, strict=True)
    ]
    return found


RIGHT = [value_of(key) for key in KEYS]


def check_all_right(found: Sequence[bytes | None]) -> None:
    singles = [value for value in RIGHT for _ in range(2)]
    wrong = {
        place: each
        for place, (each, right) in enumerate(zip(found, [*singles, *RIGHT, *RIGHT], strict=True))
        if each != right
    }
    assert wrong == {}


def none_wrong(found: Sequence[bytes | None]) -> bool:
    return all(each is None or each in RIGHT for each in found)


@pytest.mark.parametrize("way", WAYS)
async def test_the_writers_bytes_are_read_whoever_announces_others(tmp_path: Path, way: str) -> None:
    async with cluster(tmp_path, 3, transport=way) as (writer, reader, liar):
        await put_all(writer)
        await poison(writer, liar)
        await until(lambda: all(holders_known(reader, key) == 2 for key in KEYS))
        for _ in range(ROUNDS):
            check_all_right(await read_all(reader))
        for key in KEYS:
            async with reader.lease(key) as view:
                assert view == value_of(key)


@pytest.mark.parametrize("way", WAYS)
async def test_other_bytes_are_not_read_when_their_writer_has_none(tmp_path: Path, way: str) -> None:
    async with cluster(tmp_path, 3, transport=way) as (writer, reader, liar):
        await put_all(writer)
        await poison(writer, liar)
        lose(writer)
        await until(lambda: all(holders_known(reader, key) == 1 for key in KEYS))
        for _ in range(2):
            assert none_wrong(await read_all(reader))
        for key in KEYS:
            with pytest.raises((errors.NoSuchKey, errors.Unavailable)):
                async with reader.lease(key):
                    pass


async def test_a_newer_version_in_anothers_name_is_not_read(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, transport="tcp") as (writer, reader, liar):
        await put_all(writer)
        for key in KEYS:
            version = version_at(writer, key)
            newer = Version(version.clock + 1, version.writer)
            announce(liar, key, other_value_of(key), newer)
        await until(lambda: all(holders_known(reader, key) == 2 for key in KEYS))
        for _ in range(2):
            check_all_right(await read_all(reader))


async def test_who_joins_later_reads_the_writers_bytes(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2, transport="tcp") as (writer, liar):
        await put_all(writer)
        await poison(writer, liar)
        settings = config(tmp_path, "late", writer, transport="tcp")
        async with open_peer(settings) as late:
            await until(lambda: all(holders_known(late, key) == 2 for key in KEYS))
            for _ in range(ROUNDS):
                check_all_right(await read_all(late))


async def test_a_copy_is_read_when_its_writer_has_gone(tmp_path: Path) -> None:
    """Honest copies outlive their writer's."""
    async with cluster(tmp_path, 3, transport="tcp") as (writer, keeper, reader):
        for key in KEYS:
            await writer.put(key, value_of(key), replicas=2)
        copies = sum(version_at_or_none(keeper, key) is not None for key in KEYS)
        lose(writer)
        kept = [key for key in KEYS if version_at_or_none(keeper, key) is not None]
        assert len(kept) == copies
        await until(lambda: all(holders_known(reader, key) <= 1 for key in KEYS))
        with trio.fail_after(SECONDS):
            for key in KEYS:
                assert await reader.get(key, wait=5) == value_of(key)


def version_at_or_none(peer: Peer, key: str) -> Version | None:
    entry = peer.node.core.objects.find(key_digest(key), peer.node.now)
    return None if entry is None else entry.version


async def test_copies_outlive_their_writer_and_a_restart_of_their_holder(tmp_path: Path) -> None:
    """The proofs lie beside them in memory that is kept."""
    keeping = config(
        tmp_path,
        "keeper",
        transport="tcp",
        memory_path=str(tmp_path / "memory"),
        keep_memory=True,
        state_dir=str(tmp_path / "state"),
    )
    async with open_peer(keeping) as keeper:
        settings = config(tmp_path, "writer", keeper, transport="tcp")
        async with open_peer(settings) as writer:
            await until(lambda: writer.node.core.live_peers())
            for key in KEYS:
                result = await writer.put(key, value_of(key), replicas=2)
                assert result.copies == 2
    async with open_peer(keeping) as keeper:
        settings = config(tmp_path, "reader", keeper, transport="tcp")
        async with open_peer(settings) as reader:
            for key in KEYS:
                assert await reader.get(key, wait=20) == value_of(key)
            assert writer_is_unknown(reader)


def writer_is_unknown(reader: Peer) -> bool:
    """Whether no writer's own log vouches for what was read."""
    core, now = reader.node.core, reader.node.now
    return all(
        copy.local or core.proofs.knows(key_digest(key), copy.record.version)
        for key in KEYS
        for copy in core.copies.known(key_digest(key), now)
    )
