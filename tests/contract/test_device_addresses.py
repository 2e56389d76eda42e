"""Addresses that Mooncake's calls are given: of this process, of a GPU, of neither. A GPU where there is one, and a
driver that stands for one everywhere."""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pstore.errors import GpuCopyFailed
from p2pstore.integrations import mooncake
from p2pstore.integrations.mooncake import memory as memory_module
from p2pstore.integrations.mooncake.base import OwnPeer
from p2pstore.objects import MIB
from tests.contract.fake_cuda import (
    ILLEGAL_ADDRESS,
    OUT_OF_MEMORY,
    PRIMARY,
    FakeCuda,
    RealCuda,
    _libc,
    hidden_memory,
)

Store = mooncake.MooncakeDistributedStore
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def peer() -> Iterator[OwnPeer]:
    peer = OwnPeer(["--memory", str(64 * MIB), "--listen", "127.0.0.1:0"])
    yield peer
    peer.close()


@pytest.fixture
def store(peer: OwnPeer) -> Iterator[Store]:
    store = Store()
    assert store.setup({"local_hostname": "localhost", "socket": peer.socket}) == 0
    yield store
    store.remove_all(force=True)
    store.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    driver = made.driver()
    monkeypatch.setattr(memory_module, "loaded_driver", lambda: driver)
    return made


@pytest.fixture(params=["fake", "cuda"])
def cuda(request: pytest.FixtureRequest) -> Any:
    if request.param == "fake":
        return request.getfixturevalue("fake")
    try:
        return RealCuda()
    except OSError:
        pytest.skip("there is no GPU")


def filled(length: int, seed: int = 1) -> bytes:
    numbers = np.arange(length, dtype=np.int64) * 2654435761 + seed
    return (numbers % 251).astype(np.uint8).tobytes()


def host(data: bytes | int) -> tuple[int, np.ndarray[Any, Any]]:
    array = (
        np.zeros(data, np.uint8) if isinstance(data, int) else np.frombuffer(bytearray(data), np.uint8)
    )
    return int(array.ctypes.data), array


def on_gpu(cuda: Any, data: bytes) -> int:
    address: int = cuda.memory(max(len(data), 1))
    cuda.write(address, data)
    return address


def test_a_driver_tells_its_memory_and_copies_it(cuda: Any) -> None:
    """The contract of the fake driver, and of CUDA's."""
    driver = cuda.driver()
    address, array = host(100)
    data = filled(3 * MIB)
    at = on_gpu(cuda, data)
    assert driver.memory_at(address, 100) is None
    assert driver.memory_at(4096, 1) is None
    found = driver.memory_at(at + 5, 90)
    assert (found.address, len(found), found[10:30].address) == (at + 5, 90, at + 15)
    driver.copy(found.context, [(address, at, 40), (address + 40, at + 2 * MIB, 60)])
    assert array.tobytes() == data[:40] + data[2 * MIB :][:60]
    array[:] = 7
    driver.copy(found.context, [(at + 1, address, 100)])
    assert cuda.read(at, 102) == data[:1] + bytes([7]) * 100 + data[101:102]
    room = driver.pinned(found.context, 5000)
    room[:3] = b"abc"
    assert (len(room), bytes(room[:3])) == (5000, b"abc")
    with pytest.raises(GpuCopyFailed, match="cuCtxPushCurrent"):
        driver.copy(0, [(at, address, 100)])


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("length", [1, 5000, 9 * MIB + 3])
def test_objects_come_from_a_gpu_and_go_there(
    store: Store, cuda: Any, length: int, registered: bool
) -> None:
    data = filled(length)
    source, room = on_gpu(cuda, data), on_gpu(cuda, bytes(length + 8))
    if registered:
        assert store.register_buffer(source, length) == 0
        assert store.register_buffer(room, length + 8) == 0
        assert store.register_buffer(room + 1, 2) == -600
    assert store.put_from("k", source, length) == 0
    assert store.get("k") == data
    assert store.get_into("k", room, length + 8) == length
    assert cuda.read(room, length + 8) == data + bytes(8)
    assert store.get_into("none", room, length) == -704
    if length > 1:
        assert store.get_into("k", room, 1) == -600
    if registered:
        assert (store.unregister_buffer(source), store.unregister_buffer(room)) == (0, 0)
        assert store.unregister_buffer(source) == -600


def test_batches_mix_both_memories(store: Store, cuda: Any) -> None:
    keys, values = ["a", "b", "c"], [filled(70_000, 1), filled(3000, 2), filled(5 * MIB, 3)]
    own, _array = host(values[1])
    pointers = [on_gpu(cuda, values[0]), own, on_gpu(cuda, values[2])]
    sizes = list(map(len, values))
    assert store.batch_put_from([*keys, "d"], [*pointers, 8], [*sizes, 10]) == [0, 0, 0, -600]
    assert store.get_batch(keys) == values
    address, array = host(3000)
    rooms = [on_gpu(cuda, bytes(70_000)), address, on_gpu(cuda, bytes(5 * MIB))]
    got = store.batch_get_into([*keys, "none", "a"], [*rooms, rooms[0], 8], [*sizes, 10, 10])
    assert got == [*sizes, -704, -600]
    read = [cuda.read(rooms[0], sizes[0]), array.tobytes(), cuda.read(rooms[2], sizes[2])]
    assert read == values


