"""kill -9 of a process that writes to an SSD tier."""

from pathlib import Path

import pytest

from tests.cluster.cold_crashes import Crashes


@pytest.mark.slow
def test_a_writing_process_is_killed(tmp_path: Path) -> None:
    """More of it: `scripts/crash_ssd`."""
    outcome = Crashes(tmp_path, seed=1).run(12, tell=print)
    assert not outcome.complaints
    assert outcome.rounds == 12
    assert outcome.stored > 40
    assert outcome.discarded > 12
    assert outcome.found > 40
