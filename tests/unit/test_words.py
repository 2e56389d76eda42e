"""Words beside the logs: they are kept until the log tells of them, and for a while; hearsay stands beside them."""

from p2pstore.gossip.locations.words import HEARSAY_PER_KEY, Words
from p2pstore.gossip.records import decode_location
from tests.unit.gossip_network import digest_of, location

A, B = 111, 222
FAR = 1 << 61


def noted(words: Words, number: int, sequence: int, now: float, member: int = A) -> bool:
    return words.note(member, (1, sequence), location(number, sequence).encode(), now)


def rumoured(words: Words, clock: int, sequence: int, member: int = A) -> bool:
    return words.note(member, (1, sequence), location(1, clock).encode(), 0.0, hearsay=True)


def said(words: Words) -> dict[bool, int]:
    """Of the first key, by whether it is hearsay: the clock of the version."""
    return {
        hearsay: decode_location(word.operation).version.clock
        for (_, hearsay), word in words.of(digest_of(1)).items()
    }


def test_what_the_log_told_of_takes_no_room() -> None:
    """A key that is put again and again, and each time the log tells of it."""
    words = Words(10, 60.0)
    assert noted(words, 1, 1, 0.0)
    for sequence in range(2, 100):
        assert noted(words, 7, sequence, 0.0)
        words.overtaken(A, (1, sequence), {digest_of(7)})
    assert len(words) == 1
    assert words.digests == {digest_of(1)}, "what did not go stays: nothing is counted that is gone"


def test_the_same_key_said_again_counts_once_and_from_the_last_time_on() -> None:
    words = Words(10, 60.0)
    for now in range(30):
        assert noted(words, 7, now + 1, float(now))
    assert not noted(words, 7, 30, 30.0), "as old as the last one"
    assert not noted(words, 7, 2, 30.0), "of an earlier place"
    assert len(words) == 1
    words.expire(29.0 + 59.9)
    assert words.digests == {digest_of(7)}
    words.expire(29.0 + 60.0)
    assert not words.digests
    assert len(words) == 0


def test_over_the_limit_the_oldest_go() -> None:
    words = Words(3, 60.0)
    for number in range(4):
        noted(words, number, number + 1, float(number))
    noted(words, 1, 9, 4.0)  # it is young again
    noted(words, 5, 10, 5.0)
    assert words.digests == {digest_of(number) for number in (3, 1, 5)}


def test_who_says_much_pushes_out_nothing_of_others() -> None:
    words = Words(10, 60.0)
    for number in range(4):
        noted(words, number, number + 1, 0.0, member=B)
    for number in range(100, 200):
        noted(words, number, number + 1, 1.0)
    assert len(words) == 10
    assert words.digests == {digest_of(number) for number in (*range(4), *range(194, 200))}
    for number in range(4, 40):  # the other one's turn: it goes on to half of what there is room for
        noted(words, number, number + 1, 2.0, member=B)
    assert sum((B, False) in words.of(digest_of(number)) for number in range(40)) == 5
    words.expire(62.0)
    assert len(words) == 0


def test_each_owner_has_its_own() -> None:
    words = Words(10, 60.0)
    noted(words, 1, 5, 0.0)
    noted(words, 1, 3, 1.0, member=B)
    words.overtaken(A, (1, 4), {digest_of(1)})
    assert set(words.of(digest_of(1))) == {(A, False), (B, False)}, "the log is not there yet"
    words.overtaken(A, (1, 5), {digest_of(1)})
    assert set(words.of(digest_of(1))) == {(B, False)}
    words.expire(61.0)
    assert not words.of(digest_of(1))


def test_hearsay_stands_beside_what_the_owner_says_until_its_log_or_its_denial() -> None:
    words = Words(10, 60.0)
    noted(words, 1, 7, 0.0)
    assert rumoured(words, 9, FAR)
    assert said(words) == {False: 7, True: 9}
    words.drop_hearsay(A, digest_of(1))
    assert said(words) == {False: 7}
    rumoured(words, 9, FAR)
    words.overtaken(A, (1, 7), {digest_of(1)})
    assert len(words) == 0


def test_among_hearsay_no_place_hides_a_newer_version() -> None:
    words = Words(10, 60.0)
    rumoured(words, 2, FAR)
    assert rumoured(words, 3, 7)
    assert not rumoured(words, 2, FAR)
    assert said(words) == {True: 3}


def test_a_holder_has_its_say_also_where_others_said_much() -> None:
    words = Words(1000, 60.0)
    for member in range(2 * HEARSAY_PER_KEY):
        rumoured(words, 9, 1, member=1000 + member)
    assert len(words) == HEARSAY_PER_KEY
    assert noted(words, 1, 2, 0.0)
