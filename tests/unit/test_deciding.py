"""The table of puts of a key that exists."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from p2pstore.core.puts.deciding import Likeness, Standing, Verdict, decide
from p2pstore.objects import ZERO_VERSION
from p2pstore.put_facts import PutFacts, PutOptions

HERE, THERE = {"entry": SimpleNamespace()}, {"copy": SimpleNamespace()}
PLACES: dict[str, dict[str, Any]] = {"memory": HERE, "ssd": {}, "elsewhere": THERE}
PLAIN, PINNED, OVERWRITE = PutOptions(), PutOptions(pin=1), PutOptions(overwrite=True)


def verdict(place: str, likeness: Likeness, options: PutOptions, reservation: int = 1) -> Verdict:
    facts = PutFacts(reservation, "k", b"", 1, b"", 1, options)
    return decide(facts, Standing(ZERO_VERSION, likeness, **PLACES[place]))


@pytest.mark.parametrize(("place", "reservation"), [*product(PLACES, (0, 1))])
def test_other_bytes_stay_unless_they_are_overwritten(place: str, reservation: int) -> None:
    assert verdict(place, Likeness.OTHER, PLAIN, reservation) is Verdict.REFUSE
    assert verdict(place, Likeness.OTHER, OVERWRITE, reservation) is Verdict.CREATE


@pytest.mark.parametrize("options", [PLAIN, PINNED, OVERWRITE])
def test_the_same_value_stays_what_it_is(options: PutOptions) -> None:
    assert verdict("memory", Likeness.SAME, options) is Verdict.KEEP
    assert verdict("ssd", Likeness.SAME, options) is Verdict.JOIN
    assert verdict("elsewhere", Likeness.SAME, options) is Verdict.JOIN


def test_a_copy_whose_trailer_has_to_be_read_is_brought() -> None:
    assert verdict("ssd", Likeness.BYTES, PLAIN, 0) is Verdict.BRING
    assert verdict("elsewhere", Likeness.BYTES, OVERWRITE) is Verdict.BRING


def test_bytes_are_asked_for_only_where_they_are_needed() -> None:
    assert verdict("memory", Likeness.SAME, PINNED, 0) is Verdict.KEEP
    assert verdict("ssd", Likeness.SAME, PLAIN, 0) is Verdict.KEEP
    for options in (PINNED, PutOptions(ttl_ms=1), PutOptions(2)):
        assert verdict("ssd", Likeness.SAME, options, 0) is Verdict.NEED_BYTES
    assert decide(PutFacts(1, "k", b"", 1, b"", 1, PLAIN), None) is Verdict.CREATE
