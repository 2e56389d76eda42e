"""A store of Mooncake's API that is set up again and again: nothing of one set-up is seen by the next."""

import gc
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from p2pstore.integrations import mooncake
from p2pstore.integrations.mooncake import replicas as segments
from p2pstore.integrations.mooncake.base import OwnPeer, ssd_folder
from p2pstore.local import socket_paths as paths
from p2pstore.local.local_connection import LocalConnection
from p2pstore.objects import MIB
from tests.ports import free_port
from tests.waiting import eventually

DEADLINE_SECONDS = 60.0
LENGTH = 100_000
Store = mooncake.MooncakeDistributedStore


@pytest.fixture(scope="module")
def peer() -> Iterator[OwnPeer]:
    peer = OwnPeer(["--memory", "128MiB", "--listen", "127.0.0.1:0"])
    yield peer
    peer.close()


@pytest.fixture
def store(peer: OwnPeer) -> Iterator[Store]:
    """One that was set up, closed, and set up again."""
    store = Store()
    for _ in range(2):
        assert store.close() == 0
        set_up(store, peer)
    yield store
    assert (store.close(), store.close(), store.health_check()) == (0, 0, 1)


def set_up(store: Store, peer: OwnPeer, tenant: str = "default") -> None:
    assert store.setup({"socket": str(peer.socket), "tenant_id": tenant}) == 0


def room(length: int = LENGTH) -> tuple[int, np.ndarray[Any, Any]]:
    array = np.zeros(length, np.uint8)
    return int(array.ctypes.data), array


def get_session(store: Store) -> Callable[[], Any]:
    assert store.upsert("session", b"of this set-up") == 0
    assert store.batch_get_session_start(["session"]) == [0]
    address, array = room()
    ranges = ["session"], [[address]], [[2]], [[0]]
    assert store.batch_get_into_multi_buffer_ranges(*ranges) == [2]

    def after() -> Any:
        array[:] = 0
        codes = store.batch_get_into_multi_buffer_ranges(*ranges)
        return codes, store.batch_get_session_end(["session"]), int(array.sum())

    return after


def put_session(store: Store) -> Callable[[], Any]:
    assert store.batch_put_session_start(["begun"], [5]) == [0]
    address, _ = room()

    def after() -> Any:
        written = store.batch_put_from_multi_buffer_ranges(["begun"], [[address]], [[5]], [[0]])
        ended = store.batch_put_session_end(["begun"])
        begun = store.batch_put_session_start(["begun"], [5])
        return written, ended, begun, store.batch_put_session_revoke(["begun"])

    return after


def registered(store: Store) -> Callable[[], Any]:
    address, array = room()
    assert store.register_buffer(address, LENGTH) == 0
    assert store.register_buffer(address, LENGTH) == -600

    def after() -> Any:
        unregister, size = store.unregister_buffer, len(array)
        return unregister(address), store.register_buffer(address, size), unregister(address)

    return after


def pools(store: Store) -> Callable[[], Any]:
    pool = mooncake.BufferPool(store, prewarm_size=1, prewarm_count=1)
    lease = pool.acquire(10)
    address = lease.ptr

    def after() -> Any:
        with pytest.raises(RuntimeError, match="closed"):
            pool.acquire(1)
        lease.buffer[:] = bytes(10)
        code = store.unregister_buffer(address)
        lease.release()
        pool.close()
        another = mooncake.BufferPool(store)
        with another.acquire(5) as own:
            return code, store.register_buffer(own.ptr, 1)

    return after


def task(store: Store) -> Callable[[], Any]:
    assert store.put("task", b"value") == 0
    number, code = store.create_copy_task("task", [store.get_hostname()])
    assert code == 0
    assert store.query_task(number)[1] == 0
    return lambda: store.query_task(number)


def segment(store: Store) -> Callable[[], Any]:
    mounted = store.allocate_and_mount_segment(8 << 20)
    assert mounted["ret"] == 0
    return lambda: store.unmount_and_free_segment(mounted["segment_ids"])


