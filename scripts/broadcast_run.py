"""Real peers on shaped hosts, and one broadcast among them: what `bench_broadcast` measures."""

from __future__ import annotations

import filecmp
import itertools
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmark import cpu_seconds
from shaped_hosts import Host

from p2pstore import blocking
from p2pstore.errors import P2PStoreError
from p2pstore.local.peer_processes import PeerProcess, environment_without_settings
from p2pstore.results import CheckpointProgress
from p2pstore.runtime.streams import tune_tcp

READY_SECONDS: Final = 120.0
END_SECONDS: Final = 10.0
FETCH_SECONDS: Final = 600.0
SAMPLE_SECONDS: Final = 0.25
PROBE_SECONDS: Final = 60.0
PORT: Final = 17946


class Failed(Exception):
    """A peer or a fetch did not do what it should; says what."""


class Peer(PeerProcess):
    """A peer on a host."""

    def __init__(self, host: Host, name: str, folder: Path, memory: str) -> None:
        super().__init__(folder, name)
        self.host = host
        self._options = [
            "--name",
            name,
            "--insecure",
            "--memory",
            memory,
            "--cluster",
            "bench-broadcast",
        ]
        self._options += ["--listen", f"{host.address}:0", "--data-listen", f"{host.address}:0"]

    def begin(self, bootstrap: str | None) -> None:
        """Start it. `wait_until_ready` says when it serves."""
        options = [*self._options, *(["--bootstrap", bootstrap] if bootstrap else [])]
        environment = environment_without_settings()
        self.start(options, around=self.host.command(), environment=environment)

    def cpu_seconds(self) -> float:
        """CPU time that it used so far; 0 when it is gone."""
        return 0.0 if self.has_ended else cpu_seconds(self.process_id)

    def members(self) -> int:
        with blocking.connect(str(self.socket), timeout=READY_SECONDS) as client:
            return sum(each.status == "alive" for each in client.peers())


@contextmanager
def cluster_on(hosts: Sequence[Host], folder: Path, memory: str = "16MiB") -> Iterator[list[Peer]]:
    """A peer on each of these hosts (a host may be named more than once), all of one cluster, for the time of the
    block. Raises `Failed` and `P2PStoreError`."""
    peers = [Peer(host, f"peer{number}", folder, memory) for number, host in enumerate(hosts)]
    try:
        peers[0].begin(None)
        peers[0].wait_until_ready(READY_SECONDS)
        for peer in peers[1:]:
            peer.begin(peers[0].ready["control"])
        for peer in peers[1:]:
            peer.wait_until_ready(READY_SECONDS)
        deadline = time.monotonic() + READY_SECONDS
        while min(peer.members() for peer in peers) < len(peers):
            if time.monotonic() > deadline:
                raise Failed("the peers do not find each other")
            time.sleep(0.5)
        yield peers
    finally:
        for peer in peers:
            peer.end()
        deadline = time.monotonic() + END_SECONDS
        for peer in peers:
            peer.reap(deadline)


def goodput(sender: Host, receiver: Host, total_bytes: int) -> float:
    """Bytes a second that a plain socket brings from one host to another."""
    with receiver.inside():
        listener = socket.create_server((receiver.address, PORT))
    with listener:
        with sender.inside():
            out = socket.create_connection((receiver.address, PORT), PROBE_SECONDS)
        tune_tcp(out)
        out.settimeout(PROBE_SECONDS)
        inwards, _ = listener.accept()
    inwards.settimeout(PROBE_SECONDS)
    with out, inwards:
        sending = threading.Thread(target=_send, args=(out, total_bytes), daemon=True)
        began = time.monotonic()
        sending.start()
        buffer = bytearray(1 << 18)
        received = 0
        while received < total_bytes:
            count = inwards.recv_into(buffer)
            if not count:
                raise Failed("the plain socket ended early")
            received += count
        seconds = time.monotonic() - began
        sending.join(PROBE_SECONDS)
    return total_bytes / seconds


def _send(out: socket.socket, total_bytes: int) -> None:
    block = memoryview(bytes(1 << 18))
    sent = 0
    while sent < total_bytes:
        sent += out.send(block[: total_bytes - sent])


@dataclass
class Fetch:
    """One peer's fetch: when it began, how far it came when, and how it ended; seconds since the broadcast began."""

    peer: Peer
    directory: Path
    began: float = 0.0
    ended: float | None = None
    error: Exception | None = None
    progress: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took. Raises `Failed` when it did not end well."""
        if self.ended is None or self.error is not None:
            raise Failed(f"{self.peer.name} did not get the checkpoint: {self.error}")
        return self.ended - self.began


@dataclass(frozen=True)
class Sample:
    """What all links had carried at one moment: bytes sent by each host."""

    seconds: float
    sent: tuple[int, ...]


@dataclass
class Outcome:
    """What came of a broadcast."""

    fetches: list[Fetch]
    samples: list[Sample]
    cpu_seconds: float
    """Of all peers together."""
    source_sent: int
    """Bytes over the source's link."""
    received: dict[int, int]
    """Bytes over each host's link, by its number."""


Disturbance = tuple[float, Callable[["Broadcast"], None]]
"""After so many seconds, do this."""


