"""Joining through addresses and names: halves find each other, and of two processes with one identity one goes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest
import trio
import trio.testing

from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_messages import Claim, ControlKind, Delta, Duplicate, Effect, Ping, Status
from p2pstore.gossip.links.control_link import LinkError, OwnAddress, TwinAddress
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.members.contacts import Contacts
from p2pstore.gossip.records import PeerId
from p2pstore.peer.lifetime import joining
from p2pstore.peer.lifetime.joining import NAME_SECONDS, Joining, is_name
from simulation.signer import SimulatedSigner, SimulatedVerifier, peer_id_of
from tests.unit.gossip_network import peer_record


@dataclass
class Known:
    """Stands for a member's state."""

    alive: bool = True


@dataclass
class FakeGossip:
    """The part of the gossip machine that `Joining` uses; it and its membership in one."""

    contacts: Contacts = field(default_factory=lambda: Contacts(Random(1)))
    members: dict[PeerId, Known] = field(default_factory=dict)
    met: list[tuple[PeerId, tuple[str, ...]]] = field(default_factory=list)
    failed: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def membership(self) -> FakeGossip:
        return self

    def get(self, peer_id: PeerId) -> Known | None:
        return self.members.get(peer_id)

    def others(self) -> list[PeerId]:
        return list(self.members)

    def contacted(self, peer_id: PeerId, addresses: Sequence[str], now: float) -> None:
        self.members[peer_id] = Known()
        self.met.append((peer_id, tuple(addresses)))

    def contact_failed(self, addresses: Sequence[str], now: float) -> None:
        self.failed.append(tuple(addresses))


@dataclass
class Net:
    """Listening peers by address, and the addresses of each name."""

    gossip: FakeGossip = field(default_factory=FakeGossip)
    listening: dict[str, PeerId] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    twins: set[str] = field(default_factory=set)
    twins_met: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)
    settled: trio.Event = field(default_factory=trio.Event)

    async def discover(self, address: str, timeout_seconds: float) -> PeerId:
        self.dialled.append(address)
        await trio.lowlevel.checkpoint()
        if address in self.twins:
            raise TwinAddress(f"another process with this peer's identity listens at {address}")
        if address in self.own:
            raise OwnAddress(f"{address} is this peer itself")
        if address not in self.listening:
            raise LinkError(f"{address}: connection refused")
        return self.listening[address]

    async def resolve(self, addresses: Sequence[str]) -> list[str]:
        await trio.lowlevel.checkpoint()
        if not self.records:
            raise OSError("cannot be resolved")
        return self.records

    def joining(self, *bootstrap: str) -> Joining:
        return Joining(
            cast(Gossip, self.gossip),
            bootstrap,
            process=lambda: None,
            now=trio.current_time,
            rng=Random(1),
            settled=self.settled,
            on_twin=self.twins_met.append,
            on_refused=lambda address, error: self.refusals.append(address),
        )


@pytest.fixture
async def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    net = Net()
    monkeypatch.setattr(joining, "resolve", net.resolve)
    return net


A, B, C = b"a", b"b", b"c"


def test_names_and_addresses() -> None:
    assert [is_name(each) for each in ("pool:1", "10.0.0.1:1", "[::1]:1", "localhost:1")] == [
        *(True, False, False, False)
    ]


async def test_an_address_leads_to_a_peer(net: Net) -> None:
    net.listening["10.0.0.1:1"] = A
    await net.joining("10.0.0.1:1").contact(net, ("10.0.0.1:1",))
    assert net.gossip.met == [(A, ("10.0.0.1:1",))]


async def test_all_records_of_a_name_are_used(net: Net) -> None:
    net.records = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]
    net.own, net.listening = {"10.0.0.1:1"}, {"10.0.0.2:1": B, "10.0.0.3:1": C}
    await net.joining("pool:1").contact(net, ("pool:1",))
    assert sorted(net.dialled) == net.records
    assert {(B, ("10.0.0.2:1",)), (C, ("10.0.0.3:1",))} < set(net.gossip.met)
    assert net.gossip.met[-1][1] == ("pool:1",)
    assert set(net.gossip.contacts.known_at().values()) == {("10.0.0.2:1",), ("10.0.0.3:1",)}


async def test_a_name_that_stands_for_this_peer_alone_is_tried_again(net: Net) -> None:
    net.records, net.own = ["10.0.0.1:1"], {"10.0.0.1:1"}
    joining = net.joining("pool:1")
    net.gossip.contacts.add(("pool:1",))
    await joining.contact(net, ("pool:1",))
    assert net.settled.is_set()
    assert net.gossip.failed == [("pool:1",)]
    assert not net.gossip.contacts.is_empty
    net.records, net.listening = ["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.2:1": B}
    await joining.contact(net, ("pool:1",))
    assert net.dialled == ["10.0.0.1:1", "10.0.0.2:1"]  # its own address was tried once
    assert net.gossip.met[-1] == (B, ("pool:1",))


