"""A log that changes while it is copied: the copy is what it held at one place."""

from __future__ import annotations

from random import Random

import pytest

from p2pstore.gossip.locations import log as log_copy
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.locations.snapshots import check_snapshot
from p2pstore.gossip.records import LOCATION_BYTES, decode_location
from tests.unit.gossip_network import digest_of, location


def change(log: OwnLog, rng: Random, keys: int) -> None:
    number = rng.randrange(keys)
    held = log.held(digest_of(number))
    if held is not None and rng.random() < 0.6:
        log.remove(digest_of(number), decode_location(held).version)
    else:
        log.add(location(number, log.sequence + 1))


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_is_what_the_log_held_at_its_head(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(log_copy, "STEP_RECORDS", 16)
    rng, log = Random(seed), OwnLog(5)
    for _ in range(300):
        change(log, rng, 150)
    changes = rng.choice((0, 1, 3, 30))
    at_head: dict[int, bytes] = {log.sequence: log.snapshot()}
    with log.copying() as copy, log.copying() as other:
        while not log.copy_on(copy):
            for _ in range(changes):
                change(log, rng, rng.choice((20, 150, 300)))
            at_head[log.sequence] = log.snapshot()
        while not log.copy_on(other):
            pass
    for each in (copy, other):
        checked = check_snapshot(b"".join(each.parts))  # no key is there twice
        assert (checked.count, checked.set_hash) == (each.head.count, each.head.set_hash)
        assert each.incarnation == 5
        assert records_of(b"".join(each.parts)) == records_of(at_head[each.head.sequence])


def records_of(packed: bytes) -> set[bytes]:
    return {packed[at : at + LOCATION_BYTES] for at in range(0, len(packed), LOCATION_BYTES)}


def test_a_log_that_begins_anew_meanwhile_is_copied_as_the_new_one() -> None:
    log = OwnLog(5)
    log.add(location(1))
    log.add(location(1, 2))
    with log.copying() as copy:
        log.restart(6)
        while not log.copy_on(copy):
            pass
    assert (copy.incarnation, copy.head, b"".join(copy.parts)) == (6, log.head, log.snapshot())
    assert copy.head.sequence == 1


def test_an_empty_log_is_copied_at_once() -> None:
    log = OwnLog(5)
    with log.copying() as copy:
        assert log.copy_on(copy)
    assert (copy.head, b"".join(copy.parts)) == (log.head, b"")


def test_a_copy_that_nobody_wants_any_more_costs_nothing() -> None:
    log = OwnLog(5)
    log.add(location(1))
    with log.copying() as copy:
        log.add(location(2))
    log.add(location(3))
    assert not log._copies
    assert copy._noted == {digest_of(2)}
