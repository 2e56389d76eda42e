"""What `setup` of the Mooncake API is told, and what a peer of its own is started with."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from p2pstore.errors import ConfigError
from p2pstore.integrations.mooncake import base
from p2pstore.integrations.mooncake.memory import Registrations, handle_of, view_at, views_at
from p2pstore.integrations.mooncake.settings import (
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


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("16MB", 2**24), ("4gb", 2**32), ("1.5 KiB", 1536), ("1024", 1024), ("3B", 3)],
)
def test_sizes(text: Any, size: int) -> None:
    assert size_in_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["50%", "", "-1", -1, True, None, "16 MBit", 1.5])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="global_segment_size"):
        size_in_bytes(text, "global_segment_size")


def test_servers_that_are_nobodys_peers_are_ignored_and_others_are_bootstrap_peers() -> None:
    for server in ("P2PHANDSHAKE", "etcd://h:2379", "http://h:8080/metadata", "redis://h:6379"):
        settings = from_arguments({"metadata_server": server, "master_server_addr": "h:50051"}, {})
        assert (settings.bootstrap, settings.ignored) == (("h:50051",), (server,))
    same = {
        "metadata_server": "h:1",
        "master_server_addr": "h:1",
        "master_server_address": "[::1]:2",
    }
    assert from_arguments(same, {}).bootstrap == ("h:1", "[::1]:2")
    assert from_arguments({}, {}).bootstrap == ()


def test_the_namespace_is_said_by_name_by_the_environment_or_by_the_tenant() -> None:
    environment = {"MOONCAKE_P2P_NAMESPACE": "env"}
    assert from_arguments({}, {}).namespace == "default"
    assert from_arguments({"tenant_id": "t"}, {}).namespace == "t"
    assert from_arguments({"tenant_id": "t"}, environment).namespace == "env"
    assert from_arguments({"tenant_id": "t", "namespace": "n"}, environment).namespace == "n"


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
    assert "--ssd /x" in options({"enable_ssd_offload": "true", "ssd_offload_path": "/x"})
    assert "--ssd" not in options({"enable_ssd_offload": False, "ssd_offload_path": "/x"})
    assert "--metrics 127.0.0.1:9300" in options({"enable_client_http_server": True})
    with pytest.raises(ConfigError, match="ssd_offload_path"):
        options({"enable_ssd_offload": True})


def test_an_address_that_nobody_listens_at_is_taken_over() -> None:
    import socket

    settings = from_arguments({"master_server_addr": "127.0.0.1:0"}, {})
    assert takes_over(settings, {}) == "127.0.0.1:0"
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

        def __init__(self, options: list[str]) -> None:
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
