"""Checkpoints between real peers of one process, as programs publish and fetch them."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

import p2pstore
from p2pstore import errors
from p2pstore.checkpoint.target_directory import TargetDirectory
from p2pstore.peer import Peer
from p2pstore.peer.checkpoints import service
from p2pstore.results import CheckpointProgress
from tests.cluster.test_open_peer import MIB, cluster, until
from tests.contract.swarm_world import make_files, same_files

FILES = {"model.safetensors": 3_000_017, "config.json": 900, "deep/tokenizer.json": 70_000}
PIECE = 64 * 1024


def in_plain_code(peer: Peer, directory: Path) -> p2pstore.results.FetchedCheckpoint:
    with p2pstore.blocking.connect(peer.socket) as client:
        return client.checkpoints.fetch("model", directory, wait=20)


def under_asyncio(peer: Peer, directory: Path) -> p2pstore.results.FetchedCheckpoint:
    async def fetch() -> p2pstore.results.FetchedCheckpoint:
        async with p2pstore.aio.connect(peer.socket) as client:
            return await client.checkpoints.fetch("model", directory, wait=20)

    return asyncio.run(fetch())


async def test_what_one_publishes_the_others_fetch_in_every_world(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    seen: list[CheckpointProgress] = []
    async with cluster(tmp_path, 4) as (a, b, c, d):
        published = await a.checkpoints.publish(
            "model", source, piece_bytes=PIECE, exclude=["*.tmp"]
        )
        assert (published.files, published.piece_bytes) == (3, PIECE)
        assert published.total_bytes == sum(FILES.values())

        async def with_trio() -> None:
            got = await b.checkpoints.fetch("model", tmp_path / "b", wait=20, progress=seen.append)
            assert got.version == published.version
            assert got.directory == str(tmp_path / "b" / published.version)
            assert got.fetched_bytes == got.total_bytes == published.total_bytes

        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_trio)
            nursery.start_soon(trio.to_thread.run_sync, in_plain_code, c, tmp_path / "c")
            nursery.start_soon(trio.to_thread.run_sync, under_asyncio, d, tmp_path / "d")
        for name in "bcd":
            assert same_files(source, tmp_path / name / "current")
        assert {each.phase for each in seen} & {"fetching", "checking"}
        with pytest.raises(errors.NoSuchKey, match="no checkpoint 'other'"):
            await b.checkpoints.fetch("other", tmp_path / "other")


async def test_a_fetch_again_or_to_another_directory_moves_nothing_over_the_network(
    tmp_path: Path,
) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    async with cluster(tmp_path, 2) as (a, b):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        first = await b.checkpoints.fetch("model", tmp_path / "one", wait=20)
        assert first.fetched_bytes == first.total_bytes
        for name in ("one", "two", "two"):
            again = await b.checkpoints.fetch(
                "model", tmp_path / name, version=published.version[:6].upper()
            )
            assert again == p2pstore.results.FetchedCheckpoint(
                published.version, str(tmp_path / name / published.version), first.total_bytes, 0
            )
            assert same_files(source, tmp_path / name / "current")
        (source / "config.json").write_bytes(b"other")
        newer = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        assert newer.version != published.version

        def is_known() -> bool:
            return b.node.core.checkpoints.find("default", "model").version.hex() == newer.version

        await until(is_known)
        changed = await b.checkpoints.fetch("model", tmp_path / "one")
        assert 0 < changed.fetched_bytes < PIECE + 5
        assert same_files(source, tmp_path / "one" / "current")
        older = await b.checkpoints.fetch("model", tmp_path / "one", version=published.version[:8])
        assert older.fetched_bytes == 0
        assert not same_files(source, tmp_path / "one" / "current")


async def test_what_is_there_is_verified_piece_by_piece_each_once_and_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    read = TargetDirectory.read
    together = threading.Barrier(2)
    pieces: list[int] = []

    def reading(self: TargetDirectory, piece: int) -> bytearray:
        pieces.append(piece)
        if len(pieces) <= 2:
            together.wait(20)  # breaks, where there is nobody else
        return read(self, piece)

    async with cluster(tmp_path, 2) as (a, b):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        monkeypatch.setattr(TargetDirectory, "read", reading)
        again = await b.checkpoints.fetch("model", tmp_path / "b", verify=True)
    assert again.fetched_bytes == 0
    assert sorted(pieces) == list(range(published.pieces))


async def test_what_cannot_be_done_is_said_in_the_words_of_who_asked(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        await until(lambda: b.node.core.checkpoints.heads())
        with pytest.raises(errors.NoSuchKey, match="begins with abcd: give all its 32 digits"):
            await b.checkpoints.fetch("model", tmp_path / "b", version="abcd")
        with pytest.raises(ValueError, match="4 to 32 hexadecimal digits"):
            await b.checkpoints.fetch("model", tmp_path / "b", version="x")
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(errors.CheckpointRefused, match=f"^{empty}: there is no file"):
            await a.checkpoints.publish("other", empty)
        (tmp_path / "b" / "current").mkdir(parents=True)
        with pytest.raises(errors.ConfigError, match=f"^{tmp_path}/b/current is not a link"):
            await b.checkpoints.fetch("model", tmp_path / "b")
        with pytest.raises(errors.NoSuchKey, match="publishes no checkpoint 'model'"):
            await b.checkpoints.fetch("model", tmp_path / "c", publisher=b.peer_id)
        with pytest.raises(NotADirectoryError):
            await b.checkpoints.fetch("model", source / "config.json" / "x")
        with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*config.json'"):
            await b.checkpoints.fetch("model", source / "config.json")
        with pytest.raises(ValueError, match="printable, without spaces and @: 'mo del'"):
            await b.checkpoints.fetch("mo del", tmp_path / "c")
        with pytest.raises(ValueError, match="a power of two long, from 16,384 to"):
            await a.checkpoints.publish("model", source, piece_bytes=100_000)
        fast = await b.checkpoints.fetch("model", tmp_path / "fast", limit_rate=1 << 40)
        assert fast.fetched_bytes == fast.total_bytes


async def test_a_version_that_its_publisher_gave_up_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MANIFEST_SECONDS", 1.0)
    monkeypatch.setattr(service, "HOPE_SECONDS", 1.0)
    source = tmp_path / "from"
    make_files(source, FILES)
    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        (source / "model.safetensors").write_bytes(b"other")
        with pytest.raises(
            errors.Unavailable,
            match=r"p0, which published it, gave it up: model.safetensors: changed",
        ):
            await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        with pytest.raises(errors.Unavailable, match=r"can be reached: p0, which .*: changed"):
            await b.checkpoints.fetch("model", tmp_path / "b", wait=20)


async def test_a_fetch_that_is_cancelled_goes_on_where_it_was(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    async with cluster(tmp_path, 2) as (a, b):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        async with trio.open_nursery() as nursery:

            def enough(report: CheckpointProgress) -> None:
                if report.phase == "fetching" and report.done_bytes:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(
                partial(
                    b.checkpoints.fetch,
                    "model",
                    tmp_path / "b",
                    wait=20,
                    limit_rate=MIB,
                    progress=enough,
                )
            )
        began = trio.current_time()
        rest = await b.checkpoints.fetch("model", tmp_path / "b", limit_rate=2 * MIB)
        assert 0 < rest.fetched_bytes < rest.total_bytes == published.total_bytes
        assert trio.current_time() - began > rest.fetched_bytes / (2 * MIB) - 0.5
        assert same_files(source, tmp_path / "b" / "current")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """As the format has it: the length of a JSON header, the header, the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        kind = {"float32": "F32", "int64": "I64"}[array.dtype.name]
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


