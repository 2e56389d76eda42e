"""Checkpoints between real peers of one process, as programs publish and fetch them."""

import asyncio
import errno
import json
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

import p2pstore
from p2pstore import errors
from p2pstore.checkpoint.content.hashing import PieceHashes
from p2pstore.checkpoint.peer import fetching, version_fetch
from p2pstore.checkpoint.peer import fetching as manifest_search
from p2pstore.checkpoint.peer.piece_stores import MemoryTarget
from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.gossip.records import TakesPart
from p2pstore.objects import MIB
from p2pstore.peer import Peer, open_peer
from p2pstore.results import CheckpointProgress
from tests.cluster.peers import cluster, config
from tests.contract.swarm_world import make_files, same_files
from tests.waiting import until

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
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE, exclude=["*.tmp"])
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
        assert seen  # what it was in when the peer was asked is a matter of time
        assert {each.phase for each in seen} <= {"waiting", "checking", "fetching", "finishing"}
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
    hash_run = PieceHashes.hash_run
    together = threading.Barrier(2)
    runs: list[range] = []

    def hashing(self: PieceHashes, run: range) -> int:
        runs.append(run)
        if len(runs) <= 2:
            together.wait(20)  # breaks without a second party
        return hash_run(self, run)

    async with cluster(tmp_path, 2) as (a, b):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        monkeypatch.setattr(PieceHashes, "hash_run", hashing)
        again = await b.checkpoints.fetch("model", tmp_path / "b", verify=True)
    assert again.fetched_bytes == 0
    assert sorted(piece for run in runs for piece in run) == list(range(published.pieces))


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


async def test_what_was_published_is_published_again_by_the_next_life_of_its_peer(
    tmp_path: Path,
) -> None:
    """The newest version of each name that was not removed, unless its files are others by now."""
    for name in ("old", "new", "changed", "moved", "removed"):
        make_files(tmp_path / name, {**FILES, "name": len(name)})
    kept = config(tmp_path, "a", state_dir=str(tmp_path / "state"))
    async with open_peer(kept) as a:
        await a.checkpoints.publish("model", tmp_path / "old", piece_bytes=PIECE)
        newest = await a.checkpoints.publish("model", tmp_path / "new", piece_bytes=PIECE)
        changed = await a.checkpoints.publish("changed", tmp_path / "changed")
        await a.checkpoints.publish("moved", tmp_path / "moved")
        await a.checkpoints.publish("removed", tmp_path / "removed")
        await a.checkpoints.remove("removed")
    (tmp_path / "changed" / "config.json").write_bytes(b"{}")
    (tmp_path / "moved").rename(tmp_path / "elsewhere")
    async with open_peer(kept) as a, open_peer(config(tmp_path, "b", a)) as b:
        got = await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        assert (got.version, got.fetched_bytes) == (newest.version, newest.total_bytes)
        assert same_files(tmp_path / "new", tmp_path / "b" / "current")
        parts = a.node.core.participations
        await until(lambda: sum(part.state == TakesPart.FAILED for part in parts.own) == 2)
        why = sorted(part.why for part in parts.own if part.state == TakesPart.FAILED)
        assert why == [
            f"{tmp_path / 'changed'}: config.json: changed since it was published",
            f"{tmp_path / 'moved'}: No such file or directory",
        ]
        assert sum(part.state == TakesPart.PUBLISHING for part in parts.own) == 1
        again = await a.checkpoints.publish("changed", tmp_path / "changed")
        assert again.version != changed.version
    async with open_peer(kept) as a:
        parts = a.node.core.participations
        await until(lambda: sum(part.state == TakesPart.PUBLISHING for part in parts.own) == 2)


async def test_a_version_that_its_publisher_gave_up_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_search, "MANIFEST_SECONDS", 1.0)
    monkeypatch.setattr(version_fetch, "HOPE_SECONDS", 1.0)
    source = tmp_path / "from"
    make_files(source, FILES)
    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        (source / "model.safetensors").write_bytes(b"other")
        with pytest.raises(
            errors.Unavailable, match=r"p0, which published it, gave it up: model.safetensors: changed"
        ):
            await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        parts = b.node.core.participations.own
        assert [part.state for part in parts] == [TakesPart.FAILED], "others read that it goes on"
        assert "gave it up" in parts[0].why
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


