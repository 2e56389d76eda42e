"""Finding peers at the addresses this one was given. Shell: dials; when to try is decided by
`p2pstore.gossip.members.contacts`.

A host name may stand for many peers (a headless service), and for other ones tomorrow: it is resolved anew
at every try, every record that leads to no known peer is tried, and that is repeated while the peer runs. So two
halves of a cluster that found each other separately become one.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, Protocol

import trio

from p2pstore.addresses import is_loopback, split_address
from p2pstore.errors import ConfigError
from p2pstore.gossip.links.control_link import LinkError, OwnAddress, TwinAddress
from p2pstore.gossip.links.sockets import resolve
from p2pstore.gossip.machine import Gossip
from p2pstore.gossip.records import PeerId

logger = logging.getLogger("p2pstore.peer")

MAX_REPORTED: Final = 1024
"""Peers whose failure is told once only; with more, some are told again."""
CONTACT_TIMEOUT_SECONDS: Final = 10.0
NAME_SECONDS: Final = 30.0
"""How often a name is looked at again."""
MAX_RECORDS: Final = 8
"""Records of a name tried at once; the others have their turn at the next look."""


class Dialler(Protocol):
    """The control host, as joining uses it."""

    async def discover(self, address: str, timeout_seconds: float) -> PeerId: ...


class Joining:
    """Contacts for one peer. `process` carries out what gossip decided; `settled` is set when there is no peer to wait
    for; `on_twin` is told at which address another process has this peer's identity; `on_refused` that no bootstrap
    address leads into the cluster and at least one of the peers there refuses this one, with its reason."""

    def __init__(
        self,
        gossip: Gossip,
        bootstrap: Sequence[str],
        *,
        process: Callable[[], None],
        now: Callable[[], float],
        rng: Random,
        settled: trio.Event,
        on_twin: Callable[[str], None],
        on_refused: Callable[[str, LinkError], None],
    ) -> None:
        self._gossip = gossip
        self._bootstrap = bootstrap
        self._process = process
        self._now = now
        self._rng = rng
        self._settled = settled
        self._on_twin = on_twin
        self._on_refused = on_refused
        self._own: set[str] = set()
        self._led_to: dict[str, PeerId] = {}
        self._named: dict[PeerId, str] = {}
        """Peers that a bootstrap address led to, and which."""
        self._refused: dict[str, LinkError] = {}
        """Bootstrap addresses whose peers refused this one when they were asked last."""
        self._reported: set[tuple[str, ...]] = set()
        self.unreached: dict[str, str] = {}
        """Why a bootstrap address did not lead to a peer when it was tried last."""

    def refused(self, peer_id: PeerId, error: LinkError) -> bool:
        """A peer that was contacted refuses this one. Whether a bootstrap address led to it: the user named that, while
        what is remembered may belong to another cluster by now."""
        named = self._named.get(peer_id)
        if named is None:
            return False
        self._refused[named] = error
        self.unreached[named] = str(error)
        self._judge_refusals()
        return True

    def _judge_refusals(self) -> None:
        """Another bootstrap address that was not tried yet may lead into the cluster."""
        if self._refused and all(a in self.unreached or a in self._own for a in self._bootstrap):
            self._on_refused(*next(iter(self._refused.items())))

    async def contact(self, host: Dialler, addresses: tuple[str, ...]) -> None:
        """Try these addresses of one peer, in order, and tell the gossip machine what came of it."""
        error: Exception | None = None
        for address in addresses:
            try:
                if is_name(address):
                    found = await self._contact_name(host, address)
                else:
                    found = await host.discover(address, CONTACT_TIMEOUT_SECONDS)
            except OwnAddress:
                self._met_itself(address, addresses)
                return
            except TwinAddress as problem:
                self._on_twin(address)
                error = problem
            except (LinkError, OSError, ConfigError) as problem:
                error = problem
            else:
                self._contacted(found, addresses)
                return
        self._not_contacted(addresses, error)
        self._contact_failed(addresses)

    async def watch_names(self, host: Dialler) -> None:
        """Look again and again for peers that a bootstrap name stands for, and that are not members."""
        names = [address for address in self._bootstrap if is_name(address)]
        while names:
            await trio.sleep(NAME_SECONDS * self._rng.uniform(0.75, 1.25))
            for name in names:
                try:
                    await self._contact_name(host, name)
                except (LinkError, OSError, ConfigError) as error:
                    logger.debug("%s: %s", name, error)

    async def _contact_name(self, host: Dialler, name: str) -> PeerId:
        """The first peer that answered of those that the name stands for; all unknown ones are tried. Raises
        `OwnAddress` when there is none but this one, and `LinkError` or `OSError` when none answers."""
        records: list[str] = []
        with trio.move_on_after(CONTACT_TIMEOUT_SECONDS) as looking_up:
            records = [str(endpoint) for endpoint in await resolve([name])]
        if looking_up.cancelled_caught:
            raise LinkError(f"{name} was not resolved within {CONTACT_TIMEOUT_SECONDS:g} s")
        unknown = [record for record in records if not self._is_known(record)]
        known = [self._led_to[each] for each in records if each in self._led_to and each not in unknown]
        found: list[PeerId] = []
        errors: list[LinkError] = []
        async with trio.open_nursery() as nursery:
            for record in self._rng.sample(unknown, min(len(unknown), MAX_RECORDS)):
                nursery.start_soon(self._try_record, host, name, record, found, errors)
        if found or known:
            return (found + known)[0]
        if errors:
            raise errors[-1]
        raise OwnAddress(f"{name} is this peer itself")

    async def _try_record(
        self, host: Dialler, name: str, record: str, found: list[PeerId], errors: list[LinkError]
    ) -> None:
        try:
            peer_id = await host.discover(record, CONTACT_TIMEOUT_SECONDS)
        except OwnAddress:
            self._own.add(record)
        except TwinAddress as error:
            self._on_twin(record)
            errors.append(LinkError(str(error)))
        except LinkError as error:
            errors.append(error)
        else:
            self._led_to[record] = peer_id
            self._gossip.contacts.add((record,), peer_id, bootstrap=False)
            if name in self._bootstrap:
                self._named[peer_id] = name
            self._contacted(peer_id, (record,))
            found.append(peer_id)

    def _is_known(self, record: str) -> bool:
        """Whether a record is this peer's, or led to a member that is alive."""
        if record in self._own:
            return True
        peer_id = self._led_to.get(record)
        state = self._gossip.membership.get(peer_id) if peer_id is not None else None
        return state is not None and state.alive

    def _contacted(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        self._reported.discard(addresses)
        if addresses[0] in self._bootstrap:
            self._named[peer_id] = addresses[0]
        self.unreached.pop(addresses[0], None)
        self._refused.pop(addresses[0], None)
        self._gossip.contacted(peer_id, addresses, self._now())
        self._process()

    def _met_itself(self, address: str, addresses: tuple[str, ...]) -> None:
        """The first peer of a cluster may name itself: no other is there. A name may stand for others later on."""
        self._own.add(address)
        if is_name(address):
            self._contact_failed(addresses)
        else:
            self._gossip.contacts.remove(addresses)
        if all(each in self._own for each in self._bootstrap):
            self._settled.set()

    def _contact_failed(self, addresses: tuple[str, ...]) -> None:
        self._gossip.contact_failed(addresses, self._now())
        self._process()

    def _not_contacted(self, addresses: tuple[str, ...], error: Exception | None) -> None:
        if addresses[0] in self._bootstrap:
            self.unreached[addresses[0]] = str(error)
            self._judge_refusals()
        if addresses not in self._reported:
            if len(self._reported) >= MAX_REPORTED:
                self._reported.clear()
            self._reported.add(addresses)
            alone = not self._gossip.membership.others()
            logger.warning(
                "%s cannot be joined: %s; trying again with growing pauses%s",
                addresses[0],
                error,
                ", serving alone meanwhile" if alone else "",
                extra={"event": "not_joined", "address": addresses[0]},
            )


def is_name(address: str) -> bool:
    """Whether a `HOST:PORT` names a host that is to be looked up."""
    host, _ = split_address(address, "bootstrap")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return not is_loopback(host)
    return False
