"""Which objects one GET_SMALL asks for."""

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.objects import CHUNK_BYTES, KIB
from p2pstore.transfer.data_messages import MAX_SMALL_BULK_BYTES
from p2pstore.transfer.reading.small_reads import MOST_ITEMS, Part, in_parts

ROOM = memoryview(bytearray(CHUNK_BYTES))
SIZES = st.one_of(st.integers(1, CHUNK_BYTES), st.sampled_from((1, 4 * KIB, 64 * KIB, CHUNK_BYTES)))


@given(st.lists(SIZES, max_size=700))
def test_parts_are_all_of_them_in_order_and_fit_into_an_answer(sizes: list[int]) -> None:
    views = [ROOM[:size] for size in sizes]
    most_bytes = max(sizes, default=CHUNK_BYTES)
    digests = [number.to_bytes(16) for number in range(len(sizes))]
    asked = in_parts(Part(digests, views, most_bytes))
    for part in asked:
        assert 0 < len(part.views) <= MOST_ITEMS
        assert sum(map(len, part.views)) <= MAX_SMALL_BULK_BYTES
    assert [digest for part in asked for digest in part.digests] == digests
    assert [len(view) for part in asked for view in part.views] == sizes
    assert {part.most_bytes for part in asked} <= {most_bytes}
