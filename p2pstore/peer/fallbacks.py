"""Transports that gave way to another one: said once for each peer, and again only after they worked. Pure."""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.records import Member

MAX_REMEMBERED: Final = 4096


class Fallbacks:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[tuple[Member, str]] = set()

    def failed(self, member: Member, transport: str) -> bool:
        """A transport to a peer gave way to another one. Whether that was not said yet: now it is."""
        if (member, transport) in self._said:
            return False
        if len(self._said) >= MAX_REMEMBERED:
            self._said.clear()
        self._said.add((member, transport))
        return True

    def worked(self, member: Member, transport: str) -> None:
        """The transport works: its next failure is news."""
        self._said.discard((member, transport))
