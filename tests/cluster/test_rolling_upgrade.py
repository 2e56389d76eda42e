"""Peers replaced one after the other, while clients of the others read and write; and a peer of an older version, which
cannot be spoken to any more."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from tests.cluster.older_version import sources_of
from tests.cluster.processes import PeerProcess, Started, new_cluster, start_command
from tests.waiting import eventually

pytestmark = pytest.mark.slow

OLD_VERSION = "c6c2e8528784d72a4db829290ffe01f98bdc8509"
"""A commit: the last before memory could be kept. A release takes its place when there is one."""
ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 90.0
READERS = 2
KEYS = 24
VALUE_BYTES = 200_000
MAX_WRITES = 60
"""All values, twice, fit into the memory of two peers: an evicted one would be missed."""
PACE_SECONDS = 0.01


@pytest.fixture(scope="module")
def old_package(module_path: Path) -> Path:
    return sources_of(OLD_VERSION, module_path)


def value_of(key: str) -> bytes:
    return random.Random(key).randbytes(VALUE_BYTES)


class Load:
    """Clients of all peers that are not being replaced, which read what has two copies, and write more of it."""

    def __init__(self, peers: Sequence[PeerProcess]) -> None:
        self.steady = set(peers)
        self.keys: list[str] = []
        self.reads = self.writes = 0
        self.problems: list[str] = []
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(READERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        clients: dict[tuple[PeerProcess, int], BlockingClient] = {}
        while not self._ended.wait(PACE_SECONDS):
            with self._lock:
                peer = rng.choice(sorted(self.steady, key=lambda each: each.name))
                life = peer.process_id
            key = rng.choice(self.keys)
            try:
                client = clients.get((peer, life))
                if client is None:
                    client = blocking.connect(str(peer.socket), timeout=WAIT_SECONDS)
                    clients[peer, life] = client
                if rng.random() < 0.1 and self.writes < MAX_WRITES:
                    self._write(client, f"{number}/{self.writes}")
                elif rng.random() < 0.1:
                    self._read_together(client, [*self.keys])
                elif client.get(key) != value_of(key):
                    self.problems.append(f"{peer.name}: other bytes under {key}")
                self.reads += 1
            except Exception as error:
                with self._lock:
                    if peer in self.steady and peer.process_id == life:
                        self.problems.append(f"{peer.name}: {key}: {error!r}")
        for client in clients.values():
            client.close()

    def _read_together(self, client: BlockingClient, keys: list[str]) -> None:
        items = [(key, bytearray(VALUE_BYTES)) for key in keys]
        for result, (key, buffer) in zip(client.get_many_into(items), items, strict=True):
            if result.unwrap() != VALUE_BYTES or buffer != value_of(key):
                self.problems.append(f"other bytes under {key}, read with others")

    def _write(self, client: BlockingClient, key: str) -> None:
        result = client.put(key, value_of(key), replicas=2)
        if result.copies >= 2:
            self.keys.append(key)
            self.writes += 1

    def replacing(self, peer: PeerProcess) -> None:
        with self._lock:
            self.steady.discard(peer)

    def replaced(self, peer: PeerProcess) -> None:
        with self._lock:
            self.steady.add(peer)


def paths_of(package: Path) -> dict[str, str]:
    """The environment in which programs are of the older version."""
    return {"PYTHONPATH": f"{package}:{package / 'cli'}", "PYTHONSAFEPATH": "1"}


def test_a_peer_of_another_control_protocol_is_refused_in_words(old_package: Path) -> None:
    def start_old(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> Started:
        return start_command(command, log, {**environment, **paths_of(old_package)})

    with new_cluster(2, memory="64MiB", halves=False) as cluster:
        old, new = cluster.peers
        old.start(by=start_old)
        old.wait_until_ready()
        new.start("--bootstrap", old.control)
        eventually(lambda: not new.running, WAIT_SECONDS)
        assert new.exit_status == 1
        assert "versions" in new.log.read_text()
        assert "upgrade the older" in new.log.read_text()


def test_a_replacement_one_after_the_other_fails_no_read(old_package: Path, tmp_path: Path) -> None:
    old_paths = paths_of(old_package)

    def old_command(peer: PeerProcess, *words: str, given: bytes = b"") -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "mooncake_p2p", words[0], "--socket", str(peer.socket), *words[1:]],
            env={**cluster.environment, **old_paths},
            input=given,
            capture_output=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    with new_cluster(3, memory="64MiB", halves=False) as cluster:
        first, *others = cluster.peers
        first.start()
        first.wait_until_ready()
        for peer in others:
            peer.start("--bootstrap", first.control)
        for peer in others:
            peer.wait_until_ready()
        cluster.wait_until_whole()

        load = Load(cluster.peers)
        for number in range(KEYS):
            peer = cluster.peers[number % 3]
            result = peer.client.put(f"k{number}", value_of(f"k{number}"), replicas=2)
            assert (result.copies, result.wanted) == (2, 2)
            load.keys.append(f"k{number}")
        with load:
            for number, peer in enumerate(cluster.peers):
                load.replacing(peer)
                peer.signal(signal.SIGTERM)
                eventually(lambda peer=peer: not peer.running, WAIT_SECONDS)  # type: ignore[misc]  # bound now
                assert peer.exit_status == 0, peer.log.read_text()[-2000:]
                peer.kill()
                memory = tmp_path / f"memory-{number}"
                peer.start(
                    *("--memory-path", str(memory), "--keep-memory"),
                    *("--bootstrap", cluster.peers[number - 1].control),
                )
                peer.wait_until_ready()
                cluster.wait_until_whole()
                assert "objects_returning" in peer.client.statistics()["peer"]
                load.replaced(peer)
                before = load.reads
                eventually(lambda before=before: load.reads > before + 20, WAIT_SECONDS)  # type: ignore[misc]  # bound now
                if number == 0:  # engines of the older version go on
                    old_command(peer, "put", "by an old client", "-", given=b"value")
                    for each in cluster.peers:
                        assert old_command(each, "get", "by an old client") == b"value"
        assert load.problems == [], (len(load.problems), load.reads, load.problems[:20])
        assert load.writes > 3
        for peer in cluster.peers:
            for key in load.keys:
                assert peer.client.get(key) == value_of(key)
