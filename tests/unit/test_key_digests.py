"""Digests of many keys: those of each alone, however often and with whatever else they are asked for."""

from typing import Any

import pytest

from p2pstore import objects
from p2pstore.objects import batch_key_hasher, key_digest


def test_digests_of_a_batch_are_those_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_KEPT_DIGESTS", 40)
    digests = batch_key_hasher("space")
    keys = [f"key {number}" for number in range(100)]
    for start, count in [(0, 5), (0, 5), (3, 9), (0, 10), (10, 10), (20, 10), (0, 10), (0, 100)]:
        some = keys[start : start + count]
        assert digests(some) == [key_digest(key, "space") for key in some]
    assert digests([]) == []


def test_what_was_hashed_a_moment_ago_is_not_hashed_again() -> None:
    digests = batch_key_hasher("space")
    first = digests(["a", "b"])
    assert all(one is other for one, other in zip(first, digests(["a", "b"]), strict=True))


@pytest.mark.parametrize("wrong", ["", 5, None, ["a"], b"a", "k" * 1025, "\ud800"])
def test_what_is_no_key_is_refused_before_and_after(wrong: Any) -> None:
    digests = batch_key_hasher("space")
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            digests(["a", wrong])
        assert digests(["a"]) == [key_digest("a", "space")]
