"""Settings of a peer: accepted values, and mistakes reported under the name that their author used."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore import config
from p2pstore.addresses import is_loopback, is_wildcard, join_address, split_address
from p2pstore.config import PeerConfig, usable_memory_bytes
from p2pstore.errors import ConfigError
from p2pstore.objects import GIB, MIB


def test_defaults_serve_this_machine_alone() -> None:
    config = PeerConfig().checked()
    assert config.name
    assert config.listen is None
    assert config.memory == min(4 * GIB, max(64 * MIB, usable_memory_bytes() // 8))
    assert config.checked() == config


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"name": "a/b"}, "name: 'a/b'"),
        ({"name": "."}, "name: '.'"),
        ({"name": ".."}, "name: '..'"),
        ({"name": "tab\t"}, "name: "),
        ({"name": "\udc80"}, "name: "),
        ({"name": "ä" * 33}, "1 to 64 bytes"),
        ({"name": 5}, "name: 5 must be text"),
        ({"cluster": ""}, "cluster: "),
        ({"listen": "127.0.0.1"}, "listen: '127.0.0.1' is not HOST:PORT"),
        ({"listen": 7001}, "listen: 7001 must be text"),
        ({"listen": "0.0.0.0:1"}, "keygen"),
        ({"data_listen": ["127.0.0.1:1", "10.0.0.1:1"]}, "data_listen: 10.0.0.1:1"),
        ({"bootstrap": "127.0.0.1:7001"}, "bootstrap: '127.0.0.1:7001' must be a list"),
        ({"bootstrap": ["::1:5"]}, r"brackets, such as \[::1\]"),
        ({"bootstrap": ["node:0"]}, "bootstrap: node:0 has port 0"),
        ({"data_advertise": ["10.0.0.1:x"]}, "data_advertise: '10.0.0.1:x' is not HOST:PORT"),
        ({"advertise": ""}, "advertise: ''"),
        ({"listen": ""}, "listen: '' is not HOST:PORT"),
        ({"bootstrap": ["a:1", 3]}, r"bootstrap\[1\]: 3 must be text"),
        ({"bootstrap": ["0.0.0.0:1"]}, "bootstrap: 0.0.0.0 is no address that one can connect to"),
        ({"advertise": "[::]:1"}, "advertise: :: is no address"),
        ({"data_advertise": ["[fe80::1]:1"]}, "data_advertise: fe80::1 is a link-local address"),
        ({"listen": "[fe80::1%eth0]:1", "insecure": True}, "listen: fe80::1%eth0 is a link-local"),
        ({"memory": "1023KiB"}, "at least 1MiB"),
        ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ({"memory": 1.5}, "memory: 1.5 must be a whole number or text"),
        ({"cap": ["a=1GiB"]}, "cap: 'a' has no quota"),
        ({"cap": ["a=4KiB"], "quota": ["a=5KiB"]}, "cap: 4.0 KiB for 'a' are less than its quota"),
        ({"cap": ["a"], "quota": ["a=5KiB"]}, "cap: 'a' is not NAMESPACE=SIZE"),
        ({"memory_path": "/f", "memory": 0}, "memory_path: with memory 0 there is nothing"),
        ({"memory_path": "/f", "numa_node": 0}, "numa_node: memory in a file is where"),
        (
            {"keep_memory": True},
            "keep_memory: only memory in a file can be kept; say where with memory_path",
        ),
        (
            {"keep_memory": True, "memory_path": "/f", "more_memory": ["1GiB@/g"]},
            "keep_memory: memory can be kept in one file only; leave out more_memory",
        ),
        ({"kv_events_replay": "tcp://:1"}, "kv_events_replay: there is no stream of events"),
        ({"kv_events_of": "fleet", "directory": "partitioned"}, "kv_events_of: a peer with a part"),
        ({"kv_events_namespace": "n" * 300}, "kv_events_namespace: a namespace is 1 to"),
        ({"memory": 0, "more_memory": ["1GiB@node:0"]}, "more_memory: with memory 0"),
        ({"more_memory": ["1GiB"]}, "more_memory: '1GiB' does not say where"),
        ({"more_memory": ["1GiB@node:x"]}, "more_memory: '1GiB@node:x' does not say where"),
        ({"more_memory": ["1GiB@file"]}, "more_memory: '1GiB@file' does not say where"),
        ({"more_memory": ["0@/f"]}, "more_memory: '0' must be above 0"),
        ({"more_memory": ["much@/f"]}, "more_memory: 'much' is not a size"),
        ({"more_memory": ["1GiB@node:0"] * 8}, "more_memory: at most 7 may be added"),
        ({"quota": ["1GiB"]}, "quota: '1GiB' is not NAMESPACE=SIZE, such as default=1GiB"),
        ({"quota": ["a=much"]}, "quota: 'much' is not a size"),
        ({"quota": ["=1GiB"]}, "quota: "),
        ({"quota": ["a=0"]}, "quota: that of 'a' must be above 0"),
        ({"quota": ["a=1MiB", "a=2MiB"]}, "quota: 'a' has two of them"),
        ({"quota": {"a": 1.5}}, "quota: each value must be a whole number or text"),
        ({"quota": {str(n): "1KiB" for n in range(17)}}, "quota: at most 16 namespaces"),
        ({"quota": ["a=1MiB"], "memory": 0}, "quota: 1.0 MiB together are more than the memory"),
        (
            {"quota": {"a": "3MiB", "b": 5 << 20}, "memory": "7MiB"},
            "quota: 8.0 MiB together are more than the memory, 7.0 MiB; give less to some",
        ),
        ({"memory_path": "/f", "huge_pages": "require"}, "huge_pages: the pages of a file"),
        ({"eviction_policy": "fifo"}, "eviction_policy: 'fifo' is not one of prefix, lru, s3-fifo"),
        ({"huge_pages": "yes"}, "huge_pages: 'yes' is not one of auto, never, require"),
        ({"numa_node": -1}, "numa_node: -1 is no NUMA node"),
        ({"max_objects": 0}, "max_objects: 0 must be at least 1"),
        ({"max_leased": "0"}, "max_leased: '0' must be above 0"),
        ({"max_leased": "x%"}, "max_leased: 'x%' is not a percentage"),
        ({"max_leased": "101%"}, "max_leased: '101%'"),
        ({"max_leased": "nan%"}, "max_leased: 'nan%'"),
        ({"transport": "tcp", "rdma_device": ["a"]}, "rdma_device: transport tcp uses no RDMA"),
        ({"transport": "shm", "rdma_topology": "f"}, "rdma_topology: transport shm uses no RDMA"),
        ({"data_tls": "on", "transport": "rdma"}, "data_tls: what RDMA moves is not encrypted"),
        ({"data_tls": "on", "rdma_device": ["a"]}, "data_tls: what RDMA moves is not encrypted"),
        ({"data_tls": "yes"}, "data_tls: 'yes' is not one of off, on"),
        ({"transport": "ipx"}, "transport: 'ipx' is not one of auto, shm, rdma, tcp"),
        ({"network": "internet"}, "network: 'internet' is not one of lan, wan, local"),
        ({"join_timeout": "5s"}, "join_timeout: '5s' must be a number"),
        ({"drain_timeout": -1.0}, "drain_timeout: -1.0 must be 0 to 86400"),
        ({"drain_timeout": float("nan")}, "drain_timeout: nan must be"),
        ({"slow_operation": -0.1}, "slow_operation: -0.1 must be 0 to 86400"),
        ({"socket_mode": "999"}, "socket_mode: '999' is not an octal mode"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PeerConfig(**settings).checked()


def test_others_may_be_served_with_a_key_or_by_decision() -> None:
    for settings in ({"cluster_key_file": "key"}, {"insecure": True}):
        PeerConfig(listen="0.0.0.0:1", data_listen=["10.0.0.1:2"], **settings).checked()


def test_quotas_as_text_and_as_a_table() -> None:
    wanted = {"a": 3 * MIB, "job/x=y": MIB}
    listed = PeerConfig(memory="4MiB", quota=["a=3MiB", "job/x=y=1MiB"])
    table = PeerConfig(memory="4MiB", quota={"a": "3MiB", "job/x=y": MIB})
    assert listed.checked().quotas == table.checked().quotas == wanted
    PeerConfig(memory="4MiB", more_memory=["4MiB@node:0"], quota=["a=8MiB"]).checked()


def test_shares_and_modes() -> None:
    assert PeerConfig(max_leased="25%").max_leased_bytes(1000) == 250
    assert PeerConfig(max_leased="1MiB").max_leased_bytes(1000) == MIB
    assert PeerConfig(socket_mode="0640").socket_mode_bits() == 0o640
    assert PeerConfig().socket_mode_bits() == 0o600
    assert PeerConfig(socket_group="g").socket_mode_bits() == 0o660


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.1:17946", "10.0.0.1", 17946), ("[::1]:0", "::1", 0), ("node1:65535", "node1", 65535)],
)
def test_addresses_are_split_and_joined(address: str, host: str, port: int) -> None:
    assert split_address(address, "listen") == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize("address", ["", ":1", "a:", "a:-1", "a:65536", "a:²", "a:1_0", "[::1]", "a"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="listen: "):
        split_address(address, "listen")


@pytest.mark.parametrize(("address", "host"), [("a", "a"), ("[::1]", "::1"), ("10.0.0.1", "10.0.0.1")])
def test_a_port_may_be_left_out_where_there_is_a_default(address: str, host: str) -> None:
    assert split_address(address, "advertise", default_port=7) == (host, 7)


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    complaint = None
    try:
        host, port = split_address(text, "listen", default_port=1)
    except ConfigError as error:
        complaint = str(error)
    assert complaint.startswith("listen: ") if complaint else host and 0 <= port <= 65535


def test_kinds_of_hosts() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("10.0.0.1", "0.0.0.0", "node")] == [False] * 3
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "node")] == [
        *(True, True, False, False)
    ]


def test_a_mistake_is_named_as_its_author_wrote_it() -> None:
    spelled = {"memory": "MOONCAKE_P2P_MEMORY", "bootstrap": "peer.toml:3: bootstrap"}
    for settings, complaint in (
        ({"memory": "lots"}, "MOONCAKE_P2P_MEMORY: 'lots' is not a size"),
        ({"memory": 5}, "MOONCAKE_P2P_MEMORY: 5 is too little"),
        ({"bootstrap": ["node:0"]}, "peer.toml:3: bootstrap: node:0 has port 0"),
        ({"bootstrap": [1]}, r"peer.toml:3: bootstrap\[0\]: 1 must be text"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            PeerConfig(**settings).checked(spelled)


def test_memory_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tightest limit of all groups above this process is what it may use."""
    host = usable_memory_bytes()
    limits = [(host + 1, 0), (64 * MIB, 5 * MIB), (128 * MIB, 0)]
    monkeypatch.setattr(config, "memory_limits", lambda: limits)
    assert usable_memory_bytes() == 64 * MIB < host


def test_a_setting_that_is_none_suggests_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"no setting 'memry': did you mean memory\?"):
        PeerConfig(memry="1GiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no setting 'zzz': see help"):
        PeerConfig(zzz=1)  # type: ignore[call-arg]
