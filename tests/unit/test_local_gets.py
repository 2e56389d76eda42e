"""A peer's replies to local clients that get, without sockets."""

from __future__ import annotations

from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pstore.core.operation import Operation
from p2pstore.gossip.records import LocationRecord
from p2pstore.local import local_messages as local
from p2pstore.local.local_clients import LocalClient
from p2pstore.local.local_protocol import Access
from p2pstore.objects import Version, key_digest
from p2pstore.peer.for_clients.local_gets import LocalGets
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Locations, Push
from p2pstore.wire import Code
from tests.unit.core_harness import NAMESPACE, OTHER_INCARNATION, Harness, clock_at, digests_asked
from tests.unit.test_core_partitioned import foreign_key, partitioned

CLIENT = LocalClient(7, NAMESPACE, Access.WRITE, 1, "")


def gets_of(world: Harness) -> LocalGets:
    async def complete(operation: Operation) -> Any:
        assert operation.done
        return operation.result

    node: Any = SimpleNamespace(
        core=world.core, now=world.now, complete=complete, routes=SimpleNamespace(reading_order=list)
    )
    return LocalGets(node, office=None, max_leased_bytes=0)  # type: ignore[arg-type]  # no ticket is asked for


@pytest.mark.parametrize(("homes_answer", "code"), [(False, Code.UNAVAILABLE), (True, Code.NO_SUCH_KEY)])
async def test_a_plan_for_a_key_of_which_nobody_can_tell_says_so(homes_answer: bool, code: Code) -> None:
    world = partitioned()
    digest = key_digest(foreign_key(world), NAMESPACE)
    planning = gets_of(world).plan(CLIENT, local.Plan(digest))
    assert isinstance(planning, Awaitable)
    for _ in range(200):
        for ask in world.asks(DataKind.LOOKUP):
            reply = Locations([[] for _ in digests_asked(ask)], [0]) if homes_answer else None
            world.answer(ask, reply)
        world.pass_time(0.02)
    planned = await planning
    assert isinstance(planned, local.Planned)
    (item,) = planned.items
    assert item.error.code == code
    assert not item.holders


@pytest.mark.parametrize(("silent", "code"), [(True, Code.UNAVAILABLE), (False, Code.NO_SUCH_KEY)])
async def test_a_plan_for_a_key_that_is_claimed_says_whether_the_claim_was_answered(
    silent: bool, code: Code
) -> None:
    world = partitioned()
    digest, holder = key_digest(foreign_key(world), NAMESPACE), world.others[0]
    world.silent = {holder.peer_id} if silent else set()
    claimed = LocationRecord(digest, Version(clock_at(-1.0), 9, 5), 5, 1).encode()
    world.serve(holder, DataKind.PUSH, Push(OTHER_INCARNATION, [1], claimed))
    planning = gets_of(world).plan(CLIENT, local.Plan(digest, deadline_ms=2_000))
    assert isinstance(planning, Awaitable)
    for _ in range(200):
        for ask in world.asks(DataKind.LOOKUP):
            world.answer(ask, Locations([[] for _ in digests_asked(ask)]))
        world.pass_time(0.02)
    planned = await planning
    assert isinstance(planned, local.Planned)
    assert [item.error.code for item in planned.items] == [code]
