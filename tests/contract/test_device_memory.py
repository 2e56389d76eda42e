"""Tensors on a GPU as values and as destinations: by way of pinned memory, and copied in place. Where there is no GPU,
the same steps are run with tensors on the CPU that are taken for ones on a GPU: only that the GPU copies is then not
tested."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import trio

import p2pstore
from p2pstore import blocking
from p2pstore.client import device_memory
from p2pstore.errors import BufferTooSmall, GpuCopyFailed, NoSuchKey, P2PStoreError, StoreClosed
from p2pstore.objects import MIB
from p2pstore.results import TransferOperation, TransferRequest
from tests.contract.small_peer import SmallPeer, small_peer
from tests.contract.test_local import connected
from tests.interrupts import interrupted_after_each_call, interrupted_at_each_line
from tests.optional import require_torch
from tests.threads import with_threads

torch = require_torch()


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU that torch knows")
    monkeypatch.setattr(device_memory, "DEVICE_TYPES", frozenset({name}))
    return name


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[SmallPeer]:
    with small_peer(tmp_path / "peer.sock", gives_pages=True) as running:
        yield running


class Driver:
    """Stands for what a GPU's driver is asked: which memory is page-locked now."""

    def __init__(self) -> None:
        self.locked: dict[int, tuple[int, int]] = {}
        self.begun = 0
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses:
            return 801
        if address in self.locked:
            return 712
        self.begun += 1
        self.locked[address] = size, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> str:
        return f"operation not supported ({error})"


@pytest.fixture
def driver(device: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(device_memory, "_forget_error", lambda _: None)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return made


@pytest.fixture(params=["blocking", "trio", "blocking, in place", "trio, in place"])
async def store(request: pytest.FixtureRequest, peer: SmallPeer, driver: Driver) -> AsyncIterator[Any]:
    """A client of any kind."""
    kind, _, in_place = request.param.partition(", ")
    async with connected(kind, peer) as opened:
        if in_place:
            await opened.register_gpu()
        yield opened


def filled(device: str, count: int, seed: int = 1) -> Any:
    numbers = torch.arange(count, dtype=torch.int64) * 2654435761 + seed
    return (numbers % 251).to(torch.uint8).to(device)


@pytest.mark.parametrize("length", [0, 1, 5000, 9 * MIB + 3])
async def test_values_come_from_a_gpu_and_go_there(store: Any, device: str, length: int) -> None:
    tensor = filled(device, length)
    await store.put("k", tensor)
    assert await store.get("k") == bytes(tensor.cpu().numpy())
    into = torch.zeros(length + 8, dtype=torch.uint8, device=device)
    assert await store.get_into("k", into) == length
    assert torch.equal(into[:length], tensor)
    assert int(into[length:].sum()) == 0


async def test_a_tensor_keeps_dtype_and_shape(store: Any, device: str) -> None:
    tensor = torch.arange(60, device=device).reshape(3, 4, 5).to(torch.bfloat16)
    await store.put_tensor("t", tensor)
    back = await store.get_tensor("t")
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor.cpu())
    into = torch.zeros_like(tensor)
    assert await store.get_into("t", into) == tensor.nbytes
    assert torch.equal(into, tensor)


async def test_what_other_streams_have_not_computed_yet_is_waited_for(store: Any, device: str) -> None:
    """The current stream's work comes first, also where another thread waits for the copy."""
    if device != "cuda":
        pytest.skip("only a GPU has streams")
    with torch.cuda.stream(torch.cuda.Stream()):
        factor = torch.ones(4096, 4096, device=device)
        for _ in range(50):
            factor = factor @ factor / 4096
        tensor = (factor[:2048] * 7).to(torch.uint8)
        await store.put("late", tensor)
        into = torch.zeros_like(tensor)
        await store.get_into("late", into)
        assert torch.equal(into, tensor)
        assert int(into.min()) == int(into.max()) == 7


