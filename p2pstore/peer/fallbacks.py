"""Transports that gave way to another one: said once for each peer, and again only after they worked. Pure."""

from __future__ import annotations

from typing import Final

from p2pstore.gossip.records import Member
from p2pstore.transfer.failover import HolderReport
from p2pstore.transfer.transport import PullReport

MAX_REMEMBERED: Final = 4096


class Fallbacks:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[tuple[Member, str]] = set()

    def news(self, report: PullReport) -> list[HolderReport]:
        """What of this pull's fallbacks was not said yet."""
        fresh = [
            each for each in report.fallbacks if (each.member, each.transport) not in self._said
        ]
        if len(self._said) + len(fresh) > MAX_REMEMBERED:
            self._said.clear()
        self._said.update((each.member, each.transport) for each in fresh)
        if report.pulled is not None and report.copy is not None:
            self._said.discard((report.copy.member, report.pulled.transport))
        return fresh
