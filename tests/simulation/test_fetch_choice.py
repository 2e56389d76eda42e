"""Decisions by estimates, whether to fetch or to compute, against an oracle and against always fetching."""

import pytest

from p2pstore.core.gets.fetch_estimates import ReadRates
from simulation.measures.fetch_choice import PARTS, measure, replay
from simulation.measures.figures import Case
from tests.unit.test_trace_one_cache import conversation_trace, published
from tests.unit.trace_requests import conversations


@pytest.mark.parametrize("part", PARTS)
def test_regret_is_small_and_never_worse_than_always_fetching(part: str) -> None:
    measured = measure(Case(4, seed=1, part=part, requests=conversations(1500)))
    assert all(figure.holds for figure in measured.figures), measured.figures


@published
@pytest.mark.parametrize("part", PARTS)
def test_regret_on_the_published_trace(part: str) -> None:
    measured = measure(Case(10, seed=2, part=part, requests=conversation_trace()))
    assert all(figure.holds for figure in measured.figures), measured.figures


def test_who_learns_nothing_regrets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadRates, "observe", lambda *_: None)
    requests = conversations(300)
    for part in ("slow", "different"):
        assert replay(requests, PARTS[part], peers=4).regret > 0.1
    monkeypatch.setattr(
        "simulation.measures.fetch_choice.worth_fetching", lambda _, prefill: len(prefill)
    )
    assert replay(requests, PARTS["slow"], peers=4).regret > 1.0
    assert replay(requests, PARTS["slow"], peers=4).worse == 0.0
