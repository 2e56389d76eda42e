"""Mooncake's API: the same calls give what Mooncake itself gave, call by call, and a peer of its own comes and goes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pstore import blocking, errors
from p2pstore.integrations import mooncake
from p2pstore.integrations.mooncake.base import OwnPeer
from p2pstore.integrations.mooncake.tensor_format import TensorHeader, encode_header
from p2pstore.local import socket_paths as paths
from p2pstore.values import Gathered
from tests.contract import mooncake_calls
from tests.contract.worlds import peer_process
from tests.odd_tensors import odd_arrays, odd_tensors
from tests.optional import require_torch
from tests.ports import free_port
from tests.waiting import eventually

RECORDED = json.loads(Path(__file__).with_name("mooncake_outcomes.json").read_text())
"""Answers of Mooncake 0.3.13.post1: `scripts/compare_with_mooncake --record`."""

DIFFERENT = mooncake_calls.DIFFERENT
TORCH = ("tensors", "tensor_headers", "safetensors")


@pytest.fixture(scope="module")
def peer() -> Iterator[OwnPeer]:
    peer = OwnPeer(["--memory", str(mooncake_calls.SEGMENT_BYTES), "--listen", "127.0.0.1:0"])
    yield peer
    peer.close()
    assert not peer.folder.exists()


@pytest.fixture(scope="module")
def calls(peer: OwnPeer) -> Iterator[mooncake_calls.Calls]:
    def setup(store: Any) -> int:
        code: int = store.setup({"local_hostname": "localhost", "socket": peer.socket})
        return code

    store = mooncake.MooncakeDistributedStore()
    assert setup(store) == 0
    yield mooncake_calls.Calls(mooncake, store, setup)
    store.close()


def test_every_case_is_recorded_and_no_difference_is_forgotten() -> None:
    assert set(RECORDED) == set(mooncake_calls.CASES)
    assert {name for name, _ in DIFFERENT} <= set(RECORDED)


@pytest.mark.parametrize("name", list(mooncake_calls.CASES))
def test_calls_give_what_mooncake_gives(name: str, calls: mooncake_calls.Calls) -> None:
    if name.startswith(TORCH) and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (scripts/setup --torch)")
    theirs = list(RECORDED[name]) if isinstance(RECORDED[name], list) else RECORDED[name]
    for (case, number), (value, _) in DIFFERENT.items():
        if case == name:
            assert theirs[number] != value, "no difference any more"
            theirs[number] = value
    assert mooncake_calls.outcome(lambda: mooncake_calls.CASES[name](calls, calls.store)) == theirs


def test_before_setup_and_after_close_nothing_is_there_and_nothing_crashes() -> None:
    store = mooncake.MooncakeDistributedStore()
    room = np.zeros(10, np.uint8)
    address = int(room.ctypes.data)
    assert (store.get("k"), store.get_batch(["k"]), store.get_buffer("k")) == (b"", [b""], None)
    assert (store.is_exist("k"), store.batch_is_exist(["k"])) == (-600, [-600])
    assert (store.put("k", b"v"), store.get_size("k"), store.remove("k")) == (-600, -600, -600)
    assert (store.put_from("k", address, 10), store.get_into("k", address, 10)) == (-600, -600)
    assert store.batch_get_into(["k"], [address], [10]) == [-600]
    assert store.register_buffer(address, 10) == -600
    assert (store.remove_all(), store.remove_by_regex("k")) == (-600, -600)
    assert (store.health_check(), store.close()) == (1, 0)


def test_what_lies_in_several_places_is_put_from_there(
    calls: mooncake_calls.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte moves once: nothing is joined first."""
    monkeypatch.delattr(Gathered, "joined")
    monkeypatch.setattr(calls.store.current, "_scratch", None)
    place, array = calls.memory(bytes(range(256)) * 20_000)
    halves = [[place + 2_560_000, place], [place, place + 10]]
    sizes = [[2_560_000, 2_560_000], [10, 5]]
    keys = ["several places 1", "several places 2"]
    assert calls.store.batch_put_from_multi_buffers(keys, halves, sizes) == [0, 0]
    assert calls.store.get(keys[0]) == array[2_560_000:].tobytes() + array[:2_560_000].tobytes()
    assert calls.store.get(keys[1]) == bytes(range(15))
    assert calls.store.put_parts("several places 3", b"ab", array, b"c") == 0
    assert calls.store.get("several places 3") == b"ab" + array.tobytes() + b"c"
    code = calls.store.put_from_with_metadata("several places 4", place, place + 1, 9, 3)
    assert (code, calls.store.get("several places 4")) == (0, bytes([1, 2, 3, *range(9)]))


