"""Peers that die and return while a trace is replayed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerChange:
    """A peer was killed (`up` is false) or came back, just before the request of this number (from 0 on), or while it
    was served."""

    request: int
    peer: int
    up: bool


def next_up(chosen: int, up: Sequence[bool]) -> int:
    """The peer that takes what `chosen` would get: itself, or the next one that is up. Raises `ValueError` when none
    is."""
    for step in range(len(up)):
        peer = (chosen + step) % len(up)
        if up[peer]:
            return peer
    raise ValueError("no peer is up")
