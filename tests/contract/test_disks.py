"""The contract of every disk: a file, a block device, a simulated one."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from p2pstore.errors import StoreClosed
from p2pstore.ssd_tier.aligned_memory import aligned_buffer
from p2pstore.ssd_tier.disk_protocol import ALIGNMENT_BYTES as PAGE
from p2pstore.ssd_tier.disk_protocol import Disk
from tests.contract.disks import KIB, MIB, SIZE, OpenedDisk, disk_of_kind


@pytest.fixture(params=["file", "device", "simulated", "simulated, slow"])
def open_it(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenedDisk]:
    with disk_of_kind(request.param, tmp_path) as opening:
        yield opening


@pytest.fixture
def disk(open_it: OpenedDisk) -> Disk:
    return open_it()


def random_buffer(size: int, seed: int) -> memoryview:
    buffer = aligned_buffer(max(size, PAGE))[:size]
    buffer[:] = random.Random(seed).randbytes(size)
    return buffer


async def read(disk: Disk, position: int, size: int) -> bytes:
    buffer = aligned_buffer(size)
    await disk.read_into(position, [buffer])
    return bytes(buffer)


async def test_a_new_disk_is_zeros(disk: Disk) -> None:
    assert disk.size_bytes == SIZE
    for position in (0, MIB, SIZE - PAGE):
        assert await read(disk, position, PAGE) == bytes(PAGE)


async def test_what_is_written_is_read(disk: Disk) -> None:
    first, second = random_buffer(3 * PAGE, 1), random_buffer(PAGE, 2)
    await disk.write_from(8 * PAGE, [first, second])
    assert await read(disk, 7 * PAGE, 6 * PAGE) == bytes(PAGE) + first + second + bytes(PAGE)
    one, other = aligned_buffer(PAGE), aligned_buffer(3 * PAGE)
    await disk.read_into(8 * PAGE, [one, other])
    assert bytes(one) + bytes(other) == bytes(first) + bytes(second)


@pytest.mark.parametrize("size", [0, PAGE, 64 * KIB, 5 * MIB])
async def test_who_reads_may_have_the_bytes_checked_before_it_goes_on(disk: Disk, size: int) -> None:
    content = random_buffer(size, 1)
    if size:
        await disk.write_from(PAGE, [content])
    buffer, seen = random_buffer(size, 2), list[bytes]()
    await disk.read_into(PAGE, [buffer], lambda: seen.append(bytes(buffer)))
    assert seen == [bytes(content)]

    def refuse() -> None:
        raise LookupError("not what was wanted")

    with pytest.raises(LookupError, match="not what was wanted"):
        await disk.read_into(PAGE, [buffer], refuse)


async def test_headers_may_be_bytes(disk: Disk) -> None:
    header, payload = random.Random(1).randbytes(PAGE), random_buffer(2 * PAGE, 2)
    await disk.write_from(0, [header, payload, header])
    assert await read(disk, 0, 4 * PAGE) == header + payload + header


async def test_a_large_request_is_one_request(disk: Disk) -> None:
    """Larger than any piece in which it is done; its ends are no multiples of pieces."""
    value = random_buffer(17 * MIB + PAGE, 3)
    header = random.Random(4).randbytes(PAGE)
    await disk.write_from(5 * PAGE, [header, value])
    page, copy = aligned_buffer(PAGE), aligned_buffer(len(value))
    await disk.read_into(5 * PAGE, [page, copy])
    assert bytes(page) == header
    assert copy == value


async def test_more_buffers_than_one_system_call_takes(disk: Disk) -> None:
    value = random_buffer(3000 * PAGE, 5)
    pages = [value[at : at + PAGE] for at in range(0, len(value), PAGE)]
    await disk.write_from(0, pages)
    copy = aligned_buffer(len(value))
    await disk.read_into(0, [copy[at : at + PAGE] for at in range(0, len(copy), PAGE)])
    assert copy == value


async def test_the_whole_disk_and_not_a_page_more(disk: Disk) -> None:
    last = random_buffer(PAGE, 6)
    await disk.write_from(SIZE - PAGE, [last])
    assert await read(disk, SIZE - PAGE, PAGE) == last
    with pytest.raises(ValueError, match="the disk has"):
        await disk.write_from(SIZE - PAGE, [last, last])
    with pytest.raises(ValueError, match="the disk has"):
        await disk.read_into(SIZE, [last])


@pytest.mark.parametrize("position", [1, 512, PAGE - 1, PAGE + 512])
async def test_positions_are_aligned(disk: Disk, position: int) -> None:
    buffer = aligned_buffer(PAGE)
    with pytest.raises(ValueError, match="multiple"):
        await disk.read_into(position, [buffer])
    with pytest.raises(ValueError, match="multiple"):
        await disk.write_from(position, [buffer])


async def test_positions_are_not_negative(disk: Disk) -> None:
    with pytest.raises(ValueError, match="the disk has"):
        await disk.read_into(-PAGE, [aligned_buffer(PAGE)])


async def test_lengths_are_aligned(disk: Disk) -> None:
    """Each of them: their sum is not enough."""
    whole = aligned_buffer(2 * PAGE)
    for buffers in ([whole[:512]], [whole[:PAGE], whole[PAGE : PAGE + 1]]):
        with pytest.raises(ValueError, match="multiple"):
            await disk.read_into(0, buffers)
        with pytest.raises(ValueError, match="multiple"):
            await disk.write_from(0, buffers)
    with pytest.raises(ValueError, match="multiple"):
        await disk.write_from(0, [bytes(100)])


async def test_addresses_are_aligned(disk: Disk) -> None:
    buffer = aligned_buffer(2 * PAGE)[512 : 512 + PAGE]
    with pytest.raises(ValueError, match="address"):
        await disk.read_into(0, [buffer])
    with pytest.raises(ValueError, match="address"):
        await disk.write_from(0, [buffer])


async def test_only_memory_can_be_read_into(disk: Disk) -> None:
    with pytest.raises(ValueError, match="read-only"):
        await disk.read_into(0, [aligned_buffer(PAGE).toreadonly()])
    with pytest.raises(ValueError, match="bytes"):
        await disk.read_into(0, [bytes(PAGE)])  # type: ignore[list-item]  # as a careless caller
    for strange in (aligned_buffer(2 * PAGE)[::2], aligned_buffer(4 * PAGE).cast("I")):
        assert len(strange) == PAGE
        with pytest.raises(ValueError, match="contiguous"):
            await disk.read_into(0, [strange])


async def test_nothing_of_a_refused_request_is_done(disk: Disk) -> None:
    with pytest.raises(ValueError, match="multiple"):
        await disk.write_from(0, [random_buffer(PAGE, 1), bytes(1)])
    assert await read(disk, 0, PAGE) == bytes(PAGE)


async def test_read_only_memory_can_be_written(disk: Disk) -> None:
    value = random_buffer(PAGE, 7)
    await disk.write_from(0, [value.toreadonly()])
    assert await read(disk, 0, PAGE) == value


async def test_empty_requests_do_nothing(disk: Disk) -> None:
    value, empty = random_buffer(PAGE, 8), aligned_buffer(PAGE)[:0]
    await disk.write_from(0, [])
    await disk.write_from(0, [empty, value, b"", empty])
    await disk.read_into(0, [empty])
    assert await read(disk, 0, PAGE) == value


async def test_many_requests_at_once(disk: Disk) -> None:
    """200 writers and readers, each on its own pages, some larger than a piece."""
    generator = random.Random(9)
    sizes = [generator.choice([1, 2, 16, 32]) * PAGE for _ in range(198)] + [5 * MIB] * 2
    ends: list[int] = []

    async def one(number: int, position: int, size: int) -> None:
        value = random_buffer(size, number)
        await disk.write_from(position, [value])
        copy = aligned_buffer(size)
        await disk.read_into(position, [copy])
        assert copy == value
        ends.append(number)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            position = 0
            for number, size in enumerate(sizes):
                nursery.start_soon(one, number, position, size)
                position += size
    assert sorted(ends) == list(range(200))


async def test_it_is_there_after_closing(disk: Disk, open_it: OpenedDisk) -> None:
    value = random_buffer(PAGE, 10)
    await disk.write_from(3 * MIB, [b"P2PSLOG\0".ljust(PAGE, b"\0")])
    await disk.write_from(0, [b"P2PSLOG\0".ljust(PAGE, b"\0"), value])
    await disk.sync()
    disk.close()
    again = open_it()
    assert await read(again, PAGE, PAGE) == value


async def test_a_closed_disk_says_so(disk: Disk) -> None:
    disk.close()
    disk.close()
    with pytest.raises(StoreClosed, match="disk was closed"):
        await read(disk, 0, PAGE)
    with pytest.raises(StoreClosed, match="disk was closed"):
        await disk.write_from(0, [aligned_buffer(PAGE)])
    with pytest.raises(StoreClosed, match="disk was closed"):
        await disk.sync()


async def test_syncs_at_once(disk: Disk) -> None:
    await disk.write_from(0, [aligned_buffer(PAGE)])
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(disk.sync)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [64 * KIB, 2 * MIB])
async def test_after_a_cancellation_memory_is_nobodys(disk: Disk, size: int, seed: int) -> None:
    """A storm of reads and writes that are cancelled; the memory of each is poisoned as soon as it is free.

    A read that went on would overwrite the poison; a write that went on would put it on the disk.
    """
    generator = random.Random(seed)
    poison, old, new = b"\xee", b"\x11", b"\x22"
    await disk.write_from(0, [memoryview_of(old, SIZE)])
    buffers: list[memoryview] = []
    cancelled = 0

    async def one(number: int) -> None:
        nonlocal cancelled
        buffer = memoryview_of(new, size)
        buffers.append(buffer)
        position = number % (SIZE // size) * size
        with trio.move_on_after(generator.random() * size / (100 * MIB)) as scope:
            if generator.random() < 0.5:
                await disk.read_into(position, [buffer])
            else:
                await disk.write_from(position, [buffer])
            await trio.sleep_forever()
        assert scope.cancelled_caught
        cancelled += 1
        buffer[:] = poison * size

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
    assert cancelled == 60
    # Whatever still waited in a queue comes before this.
    await disk.sync()
    content = await read(disk, 0, SIZE)
    assert content.count(old) + content.count(new) == SIZE
    assert all(bytes(buffer) == poison * size for buffer in buffers)


def memoryview_of(byte: bytes, size: int) -> memoryview:
    buffer = aligned_buffer(size)
    buffer[:] = byte * size
    return buffer
