"""Keeps count of what clients ask for, of how long all that takes, and of what took long: the source of `stats`,
`stats --slow` and much of what `/metrics` says."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, get_args

from p2pstore.config import TransportName
from p2pstore.core.gets.lookup import split_digests
from p2pstore.core.operation import AskPeer, LoadObject, PullObject, Reply
from p2pstore.core.peer_core import PeerCore
from p2pstore.gossip.records import Member, PeerId, member_of
from p2pstore.local import local_messages as local
from p2pstore.local.local_messages import MAX_BATCH
from p2pstore.local.local_protocol import LocalClient, LocalKind
from p2pstore.memory.segment_layout import digests_in_slots
from p2pstore.objects import DIGEST_BYTES, key_digest
from p2pstore.put_facts import PutStatus
from p2pstore.status.measures import (
    IN_PLACE,
    MAX_DIGESTS,
    ON_SSD,
    Came,
    Measures,
    Request,
    SlowOperation,
    SlowOperations,
    Stage,
    Traffic,
    Watched,
    describe,
)
from p2pstore.transfer.data_messages import DataKind, Get
from p2pstore.transfer.peer_messages import (
    CheckCopy,
    Lookup,
    Replicate,
    ReplicateMany,
    SetExpiry,
    SetPins,
)
from p2pstore.transfer.transfer_trace import FetchTrace
from p2pstore.transfer.transport import PullReport
from p2pstore.wire import Code, Failure, Message

TRANSPORTS: Final = frozenset(get_args(TransportName)) | {""}
"""Transports of clients' reads; empty where none reaches a holder."""

logger = logging.getLogger("p2pstore.peer")

MAX_OUTCOME_LETTERS: Final = 120
MAX_REMEMBERED: Final = 4096
MAX_REPORTED: Final = 1024
"""Entries of one client's report that are looked at."""

_QUICK: Final = frozenset({LocalKind.CHECKPOINT_LIST, LocalKind.CHECKPOINT_REMOVE})
TAKE_THEIR_TIME: Final = {each for each in LocalKind if each.name.startswith("CHECKPOINT_")} - _QUICK
"""By their nature: these are never slow."""

_REQUEST_NAMES: Final = {kind: kind.name.lower() for kind in LocalKind}


