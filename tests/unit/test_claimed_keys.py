"""Keys that holders claim to have without a proof: when a read finds them, when it says that they do not exist, and
when that it cannot know."""

from collections.abc import Sequence
from typing import Any

import pytest

from p2pstore.core.copies.proofs import DOUBT_SECONDS, sign_versions
from p2pstore.core.gets.fetch_operation import FetchOperation
from p2pstore.core.gets.lookup import PATIENCE_SHARE, LookupOperation
from p2pstore.core.operation import AskPeer, PullObject
from p2pstore.core.puts.put_operation import PutOperation
from p2pstore.errors import NoSuchKey, Unavailable
from p2pstore.gossip.records import LocationRecord, writer_of
from p2pstore.home_messages import Push
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.peer_messages import Locations, Proofs
from p2pstore.wire import Code, Failure
from tests.unit.core_harness import (
    OTHER_INCARNATION,
    Harness,
    Other,
    clock_at,
    digest_of,
    digests_asked,
    remote_object,
)

DEADLINE_SECONDS = 5.0
DENIES = Proofs([b""])
NONSENSE = Proofs([])
REFUSES = Failure(int(Code.BUSY), "")
SILENT = None
PROVES = "proves"


class Claimed:
    """A peer that has heard of copies of one key, all at others than the writer, which has none any more."""

    def __init__(self, claimants: int) -> None:
        self.world = Harness(others=1 + claimants)
        writer, *self.claimants = self.world.others
        thing = remote_object("k", b"value", clock_at(-5.0), writer_of(writer.peer_id))
        (self._proof,) = sign_versions([(thing.slot.digest, thing.version)], writer.signer)
        location = LocationRecord(thing.slot.digest, thing.version, 5, 1).encode()
        for claimant in self.claimants:
            self.world.serve(claimant, DataKind.PUSH, Push(OTHER_INCARNATION, [1], location))
        self.answers: dict[bytes, list[Any]] = {}
        self.questions = 0

    def answer(self, claimant: Other, *replies: Any) -> None:
        """Give these replies to the first questions, and the last one to all later ones."""
        self.answers[claimant.peer_id] = list(replies)

    def fetch(self) -> FetchOperation | PullObject:
        """The read's end, or the first pull that it begins."""
        fetch = FetchOperation(self.world.core, digest_of("k"), progress_seconds=DEADLINE_SECONDS)
        self.world.start(fetch)
        begin = self.world.now
        while not fetch.done:
            assert self.world.now <= begin + DEADLINE_SECONDS
            if pulls := self.exchange():
                return pulls[0]
        return fetch

    def exchange(self) -> list[PullObject]:
        """Answer all questions, and let 50 ms pass. The pulls that are wanted."""
        effects = self.world.core.take_effects()
        for effect in effects:
            if isinstance(effect, AskPeer):
                self._reply(effect)
        self.world.pass_time(0.05)
        return [effect for effect in effects if isinstance(effect, PullObject)]

    def _reply(self, ask: AskPeer) -> None:
        if ask.kind == DataKind.LOOKUP:
            self.world.answer(ask, Locations([[] for _ in digests_asked(ask)]))
        elif ask.kind == DataKind.PROVE:
            self.questions += 1
            replies = self.answers[ask.peer_id]
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
            self.world.answer(ask, Proofs([self._proof]) if reply is PROVES else reply)


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([DENIES, DENIES], NoSuchKey),
        ([DENIES, NONSENSE, DENIES, NONSENSE], NoSuchKey),
        ([SILENT], Unavailable),
        ([REFUSES], Unavailable),
        ([SILENT, DENIES], Unavailable),
        ([SILENT, SILENT, SILENT], Unavailable),
    ],
)
def test_a_claim_that_was_not_answered_is_no_proof_of_absence(
    replies: Sequence[Any], error: type[Exception]
) -> None:
    claimed = Claimed(len(replies))
    for claimant, reply in zip(claimed.claimants, replies, strict=True):
        claimed.answer(claimant, reply)
    fetch = claimed.fetch()
    assert isinstance(fetch, FetchOperation)
    assert isinstance(fetch.result, error)
    assert claimed.questions < 12 * len(replies), "asked with pauses"
    claimed.world.check_idle()


@pytest.mark.parametrize(
    "replies",
    [
        [[SILENT, PROVES]],
        [[SILENT, SILENT, SILENT, PROVES]],
        [[REFUSES, PROVES], [SILENT]],
        [[DENIES], [DENIES], [DENIES], [SILENT], [PROVES]],
    ],
)
def test_holders_are_asked_again_within_the_deadline(replies: Sequence[Sequence[Any]]) -> None:
    claimed = Claimed(len(replies))
    for claimant, some in zip(claimed.claimants, replies, strict=True):
        claimed.answer(claimant, *some)
    began = claimed.world.now
    pull = claimed.fetch()
    assert isinstance(pull, PullObject)
    assert claimed.claimants[-1].member in {copy.member for copy in pull.copies}
    assert claimed.world.now <= began + PATIENCE_SHARE * DEADLINE_SECONDS


def test_a_key_whose_holders_died_unproved_is_unavailable() -> None:
    claimed = Claimed(2)
    holder, other = claimed.claimants
    claimed.answer(other, DENIES)
    claimed.world.die(holder)
    fetch = claimed.fetch()
    assert isinstance(fetch, FetchOperation)
    assert isinstance(fetch.result, Unavailable)


def test_who_denied_is_asked_again_after_a_while() -> None:
    claimed = Claimed(1)
    claimed.answer(claimed.claimants[0], DENIES, PROVES)
    for seconds, kind in ((1.0, FetchOperation), (DOUBT_SECONDS, FetchOperation), (0.0, PullObject)):
        outcome = claimed.fetch()
        assert isinstance(outcome, kind)
        claimed.world.now += seconds
    assert claimed.questions == 2


def test_a_put_does_not_wait_for_silent_holders() -> None:
    claimed = Claimed(1)
    claimed.answer(claimed.claimants[0], SILENT)
    began = claimed.world.now
    operation = claimed.world.put("k", b"new")
    assert isinstance(operation, PutOperation)
    while not operation.done:
        claimed.exchange()
    assert claimed.world.now < began + 1.0


@pytest.mark.parametrize(("reply", "claimed_after"), [(SILENT, True), (DENIES, False), (PROVES, False)])
def test_a_lookup_without_patience_says_what_is_claimed_only(reply: Any, claimed_after: bool) -> None:
    claimed = Claimed(1)
    claimed.answer(claimed.claimants[0], reply)
    operation = LookupOperation(claimed.world.core, [digest_of("k")])
    claimed.world.start(operation)
    while not operation.done:
        claimed.exchange()
    assert (digest_of("k") in operation.claimed) is claimed_after
    assert bool(operation.result[0]) is (reply is PROVES)
