"""Hosts made of network namespaces: real interfaces, routes and names on one machine. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from tests.commands import ran
from tests.forked import COMMAND, unconfigured

COMMAND_SECONDS = 60.0
NAMES = Path("/etc/netns")
"""`ip netns exec` puts what is in here over /etc."""
_CLONE_NEWNET: Final = 0x40000000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


def why_not() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    name = f"p2p-try-{secrets.token_hex(4)}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            ip("netns", "delete", name)
    return None


class Host:
    """A machine of its own: a namespace, and directories for state and sockets."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = f"{network.name}-{name}"
        self.folder = network.folder / name
        self.folder.mkdir(mode=0o700)
        self.state = self.folder / "mooncake-p2p" / name
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        self.environment = unconfigured(
            XDG_RUNTIME_DIR=str(self.folder),
            XDG_STATE_HOME=str(self.folder),
            MOONCAKE_P2P_MEMORY="16MiB",
            MOONCAKE_P2P_NAME=name,
        )

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens in the block are on this host."""
        with Path("/proc/thread-self/ns/net").open() as outside:
            with Path("/run/netns", self.name).open() as here:
                _enter(here)
            try:
                yield
            finally:
                _enter(outside)

    def run(self, *arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
        """A command on this host."""
        return ran(
            ["ip", "netns", "exec", self.name, *COMMAND, *arguments],
            COMMAND_SECONDS,
            env=self.environment,
            input=input,
        )

    def done(self, *arguments: str, input: str = "") -> str:
        """The output of a command that succeeds."""
        result = self.run(*arguments, input=input)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def failed(self, *arguments: str) -> str:
        """The complaint of a command about what it was told."""
        result = self.run(*arguments)
        assert result.returncode == 2, (result.stdout, result.stderr)
        return result.stderr

    def join(self, *options: str, input: str = "") -> dict[str, Any]:
        """The `ready` document of a peer in the background."""
        line = self.done("join", "--detach", "--log-level", "debug", *options, input=input)
        document: dict[str, Any] = json.loads(line.removeprefix("ready "))
        return document

    def peers(self) -> int:
        """How many live members the peer here sees."""
        members = json.loads(self.done("peers", "--json"))
        return sum(member["status"] == "alive" for member in members)

    def end(self) -> None:
        """End the peer here, if there is one, and wait until it is gone."""
        for lock in self.folder.glob("mooncake-p2p/*/lock"):
            text = lock.read_text().strip()
            if text and "mooncake_p2p\0join" in _command_line(text):
                subprocess.run(["kill", "-KILL", text], check=False, timeout=60)

    def close(self) -> None:
        self.end()
        with contextlib.suppress(subprocess.SubprocessError):
            ip("netns", "delete", self.name)
        shutil.rmtree(NAMES / self.name, ignore_errors=True)


def _enter(namespace: IO[str]) -> None:
    """`os.setns` is younger than the oldest Python here."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _command_line(process_id: str) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text()
    except OSError:
        return ""


class Network:
    """A bridge in a namespace of its own, and the hosts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"p2p{secrets.token_hex(3)}"
        self.hosts: list[Host] = []
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.name, "link", "set", "bridge", "up")

    def host(self, name: str) -> Host:
        """A host without any interface but loopback."""
        host = Host(self, name)
        self.hosts.append(host)
        return host

    def connect(self, host: Host, interface: str, *addresses: str) -> str:
        """Give the host an interface on the bridge, with these addresses (`ADDRESS/LENGTH`). Returns the
        bridge's end of its cable, for `unplug` and `plug_in`."""
        other = f"v{secrets.token_hex(4)}"
        ip("-n", host.name, "link", "add", interface, "type", "veth", "peer", "name", other)
        ip("-n", host.name, "link", "set", other, "netns", self.name)
        ip("-n", self.name, "link", "set", other, "master", "bridge", "up")
        ip("-n", host.name, "link", "set", interface, "up")
        for address in addresses:
            # Without `nodad` an IPv6 address can be bound only a second later.
            extra = ["nodad"] if ":" in address else []
            ip("-n", host.name, "address", "add", address, "dev", interface, *extra)
        return other

    def unplug(self, cable: str) -> None:
        """Lose all that comes from and goes to that host, without a word to it: its link stays up."""
        ip("-n", self.name, "link", "set", cable, "nomaster")

    def plug_in(self, cable: str) -> None:
        """End what `unplug` began."""
        ip("-n", self.name, "link", "set", cable, "master", "bridge")

    def name_hosts(self, name: str, addresses: Sequence[str]) -> None:
        """Let `name` stand for these addresses on every host."""
        for host in self.hosts:
            folder = NAMES / host.name
            folder.mkdir(parents=True, exist_ok=True)
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address in addresses)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        with contextlib.suppress(subprocess.SubprocessError):
            ip("netns", "delete", self.name)


@contextlib.contextmanager
def new_network() -> Iterator[Network]:
    folder = Path(tempfile.mkdtemp(prefix="p2p-"))
    network = None
    try:
        network = Network(folder)
        yield network
    finally:
        if network is not None:
            network.close()
        shutil.rmtree(folder)
