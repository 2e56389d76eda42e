"""Names of checkpoints: heads and switches of this peer and of others, and which publisher is trusted. Pure.

Two things are gossiped of a name. A *head*: its newest version, by its publisher. A *switch*: the version that
followers of the name are to use, by the same publisher. What each peer has of a version is a *participation*
(`p2pstore.core.participations`). Bytes move elsewhere (`p2pstore.checkpoint`).

Several peers may publish the same name: these are different checkpoints. A peer that fetches or follows a name trusts
one publisher of it, and keeps to that one (a *pin*): the first that it saw, unless it was told another. While a name
has several publishers and none is trusted, nothing is guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from p2pstore.core.operation import Notes
from p2pstore.errors import CheckpointRefused, NoSuchKey
from p2pstore.gossip.checkpoint_records import (
    NO_VERSION,
    VERSION_BYTES,
    Head,
    HeadBody,
    Switch,
    SwitchBody,
    checkpoint_digest,
    read_head,
    read_switch,
)
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    ClusterRecord,
    ClusterRecordKind,
    PeerId,
    format_peer_id,
)
from p2pstore.objects import check_checkpoint_name, put_newest
from p2pstore.wire import Message, encode_body

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

MAX_PINS: Final = 1024
Name = tuple[str, str]
"""(namespace, name of a checkpoint)."""


class TrustedPublishers:
    """The publisher that this peer trusts for each name, and those that it is to forget. `version` grows whenever
    `pins` or `forgotten` would say something else."""

    def __init__(self, notes: Notes) -> None:
        self._pins: OrderedDict[Name, PeerId] = OrderedDict()
        """The name used last is the last."""
        self.version = 0
        """Grows whenever `pins` or `forgotten` would say something else."""
        self._forgotten: OrderedDict[tuple[Name, PeerId], int] = OrderedDict()
        """Publishers of names that are not to be shown, and what they say up to which clock."""
        self._ignored: dict[tuple[Name, PeerId], None] = {}
        """Publishers of which the log says that they are not the trusted ones."""
        self._notes = notes

    @property
    def forgotten(self) -> list[tuple[str, str, PeerId, int]]:
        """Namespace, name, publisher and clock of what is not to be shown, for the state directory."""
        return [(*name, publisher, clock) for (name, publisher), clock in self._forgotten.items()]

    def clock_was_fast(self, limit: int, by: int) -> None:
        """Stamps above `limit` were made by a clock that was fast by `by`: see `Timekeeping`."""
        for key, clock in self._forgotten.items():
            if clock > limit:
                self._forgotten[key] = max(0, clock - by)
                self.version += 1

    @property
    def pins(self) -> list[tuple[str, str, PeerId]]:
        """Namespace, name and publisher of all trusted names, for the state directory; last used, last named."""
        return [(*name, publisher) for name, publisher in self._pins.items()]

    def load(
        self, pins: Iterable[tuple[str, str, PeerId]], forgotten: Iterable[tuple[str, str, PeerId, int]]
    ) -> None:
        """Take over the pins of an earlier life, and what was not to be shown then."""
        for namespace, name, publisher in pins:
            self._pins[namespace, name] = publisher
        for namespace, name, publisher, clock in forgotten:
            self._forgotten[(namespace, name), publisher] = clock

    def pinned(self, namespace: str, name: str) -> PeerId | None:
        """The publisher that is trusted for a name; None without one."""
        return self._pins.get((namespace, name))

    def pin(self, namespace: str, name: str, publisher: PeerId) -> None:
        """Trust this publisher alone for a name. Of too many names, the pin unused for longest goes."""
        before = self._pins.get((namespace, name))
        self._pins[namespace, name] = publisher
        self._pins.move_to_end((namespace, name))
        if before != publisher:
            self.version += 1
            if before is not None:
                self._note(
                    f"checkpoint {name!r}: {format_peer_id(publisher)} is trusted from now on, not "
                    f"{format_peer_id(before)} any more"
                )
        while len(self._pins) > MAX_PINS:
            (_, name), _ = self._pins.popitem(last=False)
            self._note(f"checkpoint {name!r}: its publisher is forgotten, as it was not used for long")

    def _note(self, text: str) -> None:
        self._notes.add("publisher", text)

    def is_forgotten(self, head: Head) -> bool:
        """Whether this peer is not to trust or show what this head says."""
        until = self._forgotten.get(((head.namespace, head.name), head.publisher))
        return until is not None and head.clock <= until

    def forget(self, head: Head) -> None:
        """Show and trust what this head says no more, until its publisher says something new."""
        name = head.namespace, head.name
        put_newest(self._forgotten, (name, head.publisher), head.clock, MAX_PINS)
        if self._pins.get(name) == head.publisher:
            del self._pins[name]
        self.version += 1

    def note_ignored(self, heads: Iterable[Head]) -> None:
        """Note once for the log each head whose name has another publisher that is trusted."""
        for head in heads:
            name = head.namespace, head.name
            trusted, key = self._pins.get(name), (name, head.publisher)
            if trusted in (None, head.publisher) or key in self._ignored:
                continue
            if len(self._ignored) >= MAX_PINS:
                self._ignored.clear()
            self._ignored[key] = None
            self._note(
                f"checkpoint {head.name!r}: {format_peer_id(head.publisher)} publishes that name, too, and is ignored: "
                f"{format_peer_id(trusted)} is trusted for it"
            )


class CheckpointNames:
    """The core's part in checkpoints. `version` grows with everything that is new: heads, switches, what others have
    of versions, members that come and go."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._records = core.gossip.cluster_records
        self._publishers = core.publishers
        self.is_forgotten = core.publishers.is_forgotten
        self._heard = 0

    @property
    def version(self) -> tuple[int, int, int]:
        """Differs from what it was when there may be something new."""
        membership = self._core.gossip.membership
        return self._heard, membership.checkpoints_version, membership.version

    def heard(self, record: ClusterRecord) -> None:
        self._heard += 1
        head = read_head(record)
        if head is not None and self._publishers.pinned(head.namespace, head.name) is not None:
            self._publishers.note_ignored(self.heads(head.namespace, head.name))

    def publish(self, body: HeadBody, now: float) -> Head:
        """Make this version this peer's newest of the name. Raises `CheckpointRefused` for an impossible name."""
        check_checkpoint_name(body.name)
        if len(body.version) != VERSION_BYTES:
            raise ValueError(f"a version is {VERSION_BYTES} bytes long")
        digest = checkpoint_digest(body.namespace, body.name, self._core.peer_id)
        before = self.head(digest)
        previous = b"" if before is None else before.version
        if previous == body.version and before is not None:
            previous = before.body.previous
        body = msgspec.structs.replace(body, previous=previous)
        self._write(ClusterRecordKind.CHECKPOINT_HEAD, digest, body, now)
        self._publishers.pin(body.namespace, body.name, self._core.peer_id)
        return self._own_head(digest)

    def remove(self, namespace: str, name: str, now: float) -> Head:
        """Say that this peer's name is gone. Raises `NoSuchKey` when this peer does not publish it."""
        head = self.own(namespace, name)
        body = msgspec.structs.replace(head.body, gone=True)
        self._write(ClusterRecordKind.CHECKPOINT_HEAD, head.digest, body, now)
        if self.switched(head.digest) is not None:
            self._write(
                ClusterRecordKind.CHECKPOINT_SWITCH,
                head.digest,
                SwitchBody(namespace, name, NO_VERSION),
                now,
            )
        return self._own_head(head.digest)

    def switch(self, namespace: str, name: str, version: bytes, now: float) -> None:
        """Have all followers of this peer's name use this version. Raises `NoSuchKey` for another's name."""
        head = self.own(namespace, name)
        body = SwitchBody(namespace, name, version)
        self._write(ClusterRecordKind.CHECKPOINT_SWITCH, head.digest, body, now)

    def check_free(self, namespace: str, name: str) -> None:
        """Raises `CheckpointRefused` when only other peers publish the name: followers of theirs ignore this one."""
        own = self.head(checkpoint_digest(namespace, name, self._core.peer_id))
        others = [head for head in self.heads(namespace, name) if head.publisher != self._core.peer_id]
        kept = own is None and self._publishers.pinned(namespace, name) == self._core.peer_id
        if not others or kept or (own is not None and not own.gone):
            return
        owner = others[0]
        trusted = self._publishers.pinned(namespace, name)
        for head in others:
            owner = head if head.publisher == trusted else owner
        peer_id = format_peer_id(owner.publisher)
        is_there = self._core.gossip.membership.is_live
        away = "" if is_there(owner.publisher) else ", which is not there now"
        raise CheckpointRefused(
            f"checkpoint {name!r} belongs to {self._core.name_of(owner.publisher)} ({peer_id}){away}: whoever trusts "
            "that publisher would ignore this one, so nothing was published. Choose another name, or publish there; if "
            f"that publisher is gone for good, forget it on each peer that is to take the name from here (`checkpoint "
            f"rm {name} --forget {peer_id}`), then publish again"
        )

    def own(self, namespace: str, name: str) -> Head:
        """The head of a name that this peer publishes. Raises `NoSuchKey` when there is none, naming who does."""
        head = self.head(checkpoint_digest(namespace, name, self._core.peer_id))
        if head is not None and not head.gone:
            return head
        others = self.heads(namespace, name)
        says = (
            f"; {', '.join(self._core.name_of(each.publisher) for each in others)} does: ask there"
            if others
            else ""
        )
        is_there = self._core.gossip.membership.is_live
        if others and not any(is_there(head.publisher) for head in others):
            says += ", or forget it, if that peer is gone for good (`checkpoint rm --forget`)"
        raise NoSuchKey(f"this peer publishes no checkpoint {name!r}{says}")

    def heads(self, namespace: str | None = None, name: str | None = None) -> list[Head]:
        """All published heads: of a namespace, of a name in it. Sorted, without removed and forgotten ones."""
        if namespace is not None and name is not None:
            records = self._records.heads_of(namespace, name)
        else:
            records = self._records.of_kind(ClusterRecordKind.CHECKPOINT_HEAD)
        found = [
            head
            for record in records
            if (head := read_head(record)) is not None
            and not head.gone
            and not self.is_forgotten(head)
            and namespace in (None, head.namespace)
            and name in (None, head.name)
        ]
        return sorted(found, key=lambda head: (head.namespace, head.name, head.publisher))

    def head(self, digest: bytes) -> Head | None:
        """The head of a publisher's name, also after the name's removal."""
        record = self._records.get(ClusterRecordKind.CHECKPOINT_HEAD, 0, digest)
        return None if record is None else read_head(record)

    def switched(self, digest: bytes) -> Switch | None:
        """The version that a publisher's followers are to use; None before the first switch, and after the name's
        removal."""
        record = self._records.get(ClusterRecordKind.CHECKPOINT_SWITCH, 0, digest)
        switch = None if record is None else read_switch(record)
        return None if switch is None or switch.version == NO_VERSION else switch

    def find(self, namespace: str, name: str, publisher: PeerId | None = None) -> Head:
        """The head of a name by its trusted publisher: the one given, else the pinned one, else the only one; it is
        pinned. Raises `NoSuchKey` when that one publishes no such name, `ValueError` when there are several to choose
        from."""
        trusted = publisher or self._publishers.pinned(namespace, name)
        known = self.heads(namespace, name)
        if trusted is not None:
            found = [head for head in known if head.publisher == trusted]
            if not found:
                raise NoSuchKey(self._why_not(name, trusted, publisher is None, known))
        elif len(known) > 1:
            listed = ", ".join(
                f"{format_peer_id(head.publisher)} ({self._core.name_of(head.publisher)})"
                for head in known
            )
            raise ValueError(
                f"checkpoint {name!r} has {len(known)} publishers: {listed}; choose one (--publisher)"
            )
        elif not known:
            raise NoSuchKey(
                f"no checkpoint {name!r} is known in namespace {namespace!r} (to wait for one: --wait)"
            )
        else:
            found = known
        self._publishers.pin(namespace, name, found[0].publisher)
        self._publishers.note_ignored(known)
        return found[0]

    def _why_not(self, name: str, trusted: PeerId, pinned: bool, known: list[Head]) -> str:
        says = (
            f"{self._core.name_of(trusted)} ({format_peer_id(trusted)}) publishes no checkpoint {name!r}"
        )
        if pinned:
            says += ", and it is the one that this peer trusts for that name"
        if known:
            others = ", ".join(format_peer_id(head.publisher) for head in known)
            says += f"; to trust another one, name it (--publisher): {others}"
        else:
            says += " (to wait for it: --wait)"
        return says

    def forget(self, namespace: str, name: str, publisher: PeerId) -> Head:
        """Show and trust a publisher's name no more, on this peer alone, until the publisher says something new of it:
        for one that is gone for good. Raises `NoSuchKey` when none is known, and `ValueError` for this peer's own."""
        if publisher == self._core.peer_id:
            raise ValueError(f"checkpoint {name!r} is this peer's own: remove it")
        found = [each for each in self.heads(namespace, name) if each.publisher == publisher]
        if not found:
            raise NoSuchKey(
                f"{self._core.name_of(publisher)} ({format_peer_id(publisher)}) publishes no checkpoint {name!r}"
            )
        self._publishers.forget(found[0])
        self._heard += 1
        return found[0]

    def trusts(self, head: Head) -> bool:
        """Whether this peer takes a name from the publisher of this head: it is trusted, or the only publisher."""
        pinned = self._publishers.pinned(head.namespace, head.name)
        if pinned is None:
            return len(self.heads(head.namespace, head.name)) == 1
        return pinned == head.publisher

    def _write(self, kind: ClusterRecordKind, digest: bytes, body: Message, now: float) -> ClusterRecord:
        core = self._core
        core.timekeeping.check(now)
        before = self._records.get(kind, 0, digest)
        if before is not None:  # also after a clock that went back
            core.clock.latest = max(core.clock.latest, before.clock)
        record = ClusterRecord(
            CLUSTER_RECORD_FORMAT,
            int(kind),
            digest,
            core.clock.tick(core.unix(now)),
            core.writer,
            core.peer_id,
            body=encode_body(body),
        )
        core.floors.keep(record, now)
        return record

    def _own_head(self, digest: bytes) -> Head:
        head = self.head(digest)
        assert head is not None, "it was just written"
        return head
