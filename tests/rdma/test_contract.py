"""The contract of transports, kept by RDMA. Under trio only: it is the peers' way of reading."""

from collections.abc import AsyncIterator

import pytest

from p2pstore.objects import MIB
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.transport import BufferDestination
from tests.contract.sides import Side
from tests.contract.test_transport import (
    SEGMENT_BYTES,
    pattern,
    put,
    segment_of,
    test_a_buffer_that_is_too_small_stays_untouched,
    test_a_damaged_slot_or_trailer_is_refused,
    test_a_destination_may_refuse_a_version,
    test_a_flipped_byte_in_the_owners_memory_is_refused,
    test_a_key_that_the_holder_lacks,
    test_a_reader_cancelled_at_each_checkpoint_leaves_nothing,
    test_concurrent_pulls,
    test_memory_reused_under_the_reader_is_refused_or_exact,
    test_pull_delivers_exactly_the_value,
)
from tests.rdma.harness import RdmaHarness

__all__ = [
    "test_a_buffer_that_is_too_small_stays_untouched",
    "test_a_damaged_slot_or_trailer_is_refused",
    "test_a_destination_may_refuse_a_version",
    "test_a_flipped_byte_in_the_owners_memory_is_refused",
    "test_a_key_that_the_holder_lacks",
    "test_a_reader_cancelled_at_each_checkpoint_leaves_nothing",
    "test_concurrent_pulls",
    "test_memory_reused_under_the_reader_is_refused_or_exact",
    "test_pull_delivers_exactly_the_value",
]


@pytest.fixture
async def harness() -> AsyncIterator[RdmaHarness]:
    async with RdmaHarness.open_rdma(segment_of(SEGMENT_BYTES)) as opened:
        yield opened


@pytest.fixture
def side() -> Side:
    return Side("trio", TrioDriver())


async def test_pull_of_several_parts() -> None:
    segment = segment_of(160 * MIB)
    value = pattern(65 * MIB + 3)
    digest = put(segment, "key", value)
    buffer = bytearray(len(value))
    async with RdmaHarness.open_rdma(segment) as harness:
        transport = harness.transport(TrioDriver())
        await transport.pull(harness.copy(digest), digest, BufferDestination(buffer))
    assert buffer == value
