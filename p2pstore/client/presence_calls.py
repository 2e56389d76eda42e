"""Whether objects exist: from the mappings, and from the local peer where those do not tell; and prefix chains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2pstore.arguments import possible_keys
from p2pstore.client.peer_link import PeerLink
from p2pstore.errors import ProtocolError
from p2pstore.local import local_messages as local
from p2pstore.local.local_protocol import LocalKind
from p2pstore.local.local_requests import Cuts
from p2pstore.objects import DIGEST_BYTES, put_newest

FEW_KEYS: Final = 16
"""Up to this number, keys are looked up one by one: numpy takes 60 us for any, 80 with cold caches."""

MAX_MISSING: Final = 16_384
"""Of all chains together."""


class Presence:
    """Answers for one client. `digests_of` makes the digests of many keys of its namespace."""

    def __init__(
        self, link: PeerLink, digests_of: Callable[[Sequence[str]], list[bytes]], chains: PrefixChains
    ) -> None:
        self._link = link
        self._digests_of = digests_of
        self._chains = chains

    async def contains(self, digest: bytes) -> bool:
        """Whether some live peer is known to hold the object."""
        known = self._look_up_one(digest)
        return bool((await self._ask(digest))[0]) if known is None else known

    def _look_up_one(self, digest: bytes) -> bool | None:
        """The answer without a request; None: the peer must be asked."""
        if self._link.seems_here(digest):
            return True
        elsewhere = self._link.elsewhere
        known = None if elsewhere is None else elsewhere.contains(digest)
        # A local object may be missed for the moment in which its entry moves.
        return self._link.seems_here(digest) if known is False else known

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys, in at most one request per 4,096."""
        present = np.zeros(len(keys), dtype=np.bool_)
        for some in Cuts(LocalKind.CONTAINS, len(keys)):
            digests, places = possible_keys(keys[some.start : some.stop], self._digests_of)
            packed, numbers = b"".join(digests), np.arange(some.start, some.stop)
            known, unclear = self._look_up(packed)
            if unclear.any():
                known[unclear] = await self._ask(_pick(packed, np.flatnonzero(unclear)))
            present[numbers if places is None else numbers[places]] = known
        answers: list[bool] = present.tolist()
        return answers

    def contains_many_nowait(self, keys: Sequence[str]) -> list[bool | None]:
        """`contains_many` as far as the mappings tell. None: the peer must be asked."""
        answers: list[bool | None] = [False] * len(keys)
        digests, places = possible_keys(keys, self._digests_of)
        numbers = range(len(keys)) if places is None else places
        for number, known, unclear in zip(numbers, *self._look_up(b"".join(digests)), strict=True):
            answers[number] = None if unclear else bool(known)
        return answers

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold."""
        digests, places = possible_keys(keys, self._digests_of)
        if places is not None:
            digests = [each for at, each in enumerate(digests) if places[at] == at]
        packed = b"".join(digests)
        length = await self._match(packed, len(digests))
        self._chains.matched(packed, length)
        return length

    async def _match(self, packed: bytes, keys: int) -> int:
        known, unclear = self._look_up(packed)
        absent = np.flatnonzero(~known)
        length = int(absent[0]) if len(absent) else keys
        if length < keys and not unclear[length]:
            return length
        begin = length
        for some in Cuts(LocalKind.MATCH_PREFIX, keys - begin):
            asked = packed[(begin + some.start) * DIGEST_BYTES : (begin + some.stop) * DIGEST_BYTES]
            count = len(some)
            reply = await self._link.request(
                LocalKind.MATCH_PREFIX, local.MatchPrefix(asked), local.MatchedPrefix
            )
            if not 0 <= reply.length <= count:
                raise ProtocolError(f"{reply.length} of {count} keys match")
            length += reply.length
            if reply.length < count:
                break
        return length

    def _look_up(self, packed: bytes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of these digests are known without asking, and of which the peer must be asked."""
        if len(packed) <= FEW_KEYS * DIGEST_BYTES:
            self._link.check()
            starts = range(0, len(packed), DIGEST_BYTES)
            answers = [self._look_up_one(packed[start : start + DIGEST_BYTES]) for start in starts]
            self._link.check()  # closed meanwhile, it would have listed nothing
            return (
                np.array([answer is True for answer in answers], np.bool_),
                np.array([answer is None for answer in answers], np.bool_),
            )
        known = self._are_here(packed)
        unclear = ~known
        absent = np.flatnonzero(unclear)
        elsewhere = self._link.elsewhere
        if len(absent) and elsewhere is not None:
            some = _pick(packed, absent)
            held, unclear[absent] = elsewhere.contains_many(some)
            # A local object may have been missed for the moment in which its entry moved.
            known[absent] = held | self._are_here(some)
            unclear &= ~known
        return known, unclear

    def _are_here(self, packed: bytes) -> NDArray[np.bool_]:
        """Which of these digests are in the mapped segments."""
        self._link.check()
        here = np.zeros(len(packed) // DIGEST_BYTES, dtype=np.bool_)
        for reader in self._link.readers:
            here |= reader.contains_many(packed)
        return here

    async def _ask(self, packed: bytes) -> NDArray[np.bool_]:
        """Ask the peer about these digests."""
        reply = await self._link.request(LocalKind.CONTAINS, local.Contains(packed), local.ContainsReply)
        if len(reply.present) * DIGEST_BYTES != len(packed):
            raise ProtocolError(f"{len(reply.present)} answers about {len(packed) // DIGEST_BYTES} keys")
        present: NDArray[np.bool_] = np.frombuffer(reply.present, dtype=np.uint8) == 1
        return present


def _pick(packed: bytes, numbers: NDArray[np.intp]) -> bytes:
    """Some of many packed digests."""
    if len(numbers) * DIGEST_BYTES == len(packed):
        return packed
    return np.frombuffer(packed, dtype=f"V{DIGEST_BYTES}")[numbers].tobytes()


class PrefixChains:
    """Blocks that were missing in the last calls of `match_prefix`: they are likely to be put soon."""

    def __init__(self) -> None:
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        """By digest, that of the block before."""

    def matched(self, packed: bytes, length: int) -> None:
        """The first `length` blocks of this chain (packed digests) are held somewhere."""
        blocks = min(len(packed) // DIGEST_BYTES, length + MAX_MISSING)
        for number in range(max(1, length), blocks):
            place = number * DIGEST_BYTES
            digest = packed[place : place + DIGEST_BYTES]
            put_newest(self._before, digest, packed[place - DIGEST_BYTES : place], MAX_MISSING)

    def before(self, digest: bytes) -> bytes:
        """The digest of the block that this one follows in a chain, in which it was missing; empty for none known."""
        return self._before.get(digest, b"")
