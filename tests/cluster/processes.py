"""A cluster of real peer processes that can be killed, stopped, restarted and split. For tests and `bench_gossip`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from p2pstore import blocking
from p2pstore.access.keyring import new_cluster_key
from p2pstore.blocking import BlockingClient
from tests.cluster.hosts import Host, Network, why_not
from tests.forked import COMMAND, READY_SECONDS, ready_document, start, unconfigured
from tests.ports import free_port
from tests.waiting import eventually

END_SECONDS: Final = 15.0
FIRST_PORT: Final = 18_000
CLIENT_SECONDS: Final = 20.0
"""Timeout of the clients by which the tests look at peers."""


class Started(Protocol):
    """A child process; its standard output is a pipe."""

    stdout: IO[bytes] | None
    returncode: int | None
    """The status that `poll` or `wait` saw last; of a killed process, minus the signal."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], IO[bytes], Mapping[str, str]], Started]
"""Starts a command, with a file for its standard error, in an environment."""


def start_command(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> Started:
    """Start a process."""
    return start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment)


class PeerProcess:
    """One `mooncake-p2p join`: its address, identity and sockets are the same each time it is started."""

    def __init__(self, cluster: ProcessCluster, number: int, address: str, host: Host | None) -> None:
        inside = ("ip", "netns", "exec", "" if host is None else host.name)
        tied = (*inside, sys.executable, "-m", "mooncake_p2p.tied", str(os.getpid()))
        self._host = host
        self.name = f"p{number}"
        self.half = 0
        """Of the two halves that `split` makes."""
        self.control = f"{address}:{free_port(address) if host is None else FIRST_PORT + number}"
        self.ready: dict[str, Any] = {}
        self.log = cluster.folder / f"{self.name}.log"
        self.state = cluster.folder / f"{self.name}.state"
        self._cluster = cluster
        self.socket = cluster.folder / f"{self.name}.sock"
        self._command = [
            *(COMMAND if host is None else tied),
            *("join", "--name", self.name, "--cluster", cluster.folder.name),
            *("--cluster-key-file", str(cluster.key)),
            *("--listen", self.control, "--data-listen", f"{address}:0"),
            *("--memory", cluster.memory, "--socket", str(self.socket)),
            *("--state-dir", str(self.state)),
        ]
        self._process: Started | None = None
        self._client: BlockingClient | None = None

    # --- the process -------------------------------------------------------------------------

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str, by: Start = start_command) -> None:
        """Start it. `wait_until_ready` says when it serves."""
        with self.log.open("ab") as log:
            self._process = by([*self._command, *options], log, self._cluster.environment)

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until it serves; fails with its log when it does not."""
        assert self._process is not None
        self.ready = ready_document(self._process.stdout, self.log, seconds)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._hang_up()
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_SECONDS)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP; SIGCONT at the end of the block."""
        self._hang_up()
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Of a process that ended by itself."""
        return None if self._process is None else self._process.returncode

    # --- what it knows -----------------------------------------------------------------------

    @property
    def client(self) -> BlockingClient:
        """A client of this peer, connected anew after a restart."""
        if self._client is None:
            self._client = blocking.connect(str(self.socket), timeout=CLIENT_SECONDS)
        return self._client

    def get(self, key: str) -> bytes:
        """Read an object by a client on the peer's host: remote objects come by that host's network."""
        with contextlib.nullcontext() if self._host is None else self._host.inside():
            return self.client.get(key)

    def view(self) -> dict[str, str]:
        """The status of every member that it knows, the gone ones too, by name."""
        return {member.name: member.status for member in self.client.peers(everyone=True)}

    def log_size(self) -> int:
        """How much it has logged: where `logged` of what comes is to begin."""
        return self.log.stat().st_size

    def logged(self, text: str, since: int = 0) -> list[str]:
        """The lines of its log that contain `text`, from byte `since` on."""
        lines = self.log.read_bytes()[since:].decode(errors="replace").splitlines()
        return [line for line in lines if text in line]

    # --- what it costs -----------------------------------------------------------------------

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wake_ups(self) -> int:
        """How often its event loop was scheduled so far. Newer kernels count some sleeps as involuntary."""
        lines = Path(f"/proc/{self.process_id}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    def resident_bytes(self) -> int:
        """Resident memory without what is shared: the segment's pages are not in it."""
        status = Path(f"/proc/{self.process_id}/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class ProcessCluster:
    """Peers named p0, p1, ... that share a cluster key. `network`: in two halves that `split` parts, else
    all on loopback."""

    def __init__(self, folder: Path, count: int, network: Network | None, memory: str) -> None:
        self.folder = folder
        self.memory = memory
        self.key = folder / "key"
        self.key.touch(mode=0o600)
        self.key.write_text(new_cluster_key() + "\n")
        self._network = network
        self._cable = ""
        places = {name: str(folder) for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")}
        self.environment = unconfigured(**places)
        hosts = self._make_hosts()
        self.peers: list[PeerProcess] = []
        for number in range(count):
            half = number * len(hosts) // count
            self.peers.append(PeerProcess(self, number, *hosts[half]))
            self.peers[-1].half = half

    def _make_hosts(self) -> list[tuple[str, Host | None]]:
        """The hosts and their addresses."""
        if self._network is None:
            return [("127.0.0.1", None)]
        hosts: list[tuple[str, Host | None]] = []
        for number, name in enumerate(("left", "right"), start=1):
            host = self._network.host(name)
            self._cable = self._network.connect(host, "eth0", f"10.78.0.{number}/24")
            hosts.append((f"10.78.0.{number}", host))
        return hosts

    def start_first(self, *options: str) -> None:
        """Start all, each with the first one as its bootstrap peer, and wait until all see all."""
        self.start(self.peers[:1], *options)
        self.start(self.peers[1:], "--bootstrap", self.peers[0].control, *options)
        self.wait_until_whole()

    def start(self, peers: Sequence[PeerProcess], *options: str) -> None:
        """Start these side by side and wait until they serve."""
        for peer in peers:
            peer.start(*options)
        for peer in peers:
            peer.wait_until_ready()

    def is_whole(self) -> bool:
        """Whether every peer sees all of them alive."""
        return sees(self.peers, {peer.name: "alive" for peer in self.peers})

    def wait_until_whole(self, seconds: float = 60.0) -> None:
        """Wait until every peer sees all of them alive."""
        eventually(self.is_whole, seconds, lambda: {peer.name: peer.view() for peer in self.peers})

    @property
    def can_split(self) -> bool:
        """Whether the peers are in two halves."""
        return self._network is not None

    def half(self, number: int) -> list[PeerProcess]:
        """The peers on one side of `split`: 0 or 1."""
        return [peer for peer in self.peers if peer.half == number]

    @contextlib.contextmanager
    def split(self) -> Iterator[None]:
        """No packet passes between the halves in this block; no peer is told."""
        assert self._network is not None
        self._network.unplug(self._cable)
        try:
            yield
        finally:
            self._network.plug_in(self._cable)

    def close(self) -> None:
        """Kill all peers."""
        for peer in self.peers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.kill()


def sees(observers: Sequence[PeerProcess], statuses: dict[str, str]) -> bool:
    """Whether every observer sees these members, by name, in these states."""
    return all(statuses.items() <= observer.view().items() for observer in observers)


@contextlib.contextmanager
def new_cluster(count: int, memory: str = "16MiB", *, halves: bool = True) -> Iterator[ProcessCluster]:
    """`count` peers, not started yet: with `halves` in two of them, where network namespaces can be made, else
    on loopback. Afterwards nothing of them is left."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="p2p-"))
        stack.callback(shutil.rmtree, folder)
        network = None
        if halves and why_not() is None:
            network = Network(folder)
            stack.callback(network.close)
        cluster = ProcessCluster(folder, count, network, memory)
        stack.callback(cluster.close)
        yield cluster