STATES: dict[str, tuple[Callable[[Store], Callable[[], Any]], Any]] = {
    "get sessions": (get_session, ([-600], 0, 0)),
    "put sessions": (put_session, ([-600], [-600], [0], [0])),
    "registered buffers": (registered, (-600, 0, 0)),
    "pools": (pools, (-600, -600)),
    "tasks": (task, (None, -1400)),
    "segments": (segment, -1),
}


@pytest.mark.parametrize("kind", list(STATES))
def test_what_one_set_up_made_the_next_does_not_see(kind: str, store: Store, peer: OwnPeer) -> None:
    make, wanted = STATES[kind]
    after = make(store)
    store.close()
    set_up(store, peer)
    assert after() == wanted
    make(store)  # and the next can have its own


def test_a_call_without_a_session_gets_nothing_of_another_tenant(store: Store, peer: OwnPeer) -> None:
    after = get_session(store)
    store.close()
    set_up(store, peer, "another tenant")
    assert store.upsert("session", b"of the other") == 0
    assert after() == ([-600], 0, 0)
    assert store.get("session") == b"of the other"


def test_what_is_said_beside_a_dict_counts_as_well(
    peer: OwnPeer, caplog: pytest.LogCaptureFixture
) -> None:
    store, values = Store(), {"socket": str(peer.socket)}
    assert store.setup(values, master_server_addr="host:99999") == -600
    assert store.setup(values, global_segment_size="16 apples") == -600
    assert [each.getMessage()[:26] for each in caplog.records] == [
        *("setup: master_server_addr:", "setup: global_segment_size")
    ]
    assert store.setup(values | {"tenant_id": "first"}, tenant_id="second") == 0
    assert store.current._settings is not None
    assert store.current._settings.namespace == "first"
    store.close()


