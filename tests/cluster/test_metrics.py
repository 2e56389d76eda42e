"""`join --metrics`: what Prometheus, Kubernetes and strangers get."""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from p2pstore import open_peer
from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.objects import MIB
from p2pstore.status.http_server import MAX_HOST_CONNECTIONS
from tests.cluster.processes import PeerProcess, new_cluster
from tests.waiting import eventually

SECONDS = 10.0


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    with new_cluster(1, halves=False) as cluster:
        ssd = cluster.folder / "ssd"
        ssd.mkdir()
        options = ["--ssd", str(ssd), "--ssd-capacity", "300MiB", "--memory", "64MiB"]
        options += ["--quota", "default=16MiB"]
        cluster.start_first("--network", "local", "--metrics", "127.0.0.1:0", *options)
        yield cluster.peers[0]


def address_of(peer: PeerProcess) -> str:
    address: str = peer.ready["metrics"]
    return address


def page(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(address: str) -> dict[str, float]:
    """Samples, by name and labels."""
    status, text = page(address, "/metrics")
    assert status == HTTPStatus.OK
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.name.startswith(("p2pstore_", "process_"))
        for sample in family.samples:
            labels = json.dumps(sample.labels) if sample.labels else ""
            samples[sample.name + labels] = sample.value
    return samples


def test_what_a_peer_did_is_counted(peer: PeerProcess) -> None:
    before = metrics(address_of(peer))
    value = os.urandom(MIB)
    peer.client.put("k", value, durable=True)
    assert peer.client.get("k") == value
    loop_looks = "p2pstore_event_loop_lag_seconds_count"
    eventually(lambda: metrics(address_of(peer))[loop_looks] > 0, SECONDS)
    after = metrics(address_of(peer))

    def grew(name: str) -> float:
        return after[name] - before[name]

    assert grew("p2pstore_client_puts_total") == 1
    assert grew("p2pstore_client_put_bytes_total") == MIB
    assert grew("p2pstore_objects") == 1
    assert grew("p2pstore_ssd_stored_bytes_total") == MIB
    assert grew('p2pstore_namespace_kept_bytes{"namespace": "default"}') >= MIB
    assert grew('p2pstore_namespace_used_bytes{"namespace": "default"}') >= MIB
    assert after['p2pstore_namespace_quota_bytes{"namespace": "default"}'] == 16 * MIB
    assert after["p2pstore_memory_capacity_bytes"] >= 60 * MIB
    assert after['p2pstore_members{"status": "alive"}'] == 1
    assert after['p2pstore_ssd_state{"state": "ok"}'] == 1
    assert grew('p2pstore_ssd_operation_seconds_count{"operation": "write"}') == 1
    assert grew("p2pstore_put_size_bytes_count") == 1
    assert grew('p2pstore_put_size_bytes_bucket{"le": "1048576"}') == 1
    assert after['p2pstore_namespace_puts_total{"namespace": "default"}'] >= 1
    assert after["process_resident_memory_bytes"] > MIB


def test_names_follow_the_conventions(peer: PeerProcess) -> None:
    _, text = page(address_of(peer), "/metrics")
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        else:
            assert not family.name.endswith("_total")
        assert not family.name.endswith(("_ms", "_us", "_mb", "_kib"))


def test_probes(peer: PeerProcess) -> None:
    assert page(address_of(peer), "/livez") == (200, "alive\n")
    assert page(address_of(peer), "/readyz") == (200, "ready\n")
    assert page(address_of(peer), "/readyz", "HEAD") == (200, "")
    assert page(address_of(peer), "/nothing")[0] == HTTPStatus.NOT_FOUND
    assert page(address_of(peer), "/metrics", "DELETE")[0] == HTTPStatus.METHOD_NOT_ALLOWED


def test_the_status_page_and_its_json(peer: PeerProcess) -> None:
    """How a browser shows it: `test_status_page`."""
    (line,) = peer.logged("status page: ")
    with urllib.request.urlopen(line.partition("status page: ")[2], timeout=SECONDS) as answer:
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert b"status.json" in answer.read()
    peer.client.put("a secret key", b"x")
    for _ in range(3):
        peer.client.get("a secret key")

    def document() -> dict[str, Any]:
        status, text = page(address_of(peer), "/status.json")
        assert status == HTTPStatus.OK
        assert "secret" not in text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def keys() -> list[str]:
        return [each["key"] for each in peer.client.statistics()["peer"]["hottest"]]

    # Clients tell of their reads now and then, and the document may be a second old.
    deadline = time.monotonic() + SECONDS
    while "a secret key" not in keys() or len(document()["hottest"]) < len(keys()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    said = document()
    assert {each["namespace"] for each in said["hottest"]} == {"default"}
    assert [each["name"] for each in said["members"]] == ["p0"]
    assert said["problems"] == []
    assert said["ssd"]["state"] == "ok"


def test_garbage_and_silence_keep_nobody_from_it(peer: PeerProcess) -> None:
    host, _, port = address_of(peer).rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(MAX_HOST_CONNECTIONS // 2)]
    try:
        for garbage in (b"\0" * 100, os.urandom(5000), b"GET /metrics\r\n", b"x" * 20_000):
            with socket.create_connection((host, int(port)), timeout=SECONDS) as stranger:
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
        assert page(address_of(peer), "/livez")[0] == HTTPStatus.OK
    finally:
        for each in silent:
            each.close()
    assert peer.client.contains("no such key") is False


async def test_a_peer_that_found_nobody_is_not_ready(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    config = PeerConfig(
        memory="16MiB",
        listen="127.0.0.1:0",
        bootstrap=[f"127.0.0.1:{port}"],
        join_timeout=0.1,
        metrics="127.0.0.1:0",
        socket=str(tmp_path / "s"),
    )
    async with open_peer(config) as peer:
        assert peer.metrics is not None
        status, text = await trio.to_thread.run_sync(page, peer.metrics, "/readyz")
        assert (status, text) == (503, "no bootstrap peer has answered yet\n")


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = PeerConfig(
            memory="16MiB", listen="127.0.0.1:0", metrics=address, socket=str(tmp_path / "s")
        )
        with pytest.raises(ConfigError, match=f"metrics: cannot listen at {address}"):
            async with open_peer(config):
                pass
