"""Pushes to homes as gossip means them and as they travel: `gossip` and `transfer` do not know each other."""

from __future__ import annotations

from collections.abc import Iterable

from p2pstore.core.gets.lookup import holding_record
from p2pstore.gossip.gossip_effects import Push
from p2pstore.gossip.locations.views import Location
from p2pstore.transfer import peer_messages


def message_of(push: Push) -> peer_messages.Push:
    """What is sent."""
    sets = [
        peer_messages.PartitionSet(each.partition, each.number, each.set_hash, each.records)
        for each in push.sets
    ]
    return peer_messages.Push(
        push.incarnation,
        push.sequences,
        push.operations,
        push.numbers,
        push.sequence,
        sets,
        push.audit,
        push.audit_seconds,
    )


def holding_of(location: Location) -> peer_messages.Holding:
    """A location as it travels."""
    return peer_messages.Holding(
        location.member, location.incarnation, location.sequence, location.record.encode()
    )


def reply_of(behind: list[int], rivals: Iterable[Location]) -> peer_messages.Pushed:
    """What a home answers, of what `Gossip.take_push` gave."""
    return peer_messages.Pushed(behind, [holding_of(rival) for rival in rivals])


def rivals_of(reply: peer_messages.Pushed) -> list[Location]:
    """The other versions that a home named."""
    return [
        Location(rival.member, rival.incarnation, rival.sequence, record, hearsay=True)
        for rival in reply.rivals
        if (record := holding_record(rival.record)) is not None
    ]
