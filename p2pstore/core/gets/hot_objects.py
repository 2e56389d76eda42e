"""Which reads of a large object its holder serves itself, and which it sends to those that it served before. Pure.

An object that all peers want at the same moment would be sent by its only holder once per peer. So when an object is
hot, the holder tells readers to have their own peers bring it and keep it (as a soft copy, evicted before others). An
object is hot when another reader just read it, or several reads are recent. The holder serves a few of these keepers
and sends the next ones to them; they do the same: a tree that grows while the object travels. (BitTorrent and Kraken
send readers to each other piece by piece; objects here are short enough to go as a whole.)

A peer whose memory is too small for all that its clients read again and again would evict each object before it is read
once more: bringing it costs several times what a read costs. Such a reader is found out by its coming back for what it
was sent to keep; for a while it is sent all it reads, without keeping it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from p2pstore.core.operation import AskPeer
from p2pstore.gossip.records import Member
from p2pstore.objects import MIB, put_newest
from p2pstore.transfer.data_messages import DataKind, Keeps
from p2pstore.transfer.peer_messages import MAX_READ_COUNTS, ReadCount, Reads

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

HOT_BYTES: Final = 1 * MIB
"""Smaller objects take about as long to ask for as to send."""
MAX_TRANSFERS: Final = 3
"""Readers to which a holder sends an object itself, while other readers have just got it."""
HOT_READS: Final = 2.5
HALF_LIFE_SECONDS: Final = 10.0
"""An object with `HOT_READS` recent reads is hot; the weight of a read halves in this time."""
JUST_SECONDS: Final = 2.0
SPREAD_BYTES_PER_SECOND: Final = 100e6
"""How long a transfer counts as having just been: by then all know of the copies that it made."""
KEPT_SHARE: Final = 16
"""A client's peer does not keep an object larger than this part of its memory: that would evict too much else."""
LOST_SECONDS: Final = HALF_LIFE_SECONDS
"""A keeper that asks again for the same object within this time has lost it already."""
ON_ITS_WAY_SECONDS: Final = 0.1
"""Within this time, plus that of the transfer, a keeper may not have the object yet."""
FIRST_PAUSE_SECONDS: Final = 10.0
LAST_PAUSE_SECONDS: Final = 320.0
"""How long nothing is to be kept by a reader that loses it: twice as long when it does so again."""
MAX_LOSERS: Final = 1024
"""Readers whose losses and pauses are remembered."""
MAX_KEEPERS: Final = 64
"""Readers per object whose time of sending is remembered."""
MAX_OBJECTS: Final = 4096
"""Objects whose readers are remembered: the last ones read."""


@dataclass(slots=True)
class _Reads:
    """The recent readers of an object."""

    sent_at: dict[Member, float] = field(default_factory=dict)
    """When the object last went to each recent reader; the latest is last."""
    kept_at: OrderedDict[Member, float] = field(default_factory=OrderedDict)
    """When it last went to those that were to keep it, and a while after; the last one last."""
    heat: float = 0.0
    heat_at: float = 0.0

    def heat_now(self, now: float) -> float:
        """How often the object was read of late."""
        return self.heat * float(0.5 ** ((now - self.heat_at) / HALF_LIFE_SECONDS))

    def sent(self, reader: Member, keeps: bool, now: float) -> None:
        """The object goes to this reader."""
        self.heat, self.heat_at = 1.0 + self.heat_now(now), now
        self.sent_at.pop(reader, None)
        self.sent_at[reader] = now
        if keeps:
            put_newest(self.kept_at, reader, now, MAX_KEEPERS)

    def forget(self, before: float) -> None:
        """Transfers that are over for long."""
        while self.sent_at:
            reader = next(iter(self.sent_at))
            if self.sent_at[reader] >= before:
                return
            del self.sent_at[reader]


class _Pause(NamedTuple):
    """A time until which a reader is not asked to keep anything, and the whole length of that pause."""

    until: float
    seconds: float


