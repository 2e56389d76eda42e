"""Readers of real peers get exact bytes or none, under changes of the memory and kills of any process."""

import pytest

from tests.readers.attack import attack_readers
from tests.readers.values import LENGTHS, is_right, value_of


@pytest.mark.slow
def test_no_reader_sees_a_wrong_byte() -> None:
    """With those of `test_reader.py`, 100,000 reads; more of them: `scripts/attack_readers`."""
    outcome = attack_readers(11_000, seed=1, actor_kills=6, peer_kills=2)
    assert outcome.complaints == []
    assert outcome.wrong == 0
    assert outcome.total >= 11_000
    assert min(outcome.reads.values()) >= 200
    assert outcome.torn > 0, "the attack disturbed nobody"


def test_what_is_not_the_value_is_told_from_it() -> None:
    lengths = set()
    for number in range(200):
        value = value_of("peer 0 key 1", number)
        lengths.add(len(value))
        assert is_right("peer 0 key 1", memoryview(value))
        assert not is_right("peer 0 key 2", memoryview(value))
        for wrong in (value[:-1], value + b"x", value[:-1] + bytes([value[-1] ^ 1])):
            assert not is_right("peer 0 key 1", memoryview(wrong))
    assert lengths == set(LENGTHS)
