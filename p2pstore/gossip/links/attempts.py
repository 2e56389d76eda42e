"""Attempts that several tasks wait for together, and that outlive those who wait. Shell.

A ping waits for half a second, and on a slow or lossy path a connection takes longer to make. An attempt that
ended with its asker would begin anew with the next one, and might never come to its end. So it runs in a
nursery of its own, with its own deadline; who wants the outcome waits for it as long as they like.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import trio

from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.records import PeerId, format_peer_id

MAX_ATTEMPTS: Final = 256
"""Under way at once. Gossip talks to some dozens of peers at a time, and an attempt lasts seconds at most."""

T = TypeVar("T")


@dataclass(slots=True)
class _Attempt(Generic[T]):
    scope: trio.CancelScope
    ended: trio.Event = field(default_factory=trio.Event)
    result: T | None = None
    error: Exception | None = None


class Attempts(Generic[T]):
    """Attempts to get something of a peer: one per key, however many want it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._under_way: dict[tuple[PeerId, Hashable], _Attempt[T]] = {}

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    async def join(
        self,
        nursery: trio.Nursery,
        peer_id: PeerId,
        key: Hashable,
        start: Callable[[], Awaitable[T]],
    ) -> T:
        """What the attempt with this key brings; `start()` makes it, in `nursery`, if none is under way.

        Raises what the attempt raised, and `LinkError` when it took too long, was ended, or is one too many.
        """
        attempt = self._under_way.get((peer_id, key))
        if attempt is None:
            if len(self._under_way) >= MAX_ATTEMPTS:
                raise LinkError(f"{MAX_ATTEMPTS} connections are being made already; try again")
            attempt = _Attempt(trio.CancelScope())
            nursery.start_soon(self._run, attempt, peer_id, key, start)  # raises when all is ending
            self._under_way[peer_id, key] = attempt
        await attempt.ended.wait()
        if attempt.error is not None:
            raise attempt.error.with_traceback(None)  # each who waits would add to it
        assert attempt.result is not None
        return attempt.result

    async def end(self, peer_id: PeerId) -> None:
        """End all attempts that concern a peer, and wait until they have: who wants one's outcome gets a
        `LinkError`."""
        ended = [each for (of, _), each in self._under_way.items() if of == peer_id]
        for attempt in ended:
            attempt.scope.cancel()
        for attempt in ended:
            await attempt.ended.wait()

    async def _run(
        self,
        attempt: _Attempt[T],
        peer_id: PeerId,
        key: Hashable,
        start: Callable[[], Awaitable[T]],
    ) -> None:
        who = format_peer_id(peer_id)
        deadline = trio.current_time() + self._timeout_seconds
        attempt.scope.deadline = min(attempt.scope.deadline, deadline)
        try:
            with attempt.scope:
                attempt.result = await start()
            if attempt.result is None:
                in_time = trio.current_time() < deadline
                why = "was ended" if in_time else f"took over {self._timeout_seconds:g} s"
                attempt.error = LinkError(f"connecting with {who} {why}")
        except Exception as error:  # it is for those who wait; this task's nursery has others' work
            attempt.error = error
        except BaseException:
            attempt.error = LinkError(f"connecting with {who} was ended: this peer stops")
            raise
        finally:
            if self._under_way.get((peer_id, key)) is attempt:
                del self._under_way[peer_id, key]
            attempt.ended.set()
