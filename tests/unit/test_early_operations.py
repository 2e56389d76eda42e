"""Operations that came ahead of their log: they are kept until the log tells of them, and no longer."""

from p2pstore.gossip.locations.location_lookups import EarlyOperations
from tests.unit.gossip_network import digest_of, location

A, B = 111, 222


def noted(early: EarlyOperations, number: int, sequence: int, now: float, member: int = A) -> bool:
    return early.note(member, (1, sequence), location(number, sequence).encode(), now)


def test_what_the_log_told_of_takes_no_room() -> None:
    """A key that is put again and again, and each time the log tells of it."""
    early = EarlyOperations(10, 60.0)
    assert noted(early, 1, 1, 0.0)
    for sequence in range(2, 100):
        assert noted(early, 7, sequence, 0.0)
        early.overtaken(A, (1, sequence), {digest_of(7)})
    assert len(early) == 1
    assert early.digests == {digest_of(1)}, "what did not go stays: nothing is counted that is gone"


def test_the_same_key_pushed_again_counts_once_and_from_the_last_time_on() -> None:
    early = EarlyOperations(10, 60.0)
    for now in range(30):
        assert noted(early, 7, now + 1, float(now))
    assert not noted(early, 7, 30, 30.0), "as old as the last one"
    assert len(early) == 1
    early.expire(29.0 + 59.9)
    assert early.digests == {digest_of(7)}
    early.expire(29.0 + 60.0)
    assert not early.digests
    assert len(early) == 0


def test_over_the_limit_the_oldest_go() -> None:
    early = EarlyOperations(3, 60.0)
    for number in range(4):
        noted(early, number, number + 1, float(number))
    noted(early, 1, 9, 4.0)  # it is young again
    noted(early, 5, 10, 5.0)
    assert early.digests == {digest_of(number) for number in (3, 1, 5)}


def test_who_pushes_much_pushes_out_nothing_of_others() -> None:
    early = EarlyOperations(10, 60.0)
    for number in range(4):
        noted(early, number, number + 1, 0.0, member=B)
    for number in range(100, 200):
        noted(early, number, number + 1, 1.0)
    assert len(early) == 10
    assert early.digests == {digest_of(number) for number in (*range(4), *range(194, 200))}
    for number in range(4, 40):  # the other one's turn: it goes on to half of what there is room for
        noted(early, number, number + 1, 2.0, member=B)
    assert sum(B in early.of(digest_of(number)) for number in range(40)) == 5
    early.expire(62.0)
    assert len(early) == 0


def test_each_owner_has_its_own() -> None:
    early = EarlyOperations(10, 60.0)
    noted(early, 1, 5, 0.0)
    noted(early, 1, 3, 1.0, member=B)
    early.overtaken(A, (1, 4), {digest_of(1)})
    assert set(early.of(digest_of(1))) == {A, B}, "the log is not there yet"
    early.overtaken(A, (1, 5), {digest_of(1)})
    assert set(early.of(digest_of(1))) == {B}
    early.expire(61.0)
    assert not early.of(digest_of(1))
