"""A short run of the fuzzer for every protocol; `scripts/fuzz` goes on for longer. And the bugs it found."""

import os
from pathlib import Path
from random import Random

import pytest
import trio

from p2pstore.local import local_messages as local
from p2pstore.local import local_protocol
from p2pstore.local import older_put_messages as older
from p2pstore.local.local_protocol import LocalKind
from p2pstore.peer import open_peer
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.wire import PREFACE_LOCAL, FrameBuffer, Limits, encode_frame
from tests.cluster.peers import config
from tests.fuzz import runner, sessions
from tests.fuzz.mutation import HEADER, Mutator
from tests.fuzz.runner import fuzz
from tests.fuzz.sessions import Sent
from tests.fuzz.victim import Victim
from tests.waiting import until

MESSAGES = {"control": 20_000, "data": 20_000, "local": 20_000, "formats": 4_000}


@pytest.mark.parametrize("protocol", runner.PROTOCOLS)
def test_nothing_that_is_sent_breaks_a_peer(protocol: str) -> None:
    result = fuzz(protocol, messages=MESSAGES[protocol], seed=1)
    assert result.failure is None, result.failure.report()
    assert result.messages >= MESSAGES[protocol]


# --- the fuzzer can fail ---------------------------------------------------------------------


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> list[sessions.Play]:
    """One kind of session for the data protocol: the last one put into this list."""
    plays: list[sessions.Play] = []

    async def run(victim: Victim, rng: Random, sent: Sent) -> None:
        sent.append(b"frame")
        await plays[-1](victim, rng, sent)

    monkeypatch.setitem(sessions.SESSIONS, "data", ((run, 1),))
    monkeypatch.setattr(sessions, "SESSION_SECONDS", 0.5)
    return plays


async def _raises(victim: Victim, rng: Random, sent: Sent) -> None:
    raise RuntimeError("a mistake")


async def _hangs(victim: Victim, rng: Random, sent: Sent) -> None:
    await trio.sleep_forever()


async def _spoils(victim: Victim, rng: Random, sent: Sent) -> None:
    core = victim.peer.node.core
    for entry in core.segment.entries():
        if entry.length:
            core.segment.payload(entry)[0] ^= 1
    for entry in victim.friend.node.core.segment.entries():
        if entry.length:
            victim.friend.node.core.segment.payload(entry)[0] ^= 1


async def _logs(victim: Victim, rng: Random, sent: Sent) -> None:
    victim.peer.node.core.gossip.serve = None  # type: ignore[method-assign, assignment]
    with trio.fail_after(5):
        while not victim._listener.seen:
            await trio.sleep(0.01)


@pytest.mark.parametrize(
    ("play", "words"),
    [(_raises, "a mistake"), (_hangs, "did not end"), (_spoils, "k"), (_logs, "error in the log")],
)
def test_what_breaks_a_peer_is_found(
    only: list[sessions.Play], monkeypatch: pytest.MonkeyPatch, play: sessions.Play, words: str
) -> None:
    monkeypatch.setattr("tests.fuzz.victim.SECONDS", 3.0)
    only.append(play)
    result = fuzz("data", messages=1, seed=9)
    assert result.failure is not None
    assert words in result.failure.text
    assert "--seed 9 --session" in result.failure.report()
    assert b"frame".hex() in result.failure.report()


def test_the_same_seed_gives_the_same_mutations() -> None:
    frames = [encode_frame(18, number, local.Abort([number])) for number in range(20)]

    def mutated(seed: int) -> list[bytes]:
        return Mutator(Random(seed)).sequence(frames, frames)

    assert mutated(1) == mutated(1)
    assert mutated(1) != mutated(2)


def test_most_mutations_keep_a_frame_whole() -> None:
    """A frame that does not decode ends its session, and the rest of the session is never looked at."""
    mutator, whole = Mutator(Random(1)), 0
    frame = encode_frame(17, 1, older.CommitRows("default", [], 5, []))
    for _ in range(500):
        changed = mutator.frame(frame)
        if len(changed) >= HEADER.size and HEADER.unpack_from(changed)[3] == len(changed) - 16:
            buffer = FrameBuffer(Limits(2**20, 2**20))
            buffer.feed(changed)
            whole += 1
    assert 250 < whole < 500


# --- what it found ---------------------------------------------------------------------------


async def test_a_lease_that_waits_ends_with_its_client(tmp_path: Path) -> None:
    """The fetch was called off, but not its lookup, which went on for as long as the client had wanted to
    wait."""
    async with open_peer(config(tmp_path, "a")) as peer:
        stream = await TrioDriver().connect_unix(peer.socket, 5.0)
        hello = local_protocol.Hello(1, 1, "default", local_protocol.Access.READ, 1)
        lease = local.Lease(os.urandom(16), wait_ms=60_000)
        await stream.send(
            PREFACE_LOCAL,
            encode_frame(LocalKind.HELLO, 1, hello),
            encode_frame(LocalKind.LEASE, 2, lease),
        )
        await until(lambda: peer.node.core.operations_under_way == 1)
        stream.close()
        await until(lambda: peer.node.core.operations_under_way == 0, 5)


async def test_requests_beyond_what_a_client_may_have_under_way_leave_nothing(tmp_path: Path) -> None:
    """They were refused, but the lookups that they had begun went on."""
    async with open_peer(config(tmp_path, "a")) as peer:
        stream = await TrioDriver().connect_unix(peer.socket, 5.0)
        hello = local_protocol.Hello(1, 1, "default", local_protocol.Access.READ, 1)
        plans = [
            encode_frame(LocalKind.PLAN, number, local.Plan(os.urandom(16), 60_000))
            for number in range(2, 102)
        ]
        await stream.send(PREFACE_LOCAL, encode_frame(LocalKind.HELLO, 1, hello), *plans)
        await until(lambda: peer.node.core.operations_under_way >= 64)
        await until(lambda: peer.node.core.operations_under_way == 64, 5)
        stream.close()
        await until(lambda: peer.node.core.operations_under_way == 0, 5)
