"""Requests to disks: cut in pieces, whatever their buffers are."""

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.ssd_tier.disk_protocol import ALIGNMENT_BYTES as PAGE
from p2pstore.ssd_tier.disk_protocol import MAX_BUFFERS, cut


@given(
    pages=st.lists(st.integers(0, 40), max_size=12),
    piece_pages=st.integers(1, 20),
    position=st.integers(0, 1000).map(lambda page: page * PAGE),
)
def test_pieces_are_the_request(pages: list[int], piece_pages: int, position: int) -> None:
    buffers = [bytes([number % 251]) * (each * PAGE) for number, each in enumerate(pages)]
    pieces = cut(position, buffers, piece_pages * PAGE)
    assert b"".join(part for _, parts in pieces for part in parts) == b"".join(buffers)
    lengths = [sum(map(len, parts)) for _, parts in pieces if parts]
    assert len(set(lengths[:-1])) <= 1
    assert all(0 < length <= piece_pages * PAGE * 3 / 2 + PAGE for length in lengths)
    assert all(length % PAGE == 0 for length in lengths)
    pieces = [piece for piece in pieces if piece[1]]
    assert [at for at, _ in pieces] == [position + sum(lengths[:i]) for i in range(len(lengths))]
    assert all(len(part) for _, parts in pieces for part in parts)


def test_a_header_more_is_no_piece_more() -> None:
    assert len(cut(0, [bytes(PAGE), bytes(64 * PAGE)], 64 * PAGE)) == 1
    assert [len(parts[-1]) for _, parts in cut(0, [bytes(PAGE), bytes(128 * PAGE)], 64 * PAGE)] == [
        64 * PAGE,
        64 * PAGE,
    ]


def test_no_piece_has_more_buffers_than_a_system_call_takes() -> None:
    pieces = cut(0, [bytes(PAGE)] * (2 * MAX_BUFFERS + 1), 1 << 40)
    assert [len(parts) for _, parts in pieces] == [MAX_BUFFERS, MAX_BUFFERS, 1]
    assert [at for at, _ in pieces] == [0, MAX_BUFFERS * PAGE, 2 * MAX_BUFFERS * PAGE]
