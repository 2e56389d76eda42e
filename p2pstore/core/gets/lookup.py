"""Finding copies of keys."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from p2pstore.core.copies.proofs import ASK_SECONDS, COLD_SECONDS, ProveOperation
from p2pstore.core.operation import KnownCopy, Operation, Reply
from p2pstore.errors import NoSuchKey, P2PStoreError, ProtocolError, Unavailable
from p2pstore.gossip.records import LOCATION_BYTES, LocationRecord, PeerId, decode_location, member_of
from p2pstore.home_messages import Holding
from p2pstore.objects import DIGEST_BYTES, Version
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Locations, Lookup

if TYPE_CHECKING:
    from p2pstore.core.peer_core import PeerCore

LOOKUP_TIMEOUT_SECONDS: Final = 1.0
NEXT_HOME_SECONDS: Final = 0.5
"""How long to wait for one home before the next one is asked."""
HEDGE_PROBE_TIMEOUTS: Final = 0.2
"""Share of a probe's timeout after which the next home is asked, too: 0.1 s in a LAN, and no more for a dead home."""
WAIT_FIRST_RETRY_SECONDS: Final = 0.05
WAIT_LAST_RETRY_SECONDS: Final = 2.0
"""A waiting lookup hears by gossip as well: homes are asked again for keys that gossip has not brought."""
PARTITIONED_LAST_RETRY_SECONDS: Final = 0.5
"""A peer that does not follow all logs hears of keys only by asking."""
UNSURE_SECONDS: Final = 2.0
"""How long homes that do not know their records yet are asked again. Longer than it takes to tell them."""
PATIENCE_SHARE: Final = 0.6
"""Share of a read's deadline in which homes, and holders without a proof, are asked again where none answers."""
BELIEVED: Final = 2
"""Homes that must say that no peer holds a key: one alone may be wrong, or lie."""
DIGESTS_PER_LOOKUP: Final = 1_024
"""The home peer answers them in one go."""


@dataclass(slots=True)
class _Question:
    """Keys that one home was asked for. `hedge_at`: when the next home is to be asked as well."""

    home: PeerId
    digests: list[bytes]
    hedge_at: float = math.inf


@dataclass(slots=True)
class _Sought:
    """A key without a usable copy. The rest is for partitioned mode."""

    homes: list[PeerId] | None = None
    """Homes that are left to ask in this round; None where no more answers are waited for."""
    deniers: int = 0
    """How many homes vouched in this round that no peer holds the key."""
    told: bool = False
    """Whether a home ever answered, though it may not know all records."""


