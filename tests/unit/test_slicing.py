"""Which chunks are there, who brings the others, and that nobody writes where another does."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pstore.transfer.slicing import Slices


def test_chunks_are_handed_out_in_runs_and_come_back() -> None:
    slices = Slices(10, 4)
    assert slices.take(1) == range(4)
    assert slices.take(2) == range(4, 8)
    slices.verified(1, 0)
    slices.verified(1, 2)
    slices.leave(1)
    assert slices.take(3) == range(1, 2)  # a run ends where something is there
    assert slices.take(3) == range(3, 4)
    assert slices.take(3) == range(8, 10)
    assert slices.take(3) == range(0)
    assert not slices.complete


def test_nothing_is_brought_by_two() -> None:
    slices = Slices(3, 4)
    slices.claim(1, range(1, 2))
    with pytest.raises(ValueError, match="not all free"):
        slices.claim(2, range(3))
    with pytest.raises(KeyError):
        slices.verified(2, 1)


class ManyReaders(RuleBasedStateMachine):
    """Readers that take, bring and leave in any order, against a model of sets."""

    @initialize(chunks=st.integers(1, 40), slice_chunks=st.integers(1, 16))
    def begin(self, chunks: int, slice_chunks: int) -> None:
        self.slices = Slices(chunks, slice_chunks)
        self.chunks = chunks
        self.there: set[int] = set()
        self.owned: dict[int, set[int]] = {reader: set() for reader in range(4)}

    @rule(reader=st.integers(0, 3))
    def take(self, reader: int) -> None:
        taken = set(range(self.chunks)) - self.there - set().union(*self.owned.values())
        run = self.slices.take(reader)
        assert set(run) <= taken
        assert bool(run) == bool(taken)
        assert len(run) <= self.slices.slice_chunks
        self.owned[reader] |= set(run)

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def bring(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([each for each in self.owned if self.owned[each]]))
        number = data.draw(st.sampled_from(sorted(self.owned[reader])))
        self.slices.verified(reader, number)
        self.owned[reader].remove(number)
        self.there.add(number)

    @rule(reader=st.integers(0, 3))
    def leave(self, reader: int) -> None:
        self.slices.leave(reader)
        self.owned[reader].clear()

    @invariant()
    def knows_when_it_is_complete(self) -> None:
        assert self.slices.there == len(self.there)
        assert self.slices.complete == (len(self.there) == self.chunks)


TestManyReaders = ManyReaders.TestCase
