"""Batches of reads between peers that use nothing but TCP, as those of two hosts would."""

import random
from pathlib import Path
from typing import Any

import pytest

from p2pstore import NoSuchKey
from p2pstore.client.destinations import COPIED_BYTES, MOST_COPIED, BytesDestination
from p2pstore.objects import KIB, MIB
from tests.cluster.test_hung_ssd import peer
from tests.waiting import until


@pytest.mark.parametrize("first", [0, 10, COPIED_BYTES, 100_000])
async def test_new_values_of_all_sizes(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [first, 10, 0, 100_000, 16 * KIB, 16 * KIB + 1, 64 * KIB, 64 * KIB + 1, 5, 2 * MIB]
    items = [(f"k{n}", random.Random(n).randbytes(length)) for n, length in enumerate(lengths)]
    keys, values = [key for key, _ in items], [value for _, value in items]
    together = 0
    take = BytesDestination.take

    def taken(destination: BytesDestination, value: memoryview) -> None:
        nonlocal together
        together += 1
        take(destination, value)

    monkeypatch.setattr(BytesDestination, "take", taken)
    async with (
        peer(tmp_path, "owner", transport="tcp") as owner,
        peer(tmp_path, "reader", owner, transport="tcp") as reader,
    ):
        assert all(each.ok for each in await owner.put_many(items))
        await until(lambda: all(reader.contains_nowait(key) for key in keys))
        for turn in range(3):  # from the second one on it is known how to get there
            got = await reader.get_many([*keys, "nowhere", *keys[:3]])
            assert [each.value for each in got] == [*values, None, *values[:3]]
            assert isinstance(got[len(keys)].error, NoSuchKey)
            rooms = await reader.get_new_views(keys, lambda length: memoryview(bytearray(length)))
            assert [bytes(room) for room in rooms if isinstance(room, memoryview)] == values
            small = sum(0 < length <= COPIED_BYTES for length in [*lengths, *lengths[:3]])
            if turn and first in (0, 10, COPIED_BYTES):
                assert together >= (small if first else 0)
        await owner.put("k1", b"another", overwrite=True)
        await until(lambda: reader.locate_nowait("k1")[0].version > (0, 0))
        document: Any = (await reader.statistics())["peer"]
        assert set(document["received"]) == {"tcp"}


async def test_more_small_values_than_are_received_together(tmp_path: Path) -> None:
    items = [(f"k{number}", number.to_bytes(4, "little") * 3) for number in range(MOST_COPIED + 99)]
    async with (
        peer(tmp_path, "owner", transport="tcp") as owner,
        peer(tmp_path, "reader", owner, transport="tcp") as reader,
    ):
        assert all(each.ok for each in await owner.put_many(items))
        await until(lambda: all(reader.contains_nowait(key) for key, _ in items))
        for _ in range(2):
            got = await reader.get_many([key for key, _ in items])
            assert [(each.key, each.value) for each in got] == items
        room = memoryview(bytearray(12))
        with pytest.raises(ValueError, match="2 keys, but 1 places"):
            await reader.get_into_views(["k1", "k2"], [room])
        assert await reader.get_into_views(["k7"], [room]) == [12]
