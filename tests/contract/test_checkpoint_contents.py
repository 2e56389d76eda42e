"""Checkpoints of many files, and of equal ones, between real peers of one process."""

import threading
from pathlib import Path

import numpy as np
import pytest
import trio

import p2pstore
from p2pstore import errors
from p2pstore.checkpoint.content import manifest as manifest_module
from p2pstore.checkpoint.content.directory_versions import FILES_A_STEP
from p2pstore.checkpoint.content.manifest import Manifest
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.target_directory import TargetDirectory
from p2pstore.checkpoint.peer.swarm_run import SwarmRun
from p2pstore.gossip.records import TakesPart
from p2pstore.peer import open_peer
from p2pstore.results import CheckpointProgress
from tests.cluster.peers import cluster, config
from tests.contract.swarm_world import make_files, same_files
from tests.contract.test_checkpoints import write_safetensors
from tests.unit.test_safetensors import POINTER
from tests.waiting import until

PIECE = 64 * 1024


def make_equal_files(source: Path) -> int:
    """As a model cache has them: links to blobs, both published. The bytes that differ."""
    make_files(source, {"blobs/1": 1_000_003, "blobs/2": 40_000, "blobs/3": 30_000})
    for number, name in enumerate(("model.safetensors", "config.json", "other.json"), 1):
        link = source / "snapshots" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"../blobs/{number}")
    (source / "large.again").write_bytes((source / "blobs/1").read_bytes())
    return 1_000_003 + 40_000 + 30_000


async def test_equal_files_cross_the_network_once_and_are_passed_on(
    tmp_path: Path, runs: list[SwarmRun]
) -> None:
    source = tmp_path / "from"
    different = make_equal_files(source)
    async with cluster(tmp_path, 3) as (a, b, c):
        published = await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        got = await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        assert same_files(source, tmp_path / "b" / "current")
        assert (got.total_bytes, got.whole) == (published.total_bytes, True)
        assert got.fetched_bytes == different
        [mine] = b.node.core.participations.own
        assert (mine.state, mine.needs_permille) == (TakesPart.SEEDING, 1000)
        # It has every piece for others.
        assert runs[-1].machine.have.bit_count() == published.pieces
        with await c.checkpoints.fetch_tensors("model", files=["snapshots/config.json"]) as some:
            assert some.file("snapshots/config.json") == (source / "blobs/2").read_bytes()
        some_files = await c.checkpoints.fetch("model", tmp_path / "c", include=["large.again"])
        assert some_files.fetched_bytes == 1_000_003
        whole = await c.checkpoints.fetch("model", tmp_path / "c")
        assert whole.fetched_bytes <= 70_000
        assert same_files(source, tmp_path / "c" / "current")
        flat = await b.checkpoints.fetch("model", tmp_path / "flat", flat=True)
        assert flat.fetched_bytes == 0
        assert (tmp_path / "flat" / "large.again").stat().st_nlink == 1


async def test_false_hashes_of_files_cost_a_fetch_and_no_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "from"
    make_equal_files(source)
    real = Manifest.copies_among

    def false(self: Manifest, pieces: int, have: int = 0) -> dict[int, list[Extent]]:
        found = real(self, pieces, have)
        if not found:
            return found
        wrong = self.layout.extents(self.layout.count - 1)
        return dict.fromkeys(found, wrong)

    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
        monkeypatch.setattr(Manifest, "copies_among", false)
        got = await b.checkpoints.fetch("model", tmp_path / "b", wait=20)
        assert got.fetched_bytes == got.total_bytes
        assert same_files(source, tmp_path / "b" / "current")


async def test_many_small_files_are_made_durable_side_by_side_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)
    steps: list[int] = []
    make_durable = TargetDirectory.make_durable

    def durable(self: TargetDirectory, places: list[Path]) -> int:
        steps.append(len(places))
        if len(steps) <= 4:
            together.wait(20)  # breaks, where they come one after the other
        return make_durable(self, places)

    monkeypatch.setattr(TargetDirectory, "make_durable", durable)
    source = tmp_path / "from"
    for number in range(400):
        place = source / f"{number % 7}" / f"{number}.bin"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(number.to_bytes(4, "little") * 50)
    seen: list[CheckpointProgress] = []
    async with cluster(tmp_path, 2) as (a, b):
        await a.checkpoints.publish("model", source)
        await b.checkpoints.fetch("model", tmp_path / "b", wait=20, progress=seen.append)
        assert same_files(source, tmp_path / "b" / "current")
        assert sum(steps) == 400 + 7 + 1
        assert max(steps) <= FILES_A_STEP
        steps.clear()
        flat = await b.checkpoints.fetch("model", tmp_path / "flat", flat=True)
        assert same_files(source, Path(flat.directory))


