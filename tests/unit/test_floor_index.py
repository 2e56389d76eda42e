"""Floors in order of time: the same answers as sorting all of them gives."""

from __future__ import annotations

from random import Random

import pytest

from p2pstore.gossip.floors.floor_index import SLICE_BITS, FloorIndex


@pytest.mark.parametrize("span", [4, 1000], ids=["dense", "sparse"])
@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_plain_table(seed: int, span: int) -> None:
    rng = Random(seed)
    index: FloorIndex[int] = FloorIndex()
    clocks: dict[int, int] = {}
    for name in range(400):
        clock = rng.randrange(span << SLICE_BITS)
        if rng.random() < 0.6:
            clocks[name] = clock
            index.add(name, clock)
        elif rng.random() < 0.7 and clocks:
            gone = rng.choice(list(clocks))
            assert index.remove(gone, clocks.pop(gone))
            assert not index.remove(gone, clock)
        else:
            popped = index.pop_oldest(clock)
            first = min((c >> SLICE_BITS for c in clocks.values()), default=span)
            if first << SLICE_BITS > clock:
                assert popped is None
            else:
                assert popped is not None
                assert clocks.pop(popped) >> SLICE_BITS == first
        begin = -(-clock >> SLICE_BITS)
        expected = {other for other, c in clocks.items() if c >> SLICE_BITS >= begin}
        assert set(index.since(clock)) == expected
        cut = index.cut(10)
        below = sum(c < cut for c in clocks.values())
        assert below >= min(10, len(clocks))