def test_one_object_in_several_places(store: Store, cuda: Any) -> None:
    """As vLLM's connector has them: a block is a part of each layer's memory."""
    layers = [on_gpu(cuda, filled(4 * PAGE, seed)) for seed in range(6)]
    for layer in layers:
        assert store.register_buffer(layer, 4 * PAGE) == 0
    address, array = host(filled(100, 9))
    blocks = [[layer + at * PAGE for layer in layers] + [address] for at in (1, 3)]
    sizes = [[PAGE] * 6 + [100]] * 2
    keys = ["block 1", "block 3"]
    assert store.batch_put_from_multi_buffers(keys, blocks, sizes) == [0, 0]
    whole = [filled(4 * PAGE, seed) for seed in range(6)]
    for key, at in zip(keys, (1, 3), strict=True):
        parts = [each[at * PAGE : (at + 1) * PAGE] for each in whole]
        assert store.get(key) == b"".join(parts) + filled(100, 9)
    array[:] = 0
    swapped = [blocks[1], blocks[0]]
    lengths = [6 * PAGE + 100] * 2
    assert store.batch_get_into_multi_buffers(keys, swapped, sizes) == lengths
    assert array.tobytes() == filled(100, 9)
    for layer, before in zip(layers, whole, strict=True):
        first, second = before[PAGE : 2 * PAGE], before[3 * PAGE :]
        assert cuda.read(layer + PAGE, PAGE) == second
        assert cuda.read(layer + 3 * PAGE, PAGE) == first
    got = store.batch_get_into_multi_buffers(["none"], [blocks[0]], [sizes[0]])
    assert got == [-704]


def test_ranges_sessions_and_metadata(store: Store, cuda: Any) -> None:
    data = filled(2 * PAGE)
    source, room = on_gpu(cuda, data), on_gpu(cuda, bytes(PAGE))
    about, _ = host(b"about")
    assert store.put_from_with_metadata("m", source, about, 100, 5) == 0
    assert store.get("m") == b"about" + data[:100]
    assert store.register_buffer(room, PAGE) == 0
    got = store.get_into_ranges([room], [["m"]], [[[0, 50, 5000]]], [[[0, 5, 0]]], [[[5, 20, 5]]])
    assert got == [[[5, 20, -600]]]
    assert cuda.read(room, 70) == b"about" + bytes(45) + data[:20]
    assert store.batch_put_session_start(["s"], [PAGE]) == [0]
    put = store.batch_put_from_multi_buffer_ranges
    assert put(["s"], [[source, source + PAGE]], [[100, 50]], [[0, 100]]) == [150]
    assert put(["s"], [[8]], [[100]], [[0]]) == [-600]
    assert store.batch_put_session_end(["s"]) == [0]
    assert store.batch_get_session_start(["s"]) == [0]
    get = store.batch_get_into_multi_buffer_ranges
    assert get(["s"], [[room + 10]], [[30]], [[90]]) == [30]
    assert get(["s"], [[room]], [[30]], [[PAGE]]) == [-600]
    assert cuda.read(room + 10, 30) == data[90:100] + data[PAGE : PAGE + 20]
    assert store.batch_get_session_end(["s"]) == 0


def test_calls_for_tensors_want_memory_of_this_process(store: Store, cuda: Any) -> None:
    at = on_gpu(cuda, filled(1000))
    assert store.batch_put_tensor_from(["t"], [at], [1000]) == [-600]
    assert store.put_tensor_with_tp_from("t", at, 1000) == -600
    assert store.get_tensor_into("t", at, 1000) is None


def test_pinned_memory_is_kept_and_goes_with_the_store(store: Store, fake: FakeCuda) -> None:
    room = fake.memory(MIB)
    assert store.register_buffer(room, MIB) == 0
    assert store.put("large", filled(MIB)) == 0
    for _ in range(3):
        assert store.get_into("large", room, MIB) == MIB
    assert [len(each) for each in fake.pinned.values()] == [64 * MIB]
    store.close()
    gc.collect()
    assert not fake.pinned


def test_a_gpu_without_pinned_memory_is_read_into_all_the_same(store: Store, fake: FakeCuda) -> None:
    room = fake.memory(100)
    assert store.register_buffer(room, 100) == 0
    store.put("small", filled(100))
    fake.cuMemHostAlloc = lambda *_: OUT_OF_MEMORY  # type: ignore[method-assign]
    assert store.get_into("small", room, 100) == 100
    assert fake.read(room, 100) == filled(100)