class LookupOperation(Operation):
    """Find copies of keys: among the locations known here, else by asking the keys' home peers once.

    A peer that follows all logs seldom misses a key, and asks all three homes of one at a time: a key unknown here is
    so young that a home may not know it either. In partitioned mode it asks one home, and the next one when that knows
    of no copy, does not answer or says that it may not know all; when it does not answer at once, both are asked at
    the same time. A key is absent when `believed` homes vouch for that, or all that answer where they are fewer; why a
    key has no copies, `absence` says.

    The result is a list, per digest, of `KnownCopy` (best first). With `wait_seconds` it goes on until every
    key was found or the time is over: it looks again at any news of a missing key, and now and then
    asks the homes again. `exclude` are members that just failed for the caller. `namespace` is the digest
    of the namespace of all keys, where it is known: flushed objects are left out. With `ask_always`, homes are
    asked even of keys of which copies are known here: there may be more. For `patience_seconds`, homes of which none
    has answered are asked again, and holders whose proofs have not come, where a key has no other copies.

    Many keys are gone through some at a time (`PeerCore.keys_per_step`), one step a tick.
    """

    def __init__(
        self,
        core: PeerCore,
        digests: Sequence[bytes],
        *,
        wait_seconds: float = 0.0,
        exclude: frozenset[int] = frozenset(),
        namespace: bytes | None = None,
        ask_homes: bool = True,
        ask_always: bool = False,
        believed: int = BELIEVED,
        patience_seconds: float = 0.0,
    ) -> None:
        super().__init__(core)
        self.digests = list(digests)
        self._wait_seconds = wait_seconds
        self._exclude = exclude
        self._namespace = namespace
        self._ask_homes = ask_homes
        self._ask_always = ask_always
        self._believed = believed
        self._patient_until = patience_seconds
        self._to_look: deque[bytes] = deque()
        """Keys that this round has yet to look for."""
        self._to_ask: dict[PeerId, list[bytes]] = {}
        """Keys that this round has not found, by home."""
        self.vouched: set[bytes] = set()
        """Keys of which a home knows all there is."""
        self.at_unknown_members: dict[bytes, list[Version]] = {}
        """By key: versions that homes know at members that this peer does not know yet, as shortly after its start."""
        self._unsure_until = 0.0
        self.asked: dict[int, _Question] = {}
        self._asks_all = False
        """Whether all homes were asked at once, so that no answer alone says that a key is nowhere."""
        self._homes: set[PeerId] = set()
        self._retry_seconds = WAIT_FIRST_RETRY_SECONDS
        self._ask_again_at = math.inf
        self._wait_until = 0.0
        self._missed: dict[bytes, _Sought] = {}
        self._doubtful: dict[int, list[KnownCopy]] = {}
        """Copies that would have to be proved, of keys without newer ones: by their places."""
        self._unproved: set[bytes] = set()
        """Keys whose copies stayed unproved: until the next round, only copies that count are looked for."""
        self._asks_longer = False
        self.claimed: dict[bytes, bool] = {}
        """Keys without copies that holders claim, and did not fail to prove: whether one of these can be reached."""
        self._collected: list[list[KnownCopy]] | None = None
        """The result as far as it is put together; None before."""

    def start(self, now: float) -> None:
        self._wait_until = now + self._wait_seconds
        self._patient_until += self._wait_until
        self._unsure_until = now + UNSURE_SECONDS
        self._to_look.extend(dict.fromkeys(self.digests))
        self._look_on(now)

    def finish(self, result: Any, now: float) -> None:
        self.core.operations.await_no_more(self, self.digests)
        for tag, question in self.asked.items():
            self.core.operations.expect_late(self, tag, question.home)
        super().finish(result, now)

    def heard_of(self, digest: bytes, now: float) -> None:
        if digest in self._missed and self._usable(digest, now):
            del self._missed[digest]
            if not self._missed:
                self._settle(now)

    def absence(self, digest: bytes) -> P2PStoreError:
        """Why a key has no copies: no peer has it, or this peer cannot know. A member that claims a key and stays
        silent gains no more than one that puts the key and withholds it."""
        if digest in self.claimed:
            return Unavailable(
                "peers say that they hold this key, and did not answer in time: try again (`mooncake-p2p peers` says "
                "who can be reached)"
            )
        if (
            (sought := self._missed.get(digest)) is not None
            and sought.homes is not None
            and not sought.told
        ):
            return Unavailable(
                "this peer keeps a part of the directory only, and none of the peers that keep this key's can be "
                "reached: try again (`mooncake-p2p peers` says who can be)"
            )
        return NoSuchKey("no live peer holds this key")

    @property
    def homes_asked(self) -> int:
        return len(self._homes)

    def answered(self, about: _Question, reply: Reply, now: float) -> None:
        home, digests = about.home, about.digests
        unsure: Sequence[int] = range(len(digests))
        if isinstance(reply, Locations):
            self.core.copies.learn_locations(home, digests, reply, now)
            unsure = [place for place in reply.unsure if 0 <= place < len(digests)]
            for place, holdings in enumerate(reply.items[: len(digests)]):
                if self._names_strangers(holdings):
                    unsure.append(place)
                    records = [holding_record(each.record) for each in holdings]
                    versions = [each.version for each in records if each is not None]
                    self.at_unknown_members.setdefault(digests[place], []).extend(versions)
            self.vouched.update(set(digests).difference(digests[place] for place in unsure))
            doubtful = {digests[place] for place in unsure} if self._ask_always else frozenset()
            for digest in [each for each in digests if each in self._missed]:
                self._missed[digest].told = True
                if digest not in doubtful and self._usable(digest, now):
                    del self._missed[digest]
        elif reply is None:
            self.core.holders.peer_failed(home, now)
        self._ask_others(digests, {digests[place] for place in unsure}, now)
        self._settle(now)

    def _names_strangers(self, holdings: Sequence[Holding]) -> bool:
        """Whether a home names holders that are all unknown to this peer, as when it began: not nowhere."""
        members = [each.member for each in holdings if each.member != self.core.member]
        resolve = self.core.gossip.membership.resolve
        return bool(members) and all(resolve(member) is None for member in members)

    def _ask_others(self, digests: Sequence[bytes], unsure: set[bytes], now: float) -> None:
        """Ask the next home for what one was asked for and cannot tell, or knows no copy of."""
        sought = [(each, self._missed[each]) for each in digests if each in self._missed]
        sought = [(digest, each) for digest, each in sought if each.homes is not None]
        if not sought:
            return
        elsewhere = {digest for question in self.asked.values() for digest in question.digests}
        for digest, each in sought:
            each.deniers += digest not in unsure
            none_left = not each.homes and digest not in elsewhere
            if each.deniers >= self._believed or (each.deniers and none_left):
                each.homes = None
            elif digest not in elsewhere or digest not in unsure:
                self._choose_home(digest, each)
        self._ask_chosen(now)

    def _hedge(self, now: float) -> None:
        """Ask the next home as well for what one is silent about."""
        for question in [each for each in self.asked.values() if each.hedge_at <= now]:
            question.hedge_at = math.inf
            for digest in question.digests:
                if digest in self._missed:
                    self._choose_home(digest, self._missed[digest])
        self._ask_chosen(now)

    def wake(self, now: float) -> None:
        if self._collected is not None:
            if len(self._collected) < len(self.digests):
                self._collect(now)
        elif self._to_look:
            self._look_on(now)
        elif not self._needs_answers and now >= self._ask_again_at:
            waiting, claimed = now < self._wait_until, self.claimed.get
            self._to_look.extend(
                digest
                for digest, sought in self._missed.items()
                if waiting or sought.homes is not None or claimed(digest)
            )
            self._unproved.difference_update(self._to_look)
            self._look_on(now)
        else:
            self._hedge(now)
            self._settle(now)

    def _usable(self, digest: bytes, now: float) -> bool:
        known, doubtful = self.core.copies.sorted(digest, now, self._namespace, hearsay=True)
        if any(copy.reachable and copy.member not in self._exclude for copy in known):
            return True
        return digest not in self._unproved and any(
            copy.member not in self._exclude and self.core.proofs.may_ask(copy, now, insist=not known)
            for copy in doubtful
        )

    def _look_on(self, now: float) -> None:
        """Look for some more keys; when all were looked for, ask the homes of those not found."""
        for _ in range(min(self.core.keys_per_step, len(self._to_look))):
            digest = self._to_look.popleft()
            if not self._ask_always and self._usable(digest, now):
                self._missed.pop(digest, None)
            else:
                self._note_missed(digest, now)
        if self._to_look:
            self.set_alarm(now)
            return
        self._ask_again_at = now + self._retry_seconds
        follows = self.core.gossip.partitions.mode.knows_all
        longest = WAIT_LAST_RETRY_SECONDS if follows else PARTITIONED_LAST_RETRY_SECONDS
        self._retry_seconds = min(2 * self._retry_seconds, longest)
        self._ask_chosen(now)
        self._settle(now)

    def _ask_chosen(self, now: float) -> None:
        to_ask, self._to_ask = self._to_ask, {}
        for home, digests in to_ask.items():
            for start in range(0, len(digests), DIGESTS_PER_LOOKUP):
                self._ask(home, digests[start : start + DIGESTS_PER_LOOKUP], now)

    def _note_missed(self, digest: bytes, now: float) -> None:
        sought = self._missed.setdefault(digest, _Sought())
        sought.deniers = 0
        if self._wait_seconds > 0:
            self.core.operations.await_keys(self, [digest])
        if not self._ask_homes:
            return
        homes = [home for home in self.core.homes(digest) if member_of(home) not in self._exclude]
        if self.core.gossip.partitions.mode.knows_all:
            self._asks_all = True
            for home in homes:
                self._to_ask.setdefault(home, []).append(digest)
        elif homes and not self.core.gossip.partitions.vouches(digest, now):
            self.core.rng.shuffle(homes)
            homes.sort(key=lambda home: self.core.holders.is_avoided(member_of(home), now))
            sought.homes = homes
            self._choose_home(digest, sought)

    def _choose_home(self, digest: bytes, sought: _Sought) -> None:
        """Choose the home to ask next for a key: one that is asked for other keys anyway, else the first one left. With
        none left, no home knows."""
        if homes := sought.homes:
            home = next((each for each in homes if each in self._to_ask), homes[0])
            homes.remove(home)
            self._to_ask.setdefault(home, []).append(digest)

    def _ask(self, home: PeerId, digests: list[bytes], now: float) -> None:
        question = _Question(home, digests)
        self._homes.add(home)
        left = [sought.homes for digest in digests if (sought := self._missed.get(digest)) is not None]
        if any(left):
            patience = self.core.gossip.config.membership.probe_timeout_seconds
            question.hedge_at = now + HEDGE_PROBE_TIMEOUTS * patience
        timeout = LOOKUP_TIMEOUT_SECONDS if all(homes is None for homes in left) else NEXT_HOME_SECONDS
        self.ask(question, home, DataKind.LOOKUP, Lookup(b"".join(digests)), timeout)

    @property
    def _is_unsure(self) -> bool:
        return any(sought.homes is not None for sought in self._missed.values())

    @property
    def _needs_answers(self) -> bool:
        """Whether answers may come that say more than is known."""
        return bool(self.asked) and (self._asks_all or self._is_unsure)

    def _settle(self, now: float) -> None:
        """Nothing is left to look for: end, or wait for answers and news."""
        if self.done or self._to_look or self._collected is not None:
            return
        needs_answers = self._needs_answers
        until = max(self._wait_until, self._unsure_until) if self._is_unsure else self._wait_until
        untold = any(each.homes is not None and not each.told for each in self._missed.values())
        if untold or (self.claimed and any(map(self.claimed.get, self._missed))):
            until = max(until, self._patient_until)
        if not self._missed or (not needs_answers and now >= until):
            self._collected = []
            self._collect(now)
            return
        next_ask = math.inf if needs_answers else self._ask_again_at
        hedges = (question.hedge_at for question in self.asked.values())
        self.set_alarm(min(next_ask, until if now < until else math.inf, *hedges))

    def _collect(self, now: float) -> None:
        """Put some more of the result together, from what is known by now."""
        assert self._collected is not None
        start = len(self._collected)
        some = self.digests[start : start + self.core.keys_per_step]
        for digest in some:
            self._collected.append(self._copies_of(digest, len(self._collected), now))
        if len(self._collected) < len(self.digests):
            self.set_alarm(now)
        elif self._doubtful:
            copies = [copy for copies in self._doubtful.values() for copy in copies]
            left_seconds = min(COLD_SECONDS, self._patient_until - now) if self._asks_longer else 0.0
            proving = ProveOperation(self.core, copies, seconds=max(ASK_SECONDS, left_seconds))
            self.core.operations.start(proving, now, self._asked_for_proofs)
        else:
            self.finish(self._collected, now)

    def _copies_of(self, digest: bytes, place: int, now: float) -> list[KnownCopy]:
        """The copies known for sure of the key at `place`; copies announced as newer are noted."""
        known, doubtful = self.core.copies.sorted(digest, now, self._namespace, hearsay=True)
        copies = [copy for copy in known if copy.member not in self._exclude]
        newest = next((copy.record.version[:2] for copy in copies if copy.reachable), (0, 0))
        self.claimed.pop(digest, None)
        if newest == (0, 0) and (open_claims := self.core.proofs.undenied(doubtful, now)):
            self.claimed[digest] = any(
                copy.reachable and copy.member not in self._exclude for copy in open_claims
            )
        alone = newest == (0, 0) and digest not in self._unproved
        if wanted := [
            copy
            for copy in doubtful
            if copy.record.version[:2] > newest
            and copy.member not in self._exclude
            and self.core.proofs.may_ask(copy, now, insist=alone)
        ]:
            self._doubtful[place] = wanted
        return copies

    def _asked_for_proofs(self, result: Any, now: float) -> None:
        """Proved copies count now. Unproved ones hide nothing: keys with no other copy are looked for once more."""
        if self.done:
            return
        assert self._collected is not None
        places = list(self._doubtful)
        for place in places:
            self._collected[place] = self._copies_of(self.digests[place], place, now)
        self._doubtful.clear()
        missing = {
            self.digests[place]: None
            for place in places
            if not any(copy.reachable for copy in self._collected[place])
        }
        again = [digest for digest in missing if digest not in self._unproved]
        if not again:
            self.finish(self._collected, now)
            return
        self._unproved.update(again)
        self._asks_longer = True
        self._collected = None
        self._to_look.extend(again)
        self._look_on(now)


