"""Tensors on a GPU as values and as destinations. Where there is no GPU, the same steps are run with tensors on the CPU
that are taken for ones on a GPU: only that the GPU copies is then not tested."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore.client import device_memory
from p2pstore.errors import BufferTooSmall, NoSuchKey, P2PStoreError
from p2pstore.objects import MIB
from p2pstore.results import TransferOperation, TransferRequest
from tests.contract.small_peer import SmallPeer, small_peer
from tests.contract.test_local import connected
from tests.optional import require_torch

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
    with small_peer(tmp_path / "peer.sock") as running:
        yield running


@pytest.fixture(params=["blocking", "trio"])
async def store(request: pytest.FixtureRequest, peer: SmallPeer) -> AsyncIterator[Any]:
    async with connected(request.param, peer) as opened:
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


async def test_what_other_streams_have_not_computed_yet_is_waited_for(
    store: Any, device: str
) -> None:
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


@pytest.mark.parametrize("length", [3000, 5 * MIB])
async def test_a_batch_whose_copies_fail_says_so_of_each(
    store: Any, device: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a GPU is no error of one tensor: it may tell of what was asked before."""

    def broken(self: device_memory.Staged, *_: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    values = [filled(device, length, seed) for seed in range(3)]
    await store.put_many([(f"k{number}", value) for number, value in enumerate(values[:2])])
    monkeypatch.setattr(device_memory.Staged, "begin_to_take", broken)
    results = await store.put_many([("n0", values[0]), ("host", b"host"), ("n1", values[1])])
    assert [each.ok for each in results] == [False, True, False]
    assert all("illegal memory access" in str(results[number].error) for number in (0, 2))
    with pytest.raises(P2PStoreError, match="illegal memory access"):
        await store.put("n0", values[0])
    assert not await store.contains("n0")

    monkeypatch.setattr(device_memory.Staged, "begin_to_give", broken)
    into = [torch.zeros_like(values[0]), bytearray(4), torch.zeros_like(values[0])]
    results = await store.get_many_into(list(zip(["k0", "host", "k1"], into, strict=True)))
    assert [each.ok for each in results] == [False, True, False]
    assert all(isinstance(results[number].error, P2PStoreError) for number in (0, 2))
    assert into[1] == b"host"
    with pytest.raises(P2PStoreError, match="illegal memory access"):
        await store.get_into("k0", into[0])


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
        scope, given = trio.CancelScope(), []
        begin_to_give = device_memory.Staged.begin_to_give

        def cancelled_meanwhile(self: device_memory.Staged, length: int) -> None:
            trio.from_thread.run_sync(scope.cancel)
            begin_to_give(self, length)
            given.append(length)

        monkeypatch.setattr(device_memory.Staged, "begin_to_give", cancelled_meanwhile)
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