async def test_what_a_fetch_that_fails_late_has_brought_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swarm has the directory by then: closed under it, it ended every later fetch as well."""
    source = tmp_path / "from"
    make_files(source, FILES)

    def fail(directory: Path) -> set[bytes]:
        raise OSError(errno.EIO, "no")

    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        with monkeypatch.context() as patched, pytest.raises(errors.ConfigError):
            patched.setattr(fetching, "kept_versions", fail)
            await b.checkpoints.fetch("model", tmp_path / "one", wait=20)
        for name in ("one", "two"):
            again = await b.checkpoints.fetch("model", tmp_path / name)
            assert again.fetched_bytes == 0
            assert same_files(source, tmp_path / name / "current")


async def test_some_files_are_brought_passed_on_and_completed_later(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, {**FILES, "other.safetensors": MIB})
    async with cluster(tmp_path, 3) as (a, b, c):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        version = published.version
        with pytest.raises(ValueError, match=r"no file of checkpoint 'model' matches; it has '"):
            await b.checkpoints.fetch("model", tmp_path / "b", include=["none*"], wait=20)
        some = await b.checkpoints.fetch("model", tmp_path / "b", include=["other*", "c*.json"])
        assert not some.whole
        assert MIB < some.fetched_bytes == some.total_bytes < MIB + 2 * PIECE
        there = {path.name for path in (tmp_path / "b" / "current").rglob("*") if path.is_file()}
        assert there == {"other.safetensors", "config.json"}

        def is_told() -> bool:
            parts = c.node.core.participations.parts_of(
                c.node.core.checkpoints.find("default", "model").digest
            )
            return sorted(part.needs_permille for each in parts.values() for part in each) == [
                1000 * some.total_bytes // published.total_bytes,
                1000,
            ]

        await until(is_told)

        # Elsewhere on that peer: the same is there; more is fetched, and what is there is not.
        again = await b.checkpoints.fetch("model", tmp_path / "again", include=["other*"])
        assert again.fetched_bytes == 0
        more = await b.checkpoints.fetch("model", tmp_path / "again")
        assert more.whole
        assert 0 < more.fetched_bytes <= published.total_bytes - MIB
        assert same_files(source, tmp_path / "again" / "current")
        whole = await b.checkpoints.fetch("model", tmp_path / "b")
        assert whole.whole
        assert whole.fetched_bytes == 0
        assert same_files(source, tmp_path / "b" / version)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """As the format has it: the length of a JSON header, the header, the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        kind = {"float32": "F32", "int64": "I64"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
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
        tensors.close()  # the peer notices that a client is gone a moment later
        tensors = await b.checkpoints.fetch_tensors("model")
        assert tensors.file("more.bin") == (source / "more.bin").read_bytes()
        tensors.close()

        (source / "model.safetensors").write_bytes(b"none of these")
        await a.checkpoints.publish("broken", source, piece_bytes=PIECE)
        with pytest.raises(errors.CheckpointRefused, match=r"model.safetensors is not in the"):
            await b.checkpoints.fetch_tensors("broken", wait=20)


async def test_tensors_are_fetched_anew_while_their_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, refused = threading.Event(), threading.Event()
    close, read = MemoryTarget.close, MemoryTarget.read

    def close_slowly(self: MemoryTarget) -> None:
        close(self)
        closed.set()
        assert refused.wait(60), "no request came for the closing version"

    def read_or_say(self: MemoryTarget, piece: int, room: memoryview | None = None) -> memoryview:
        try:
            return read(self, piece, room)
        except errors.StoreClosed:
            refused.set()
            raise

    source = tmp_path / "from"
    source.mkdir()
    weights = {"w": np.arange(100_000)}
    write_safetensors(source / "model.safetensors", weights)
    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        tensors = await b.checkpoints.fetch_tensors("model", wait=20)
        monkeypatch.setattr(MemoryTarget, "close", close_slowly)
        monkeypatch.setattr(MemoryTarget, "read", read_or_say)
        tensors.close()
        await until(closed.is_set)
        tensors = await b.checkpoints.fetch_tensors("model")
        assert refused.is_set()
        assert np.array_equal(tensors["w"], weights["w"])
        failed = [p for p in b.node.core.participations.own if p.state == TakesPart.FAILED]
        assert not failed, "to give memory back is no failure"
        tensors.close()


async def test_of_some_tensors_and_rows_only_the_pieces_they_are_in_are_fetched(
    tmp_path: Path, runs: list[SwarmRun]
) -> None:
    source = tmp_path / "from"
    source.mkdir()
    rng = np.random.default_rng(2)
    shards = {
        f"model-{shard}.safetensors": {
            f"layer.{shard}.{kind}": rng.random((400, 500), np.float32) for kind in ("q", "mlp")
        }
        for shard in range(3)
    }
    for name, tensors in shards.items():
        write_safetensors(source / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (source / "model.safetensors.index.json").write_text(index)
    (source / "config.json").write_text("{}")
    size = 400 * 500 * 4
    async with cluster(tmp_path, 2, checkpoint_memory="3MiB") as (a, b):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        assert published.total_bytes > 6 * size > 3 * MIB
        with pytest.raises(errors.CapacityExceeded, match=r"\(--checkpoint-memory\)"):
            await b.checkpoints.fetch_tensors("model", wait=20)

        def brought() -> int:
            return sum(run.progress.fetched_bytes for run in runs)

        def half(rank: int, name: str, shape: tuple[int, ...]) -> slice:
            rows = shape[0] // 2
            return slice(rank * rows, (rank + 1) * rows)

        some = await b.checkpoints.fetch_tensors("model", ["layer.1.q"], files=["config.json"])
        assert list(some) == ["layer.1.q"]
        assert np.array_equal(some["layer.1.q"], shards["model-1.safetensors"]["layer.1.q"])
        assert set(some.files) == {"model.safetensors.index.json", "config.json"}
        assert bytes(some.file("config.json")) == b"{}"
        with pytest.raises(KeyError):
            some.file("model-0.safetensors")
        assert size < brought() < size + 4 * PIECE, "and not the headers of other files"
        before = brought()

        # Two ranks at once, in memory that all share.
        ranks: list[dict[str, np.ndarray]] = [{}, {}]

        async def fetch(rank: int) -> None:
            mine = await b.checkpoints.fetch_tensors("model", ["*.q"], rows=partial(half, rank))
            ranks[rank] = dict(mine)
            mine.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, 0)
            nursery.start_soon(fetch, 1)
        for number, tensors in enumerate(shards.values()):
            name = f"layer.{number}.q"
            both = np.concatenate([ranks[0][name], ranks[1][name]])
            assert ranks[0][name].shape == (200, 500)
            assert np.array_equal(both, tensors[name])
        assert 2 * size <= brought() - before < 2 * size + 8 * PIECE

        with pytest.raises(errors.CapacityExceeded, match=r"\(--checkpoint-memory\)"):
            await b.checkpoints.fetch_tensors("model")
        with pytest.raises(ValueError, match="rows must be consecutive"):
            await b.checkpoints.fetch_tensors("model", rows=lambda *_: slice(None, None, 2))

        # Pieces in memory are not fetched again for a directory.
        whole = await b.checkpoints.fetch("model", tmp_path / "b")
        assert whole.fetched_bytes < published.total_bytes - 3 * size + 8 * PIECE
        assert same_files(source, tmp_path / "b" / "current")
        assert np.array_equal(some["layer.1.q"], shards["model-1.safetensors"]["layer.1.q"])
        more = await b.checkpoints.fetch_tensors("model", ["layer.2.mlp"])
        assert np.array_equal(more["layer.2.mlp"], shards["model-2.safetensors"]["layer.2.mlp"])
        some.close()
        more.close()


async def test_tensors_are_published_from_memory(tmp_path: Path) -> None:
    weights: dict[str, np.ndarray] = {
        "layer.0.weight": np.arange(150_000, dtype=np.float32).reshape(300, 500),
        "layer.1.weight": np.ones((100, 500), np.float32),
    }
    async with cluster(tmp_path, 2, checkpoint_memory="2MiB") as (a, b):
        first = await a.checkpoints.publish("model", weights, piece_bytes=PIECE)
        before = {name: array.copy() for name, array in weights.items()}
        weights["layer.1.weight"][:] = 2
        got = await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        assert got.version == first.version
        assert [path.name for path in (tmp_path / "b" / "current").iterdir()] == ["model.safetensors"]
        with await b.checkpoints.fetch_tensors("model") as tensors:
            for name, array in before.items():
                assert np.array_equal(tensors[name], array)

        def in_plain_code() -> p2pstore.results.PublishedCheckpoint:
            with p2pstore.blocking.connect(a.socket) as client:
                return client.checkpoints.publish("model", weights, piece_bytes=PIECE)

        second = await trio.to_thread.run_sync(in_plain_code)
        changed = await b.checkpoints.fetch(
            "model", tmp_path / "b", version=second.version, publisher=a.peer_id
        )
        assert 0 < changed.fetched_bytes < 100 * 500 * 4 + 2 * PIECE, "only what is another"
        assert len(a.node.core.participations.own) == 1, "the older version's memory is free again"
        with pytest.raises(errors.CapacityExceeded, match=r"\(--checkpoint-memory\); publish them"):
            await a.checkpoints.publish("other", {"x": np.zeros(2 * MIB, np.uint8)})
        with pytest.raises(ValueError, match="include and exclude are for files"):
            await a.checkpoints.publish("other", weights, include=["layer.0*"])
        await a.checkpoints.remove("model")
        await a.checkpoints.publish("other", {"x": np.zeros(MIB, np.uint8)})


async def test_who_does_not_wait_for_the_others_any_more_has_published(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, FILES)
    async with cluster(tmp_path, 2) as (a, b):
        for what in (source, {"x": np.zeros(MIB, np.uint8)}):
            async with trio.open_nursery() as nursery:

                def seeding(report: CheckpointProgress, scope: trio.CancelScope) -> None:
                    if report.phase == "seeding":
                        scope.cancel()

                nursery.start_soon(
                    partial(
                        a.checkpoints.publish,
                        "model",
                        what,
                        wait_seeded=True,
                        progress=partial(seeding, scope=nursery.cancel_scope),
                    )
                )
            version = a.node.core.checkpoints.find("default", "model").version.hex()
            got = await b.checkpoints.fetch(
                "model", tmp_path / "b", version=version, publisher=a.peer_id, wait=20
            )
            assert got.fetched_bytes == got.total_bytes
