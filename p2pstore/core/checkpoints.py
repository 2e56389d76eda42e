"""A peer's part in checkpoints: what it says of its own, what it hears of others', and whom it trusts for a name. Pure.

Three things are gossiped. A *head*: the newest version of a name, by its publisher. A *switch*: the version that those
who follow the name are to use, by the same publisher. A *participation*: what one peer has of a version, in its own
record. Bytes move elsewhere (`p2pstore.checkpoint`).

Several peers may publish the same name: these are different checkpoints. Whoever fetches or follows a name trusts one
publisher of it, and keeps to that one (a *pin*): the first that it saw, unless it was said. While a name has several
publishers and none is trusted, nothing is guessed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from p2pstore.checkpoint.content.content_paths import check_checkpoint_name
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
    short_version,
)
from p2pstore.gossip.records import (
    CLUSTER_RECORD_FORMAT,
    MAX_PARTICIPATIONS,
    MAX_WHY_BYTES,
    ClusterRecord,
    ClusterRecordKind,
    Member,
    Participation,
    PeerId,
    TakesPart,
    format_peer_id,
    writer_of,
)
from p2pstore.objects import unix_seconds_from_clock
from p2pstore.wire import Message, encode_body

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

TELL_SECONDS: Final = 1.0
"""Between two records of this peer that differ in its checkpoints. Each costs all others a signature."""
FAILED_SECONDS: Final = 600.0
"""For so long others are told that something failed here."""
PROGRESS_SECONDS: Final = 10.0
"""Between two that differ in how far it is alone, or twice that, and so on, in a large cluster. (A moment in which 16
peers tell theirs costs each of them as much as ten pieces of a broadcast do.)"""
PERCENT: Final = 10
"""Permille by which a fetch must have gone on to be told."""
MAX_PINS: Final = 1024
MAX_NOTES: Final = 64
MOVES_PIECES: Final = frozenset({TakesPart.FETCHING, TakesPart.SEEDING, TakesPart.PUBLISHING})
HAS_ALL: Final = frozenset({TakesPart.VERIFIED, TakesPart.SEEDING, TakesPart.PUBLISHING})

Name = tuple[str, str]
"""(namespace, name of a checkpoint)."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A name that this peer follows: whether it has the newest version verified, and uses the version that it is to
    use."""

    head: Head
    ready: bool
    current: bool
    behind_since: float | None
    """Since when (unix) followers are to use another version than this one does; None when there is none."""


class Checkpoints:
    """The core's part in checkpoints. `version` grows with everything that is new: heads, switches, what others have
    of versions, members that come and go."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._records = core.gossip.cluster_records
        self._heard = 0
        self._parts: dict[tuple[bytes, bytes], Participation] = {}
        self._follows: dict[bytes, Participation] = {}
        self._forget_at: dict[tuple[bytes, bytes], float] = {}
        """When what failed needs not be told any more."""
        self._told: list[Participation] = []
        self._told_at = -math.inf
        self._tell_at = math.inf
        self._pins: OrderedDict[Name, PeerId] = OrderedDict()
        """The name used last is the last."""
        self.pins_version = 0
        """Grows whenever `pins` or `forgotten` would say something else."""
        self._forgotten: OrderedDict[tuple[Name, PeerId], int] = OrderedDict()
        """Publishers of names that are not to be shown, and what they say up to which clock."""
        self._ignored: dict[tuple[Name, PeerId], None] = {}
        self._notes: list[str] = []

    @property
    def version(self) -> tuple[int, int, int]:
        """Differs from what it was when there may be something new."""
        membership = self._core.gossip.membership
        return self._heard, membership.checkpoints_version, membership.version

    def heard(self, record: ClusterRecord) -> None:
        """A head or a switch came."""
        self._heard += 1
        head = read_head(record)
        if head is not None and self.pinned(head.namespace, head.name) is not None:
            self._say_who_is_ignored(head.namespace, head.name)

    # --- names -------------------------------------------------------------------------------

    def publish(
        self,
        namespace: str,
        name: str,
        version: bytes,
        now: float,
        *,
        manifest_bytes: int,
        total_bytes: int,
        files: int,
        pieces: int,
    ) -> Head:
        """Say that this version is this peer's newest of the name. Raises `CheckpointRefused` for what is no name."""
        check_checkpoint_name(name)
        if len(version) != VERSION_BYTES:
            raise ValueError(f"a version is {VERSION_BYTES} bytes long")
        digest = checkpoint_digest(namespace, name, self._core.peer_id)
        before = self.head(digest)
        previous = b"" if before is None else before.version
        if previous == version and before is not None:
            previous = before.body.previous
        body = HeadBody(
            namespace, name, version, manifest_bytes, total_bytes, files, pieces, previous
        )
        self._write(ClusterRecordKind.CHECKPOINT_HEAD, digest, body, now)
        self.pin(namespace, name, self._core.peer_id)
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
        """Have all who follow this peer's name use this version. Raises `NoSuchKey` when this peer does not publish
        the name."""
        head = self.own(namespace, name)
        body = SwitchBody(namespace, name, version)
        self._write(ClusterRecordKind.CHECKPOINT_SWITCH, head.digest, body, now)

    def check_free(self, namespace: str, name: str) -> None:
        """Raises `CheckpointRefused` when other peers publish the name and this one does not: who trusts one of them
        would ignore this peer's."""
        own = self.head(checkpoint_digest(namespace, name, self._core.peer_id))
        others = [
            head for head in self.heads(namespace, name) if head.publisher != self._core.peer_id
        ]
        kept = own is None and self.pinned(namespace, name) == self._core.peer_id
        if not others or kept or (own is not None and not own.gone):
            return
        owner = others[0]
        trusted = self.pinned(namespace, name)
        for head in others:
            owner = head if head.publisher == trusted else owner
        peer_id = format_peer_id(owner.publisher)
        away = "" if self._is_there(owner) else ", which is not there now"
        raise CheckpointRefused(
            f"checkpoint {name!r} belongs to {self._name(owner.publisher)} ({peer_id}){away}: whoever trusts that "
            "publisher would ignore this one, so nothing was published. Choose another name, or publish there; if that "
            f"publisher is gone for good, forget it on each peer that is to take the name from here (`checkpoint rm "
            f"{name} --forget {peer_id}`), then publish again"
        )

    def own(self, namespace: str, name: str) -> Head:
        """The head of a name that this peer publishes. Raises `NoSuchKey` when there is none, naming who does."""
        head = self.head(checkpoint_digest(namespace, name, self._core.peer_id))
        if head is not None and not head.gone:
            return head
        others = self.heads(namespace, name)
        says = (
            f"; {', '.join(self._name(each.publisher) for each in others)} does: ask there"
            if others
            else ""
        )
        if others and not any(map(self._is_there, others)):
            says += ", or forget it, if that peer is gone for good (`checkpoint rm --forget`)"
        raise NoSuchKey(f"this peer publishes no checkpoint {name!r}{says}")

    def _is_there(self, head: Head) -> bool:
        state = self._core.gossip.membership.get(head.publisher)
        return state is not None and state.live

    def heads(self, namespace: str | None = None, name: str | None = None) -> list[Head]:
        """All that are published, by whomever: of a namespace, of a name in it. In their order, removed ones left
        out."""
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
        """What a publisher says of its name, also when that is gone."""
        record = self._records.get(ClusterRecordKind.CHECKPOINT_HEAD, 0, digest)
        return None if record is None else read_head(record)

    def switched(self, digest: bytes) -> Switch | None:
        """What a publisher's followers are to use; None before the first switch, and when the name was removed after
        it."""
        record = self._records.get(ClusterRecordKind.CHECKPOINT_SWITCH, 0, digest)
        switch = None if record is None else read_switch(record)
        return None if switch is None or switch.version == NO_VERSION else switch

    def find(self, namespace: str, name: str, publisher: PeerId | None = None) -> Head:
        """The head of a name by the publisher that is trusted for it: the one given, else the one that is pinned, else
        the only one there is. Whoever it is, is pinned.

        Raises `NoSuchKey` when that one publishes no such name, and `ValueError` when there are several to choose from.
        """
        trusted = publisher or self._pins.get((namespace, name))
        known = self.heads(namespace, name)
        if trusted is not None:
            found = [head for head in known if head.publisher == trusted]
            if not found:
                raise NoSuchKey(self._why_not(name, trusted, publisher is None, known))
        elif len(known) > 1:
            listed = ", ".join(
                f"{format_peer_id(head.publisher)} ({self._name(head.publisher)})" for head in known
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
        self.pin(namespace, name, found[0].publisher)
        self._say_who_is_ignored(namespace, name)
        return found[0]

    def _why_not(self, name: str, trusted: PeerId, pinned: bool, known: list[Head]) -> str:
        says = f"{self._name(trusted)} ({format_peer_id(trusted)}) publishes no checkpoint {name!r}"
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
                f"{self._name(publisher)} ({format_peer_id(publisher)}) publishes no checkpoint {name!r}"
            )
        key = ((namespace, name), publisher)
        self._forgotten[key] = found[0].clock
        self._forgotten.move_to_end(key)
        while len(self._forgotten) > MAX_PINS:
            self._forgotten.popitem(last=False)
        if self._pins.get((namespace, name)) == publisher:
            del self._pins[namespace, name]
        self.pins_version += 1
        self._heard += 1
        return found[0]

    def is_forgotten(self, head: Head) -> bool:
        """Whether this peer is not to trust or show what this head says."""
        until = self._forgotten.get(((head.namespace, head.name), head.publisher))
        return until is not None and head.clock <= until

    @property
    def forgotten(self) -> list[tuple[str, str, PeerId, int]]:
        """Namespace, name, publisher and clock of what is not to be shown, for the state directory."""
        return [(*name, publisher, clock) for (name, publisher), clock in self._forgotten.items()]

    def load_forgotten(self, forgotten: Iterable[tuple[str, str, PeerId, int]]) -> None:
        """What was not to be shown in an earlier life."""
        for namespace, name, publisher, clock in forgotten:
            self._forgotten[(namespace, name), publisher] = clock

    def clock_was_fast(self, limit: int, by: int) -> None:
        """Stamps above `limit` were made by a clock that was fast by `by`: see `Timekeeping`."""
        for key, clock in self._forgotten.items():
            if clock > limit:
                self._forgotten[key] = max(0, clock - by)
                self.pins_version += 1

    # --- whom to trust -----------------------------------------------------------------------

    @property
    def pins(self) -> list[tuple[str, str, PeerId]]:
        """Namespace, name and publisher of all names that have one, for the state directory; those used last come
        last."""
        return [(*name, publisher) for name, publisher in self._pins.items()]

    def load_pins(self, pins: Iterable[tuple[str, str, PeerId]]) -> None:
        """Pins of an earlier life."""
        for namespace, name, publisher in pins:
            self._pins[namespace, name] = publisher

    def pinned(self, namespace: str, name: str) -> PeerId | None:
        """Whom this peer trusts for a name."""
        return self._pins.get((namespace, name))

    def trusts(self, head: Head) -> bool:
        """Whether this peer takes a name from the publisher of this head: as it did before, or would now, nobody else
        publishing it."""
        pinned = self.pinned(head.namespace, head.name)
        if pinned is None:
            return len(self.heads(head.namespace, head.name)) == 1
        return pinned == head.publisher

    def pin(self, namespace: str, name: str, publisher: PeerId) -> None:
        """Trust this publisher, and no other, for a name. Of more names than there may be, the pin that was not used
        for longest goes."""
        before = self._pins.get((namespace, name))
        self._pins[namespace, name] = publisher
        self._pins.move_to_end((namespace, name))
        if before != publisher:
            self.pins_version += 1
            if before is not None:
                self._note(
                    f"checkpoint {name!r}: {format_peer_id(publisher)} is trusted from now on, not "
                    f"{format_peer_id(before)} any more"
                )
        while len(self._pins) > MAX_PINS:
            (_, name), _ = self._pins.popitem(last=False)
            self._note(
                f"checkpoint {name!r}: its publisher is forgotten, as it was not used for long"
            )

    def ignored(self, namespace: str, name: str) -> list[PeerId]:
        """Other publishers of a name than the one that is trusted."""
        trusted = self._pins.get((namespace, name))
        if trusted is None:
            return []
        known = self.heads(namespace, name)
        return [head.publisher for head in known if head.publisher != trusted]

    def take_notes(self) -> list[str]:
        """What somebody should know of publishers, since the last call: for the log."""
        notes, self._notes = self._notes, []
        return notes

    def _note(self, text: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    def _say_who_is_ignored(self, namespace: str, name: str) -> None:
        for publisher in self.ignored(namespace, name):
            key = ((namespace, name), publisher)
            if key in self._ignored:
                continue
            if len(self._ignored) >= MAX_PINS:
                self._ignored.clear()
            self._ignored[key] = None
            self._note(
                f"checkpoint {name!r}: {format_peer_id(publisher)} publishes that name, too, and is ignored: "
                f"{format_peer_id(self._pins[namespace, name])} is trusted for it"
            )

    # --- who takes part ----------------------------------------------------------------------

    def participants(self, version: bytes) -> dict[Member, Participation]:
        """The living members that have pieces of a version or want them; this peer may be among them."""
        short = short_version(version)
        return {
            state.member: part
            for state in self._core.gossip.membership.live()
            for part in state.checkpoints
            if part.version == short and part.state in MOVES_PIECES
        }

    def why_not_offered(self, version: bytes, publisher: PeerId) -> str:
        """Why a version's publisher does not pass it on, in a sentence; empty when it does."""
        who = f"{self._name(publisher)}, which published it,"
        state = self._core.gossip.membership.get(publisher)
        if state is None or not state.live:
            return f"{who} is not there"
        short = short_version(version)
        part = next((part for part in state.checkpoints if part.version == short), None)
        if part is None:
            return f"{who} does not offer it any more: publish it there again"
        return f"{who} gave it up: {part.why}" if part.state == TakesPart.FAILED else ""

    def parts_of(self, digest: bytes) -> dict[Member, list[Participation]]:
        """What the living members have of a publisher's name, or want of it."""
        return {
            state.member: parts
            for state in self._core.gossip.membership.live()
            if (parts := [part for part in state.checkpoints if part.name == digest])
        }

    @property
    def parts(self) -> list[Participation]:
        """What this peer has or wants, as its record is to say it."""
        parts = dict(self._parts)
        for follows in self._follows.values():
            key = (follows.name, follows.version)
            moves = parts.pop(key, None)
            parts[key] = follows if moves is None else _both(follows, moves)
        return list(parts.values())[-MAX_PARTICIPATIONS:]

    @property
    def told(self) -> list[Participation]:
        """What its record says."""
        return self._told

    def take_part(self, part: Participation, now: float) -> None:
        """Have the others know what this peer has of a version: a new state within a second, how far it is when that
        has changed by a percent."""
        part = _shortened(part)
        key = (part.name, part.version)
        if self._parts.get(key) != part:
            self._parts.pop(key, None)
            self._parts[key] = part
            self._forget_at.pop(key, None)
            if part.state == TakesPart.FAILED:
                self._forget_at[key] = now + FAILED_SECONDS
            self._set_alarm(now)

    def take_no_part(self, name: bytes, version: bytes, now: float) -> None:
        """This peer has and wants nothing of it any more."""
        if self._parts.pop((name, short_version(version)), None) is not None:
            self._set_alarm(now)

    def follow(
        self,
        digest: bytes,
        version: bytes,
        state: TakesPart,
        current: bytes,
        now: float,
        why: str = "",
    ) -> None:
        """Have the others know that this peer follows a publisher's name: the version that it is to use next, or uses,
        how far it is with it, and the one that it uses."""
        part = _shortened(
            Participation(
                digest, version, int(state), 1000 * (state in HAS_ALL), True, current, why
            )
        )
        if self._follows.get(digest) != part:
            self._follows[digest] = part
            self._set_alarm(now)

    def follow_no_more(self, digest: bytes, now: float) -> None:
        """This peer does not follow the name any more."""
        if self._follows.pop(digest, None) is not None:
            self._set_alarm(now)

    @property
    def followed(self) -> list[Followed]:
        """The names that this peer follows."""
        return [
            self._followed(head, part)
            for digest, part in self._follows.items()
            if (head := self.head(digest)) is not None and not head.gone
        ]

    def _followed(self, head: Head, part: Participation) -> Followed:
        ready = part.version == short_version(head.version) and part.state in HAS_ALL
        switch = self.switched(head.digest)
        if switch is None or part.current == short_version(switch.version):
            return Followed(head, ready, current=True, behind_since=None)
        return Followed(head, ready, False, unix_seconds_from_clock(switch.clock))

    def followers(self, digest: bytes) -> dict[Member, Participation]:
        """The living members that follow a publisher's name."""
        return {
            member: part
            for member, parts in self.parts_of(digest).items()
            for part in parts
            if part.follows
        }

    def gone_from(self, digest: bytes, members: Iterable[Member]) -> list[Member]:
        """Those of them that follow the name no more: they say so, or have left. Not the dead."""
        following = self.followers(digest)
        gone = []
        for member in members:
            state = self._core.gossip.membership.resolve(member)
            if member not in following and (state is None or state.live or state.leaving):
                gone.append(member)
        return gone

    def tick(self, now: float) -> None:
        """Tell what is due."""
        for name, version in [key for key, due in self._forget_at.items() if due <= now]:
            del self._forget_at[name, version]
            self.take_no_part(name, version, now)
        if now >= self._tell_at:
            self._told, self._told_at, self._tell_at = self.parts, now, math.inf
            self._core.gossip.offer_changed()

    def next_tick(self) -> float:
        """When `tick` has something to do."""
        return min(self._tell_at, *self._forget_at.values(), math.inf)

    # --- inside ------------------------------------------------------------------------------

    def _set_alarm(self, now: float) -> None:
        """Progress is told less often the more members there are, as a record of each is a signature for each; and by
        all at the same moments of the wall clock: as long as any two differ in anything, all compare all they know."""
        difference = _difference(self._told, self.parts)
        if difference is None:
            self._tell_at = math.inf
            return
        if difference:
            self._tell_at = max(now, self._told_at + TELL_SECONDS)
            return
        gossip = self._core.gossip
        wait = PROGRESS_SECONDS
        while wait < gossip.config.head_interval_seconds(len(gossip.membership.live())):
            wait *= 2
        if self._tell_at == math.inf:
            self._tell_at = now + wait - self._core.unix(now) % wait

    def _write(
        self, kind: ClusterRecordKind, digest: bytes, body: Message, now: float
    ) -> ClusterRecord:
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
            writer_of(core.peer_id),
            core.peer_id,
            body=encode_body(body),
        )
        core.floors.keep(record, now)
        return record

    def _own_head(self, digest: bytes) -> Head:
        head = self.head(digest)
        assert head is not None, "it was just written"
        return head

    def _name(self, peer_id: PeerId) -> str:
        return self._core.name_of(peer_id)


