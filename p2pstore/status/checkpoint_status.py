"""How far published checkpoints are on all members, in figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from p2pstore.checkpoint.content.manifest import format_version
from p2pstore.core.checkpoints import HAS_ALL
from p2pstore.gossip.checkpoint_records import Head, short_version
from p2pstore.gossip.members.member_table import MemberState
from p2pstore.gossip.records import Participation, TakesPart
from p2pstore.objects import unix_seconds_from_clock
from p2pstore.status.problems import FailedCheckpoint
from p2pstore.status.text import shown

MAX_SHOWN: Final = 20
MAX_HEADS: Final = 1000
"""Of more, those of the first names are looked at."""
MAX_FAILED: Final = 100


@dataclass(slots=True)
class Progress:
    """Of a publisher's newest version of a name. `fetching_permille` has one figure for each member that fetches it.
    `followers` follow the name, whatever they have; so many of them, `switched`, use the newest version."""

    head: Head
    complete: int = 0
    fetching_permille: list[int] = field(default_factory=list)
    failed: list[tuple[MemberState, str]] = field(default_factory=list)
    followers: int = 0
    switched: int = 0

    @property
    def under_way(self) -> bool:
        """Whether somebody fetches it, or could not."""
        return bool(self.fetching_permille or self.failed)

    def count(self, member: MemberState, part: Participation) -> None:
        """A member's part in the name."""
        newest = short_version(self.head.version)
        if part.follows:
            self.followers += 1
            self.switched += part.current == newest
        if part.version != newest:
            return
        if part.state in HAS_ALL:
            self.complete += 1
        elif part.state == TakesPart.FETCHING:
            self.fetching_permille.append(min(max(part.done_permille, 0), 1000))
        elif part.state == TakesPart.FAILED and len(self.failed) < MAX_FAILED:
            self.failed.append((member, part.why))


def progress(heads: Sequence[Head], members: Iterable[MemberState]) -> list[Progress]:
    """Of all names; those under way first, and among equals the newest."""
    by_digest = {head.digest: Progress(head) for head in heads[:MAX_HEADS]}
    for member in members:
        for part in member.checkpoints:
            found = by_digest.get(part.name)
            if found is not None:
                found.count(member, part)
    return sorted(by_digest.values(), key=lambda each: (not each.under_way, -each.head.clock))


def progress_document(each: Progress, publisher: str, *, is_switched_to: bool) -> dict[str, Any]:
    """One name as the page shows it."""
    fetching = each.fetching_permille
    return {
        "namespace": shown(each.head.namespace),
        "name": shown(each.head.name),
        "version": format_version(each.head.version)[:12],
        "publisher": publisher,
        "published_unix": round(unix_seconds_from_clock(each.head.clock)),
        "total_bytes": each.head.body.total_bytes,
        "complete": each.complete,
        "fetching": len(fetching),
        "done_permille": sum(fetching) // len(fetching) if fetching else None,
        "slowest_permille": min(fetching, default=None),
        "failed": len(each.failed),
        "followers": each.followers,
        "switched": each.switched,
        "is_switched_to": is_switched_to,
    }


def failures(
    all_of_them: Sequence[Progress], name_of: Callable[[MemberState], str]
) -> list[FailedCheckpoint]:
    """Who could not get what, and why."""
    return [
        FailedCheckpoint(shown(each.head.name), name_of(member), shown(why, 120))
        for each in all_of_them
        for member, why in each.failed
    ][:MAX_FAILED]
