"""Consequences of failures of the disk."""

from __future__ import annotations

import errno

import pytest

from p2pstore.ssd_tier.health import (
    MAX_FAILED_DISCARDS,
    MAX_FAILED_READS,
    MAX_FAILED_SEGMENTS,
    Health,
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


def test_reads_that_fail_in_a_row_turn_it_off() -> None:
    health = Health()
    for _ in range(MAX_FAILED_READS - 1):
        health.read_failed(EIO)
    health.read_worked()
    for _ in range(MAX_FAILED_READS - 1):
        health.read_failed(EIO)
    assert health.state.value == TierState.OK.value
    health.read_failed(EIO)
    assert health.state.value == TierState.OFF.value
    assert health.why.startswith("16 reads in a row failed")


def test_discards_that_fail_in_a_row_turn_it_off() -> None:
    health = Health()
    for _ in range(MAX_FAILED_DISCARDS - 1):
        health.discards_failed(EIO)
    health.discards_worked()
    health.discards_failed(EIO)
    assert health.state.value == TierState.OK.value
    for _ in range(MAX_FAILED_DISCARDS - 1):
        health.discards_failed(EIO)
    assert health.state.value == TierState.OFF.value


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