def split_digests(packed: bytes) -> list[bytes]:
    """Packed digests, one by one. Raises `ProtocolError` when they are not whole."""
    if len(packed) % DIGEST_BYTES:
        raise ProtocolError(f"packed digests of {len(packed)} bytes")
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]


def holding_record(packed: bytes) -> LocationRecord | None:
    """A location record in an answer; None when it is none, or says that nothing is held."""
    if len(packed) != LOCATION_BYTES:
        return None
    record = decode_location(packed)
    return None if record.removed else record


def check_holding_record(packed: bytes, digest: bytes) -> bool:
    """Whether a location record in an answer is one of the key that was asked for."""
    record = holding_record(packed)
    return record is not None and record.digest == digest


class AfterLookup(Operation):
    """An operation on many keys: it goes through them in steps, looks up their copies, and goes on with those in steps.
    It ends with `Unavailable` at once when this peer's clock is wrong."""

    def __init__(self, core: PeerCore) -> None:
        super().__init__(core)
        self._digests: list[bytes] = []
        self._lookup: LookupOperation | None = None
        self._found: deque[tuple[bytes, list[KnownCopy]]] = deque()
        """Copies that were looked up, and are yet to be gone on with."""

    def start(self, now: float) -> None:
        try:
            self.core.timekeeping.check(now)
        except Unavailable as error:
            self.finish(error, now)
            return
        self._begin_on(now)

    def wake(self, now: float) -> None:
        if self._lookup is None:
            self._begin_on(now)
        else:
            self._go_on(now)

    def _begin_on(self, now: float) -> None:
        """A step before the lookup; the last one calls `_look_up`."""
        raise NotImplementedError

    def _go_on(self, now: float) -> None:
        """A step with what is in `_found`."""
        raise NotImplementedError

    def _look_up(self, now: float, *, ask_always: bool = False) -> None:
        self._lookup = LookupOperation(self.core, self._digests, ask_always=ask_always)
        self.run(self._lookup, self._looked, now)

    def _looked(self, result: Any, now: float) -> None:
        if isinstance(result, Exception):
            self.finish(result, now)
            return
        self._found.extend(zip(self._digests, result, strict=True))
        self._go_on(now)
