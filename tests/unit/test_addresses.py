"""Which addresses a peer listens on and tells others."""

import logging
import socket
from pathlib import Path

import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.peer.lifetime import peer_addresses as addresses
from p2pstore.peer.lifetime.peer_addresses import (
    advertised,
    control_listen_address,
    data_listen_addresses,
    interface_address,
    link_bytes_per_second,
    own_addresses,
    route_source,
)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses of this machine's interfaces, to be chosen."""
    found: set[str] = set()
    monkeypatch.setattr(addresses, "own_addresses", lambda: found)
    return found


def test_the_port_is_the_default_one_unless_it_is_said() -> None:
    assert control_listen_address(PeerConfig()) == ("127.0.0.1", None)
    assert control_listen_address(PeerConfig(listen="[::1]:5")) == ("::1", 5)


def test_how_fast_a_link_is_where_somebody_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"fast0": ["10.0.0.1", "fd00::1"], "down0": ["10.0.0.2"], "none0": ["10.0.0.3"]}
    monkeypatch.setattr(addresses, "interface_addresses", lambda: found)
    for name, speed in (("fast0", "100000\n"), ("down0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    assert link_bytes_per_second("fd00::1", tmp_path) == 12.5e9
    for address in ("10.0.0.2", "10.0.0.3", "0.0.0.0", "127.0.0.1"):
        assert link_bytes_per_second(address, tmp_path) is None


def test_data_goes_where_control_is() -> None:
    assert data_listen_addresses(PeerConfig(), "::1") == ["[::1]:0"]
    assert data_listen_addresses(PeerConfig(data_listen=["10.0.0.1:2"]), "::1") == ["10.0.0.1:2"]


def test_listeners_are_advertised_as_they_are_unless_said_otherwise() -> None:
    listening = [("127.0.0.1", 5), ("::1", 6)]
    config = PeerConfig()
    assert advertised(listening, [], config, "advertise") == ["127.0.0.1:5", "[::1]:6"]
    assert advertised(listening, ["a", "b:9"], config, "advertise") == ["a:5", "b:9"]


def test_a_wildcard_is_the_source_of_the_route_to_a_bootstrap_peer() -> None:
    config = PeerConfig(bootstrap=["127.0.0.2:1", "nowhere.invalid:1"])
    assert advertised([("0.0.0.0", 5)], [], config, "advertise") == ["127.0.0.1:5"]
    assert route_source(["localhost:1"], "advertise") == "127.0.0.1"  # whatever IPv6 says


def test_a_bootstrap_peer_that_is_this_machine_does_not_tell_its_address(own: set[str]) -> None:
    """Debian resolves a machine's own name to 127.0.1.1: no address for others."""
    own.update({"10.0.0.7", "fd00::7"})
    resolve = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.1.1", *rest, **more)
        )
        assert route_source(["node1:1"], "advertise") == "10.0.0.7"


def test_the_only_address_needs_no_bootstrap_peer(own: set[str]) -> None:
    own.update({"10.0.0.7", "fd00::7"})
    assert route_source([], "advertise") == "10.0.0.7"
    with pytest.raises(ConfigError, match=r"--advertise .*\(candidates: 10.0.0.7, fd00::7\)"):
        route_source([], "advertise", "::")


def test_several_addresses_must_be_told_apart(own: set[str]) -> None:
    with pytest.raises(ConfigError, match="none found"):
        route_source([], "data_advertise")
    own.update({"10.0.0.7", "192.168.0.7"})
    with pytest.raises(
        ConfigError, match=r"data_advertise: .*--advertise HOST.*\(candidates: 10.0.0.7, 192.168.0.7\)"
    ):
        route_source([], "data_advertise")


def test_own_addresses_can_be_bound() -> None:
    for address in own_addresses():
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"bootstrap": ["10.0.0.1:1"]}, True),
        ({"bootstrap": ["127.0.0.1:1"]}, False),
        ({"bootstrap": ["10.0.0.7:1"]}, False),
        ({"bootstrap": ["10.0.0.1:1"], "listen": "127.0.0.1:1"}, False),
        ({}, False),
    ],
)
def test_without_a_key_a_peer_stays_on_loopback_and_says_so(
    settings: dict,
    warned: bool,
    own: set[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own.add("10.0.0.7")
    monkeypatch.setattr(logging.getLogger("p2pstore"), "propagate", True)
    assert control_listen_address(PeerConfig(**settings))[0] == "127.0.0.1"
    assert ("loopback only" in caplog.text) is warned


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"bootstrap": ["10.0.0.1:1"]}, "10.0.0.7"),
        ({"bootstrap": ["127.0.0.1:1"]}, "127.0.0.1"),
        ({"bootstrap": ["10.0.0.7:1"]}, "127.0.0.1"),
        ({}, "127.0.0.1"),
    ],
)
def test_with_a_key_a_peer_listens_where_others_can_call_back(
    settings: dict, host: str, own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own.add("10.0.0.7")
    monkeypatch.setattr(addresses, "_sources_towards", lambda host, port: ["10.0.0.7"])
    assert control_listen_address(PeerConfig(insecure=True, **settings))[0] == host


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["10.0.0.7", "fd00::7"],
        "ib0": ["10.1.0.7", "10.1.0.8"],
        "ib1": ["fd01::7"],
    }
    monkeypatch.setattr(addresses, "interface_addresses", lambda: found)


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ("eth0", "10.0.0.7"),
        ("ib1", "fd01::7"),
        ("10.0.0.0/8", None),
        ("10.1.0.8/31", "10.1.0.8"),
        ("10.0.0.99/24", "10.0.0.7"),
        ("fd00::/16", "fd00::7"),
        ("lo", "127.0.0.1"),
        ("ib0", None),
        ("eth1", None),
        ("192.168.0.0/16", None),
        ("10.0.0.0/x", None),
    ],
)
@pytest.mark.usefixtures("interfaces")
def test_an_interface_by_name_or_by_network(wanted: str, address: str | None) -> None:
    if address is not None:
        assert interface_address(wanted) == address
        return
    with pytest.raises(ConfigError, match=f"interface: .*{wanted}"):
        interface_address(wanted)


@pytest.mark.usefixtures("interfaces")
def test_an_interface_beside_an_address_has_to_exist() -> None:
    """One with several addresses may: the address says which."""
    config = PeerConfig(listen="127.0.0.1:0", interface="ib0")
    assert control_listen_address(config) == ("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"interface: .*eth1"):
        control_listen_address(PeerConfig(listen="127.0.0.1:0", interface="eth1"))


@pytest.mark.usefixtures("interfaces")
def test_an_interface_is_where_a_peer_listens_and_what_it_tells() -> None:
    config = PeerConfig(interface="eth0", insecure=True)
    assert control_listen_address(config)[0] == "10.0.0.7"
    assert advertised([("0.0.0.0", 5), ("::1", 6)], [], config, "advertise") == ["10.0.0.7:5", "[::1]:6"]
    with pytest.raises(ConfigError, match=r"interface: 10\.0\.0\.7 is reachable by others.*keygen"):
        control_listen_address(PeerConfig(interface="eth0"))
    assert control_listen_address(PeerConfig(interface="lo"))[0] == "127.0.0.1"


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match=r"listen: 192\.0\.2\.99: .*there is .*lo: 127\.0\.0\.1"):
        control_listen_address(PeerConfig(listen="192.0.2.99:1"))
