"""Whether objects are anywhere: from the mapping what is here, from the local peer what is elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2pstore.client.link import PeerLink
from p2pstore.errors import ProtocolError
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.local.requests import RequestAhead
from p2pstore.objects import DIGEST_BYTES

CONTAINS_KEYS: Final = 4096
"""Keys asked about at once: the peer looks them up within the 5 ms that its loop may be held."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question under way: the answer's bytes are about these of all keys."""

    request: RequestAhead[local.ContainsReply]
    numbers: NDArray[np.intp]

    async def note(self, present: NDArray[np.bool_]) -> None:
        """Wait for the answer, and enter it."""
        reply = await self.request.receive()
        _check_count(reply, len(self.numbers))
        present[self.numbers] = np.frombuffer(reply.present, dtype=np.uint8) == 1


class Presence:
    """Answers for one client. `digests_of` makes the digests of many keys of its namespace."""

    def __init__(self, link: PeerLink, digests_of: Callable[[Sequence[str]], list[bytes]]) -> None:
        self._link = link
        self._digests_of = digests_of

    async def contains(self, digest: bytes) -> bool:
        """Whether some live peer is known to hold the object."""
        link = self._link
        for reader in link.readers:
            if reader.contains(digest):
                return True
        reply = await link.ask(LocalKind.CONTAINS, local.Contains(digest), local.ContainsReply)
        _check_count(reply, 1)
        return reply.present == b"\1"

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys, in at most one request per 4,096: the peer looks some up while the next
        are hashed here."""
        present = np.zeros(len(keys), dtype=np.bool_)
        asked: deque[_Asked] = deque()
        try:
            for start in range(0, len(keys), CONTAINS_KEYS):
                packed = b"".join(self._digests_of(keys[start : start + CONTAINS_KEYS]))
                here = self._are_here(packed)
                present[start : start + len(here)] = here
                absent = np.flatnonzero(~here)
                if len(absent):
                    asked.append(await self._ask_ahead(packed, absent, start))
                while len(asked) > 1:
                    await asked.popleft().note(present)
            while asked:
                await asked.popleft().note(present)
        finally:
            for question in asked:
                question.request.abandon()
        answers: list[bool] = present.tolist()
        return answers

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold."""
        packed = b"".join(self._digests_of(keys))
        absent = np.flatnonzero(~self._are_here(packed))
        length = int(absent[0]) if len(absent) else len(keys)
        while length < len(keys):
            some = packed[length * DIGEST_BYTES : (length + CONTAINS_KEYS) * DIGEST_BYTES]
            count = len(some) // DIGEST_BYTES
            reply = await self._link.ask(
                LocalKind.MATCH_PREFIX, local.MatchPrefix(some), local.MatchedPrefix
            )
            if not 0 <= reply.length <= count:
                raise ProtocolError(f"{reply.length} of {count} keys match")
            length += reply.length
            if reply.length < count:
                break
        return length

    def _are_here(self, packed: bytes) -> NDArray[np.bool_]:
        """Which of these digests are in the mapped segments."""
        self._link.check()
        here = np.zeros(len(packed) // DIGEST_BYTES, dtype=np.bool_)
        for reader in self._link.readers:
            here |= reader.contains_many(packed)
        return here

    async def _ask_ahead(self, packed: bytes, absent: NDArray[np.intp], start: int) -> _Asked:
        """Ask the peer about some of these digests, the first of which is that of key number `start`."""
        if len(absent) * DIGEST_BYTES < len(packed):
            packed = np.frombuffer(packed, dtype=f"V{DIGEST_BYTES}")[absent].tobytes()
        request = await self._link.ask_ahead(
            LocalKind.CONTAINS, local.Contains(packed), local.ContainsReply
        )
        return _Asked(request, absent + start)


def _check_count(reply: local.ContainsReply, count: int) -> None:
    if len(reply.present) != count:
        raise ProtocolError(f"{len(reply.present)} answers about {count} keys")