def _both(follows: Participation, moves: Participation) -> Participation:
    """What a peer says that follows a name, and moves pieces of the version that it is to use next. These may go to
    another directory than the follower's: they do not make that one complete."""
    if follows.state == TakesPart.FAILED:
        return follows
    if follows.state in HAS_ALL:
        state = moves.state if moves.state in HAS_ALL else int(TakesPart.SEEDING)
        return msgspec.structs.replace(follows, state=state)
    done = 0 if moves.state in HAS_ALL else moves.done_permille
    return msgspec.structs.replace(follows, state=int(TakesPart.FETCHING), done_permille=done)


def _shortened(part: Participation) -> Participation:
    """As records have it."""
    return msgspec.structs.replace(
        part,
        version=short_version(part.version),
        current=short_version(part.current),
        why=part.why.encode(errors="replace")[:MAX_WHY_BYTES].decode(errors="ignore"),
    )


def _difference(told: list[Participation], now: list[Participation]) -> bool | None:
    """Whether something but progress differs; None when nothing does that is worth telling."""

    def without_progress(parts: list[Participation]) -> dict[tuple[bytes, bytes], Participation]:
        return {
            (part.name, part.version): msgspec.structs.replace(part, done_permille=0)
            for part in parts
        }

    if without_progress(told) != without_progress(now):
        return True
    done = {(part.name, part.version): part.done_permille for part in told}
    moved = (abs(part.done_permille - done[part.name, part.version]) for part in now)
    return False if any(step >= PERCENT for step in moved) else None