async def test_an_own_address_is_never_tried_again(net: Net) -> None:
    net.own = {"10.0.0.1:1"}
    joining = net.joining("10.0.0.1:1", "10.0.0.2:1")
    for address in ("10.0.0.1:1", "10.0.0.2:1"):
        net.gossip.contacts.add((address,))
    await joining.contact(net, ("10.0.0.1:1",))
    assert net.gossip.contacts.due(0.0, lambda _: False, True) == [("10.0.0.2:1",)]
    assert not net.settled.is_set()  # there is another one to wait for


async def test_one_silent_record_does_not_make_the_name_this_peer(net: Net) -> None:
    net.records, net.own = ["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.1:1"}
    await net.joining("pool:1").contact(net, ("pool:1",))
    assert not net.settled.is_set()
    assert net.gossip.failed == [("pool:1",)]


async def test_halves_of_a_cluster_behind_one_name_find_each_other(
    net: Net, autojump_clock: trio.testing.MockClock
) -> None:
    net.records, net.listening = ["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.1:1": A}
    joining = net.joining("pool:1")
    await joining.contact(net, ("pool:1",))
    assert net.gossip.members.keys() == {A}
    net.listening["10.0.0.2:1"] = B  # of another half: no member gossips of it
    with trio.move_on_after(2 * NAME_SECONDS):
        await joining.watch_names(net)
    assert net.gossip.members.keys() == {A, B}
    assert net.dialled.count("10.0.0.1:1") == 1  # a known live member is not dialled again
    net.gossip.members[A].alive = False
    with trio.move_on_after(2 * NAME_SECONDS):
        await joining.watch_names(net)
    assert net.dialled.count("10.0.0.1:1") > 1


async def test_a_failure_is_said_once(
    net: Net, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("p2pstore"), "propagate", True)
    joining = net.joining("pool:1", "10.0.0.1:1")
    for _ in range(3):
        for address in ("pool:1", "10.0.0.1:1"):
            await joining.contact(net, (address,))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "pool:1 cannot be joined: cannot be resolved; trying again" in lines[0]
    assert "serving alone meanwhile" in lines[1]
    assert len(net.gossip.failed) == 6


async def test_a_twin_is_told_and_is_no_peer_to_join(net: Net) -> None:
    net.twins.add("10.0.0.1:1")
    net.records = ["10.0.0.1:1"]
    for address in ("10.0.0.1:1", "pool:1"):
        await net.joining(address).contact(cast(Any, net), (address,))
    assert net.twins_met == ["10.0.0.1:1", "10.0.0.1:1"]
    assert net.gossip.failed == [("10.0.0.1:1",), ("pool:1",)]
    assert not net.settled.is_set()


STARTED = 1_800_000_000_000
OTHER = peer_id_of(2)


def life(incarnation: int) -> Gossip:
    gossip = Gossip(
        SimulatedSigner(peer_id_of(1)),
        SimulatedVerifier(),
        incarnation,
        lambda: peer_record(1),
        GossipConfig(),
        Random(1),
        wall_clock=lambda now: 0,
    )
    gossip.record(0.0)
    return gossip


def accuse(gossip: Gossip, times: int) -> None:
    """A third peer reaches only the other one of the two, and suspects them again and again."""
    for _ in range(times):
        incarnation = gossip.membership.own.incarnation
        claim = Claim(gossip.peer_id, incarnation, int(Status.SUSPECT), 7)
        gossip.serve(OTHER, ControlKind.PING, Ping(incarnation, [claim]), 1.0)


def hears(gossip: Gossip, of: Gossip) -> list[Effect]:
    delta = Delta([of.record(2.0)], [], [], [])
    return gossip.serve(OTHER, ControlKind.DELTA, delta, 2.0)[1]


@pytest.mark.parametrize("older_accused", [0, 3, 100])
@pytest.mark.parametrize("newer_accused", [0, 3, 100])
def test_the_newer_one_goes(older_accused: int, newer_accused: int) -> None:
    older, newer = life(STARTED), life(STARTED + 500)
    accuse(older, older_accused)
    accuse(newer, newer_accused)
    claim = Claim(older.peer_id, newer.membership.own.incarnation, int(Status.SUSPECT), 7)
    older.serve(OTHER, ControlKind.PING, Ping(1, [claim]), 1.5)  # a third peer told it as well
    assert not any(isinstance(effect, Duplicate) for effect in hears(older, newer))
    assert any(isinstance(effect, Duplicate) for effect in hears(newer, older))


def test_the_older_one_stays_however_many_come() -> None:
    older = life(STARTED)
    for number in range(1, 6):
        newer = life(STARTED + 60_000 * number)
        assert not any(isinstance(effect, Duplicate) for effect in hears(older, newer))
        assert any(isinstance(effect, Duplicate) for effect in hears(newer, older))
