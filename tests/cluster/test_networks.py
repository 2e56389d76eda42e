"""Which addresses peers choose on real interfaces and routes, and what an invite is good for there."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Network, new_network, why_not
from tests.waiting import eventually

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


@pytest.fixture
def network() -> Iterator[Network]:
    with new_network() as network:
        yield network


def test_three_machines_with_nothing_but_the_invite(network: Network, tmp_path: Path) -> None:
    a, b, c = (network.host(name) for name in "abc")
    for number, host in enumerate((a, b, c), start=1):
        network.connect(host, "eth0", f"10.77.0.{number}/24")
    key = a.folder / "key"
    a.done("keygen", str(key))
    first = a.join("--cluster-key-file", str(key), "--interface", "eth0", "--cluster", "blue")
    assert first["control"] == "10.77.0.1:17946"
    command = a.run("invite")
    assert command.stdout.startswith("mooncake-p2p join --invite p2pstore1:")
    assert command.stdout.count("\n") == 1
    assert "secret" in command.stderr
    line = command.stdout.split()[-1]

    second = b.join("--invite", line)
    assert (second["joined"], second["control"]) == (True, "10.77.0.2:17946")
    assert second["data"][0].startswith("10.77.0.2:")
    third = c.join("--invite", "-", input=command.stdout.split("--invite ")[1])
    assert third["joined"] is True
    a.done("put", "k", "-", input="value")
    assert c.done("get", "k", "--wait", "10") == "value"

    b.done("leave")
    kept = b.state / "cluster.key"
    assert kept.read_text() == key.read_text()
    assert (
        stat.S_IMODE(kept.stat().st_mode) == stat.S_IMODE((b.state / "invite").stat().st_mode) == 0o600
    )
    eventually(lambda: not _runs(b.state))
    again = b.join()
    assert (again["joined"], again["peer_id"]) == (True, second["peer_id"])
    assert b.done("get", "k", "--wait", "10") == "value"
    for host in (a, b, c):
        assert key.read_text().strip() not in (host.state / "peer.log").read_text()


def _runs(state: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc", (state / "lock").read_text().strip()).exists()
    return False


def test_a_host_with_several_addresses(network: Network) -> None:
    plain, homed = network.host("plain"), network.host("homed")
    network.connect(plain, "eth0", "10.77.1.1/24")
    network.connect(homed, "eth0", "10.77.0.2/24", "fd77::2/64")
    network.connect(homed, "eth1", "10.77.1.2/24", "10.77.1.3/24")
    wide = ["--insecure", "--listen", "0.0.0.0:0"]
    complaint = homed.failed("join", *wide)
    assert "--advertise" in complaint
    assert "candidates: 10.77.0.2, 10.77.1.2, 10.77.1.3)" in complaint
    there_is = "there is eth0: 10.77.0.2, fd77::2; eth1: 10.77.1.2, 10.77.1.3; lo:"
    assert there_is in homed.failed("join", "--insecure", "--interface", "eth9")
    assert there_is in homed.failed("join", "--insecure", "--listen", "10.77.1.1:0")

    first = plain.join("--insecure", "--listen", "10.77.1.1:0")
    bootstrap = ["--bootstrap", first["control"]]
    ready = homed.join(*wide, *bootstrap)  # the route to 10.77.1.1 is through eth1
    assert (ready["joined"], ready["control"].partition(":")[0]) == (True, "10.77.1.2")
    assert ready["data"][0].partition(":")[0] == "10.77.1.2"
    homed.done("leave")
    for options, address in (
        (["--listen", "0.0.0.0:0", "--interface", "10.77.1.3/32"], "10.77.1.3"),
        (["--listen", "[::]:0", "--advertise", "10.77.1.3"], "10.77.1.3"),
        (["--interface", "fd77::/64"], "[fd77::2]"),
    ):
        eventually(lambda: not _runs(homed.state))
        ready = homed.join("--insecure", *options)
        for advertised in (ready["control"], *ready["data"]):
            assert advertised.rpartition(":")[0] == address
        homed.done("leave")


def test_ipv6(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    network.connect(a, "eth0", "fd77::1/64")
    network.connect(b, "eth0", "fd77::2/64")
    first = a.join("--insecure", "--listen", "[::]:0")
    assert first["control"].startswith("[fd77::1]:")
    second = b.join("--insecure", "--bootstrap", first["control"])
    assert second["joined"] is True
    assert second["control"] == "[fd77::2]:17946"
    b.done("put", "k", "-", input="value")
    assert a.done("get", "k", "--wait", "10") == "value"
    assert "link-local" in b.failed("join", "--name", "c", "--insecure", "--listen", "[fe80::1]:0")


def test_a_name_that_stands_for_all_peers(network: Network) -> None:
    """As a headless service does: this peer's own address is among them, and one without a peer."""
    if not os.access("/etc", os.W_OK):
        pytest.skip("/etc is read-only")
    a, b = network.host("a"), network.host("b")
    network.connect(a, "eth0", "10.77.0.1/24")
    network.connect(b, "eth0", "10.77.0.2/24")
    network.name_hosts("pool", ["10.77.0.1", "10.77.0.2", "10.77.0.3"])
    options = ["--insecure", "--bootstrap", "pool:17946", "--join-timeout", "200ms"]
    first = a.join(*options)
    assert (first["control"], first["joined"]) == ("10.77.0.1:17946", False)
    log = (a.state / "peer.log").read_text()
    assert "no bootstrap peer answered within 0.2 s: serving alone" in log
    b.join(*options)
    eventually(lambda: a.peers() == b.peers() == 2)