class PeerWatch:
    """Satisfies `p2pstore.local.local_protocol.RequestObserver`; the node tells it what other peers did."""

    def __init__(self, core: PeerCore, threshold_seconds: float) -> None:
        self.slow = SlowOperations(threshold_seconds)
        self.traffic = Traffic()
        self.measures = Measures()
        self._fell: set[tuple[Member, str]] = set()
        """Transports that gave way to another one, which was said; until they work again."""
        self._core = core
        self._counters = core.counters
        self._count: dict[LocalKind, Callable[[LocalClient, Any, Any], None]] = {
            LocalKind.COMMIT: self._count_puts,
            LocalKind.LEASE: self._count_leases,
        }

    def began(self, kind: LocalKind, message: Message) -> Watched:
        """A request was not answered at once."""
        wait_ms = getattr(message, "wait_ms", 0)
        may_wait_seconds = math.inf if kind in TAKE_THEIR_TIME else max(0, wait_ms) / 1000
        return self.slow.begin(_digests_of(message), time.monotonic(), may_wait_seconds=may_wait_seconds)

    def answered(
        self,
        client: LocalClient,
        kind: LocalKind,
        message: Message,
        answer: Message | Exception | None,
        seconds: float,
        began: object | None,
    ) -> None:
        """A request was answered, `seconds` after it came."""
        if not isinstance(answer, Exception) and (count := self._count.get(kind)) is not None:
            count(client, message, answer)
        if kind is LocalKind.REPORT:
            self._take_report(client, message)
            return
        if kind not in TAKE_THEIR_TIME and not getattr(message, "wait_ms", 0):
            self.measures.requested(_REQUEST_NAMES[kind], seconds)
        if isinstance(began, Watched):
            request = self._request(client, kind, message, answer)
            self._note(self.slow.end(began, request, time.monotonic()))
        elif 0 < self.slow.threshold_seconds <= seconds:
            request = self._request(client, kind, message, answer)
            self._note(self.slow.add(SlowOperation(request, seconds, waiting_seconds=0.0)))

    def _request(
        self, client: LocalClient, kind: LocalKind, message: Message, answer: Message | Exception | None
    ) -> Request:
        keys = _keys_of(message)
        count = len(keys)
        key = keys[0] if keys else ""
        if not keys:
            digests = _digests_of(message)
            count = len(getattr(message, "digests", b"")) // DIGEST_BYTES or len(digests)
            said = getattr(message, "key", "")
            key = self._key_text(digests[0], said, client.namespace) if digests else ""
        name = client.name or str(client.process_id)
        return Request(kind.name.lower(), key, count, name, time.time(), _outcome(answer))

    def _key_text(self, digest: bytes, said: str, namespace: str) -> str:
        """A key's text: as the client says, if it is that key's, else as the object here has it."""
        if said and digest in _digests([said], namespace):
            return said
        entry = self._core.segment.find(digest, time.time())
        return entry.key if entry is not None else digest.hex()

    def _note(self, operation: SlowOperation | None) -> None:
        if operation is None:
            return
        unlogged = self.slow.may_log(time.monotonic())
        if unlogged is not None:
            more = f" ({unlogged} more since the last such line)" if unlogged else ""
            logger.info(
                "%s%s", describe(operation), more, extra={"seconds": round(operation.seconds, 3)}
            )

    def _count_puts(self, client: LocalClient, message: local.Commit, answer: local.Committed) -> None:
        begin = 0
        for count, outcome in answer.outcomes:
            lengths: Mapping[int, int] = {message.lengths[0]: count}
            if len(message.lengths) > 1:
                lengths = Counter(message.lengths[begin : begin + count])
            begin += count
            if outcome.error.code:
                self._counters["client_puts_failed"] += count
                continue
            if outcome.status == PutStatus.KEPT_EXISTING:  # nothing was put
                self._counters["client_puts_kept_existing"] += count
                continue
            self._counters["client_puts"] += count
            self._counters["client_puts_short_of_copies"] += count * (outcome.copies < outcome.wanted)
            for length, alike in lengths.items():
                self._counters["client_put_bytes"] += alike * length
                self.measures.put(message.namespace, length, alike)

    def _count_leases(self, client: LocalClient, message: local.Lease, answer: local.Leased) -> None:
        """With `fetch` is asked for what was not here a moment ago."""
        in_place = Counter[int]()
        brought = brought_bytes = from_ssd = misses = 0
        for item in answer.items:
            if not item.error.code:
                is_from_ssd = item.transport == "ssd"
                from_ssd += is_from_ssd
                if message.fetch or is_from_ssd:  # what it came by counted it
                    brought += 1
                    brought_bytes += item.length
                else:
                    in_place[item.length] += 1
            elif message.fetch and item.error.code in (Code.NO_SUCH_KEY, Code.UNAVAILABLE):
                misses += 1
        elsewhere = brought - from_ssd if message.fetch else 0
        self._counters["client_reads_elsewhere"] += elsewhere
        self._counters["client_leases"] += in_place.total() + brought - elsewhere
        self._counters["client_reads_from_ssd"] += from_ssd
        self._counters["client_misses"] += misses
        if brought:
            self.measures.read_of(client.namespace, brought, brought_bytes)
        for length, count in in_place.items():
            self.measures.was_read(client.namespace, IN_PLACE, count, count * length)
        if misses:
            self.measures.missed(client.namespace, misses)

    def _take_report(self, client: LocalClient, message: Message) -> None:
        """Count the client's own reads from other peers. A read counts when it has ended, whatever its plans."""
        assert isinstance(message, local.Report)
        self._counters["client_misses"] += max(0, message.misses)
        self.measures.missed(client.namespace, max(0, message.misses))
        for access in message.accesses[:MAX_BATCH]:
            self.measures.was_read(client.namespace, IN_PLACE, access.count, max(0, access.bytes_read))
        for fallback in message.fallbacks[:MAX_REPORTED]:
            transport, text = _transport(fallback.transport), fallback.text[:MAX_OUTCOME_LETTERS]
            self._fell_back(fallback.member, transport, text, count=max(0, fallback.count))
        for pulls in message.pulls[:MAX_REPORTED]:
            objects, length_bytes, failures = (
                max(0, each) for each in (pulls.objects, pulls.bytes, pulls.failures)
            )
            came = Came(objects, length_bytes, failures, pulls.durations, pulls.microseconds)
            transport = _transport(pulls.transport)
            self._counters["client_reads_elsewhere"] += came.objects
            self._came(pulls.member, transport, came)
            self.measures.client_pulled(transport, pulls)
            self.measures.read_of(client.namespace, came.objects, came.length_bytes)
        for read in message.slow[:MAX_REPORTED]:
            self._take_slow_read(client, read)

    def _take_slow_read(self, client: LocalClient, read: local.SlowRead) -> None:
        outcome = "ok" if not read.code else _code_name(read.code)
        name, transport = (
            self._core.gossip.membership.name_of_member(read.member),
            _transport(read.transport),
        )
        key = self._key_text(read.digest, read.key, client.namespace)
        reader = client.name or str(client.process_id)
        request = Request("get", key, 1, reader, time.time(), outcome)
        stage = Stage("pull", read.seconds, name, transport, outcome)
        self._note(self.slow.add(SlowOperation(request, read.seconds, 0.0, (stage,))))

    def asked(self, effect: AskPeer, reply: Reply, seconds: float) -> None:
        """A request to another peer ended: answered, refused, or (None) not answered in time."""
        what = _ASKED_FOR.get(effect.kind, "ask")
        served = reply is not None and not isinstance(reply, Failure)
        self.measures.answered(what, seconds, served=served)
        subjects = _asked_about(effect.request)
        if not subjects:
            return
        if reply is None:
            outcome = "no answer"
        elif isinstance(reply, Failure):
            outcome = reply.text[:MAX_OUTCOME_LETTERS]
        else:
            outcome = "ok"
        stage = Stage(what, seconds, self._core.name_of(effect.peer_id), "tcp", outcome)
        self.slow.stage(subjects, stage, time.monotonic())

    def pulled(
        self,
        effect: PullObject,
        report: PullReport | None,
        error: Exception | None,
        seconds: float,
        trace: FetchTrace | None = None,
    ) -> None:
        """A pull into this peer's memory ended; `trace` says where its time went."""
        stage = Stage("pull", seconds, outcome=str(error)[:MAX_OUTCOME_LETTERS])
        if report is not None:
            for fallback in report.fallbacks:
                self._fell_back(fallback.member, fallback.transport, fallback.text)
            for failure in report.failures:
                self._came(failure.member, failure.transport, Came(failures=1))
            text = "; ".join(f"{each.transport}: {each.text}" for each in report.failures)
            if report.pulled is not None and report.copy is not None:
                transport, member = report.pulled.transport, report.copy.member
                for share in report.brought():
                    whole = int(share.member == member)
                    self._came(share.member, transport, Came(whole, share.length_bytes))
                self.traffic.took(member, transport, seconds)
                self.measures.pulled(transport, seconds, report.pulled.length)
                outcome = f"ok after {text}" if text else "ok"
                name = self._core.name_of(report.copy.peer_id)
                stage = Stage(
                    "pull", seconds, name, transport, outcome[:MAX_OUTCOME_LETTERS], parts=_parts(trace)
                )
            else:
                stage = Stage("pull", seconds, outcome=text[:MAX_OUTCOME_LETTERS])
        self.slow.stage([effect.digest], stage, time.monotonic())

    def pulled_together(
        self, holder: PeerId, came: Counter[tuple[str, int]], failures: int, seconds: float
    ) -> None:
        """Copies came from their writer in one pull, by transport and length; `failures` did not."""
        member, total = member_of(holder), came.total()
        for (transport, length), count in came.items():
            self._came(member, transport, Came(count, length * count, 0))
            self.measures.pulled(transport, seconds / total, length, count)
        if failures:
            self._came(member, "tcp", Came(0, 0, failures))
        self._counters["pulls_delivered"] += total
        self._counters["pulls_failed"] += failures

    def loaded(self, effect: LoadObject, length_bytes: int, seconds: float) -> None:
        """A read of this peer's SSD ended; -1 bytes when it brought nothing."""
        outcome = "ok" if length_bytes >= 0 else "not read"
        if length_bytes >= 0:
            self.measures.pulled(ON_SSD, seconds, length_bytes)
        stage = Stage("load", seconds, transport="ssd", outcome=outcome)
        self.slow.stage([effect.digest], stage, time.monotonic())

    def _came(self, member: Member, transport: str, came: Came) -> None:
        self.traffic.came(member, transport, came)
        if came.objects:
            self._fell.discard((member, transport))

    def _fell_back(self, member: Member, transport: str, text: str, count: int = 1) -> None:
        self._counters["transport_fallbacks"] += count
        if (member, transport) not in self._fell:
            if len(self._fell) >= MAX_REMEMBERED:
                self._fell.clear()
            self._fell.add((member, transport))
            logger.warning(
                "%s to %s did not work (%s): falling back to another transport",
                transport,
                self._core.gossip.membership.name_of_member(member),
                text,
                extra={"event": "transport_fallback", "transport": transport},
            )

    def pinged(self, peer_id: PeerId, seconds: float) -> None:
        self.traffic.pinged(peer_id, seconds)
        self.measures.pings.add_seconds(seconds)