class HotObjects:
    """Of one holder. Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._objects: OrderedDict[bytes, _Reads] = OrderedDict()
        self._pauses: OrderedDict[Member, _Pause] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def read(
        self,
        digest: bytes,
        length: int,
        reader: Member,
        reader_memory_bytes: int,
        keeps: Keeps,
        now: float,
    ) -> list[Member] | None:
        """Decide on a request of a peer with `reader_memory_bytes`, or a client of it, for an object of at least
        `HOT_BYTES`. None: this holder sends the object. Else the reader's peer is to bring and keep it, from those
        members, if any, that have it or will have it in a moment."""
        if keeps is Keeps.BY_PEER and length > reader_memory_bytes // KEPT_SHARE:
            keeps = Keeps.NO
        reads = self._reads_of(digest)
        just = now - JUST_SECONDS - length / SPREAD_BYTES_PER_SECOND
        reads.forget(just)
        others = len(reads.sent_at) - (reader in reads.sent_at)
        keepers = [each for each, at in reads.kept_at.items() if each != reader and at >= just]
        is_full = bool(keepers) and others >= MAX_TRANSFERS
        if keeps is Keeps.BY_PEER and self._loses(reader, reads, length, now) and not is_full:
            keeps = Keeps.NO
        if keeps is Keeps.BY_PEER and (others or reads.heat_now(now) >= HOT_READS):
            return keepers if is_full else []
        # A keeper that was sent the object a moment ago and asks again lost it on the way; others may wait for it.
        is_back = reads.kept_at.get(reader, -math.inf) >= just
        if keeps is Keeps.YES and is_full and not is_back:
            return keepers
        reads.sent(reader, keeps is Keeps.YES, now)
        return None

    def _loses(self, reader: Member, reads: _Reads, length: int, now: float) -> bool:
        """Whether the reader loses what it is to keep: this object, or others a while ago."""
        kept_at = reads.kept_at.get(reader)
        if kept_at is not None:
            there_at = kept_at + ON_ITS_WAY_SECONDS + length / SPREAD_BYTES_PER_SECOND
            if there_at < now:
                del reads.kept_at[reader]
                if now < kept_at + LOST_SECONDS:
                    self._lost(reader, now)
        pause = self._pauses.get(reader)
        return pause is not None and now < pause.until

    def _lost(self, reader: Member, now: float) -> None:
        last = self._pauses.get(reader)
        if last is not None and now < last.until:
            return
        seconds = FIRST_PAUSE_SECONDS
        if last is not None and now < last.until + last.seconds:
            seconds = min(2 * last.seconds, LAST_PAUSE_SECONDS)
        put_newest(self._pauses, reader, _Pause(now + seconds, seconds), MAX_LOSERS)

    def _reads_of(self, digest: bytes) -> _Reads:
        reads = self._objects.get(digest) or _Reads()
        put_newest(self._objects, digest, reads, MAX_OBJECTS)
        return reads


UNSEEN_TRANSPORTS: Final = frozenset({"shm", "rdma"})
"""By which the holder does nothing."""
REPORT_SECONDS: Final = 0.25
"""Between two reports to all holders: eviction looks at most objects far less often."""
MAX_NOTED: Final = 16 * MAX_READ_COUNTS
"""Objects counted between two reports; reads of further ones are not reported."""
MAX_COUNT: Final = 1_000_000
ANSWER_SECONDS: Final = 5.0


class ReadReports:
    """Counts of reads by this peer and its clients elsewhere, until reported; and the reports of other peers. A read
    through a mapping or by RDMA sends its holder no request, so the holder would evict objects in constant use."""

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._counts: dict[Member, dict[bytes, int]] = {}
        self._noted = 0
        self.due_at = math.inf

    def note(self, member: Member, digest: bytes, count: int, now: float) -> None:
        """Count `count` reads of the object in the memory of this member, which did not see them."""
        counts = self._counts.setdefault(member, {})
        if digest not in counts:
            if self._noted >= MAX_NOTED:
                return
            self._noted += 1
        counts[digest] = counts.get(digest, 0) + max(0, min(count, MAX_COUNT))
        self.due_at = min(self.due_at, now + REPORT_SECONDS)

    def tick(self, now: float) -> None:
        if now < self.due_at:
            return
        told, self._counts = self._counts, {}
        self._noted, self.due_at = 0, math.inf
        for member, counts in told.items():
            state = self._core.gossip.membership.resolve(member)
            if state is None or self._core.holders.is_avoided(member, now):
                continue
            items = [ReadCount(digest, count) for digest, count in counts.items()]
            for start in range(0, len(items), MAX_READ_COUNTS):
                request = Reads(items[start : start + MAX_READ_COUNTS])
                self._core.emit(AskPeer(0, 0, state.peer_id, DataKind.READS, request, ANSWER_SECONDS))

    def heard(self, items: Sequence[ReadCount], now: float) -> None:
        for item in items:
            self._core.segment.objects.touch(
                item.digest, max(0, min(item.count, MAX_COUNT)), self._core.unix(now)
            )
