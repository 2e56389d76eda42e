"""Hosts on two switches: a host plugged into the other switch is unreachable, without notice. Needs root and `ip`.

As with `shaped_hosts`, nothing has a name outside, and all of it ends with the process that made it.
"""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT / "scripts") not in sys.path:
    sys.path.append(str(ROOT / "scripts"))

from shaped_hosts import INTERFACE, NO_FILTERS, Namespace  # noqa: E402  # the path above leads to it
from shaped_hosts import Host as Host  # noqa: E402
from shaped_hosts import NoNamespaces as NoNamespaces  # noqa: E402

BAD_LINK: Final = "tbf rate 4mbit burst 16kb latency 30ms"
"""Slow, and what is too much for it is lost."""


class Network:
    """`count` hosts, numbered from 0 on, that reach each other."""

    def __init__(self, folder: Path, count: int) -> None:
        """Raises `NoNamespaces`."""
        if shutil.which("ip") is None:
            raise NoNamespaces("this needs root, and the commands ip and tc")
        self.hosts: list[Host] = []
        self._switch = Namespace()
        try:
            lines = [NO_FILTERS]
            for bridge in ("main", "island"):
                lines += [f"ip link add {bridge} type bridge", f"ip link set {bridge} up"]
            self._switch.run(lines)
            for number in range(count):
                self._add(number, folder)
        except BaseException:
            self.close()
            raise

    def _add(self, number: int, folder: Path) -> None:
        host = Host(number + 1, folder)
        self.hosts.append(host)
        pair = f"type veth peer name {_cable(number)} netns {self._switch.process_id}"
        host.run(
            [
                f"ip link add {INTERFACE} {pair}",
                f"ip address add {host.address}/16 dev {INTERFACE}",
                f"ip link set {INTERFACE} up",
            ]
        )
        self._switch.run([f"ip link set {_cable(number)} master main up"])

    def split(self, hosts: Iterable[int]) -> None:
        """These hosts reach each other, and no other host."""
        self._switch.run([f"ip link set {_cable(number)} master island" for number in hosts])

    def join(self, hosts: Iterable[int]) -> None:
        """End what `split` began."""
        self._switch.run([f"ip link set {_cable(number)} master main" for number in hosts])

    def take_down(self, host: int) -> None:
        """The host sees that its link is down: it has no route any more."""
        self.hosts[host].run([f"ip link set {INTERFACE} down"])

    def bring_up(self, host: int) -> None:
        """End what `take_down` began."""
        self.hosts[host].run([f"ip link set {INTERFACE} up"])

    def spoil(self, host: int) -> None:
        """Its link is slow and loses packets."""
        lines = [f"tc qdisc replace dev {INTERFACE} root {BAD_LINK}"]
        self.hosts[host].run(lines)

    def mend(self, host: int) -> None:
        """End what `spoil` began."""
        self.hosts[host].run([f"tc qdisc delete dev {INTERFACE} root"])

    def close(self) -> None:
        """End all of it."""
        for host in self.hosts:
            host.close()
        self._switch.close()


def _cable(number: int) -> str:
    return f"cable{number}"
