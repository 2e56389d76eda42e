"""Up to where members have the same floors as this peer; the members in dispute, and those to ask."""

from __future__ import annotations

from itertools import pairwise

import pytest

from p2pstore.gossip.floors.floor_comparison import (
    DISPUTE_REFUSALS,
    DISPUTE_SECONDS,
    RECORDS_PER_SECOND,
    REFUSAL_SECONDS,
    WAITED_SECONDS,
    Agreements,
)

ONE, OTHER = 1, 2


def refused(*times: float, end: int = 100) -> Agreements:
    agreements = Agreements()
    for now in times:
        agreements.refuses(ONE, end, now)
    return agreements


# --- disputes --------------------------------------------------------------------------------


def test_a_member_that_refuses_again_and_again_is_in_dispute() -> None:
    agreements = refused(0.0, 5.0)
    assert not agreements.in_dispute(ONE, 0, 0.0)
    agreements.refuses(ONE, 100, 10.0)
    assert agreements.in_dispute(ONE, 0, 0.0)
    assert not agreements.in_dispute(OTHER, 0, 0.0)


def test_refusals_in_quick_succession_are_one() -> None:
    """Else a difference of a moment would do, where exchanges follow each other quickly."""
    agreements = refused(*(number / 100 for number in range(400)))
    assert not agreements.in_dispute(ONE, 0, 0.0)
    agreements.refuses(ONE, 100, 30.0)
    assert not agreements.in_dispute(ONE, 0, 0.0), "two, however far apart"


def test_a_dispute_takes_some_time() -> None:
    assert REFUSAL_SECONDS * (DISPUTE_REFUSALS - 1) == DISPUTE_SECONDS
    early = refused(0.0, 5.0, 9.9)
    assert not early.in_dispute(ONE, 0, 0.0)
    early.refuses(ONE, 100, 10.1)
    assert early.in_dispute(ONE, 0, 0.0)


@pytest.mark.parametrize(("records", "slack"), [(20 * RECORDS_PER_SECOND, 0.0), (0, 20.0)])
def test_it_takes_longer_where_much_has_to_travel(records: int, slack: float) -> None:
    """A member that comes out of a split has thousands of floors yet to hear of."""
    agreements = refused(*range(0, 30, 5))
    assert not agreements.in_dispute(ONE, records, slack)
    agreements.refuses(ONE, 100, 30.0)
    assert not agreements.in_dispute(ONE, records + RECORDS_PER_SECOND, slack)
    assert not agreements.in_dispute(ONE, records, slack + 1.0)
    assert agreements.in_dispute(ONE, records, slack)
    assert agreements.in_dispute(ONE, 10 * records, 10 * slack), "what was found once stays"


def test_time_without_answers_does_not_count() -> None:
    """A member that cannot be reached is waited for as long as any."""
    agreements = refused(0.0, 5.0, 10.0)
    assert not agreements.in_dispute(ONE, 10 * RECORDS_PER_SECOND, 0.0), "however late it is now"


def test_an_answer_that_agrees_ends_the_dispute() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.agrees(ONE, 99)
    assert agreements.in_dispute(ONE, 0, 0.0), "about less"
    agreements.agrees(ONE, 100)
    assert not agreements.in_dispute(ONE, 0, 0.0)
    agreements.refuses(ONE, 200, 15.0)
    assert not agreements.in_dispute(ONE, 0, 0.0), "it begins anew"


def test_a_record_that_agrees_ends_the_dispute_if_it_agrees_with_all() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.announced[ONE] = 150
    assert agreements.with_all(ONE, 99) == 99
    assert agreements.in_dispute(ONE, 0, 0.0)
    assert agreements.with_all(ONE, 100) == 100
    assert not agreements.in_dispute(ONE, 0, 0.0)


