"""Peers for tests of commands."""

from collections.abc import Iterator

import pytest

from tests.cluster.machines import Machine, Peer, new_machine
from tests.waiting import eventually


@pytest.fixture
def machine() -> Iterator[Machine]:
    with new_machine() as machine:
        yield machine


@pytest.fixture(scope="session")
def pair() -> Iterator[tuple[Peer, Peer]]:
    """Two peers that know each other, for tests that leave both alive, and use keys of their own."""
    with new_machine() as machine:
        first = machine.join("first")
        second = machine.join("second", "--bootstrap", first.ready["control"])
        eventually(lambda: first.alive() == second.alive() == 2)
        yield first, second
