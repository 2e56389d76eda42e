"""By which names pages may be asked for at a loopback address. Pure.

A site can have its name lead to 127.0.0.1 (DNS rebinding): its scripts, in the browser of somebody on this machine,
then read what listens there, as if it were theirs. The browser says by which name it asks. So whoever asks at a
loopback address must do so by an address, which no site can take for itself, or by a name of this machine. Elsewhere
any name will do: services, proxies and DNS have many, and who reaches the port at such an address may read it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final

LOCALHOST: Final = "localhost"


def is_own_name(host: str, own_names: Collection[str]) -> bool:
    """Whether a request whose `Host` is this may be answered at a loopback address. `own_names`: of this machine, in
    lower case."""
    name = _without_port(host.strip()).lower().rstrip(".")
    if name in own_names or name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def hosts_asked_for(head: bytes) -> list[str]:
    """What the `Host` lines of a request say; none with HTTP/1.0, which browsers do not speak."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    return [value for name, _, value in pairs if name.strip().lower() == "host"]


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
