"""Gossip as one state machine: membership, logs, directory and cluster records kept alike
everywhere. Pure.

How it is driven: whatever happens is fed in (`serve`, `answered`, `contacted`, `hold`, ...), then
`tick` does what is due. Feeding in may make something due at once, so ask `next_tick` again after
every event; and feed in everything that has arrived before `tick`, which judges timeouts. Each
`Ask`, `FetchSnapshot` and `Contact` is answered exactly once, by `answered`, `snapshot_fetched`,
and `contacted` or `contact_failed`.

How news travels. A new operation, member or cluster record goes to four random neighbours at once
(see `active_view`), and those for whom it is new do the same. What that misses, one exchange with one
random neighbour brings: every 67 ms while there are differences, once a second when there are none. A reader behind
everybody's ring fetches a snapshot from the log's owner. A key's home peers are told of its
locations directly (`pushes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Final

import msgspec

from p2pstore.errors import ProtocolError
from p2pstore.gossip.exchange.anti_entropy import (
    Knowledge,
    News,
    check_claims,
)
from p2pstore.gossip.exchange.asking import Asked, Questions
from p2pstore.gossip.exchange.exchanges import Exchanges, read_reply, read_request
from p2pstore.gossip.exchange.fresh_news import FreshNews
from p2pstore.gossip.exchange.future_records import FutureRecords
from p2pstore.gossip.exchange.operation_rate import OperationRate
from p2pstore.gossip.floors.cluster_records import (
    ClusterRecords,
)
from p2pstore.gossip.floors.floor_sync import FloorSync
from p2pstore.gossip.gossip_config import GossipConfig
from p2pstore.gossip.gossip_effects import (
    Answer,
    Ask,
    Contact,
    Duplicate,
    Effect,
    FetchSnapshot,
    Later,
    Push,
    SnapshotHead,
)
from p2pstore.gossip.gossip_messages import (
    Ack,
    Claim,
    ControlKind,
    Delta,
    Exchange,
    ExchangeReply,
    Leave,
    Ping,
    PingRequest,
    Status,
)
from p2pstore.gossip.homes.directory_mode import Phase
from p2pstore.gossip.homes.home_updates import CheckedUpdate, HomeUpdate
from p2pstore.gossip.homes.hot_locations import unpack_hot
from p2pstore.gossip.homes.partitioned_directory import PartitionedDirectory
from p2pstore.gossip.homes.placement import rank
from p2pstore.gossip.homes.push_intake import PushIntake
from p2pstore.gossip.locations.catch_up import CatchUp
from p2pstore.gossip.locations.directory import Directory, Location
from p2pstore.gossip.locations.log import MAX_STAMP, OwnLog, newest_clock
from p2pstore.gossip.locations.published_locations import PublishedLocations
from p2pstore.gossip.locations.signed_runs import SigningPace
from p2pstore.gossip.locations.snapshots import (
    CheckedSnapshot,
    Packed,
    check_snapshot,
    most_snapshot_bytes,
)
from p2pstore.gossip.members.active_view import ActiveView
from p2pstore.gossip.members.contacts import Contacts
from p2pstore.gossip.members.membership import (
    MAX_INCARNATION,
    MemberChange,
    Membership,
)
from p2pstore.gossip.members.own_record import OwnRecord
from p2pstore.gossip.members.peer_clocks import ClockView, PeerClocks
from p2pstore.gossip.members.probing import Probing
from p2pstore.gossip.records import (
    LOCATION_BYTES,
    ClusterRecord,
    LocationRecord,
    Member,
    PeerId,
    PeerRecord,
    SignedRecord,
    Signer,
    Tier,
    Verifier,
    format_peer_id,
)
from p2pstore.location_table import LocationTable
from p2pstore.objects import (
    DIGEST_BYTES,
    Version,
    newest_accepted_clock,
    unix_seconds_from_clock,
)
from p2pstore.wire import Code, Empty, Failure, Message

__all__ = [
    "Answer",
    "Ask",
    "Contact",
    "Duplicate",
    "Effect",
    "FetchSnapshot",
    "Gossip",
    "GossipConfig",
    "Later",
    "Push",
    "SnapshotHead",
]

HOUSEKEEPING_SECONDS: Final = 0.25
PURGING_SECONDS: Final = 0.05
"""While floors are dropped, step by step."""


class Gossip:
    """See the module's docstring.

    `describe` returns what this peer offers now; the machine fills in incarnation, sequence, head,
    horizon and leaving, and signs. `incarnation` is that of this start: wall-clock ms, above the last one
    used. `wall_clock(now)` is the hybrid clock's reading of the wall clock at the monotonic time `now`.
    `location_table`: an empty one that clients may map, with `config.directory.max_rows` rows.
    """

    def __init__(
        self,
        signer: Signer,
        verifier: Verifier,
        incarnation: int,
        describe: Callable[[], PeerRecord],
        config: GossipConfig,
        rng: Random,
        *,
        wall_clock: Callable[[float], int],
        accepts_clock: Callable[[int, float], bool] = lambda clock, now: True,
        accepts_peer: Callable[[PeerId], bool] = lambda peer_id: True,
        location_table: LocationTable | None = None,
    ) -> None:
        self.peer_id: PeerId = signer.peer_id
        self.config = config
        self._wall_clock = wall_clock
        self.membership = Membership(
            signer.peer_id,
            incarnation,
            config.membership,
            lambda now: 1000 * unix_seconds_from_clock(wall_clock(now)),
        )
        self.member: Member = self.membership.own.member
        self.log = OwnLog(incarnation, config.ring_limit)
        self.published = None if location_table is None else PublishedLocations(location_table)
        self.directory = Directory(config.directory, rng.getrandbits(128), self.published)
        self.cluster_records = ClusterRecords(
            config.cluster_record_limit,
            kept_seconds=config.floor_kept_seconds,
            published=self.published,
        )
        self.floors = FloorSync(self.member, self.cluster_records, accepts_clock, wall_clock)
        self.contacts = Contacts(rng)
        self.clocks = PeerClocks()
        self.clocks_compared: list[PeerId] = []
        """Members whose clocks the last `clock_view` is about."""
        self._clock_view = ClockView(None, math.inf, False, False)
        self._clock_key: tuple[int, int, float, int] | None = None
        self.future = FutureRecords()
        """What was left out because its stamp is too far ahead of this peer's clock."""
        self.knowledge = Knowledge(
            config.cluster,
            self.membership,
            self.directory,
            self.log,
            self.cluster_records,
            verifier,
            accepts_clock,
            rng,
            accepts_peer,
            newest_accepted=self._newest_accepted,
            future=self.future,
        )
        self.own_record = OwnRecord(
            signer, self._describe, config, self.membership, self.log, self.floors
        )
        self._offer = describe
        self.questions = Questions(config)
        self.view = ActiveView(
            self.membership, rng, config.active_view, config.view_rotation_seconds
        )
        rate = OperationRate(config.eager_operations_per_second)
        self._signer = signer
        self._recorded: SignedRecord | None = None
        self._pace = SigningPace(lambda: rate.is_high, lambda: 1 + len(self.directory.unsettled))
        self._exchanges = Exchanges(
            config, self.knowledge, self.floors, self.questions, self.view, rng, rate
        )
        self.partitions = PartitionedDirectory(
            config, self.membership, self.directory, self.log, rng
        )
        self.locations = self.partitions.known
        self._exchanges.hot_for = self.partitions.hot_for
        self._exchanges.unix_ms = self._unix_ms

        self._probing = Probing(self.membership, self.questions, rng)
        self._housekeeping_at = -math.inf
        self._fresh = FreshNews(config, self.knowledge, self.view, self.questions, rate)
        self._catch_up = CatchUp(self.directory, config.ring_limit, config.behind_seconds)
        self._forget_at: dict[Member, float] = {}
        self.losses = 0
        """Grows whenever a member that may have held something died, left, began anew or was expelled."""
        self._changes: list[MemberChange] = []
        self._arrived: list[tuple[ClusterRecord, SignedRecord]] = []
        self._placement: tuple[int, list[Member]] = (-1, [])

    # --- this peer ---------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Of this peer's log and record. Normally that of the start; see `defence_margin`."""
        return self.log.incarnation

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self.own_record.leaving

    @property
    def joined(self) -> bool:
        """Whether a peer has admitted this one since the start."""
        return self.contacts.admitted_once

    @property
    def alone_by_configuration(self) -> bool:
        """Whether there is nobody else: no member, none that was, and no address to try."""
        return self.contacts.is_empty and len(self.membership) == 1

    def hold(self, record: LocationRecord, now: float) -> None:
        """This peer holds a version of a key from now on."""
        operation = self.log.add(record)
        self._note_operation(operation, now)
        if operation is not None and record.tier is Tier.SSD:  # clients do not see it in memory
            self.directory.show_own(self.member, operation)
        elif operation is not None:
            self.directory.hide_own([record.digest])

    def hold_new(self, operations: Sequence[bytes], now: float) -> None:
        """`hold` of many packed records of keys of which this peer held nothing."""
        self.log.add_many(operations)
        self._note_operations(operations, now)

    def release(self, digest: bytes, version: Version, now: float) -> None:
        """This peer no longer holds that version."""
        self.release_many([(digest, version)], now)

    def release_many(self, gone: Sequence[tuple[bytes, Version]], now: float) -> None:
        """`release` of many, each of another key."""
        operations = self.log.remove_many(gone)
        self._note_operations(operations, now)
        self.directory.hide_own([operation[:DIGEST_BYTES] for operation in operations])

    def record(self, now: float) -> SignedRecord:
        """This peer's own record, signed anew when something changed; its head's operations are signed with it."""
        signed = self.own_record.signed(now)
        wanted = self.log.signed < self.log.sequence and self.partitions.logs_are_read
        if wanted and (signed is not self._recorded or self._pace.may_sign(now)):
            self.log.sign(self._signer)
            self._pace.signed(now)
        self._recorded = signed
        return signed

    def offer_changed(self) -> None:
        """This peer offers something else now that others should hear of soon."""
        self.own_record.changed()
        self._exchanges.hurry()

    def pushes(self, now: float) -> list[Push]:
        """What homes should know of this peer's log: at once, then at most every 20 ms."""
        return self.partitions.take_pushes(now)

    def push_answered(
        self, token: int, behind: list[int] | None, rivals: Iterable[Location], now: float
    ) -> None:
        """The outcome of a `Push`: partitions that are wanted whole (None when nothing came), and other versions
        that the home knows of keys that were pushed."""
        self.partitions.pushed(token, behind, rivals, now)

    def take_push(
        self, sender: Member, update: HomeUpdate, now: float
    ) -> tuple[list[int], list[Location]]:
        """Take in what an owner pushes; what to answer: see `push_answered`. Raises `ProtocolError`, and
        changes nothing, for nonsense. A large one takes tenths of a second: see `intake`."""
        intake = self.intake(sender, update)
        while not intake.step(now):
            pass
        return intake.behind, intake.rivals

    def intake(self, sender: Member, update: HomeUpdate) -> PushIntake:
        """What takes in what an owner pushes, in steps of a few milliseconds. Raises `ProtocolError`, as its
        first steps do, for nonsense."""
        return PushIntake(sender, update, self._take_pushed)

    def _take_pushed(
        self, owner: Member, part: CheckedUpdate, max_rivals: int, now: float
    ) -> tuple[list[int], list[Location]]:
        self.heard_of(part.packed_operations, now)
        for whole in part.sets:
            self.heard_of(whole.records, now)
        return self.partitions.take(owner, part, max_rivals, now)

    def offer_cluster_record(self, record: ClusterRecord, signed: SignedRecord, now: float) -> bool:
        """Keep and spread a verified cluster record. Whether it was new."""
        return self.cluster_records.offer(record, signed)

    def take_cluster_records(self) -> list[tuple[ClusterRecord, SignedRecord]]:
        """New cluster records that gossip brought since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_changes(self) -> list[MemberChange]:
        """Status changes of members since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def leave(self, now: float) -> list[Effect]:
        """Tell up to eight members that this peer goes. After it, `tick` starts nothing new."""
        self.own_record.leave()
        signed = self.record(now)
        told = self.view.sample(self.config.leave_fanout)
        self.membership.leave(now)
        return [
            self.questions.ask(state.peer_id, ControlKind.LEAVE, Leave(signed), now)
            for state in told
        ]

    # --- what is known -----------------------------------------------------------------------

    def heard_of(self, operations: Packed, now: float, newest: int | None = None) -> None:
        """Locations were heard of, in packed records; `newest` is their highest clock where that is known already."""
        if newest is None:
            newest = newest_clock(operations, MAX_STAMP)
        self.floors.heard_of(operations, newest, now)
        if newest > self._newest_accepted(now):
            self.future.note(newest)

    def doubts(self, member: Member, version: Version, now: float) -> bool:
        """Whether the member's copy of this version may have been removed while it was away."""
        return version.clock <= self.doubted_up_to(member, now)

    def doubted_up_to(self, member: Member, now: float) -> int:
        """The clock up to which a member's versions are doubted; -1 when none are."""
        state = self.membership.resolve(member)
        shown = None if state is None or state.signed is None else state.floors_horizon
        return self.floors.doubted_up_to(member, shown, now)

    def holders(self, digest: bytes, now: float, *, hearsay: bool = False) -> list[Location]:
        """Who is known to hold the key: owners believed alive first, among them the newest version first. With
        `hearsay` also who may hold it: for who looks there."""
        return self.locations.holders(digest, now, hearsay=hearsay)

    def homes(self, digest: bytes) -> list[PeerId]:
        """The key's home peers, best first; this one may be among them."""
        return self._peer_ids(self.partitions.homes(digest))

    def rank(self, digest: bytes) -> list[PeerId]:
        """The other live members in rendezvous order for a key."""
        return [p for p in self._peer_ids(rank(digest, self._members())) if p != self.peer_id]

    def name_of(self, peer_id: PeerId) -> str:
        """The peer's name, or the end of its id where the name is not known."""
        state = self.membership.get(peer_id)
        if state is not None and (record := state.record) is not None and record.name:
            return record.name
        return format_peer_id(peer_id)[-8:]

    @property
    def all_know_floors_of_keys(self) -> bool:
        """Whether no living member is of a version that knows floors of single keys only."""
        return all(state.floors_end for state in self.membership.others())

    def names_of(self, members: Iterable[Member]) -> list[str]:
        """Their names; the short name in hexadecimal of one that is not known."""
        states = [(member, self.membership.resolve(member)) for member in members]
        return [
            f"{member:016x}" if state is None else self.name_of(state.peer_id)
            for member, state in states
        ]

    def neighbours(self) -> list[PeerId]:
        """The members that this peer talks to all the time: connections with them are worth keeping."""
        return self.view.neighbours()

    def addresses_of(self, peer_id: PeerId) -> list[str]:
        """Control addresses of a peer, from its record or the address book."""
        state = self.membership.get(peer_id)
        if state is not None and (record := state.record) is not None:
            return list(record.control)
        known = self.contacts.known_at().get(peer_id, ())
        return [*known, *self.membership.newcomers.addresses_of(peer_id)]

    def snapshot(self, member: Member) -> tuple[SnapshotHead, bytes] | None:
        """This peer's whole location set, packed, in one step (`OwnLog.copying` takes several); None of another member:
        only an owner is asked for its set."""
        if member != self.member:
            return None
        head = self.log.head
        return SnapshotHead(self.incarnation, head.sequence, head.set_hash), self.log.snapshot()

    def address_book(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Where the members (dead ones too, after the living) were last, for the state directory."""
        book: dict[PeerId, tuple[str, ...]] = {}
        for state in sorted(self.membership.states(), key=lambda state: state.status):
            if state.control:
                book[state.peer_id] = state.control
        for peer_id, addresses in self.contacts.book():
            if peer_id is not None:
                book.setdefault(peer_id, addresses)
        book.pop(self.peer_id, None)
        return list(book.items())

    def addresses_to_keep(self) -> list[str]:
        """The address book without ids, with the addresses of peers whose ids are not known yet."""
        kept = [each for _, addresses in self.address_book() for each in addresses]
        kept += [a for peer_id, those in self.contacts.book() if peer_id is None for a in those]
        return kept

    def load_address_book(self, book: Iterable[tuple[PeerId | None, Sequence[str]]]) -> None:
        """Peers of an earlier run, tried while this peer knows nobody."""
        for peer_id, addresses in book:
            self.contacts.add(addresses, peer_id, bootstrap=False, loaded=True)

    def add_bootstrap(self, addresses: Iterable[str]) -> None:
        """Addresses to join through, each of another peer."""
        for address in addresses:
            self.contacts.add((address,))

    def expel(self) -> list[PeerId]:
        """Forget the members, and what they hold, that `accepts_peer` does not accept any more."""
        accepts = self.knowledge.accepts_peer
        gone = [s for s in self.membership.states() if not accepts(s.peer_id)]
        self.losses += len(gone)
        for state in gone:
            self.membership.expel(state.peer_id)
            self.partitions.drop(state.member)
            self._forget_at.pop(state.member, None)
            self.floors.expelled(state.member)
            self._exchanges.forget(state.peer_id)
        return [state.peer_id for state in gone]

    # --- events ------------------------------------------------------------------------------

    def serve(
        self, sender: PeerId, kind: int, request: Message, now: float
    ) -> tuple[Message | Later, list[Effect]]:
        """Answer a peer's request; `Later` when another peer has to be asked first (see there).

        Raises `ProtocolError`, and changes nothing, for nonsense. Who asks far more often than it may
        (`message_budget`) is told so, and nothing else.
        """
        reply: Message | Later
        effects: list[Effect] = []
        if not self.questions.budget.serve(sender, now):
            self.membership.heard(sender, now)
            return Failure(int(Code.BUSY), "that peer asks too much; let it ask less often"), []
        match request:
            case Ping():
                reply = self._serve_ping(sender, request, now)
            case PingRequest():
                reply, effects = self._serve_ping_request(sender, request, now)
            case Exchange():
                reply = self._serve_exchange(sender, request, now)
            case Delta():
                self._exchanges.delta_came(sender)
                self._take_delta(sender, request, now)
                self._heard(sender, now)
                reply = Empty()
            case Leave():
                pair = self.knowledge.check_record(request.record)
                if pair is not None and (pair[0].peer_id != sender or not pair[0].leaving):
                    raise ProtocolError("a farewell that is not the sender's own")
                self._take_delta(sender, Delta([request.record], [], [], []), now)
                reply = Empty()
            case _:
                reply = Failure(int(Code.UNSUPPORTED), f"requests of kind {kind} are not answered")
        return reply, effects + self._consequences(now)

    def serve_reader(self, sender: PeerId, kind: int, request: Message, now: float) -> Message:
        """Answer a peer that was admitted as a reader: it is told what members are told. Nothing that it says is
        taken in or passed on, and members do not know it; what it says unasked is acknowledged.

        Raises `ProtocolError` for nonsense.
        """
        if not self.questions.budget.serve(sender, now):
            return Failure(int(Code.BUSY), "that peer asks too much; let it ask less often")
        match request:
            case Ping():
                return Ack(self.membership.own.incarnation, [], self._unix_ms(now))
            case Exchange():
                theirs = read_request(request, self.knowledge.table)
                self.record(now)
                return self._exchanges.answer_reader(sender, request, theirs, now)
            case Delta() | Leave():
                return Empty()
            case _:
                return Failure(int(Code.UNAVAILABLE), f"readers are not answered kind {kind}")

    def answered(self, token: int, reply: Message | None, now: float) -> list[Effect]:
        """The outcome of an `Ask`: its reply, a `Failure`, or None when nothing came in time.

        Raises `ProtocolError`, having taken nothing in, when the reply is nonsense.
        """
        asked = self.questions.take(token)
        if asked is None:
            return []
        if reply is not None:
            self.contacts.admitted(asked.peer_id)
        if asked.kind in (ControlKind.PING, ControlKind.PING_REQUEST):
            self.membership.newcomers.answered(asked.peer_id)
            return self._probe_answered(token, asked, reply, now)
        if reply is None:
            self.view.failed(asked.peer_id, now)
            return self.connection_lost(asked.peer_id, now)
        if isinstance(reply, ExchangeReply):
            return self._exchanged(asked, reply, now) + self._consequences(now)
        self.membership.heard(asked.peer_id, now)
        return self._consequences(now)

    def snapshot_fetched(
        self, token: int, head: SnapshotHead | None, packed: bytes | CheckedSnapshot, now: float
    ) -> list[Effect]:
        """The outcome of a `FetchSnapshot`; `head` None when it failed. A shell with threads has a snapshot
        checked in one; what comes as bytes is checked here.

        Raises `ProtocolError`, and changes nothing, for a snapshot that its owner did not sign; it
        is fetched again after a while.
        """
        asked = self.questions.take(token)
        if asked is None:
            return []
        # A success ends this when the view is seen to have caught up.
        self._catch_up.failed(asked.member, now)
        if head is None:
            return []
        size_bytes = (
            packed.count * LOCATION_BYTES if isinstance(packed, CheckedSnapshot) else len(packed)
        )
        if size_bytes > asked.most_bytes:
            raise ProtocolError(
                f"a snapshot of {size_bytes:,} bytes; after what its owner signed it has at most {asked.most_bytes:,}"
            )
        if not 0 <= head.sequence < MAX_INCARNATION:
            raise ProtocolError(f"a snapshot at sequence {head.sequence}")
        checked = packed if isinstance(packed, CheckedSnapshot) else check_snapshot(packed)
        if self.directory.install_snapshot(
            asked.member, head.incarnation, head.sequence, head.set_hash, checked
        ):
            self.heard_of(checked.packed, now, checked.newest_clock)
            self._exchanges.hurry()
        return []

    def contacted(self, peer_id: PeerId, addresses: Sequence[str], now: float) -> list[Effect]:
        """A peer answered at these addresses: exchange everything with it, if it admits this one."""
        self.contacts.succeeded(addresses, peer_id, now)
        if peer_id != self.peer_id:
            self._exchanges.want(peer_id)
        return []

    def contact_failed(self, addresses: Sequence[str], now: float) -> list[Effect]:
        """Nobody answered at these addresses (exactly those of the `Contact`)."""
        self.contacts.failed(addresses, now)
        return []

    def connection_lost(self, peer_id: PeerId, now: float) -> list[Effect]:
        """A connection to the peer failed: no verdict, but a reason to probe it at once."""
        state = self.membership.get(peer_id)
        if state is None or state.status != Status.ALIVE or self.leaving:
            return []
        return [*self._probing.probe(peer_id, now)]

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Do what is due, after all that arrived was fed in. Timeouts are judged here only."""
        if self.leaving:
            return []
        self.membership.tick(now)
        self.record(now)
        self.view.tick(now)
        effects: list[Effect] = self._consequences(now)
        effects += self._probing.tick(now, self.view.neighbours())
        effects += map(partial(self._ping_newcomer, now=now), self.membership.newcomers.take())
        effects += self._exchanges.start(now)
        effects += self._fresh.spread(now)
        if self.directory.work_pending and self.directory.work():
            self._exchanges.hurry()
        if now >= self._housekeeping_at:
            effects += self._housekeep(now)
            purging = self.cluster_records.floors.purging
            self._housekeeping_at = now + (PURGING_SECONDS if purging else HOUSEKEEPING_SECONDS)
        alone = not self.membership.others()
        for addresses in self.contacts.due(now, self._is_live, alone):
            effects.append(Contact(addresses))
        return effects

    def next_tick(self, now: float) -> float:
        """When `tick`, or `pushes`, has something to do next."""
        if self.leaving:
            return math.inf
        if self.directory.work_pending or self.membership.newcomers.is_due:
            return now
        due = min(
            self.membership.next_tick(),
            self._probing.due(),
            self._housekeeping_at,
            self.contacts.next_due(),
            self.partitions.due(),
            self._exchanges.due(),
            self._fresh.due(),
            self.view.due(),
        )
        return max(due, now)

    # --- requests of others ------------------------------------------------------------------

    def _serve_ping(self, sender: PeerId, ping: Ping, now: float) -> Message:
        check_claims(ping.claims)
        if not 0 <= ping.incarnation < MAX_INCARNATION:
            raise ProtocolError(f"a ping for incarnation {ping.incarnation}")
        claims = list(ping.claims)
        if ping.incarnation > self.membership.own.incarnation:
            # Somebody made it up, or this peer's clock went back: be above it, or nobody listens.
            claims.append(Claim(self.peer_id, ping.incarnation, int(Status.SUSPECT), self.member))
        self._heard(sender, now)
        self.membership.observe_claims(claims, now, sender)
        return self._ack(sender, now)

    def _ack(self, sender: PeerId, now: float) -> Ack:
        claims = self._claims_for(sender)
        return Ack(self.membership.own.incarnation, claims, self._unix_ms(now))

    def _unix_ms(self, now: float) -> int:
        return round(1000 * unix_seconds_from_clock(self._wall_clock(now)))

    def clock_view(self, now: float) -> ClockView:
        """How this peer's wall clock stands among those of the living members."""
        offset = unix_seconds_from_clock(self._wall_clock(now)) - now
        # Readings grow old by the second.
        key = (self.membership.version, self.clocks.version, round(offset, 1), int(now))
        if key != self._clock_key:
            alone = not self.membership.others()
            self.clocks_compared = self.clocks.known(self._is_live, now)
            self._clock_view = self.clocks.view(self.clocks_compared, offset, alone=alone)
            self._clock_key = key
        return self._clock_view

    def believed_unix(self, now: float) -> float:
        """The wall-clock time by which stamps of others are judged: this peer's, or where that is behind more than half
        of all, theirs. So it still hears of what they write, while it may write nothing itself."""
        view = self.clock_view(now)
        unix = unix_seconds_from_clock(self._wall_clock(now))
        return unix - (view.middle or 0.0) if view.is_behind else unix

    def _newest_accepted(self, now: float) -> int:
        """The highest stamp that this peer takes in."""
        return newest_accepted_clock(self.believed_unix(now))

    def _serve_ping_request(
        self, sender: PeerId, request: PingRequest, now: float
    ) -> tuple[Message | Later, list[Effect]]:
        self._heard(sender, now)
        if request.peer_id == self.peer_id:
            return self._ack(sender, now), []
        reply, asks = self._probing.relay(sender, request, now)
        return reply, [*asks]

    def _serve_exchange(self, sender: PeerId, request: Exchange, now: float) -> Message:
        theirs = read_request(request, self.knowledge.table)
        hot = unpack_hot(request.hot)
        check_claims(request.claims)
        self.clocks.asked(sender, request.unix_ms, now)
        self._heard(sender, now)
        self.membership.observe_claims(request.claims, now, sender)
        self.partitions.learn_hot(hot, now)
        self.record(now)
        return self._exchanges.answer(sender, request, theirs, now)

    def _probe_answered(
        self, token: int, asked: Asked, reply: Message | None, now: float
    ) -> list[Effect]:
        if isinstance(reply, Ack):
            pinged = asked.about or asked.peer_id
            try:
                check_claims(reply.claims)
            except ProtocolError:
                answers = self._probing.answered(token, asked, None)
                if answers:  # who waits for the answer is told that there is none
                    return [*answers]
                raise
            self.clocks.answered(pinged, reply.unix_ms, asked.sent_at, now)
            self._heard(asked.peer_id, now)
            # What rides on an answer that a helper passed on is nobody's word: the helper has taken it in.
            claims = [] if asked.about else reply.claims
            alive = self._self_claim(pinged, reply.incarnation)
            self.membership.observe_claims([*claims, alive], now, asked.peer_id)
        elif reply is not None:
            self.membership.heard(asked.peer_id, now)
        if isinstance(reply, Ack) and asked.kind == ControlKind.PING:
            self.membership.answered(asked.peer_id, now)
        answers = self._probing.answered(token, asked, reply)
        return [*answers, *self._consequences(now)]

    def _exchanged(self, asked: Asked, reply: ExchangeReply, now: float) -> list[Ask]:
        theirs = read_reply(reply, self.knowledge.table)
        hot = unpack_hot(reply.hot)
        self.clocks.answered(asked.peer_id, reply.unix_ms, asked.sent_at, now)
        news = self._take_delta(asked.peer_id, reply.delta, now)
        self.partitions.learn_hot(hot, now)
        self._exchanges.learn(asked, reply, theirs, now, new_records=len(news.cluster_records))
        self.record(now)
        return self._exchanges.follow_up(asked.peer_id, theirs, now, news=news.anything)

    def _take_delta(self, sender: PeerId, delta: Delta, now: float) -> News:
        checked = self.knowledge.check(delta, now, sender)
        known = [self.membership.get(record.peer_id) for record, _ in checked.records]
        records = [state.record if state is not None else None for state in known]
        news = self.knowledge.apply(checked, now, sender)
        for before, (record, _) in zip(records, checked.records, strict=True):
            self.partitions.observe_record(before, record, now)
            self.losses += before is not None and record.incarnation > before.incarnation
        self.partitions.keep_up()
        self.membership.heard(sender, now)
        for chunk in checked.logs:
            self.heard_of(chunk.operations, now)
        for record in news.own:
            if self.own_record.seen(record):
                self.partitions.log_restarted(now)
        self._fresh.add(news, sender)
        self._arrived += news.cluster_records
        if news.anything:
            self._exchanges.hurry()
        return news

    def _heard(self, peer_id: PeerId, now: float) -> None:
        """Something came unasked, or a probe was answered: never the reply to an exchange."""
        self.membership.heard(peer_id, now)
        state = self.membership.get(peer_id)
        if not self._is_live(peer_id) and not (state is not None and state.leaving):
            # It lives: its record is missing here, or it should hear that it is held dead.
            self._exchanges.want(peer_id)

    # --- what tick starts --------------------------------------------------------------------

    def _housekeep(self, now: float) -> list[Effect]:
        for state in self.membership.expire(now):
            self.partitions.drop(state.member)
            record = None if state.leaving or self.membership.others() else state.record
            if record is not None:
                # Without this a peer that was cut off for long would stay alone for good.
                self.contacts.add(record.control, state.peer_id, bootstrap=False, in_book=True)
        self.directory.expire_early(now)
        if self.partitions.housekeep(now, agreed=self._exchanges.agreed):
            self.own_record.changed()
        self.knowledge.table.follows_logs = self.partitions.mode.follows_logs
        self.knowledge.table.logs_are_read = self.partitions.logs_are_read
        self.knowledge.table.read_anew()
        overdue = [member for member, due in self._forget_at.items() if due <= now]
        if overdue:  # a dictionary that was large once stays so: a smaller one takes its place
            self._forget_at = {m: due for m, due in self._forget_at.items() if due > now}
        for member in overdue:
            self.partitions.drop(member)
        self.floors.housekeep(
            now, alone=self.alone_by_configuration, members=self.membership.others()
        )
        for peer_id in self._peer_ids(self.floors.take_to_ask(now)):
            if self._is_live(peer_id):
                self._exchanges.want(peer_id)
        self.questions.give_up_lost(now)
        self._vouch(now)
        return [*self._doubt_the_late(now), *self._fetch_snapshots(now)]

    def close(self) -> None:
        """This peer ends: clients can no longer look things up in its table, whose memory is let go. Nothing else may
        be called after that."""
        if self.published is not None:
            self.published.close()
        self.directory.close()

    def _vouch(self, now: float) -> None:
        """Let clients answer from the table by themselves for a while, or not."""
        if self.published is None:
            return
        if self.partitions.mode.phase is Phase.FULL:
            self.published.vouch(now, self._newest_accepted(now))
        else:
            self.published.withdraw()

    def _doubt_the_late(self, now: float) -> list[Ask]:
        patience = self.config.membership.probe_timeout_seconds * self.membership.health.multiplier
        late = self.questions.overdue(self.membership.resumed_at, now - patience)
        return self._probing.doubt(late, now)

    def _ping_newcomer(self, peer_id: PeerId, now: float) -> Ask:
        """Ping a peer that is only told of. When it answers it is exchanged with (`_heard`)."""
        seconds = self.config.membership.probe_interval_seconds
        ping = Ping(0, [])
        return self.questions.ask(peer_id, ControlKind.PING, ping, now, timeout_seconds=seconds)

    def _fetch_snapshots(self, now: float) -> list[Effect]:
        if not self.partitions.mode.follows_logs:
            return []
        owners = self._catch_up.due(self.membership.others(), self.questions.fetching(), now)
        return [
            self.questions.fetch_snapshot(
                state.peer_id,
                state.member,
                most_snapshot_bytes(self.directory.head(state.member).count),
                now,
            )
            for state in owners
        ]

    # --- inside ------------------------------------------------------------------------------

    def _describe(self) -> PeerRecord:
        return msgspec.structs.replace(self._offer(), directory=int(self.partitions.mode.shown))

    def _react(self, now: float) -> None:
        """Follow members' changes: hide what the dead hold, show what the living do."""
        for change in self.membership.take_changes():
            self._changes.append(change)
            self.view.follow(change)
            self._probing.follow(change)
            if change.new > Status.SUSPECT:
                self.losses += change.old is not None
                if change.old is not None and change.old <= Status.SUSPECT:
                    left = (
                        state := self.membership.get(change.peer_id)
                    ) is not None and state.leaving
                    self.floors.went(change.member, now, left=left)
                self.partitions.hide(change.member)
                self._forget_at[change.member] = now + self.config.forget_seconds
                self._exchanges.forget(change.peer_id)
            else:
                if change.old is None or change.old > Status.SUSPECT:
                    self.floors.came(change.member, now)
                self.partitions.show(change.member)
                self._forget_at.pop(change.member, None)
        del self._changes[: -self.config.membership.max_members]

    def _consequences(self, now: float) -> list[Effect]:
        """What every event may have caused: members changed, this peer's identity used twice."""
        self._react(now)
        duplicate, self.own_record.duplicate = self.own_record.duplicate, None
        return [] if duplicate is None else [Duplicate(duplicate)]

    def _note_operation(self, operation: bytes | None, now: float) -> None:
        if operation is not None:
            self._note_operations([operation], now)

    def _note_operations(self, operations: Sequence[bytes], now: float) -> None:
        """The last ones of this peer's log."""
        self.partitions.note(operations, now)
        if self.partitions.logs_are_read and operations:
            first = self.log.sequence + 1 - len(operations)
            self._fresh.add_own(first, len(operations))
            self._exchanges.hurry()

    def _claims_for(self, peer_id: PeerId) -> list[Claim]:
        return self.membership.claims((peer_id,), peer_id)

    def _self_claim(self, peer_id: PeerId, incarnation: int) -> Claim:
        """What a peer's own acknowledgement says: it is alive, at this incarnation."""
        state = self.membership.get(peer_id)
        bounded = incarnation if 0 <= incarnation < MAX_INCARNATION else 0
        return Claim(
            peer_id, bounded, int(Status.ALIVE), state.member if state is not None else self.member
        )

    def _is_live(self, peer_id: PeerId) -> bool:
        if peer_id == self.peer_id:
            return True
        state = self.membership.get(peer_id)
        return state is not None and state.live

    def _members(self) -> list[Member]:
        version, members = self._placement
        if version != self.membership.version:
            members = [state.member for state in self.membership.homes()]
            self._placement = (self.membership.version, members)
        return members

    def _peer_ids(self, members: Iterable[Member]) -> list[PeerId]:
        states = (self.membership.resolve(member) for member in members)
        return [state.peer_id for state in states if state is not None]