def test_a_gpu_that_fails_is_an_error_of_the_transfer(store: Store, fake: FakeCuda) -> None:
    at = on_gpu(fake, filled(5000))
    store.put("there", filled(5000))
    fake.fails = ILLEGAL_ADDRESS
    assert store.put_from("k", at, 5000) == -800
    assert store.batch_put_from(["k"], [at], [5000]) == [-800]
    assert store.is_exist("k") == 0
    assert store.get_into("there", at, 5000) == -800
    assert store.get_into_ranges([at], [["there"]], [[[0]]], [[[0]]], [[[9]]]) == [[[-800]]]
    fake.fails = 0
    assert store.put_from("k", at, 5000) == 0
    assert store.get("k") == filled(5000)


def test_memory_of_no_context_is_copied_in_the_primary_one(store: Store, fake: FakeCuda) -> None:
    """As of pools, and of torch's expandable segments."""
    at = fake.memory(PAGE, context=None)
    fake.write(at, filled(PAGE))
    found = fake.driver().memory_at(at, PAGE)
    assert found is not None
    assert found.context == PRIMARY
    assert store.put_from("k", at, PAGE) == 0
    assert store.get("k") == filled(PAGE)


def test_the_peers_memory_is_page_locked_where_torch_is_there(
    store: Store, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locked: list[bool] = []

    class Client:
        socket_path = "peer.sock"

        def register_gpu(self) -> None:
            locked.append(True)
            raise GpuCopyFailed("torch knows no GPU")

    current = store.current
    monkeypatch.setattr(type(current), "_live", property(lambda _: Client()))
    address, _array = host(PAGE)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=type(None)))
    assert (store.register_buffer(address, PAGE), locked) == (0, [])
    for _ in range(2):
        assert store.register_buffer(fake.memory(PAGE), PAGE) == 0
    assert locked == [True, True]
    assert sum("slower" in each.getMessage() for each in caplog.records) == 1


# --- neither ---------------------------------------------------------------------------------------


def hole() -> int:
    """The address of three pages, of which the middle one is not there."""
    whole = _libc.mmap(None, 3 * PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert _libc.munmap(whole + PAGE, PAGE) == 0
    return int(whole)


@pytest.mark.parametrize("with_driver", [True, False])
def test_what_is_no_memory_is_refused(
    store: Store, request: pytest.FixtureRequest, with_driver: bool
) -> None:
    if with_driver:
        request.getfixturevalue("fake")
    hidden, whole = hidden_memory(2 * PAGE), hole()
    for address, size in ((hidden, PAGE), (whole, 3 * PAGE), (whole + PAGE, PAGE), (4096, 8)):
        assert store.register_buffer(address, size) == -600, hex(address)
    assert store.register_buffer(whole, PAGE) == 0
    assert store.put("k", b"value") == 0
    for address in (hidden, whole + PAGE, 4096):
        assert store.put_from("x", address, 8) == -600
        assert store.get_into("k", address, 8) == -600
        assert store.batch_put_from(["x"], [address], [8]) == [-600]
        assert store.batch_get_into(["k", "k"], [address, whole], [8, 8]) == [-600, 5]
        assert store.batch_put_from_multi_buffers(["x"], [[whole, address]], [[8, 8]]) == [-600]
        assert store.get_into_ranges([address], [["k"]], [[[0]]], [[[0]]], [[[5]]]) == [[[-600]]]
    assert ctypes.string_at(whole, 5) == b"value"


def test_without_a_driver_a_gpus_memory_is_refused(store: Store) -> None:
    assert store.register_buffer(FakeCuda().memory(PAGE), PAGE) == -600


def test_read_only_memory_is_put_from_and_not_written_to(store: Store, tmp_path: Any) -> None:
    path = tmp_path / "weights"
    path.write_bytes(filled(PAGE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ) as pages:
        array = np.frombuffer(pages, np.uint8)
        address = int(array.ctypes.data)
        for registered in (False, True):
            assert not registered or store.register_buffer(address, PAGE) == 0
            assert store.put_from(f"w{registered}", address, PAGE) == 0
            assert store.get(f"w{registered}") == filled(PAGE)
        assert store.get_into("wFalse", address, PAGE) == -600
        assert store.unregister_buffer(address) == 0
        del array


def test_where_the_kernel_does_not_tell_the_callers_word_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sandbox: listing all mappings for each call would take too long."""
    monkeypatch.setattr(memory_module, "are_readable", lambda *_: None)
    monkeypatch.setattr(memory_module, "is_listed", None)
    address, array = host(b"value")
    assert store.put_from("k", address, 5) == 0
    array[:] = 0
    assert store.get_into("k", address, 5) == 5
    assert array.tobytes() == b"value"


def test_batches_of_any_length_are_asked_for_at_once() -> None:
    address, array = host(4000)
    assert memory_module.are_readable([address] * 1500, [len(array)] * 1500)
    assert memory_module.are_readable([address, 4096], [1, 1]) is False
    assert memory_module.are_readable([address] * 1500 + [4096], [1] * 1501) is False
    assert memory_module.are_readable([-1], [1]) is False
    assert memory_module.are_readable([address], [0]) is True
