"""Keeping the homes of each partition told of what this peer holds: the owner's side. Pure.

Every operation of this peer's log goes to the three homes of its key's partition, in batches, with the
number that it has in the partition's own log (`partitions`). One message is under way to a home at a time, so
numbers arrive in order; one that is not answered soon is sent once more, for it may have been lost, and until it
comes the home says that there is no such key. A home whose view of a partition is not at the number before says
so, and is sent the partition whole; so is one that did not answer, one that is new, and one that began anew. There
is no other way to repair, and none is needed: a partition is a thousandth of what a peer holds.

Wholes to homes that are new go at a bounded rate; those that repair what got lost, at once. Now and then each
home is told the number and hash of all that it should have (an *audit*), which finds what nothing else did.

Homes that keep the whole directory (`full` mode) are told of new operations only: the log brings them the rest.
A member that is home no longer is told for a while yet: others, and it itself, may not know.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Final

from p2pstore.gossip.gossip_messages import HomePush
from p2pstore.gossip.homes.home_updates import AUDIT_ENTRY, MAX_SET_RECORDS, PartitionSets
from p2pstore.gossip.homes.partition_homes import NO_HOMES, HomeTable, PartitionConfig
from p2pstore.gossip.locations.log import OwnLog
from p2pstore.gossip.records import LOCATION_BYTES, PARTITION_COUNT, Member, PeerId, partition_of
from p2pstore.home_messages import PartitionSet, Push

MAX_RUNS: Final = 4_096
"""Operations that wait for one home; of more the partitions are sent whole."""
SETS_BYTES: Final = 128 * 1024
"""Whole partitions in one message; one that is larger goes alone."""
SLOW_ANSWER: Final = 4.0
"""An answer is late after this multiple of the usual time."""
ANSWER_WEIGHT: Final = 1 / 8
"""Of the last answer in the usual time (as TCP has it)."""

_NUMBER: Final = struct.Struct("<I")
COMPOSED_AT_ONCE: Final = 4_096
"""Operations put into messages at a time, at 0.5 us each."""


_Run = tuple[int, int, int, bytes]
"""(partition, number, log sequence, operation). Number 0: not one of a partition that the member is home of."""


@dataclass(slots=True)
class _Home:
    """A home that something is to be said to, or was said and is yet to be answered."""

    runs: deque[_Run] = field(default_factory=deque)
    behind: bool = False
    """Partitions that it has not are to be sent to it now."""
    audit: bool = False
    push: HomePush | None = None
    """The message under way."""
    tokens: tuple[int, ...] = ()
    """Of that, and of its second copy."""
    sent_at: float = -math.inf
    resend_at: float = math.inf
    expires_at: float = math.inf
    sent_runs: frozenset[int] = frozenset()
    sent_sets: tuple[tuple[int, int], ...] = ()
    """(partition, number)."""
    failures: int = 0
    retry_at: float = -math.inf

    @property
    def idle(self) -> bool:
        return not (self.runs or self.behind or self.audit or self.tokens)


class Confirmed:
    """By partition: the members that have confirmed all that was said of it, and those that are home no longer but are
    told for a while yet. Tuples are those of the table, which all share, wherever that is possible."""

    def __init__(self, former_seconds: float) -> None:
        self._former_seconds = former_seconds
        self.by: list[tuple[Member, ...]] = [()] * PARTITION_COUNT
        """The members that have confirmed each partition. To read only."""
        self.former: dict[int, tuple[Member, ...]] = {}
        """The members that were home of a partition until lately. To read only."""
        self._former_until: deque[tuple[float, int, Member]] = deque()

    def clear(self) -> None:
        self.by = [()] * PARTITION_COUNT

    def homes_changed(
        self, partition: int, homes: tuple[Member, ...], alive: Set[Member], now: float
    ) -> list[Member]:
        """A partition has these homes now; the ones that have not confirmed it."""
        before = self.by[partition]
        if partition in self.former:
            self.former[partition] = tuple(m for m in self.former[partition] if m not in homes)
        for member in before:
            if member not in homes and member in alive:
                self._keep_telling(partition, member, now)
        former = self.former.get(partition, ())
        self._set(partition, [m for m in before if m in homes or m in former], homes)
        return [member for member in homes if member not in before]

    def add(self, member: Member, partition: int, homes: tuple[Member, ...]) -> None:
        """A member has confirmed a partition; that counts for its homes only."""
        if member in homes:
            self._set(partition, [*self.by[partition], member], homes)

    def remove(self, member: Member, partitions: Iterable[int]) -> None:
        """A member has not what was said of these partitions."""
        for partition in partitions:
            if 0 <= partition < PARTITION_COUNT and member in self.by[partition]:
                self.by[partition] = tuple(m for m in self.by[partition] if m != member)

    def expire(self, table: HomeTable, now: float) -> None:
        """Members that are home no longer are told no more, after their time."""
        while self._former_until and self._former_until[0][0] <= now:
            _, partition, member = self._former_until.popleft()
            rest = tuple(m for m in self.former.get(partition, ()) if m != member)
            if rest:
                self.former[partition] = rest
            else:
                self.former.pop(partition, None)
            if member not in table.homes[partition]:
                self.remove(member, [partition])

    def _keep_telling(self, partition: int, member: Member, now: float) -> None:
        if member not in self.former.get(partition, ()):
            self.former[partition] = (*self.former.get(partition, ()), member)
            self._former_until.append((now + self._former_seconds, partition, member))

    def _set(self, partition: int, members: list[Member], homes: tuple[Member, ...]) -> None:
        chosen = dict.fromkeys(members)
        # Almost always all homes: then the table's tuple, which all share, says so.
        same = len(chosen) == len(homes) and all(member in chosen for member in homes)
        self.by[partition] = homes if same else tuple(chosen)


class HomePushes:
    """See the module's docstring. `keeps_partitions` says whether a member is in partitioned mode."""

    def __init__(
        self,
        own: Member,
        log: OwnLog,
        config: PartitionConfig,
        rng: Random,
        peer_of: Callable[[Member], PeerId | None],
        keeps_partitions: Callable[[Member], bool],
    ) -> None:
        self.table: HomeTable = NO_HOMES
        self.whole_partitions_sent = 0
        self._own = own
        self.sets = PartitionSets(log)
        self._log = log
        self._config = config
        self._rng = rng
        self._peer_of = peer_of
        self._keeps = keeps_partitions
        self._homes: dict[Member, _Home] = {}
        self.tokens: dict[int, Member] = {}
        self._last_token = 0
        self._answer_seconds = 0.0
        """In what time homes answer, lately."""
        self._confirmed = Confirmed(config.former_home_seconds)
        self._new: dict[Member, None] = {}
        """Homes that lack partitions and are sent them at a bounded rate."""
        self._new_at = -math.inf
        self._pushed_at = -math.inf
        self._to_audit: list[Member] = []
        self._audit_at = math.inf

    def note(self, operations: Sequence[bytes]) -> None:
        """This peer's log has new operations, its last ones."""
        # `partition_of`, without its call
        partitions = [operation[0] << 2 | operation[1] >> 6 for operation in operations]
        numbers = self.sets.note(partitions, operations)
        if self.table.members <= {self._own} and not self._confirmed.former:
            return  # there is none to tell
        first = self._log.sequence + 1 - len(operations)
        confirmed, former = self._confirmed.by, self._confirmed.former
        homes_of = self.table.homes
        told: defaultdict[Member, list[_Run]] = defaultdict(list)
        takes_all = {
            self._own: False
        }  # whether the member is told of partitions, too, that it has not confirmed
        for run in zip(partitions, numbers, count(first), operations, strict=False):
            partition = run[0]
            homes = homes_of[partition]
            if partition in former:
                homes += former[partition]
            for member in homes:
                if member not in takes_all:
                    takes_all[member] = not self._keeps(member)
                if takes_all[member] or member in confirmed[partition]:
                    told[member].append(run)
        told.pop(self._own, None)
        for member, runs in told.items():
            self._add(member, runs)

    def tell(self, member: Member, operation: bytes) -> None:
        """Tell a member of one operation that it need not keep."""
        if member != self._own:
            self._add(member, [(partition_of(operation), 0, self._log.sequence, operation)])

    def _add(self, member: Member, runs: Sequence[_Run]) -> None:
        home = self._homes.get(member)
        if home is None:
            home = self._homes[member] = _Home()
        room = max(0, MAX_RUNS - len(home.runs))
        home.runs += runs[:room]
        left = [partition for partition, number, _, _ in runs[room:] if number]
        if left and self._keeps(member):
            self._confirmed.remove(member, left)
            home.behind = True

    def homes_changed(self, table: HomeTable, now: float) -> None:
        """Other members are alive now."""
        lacking: dict[Member, None] = {}
        for partition in self.table.differing(table):
            homes = table.homes[partition]
            lacking |= dict.fromkeys(self._confirmed.homes_changed(partition, homes, table.members, now))
        self.table = table
        for member in [m for m in self._homes if m not in table.members]:
            for token in self._homes.pop(member).tokens:
                self.tokens.pop(token, None)
        self._new = {member: None for member in self._new if member in table.members}
        self._bring_up(lacking, now)

    def renewed(self, member: Member, now: float) -> None:
        """The member began anew, or keeps its part of the directory in another way than before."""
        partitions = self.table.by_home.get(member)
        if partitions is None:
            return
        self._confirmed.remove(member, partitions)
        self._bring_up([member], now)

    def voided(self, now: float) -> None:
        """This peer's log goes on under another incarnation: no home has anything of it."""
        self._confirmed.clear()
        self._homes.clear()
        self.tokens.clear()
        self._bring_up(self.table.by_home, now)

    def answered(self, token: int, behind: list[int] | None, now: float) -> None:
        """The outcome of a `Push`: partitions that the home wants whole, or None when nothing came."""
        member = self.tokens.pop(token, None)
        home = self._homes.get(member) if member is not None else None
        if member is None or home is None or token not in home.tokens:
            return
        rest = tuple(each for each in home.tokens if each != token)
        if behind is None and rest:
            home.tokens = rest
            return
        if behind is not None and token == min(home.tokens):
            self._answer_seconds += ANSWER_WEIGHT * (now - home.sent_at - self._answer_seconds)
        for other in rest:
            del self.tokens[other]
        home.push, home.tokens = None, ()
        home.expires_at = home.resend_at = math.inf
        refused = set(home.sent_runs if behind is None else behind)
        for partition, number in home.sent_sets:
            if behind is None or partition in refused or self.sets.number(partition) != number:
                home.behind = True
            else:
                self._confirmed.add(member, partition, self.table.homes[partition])
        if refused:
            self._confirmed.remove(member, refused)
            home.behind = home.behind or self._keeps(member)
        if behind is None or refused.intersection(partition for partition, _ in home.sent_sets):
            home.failures += 1
            pause = self._config.push_retry_seconds * 2 ** min(home.failures, 10)
            longest = self._config.push_longest_retry_seconds
            home.retry_at = now + min(longest, pause) * self._rng.uniform(0.5, 1.0)
        else:
            home.failures = 0
        if home.idle:
            del self._homes[member]

    def home_of(self, token: int) -> PeerId | None:
        """Homes with an unanswered push."""
        member = self.tokens.get(token)
        return None if member is None else self._peer_of(member)

    def due(self) -> float:
        """When `take` has something; infinity when nothing waits."""
        due = self._audit_at
        if self._new:
            due = min(due, self._new_at)
        for home in self._homes.values():
            waits = min(home.expires_at, home.resend_at) if home.tokens else home.retry_at
            due = min(due, waits)
        return max(due, self._pushed_at + self._config.push_seconds)

    def take(self, now: float) -> list[HomePush]:
        """Messages that are due, one a home; of large ones some now, and the others with the next call."""
        if now < self.due():
            return []
        self._pushed_at = now
        self._expire(now)
        self._choose_new(now)
        self._choose_audits(now)
        pushes: list[HomePush] = []
        composed = 0
        for member, home in list(self._homes.items()):
            if home.tokens and home.resend_at <= now:
                pushes.append(self._resend(member, home))
            if home.tokens or now < home.retry_at:
                continue
            if composed >= COMPOSED_AT_ONCE:
                continue
            composed += len(home.runs)
            push = self._compose(member, home)
            if push is None:
                del self._homes[member]
            else:
                self._sent(home, push, now)
                pushes.append(push)
        return pushes

    def _sent(self, home: _Home, push: HomePush, now: float) -> None:
        config = self._config
        home.push, home.sent_at = push, now
        home.expires_at = now + config.push_timeout_seconds + 1.0
        if push.message.numbers and not push.message.sets:
            patience = max(config.push_resend_seconds, SLOW_ANSWER * self._answer_seconds)
            home.resend_at = now + patience

    def _resend(self, member: Member, home: _Home) -> HomePush:
        """The message once more: operations are numbered, so the home takes in what comes twice once."""
        assert home.push is not None
        home.resend_at = math.inf
        return replace(home.push, token=self._new_token(member, home))

    def _new_token(self, member: Member, home: _Home) -> int:
        self._last_token += 1
        self.tokens[self._last_token] = member
        home.tokens += (self._last_token,)
        return self._last_token

    def _compose(self, member: Member, home: _Home) -> HomePush | None:
        peer_id = self._peer_of(member)
        if peer_id is None:
            return None
        keeps = self._keeps(member)
        runs = [
            run for run in home.runs if not (run[1] and keeps) or member in self._confirmed.by[run[0]]
        ]
        home.runs.clear()
        sets = self._sets_for(member, home) if keeps else []
        audit = self._audit_of(member) if home.audit and keeps else b""
        home.audit = False
        home.behind = home.behind and keeps
        if not (runs or sets or audit):
            return None
        home.sent_runs = frozenset(partition for partition, number, _, _ in runs if number)
        home.sent_sets = tuple((each.partition, each.number) for each in sets)
        self.whole_partitions_sent += len(sets)
        message = Push(
            self._log.incarnation,
            [run[2] for run in runs],
            b"".join(run[3] for run in runs),
            b"".join(_NUMBER.pack(run[1]) for run in runs) if keeps else b"",
            self._log.sequence if sets or audit else 0,
            sets,
            audit,
            math.ceil(self._audit_round_seconds()) if audit else 0,
        )
        return HomePush(
            self._new_token(member, home), peer_id, self._config.push_timeout_seconds, message
        )

    def _sets_for(self, member: Member, home: _Home) -> list[PartitionSet]:
        sets: list[PartitionSet] = []
        if not home.behind:
            return sets
        room = SETS_BYTES
        for partition in self.table.by_home.get(member, ()):
            if member in self._confirmed.by[partition]:
                continue
            size_bytes = self.sets.size_bytes(partition)
            if size_bytes > MAX_SET_RECORDS * LOCATION_BYTES:
                continue
            if sets and size_bytes > room:
                return sets
            room -= size_bytes
            number, set_hash = self.sets.number(partition), self.sets.set_hash(partition)
            sets.append(PartitionSet(partition, number, set_hash, self.sets.pack(partition)))
        home.behind = False
        return sets

    def _audit_round_seconds(self) -> float:
        config = self._config
        return max(config.audit_seconds, len(self.table.by_home) * config.audit_pause_seconds)

    def keepers(self, count: int, now: float) -> None:
        """How many other members keep partitions. Call it now and then."""
        if not count:
            self._audit_at = math.inf
            if self.sets.any_made:
                self.sets.forget()
        elif self._audit_at == math.inf:
            self._audit_at = now + self._rng.uniform(0.0, self._config.audit_seconds)

    def _choose_audits(self, now: float) -> None:
        if now < self._audit_at:
            return
        homes = len(self.table.by_home)
        pause = self._audit_round_seconds() / max(1, homes)
        count = min(homes, 1 + int((now - self._audit_at) / pause))
        for _ in range(count):
            if not self._to_audit:
                self._to_audit = [m for m in self.table.by_home if m != self._own]
                self._rng.shuffle(self._to_audit)
            if self._to_audit:
                member = self._to_audit.pop()
                if member in self.table.members and self._keeps(member):
                    self._homes.setdefault(member, _Home()).audit = True
        self._audit_at = max(self._audit_at + count * pause, now)

    def _audit_of(self, member: Member) -> bytes:
        entries = [
            AUDIT_ENTRY.pack(partition, self.sets.number(partition), self.sets.set_hash(partition))
            for partition in self.table.by_home.get(member, ())
            if member in self._confirmed.by[partition]
        ]
        return b"".join(entries)

    def lacking(self) -> int:
        """How many (home, partition) pairs have not confirmed all of it."""
        return sum(
            member != self._own and member not in self._confirmed.by[partition] and self._keeps(member)
            for partition, homes in enumerate(self.table.homes)
            for member in homes
        )

    def _bring_up(self, members: Iterable[Member], now: float) -> None:
        """Send these homes what they lack, when it is their turn."""
        if not self._new:
            # All owners notice a new home at the same time; it cannot take what they have all at once.
            spread = self._config.sync_spread_seconds * len(self.table.members)
            self._new_at = max(self._new_at, now + self._rng.uniform(0.0, spread))
        self._new |= dict.fromkeys(m for m in members if m != self._own and self._keeps(m))

    def _choose_new(self, now: float) -> None:
        while self._new and self._new_at <= now:
            member = next(iter(self._new))
            del self._new[member]
            home = self._homes.setdefault(member, _Home())
            home.behind = True
            lacking = sum(
                member not in self._confirmed.by[partition]
                for partition in self.table.by_home.get(member, ())
            )
            size_bytes = LOCATION_BYTES * self._log.head.count * lacking / PARTITION_COUNT
            config = self._config
            self._new_at = max(self._new_at, now - config.push_seconds) + max(
                1.0 / config.syncs_per_second, size_bytes / config.sync_bytes_per_second
            )

    def _expire(self, now: float) -> None:
        for token, member in list(self.tokens.items()):
            home = self._homes.get(member)
            if home is None or home.expires_at <= now:
                self.answered(token, None, now)  # the shell lost it
        self._confirmed.expire(self.table, now)
