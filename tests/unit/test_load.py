"""The load that a peer announces."""

from p2pstore.status.measures import INTERVAL_SECONDS, LoadMeter


def test_the_share_of_a_core_is_told_after_an_interval() -> None:
    meter = LoadMeter(10.0, 1.0, 16)
    assert not meter.sample(10.5, 1.5, 0.0)
    assert meter.sample(10.0 + INTERVAL_SECONDS, 1.0 + INTERVAL_SECONDS / 2, 0.0)
    assert meter.told_permille == 500


def test_small_changes_are_not_told() -> None:
    meter = LoadMeter(0.0, 0.0, 16)
    assert meter.sample(10.0, 8.0, 0.0)
    assert not meter.sample(20.0, 15.0, 0.0)
    assert meter.told_permille == 800
    assert meter.sample(30.0, 15.0, 0.0)
    assert meter.told_permille == 0


def test_upload_slots_that_are_taken_are_load_too() -> None:
    """A peer that sends large answers in threads, or waits for slow readers, takes little of a core."""
    meter = LoadMeter(0.0, 0.0, 16)
    assert meter.sample(10.0, 1.0, 80.0)
    assert meter.told_permille == 500
    assert meter.sample(20.0, 2.0, 240.0)
    assert meter.told_permille == 1000
    assert meter.sample(30.0, 8.0, 240.0)
    assert meter.told_permille == 600
