"""Why there are fewer copies of an object than were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient
    from p2pstore.results import PutResult


def shortfall(client: BlockingClient, result: PutResult) -> str:
    """How many of the wanted copies there are, and why no more; empty where there are all."""
    if result.copies >= result.wanted:
        return ""
    members = client.peers()
    holding = [member for member in members if member.memory_capacity > 0]
    peers = f"{len(members):,} {'peer' if len(members) == 1 else 'peers'}"
    if result.copies < len(holding):
        why = "no other peer has room for it; more are made when one has"
    elif len(holding) < len(members):
        why = f"{len(holding):,} of the cluster's {peers} offer memory"
    else:
        why = f"the cluster has {peers}"
    return f"{result.copies:,} of {result.wanted:,} copies: {why}"
