"""The block that a missing one follows in its chain, and how much of a chain of blocks each peer holds."""

from p2pstore.client.answers import PrefixRuns
from p2pstore.client.presence_calls import MAX_MISSING, PrefixChains
from p2pstore.local.local_messages import Copy
from p2pstore.objects import DIGEST_BYTES, format_peer_id


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def chain(first: int, count: int) -> bytes:
    return b"".join(digest(first + number) for number in range(count))


def test_a_missing_block_follows_the_one_that_was_asked_about_before_it() -> None:
    chains = PrefixChains()
    chains.matched(chain(0, 6), 4)
    assert [chains.before(digest(number)) for number in range(3, 7)] == [
        *(b"", digest(3), digest(4), b"")
    ]
    chains.matched(chain(10, 3), 0)
    assert chains.before(digest(10)) == b"", "the head follows nothing"
    assert chains.before(digest(11)) == digest(10)


def test_missing_blocks_are_remembered_up_to_a_limit() -> None:
    chains = PrefixChains()
    chains.matched(chain(0, 2 * MAX_MISSING), 2)
    assert chains.before(digest(MAX_MISSING + 1)) == digest(MAX_MISSING)
    assert chains.before(digest(MAX_MISSING + 2)) == b""
    chains.matched(chain(10**6, 3), 1)
    assert chains.before(digest(2)) == b""
    assert chains.before(digest(10**6 + 2)) == digest(10**6 + 1)


DRAM, SSD = 0, 1


def copy(number: int, tier: int = DRAM, *, reachable: bool = True) -> Copy:
    return Copy(bytes([number]) * 8, f"peer {number}", tier, 4096, 1, 1, False, 0, False, reachable)


def runs(*blocks: list[Copy]) -> list[tuple[str, int, int]]:
    found = PrefixRuns()
    for each in blocks:
        if not found.go_on([each]):
            break
    whole = PrefixRuns()
    whole.go_on(blocks)
    assert whole.holders() == found.holders(), "in one answer or in several"
    assert all(
        each.peer_id == format_peer_id(bytes([int(each.peer[5:])]) * 8) for each in whole.holders()
    )
    return [(each.peer, each.blocks, each.memory_blocks) for each in whole.holders()]


def test_runs_end_where_a_block_is_missing() -> None:
    assert runs([copy(1), copy(2)], [copy(2)], [copy(1), copy(2)]) == [
        ("peer 2", 3, 3),
        ("peer 1", 1, 1),
    ]


def test_who_does_not_have_the_first_block_has_no_run() -> None:
    assert runs([copy(1)], [copy(1), copy(2)], [copy(2)]) == [("peer 1", 2, 2)]


def test_nothing_counts_behind_a_block_that_nobody_has() -> None:
    assert runs([copy(1)], [], [copy(1)]) == [("peer 1", 1, 1)]
    assert runs([]) == []


def test_what_is_on_an_ssd_is_part_of_the_run() -> None:
    assert runs([copy(1)], [copy(1, SSD)], [copy(2)]) == [("peer 1", 2, 1)]


def test_copies_that_cannot_be_reached_do_not_count() -> None:
    assert runs([copy(1, reachable=False), copy(2)]) == [("peer 2", 1, 1)]