def _parts(trace: FetchTrace | None) -> tuple[tuple[str, float], ...]:
    """Where the time of a read that delivered went, once a connection was there."""
    if trace is None:
        return ()
    verify = trace.verify_seconds
    parts = ("queue", trace.queue_seconds), ("transfer", trace.transfer_seconds)
    return parts if verify is None else (*parts, ("verify", verify))


_ASKED_FOR: Final = {
    int(DataKind.LOOKUP): "lookup",
    int(DataKind.GET): "compare",
    int(DataKind.REPLICATE): "replicate",
    int(DataKind.REPLICATE_MANY): "replicate",
    int(DataKind.SET_PINS): "pin",
    int(DataKind.SET_EXPIRY): "set_ttl",
    int(DataKind.CHECK_COPY): "check_copy",
    int(DataKind.PUSH): "push",
    int(DataKind.CLUSTER_RECORDS): "cluster_records",
    int(DataKind.LIST): "list",
    int(DataKind.READS): "report_reads",
}


def _asked_about(request: Message) -> Sequence[bytes]:
    if isinstance(request, Lookup):
        return _split(request.digests)
    if isinstance(request, Get):
        return [item.digest for item in request.items]
    if isinstance(request, Replicate | CheckCopy):
        return [request.digest]
    if isinstance(request, ReplicateMany):
        return digests_in_slots(request.slots)
    if isinstance(request, SetPins | SetExpiry):
        return [item.digest for item in request.items]
    return ()


