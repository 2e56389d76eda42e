"""Issues tickets: one per peer and scope, cached until half of its time is over. `read_tickets` checks them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from p2pstore.access.keyring import KeyRing
from p2pstore.transfer.read_tickets import TICKET_SECONDS, GrantedTicket, Scope, issue_ticket
from p2pstore.transfer.transport import RemotePeer
from p2pstore.wire import Signer


class TicketIssuer:
    """Issues tickets in this peer's name. A signature costs 50 us, so tickets are cached for half of their 120 s.

    `ahead(peer_id)`: how far this machine's clock is ahead of a peer's, in seconds. A ticket says its
    audience's time, so that reads go on where a clock is wrong.
    """

    def __init__(
        self, signer: Signer, ring: KeyRing, ahead: Callable[[bytes], float] = lambda peer_id: 0.0
    ) -> None:
        self.ring = ring
        self._ahead = ahead
        self._signer = signer
        self._kept: dict[tuple[bytes, Scope, str], tuple[float, GrantedTicket]] = {}

    def renew(self) -> None:
        """The ring has changed: make new tickets from now on."""
        self._kept.clear()

    def ticket(self, audience: bytes, scope: Scope, namespace: str = "") -> GrantedTicket:
        """A ticket for `audience` that is good for another minute at least; for writing in `namespace` alone, if
        any."""
        now = time.time() - self._ahead(audience)
        kept = self._kept.get((audience, scope, namespace))
        # A ticket from the future, of a clock that was fast, is invalid.
        if kept is not None and 0 <= now - kept[0] < TICKET_SECONDS / 2:
            return kept[1]
        if len(self._kept) > 10_000:
            self._kept.clear()
        granted = issue_ticket(
            signer=self._signer,
            ring=self.ring,
            audience=audience,
            now_unix=now,
            ticket_id=os.urandom(16),
            scope=scope,
            namespace=namespace,
        )
        self._kept[audience, scope, namespace] = (now, granted)
        return granted

    def for_peers(self, peer: RemotePeer) -> GrantedTicket:
        """A ticket for this peer's own connections: the connection pool's ticket source."""
        return self.ticket(peer.peer_id, Scope.READ | Scope.PEER)

    def for_clients(self, audience: bytes) -> GrantedTicket:
        """A ticket to hand to a local client."""
        return self.ticket(audience, Scope.READ)

    def for_writers(self, audience: bytes, namespace: str) -> GrantedTicket:
        """A ticket to hand to a local client that may put, for what this peer has no room for. `namespace` is empty
        for clients of older versions, which do not say it."""
        return self.ticket(audience, Scope.WRITE, namespace)
