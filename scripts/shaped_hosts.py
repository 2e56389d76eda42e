"""Hosts made of network namespaces, each with one link of limited rate to a common bridge. Needs root, `ip` and `tc`.

No namespace has a name: each belongs to a process that ends when its standard input does. So nothing is left behind,
even when the program that made them is killed, and nothing of others is ever in the way. Peers of two hosts take each
other for peers of two machines: each host has a boot id of its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
TOOLS: Final = ("ip", "tc", "nsenter", "unshare", "mount")
INTERFACE: Final = "eth0"
MAX_HOSTS: Final = 4000
COMMAND_SECONDS: Final = 30.0
_CLONE_NEWNET: Final = 0x40000000
_CLONE_NEWNS: Final = 0x20000
_HOLD: Final = f"""set -e
ip link set lo up
if [ -n "$0" ]; then mount --bind "$0" {BOOT_ID}; fi
echo made
exec cat
"""

NO_FILTERS: Final = """for each in iptables ip6tables arptables; do
if [ -e /proc/sys/net/bridge/bridge-nf-call-$each ]; then echo 0 > /proc/sys/net/bridge/bridge-nf-call-$each; fi
done"""
"""A switch does not send its frames through a machine's packet filters."""
LARGE_SEGMENTS: Final = "echo 22 > /proc/sys/net/ipv4/tcp_min_tso_segs"
"""What is handed to a link at once, in packets: by itself TCP hands a slow link a few, which costs this machine's
cores more than those of as many machines."""


class NoNamespaces(Exception):
    """Network namespaces with shaped links cannot be made here; says why."""


def address_of(number: int) -> str:
    if not 1 <= number <= MAX_HOSTS:
        raise ValueError(f"hosts are numbered from 1 to {MAX_HOSTS}, not {number}")
    return f"10.77.{number // 250}.{number % 250 + 1}"


def shape(interface: str, bits_per_second: int, queue_bytes: int) -> list[str]:
    """Commands that limit what leaves by an interface; what comes too fast waits, up to `queue_bytes`."""
    rate = f"rate {bits_per_second}bit ceil {bits_per_second}bit quantum 60000"
    return [
        f"tc qdisc add dev {interface} root handle 1: htb default 1",
        f"tc class add dev {interface} parent 1: classid 1:1 htb {rate}",
        f"tc qdisc add dev {interface} parent 1:1 bfifo limit {queue_bytes}",
    ]


def counters(text: str, interface: str) -> tuple[int, int]:
    """Bytes (received, sent) by an interface, out of /proc/PID/net/dev."""
    for line in text.splitlines():
        name, colon, values = line.partition(":")
        if colon and name.strip() == interface:
            numbers = values.split()
            return int(numbers[0]), int(numbers[8])
    raise ValueError(f"there is no interface {interface}")