def test_batches_are_not_loops(calls: mooncake_calls.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    store = calls.store
    keys = [f"one go {number}" for number in range(20)]
    values = [bytes([number]) * (1000 + number) for number in range(20)]
    for name in ("put", "get", "get_into", "take_lease"):
        monkeypatch.delattr(blocking.BlockingClient, name)
    assert store.put_batch(keys, values) == 0
    assert store.get_batch([*keys, "one go nobody"]) == [*values, b""]
    assert [bytes(each) for each in store.batch_get_buffer(keys)] == values
    assert store.batch_get_session_start([*keys, "one go nobody"]) == [0] * 20 + [-704]
    place, array = calls.memory(bytes(4000))
    places = [place + 200 * number for number in range(20)]
    ranges = [[each] for each in places], [[100]] * 20, [[900]] * 20
    assert store.batch_get_into_multi_buffer_ranges(keys, *ranges) == [100] * 20
    assert store.batch_get_session_end(keys) == 0
    assert [array[200 * number] for number in range(20)] == list(range(20))
    columns = [[[0]] * 20], [[[500]] * 20], [[[7]] * 20]
    assert store.get_into_ranges([place], [keys], *columns) == [[[7]] * 20]
    assert array[0] == 19
    written = [f"one go {number} written" for number in range(20)]
    assert store.batch_put_session_start(written, [5] * 20) == [0] * 20
    starts = [[place]] * 20, [[5]] * 20, [[0]] * 20
    assert store.batch_put_from_multi_buffer_ranges(written, *starts) == [5] * 20
    assert store.batch_put_session_end([*written, "one go nobody"]) == [0] * 20 + [-600]
    assert store.get_batch(written) == [array[:5].tobytes()] * 20


def test_a_soft_pin_that_finds_no_copy_here_fails_nothing(
    calls: mooncake_calls.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value went to another peer, for want of room here."""
    pin = blocking.BlockingClient.pin

    def pinned(client: blocking.BlockingClient, key: str, *args: Any, **options: Any) -> Any:
        if key.endswith("elsewhere"):
            raise errors.NoSuchKey(key)
        return pin(client, key, *args, **options)

    monkeypatch.setattr(blocking.BlockingClient, "pin", pinned)
    config = mooncake.ReplicateConfig()
    config.soft_pin_action, config.soft_pin_ttl_ms = mooncake.SoftPinAction.ENABLE, 5000
    keys = ["pinned for a while", "pinned for a while elsewhere", "pinned for a while, too"]
    assert calls.store.put_batch(keys, [b"value"] * 3, config) == 0
    assert calls.store.put(keys[1] + " and elsewhere", b"value", config) == 0
    assert calls.store.get_batch(keys) == [b"value"] * 3


def test_batches_of_tensors_are_not_loops(
    calls: mooncake_calls.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (scripts/setup --torch)")
    store = calls.store
    keys = [f"tensors in one go {number}" for number in range(20)]
    tensors = [torch.arange(number + 1, dtype=torch.float32) for number in range(20)]
    for name in ("put", "get", "get_into", "take_lease"):
        monkeypatch.delattr(blocking.BlockingClient, name)
    assert store.batch_put_tensor(keys, tensors) == [0] * 20
    got = store.batch_get_tensor([*keys, "tensors in one go nobody"])
    assert got[20] is None
    assert all(torch.equal(*pair) for pair in zip(got, tensors, strict=False))
    place, _ = calls.memory(bytes(20 * 4096))
    places = [place + 4096 * number for number in range(20)]
    there = store.batch_get_tensor_into(keys, places, [4096] * 20)
    assert all(torch.equal(*pair) for pair in zip(there, tensors, strict=True))
    some = store.batch_get_tensor_into(keys[:3], [places[0], 0, places[2]], [4096] * 3)
    assert [each is None for each in some] == [False, True, False]
    rooms = [torch.zeros(number + 1) for number in range(20)]
    assert store.batch_get_tensor_into_cuda(keys, rooms) == [0] * 20
    assert all(torch.equal(*pair) for pair in zip(rooms, tensors, strict=True))
    lengths = [len(value) for value in store.get_batch(keys)]
    assert store.batch_upsert_tensor_from(keys, places[::-1], lengths[::-1]) == [0] * 20
    again = store.batch_get_tensor(keys)
    assert all(torch.equal(*pair) for pair in zip(again, tensors[::-1], strict=True))
    assert store.put_tensor_with_tp("tensors in one go", torch.arange(8.0), 0, 4, 0) == 0
    [shard] = store.batch_get_tensor_with_tp(["tensors in one go"], 1, 4)
    assert shard.tolist() == [2.0, 3.0]


def test_odd_tensors_are_the_code_of_their_item_and_the_others_are_stored_and_filled(
    calls: mooncake_calls.Calls,
) -> None:
    torch = require_torch()
    store, whole = calls.store, torch.arange(16.0).reshape(4, 4)
    assert store.put_tensor("for odd tensors", whole) == 0
    ways = ("", "_with_tp", "_with_parallelism")
    for name, odd in {**odd_arrays(), **odd_tensors()}.items():
        for way in ways:
            put = getattr(store, f"batch_put_tensor{way}")
            codes = put([f"{way} {name} {number}" for number in range(3)], [whole, odd, whole])
            stored = name in ("expanded", "overlapping")  # these can be copied
            assert codes == [0, 0 if stored else -600, 0], (name, way)
        first, last = torch.zeros(4, 4), torch.zeros(4, 4)
        filled = store.batch_get_tensor_into_cuda(
            ["for odd tensors", "for odd tensors", "nobody has it", "for odd tensors"],
            [first, odd, first, last],
        )
        assert filled == [0, -600, -704, 0], name
        assert torch.equal(first, whole), name
        assert torch.equal(last, whole), name
    assert torch.equal(store.get_tensor(" expanded 1"), torch.zeros(4, 4))


def test_tensors_of_all_usual_kinds_are_stored_and_filled(calls: mooncake_calls.Calls) -> None:
    torch = require_torch()
    store, whole = calls.store, torch.arange(16.0).reshape(4, 4)
    with torch.inference_mode():
        in_inference = torch.zeros(4, 4)
    rooms = {
        "parameter": torch.nn.Parameter(torch.zeros(4, 4)),
        "computed": torch.nn.Parameter(torch.zeros(4, 4)) * 2,
        "turned": torch.zeros(4, 4).t(),
        "lazily negated": torch._neg_view(torch.zeros(4, 4)),
        "part": torch.zeros(8, 8)[::2, ::2],
        "in inference": in_inference,
    }
    for name, room in rooms.items():
        assert store.put_tensor(f"usual {name}", room + whole) == 0
        assert store.batch_get_tensor_into_cuda([f"usual {name}"], [room]) == [0], name
        assert torch.equal(room, whole), name
        assert store.batch_put_tensor([f"again {name}"], [room]) == [0], name
        assert torch.equal(store.get_tensor(f"again {name}"), whole), name


def test_an_item_that_cannot_be_takes_no_other_down(calls: mooncake_calls.Calls) -> None:
    store, long_key = calls.store, "k" * 2000
    torch = require_torch()
    place, _ = calls.memory(b"0123456789")
    keys = ["one of three", "", "three of three"]
    nowhere = [place, 2**60, place]
    assert store.batch_put_from(keys, [place] * 3, [5, 5, 5]) == [0, -600, 0]
    assert store.batch_put_from(["nowhere 1", "nowhere 2", "nowhere 3"], nowhere, [5] * 3) == [
        *(0, -600, 0)
    ]
    assert store.batch_upsert_from(["nowhere 1", "nothing 2"], [place] * 2, [5, 0]) == [0, -600]
    several = [[place, place], [2**60], [place], [place]]
    sizes = [[1, 2], [5], [-5], [5]]
    keys = [f"several odd {number}" for number in range(4)]
    assert store.batch_put_from_multi_buffers(keys, several, sizes) == [0, -600, -600, 0]
    assert store.batch_upsert_from_multi_buffers(keys[3:], [[place]], [[7]]) == [0]
    assert store.get(keys[3]) == b"0123456"
    assert store.batch_put_session_start(["begun odd", long_key], [5, 5]) == [0, -600]
    written = store.batch_put_from_multi_buffer_ranges(
        ["begun odd", "begun odd"], [[-1], [place]], [[5], [5]], [[0], [0]]
    )
    assert written == [-600, 5]
    assert store.batch_put_session_revoke(["begun odd"]) == [0]
    tensor = torch.ones(4)
    wrong = mooncake.TensorParallelism([mooncake.ParallelAxis("tp", 0, "x", 0)])  # type: ignore[arg-type]
    codes = store.batch_put_tensor_with_parallelism(
        ["axes 1", "axes 2", "axes 3"], [tensor] * 3, [None, wrong, None]
    )
    assert codes == [0, -600, 0]
    targets = [None, mooncake.ReadTarget("nonsense"), None]
    got = store.batch_get_tensor_with_parallelism(["axes 1"] * 3, targets)
    assert [each is None for each in got] == [False, True, False]


NO_NUMBERS: list[Any] = [None, -1, 2**70, 1.5, "5"]
NO_KEYS: list[Any] = [["a list"], None, 5, b"bytes", "", "k" * 2000, "\ud800"]


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
def test_what_is_no_number_takes_no_other_item_down(calls: mooncake_calls.Calls, wrong: Any) -> None:
    store = calls.store
    place, _ = calls.memory(b"0123456789")
    room, array = calls.memory(bytes(64))
    keys = [f"no number {wrong!r} {number}" for number in range(3)]
    for places, sizes in (([place] * 3, [5, wrong, 5]), ([place, wrong, place], [5] * 3)):
        assert store.batch_upsert_from(keys, places, sizes) == [0, -600, 0]
        several = [[each] for each in places], [[each] for each in sizes]
        assert store.batch_upsert_from_multi_buffers(keys, *several) == [0, -600, 0]
    same = [keys[0]] * 3
    for places, sizes in (([room] * 3, [5, wrong, 5]), ([room, wrong, room], [5] * 3)):
        assert store.batch_get_into(same, places, sizes) == [5, -600, 5]
        several = [[each] for each in places], [[each] for each in sizes]
        assert store.batch_get_into_multi_buffers(same, *several) == [5, -600, 5]
        assert store.batch_get_tensor_into(same, places, sizes) == [None] * 3
    assert store.batch_upsert_from_multi_buffers(keys, [[place], wrong, [place]], [[5]] * 3) == [
        0,
        -600,
        0,
    ]
    good, bad = [[0], [0], [0]], [[0], [wrong], [0]]
    fives, one_bad = [[5], [5], [5]], [[5], [wrong], [5]]
    for into, out_of, lengths in ((bad, good, fives), (good, bad, fives), (good, good, one_bad)):
        array[:] = 0
        got = store.get_into_ranges([room], [same], [into], [out_of], [lengths])
        assert got == [[[5], [-600], [5]]]
    assert (
        store.get_into_ranges([room], [same], [[[0], wrong, [0]]], [good], [fives])[0][::2] == [[5]] * 2
    )
    assert store.batch_put_session_start(keys, [5, wrong, 5]) == [-705, -600, -705]
    fresh = [f"{key} begun" for key in keys]
    assert store.batch_put_session_start(fresh, [5, wrong, 5]) == [0, -600, 0]
    written = [[[place], [wrong], [place]], fives, good], [[[place]] * 3, [[5], wrong, [5]], good]
    for arguments in written:
        assert store.batch_put_from_multi_buffer_ranges([fresh[0]] * 3, *arguments) == [5, -600, 5]
    assert store.batch_put_session_revoke(fresh) == [0, -600, 0]
    codes = store.batch_put_tensor_from(keys, [place] * 3, [5, wrong, 5])
    assert (
        codes
        == store.batch_put_tensor_with_tp_from(keys, [place] * 3, [5, wrong, 5], 0, 2)
        == [-600] * 3
    )
    assert store.put_batch([keys[0], "never stored"], [b"1", wrong]) == -600
    assert store.alloc_from_mem_pool(2**70) == 0


@pytest.mark.parametrize("wrong", NO_KEYS, ids=lambda key: f"{key!r:.8}")
def test_what_is_no_key_takes_no_other_item_down(calls: mooncake_calls.Calls, wrong: Any) -> None:
    torch = require_torch()
    store = calls.store
    assert store.put_tensor("a good key", torch.ones(2)) == 0
    keys = ["a good key", wrong]
    assert store.batch_is_exist(keys) == store.batch_probe_key(keys) == [1, 0]
    assert list(store.batch_get_replica_desc(keys)) == keys[:1]
    begun = ["begun beside no key", wrong]
    place, _ = calls.memory(b"12345")
    parts = [[place]] * 2, [[5]] * 2, [[0]] * 2
    assert store.batch_put_session_start(begun, [5, 5]) == [0, -600]
    assert store.batch_put_from_multi_buffer_ranges(begun, *parts) == [5, -600]
    assert store.batch_put_session_end(begun) == [0, -600]
    assert store.get(begun[0]) == b"12345"
    assert store.batch_put_session_revoke(begun) == [-600, -600]
    assert store.batch_get_session_end(begun) == store.remove(begun[0]) == 0
    assert store.batch_put_tensor([wrong], [torch.ones(2)]) == [-600]
    for put in (store.batch_put_tensor_with_tp, store.batch_pub_tensor_with_tp):
        assert put([wrong, "cut"], [torch.ones(2)] * 2, tp_size=2) == [-600, 0]
    axes = mooncake.TensorParallelism([mooncake.ParallelAxis("tp", 0, 2, 0)])
    put_parallel = store.batch_put_tensor_with_parallelism
    assert put_parallel([wrong, "cut so"], [torch.ones(2)] * 2, [axes, axes]) == [-600, 0]
    assert store.batch_replica_clear(keys, store.get_hostname()) == ["a good key"]


def test_addresses_and_sizes_may_be_arrays(calls: mooncake_calls.Calls) -> None:
    store = calls.store
    place, _ = calls.memory(b"0123456789")
    room, array = calls.memory(bytes(20))
    places, sizes = np.array([[place, place + 5]] * 2), np.array([[5, 5]] * 2)
    keys = ["of arrays 1", "of arrays 2"]
    assert store.batch_put_from_multi_buffers(keys, places, sizes) == [0, 0]
    rooms = np.array([[room, room + 5], [room + 10, room + 15]])
    assert store.batch_get_into_multi_buffers(keys, rooms, sizes) == [10, 10]
    assert array[:20].tobytes() == b"0123456789" * 2
    assert store.batch_get_into(keys, rooms[:, 0], np.array([10, 10])) == [10, 10]


def test_what_python_cannot_make_a_pattern_of_is_a_code(calls: mooncake_calls.Calls) -> None:
    for pattern in ("(", "a{99999999999999}", "(" * 5000 + ")" * 5000):
        assert calls.store.remove_by_regex(pattern) == -600


def test_a_header_with_a_shape_that_cannot_be_takes_no_other_tensor_down(
    calls: mooncake_calls.Calls,
) -> None:
    torch = require_torch()
    store = calls.store
    shape = (0, 2**62, 4)
    assert store.put("no shape", encode_header(TensorHeader("float32", shape, 0, shape))) == 0
    assert store.put_tensor("some shape", torch.ones(2)) == 0
    got = store.batch_get_tensor(["some shape", "no shape", "some shape"])
    assert [each is None for each in got] == [False, True, False]


def test_ranges_that_do_not_fit_each_other_are_a_code_each(calls: mooncake_calls.Calls) -> None:
    """As Mooncake 0.3.13.post1 answers, but for a key without ranges, which has a code as well."""
    store = calls.store
    place, array = calls.memory(bytes(100))
    assert store.put_batch(["ranges a", "ranges b"], [b"a" * 50, b"b" * 50]) == 0
    keys, zero, five, both = [["ranges a"]], [[[0]]], [[[5]]], [["ranges a", "ranges b"]]
    for arguments, wanted in (
        (([place], keys, zero, zero, five), [[[5]]]),
        (([place], both, zero, zero, five), [[[-600], [-600]]]),
        (([place], both, [[[0], [1]]], [[[0], [1]]], five), [[[-600], [-600]]]),
        (([place, place], keys, zero, zero, five), [[[-600]], [[-600]]]),
        (([place], keys, zero, zero, []), [[[-600]]]),
        (([place], keys, [], zero, five), [[[-600]]]),
        (([place], keys, [[[0, 1]]], zero, five), [[[-600, -600]]]),
        (([place], keys, zero, zero, [[[5, 6]]]), [[[-600]]]),
        (([place], keys, zero, zero, [[]]), [[[-600]]]),
        (([place], keys, [[[]]], [[[]]], five), [[[-600]]]),
        (([], keys, zero, zero, five), []),
        (([place], [["ranges a", "nobody"]], *[[[[0], [9]]]] * 2, [[[5], [5]]]), [[[5], [-704]]]),
    ):
        array[:] = 0
        assert store.get_into_ranges(*arguments) == wanted, arguments
        assert array.sum() == (5 * ord("a") if wanted and wanted[0][0] == [5] else 0)


def test_remove_all_stays_in_the_namespace_of_the_tenant(
    peer: OwnPeer, calls: mooncake_calls.Calls
) -> None:
    tenant = mooncake.MooncakeDistributedStore()
    assert tenant.setup({"tenant_id": "somebody", "socket": str(peer.socket)}) == 0
    calls.store.put("shared name", b"of the default tenant")
    assert tenant.get("shared name") == b""
    assert tenant.put("shared name", b"of somebody") == 0
    assert tenant.remove_all() == 1
    assert calls.store.get("shared name") == b"of the default tenant"
    tenant.close()


CHILD = """
import sys, time
from p2pstore.integrations.mooncake import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", "64MB", "16MB", "tcp", "", sys.argv[1]) == 0
assert store.put("of the child", b"value" * 1000) == 0
print(store.current._own_peer.process_id, store.get_hostname(), flush=True)
sys.stdin.read()
"""


def test_programs_that_name_one_address_find_each_other_and_leave_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first peer takes the address where a master would be; the second joins it. When their programs end, by
    `close` or by kill -9, so do the peers. A peer that is killed under its program is started again."""
    monkeypatch.setattr(paths, "live_sockets", lambda: [])
    monkeypatch.delenv("MOONCAKE_P2P_SOCKET", raising=False)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    store = mooncake.MooncakeDistributedStore()
    assert store.setup("localhost", "etcd://10.0.0.1:2379", 64 << 20, 0, "tcp", "", address) == 0
    assert own_peer(store).ready["control"] == address
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        assert child.stdout is not None
        peer_id, hostname = child.stdout.readline().split()
        eventually(lambda: store.get("of the child") == b"value" * 1000)
        assert store.is_exist("of the child") == 1
        (replica,) = store.get_replica_desc("of the child")
        where = replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        assert where == hostname.decode()
        assert store.put("with a copy", b"value", replicated(2)) == 0
        child.send_signal(signal.SIGKILL)
        eventually(lambda: not is_running(int(peer_id)))
        assert store.get("with a copy") == b"value"
        os.kill(own_peer(store).process_id, signal.SIGKILL)
        eventually(lambda: store.put("with another peer", b"value") == 0)
        assert (store.get("with another peer"), store.health_check()) == (b"value", 0)
        assert own_peer(store).ready["control"] == address
        own = own_peer(store).process_id
        store.close()
        assert not is_running(own)
    finally:
        child.kill()
        child.communicate()
        store.close()


def test_a_setup_that_fails_says_why_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A code, and one line in the log."""

    def said(code: int) -> str:
        (record,) = [each for each in caplog.records if each.name == "p2pstore.mooncake"]
        caplog.clear()
        assert (code < 0, store.health_check()) == (True, 1)
        return record.getMessage()

    monkeypatch.setattr(paths, "live_sockets", lambda: [])
    monkeypatch.setenv("MOONCAKE_P2P_SOCKET", str(tmp_path / "nobody.sock"))
    store = mooncake.MooncakeDistributedStore()
    assert "nobody.sock" in said(store.setup("localhost"))
    assert "nobody.sock" in said(store.setup_dummy(1, 1, str(tmp_path / "nobody.sock")))
    monkeypatch.delenv("MOONCAKE_P2P_SOCKET")
    monkeypatch.setenv("MOONCAKE_P2P_TRANSPORT", "nonsense")
    assert "nonsense" in said(store.setup("localhost"))
    for name, value in (("global_segment_size", "50%"), ("master_server_addr", "::1:21311")):
        assert name in said(code := store.setup({"local_hostname": "x", name: value}))
        assert code == mooncake.ErrorCode.INVALID_PARAMS
    assert "local_buffer_size" in said(store.setup_dummy(1, "x", ""))  # type: ignore[arg-type]
    assert "server_address" in said(store.setup_dummy(1, 1, "10.0.0.1:99999"))
    (tmp_path / "file").touch()
    for path in ("file/below", "\0"):
        values = {"enable_ssd_offload": True, "ssd_offload_path": f"{tmp_path}/{path}"}
        assert "ssd_offload_path" in said(store.setup(values))


def test_a_peer_that_was_restarted_is_used_again(tmp_path: Path) -> None:
    store = mooncake.MooncakeDistributedStore()
    with peer_process(tmp_path, "restarted") as running:
        assert store.setup({"local_hostname": "localhost", "socket": running.socket}) == 0
        assert store.put("k", b"before") == 0
        assert store.health_check() == 0
        running.process.kill()
        running.process.wait()
        eventually(lambda: store.put("k", b"meanwhile") == -900)
        assert (store.get("k"), store.is_exist("k"), store.health_check()) == (b"", 0, 2)
    with peer_process(tmp_path, "restarted"):
        eventually(lambda: store.put("k", b"after") == 0)
        assert (store.get("k"), store.health_check()) == (b"after", 0)
        store.close()


def test_a_copy_task_makes_copies_as_far_as_there_are_peers(peer: OwnPeer) -> None:
    store = mooncake.MooncakeDistributedStore()
    assert store.setup({"socket": str(peer.socket)}) == 0
    store.put("copied", b"value" * 100)
    mounted = store.allocate_and_mount_segment(16 << 20)
    assert mounted["ret"] == 0
    (own,) = (each.get_memory_descriptor() for each in store.get_replica_desc("copied"))
    name = own.buffer_descriptor.transport_endpoint
    assert name == store.get_hostname()
    number, code = store.create_copy_task("copied", [name])
    assert code == 0
    eventually(lambda: _status(store, number) == mooncake.TaskStatus.SUCCESS)
    eventually(lambda: len(store.get_replica_desc("copied")) == 2)
    number, code = store.create_copy_task("copied", [name])
    eventually(lambda: _status(store, number) == mooncake.TaskStatus.FAILED)
    task, _ = store.query_task(number)
    assert task is not None
    assert "2 copies of 3" in task.message
    assert store.unmount_and_free_segment(mounted["segment_ids"]) == 0
    store.close()


def _status(store: mooncake.MooncakeDistributedStore, number: tuple[int, int]) -> Any:
    task, code = store.query_task(number)
    assert (task is not None, code) == (True, 0)
    return task.status if task is not None else None


def own_peer(store: mooncake.MooncakeDistributedStore) -> OwnPeer:
    peer = store.current._own_peer
    assert peer is not None
    return peer


def replicated(copies: int) -> mooncake.ReplicateConfig:
    config = mooncake.ReplicateConfig()
    config.replica_num = copies
    return config


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
