"""The stage of a soak: volumes, hosts, peers, client processes. All of it ends with this process, however that ends."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from p2pstore.access.keyring import new_cluster_key
from tests.soak.actor import Settings
from tests.soak.network import ROOT, Network, NoNamespaces
from tests.soak.peers import HOSTS, ROLES, Peer

PREFIX: Final = "p2pstore-soak-"
COMMAND_SECONDS: Final = 120.0
LONGEST_LOOK_SECONDS: Final = 10.0
_CLONE_NEWNS: Final = 0x20000


@contextmanager
def private_folder() -> Iterator[Path]:
    """A directory in memory, and a /dev/shm, visible to this process alone; both vanish with it. Empty directories of
    earlier runs that were killed are removed. Raises `NoNamespaces`."""
    remove_left_overs()
    if os.getuid() != 0:
        raise NoNamespaces("this needs root: it makes network namespaces and mounts")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise NoNamespaces(f"mounts of its own: {os.strerror(ctypes.get_errno())}")
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # says that it is in use
        _mount("--make-rprivate", "/")
        _mount("-t", "tmpfs", "tmpfs", str(folder))
        _mount("-t", "tmpfs", "tmpfs", "/dev/shm")
        yield folder
    finally:
        for place in ("/dev/shm", str(folder)):
            subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
        os.close(descriptor)
        os.rmdir(folder)


def remove_left_overs() -> None:
    """Remove the empty directories of runs that are over; a directory in use, or with contents, stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rmdir()  # of one that is not empty nothing is removed
            finally:
                os.close(descriptor)


def _mount(*arguments: str) -> None:
    done = subprocess.run(
        ["mount", *arguments], capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
    )
    if done.returncode:
        raise NoNamespaces(f"mounts of its own: {done.stderr.strip()}")


class ClientProcess:
    """One life of the client of a peer, on that peer's host."""

    def __init__(self, settings: Settings, peer: Peer, log: Path) -> None:
        self.settings = settings
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                peer.host.command(
                    *(sys.executable, "-m", "tests.soak.actor", str(os.getpid())), settings.to_json()
                ),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                process_group=0,
            )

    def signal(self, number: int) -> None:
        """Send a signal, if it is there."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()


class Stage:
    """Peers on hosts with disks of their own, not started yet."""

    def __init__(self, folder: Path, logs: Path) -> None:
        """Raises `NoNamespaces`."""
        self.logs = logs
        self.kept = folder / "kept"
        self.kept.mkdir()
        self.published = folder / "published"
        self.key = folder / "key"
        self.key.touch(mode=0o600)
        self.key.write_text(new_cluster_key() + "\n")
        self.peers: list[Peer] = []
        self._stack = ExitStack()
        for number, role in enumerate(ROLES):
            volume = folder / f"peer{number}.volume"
            volume.mkdir()
            _mount("-t", "tmpfs", "-o", f"size={role.volume_bytes}", "tmpfs", str(volume))
            (volume / "ssd").mkdir()
            (folder / f"peer{number}.place").mkdir(mode=0o700)
        self.network = Network(folder, HOSTS)  # its hosts see the mounts above
        self._stack.callback(self.network.close)
        for number, role in enumerate(ROLES):
            log = logs / f"peer{number}.log"
            peer = Peer(number, self.network.hosts[role.host], folder, log, self.key)
            self._stack.callback(peer.kill)
            self.peers.append(peer)

    def bootstrap_of(self, peer: Peer) -> list[str]:
        """Two others: those that are never ended, if it is none of them."""
        steady = [each for each in self.peers if each.role.steady and each is not peer]
        others = [each for each in self.peers if each is not peer and each not in steady]
        return [each.control for each in (*steady, *others)[:2]]

    def start_client(self, peer: Peer, seed: int, epoch: int, rate: float) -> ClientProcess:
        """A life of the client of that peer."""
        name = f"client{peer.number}"
        role = peer.role
        settings = Settings(
            seed=seed,
            number=peer.number,
            epoch=epoch,
            writers=len(self.peers),
            rate=rate,
            socket=str(peer.socket),
            events=str(self.logs / f"{name}.{epoch}.events"),
            kept=str(self.kept),
            ssd=role.ssd,
            follows=str(peer.follows) if role.follows else "",
            publishes=str(self.published) if role.publishes else "",
        )
        process = ClientProcess(settings, peer, self.logs / f"{name}.log")
        self._stack.callback(process.kill)
        return process

    def turn_key(self, step: str) -> None:
        """One of the three steps by which the cluster's key is replaced: `add`, `promote`, `retire`."""
        command = [sys.executable, "-m", "mooncake_p2p", "keygen", f"--{step}", str(self.key)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_SECONDS)
        for peer in self.peers:
            if peer.running:
                peer.signal(signal.SIGHUP)

    def close(self) -> None:
        """Kill all that runs, and take the hosts down."""
        self._stack.close()


def wait_for(condition: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Whether it became so in that time. When one look takes longer than `LONGEST_LOOK_SECONDS`, the machine stood
    still, and the rest does not count."""
    left, last = seconds, time.monotonic()
    while not condition():
        now = time.monotonic()
        left -= min(now - last, LONGEST_LOOK_SECONDS)
        last = now
        if left < 0:
            return False
        time.sleep(pause)
    return True