class Broadcast:
    """One checkpoint, from one peer to others."""

    def __init__(self, peers: Sequence[Peer], folder: Path, name: str) -> None:
        """`peers[0]` publishes. Directories are made in `folder`."""
        self.source = peers[0]
        self.name = name
        self.published = folder / f"{name}.published"
        self._peers = list(peers)
        self._folder = folder
        self._began = 0.0
        self._threads: list[threading.Thread] = []
        self._start = threading.Event()
        self.fetches: list[Fetch] = []

    def make_files(self, total_bytes: int) -> None:
        self.published.mkdir()
        for number in range(4):
            length = total_bytes * (number + 1) // 4 - total_bytes * number // 4
            (self.published / f"model-{number}.safetensors").write_bytes(os.urandom(length))

    def publish(self, piece_bytes: int) -> int:
        with blocking.connect(str(self.source.socket), timeout=FETCH_SECONDS) as client:
            done = client.checkpoints.publish(self.name, self.published, piece_bytes=piece_bytes)
        return done.pieces

    def begin(self, peer: Peer) -> Fetch:
        """Have a peer fetch it, from when `run` begins, or now."""
        directory = self._folder / f"{self.name}.{peer.name}"
        fetch = Fetch(peer, directory)
        self.fetches.append(fetch)
        thread = threading.Thread(target=self._fetch, args=(fetch,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return fetch

    def _fetch(self, fetch: Fetch) -> None:
        def watch(report: CheckpointProgress) -> None:
            if report.phase == "fetching":
                fetch.progress.append((self._now(), report.done_bytes))

        try:
            with blocking.connect(str(fetch.peer.socket), timeout=FETCH_SECONDS) as client:
                self._start.wait()
                fetch.began = self._now()
                client.checkpoints.fetch(self.name, fetch.directory, wait=60.0, progress=watch)
                fetch.ended = self._now()
        except (P2PStoreError, OSError) as error:
            fetch.error = error

    def _now(self) -> float:
        return time.monotonic() - self._began

    def run(self, receivers: Sequence[Peer], disturbances: Sequence[Disturbance] = ()) -> Outcome:
        """All receivers fetch, from the same moment on; returns when all have ended. Raises `Failed` when they do
        not."""
        for peer in receivers:
            self.begin(peer)
        hosts = {peer.host.number: peer.host for peer in self._peers}
        before = {number: host.counters() for number, host in hosts.items()}
        cpu_before = {peer.name: peer.cpu_seconds() for peer in self._peers}
        cpu_after = dict(cpu_before)
        samples = []
        waiting = sorted(disturbances, key=lambda each: each[0])
        self._began = time.monotonic()
        self._start.set()
        while True:
            samples.append(Sample(self._now(), tuple(h.counters()[1] for h in hosts.values())))
            for peer in self._peers:
                with suppress(OSError):
                    cpu_after[peer.name] = max(cpu_after[peer.name], peer.cpu_seconds())
            if waiting and self._now() >= waiting[0][0]:
                waiting.pop(0)[1](self)
            if not waiting and not any(thread.is_alive() for thread in self._threads):
                break
            if self._now() > FETCH_SECONDS:
                raise Failed(f"not everybody has {self.name} after {FETCH_SECONDS:g} s")
            time.sleep(SAMPLE_SECONDS)
        after = {number: host.counters() for number, host in hosts.items()}
        return Outcome(
            self.fetches,
            samples,
            sum(cpu_after[name] - cpu_before[name] for name in cpu_before),
            after[self.source.host.number][1] - before[self.source.host.number][1],
            {number: after[number][0] - before[number][0] for number in hosts},
        )

    def check(self, fetch: Fetch) -> None:
        """Raises `Failed` when what came is not what was published."""
        names = [path.name for path in self.published.iterdir()]
        there = fetch.directory / "current"
        _, different, missing = filecmp.cmpfiles(self.published, there, names, shallow=False)
        if different or missing:
            raise Failed(f"{fetch.peer.name} has other bytes than were published: {different}")


# --- what comes of it: pure ----------------------------------------------------------------------


def shortest_seconds(total_bytes: int, bytes_per_second: float, receivers: int, pieces: int) -> float:
    """No way to bring `total_bytes` from one to so many receivers takes less, when all links carry `bytes_per_second`
    in each direction: all pieces leave the source, and the last one still has to reach everybody, by doubling."""
    if receivers < 1 or pieces < 1 or bytes_per_second <= 0:
        raise ValueError("there must be a receiver, a piece and a rate")
    rounds = receivers.bit_length() - 1
    return total_bytes / bytes_per_second * (1 + rounds / pieces)


def copies(link_bytes: int, total_bytes: int) -> float:
    """How many times the checkpoint went over a link that counted `link_bytes`. (Headers are in that, those of what the
    kernel handed over at once only once: half a percent.)"""
    return link_bytes / total_bytes


def busy_shares(samples: Sequence[Sample], bytes_per_second: float) -> list[tuple[float, float]]:
    """How much of all uplinks together was used, of 1: (seconds, share) between each two samples."""
    shares = []
    for before, after in itertools.pairwise(samples):
        seconds = after.seconds - before.seconds
        sent = sum(after.sent) - sum(before.sent)
        capacity = bytes_per_second * seconds * len(after.sent)
        shares.append(((before.seconds + after.seconds) / 2, sent / capacity))
    return shares


def middle_share(shares: Sequence[tuple[float, float]]) -> float:
    """The median of what is in the middle third of the time, when everybody has something to send."""
    if not shares:
        return 0.0
    begin, end = shares[0][0], shares[-1][0]
    third = (end - begin) / 3
    middle = [share for at, share in shares if begin + third <= at <= end - third]
    return statistics.median(middle or [share for _, share in shares])
