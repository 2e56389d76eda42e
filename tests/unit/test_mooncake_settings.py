"""Arguments of `setup` of the Mooncake API, and the settings of the peer that it starts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.integrations.mooncake import MooncakeConfig, base
from p2pstore.integrations.mooncake.memory import Registrations, handle_of, view_at, views_at
from p2pstore.integrations.mooncake.mooncake_config import _VARIABLES
from p2pstore.integrations.mooncake.setup_settings import (
    from_arguments,
    peer_options,
    size_in_bytes,
    takes_over,
)
from p2pstore.integrations.mooncake.tensor_format import (
    LayoutAxis,
    TensorHeader,
    decode_header,
    encode_header,
    tp_shard,
)
from tests.ports import free_port


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[(5, 5), ("16MB", 2**24), ("4gb", 2**32), ("1.5 KiB", 1536), ("1024", 1024), ("3B", 3)],
        *[("1e6", 10**6), (1e9, 10**9), ("1.5E3", 1500), ("2e3 k", 2000 * 1024), ("1.0", 1), (0, 0)],
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert size_in_bytes(text, "x") == size
    if isinstance(text, int):
        assert size_in_bytes(np.int64(text), "x") == size


@pytest.mark.parametrize(
    "text",
    [
        *["50%", "", "-1", -1, True, None, "16 MBit", 1.5, "1.5", "1e", "e6", "1e-3", "1e400"],
        *["nan", "inf", float("nan"), float("inf"), "1,000", "0x10", b"1", [], {}, "9999999 TB", 2**61],
    ],
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="global_segment_size"):
        size_in_bytes(text, "global_segment_size")


MALFORMED = [
    *("::1:21311", "host", "host:99999", "host:", ":50051", "host:port", "host:-1", "host:0"),
    *("10.0.0.1:1,10.0.0.2:1", "10.0.0.1:1;10.0.0.2:1", "tcp://10.0.0.1:50051", "rdma://h:1", "h:1/x"),
    *("etcd:10.0.0.1:1", "a b:1", "10.0.0.300:1", "10.0.0:1", "[host]:1", "[::1]", "[::1:1", "::1]:1"),
    *("0.0.0.0:1", "[::]:1", "[fe80::1]:1", "a..b:1", f"{'h' * 64}:1", "user@host:1", "*:1", " "),
    *("host:1\n2", "ho\0st:1", "host:\uff11", 5, ["h:1"], b"h:1", True),
    *("-h:1", "h-:1", "a.-b:1", "[::1%a b]:1", "[::1%\n]:1"),
]


@pytest.mark.parametrize("address", MALFORMED)
def test_a_malformed_address_is_an_error_and_never_dropped(address: Any) -> None:
    for name in ("master_server_addr", "master_server_address", "metadata_server"):
        with pytest.raises(ConfigError, match=name):
            from_arguments({name: address}, {})
    if isinstance(address, str) and address.strip():
        with pytest.raises(ConfigError, match="bootstrap"):
            PeerConfig(bootstrap=[address]).checked()


def test_a_master_is_a_peer_and_no_server_of_metadata() -> None:
    for server in ("P2PHANDSHAKE", "etcd://h:2379", "http://h:8080/metadata"):
        with pytest.raises(ConfigError, match="master_server_addr"):
            from_arguments({"master_server_addr": server}, {})


WRONG: dict[str, list[Any]] = {
    "local_hostname": ["-h", "::1%a b", "a b", "host:99999", "tcp://h", "::1:99999", 5, "a,b", "[::1"],
    "rdma_devices": ["mlx5_0,,mlx5_1", "mlx5_0;mlx5_1", '{"0": "x"}', ",", 5, ["x"]],
    "device_name": ["mlx5_0 mlx5_1"],
    "protocol": ["tpc", 5, ["tcp"]],
    "client_http_port": ["x", 0, 70000, -1, True, 1.5, float("inf"), []],
    "enable_ssd_offload": ["maybe"],
    "enable_client_http_server": [7],
    "ssd_offload_path": [5, "a\0b"],
    "tenant_id": [5],
    "namespace": ["n" * 2000],
    "socket": [5],
    "local_buffer_size": ["x"],
    "global_segment_size": ["16 apples"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_what_is_wrong_with_a_setting_is_said_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        from_arguments({name: value}, {})


def test_what_changes_nothing_is_named() -> None:
    values = {
        **{"engine": np.zeros(2), "protocol": "efa", "rdma_devices": "x", "globl_segment_size": 5},
        **{"ipc_socket_path": "/x", "master_server_addr": "h:1", "enable_ssd_offload": False},
    }
    odd: dict[Any, Any] = {5: 1, None: 2, ("x",): 3}
    settings = from_arguments(values | odd, {})
    assert sum("there is no setting" in each for each in settings.unused) == 4
    settings = from_arguments(values, {})
    unused = "\n".join(settings.unused)
    for text in ("engine", "'efa'", "RDMA devices", "did you mean 'global_segment_size'", "ipc_socket"):
        assert text in unused
    assert settings.for_own_peer == ("master_server_addr", "rdma_devices")
    plain = from_arguments({"protocol": "RDMA", "device_name": "mlx5_0", "local_hostname": ""}, {})
    assert (plain.unused, plain.rdma_devices, plain.host) == ((), ("mlx5_0",), "localhost")


def test_a_local_hostname_may_have_a_port() -> None:
    for given, host in (("node7:5", "node7"), ("[fd00::1]:5", "fd00::1"), ("fd00::1", "fd00::1")):
        settings = from_arguments({"local_hostname": given}, {})
        assert (settings.hostname, settings.host) == (given, host)


def test_servers_that_are_nobodys_peers_are_ignored_and_others_are_bootstrap_peers() -> None:
    for server in ("P2PHANDSHAKE", "etcd://h:2379", "http://h:8080/metadata", "redis://h:6379"):
        settings = from_arguments({"metadata_server": server, "master_server_addr": "h:50051"}, {})
        assert (settings.bootstrap, settings.ignored) == (("h:50051",), (server,))
    same = {"metadata_server": "h:1", "master_server_addr": "h:1", "master_server_address": "[::1]:2"}
    assert from_arguments(same, {}).bootstrap == ("h:1", "[::1]:2")
    assert from_arguments({}, {}).bootstrap == ()


def test_the_namespace_is_said_by_name_by_the_environment_or_by_the_tenant() -> None:
    environment = {"MOONCAKE_P2P_NAMESPACE": "env"}
    assert from_arguments({}, {}).namespace == "default"
    assert from_arguments({"tenant_id": "t"}, {}).namespace == "t"
    assert from_arguments({"tenant_id": "t"}, environment).namespace == "env"
    assert from_arguments({"tenant_id": "t", "namespace": "n"}, environment).namespace == "n"


def test_what_counts_instead_of_a_setting_is_named() -> None:
    environment = {"MOONCAKE_P2P_NAMESPACE": "env", "MOONCAKE_P2P_BOOTSTRAP": "h:1"}
    (text,) = from_arguments({"tenant_id": "t", "namespace": "n"}, {}).unused
    assert "tenant_id changes nothing" in text
    settings = from_arguments({"tenant_id": "t", "master_server_addr": "other:1"}, environment)
    assert ["'env'" in settings.unused[0], "other:1" in settings.unused[1]] == [True, True]
    assert (
        from_arguments({"tenant_id": "env", "metadata_server": "P2PHANDSHAKE"}, environment).unused == ()
    )


def options(values: dict[str, Any], **environment: str) -> str:
    named = {f"MOONCAKE_P2P_{name}": value for name, value in environment.items()}
    return " ".join(peer_options(from_arguments(values, named), named))


def test_without_a_key_a_peer_serves_loopback_and_with_one_the_named_address() -> None:
    values = {"local_hostname": "10.0.0.5", "master_server_addr": "10.0.0.1:50051"}
    assert "--listen 127.0.0.1:0 --bootstrap 10.0.0.1:50051" in options(values)
    assert "--listen 10.0.0.5:0" in options(values, CLUSTER_KEY_FILE="key")
    assert "--listen [fd00::1]:0" in options({"local_hostname": "fd00::1"}, INSECURE="1")
    assert "--listen" not in options({"local_hostname": "node7"}, CLUSTER_KEY_FILE="key")
    assert "--listen" not in options(values, LISTEN="10.0.0.9:1")
    assert "--bootstrap" not in options(values, BOOTSTRAP="10.0.0.9:1")


def test_other_options_of_a_peer() -> None:
    assert "--memory 0 " in options({"global_segment_size": 0})
    assert "--memory 1048576 " in options({"global_segment_size": 5})
    devices = {"rdma_devices": "mlx5_0, mlx5_1", "protocol": "rdma"}
    assert "--rdma-device mlx5_0 --rdma-device mlx5_1" in options(devices)
    assert "--rdma-device" not in options({**devices, "protocol": "tcp"})
    settings = from_arguments({"enable_client_http_server": True, "client_http_port": "9400"}, {})
    assert settings.http_port == 9400
    with_folder = " ".join(peer_options(settings, {}, ssd_path="/x/store-1", http_port=9401))
    assert "--ssd /x/store-1 --metrics 127.0.0.1:9401" in with_folder
    assert from_arguments({"enable_ssd_offload": "true", "ssd_offload_path": "/x"}, {}).ssd_path == "/x"
    assert not from_arguments({"enable_ssd_offload": False, "ssd_offload_path": "/x"}, {}).ssd_path
    assert "--name node7:5" in options({"local_hostname": "node7:5"})
    assert "--name" not in options({"local_hostname": "node7"}, NAME="other")
    assert "--name" not in options({"local_hostname": "n" * 63 + ".example"})
    with pytest.raises(ConfigError, match="ssd_offload_path"):
        options({"enable_ssd_offload": True})


def test_an_address_that_nobody_listens_at_is_taken_over() -> None:
    import socket

    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    settings = from_arguments({"master_server_addr": address}, {})
    assert takes_over(settings, {}) == address
    assert takes_over(settings, {"MOONCAKE_P2P_LISTEN": "127.0.0.1:5"}) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert takes_over(from_arguments({"master_server_addr": address}, {}), {}) is None
    distant = from_arguments({"master_server_addr": "192.0.2.1:50051"}, {})
    assert takes_over(distant, {"MOONCAKE_P2P_CLUSTER_KEY_FILE": "key"}) is None


def test_registered_regions_do_not_overlap() -> None:
    memory = np.zeros(100, np.uint8)
    start = int(memory.ctypes.data)
    regions = Registrations()
    assert regions.add(start + 40, 20)
    assert not regions.add(start + 30, 11)
    assert not regions.add(start + 59, 1)
    assert regions.add(start + 30, 10)
    assert regions.add(start + 60, 5)
    assert (regions.size_at(start + 45), regions.size_at(start + 65)) == (15, None)
    assert not regions.drop(start + 45)
    assert regions.drop(start + 40)
    assert regions.add(start + 45, 5)
    regions.clear()
    assert regions.add(start, 100)


def test_views_and_handles_are_of_the_memory_itself() -> None:
    memory = np.arange(10, dtype=np.uint8)
    view = view_at(int(memory.ctypes.data) + 2, 3)
    assert bytes(view) == b"\2\3\4"
    view[0] = 9
    assert memory[2] == 9
    handle = handle_of(memory.data.toreadonly())
    assert (handle.ptr(), handle.size(), len(handle)) == (int(memory.ctypes.data), 10, 10)
    assert bytes(handle_of(memoryview(b""))) == b""
    for address, size in ((0, 5), (2**60, 5)):
        with pytest.raises(ValueError, match="no memory"):
            view_at(address, size)
    numbers: Any = np.array([memory.ctypes.data, 2])
    assert bytes(view_at(*numbers)) == b"\0\1"
    wrong: list[Any] = [(4096.5, 5), (4096, 2.5), ("4096", 5), (-1, 5), (4096, -5)]
    for pair in wrong:
        with pytest.raises(TypeError):
            view_at(*pair)


def test_a_store_that_found_nobody_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Alone:
        ready: ClassVar = {"joined": False}

        def __init__(self, options: list[str], inherited: int | None = None) -> None:
            pass

    monkeypatch.setattr(base, "OwnPeer", Alone)
    base._start_peer(from_arguments({"metadata_server": "P2PHANDSHAKE"}, {}))
    assert not caplog.records
    base._start_peer(from_arguments({"master_server_addr": "nobody.invalid:50051"}, {}))
    (record,) = caplog.records
    assert "nobody.invalid:50051" in record.getMessage()
    Alone.ready = {"joined": True}
    base._start_peer(from_arguments({"master_server_addr": "nobody.invalid:50051"}, {}))
    assert len(caplog.records) == 1


def test_tensor_headers_come_back() -> None:
    for header in (
        TensorHeader("bfloat16", (3, 2), 12, (3, 2)),
        TensorHeader("float32", (), 4, ()),
        TensorHeader("int8", (4, 2), 8, (8, 2), tp_shard(1, 2, 0)),
        TensorHeader(
            *("int8", (4, 2), 8, (8, 2)),
            (LayoutAxis(0, 1, 2), LayoutAxis(3, 0, 2, None, 7), LayoutAxis(1, 1, 2, 0)),
        ),
    ):
        assert decode_header(encode_header(header)) == header
    with pytest.raises(ValueError, match="at most 8"):
        encode_header(TensorHeader("int8", (1,) * 9, 1, (1,) * 9))
    with pytest.raises(ValueError, match="not put as a tensor"):
        decode_header(bytes(304))


def test_many_views_are_those_of_each_address() -> None:
    memory = np.arange(10, dtype=np.uint8)
    start = int(memory.ctypes.data)
    views = views_at([start + 6, start, start + 6, start + 10], [4, 3, 2, 0])
    assert [bytes(view) for view in views] == [b"\6\7\10\11", b"\0\1\2", b"\6\7", b""]
    views[1][2] = 9
    assert memory[2] == 9
    assert views_at([], []) == []
    numbers: Any = np.array([start, start + 1])
    assert [bytes(view) for view in views_at(numbers.tolist(), np.array([1, 1]).tolist())] == [
        b"\0",
        b"\1",
    ]
    for addresses, sizes in (([start, 0], [1, 1]), ([start, 2**60], [1, 1])):
        with pytest.raises(ValueError, match="no memory"):
            views_at(addresses, sizes)
    wrong: list[Any] = [([start, 4096.5], [1, 1]), ([start], ["4"]), ([start, -1], [1, 1])]
    for pair in [*wrong, ([start, start], [1, -5])]:
        with pytest.raises(TypeError):
            views_at(*pair)


NEEDED = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "h:1"}


def in_file(folder: Path, values: Any) -> MooncakeConfig:
    path = folder / "mooncake.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return MooncakeConfig.from_file(path)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [*_VARIABLES.values(), "MOONCAKE_CONFIG_PATH"]:
        monkeypatch.delenv(variable, raising=False)


def test_a_file_gives_what_setup_takes(tmp_path: Path) -> None:
    values = NEEDED | {"global_segment_size": "1e6", "local_buffer_size": 1e9, "protocol": "RDMA"}
    values |= {"enable_ssd_offload": "enable", "ssd_offload_path": "/x", "device_name": "mlx5_0"}
    config = in_file(tmp_path, values | {"tenant_id": None, "client_http_port": "9301"})
    assert (config.global_segment_size, config.local_buffer_size) == (10**6, 10**9)
    assert (config.protocol, config.tenant_id, config.client_http_port) == ("rdma", "default", 9301)
    settings = from_arguments(asdict(config), {})
    assert (settings.bootstrap, settings.rdma_devices) == (("h:1",), ("mlx5_0",))
    assert (settings.ssd_path, settings.unused) == ("/x", ())
    assert in_file(tmp_path, NEEDED).global_segment_size == 3_355_443_200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("global_segment_size", each) for each in ("16 apples", -1, "", True, [1])],
        *[("local_buffer_size", "50%"), ("enable_ssd_offload", "maybe"), ("client_http_port", "x")],
        *[("protocol", ""), ("protocol", 5), ("device_name", 5), ("tenant_id", 5)],
        *[("local_hostname", ""), ("metadata_server", None), ("master_server_address", 5)],
    ],
)
def test_what_is_wrong_is_a_value_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        in_file(tmp_path, NEEDED | {name: value})
    if isinstance(value, str) and value:
        monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
        monkeypatch.setenv(_VARIABLES[name], value)
        with pytest.raises(ValueError, match=_VARIABLES[name]):
            MooncakeConfig.load_from_env()


@pytest.mark.parametrize("text", ["", "[1]", "{", "5", "[" * 100_000])
def test_what_is_no_configuration_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"mooncake\.json"):
        in_file(tmp_path, text)


def test_keys_that_mean_nothing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_file(tmp_path, NEEDED | {"globl_segment_size": 5})
    assert "did you mean 'global_segment_size'" in caplog.text
    for name in NEEDED:
        with pytest.raises(ValueError, match=f"Missing required config field: {name}"):
            in_file(tmp_path, {each: value for each, value in NEEDED.items() if each != name})


def test_the_environment_names_a_file_or_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="MOONCAKE_CONFIG_PATH"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.1:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2gb")
    config = MooncakeConfig.load_from_env()
    assert (config.local_hostname, config.metadata_server) == ("localhost", "P2PHANDSHAKE")
    assert (config.master_server_address, config.global_segment_size) == ("10.0.0.1:50051", 2**31)
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(NEEDED))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert MooncakeConfig.load_from_env().master_server_address == "h:1"
