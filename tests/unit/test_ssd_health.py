"""Consequences of failures of the disk; bandwidth and the rest of what the tier counts."""

import errno
from collections.abc import Callable

import pytest

from p2pstore.ssd_tier.health import (
    MAX_FAILED_DISCARDS,
    MAX_FAILED_READS,
    MAX_FAILED_SEGMENTS,
    Bandwidth,
    Health,
    Measures,
    TierState,
)

EIO = OSError(errno.EIO, "broken")


def test_a_few_failed_segments_are_borne() -> None:
    health = Health()
    health.write_failed(EIO)
    for _ in range(MAX_FAILED_SEGMENTS - 2):
        health.sync_failed(EIO)
    assert health.state.value == TierState.OK.value
    health.sync_failed(EIO)
    assert health.state.value == TierState.READ_ONLY.value
    assert "syncing failed, 3 times by now" in health.why
    assert (health.write_errors, health.sync_errors) == (1, 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_is_read_only_at_once(number: int) -> None:
    health = Health()
    health.write_failed(OSError(number, "no"))
    assert health.state.value == TierState.READ_ONLY.value


@pytest.mark.parametrize(
    ("most", "failed", "worked", "why"),
    [
        (MAX_FAILED_READS, Health.read_failed, Health.read_worked, "16 reads in a row failed"),
        (MAX_FAILED_DISCARDS, Health.discards_failed, Health.discards_worked, ""),
    ],
    ids=["reads", "discards"],
)
def test_failures_in_a_row_turn_it_off(
    most: int, failed: Callable[..., None], worked: Callable[[Health], None], why: str
) -> None:
    health = Health()
    for _ in range(most - 1):
        failed(health, EIO)
    worked(health)
    for _ in range(most - 1):
        failed(health, EIO)
    assert health.state.value == TierState.OK.value
    failed(health, EIO)
    assert health.state.value == TierState.OFF.value
    assert health.why.startswith(why)


def test_it_never_gets_better_and_the_reason_stays() -> None:
    health = Health()
    for _ in range(MAX_FAILED_READS):
        health.read_failed(EIO)
    why = health.why
    health.read_worked()
    health.write_failed(OSError(errno.ENOSPC, "full"))
    assert (health.state, health.why) == (TierState.OFF, why)


def test_a_disk_that_nobody_will_find_again_is_read_only_and_says_what_to_do() -> None:
    health = Health()
    health.misplaced("it was deleted")
    assert (health.state, health.why) == (TierState.READ_ONLY, "it was deleted")
    assert "put it back" in health.cure
    for _ in range(MAX_FAILED_READS):
        health.read_failed(EIO)
    assert health.state is TierState.OFF
    assert "replace it" in health.cure


def test_bandwidth_is_that_of_the_last_ten_seconds() -> None:
    bandwidth = Bandwidth()
    for second in range(20):
        bandwidth.add(100, now=second + 0.5)
    assert bandwidth.bytes_per_second(20.0) == 100
    assert bandwidth.bytes_per_second(25.0) == 50
    assert bandwidth.bytes_per_second(40.0) == 0
    assert bandwidth.total_bytes == 2000


def test_a_second_under_way_does_not_count_yet() -> None:
    bandwidth = Bandwidth()
    bandwidth.add(1000, now=3.2)
    assert bandwidth.bytes_per_second(3.9) == 0
    assert bandwidth.bytes_per_second(4.0) == 100


def test_write_amplification() -> None:
    measures = Measures()
    assert measures.write_amplification == 0
    measures.stored_bytes = 1000
    measures.written.add(1250, now=0)
    measures.hits, measures.misses = 3, 1
    document = measures.document(now=0)
    assert document["write_amplification"] == 1.25