def _split(packed: bytes, limit: int = 1 << 20) -> list[bytes]:
    return split_digests(packed[: min(len(packed) // DIGEST_BYTES, limit) * DIGEST_BYTES])


def _digests_of(message: Message) -> list[bytes]:
    """The first keys that a client's request is about."""
    if isinstance(message, local.Replicate):
        return [message.digest]
    if isinstance(message, local.Commit | local.Remove):
        return list(_digests(message.keys[:MAX_DIGESTS], message.namespace))
    return _split(getattr(message, "digests", b""), MAX_DIGESTS)


def _digests(keys: Iterable[str], namespace: str) -> Iterable[bytes]:
    for key in keys:
        try:
            yield key_digest(key, namespace)
        except ValueError:  # no key at all: the request is answered with that error
            continue


def _keys_of(message: Message) -> Sequence[str]:
    return message.keys if isinstance(message, local.Commit | local.Remove) else ()


def _outcome(answer: Message | Exception | None) -> str:
    if isinstance(answer, Exception):
        return (str(answer) or type(answer).__name__)[:MAX_OUTCOME_LETTERS]
    if isinstance(answer, local.Keys) and answer.silent_peers:
        return f"no answer from {', '.join(answer.silent_peers)}"[:MAX_OUTCOME_LETTERS]
    runs = [(1, item) for item in getattr(answer, "items", ())]
    if isinstance(answer, local.Committed):
        runs = answer.outcomes
    errors = [(count, item.error) for count, item in runs if getattr(item, "error", local.OK).code]
    if errors:
        failed = sum(count for count, _ in errors)
        return f"{failed} failed: {errors[0][1].text}"[:MAX_OUTCOME_LETTERS]
    return "ok"


def _transport(name: str) -> str:
    """A transport as a client names it. All unknown names count as one, so that clients cannot add names."""
    return name if name in TRANSPORTS else "other"


def _code_name(code: int) -> str:
    return Code(code).name.lower() if code in Code._value2member_map_ else f"code {code}"