class Namespace:
    """A network namespace, and a mount namespace, that live as long as a process of theirs."""

    def __init__(self, boot_id_file: str = "") -> None:
        """`boot_id_file` is what programs in it read as the boot id. Raises `NoNamespaces`."""
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", _HOLD, boot_id_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for who made it
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"made\n":
            why = self._holder.stderr.read().decode(errors="replace").strip()
            self.close()
            raise NoNamespaces(f"network namespaces cannot be made here: {why}")

    @property
    def process_id(self) -> int:
        return self._holder.pid

    def command(self, *arguments: str) -> list[str]:
        return ["nsenter", "--target", str(self.process_id), "--net", "--mount", *arguments]

    def run(self, lines: Sequence[str]) -> None:
        """Run these commands of a shell. Raises `NoNamespaces` when one fails."""
        script = "set -e\n" + "\n".join(lines)
        done = subprocess.run(
            self.command("sh", "-c", script),
            capture_output=True,
            timeout=COMMAND_SECONDS,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoNamespaces(f"links cannot be shaped here: {done.stderr.strip()}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens in the block are in here."""
        with (
            Path("/proc/thread-self/ns/net").open() as outside,
            Path(f"/proc/{self.process_id}/ns/net").open() as here,
        ):
            _enter(here)
            try:
                yield
            finally:
                _enter(outside)

    def close(self) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._holder.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


def _enter(namespace: IO[str]) -> None:
    """`os.setns` is younger than the oldest Python here."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Host(Namespace):
    """A machine of its own, with one link."""

    def __init__(self, number: int, folder: Path) -> None:
        boot_id = folder / f"boot_id_{number}"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        super().__init__(str(boot_id))
        self.number = number
        self.address = address_of(number)

    def send_at(self, bits_per_second: int) -> None:
        """Change the rate of what it sends. Raises `NoNamespaces`."""
        rate = f"rate {bits_per_second}bit ceil {bits_per_second}bit quantum 60000"
        self.run([f"tc class change dev {INTERFACE} parent 1: classid 1:1 htb {rate}"])

    def counters(self) -> tuple[int, int]:
        """Bytes (received, sent) over its link, headers of Ethernet, IP and TCP among them."""
        text = Path(f"/proc/{self.process_id}/net/dev").read_text()
        return counters(text, INTERFACE)


class Network:
    """A bridge, and hosts on it."""

    def __init__(self, folder: Path, bits_per_second: int, queue_bytes: int) -> None:
        """`bits_per_second` of each link, in each direction; before each, `queue_bytes` wait at most. Raises
        `NoNamespaces`."""
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if os.getuid() != 0 or missing:
            raise NoNamespaces(
                f"this needs root, and {', '.join(TOOLS)}"
                + (f"; missing: {', '.join(missing)}" if missing else "")
            )
        self.hosts: list[Host] = []
        self._folder = folder
        self._shape = (bits_per_second, queue_bytes)
        self._bridge = Namespace()
        try:
            self._bridge.run([NO_FILTERS, "ip link add bridge type bridge", "ip link set bridge up"])
        except BaseException:
            self.close()
            raise

    def add_host(self) -> Host:
        """One more host, on a link of its own. Raises `NoNamespaces`."""
        host = Host(len(self.hosts) + 1, self._folder)
        self.hosts.append(host)
        end = f"link{host.number}"
        veth = f"ip link add {INTERFACE} type veth peer name {end} netns {self._bridge.process_id}"
        host.run(
            [
                LARGE_SEGMENTS,
                veth,
                f"ip address add {host.address}/16 dev {INTERFACE}",
                f"ip link set {INTERFACE} up",
                *shape(INTERFACE, *self._shape),
            ]
        )
        self._bridge.run([f"ip link set {end} master bridge up", *shape(end, *self._shape)])
        return host

    def reshape(self, bits_per_second: int) -> None:
        rate = f"rate {bits_per_second}bit ceil {bits_per_second}bit quantum 60000"
        for host in self.hosts:
            for where, interface in ((host, INTERFACE), (self._bridge, f"link{host.number}")):
                where.run([f"tc class change dev {interface} parent 1: classid 1:1 htb {rate}"])

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self._bridge.close()


@contextmanager
def network_of(count: int, folder: Path, bits_per_second: int, queue_bytes: int) -> Iterator[Network]:
    """A network with so many hosts, for the time of the block. Raises `NoNamespaces`."""
    network = Network(folder, bits_per_second, queue_bytes)
    try:
        for _ in range(count):
            network.add_host()
        yield network
    finally:
        network.close()


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A directory in memory that nobody but this process, and those that it starts, can see. Raises `NoNamespaces`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise NoNamespaces(f"mounts of its own: {os.strerror(ctypes.get_errno())}")
    folder = tempfile.mkdtemp(prefix="shaped-")
    try:
        _mount("--make-rprivate", "/")
        _mount("-t", "tmpfs", "tmpfs", folder)
        yield Path(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)
        os.rmdir(folder)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"mounts of its own: {done.stderr.strip()}")
