"""Clusters that have been together for a while, made at once.

Thousands of machines that get to know each other take far longer than what is to be seen of them afterwards: with
5,000 of them there are 25 million acquaintances. So each machine is given a copy of what all know; records, columns
of names and home tables, which never change, are one object for all. Nothing of what follows runs otherwise than
after messages had brought it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Member, PeerId
from simulation.gossip_peer import GossipPeer

_NAMES = [each.name for each in fields(MemberState)]
_SINCE = _NAMES.index("status_since")
_make: Callable[..., MemberState] = MemberState

_Known = tuple[PeerId, Member, list[Any], list[Any]]
"""Of a member: who, and the values of its `MemberState` before and after `status_since`."""


def acquaint_at_once(peers: Sequence[GossipPeer]) -> None:
    """Have these running peers, which know no others yet, know each other, and know that they do. Only for those that
    follow no logs: they have no views of them."""
    known = [_known(peer) for peer in peers]
    names = peers[0].gossip.knowledge.table
    for peer in peers:
        _know(peer, known)
        gossip = peer.gossip
        table = gossip.knowledge.table
        members = table.current().of
        if table is not names:
            if members.hash != names.current().of.hash:
                raise RuntimeError("simulated peers that were told the same know different members")
            table._places, table._of, table._sets = names._places, names._of, names._sets
        gossip.exchanges.agreed = True
        gossip.partitions._agreed_at = peer.now


def _known(peer: GossipPeer) -> _Known:
    peer.gossip.record(peer.now)
    own = peer.gossip.membership.own
    values = {name: getattr(own, name) for name in _NAMES} | {"heard_at": -math.inf}
    before = [values[name] for name in _NAMES[:_SINCE]]
    return own.peer_id, own.member, before, [values[name] for name in _NAMES[_SINCE + 1 :]]


def _know(peer: GossipPeer, known: Sequence[_Known]) -> None:
    membership, since = peer.gossip.membership, peer.now
    states, by_member, mine = membership._states, membership._by_member, peer.peer_id
    for peer_id, member, before, after in known:
        if peer_id != mine:
            state = _make(*before, since, *after)
            states[peer_id] = by_member[member] = state
    membership.live_changed()
