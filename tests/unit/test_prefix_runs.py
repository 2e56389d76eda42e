"""How much of a chain of blocks each peer holds, from answers about some of the blocks at a time."""

from __future__ import annotations

from p2pstore.client.answers import PrefixRuns
from p2pstore.local.local_messages import Copy
from p2pstore.objects import format_peer_id

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
