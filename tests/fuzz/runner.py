"""The fuzzer's loop: sessions until enough messages were sent, with checks of the peer in between."""

import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import trio

from tests.fuzz.formats import fuzz_formats
from tests.fuzz.sessions import SESSIONS, Sent, play
from tests.fuzz.victim import Problem, Victim, open_victim

PROTOCOLS: Final = (*SESSIONS, "formats")
CHECK_SESSIONS: Final = 250
"""Sessions between two checks of the peer."""
WARM_UP: Final = 0.2
"""After this part of the messages, memory must not grow much any more."""
MAX_GROWTH_BYTES: Final = 64 * 1024 * 1024
HEX_BYTES: Final = 4000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure, and how to reproduce it."""

    protocol: str
    seed: int
    session: int
    text: str
    sent: Sent

    def report(self) -> str:
        """For people: the problem, the command that replays it, the bytes."""
        lines = [
            f"{self.protocol}: {self.text}",
            f"session {self.session} of seed {self.seed}; alone: scripts/fuzz --protocol {self.protocol} "
            f"--seed {self.seed} --session {self.session}",
        ]
        for frame in self.sent:
            cut = "..." if len(frame) > HEX_BYTES else ""
            lines.append(f"  {frame[:HEX_BYTES].hex()}{cut}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Result:
    """One protocol's run."""

    messages: int
    sessions: int
    seconds: float
    growth_bytes: int
    failure: Failure | None


def fuzz(
    protocol: str,
    *,
    messages: int,
    seed: int,
    session: int | None = None,
    progress: Progress = lambda line: None,
) -> Result:
    """Fuzz one protocol until `messages` were sent or something went wrong; or replay one session."""
    if protocol == "formats":
        return _fuzz_formats(messages, seed, session)
    with tempfile.TemporaryDirectory(prefix="p2p-fuzz-") as folder:
        return trio.run(_fuzz, protocol, messages, seed, session, progress, Path(folder))


async def _fuzz(
    protocol: str, messages: int, seed: int, only: int | None, progress: Progress, folder: Path
) -> Result:
    begin = time.monotonic()
    done = sessions = 0
    warm_bytes = 0
    sent: Sent = []
    number = only if only is not None else 0
    try:
        async with open_victim(folder) as victim:
            while done < messages:
                sent = []
                await play_numbered(protocol, seed, number, victim, sent)
                done, sessions, number = done + len(sent), sessions + 1, number + 1
                if only is not None or sessions % CHECK_SESSIONS == 0:
                    await victim.check()
                    progress(f"{protocol}: {done:,} messages in {time.monotonic() - begin:.0f} s")
                if not warm_bytes and done >= WARM_UP * messages:
                    warm_bytes = private_bytes()
                if only is not None:
                    break
            await victim.check()
            growth = private_bytes() - warm_bytes
            if only is None and growth > MAX_GROWTH_BYTES:
                raise Problem(f"memory grew by {growth:,} bytes")
            failure = None
    except* Problem as group:
        problem: BaseException = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        failure, growth = Failure(protocol, seed, number, str(problem), sent), 0
    return Result(done, sessions, time.monotonic() - begin, growth, failure)


async def play_numbered(protocol: str, seed: int, number: int, victim: Victim, sent: Sent) -> None:
    """The session of this number: the same choices for the same seed, whatever was played before. (Ids and
    times in its messages are those of this run.)"""
    rng = Random(f"{seed}/{protocol}/{number}")
    plays, weights = zip(*SESSIONS[protocol], strict=True)
    [session] = rng.choices(plays, weights)
    await play(session, victim, rng, sent)


def _fuzz_formats(messages: int, seed: int, only: int | None) -> Result:
    begin = time.monotonic()
    logging.getLogger("p2pstore.state.state_directory").setLevel(
        logging.ERROR
    )  # every torn file is a warning
    first = only if only is not None else 0
    last = first + 1 if only is not None else messages
    for number in range(first, last):
        rng = Random(f"{seed}/formats/{number}")
        sent: Sent = []
        try:
            fuzz_formats(rng, sent)
        except Problem as problem:
            failure = Failure("formats", seed, number, str(problem), sent)
            return Result(number, number, time.monotonic() - begin, 0, failure)
    return Result(last, last, time.monotonic() - begin, 0, None)


def private_bytes() -> int:
    """Bytes of private memory of this process now, without the peers' segments."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status says nothing of RssAnon")