async def test_no_manifest_is_read_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a second for a hundred thousand files."""
    loop = threading.current_thread()
    threads: list[threading.Thread] = []
    for name in ("read_manifest", "_check", "sign_manifest"):
        real = getattr(manifest_module, name)

        def noted(*arguments: object, real: object = real) -> object:
            threads.append(threading.current_thread())
            return real(*arguments)  # type: ignore[operator]  # one of the three

        monkeypatch.setattr(manifest_module, name, noted)
    source = tmp_path / "from"
    make_files(source, {"weights": 200_000, "config.json": 100})
    write_safetensors(source / "m.safetensors", {"w": np.arange(10)})
    kept = config(tmp_path, "a", state_dir=str(tmp_path / "state"))
    async with open_peer(kept) as a:
        await a.checkpoints.publish("model", source, piece_bytes=PIECE)
    async with open_peer(kept) as a, open_peer(config(tmp_path, "b", a)) as b:
        await b.checkpoints.fetch("model", tmp_path / "b", include=["config.json"], wait=20)
        await b.checkpoints.fetch("model", tmp_path / "b")
        (await b.checkpoints.fetch_tensors("model", ["w"])).close()
        await a.checkpoints.publish("tensors", {"w": np.arange(10)})
        async with trio.open_nursery() as nursery:
            stages: list[str] = []
            nursery.start_soon(
                b.checkpoints.follow, "model", tmp_path / "b", lambda now: stages.append(now.stage)
            )
            await until(lambda: stages[-1:] == ["current"])
            nursery.cancel_scope.cancel()
    assert len(threads) >= 6
    assert loop not in threads


async def test_what_does_nothing_is_said(tmp_path: Path) -> None:
    source = tmp_path / "from"
    make_files(source, {"weights.bin": 100, "config.json": 100, "x.lock": 1})
    (source / "broken.safetensors").write_bytes(POINTER)
    async with cluster(tmp_path, 2) as (a, b):
        published = await a.checkpoints.publish(
            "org/model", source, include=["*.json", "*.safetensors", "*.pt", "weights.bin"]
        )
        assert published.files == 3
        assert [note.partition(":")[0] for note in published.notes] == [
            "left out, as it belongs to a download",
            "no file matches --include '*.pt'",
            "broken.safetensors is not what it is called, and is published as it is",
        ]
        got = await b.checkpoints.fetch(
            "org/model", tmp_path / "b", include=["*.json", "*.pt"], exclude=["opt/"], wait=20
        )
        assert got.unmatched == ("*.pt", "opt/")
        with pytest.raises(ValueError, match=r"has no file 'confg.json'; nearest: 'config.json'"):
            await b.checkpoints.fetch("org/model", tmp_path / "b", include=["*.bin", "confg.json"])
        with pytest.raises(errors.NoSuchKey, match=r"no tensor of checkpoint 'org/model' matches"):
            await b.checkpoints.fetch_tensors("org/model", ["w"])
        with pytest.raises(errors.CheckpointRefused, match="git-LFS pointer"):
            await b.checkpoints.fetch_tensors("org/model")
        with await b.checkpoints.fetch_tensors("org/model", files=["*.json"]) as some:
            assert some.files == ["config.json"]
            assert "git-LFS" in some.broken["broken.safetensors"]
        (source / "m.safetensors.index.json").write_text('{"weight_map": {"w": "m-1.safetensors"}}')
        with pytest.raises(errors.CheckpointRefused, match=r"names m-1.safetensors, and there is"):
            await a.checkpoints.publish("org/model", source)
        with pytest.raises(NotADirectoryError, match="publish its folder, with include"):
            await a.checkpoints.publish("org/model", source / "config.json")
        with pytest.raises(errors.NoSuchKey, match="this peer publishes no checkpoint 'org/model'"):
            await b.checkpoints.remove("org/model")
        with pytest.raises(errors.CheckpointRefused, match="belongs to p0"):
            await trio.to_thread.run_sync(publish_in_plain_code, b.socket, source)


def publish_in_plain_code(socket: str, source: Path) -> None:
    with p2pstore.blocking.connect(socket) as client:
        client.checkpoints.publish("org/model", source, include=["config.json"])
