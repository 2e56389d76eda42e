"""How many large answers are on their way, and for how long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pstore.transfer.serving.serving_limits import Uploads


def test_only_who_knows_other_holders_is_refused() -> None:
    uploads = Uploads(2)
    assert uploads.begin(1.0, may_refuse=True)
    assert uploads.begin(2.0)
    assert not uploads.begin(3.0, may_refuse=True)
    assert uploads.begin(3.0)
    assert uploads.taken == 3
    for began in (1.0, 2.0):
        uploads.end(began, 4.0)
    assert uploads.begin(4.0, may_refuse=True)


def test_seconds_are_of_those_that_ended_and_of_those_on_their_way() -> None:
    uploads = Uploads(16)
    assert uploads.seconds(5.0) == 0.0
    uploads.begin(10.0)
    uploads.begin(11.0)
    assert uploads.seconds(12.0) == pytest.approx(3.0)
    uploads.end(10.0, 14.0)
    assert uploads.seconds(14.0) == pytest.approx(7.0)
    uploads.end(11.0, 15.0)
    assert uploads.seconds(99.0) == pytest.approx(8.0)


def test_any_thread_may_count() -> None:
    uploads = Uploads(16)

    def use(number: int) -> None:
        for moment in range(2000):
            uploads.begin(float(moment))
            uploads.end(float(moment), moment + 1.0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert uploads.taken == 0
    assert uploads.seconds(0.0) == pytest.approx(8000.0)
