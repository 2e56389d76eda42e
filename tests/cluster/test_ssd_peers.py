"""Peers with an SSD: what memory has no room for is read from there, by all, and outlives the process."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pstore import CapacityExceeded, NoSuchKey, blocking
from tests.cluster.processes import PeerProcess, ProcessCluster, new_cluster
from tests.commands import ran
from tests.waiting import eventually

COUNT = 60
END_SECONDS = 30.0


def value_of(number: int, length: int = 1_500_000) -> bytes:
    return random.Random(number).randbytes(length + number)


def ssd_options(peer: PeerProcess, capacity: str = "512MiB") -> list[str]:
    folder = peer.log.parent / f"{peer.name}.ssd"
    folder.mkdir(exist_ok=True)
    return ["--ssd", str(folder), "--ssd-capacity", capacity]


def start(cluster: ProcessCluster, number: int) -> PeerProcess:
    """With its SSD, and the first one as bootstrap peer."""
    peer = cluster.peers[number]
    bootstrap = ["--bootstrap", cluster.peers[0].control] if number else []
    cluster.start([peer], *ssd_options(peer), *bootstrap)
    return peer


def put_more_than_fits(peer: PeerProcess) -> None:
    """Three times the memory, no faster than the SSD takes it: writing begins when a quarter of the memory is left."""
    for number in range(COUNT):
        peer.client.put(f"key-{number}", value_of(number))
        eventually(lambda: unwritten_bytes(peer) < 26 << 20, END_SECONDS)


def unwritten_bytes(peer: PeerProcess) -> int:
    document = peer.client.statistics()["peer"]
    on_ssd = document["ssd"]["live_bytes"]
    put_bytes = document["counters"].get("client_put_bytes", 0)
    return int(put_bytes - on_ssd)


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with new_cluster(2, "32MiB", halves=False) as made:
        yield made


def test_what_memory_has_no_room_for_is_read_from_the_ssd_here_and_elsewhere(
    cluster: ProcessCluster,
) -> None:
    owner, other = start(cluster, 0), start(cluster, 1)
    cluster.wait_until_whole()
    put_more_than_fits(owner)
    tiers = {number: owner.client.locate(f"key-{number}")[0].tier for number in range(COUNT)}
    assert sum(tier == "ssd" for tier in tiers.values()) >= COUNT // 2, tiers
    cold = [number for number, tier in tiers.items() if tier == "ssd"]

    assert owner.client.contains_many([f"key-{number}" for number in range(COUNT)]) == [True] * COUNT
    with blocking.connect(str(owner.socket)) as fresh:  # looks the keys up in the peer's table
        assert fresh.contains(f"key-{cold[0]}")
        assert not fresh.contains("no-such-key")
    for number in range(COUNT):
        assert owner.client.get(f"key-{number}") == value_of(number), number
    eventually(lambda: other.client.contains(f"key-{cold[0]}"), END_SECONDS)
    for number in random.Random(1).sample(range(COUNT), COUNT):
        assert other.client.get(f"key-{number}") == value_of(number), number

    buffers = [(f"key-{number}", bytearray(1_500_000 + number)) for number in cold]
    for client in (owner.client, other.client):
        results = client.get_many_into(buffers)
        assert [result.error for result in results] == [None] * len(cold)
        assert all(
            bytes(buffer) == value_of(number) for number, (_, buffer) in zip(cold, buffers, strict=True)
        )
    listed = owner.client.list_keys("key-", limit=1000)
    assert {entry.key for entry in listed.keys} == {f"key-{number}" for number in range(COUNT)}
    with owner.client.lease(f"key-{cold[1]}") as view:
        assert view == value_of(cold[1])
    ssd = owner.client.statistics()["peer"]["ssd"]
    assert ssd["state"] == "ok"
    assert ssd["hits"] > 0
    assert ssd["damaged"] == 0


def test_it_outlives_the_process_killed_or_not(cluster: ProcessCluster) -> None:
    owner = start(cluster, 0)
    put_more_than_fits(owner)
    owner.client.put("durable", value_of(7, 3_000_000), durable=True)
    owner.client.put("tensor-like", value_of(8), durable=True, pin="soft")
    tiers = {number: owner.client.locate(f"key-{number}")[0].tier for number in range(COUNT)}
    cold = [number for number, tier in tiers.items() if tier == "ssd"]
    owner.client.remove(f"key-{cold[0]}")
    owner.kill()
    start(cluster, 0)
    eventually(lambda: owner.client.contains(f"key-{cold[1]}"), END_SECONDS)
    assert owner.client.get("durable") == value_of(7, 3_000_000)
    assert owner.client.get("tensor-like") == value_of(8)
    for number in cold[1:]:
        assert owner.client.get(f"key-{number}") == value_of(number), number
    with pytest.raises(NoSuchKey):
        owner.client.get(f"key-{cold[0]}")

    owner.client.put("young", value_of(9))
    held = {entry.key for entry in owner.client.list_keys(limit=1000).keys}
    owner.signal(15)  # and what is in memory is kept as well
    eventually(lambda: not owner.running, END_SECONDS)
    owner.kill()
    start(cluster, 0)
    eventually(lambda: owner.client.contains("young"), END_SECONDS)
    assert {entry.key for entry in owner.client.list_keys(limit=1000).keys} == held
    assert owner.client.get("young") == value_of(9)


def test_what_others_removed_meanwhile_does_not_come_back(cluster: ProcessCluster) -> None:
    owner, other = start(cluster, 0), start(cluster, 1)
    cluster.wait_until_whole()
    owner.client.put("removed", value_of(1), durable=True)
    owner.client.put("replaced", value_of(2), durable=True)
    owner.client.put("kept", value_of(3), durable=True)
    owner.client.put("flushed", value_of(4), durable=True)
    eventually(lambda: other.client.contains("replaced"), END_SECONDS)
    owner.kill()
    other.client.remove("removed")
    other.client.put("replaced", b"new", overwrite=True)
    start_again = [*ssd_options(owner), "--bootstrap", other.control]
    cluster.start([owner], *start_again)
    cluster.wait_until_whole()
    eventually(lambda: owner.client.contains("kept"), END_SECONDS)
    assert owner.client.get("kept") == value_of(3)
    assert not owner.client.contains("removed")
    with pytest.raises(NoSuchKey):
        owner.client.get("removed")
    assert owner.client.get("replaced") == b"new"
    assert other.client.get("replaced") == b"new"


def test_a_log_that_is_deleted_is_read_on_and_said(cluster: ProcessCluster) -> None:
    owner, other = start(cluster, 0), start(cluster, 1)
    cluster.wait_until_whole()
    put_more_than_fits(owner)
    tiers = {number: owner.client.locate(f"key-{number}")[0].tier for number in range(COUNT)}
    cold = next(number for number, tier in tiers.items() if tier == "ssd")
    capacity = other.client.statistics()["cluster"]["ssd_capacity_bytes"]
    (owner.log.parent / f"{owner.name}.ssd" / "cold.log").unlink()
    with pytest.raises(CapacityExceeded, match="was deleted"):
        owner.client.put("promised", value_of(1), durable=True)
    ssd = owner.client.statistics()["peer"]["ssd"]
    assert ssd["state"] == "read_only"
    assert owner.client.get("promised") == value_of(1)
    assert owner.client.get(f"key-{cold}") == value_of(cold)
    assert "start this peer again" in owner.log.read_text()
    eventually(
        lambda: other.client.statistics()["cluster"]["ssd_capacity_bytes"] == capacity // 2, END_SECONDS
    )


def test_durable_needs_an_ssd(cluster: ProcessCluster) -> None:
    cluster.start(cluster.peers[:1])
    with pytest.raises(ValueError, match="--ssd"):
        cluster.peers[0].client.put("k", b"v", durable=True)


def refused(folder: Path, *options: str) -> str:
    """The message of a peer with these options that does not start."""
    command = [sys.executable, "-m", "mooncake_p2p", "join", "--name", "refused"]
    command += ["--memory", "16MiB", "--state-dir", str(folder / "refused")]
    command += ["--socket", str(folder / "refused.sock"), *options]
    done = ran(command, END_SECONDS)
    assert done.returncode == 2, (done.returncode, done.stderr)
    return done.stderr


def test_a_second_peer_on_the_same_ssd_is_refused(cluster: ProcessCluster) -> None:
    owner = start(cluster, 0)
    said = refused(cluster.folder, *ssd_options(owner))
    assert "another" in said, said
    assert "Traceback" not in said


def test_an_ssd_of_another_cluster_is_refused(cluster: ProcessCluster) -> None:
    owner = start(cluster, 0)
    owner.client.put("k", value_of(1), durable=True)
    owner.kill()
    said = refused(cluster.folder, *ssd_options(owner), "--cluster", "another")
    assert "belongs to another cluster than 'another'" in said, said
    assert "cold.log" in said
    start(cluster, 0)
    eventually(lambda: owner.client.contains("k"), END_SECONDS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ssd", "/no/such/directory"), "/no/such/directory"),
        (("--ssd", "/dev/null"), "no directory and no block device"),
        (("--ssd-capacity", "1GiB"), "--ssd"),
        (("--ssd", ".", "--ssd-capacity", "1MiB"), "at least 256MiB"),
        (("--ssd", ".", "--ssd-capacity", "much"), "--ssd-capacity"),
        (("--ssd", ".", "--ssd-capacity", "900TiB"), "900"),
    ],
)
def test_wrong_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    output = refused(tmp_path, *options)
    assert said in output, output
    assert "Traceback" not in output


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own, in memory."""
    where = folder / "mounted"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(where)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def test_too_little_room_is_said_and_none_is_taken(tmp_path: Path) -> None:
    with mounted(tmp_path, "100m") as where:
        said = refused(tmp_path, "--ssd", str(where))
        assert "half of what is free" in said, said
        assert "256.0 MiB" in said, said
        assert "--ssd-capacity" in said, said
        assert list(where.iterdir()) == []


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path, "400m") as where:
        subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
        said = refused(tmp_path, "--ssd", str(where), "--ssd-capacity", "256MiB")
        assert "mount it for writing" in said, said


def test_an_empty_file_is_no_log_yet(cluster: ProcessCluster) -> None:
    owner = cluster.peers[0]
    folder = Path(ssd_options(owner)[1])
    (folder / "cold.log").touch()
    cluster.start([owner], "--ssd", str(folder), "--ssd-capacity", "256MiB")
    owner.client.put("k", value_of(1), durable=True)
    owner.kill()
    os.truncate(folder / "cold.log", 100 << 20)
    said = refused(cluster.folder, "--ssd", str(folder), "--cluster", cluster.folder.name)
    assert "cut short" in said, said
    cluster.start([owner], "--ssd", str(folder), "--ssd-capacity", "256MiB")
    owner.client.put("k2", value_of(2), durable=True)
    assert owner.client.get("k2") == value_of(2)
