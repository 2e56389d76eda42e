"""How full a segment stays while values of all sizes come and go."""

from statistics import mean

import pytest

from p2pstore.memory.segment import Segment
from p2pstore.objects import GIB
from simulation.segment_checks import check_segment
from tests.unit.segment_churn import LOADS, churn, segment_for


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_mixed_load_leaves_little_unused(load: str, seed: int) -> None:
    segment = segment_for(1 * GIB, Segment)
    churned = churn(segment, LOADS[load], 1500, seed)
    assert churned.evicted > 1000, "the load did not churn"
    assert mean(churned.used) >= 0.95
    assert mean(churned.payload) >= 0.95
    check_segment(segment)
