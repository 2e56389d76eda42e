"""When a lasting client calls its peer, and what a scheduler is told meanwhile."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pstore.client.read_ledger import ReadLedger
from p2pstore.integrations.engine_client import (
    ANSWER_SECONDS,
    KEPT_SECONDS,
    PAUSE_SECONDS,
    Breaker,
    Lookups,
)

SOON = ANSWER_SECONDS / 2


class BreakerRules(RuleBasedStateMachine):
    """Calls are made after a probe that was answered and before the next failure only; probes have a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.usable = False
        self.probe_at = 0.0

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def fail(self) -> None:
        self.breaker.trip(self.now)
        if self.usable:
            self.usable, self.probe_at = False, self.now

    @rule(answered=st.booleans())
    def probe(self, answered: bool) -> None:
        if self.breaker.probe_in(self.now) == 0:
            self.breaker.probed(self.now, answered=answered)
            self.usable, self.probe_at = answered, self.now + PAUSE_SECONDS

    @invariant()
    def calls_are_made_to_a_peer_that_answers(self) -> None:
        assert self.breaker.closed == self.usable
        due = self.breaker.probe_in(self.now)
        assert (due is None) == self.usable
        if due is not None:
            assert due == max(0.0, self.probe_at - self.now)


TestBreakerRules = BreakerRules.TestCase


def test_a_question_is_open_until_its_answer_which_lasts_from_when_it_is_read() -> None:
    lookups = Lookups()
    assert [lookups.look_up(key, 0.0) for key in "aab"] == [None] * 3
    assert lookups.take() == ["a", "b"]
    assert lookups.take() == []
    lookups.answered(["a", "b"], [True, False])
    assert [lookups.look_up(key, 50.0) for key in "ab"] == [True, False]
    assert lookups.look_up("a", 50.0 + KEPT_SECONDS / 2) is True
    assert lookups.look_up("a", 50.0 + KEPT_SECONDS) is None
    assert lookups.take() == ["a"]


def test_a_late_peer_costs_one_deadline_in_all() -> None:
    lookups = Lookups()
    assert lookups.look_up("a", 0.0) is None
    assert lookups.look_up("b", SOON) is None
    keys = lookups.take()
    assert lookups.look_up("a", ANSWER_SECONDS) is False
    assert [lookups.look_up(key, ANSWER_SECONDS) for key in "bc"] == [False, False]
    assert lookups.take() == []
    lookups.answered(keys, [True, True])
    assert lookups.look_up("a", 9.0) is True
    assert lookups.look_up("c", 9.0) is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 0.2), st.booleans())))
def test_no_question_stays_open_for_longer_than_its_deadline(
    steps: list[tuple[str, float, bool]],
) -> None:
    lookups, now = Lookups(), 0.0
    first_asked: dict[str, float] = {}
    for key, seconds, answers in steps:
        now += seconds
        if answers:
            taken = lookups.take()
            lookups.answered(taken, [True] * len(taken))
        if lookups.look_up(key, now) is None:
            assert now < first_asked.setdefault(key, now) + ANSWER_SECONDS
        else:
            first_asked.pop(key, None)


def test_touched_objects_are_reported_as_read_zero_times() -> None:
    stirs: list[None] = []
    ledger = ReadLedger(lambda: stirs.append(None))
    ledger.read(b"read", 100)
    ledger.touched([b"read", b"touched"])
    assert stirs
    report = ledger.take()
    assert [(each.digest, each.count) for each in report.accesses] == [(b"read", 1), (b"touched", 0)]
