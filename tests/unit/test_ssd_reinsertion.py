"""Which records of a reclaimed segment are kept."""

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.ssd_tier.log_segments import KEPT_SHARE, Candidate, choose_kept


def candidate(name: str, count: int, hits: int = 0, last_copy: bool = False) -> Candidate[str]:
    return Candidate(name, count, hits, last_copy)


def names(kept: list[Candidate[str]]) -> list[str]:
    return [each.record for each in kept]


def test_what_nobody_read_and_others_hold_is_not_kept() -> None:
    assert choose_kept([candidate("cold", 10)], 1000) == []


def test_hits_and_last_copies_are_kept_the_hottest_first() -> None:
    offered = [
        candidate("last", 50, last_copy=True),
        candidate("hot", 50, hits=9),
        candidate("warm", 50, hits=2),
        candidate("warm and last", 50, hits=2, last_copy=True),
        candidate("cold", 50),
    ]
    assert names(choose_kept(offered, 1000)) == ["hot", "warm and last", "warm", "last"]


def test_what_does_not_fit_is_skipped() -> None:
    offered = [candidate("large", 201, hits=9), candidate("small", 20, hits=1)]
    assert names(choose_kept(offered, 1000)) == ["small"]


@given(st.lists(st.builds(candidate, st.text(), st.integers(1, 500), st.integers(0, 3), st.booleans())))
def test_never_more_than_the_share(offered: list[Candidate[str]]) -> None:
    kept = choose_kept(offered, 1000)
    assert sum(each.bytes for each in kept) <= 1000 * KEPT_SHARE
    assert all(each.hits or each.last_copy for each in kept)