def test_set_up_twice_is_refused_and_changes_nothing(
    store: Store, peer: OwnPeer, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.batch_put_session_start(["kept"], [1]) == [0]
    assert store.setup({"socket": str(peer.socket), "tenant_id": "other"}) == -600
    assert "close() it first" in caplog.text
    assert store.batch_put_session_revoke(["kept"]) == [0]
    assert store.setup({"global_segment_size": "x"}) == -600
    assert store.health_check() == 0


def test_memory_given_out_is_freed_with_the_store(store: Store, peer: OwnPeer) -> None:
    assert store.alloc_from_mem_pool(100) > 0
    assert store.alloc_from_mem_pool(0) == 0
    calls = store.current
    store.close()
    assert store.alloc_from_mem_pool(100) == 0
    del calls
    gc.collect()
    set_up(store, peer)


def test_a_segment_that_is_mounted_while_the_store_is_closed_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Mounted:
        """A peer that has just started when the store is closed."""

        ready: ClassVar = {"joined": True, "peer_id": "nobody heard of it"}

        def __init__(self, options: list[str]) -> None:
            store.close()

        def close(self) -> None:
            ended.append("closed")

    monkeypatch.setattr(segments, "OwnPeer", Mounted)
    assert store.allocate_and_mount_segment(8 << 20)["ret"] == -1
    assert ended == ["closed"]


def test_closing_while_others_call_gives_codes_and_never_wrong_bytes(peer: OwnPeer) -> None:
    """Each tenant's values are of its own letter; a call that succeeds has those of one tenant, whole."""
    store = Store()
    keys = [f"in flight {number}" for number in range(8)]
    for tenant in "ab":
        set_up(store, peer, tenant)
        assert store.put_batch(keys, [tenant.encode() * LENGTH] * len(keys)) == 0
        store.close()
    set_up(store, peer, "a")
    ended = threading.Event()
    problems: list[str] = []
    good = [0] * 4

    def check(values: list[bytes], which: int) -> None:
        for value in values:
            if value not in (b"a" * LENGTH, b"b" * LENGTH):
                problems.append(f"{len(value)} bytes of {sorted(set(value))}")
        good[which] += len(values)

    def get() -> None:
        check([value for value in store.get_batch(keys) if value], 0)

    def sessions() -> None:
        address, array = room()
        if store.batch_get_session_start(keys[:1]) == [0]:
            done = store.batch_get_into_multi_buffer_ranges(keys[:1], [[address]], [[LENGTH]], [[0]])
            if done == [LENGTH]:
                check([array.tobytes()], 1)
        store.batch_get_session_end(keys[:1])

    def ranges() -> None:
        address, array = room()
        done = store.get_into_ranges([address], [keys[:1]], [[[0]]], [[[0]]], [[[LENGTH]]])
        if done == [[[LENGTH]]]:
            check([array.tobytes()], 2)

    def buffers() -> None:
        addresses = [room() for _ in keys]
        codes = store.batch_get_into(keys, [each for each, _ in addresses], [LENGTH] * len(keys))
        check(
            [array.tobytes() for (_, array), code in zip(addresses, codes, strict=True) if code > 0], 3
        )

    def others() -> None:
        address, _ = room(16)
        store.health_check(), store.get_hostname(), store.is_exist("x"), store.get_size(keys[0])
        store.register_buffer(address, 16), store.put_from("x", address, 16)
        store.unregister_buffer(address), store.remove("x"), store.get_replica_desc(keys[0])
        store.batch_put_session_start(["y"], [5]), store.batch_put_session_end(["y"])
        store.batch_is_exist(keys), store.get_buffer(keys[0]), store.batch_get_buffer(keys)
        store.query_task((1, 2)), store.get_tensor("x"), store.remove_by_regex("nothing")
        store.alloc_from_mem_pool(10), store.batch_replica_clear(["x"], store.get_hostname())

    def again(call: Callable[[], None]) -> None:
        while not ended.is_set():
            try:
                call()
            except Exception as error:
                problems.append(repr(error))
                return

    threads = [
        threading.Thread(target=again, args=(each,)) for each in (get, sessions, ranges, buffers, others)
    ]
    for each in threads:
        each.start()
    for number in range(30):
        before = list(good)
        eventually(
            lambda before=before: (
                problems  # type: ignore[misc]
                or all(now > then for now, then in zip(good, before, strict=True))
            )
        )
        store.close()
        set_up(store, peer, "ab"[number % 2])
    ended.set()
    for each in threads:
        each.join(DEADLINE_SECONDS)
    store.close()
    assert not problems


def test_segments_have_the_name_of_the_host_that_was_given(peer: OwnPeer) -> None:
    store = Store()
    for given in ("node7", "10.0.0.5", "node7:12345", "[fd00::1]"):
        assert store.setup({"local_hostname": given, "socket": str(peer.socket)}) == 0
        name = store.get_hostname()
        assert name.startswith(given)
        assert name.rpartition(":")[2].isdigit()
        assert store.put_batch(["named 1", "named 2"], [b"1", b"2"]) == 0
        (copy,) = store.get_replica_desc("named 1")
        assert copy.get_memory_descriptor().buffer_descriptor.transport_endpoint == name
        assert store.batch_replica_clear(["named 1"], "nobody:1") == []
        assert store.batch_replica_clear(["named 1", "nobody has it"], name) == ["named 1"]
        assert store.batch_is_exist(["named 1", "named 2"]) == [0, 1]
        assert store.batch_replica_clear(["named 2"], peer.ready["data"][0]) == ["named 2"]
        store.close()


def test_what_changes_nothing_is_said_once(
    store: Store, peer: OwnPeer, caplog: pytest.LogCaptureFixture
) -> None:
    config = mooncake.ReplicateConfig()
    config.group_ids, config.preferred_segments = ["g"], ["node7:1"]
    config.preferred_segment, config.nof_replica_num, config.dfs_replica_num = "x", 1, 1
    config.data_type = mooncake.ObjectDataType.KVCACHE
    for number in range(3):
        assert store.put(f"preferences {number}", b"value", config) == 0
        assert store.put_batch([f"preferences b{number}"], [b"value"], config) == 0
        assert store.batch_is_exist(["k"], mooncake.ExistOptions(lease_select=1)) == [0]
        assert store.unmount_local_disk_segment(5) == 0
    said = [each.getMessage() for each in caplog.records]
    for text in ("group_ids", ".preferred_segments", ".preferred_segment ", "nof_replica_num"):
        assert sum(text in each for each in said) == 1, text
    for text in ("dfs_replica_num", "data_type", "ExistOptions", "unmount_local_disk_segment"):
        assert sum(text in each for each in said) == 1, text
    caplog.clear()
    store.close()
    values = {"socket": str(peer.socket), "master_server_addr": "127.0.0.1:1", "enigne": 5}
    assert store.setup(values | {"global_segment_size": "1e8"}) == 0
    said = [each.getMessage() for each in caplog.records]
    assert sum("global_segment_size, master_server_addr count only" in each for each in said) == 1
    assert sum("enigne" in each for each in said) == 1


def test_ranks_of_one_host_may_name_one_folder_and_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a configuration file that all ranks read. A folder that is free again is used again."""
    monkeypatch.setattr(paths, "live_sockets", lambda: [])
    monkeypatch.delenv("MOONCAKE_P2P_SOCKET", raising=False)
    monkeypatch.setenv("MOONCAKE_P2P_SSD_CAPACITY", "256MiB")
    values = {
        **{"global_segment_size": "8MB", "enable_ssd_offload": True, "ssd_offload_path": tmp_path},
        **{"enable_client_http_server": True, "client_http_port": free_port("127.0.0.1")},
    }
    stores = [Store() for _ in range(2)]
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda store=store: codes.append(store.setup(values)))
        for store in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert codes == [0, 0]
    peers = [each.current._own_peer for each in stores]
    metrics = {peer.ready["metrics"] for peer in peers if peer is not None}
    assert len(metrics) == 2
    for address in metrics:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.status == 200
    assert sorted(each.name for each in tmp_path.iterdir()) == ["store-0", "store-1"]
    assert all((each / "cold.log").exists() for each in tmp_path.iterdir())
    with ssd_folder(str(tmp_path)) as (folder, _):
        assert folder.endswith("store-2")
    for each in stores:
        each.close()
    with ssd_folder(str(tmp_path)) as (folder, _):
        assert folder.endswith("store-0")


def test_no_call_waits_for_a_peer_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asking: list[str] = []
    frame = LocalConnection._frame

    def noted(self: LocalConnection, *arguments: Any) -> Any:
        asking.append(threading.current_thread().name)
        return frame(self, *arguments)

    monkeypatch.setattr(LocalConnection, "_frame", noted)
    peer = OwnPeer(["--memory", str(64 * MIB), "--listen", "127.0.0.1:0"])
    store = Store()
    assert store.setup({"local_hostname": "localhost", "socket": peer.socket}) == 0
    assert (store.put("k", b"value"), store.is_exist("k")) == (0, 1)
    os.kill(peer.process_id, signal.SIGSTOP)
    eventually(lambda: store.put("new", b"value") == -901)
    asking.clear()
    assert store.put("new", b"value") == -901
    eventually(
        lambda: store.batch_is_exist(["k", "new"]) == [-1, -1]
    )  # its table was trusted for a moment
    assert (store.is_exist("new"), store.health_check()) == (0, 2)
    assert (store.is_exist("k"), store.get("k")) == (1, b"value"), "its memory can be read"
    assert threading.current_thread().name not in asking
    os.kill(peer.process_id, signal.SIGCONT)
    eventually(lambda: store.put("new", b"value") == 0)
    assert (store.get("k"), store.health_check()) == (b"value", 0)
    store.close()
    peer.close()