async def test_batches_mix_both_memories(store: Any, device: str) -> None:
    values = [filled(device, 3000, 1), b"host", filled(device, 5 * MIB, 2), filled(device, 10, 3)]
    bad = [filled(device, 64).reshape(8, 8).t(), filled(device, 64).to_sparse()]
    results = await store.put_many(
        [(f"k{number}", value) for number, value in enumerate([*values, *bad])]
    )
    assert [each.ok for each in results] == [True] * 4 + [False] * 2
    assert {type(each.error) for each in results[4:]} == {ValueError}
    assert "contiguous" in str(results[4].error)
    assert not await store.contains("k4")
    into = [
        torch.zeros(3000, dtype=torch.uint8, device=device),
        bytearray(4),
        torch.zeros(5 * MIB, dtype=torch.uint8, device=device),
        torch.zeros(5, dtype=torch.uint8, device=device),
        torch.zeros(5, dtype=torch.uint8, device=device),
        torch.zeros(8, 8, device=device).t(),
        filled(device, 64).to_sparse(),
    ]
    keys = ["k0", "k1", "k2", "k3", "none", "k0", "k0"]
    results = await store.get_many_into(list(zip(keys, into, strict=True)))
    assert [each.value for each in results[:3]] == [3000, 4, 5 * MIB]
    assert isinstance(results[3].error, BufferTooSmall)
    assert isinstance(results[4].error, NoSuchKey)
    assert isinstance(results[5].error, ValueError)
    assert isinstance(results[6].error, ValueError)
    for number in (0, 2):
        assert torch.equal(into[number], values[number])
    assert into[1] == b"host"
    assert int(into[3].sum()) == 0