def test_the_same_end_is_asked_about_again() -> None:
    """Else a member that is always a little late would be taken for one that lies."""
    agreements = refused(0.0, end=100)
    agreements.refuses(ONE, 200, 5.0)
    assert agreements.disputed_end(ONE, 50) == 100
    assert agreements.disputed_end(ONE, 100) == 0, "nobody answers about so old ones"
    assert agreements.disputed_end(OTHER, 50) == 0


# --- agreements ------------------------------------------------------------------------------


def test_what_a_member_said_directly_counts_as_its_record_does() -> None:
    agreements = Agreements()
    agreements.announced[ONE] = 50
    assert (agreements.with_me(ONE), agreements.with_all(ONE, 40)) == (50, 40)
    agreements.agrees(ONE, 50)
    assert (agreements.with_me(ONE), agreements.with_all(ONE, 40)) == (50, 40), "its record is right"
    agreements.agrees(ONE, 60)
    assert (agreements.with_me(ONE), agreements.with_all(ONE, 1)) == (60, 60)
    agreements.agrees(ONE, 30)
    assert agreements.with_me(ONE) == 60, "what was told once stays"
    assert (agreements.with_me(OTHER), agreements.with_all(OTHER, 40)) == (0, 0)


def test_a_wait_is_over_when_all_is_confirmed_of_its_beginning() -> None:
    """A member that confirms a little now and then would be waited for without end."""
    agreements = Agreements()
    waited = [agreements.waited(ONE, 10 + now // 10, 100 + now, float(now)) for now in range(50)]
    assert waited == [float(now) for now in range(50)]
    assert agreements.waited(ONE, 99, 150, 50.0) == 50.0
    assert agreements.waited(ONE, 100, 150, 51.0) == 0.0
    assert agreements.waited(ONE, 149, 200, 52.0) == 1.0, "now it is to agree about 150"


def test_time_in_which_nobody_looked_does_not_count() -> None:
    agreements = Agreements()
    agreements.waited(ONE, 0, 100, 0.0)
    assert agreements.waited(ONE, 0, 100, 500.0) == 1.0
    agreements.forget_old(500.0 + WAITED_SECONDS)
    assert agreements.waited(ONE, 0, 100, 5_000.0) == 2.0
    agreements.forget_old(5_001.0 + WAITED_SECONDS)
    assert agreements.waited(ONE, 0, 100, 9_999.0) == 0.0


def test_that_it_was_waited_for_stays_when_a_member_goes() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.agrees(ONE, 50)
    for now in range(10):
        agreements.waited(ONE, 50, 100, float(now))
    agreements.forget(ONE)
    assert agreements.with_me(ONE) == 0
    assert not agreements.in_dispute(ONE, 0, 0.0)
    assert agreements.waited(ONE, 0, 100, 10.0) == 10.0
    agreements.expelled(ONE)
    assert agreements.waited(ONE, 0, 100, 11.0) == 0.0


def test_ends_that_are_not_crowded_any_more_are_not_waited_for() -> None:
    agreements = refused(0.0, 5.0, 10.0)
    agreements.agrees(ONE, 50)
    agreements.waited(ONE, 0, 100, 0.0)
    agreements.end_waiting()
    assert not agreements.in_dispute(ONE, 0, 0.0)
    assert agreements.waited(ONE, 0, 100, 1.0) == 0.0
    assert agreements.with_me(ONE) == 50
    agreements.clear()
    assert agreements.with_me(ONE) == 0


# --- asking ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("living", "interval"), [(5, 5.0), (25, 5.0), (100, 20.0)])
def test_all_together_do_not_ask_a_member_too_often(living: int, interval: float) -> None:
    agreements = Agreements()
    asked = [now / 4 for now in range(400) if agreements.take_to_ask([ONE], living, now / 4) == [ONE]]
    assert asked[0] == 0.0
    assert {later - sooner for sooner, later in pairwise(asked)} == {interval}
    assert agreements.take_to_ask([ONE, OTHER], living, asked[-1]) == [OTHER]