async def test_tensors_in_memory_are_views_that_clients_share(tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    rng = np.random.default_rng(1)
    weights: dict[str, np.ndarray] = {
        "layer.0.weight": rng.random((300, 500), np.float32),
        "layer.1.weight": rng.random((100, 500), np.float32),
        "steps": np.arange(5),
    }
    write_safetensors(source / "model.safetensors", weights)
    (source / "config.json").write_bytes(b'{"layers": 2}')
    async with cluster(tmp_path, 2, checkpoint_memory="2MiB") as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        tensors = await b.checkpoints.fetch_tensors("model", wait=20)
        assert dict.fromkeys(tensors) == dict.fromkeys(weights)
        for name, array in weights.items():
            assert np.array_equal(tensors[name], array)
            assert not tensors[name].flags.writeable
        assert bytes(tensors.file("config.json")) == b'{"layers": 2}'

        def in_plain_code() -> np.ndarray:
            with (
                p2pstore.blocking.connect(b.socket) as client,
                client.checkpoints.fetch_tensors("model", ["layer.*"]) as some,
            ):
                assert sorted(some) == ["layer.0.weight", "layer.1.weight"]
                kept: np.ndarray = some["layer.1.weight"]
                return kept

        kept = await trio.to_thread.run_sync(in_plain_code)
        assert np.array_equal(kept, weights["layer.1.weight"]), "a view outlives its client"

        # From memory to a directory of this peer.
        got = await b.checkpoints.fetch("model", tmp_path / "b")
        assert got.fetched_bytes == 0
        assert same_files(source, tmp_path / "b" / "current")

        # There is room for one or the other.
        make_files(source, {"more.bin": MIB})
        larger = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        await until(
            lambda: b.node.core.checkpoints.find("default", "model").version.hex() == larger.version
        )
        with pytest.raises(errors.CapacityExceeded, match=r"\(--checkpoint-memory\)"):
            await b.checkpoints.fetch_tensors("model")
        assert np.array_equal(tensors["steps"], weights["steps"])
        tensors.close()
        with trio.fail_after(60):
            while True:  # the peer notices that a client is gone a moment later
                try:
                    tensors = await b.checkpoints.fetch_tensors("model")
                    break
                except errors.CapacityExceeded:
                    await trio.sleep(0.01)
        assert tensors.file("more.bin") == (source / "more.bin").read_bytes()
        tensors.close()

        (source / "model.safetensors").write_bytes(b"none of these")
        await a.checkpoints.publish("broken", source, piece_bytes=PIECE)
        with pytest.raises(errors.CheckpointRefused, match=r"model.safetensors is not in the"):
            await b.checkpoints.fetch_tensors("broken", wait=20)