@pytest.mark.parametrize("length", [70_000, 3 * MIB])
async def test_a_batch_whose_copies_fail_says_so_of_each(
    store: Any, device: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a GPU is no error of one tensor: it may tell of what was asked before."""

    def broken(copies: Any, meanwhile: Any = None) -> None:
        raise GpuCopyFailed("CUDA error: an illegal memory access was encountered")

    values = [filled(device, length, seed) for seed in range(3)]
    await store.put_many([(f"k{number}", value) for number, value in enumerate(values[:2])])
    monkeypatch.setattr(device_memory, "copy_all", broken)
    monkeypatch.setattr(device_memory, "copy_all", broken)
    results = await store.put_many([("n0", values[0]), ("host", b"host"), ("n1", values[1])])
    assert [each.ok for each in results] == [False, True, False]
    assert all("illegal memory access" in str(results[number].error) for number in (0, 2))
    with pytest.raises(P2PStoreError, match="illegal memory access"):
        await store.put("n0", values[0])
    assert not await store.contains("n0")
    into = [torch.zeros_like(values[0]), bytearray(4), torch.zeros_like(values[0])]
    results = await store.get_many_into(list(zip(["k0", "host", "k1"], into, strict=True)))
    assert [each.ok for each in results] == [False, True, False]
    assert all(isinstance(results[number].error, P2PStoreError) for number in (0, 2))
    assert into[1] == b"host"
    with pytest.raises(P2PStoreError, match="illegal memory access"):
        await store.get_into("k0", into[0])


async def test_within_inference_mode(store: Any, device: str) -> None:
    """As engines run: threads that copy are not in it."""
    with torch.inference_mode():
        values = [filled(device, MIB, seed) for seed in range(6)]
        await store.put_many([(f"k{number}", value) for number, value in enumerate(values)])
        rooms = [torch.zeros(MIB, dtype=torch.uint8, device=device) for _ in values]
        results = await store.get_many_into([(f"k{at}", room) for at, room in enumerate(rooms)])
        assert [each.value for each in results] == [MIB] * 6
        assert all(map(torch.equal, rooms, values))


async def test_transfers_of_large_tensors(store: Any, device: str) -> None:
    """Those that are watched."""
    tensor, room = filled(device, 9 * MIB), torch.zeros(9 * MIB, dtype=torch.uint8, device=device)
    if not isinstance(store, p2pstore.Client):
        pytest.skip("the other client's are threads")
    with trio.fail_after(20):
        async with store.transfers() as transfers:
            (number,) = transfers.submit([TransferRequest("k", tensor, "put")])
            (await transfers.wait(number)).unwrap()
            (number,) = transfers.submit([TransferRequest("k", room, "get")])
            assert (await transfers.wait(number)).unwrap() == 9 * MIB
            assert transfers.status(number).moved_bytes == 9 * MIB
    assert torch.equal(room, tensor)
    with pytest.raises(TypeError, match="wait"):
        await store.get_into("k", room, wait="long")  # type: ignore[arg-type] # that is the point


@pytest.mark.parametrize("rows", [256, 1536])
async def test_batches_wait_for_the_current_stream(store: Any, device: str, rows: int) -> None:
    """Copies of up to 4 MiB in all are waited for where they were asked for, more in a thread."""
    if device != "cuda":
        pytest.skip("only a GPU has streams")
    with torch.cuda.stream(torch.cuda.Stream()):
        factor = torch.ones(2048, 2048, device=device)
        for _ in range(100):
            factor = factor @ factor / 2048
        values = [(factor[:rows] * number).to(torch.uint8) for number in range(1, 4)]
        await store.put_many([(f"k{number}", value) for number, value in enumerate(values)])
        into = [torch.zeros_like(value) for value in values]
        results = await store.get_many_into([(f"k{at}", each) for at, each in enumerate(into)])
        assert [each.value for each in results] == [rows * 2048] * 3
        for number, each in enumerate(into, start=1):
            assert int(each.min()) == int(each.max()) == number


async def test_what_has_no_bytes_in_a_row_is_refused(store: Any, device: str) -> None:
    scattered = filled(device, 64).reshape(8, 8).t()
    with pytest.raises(ValueError, match="contiguous"):
        await store.put("k", scattered)
    with pytest.raises(ValueError, match="contiguous"):
        await store.get_into("k", scattered)
    with pytest.raises(NoSuchKey):
        await store.get_into("none", filled(device, 8))


async def test_whatever_device_is_the_default(store: Any, device: str) -> None:
    """As programs have it while they make their models."""
    tensor = filled(device, 5000)
    with torch.device("cuda" if device == "cuda" else "meta"):
        await store.put("k", tensor)
        into = torch.zeros(5000, dtype=torch.uint8, device=device)
        assert await store.get_into("k", into) == 5000
    assert torch.equal(into, tensor)


async def test_cancelled_or_not_a_copy_is_never_left_half_done(
    peer: SmallPeer, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected("trio", peer) as client:
        await client.put("k", filled(device, 9 * MIB))
        into = torch.zeros(9 * MIB, dtype=torch.uint8, device=device)
        scope, given = trio.CancelScope(), list[int]()
        copy_all = device_memory.copy_all

        def cancelled_meanwhile(copies: list[device_memory.Copy]) -> None:
            trio.from_thread.run_sync(scope.cancel)
            copy_all(copies)
            given.extend(copy.target.nbytes for copy in copies)

        monkeypatch.setattr(device_memory, "copy_all", cancelled_meanwhile)
        with scope:
            await client.get_into("k", into)
        assert given == [9 * MIB]
        assert torch.equal(into, filled(device, 9 * MIB))


async def test_transfers_side_by_side(peer: SmallPeer, device: str) -> None:
    values = {f"k{number}": filled(device, 100_000 + number, number) for number in range(8)}
    into = {key: torch.zeros_like(value) for key, value in values.items()}
    with trio.fail_after(20):
        async with connected("trio", peer) as client, client.transfers() as transfers:
            both: list[tuple[TransferOperation, dict[str, Any]]] = [("put", values), ("get", into)]
            for operation, buffers in both:
                numbers = transfers.submit(
                    [TransferRequest(key, buffer, operation) for key, buffer in buffers.items()]
                )
                for number in numbers:
                    (await transfers.wait(number)).unwrap()
    assert all(torch.equal(into[key], value) for key, value in values.items())


# --- in place ------------------------------------------------------------------------------------


@pytest.fixture
def passing_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what went by way of pinned memory."""
    sizes: list[int] = []
    made = device_memory.PinnedStaging.__init__

    def note(self: device_memory.PinnedStaging, on: device_memory.OnDevice) -> None:
        sizes.append(on.nbytes)
        made(self, on)

    monkeypatch.setattr(device_memory.PinnedStaging, "__init__", note)
    return sizes


@pytest.fixture(params=["blocking", "trio"])
async def in_place(
    request: pytest.FixtureRequest, peer: SmallPeer, driver: Driver
) -> AsyncIterator[Any]:
    async with connected(request.param, peer) as opened:
        await opened.register_gpu()
        yield opened


async def test_what_is_in_the_local_peer_is_copied_in_place(
    in_place: Any, peer: SmallPeer, device: str, passing_by: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what takes several threads to verify; and no lease is left."""
    sizes = [1, 5000, MIB, 9 * MIB + 3]
    for size in sizes:
        tensor = filled(device, size)
        assert (await in_place.put(f"k{size}", tensor)).status == "created"
        into = torch.zeros(size + device_memory.MIN_BYTES, dtype=torch.uint8, device=device)
        assert await in_place.get_into(f"k{size}", into) == size
        assert torch.equal(into[:size], tensor)
        assert int(into[size:].sum()) == 0
        assert await in_place.get(f"k{size}") == bytes(tensor.cpu().numpy())
        await in_place.remove(f"k{size}")
    values = [filled(device, 3 * MIB, seed) for seed in range(4)]
    await in_place.put_many([(f"m{number}", value) for number, value in enumerate(values)])
    rooms = [torch.zeros_like(value) for value in values]
    with_threads(monkeypatch, 3)
    monkeypatch.setattr(device_memory, "ALONE_BYTES", MIB)
    results = await in_place.get_many_into([(f"m{at}", room) for at, room in enumerate(rooms)])
    assert [each.value for each in results] == [3 * MIB] * 4
    assert all(map(torch.equal, rooms, values))
    assert passing_by == []
    await in_place.remove_many([f"m{number}" for number in range(4)])
    await in_place.put("last", bytes(15 * MIB))  # so that all memory is needed again


async def test_what_cannot_be_copied_in_place_goes_by_way_of_pinned_memory(
    in_place: Any, peer: SmallPeer, device: str, passing_by: list[int]
) -> None:
    await in_place.put("k", filled(device, MIB))
    await in_place.put("small", filled(device, 5000))
    short = torch.zeros(MIB - 1, dtype=torch.uint8, device=device)
    with pytest.raises(BufferTooSmall) as raised:
        await in_place.get_into("k", short)
    assert raised.value.needed == MIB
    with pytest.raises(NoSuchKey):
        await in_place.get_into("none", short)
    small = torch.zeros(5000, dtype=torch.uint8, device=device)
    assert await in_place.get_into("small", small) == 5000
    assert torch.equal(small, filled(device, 5000))
    assert passing_by == [MIB - 1, MIB - 1, 5000]
    room = torch.zeros(MIB, dtype=torch.uint8, device=device)
    results = await in_place.get_many_into([("none", short), ("k", room), ("", short), ("k", 7)])
    assert [type(each.error) for each in results] == [NoSuchKey, type(None), ValueError, ValueError]
    assert results[1].value == MIB
    assert torch.equal(room, filled(device, MIB))
    assert passing_by[3:] == [MIB - 1, MIB - 1]


async def test_a_spoilt_object_is_not_taken_for_right(
    in_place: Any, peer: SmallPeer, device: str
) -> None:
    await in_place.put("k", filled(device, 2 * MIB))
    (found,) = peer.call(peer.backend.segment.entries)
    peer.backend.memory.view[found.offset + MIB + 17] ^= 1
    room = torch.zeros(2 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(P2PStoreError):
        await in_place.get_into("k", room)
    results = await in_place.get_many_into([("k", room)])
    assert not results[0].ok


async def test_what_is_overwritten_meanwhile_is_never_a_mixture(
    in_place: Any, peer: SmallPeer, device: str
) -> None:
    """The lease keeps what the GPU copies: all of the memory is used anew again and again."""
    size = 3 * MIB
    room = torch.zeros(size, dtype=torch.uint8, device=device)
    await in_place.put("k", filled(device, size, 0))
    seen: set[int] = set()
    with trio.fail_after(60):
        async with connected("trio", peer) as other, trio.open_nursery() as nursery:
            ended = trio.Event()

            async def overwrite() -> None:
                seed = 0
                while not ended.is_set():
                    seed = (seed + 1) % 250
                    await other.put("k", filled("cpu", size, seed), overwrite=True)

            nursery.start_soon(overwrite)
            while len(seen) < 20:
                assert await in_place.get_into("k", room) == size
                seed = int(room[0])
                assert torch.equal(room, filled(device, size, seed))
                seen.add(seed)
                await trio.lowlevel.checkpoint()
            ended.set()


async def test_a_read_counts_only_if_the_session_lasted(
    in_place: Any, peer: SmallPeer, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease ends with it, and the GPU may copy later than its bytes were verified."""
    await in_place.put("k", filled(device, MIB))
    copy_all = device_memory.copy_all

    def ended_meanwhile(copies: Any, meanwhile: Any = None) -> None:
        copy_all(copies, meanwhile)
        session = getattr(in_place, "client", in_place)
        (session if isinstance(session, p2pstore.Client) else session._session)._link.close()

    monkeypatch.setattr(device_memory, "copy_all", ended_meanwhile)
    with pytest.raises(StoreClosed):
        await in_place.get_into("k", torch.zeros(MIB, dtype=torch.uint8, device=device))


async def test_what_was_read_in_place_can_be_evicted_at_once(
    in_place: Any, peer: SmallPeer, device: str
) -> None:
    async with connected("trio", peer) as other:
        for number in range(3):
            await in_place.put(f"k{number}", filled(device, 9 * MIB))
            room = torch.zeros(9 * MIB, dtype=torch.uint8, device=device)
            assert await in_place.get_into(f"k{number}", room) == 9 * MIB
            assert (await other.put(f"other{number}", bytes(9 * MIB))).status == "created"


async def test_one_spoilt_object_among_several(in_place: Any, peer: SmallPeer, device: str) -> None:
    await in_place.put_many([(f"k{number}", filled(device, MIB, number)) for number in range(3)])
    entries = peer.call(peer.backend.segment.entries)
    spoilt = next(each for each in entries if each.key == "k1")
    peer.backend.memory.view[spoilt.offset + 17] ^= 1
    rooms = [torch.zeros(MIB, dtype=torch.uint8, device=device) for _ in range(3)]
    results = await in_place.get_many_into([(f"k{at}", room) for at, room in enumerate(rooms)])
    assert [each.ok for each in results] == [True, False, True]
    assert torch.equal(rooms[0], filled(device, MIB, 0))
    assert torch.equal(rooms[2], filled(device, MIB, 2))


async def test_several_ask_to_register_at_once(peer: SmallPeer, device: str, driver: Driver) -> None:
    async with connected("trio", peer) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(client.register_gpu)
        assert driver.begun == (1 if device == "cpu" else 0)


async def test_what_goes_elsewhere_is_copied_to_this_host(
    in_place: Any, peer: SmallPeer, device: str
) -> None:
    client = getattr(in_place, "client", in_place)
    session = client if isinstance(client, p2pstore.Client) else client._session
    tensor = filled(device, 9 * MIB)
    source = await session._source("k", tensor)
    assert isinstance(source, device_memory.GpuSource)
    assert source.joined() == tensor.cpu().numpy().tobytes()


@pytest.mark.parametrize("strike", [interrupted_at_each_line, interrupted_after_each_call])
def test_an_interrupt_leaves_no_memory_page_locked(
    peer: SmallPeer, device: str, driver: Driver, strike: Callable[..., Iterator[str]]
) -> None:
    if device != "cpu":
        pytest.skip("a GPU's driver does not tell what is page-locked")
    with blocking.connect(str(peer.path)) as client:
        places = []
        for place in strike(client.register_gpu, device_memory):
            places.append(place)
            gc.collect()
            assert driver.locked == {}, f"left when it was interrupted at {place}"
        assert len(places) >= 10
        assert len(driver.locked) == 1


@pytest.mark.parametrize("strike", [interrupted_at_each_line, interrupted_after_each_call])
def test_an_interrupt_leaves_no_copy_under_way(
    device: str, monkeypatch: pytest.MonkeyPatch, strike: Callable[..., Iterator[str]]
) -> None:
    """With streams that do nothing before they are waited for."""
    if device != "cpu":
        pytest.skip("the GPU's own streams go on by themselves")
    monkeypatch.setattr(device_memory, "_current", lambda _: nullcontext())
    under_way: set[int] = set()

    class Stream:
        def record_event(self) -> Stream:
            return self

        def synchronize(self) -> None:
            under_way.discard(id(self))

    class Target:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def copy_(self, _: Any, *, non_blocking: bool) -> None:
            under_way.add(id(self.stream))

    streams = [Stream(), Stream()]
    copies = [device_memory.Copy(stream, Target(stream), None) for stream in streams]
    places = []
    for place in strike(lambda: device_memory.copy_all(copies), device_memory):
        places.append(place)
        assert not under_way, f"one went on when it was interrupted at {place}"
    assert len(places) >= 5


async def test_memory_is_page_locked_until_its_clients_are_closed(
    peer: SmallPeer, device: str, driver: Driver
) -> None:
    if device != "cpu":
        pytest.skip("a GPU's driver does not tell what is page-locked")
    async with connected("trio", peer) as first, connected("blocking", peer) as second:
        await first.register_gpu()
        await first.register_gpu()
        ((size, flags),) = driver.locked.values()
        assert (size, flags) == (len(peer.backend.memory.view), 1)
        await second.register_gpu()
        assert len(driver.locked) == 2
        tensor = filled(device, 100)
        await first.put("k", tensor)
    gc.collect()
    assert driver.locked == {}
    async with connected("trio", peer) as refused:
        driver.refuses = True
        with pytest.raises(P2PStoreError, match=r"not supported \(801\)"):
            await refused.register_gpu()
        room = torch.zeros(100, dtype=torch.uint8)
        assert await refused.get_into("k", room) == 100  # as without it
        assert torch.equal(room, tensor)


async def test_a_refusal_does_not_show_in_what_the_program_does_next(
    peer: SmallPeer, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps an error for the next kernel's launch to report."""
    if device != "cuda":
        pytest.skip("only a GPU has kernels")
    async with connected("trio", peer) as client:
        segment = client._link.connection.segment(0)
        locked = device_memory.GpuMapping(segment, 0)
        with pytest.raises(P2PStoreError, match="does not page-lock"):
            await client.register_gpu()  # the same pages again
        assert int(torch.ones(4, device="cuda").add_(1).sum()) == 8
        del locked
        gc.collect()
        await client.register_gpu()


async def test_without_a_gpu_there_is_nothing_to_register(peer: SmallPeer) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    async with connected("trio", peer) as client:
        with pytest.raises(P2PStoreError, match="knows no GPU on this machine"):
            await client.register_gpu()
