"""Whether objects are anywhere: from the mapping what is here, from the local peer what is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2pstore.client.link import PeerLink
from p2pstore.errors import ProtocolError
from p2pstore.local import messages as local
from p2pstore.local.messages import LocalKind
from p2pstore.objects import DIGEST_BYTES

CONTAINS_KEYS: Final = 4096
"""Keys asked about at once: the peer looks them up within the 5 ms that its loop may be held."""


class Presence:
    """Answers for one client. `digests_of` makes the digests of many keys of its namespace."""

    def __init__(self, link: PeerLink, digests_of: Callable[[Sequence[str]], list[bytes]]) -> None:
        self._link = link
        self._digests_of = digests_of

    async def contains(self, digest: bytes) -> bool:
        """Whether some live peer is known to hold the object."""
        if any(reader.contains(digest) for reader in self._link.readers):
            return True
        return await self._ask([digest]) == b"\1"

    async def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` for many keys, in at most one request per 4,096."""
        present: list[bool] = []
        for start in range(0, len(keys), CONTAINS_KEYS):
            digests = self._digests_of(keys[start : start + CONTAINS_KEYS])
            here = self._are_here(digests)
            absent = np.flatnonzero(~here)
            if len(absent):
                known = await self._ask([digests[index] for index in absent])
                here[absent] = np.frombuffer(known, dtype=np.uint8) == 1
            present += here.tolist()
        return present

    async def match_prefix(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, some live peer is known to hold."""
        digests = self._digests_of(keys)
        absent = np.flatnonzero(~self._are_here(digests))
        length = int(absent[0]) if len(absent) else len(digests)
        while length < len(digests):
            some = digests[length : length + CONTAINS_KEYS]
            request = local.MatchPrefix(b"".join(some))
            reply = await self._link.request(LocalKind.MATCH_PREFIX, request, local.MatchedPrefix)
            if not 0 <= reply.length <= len(some):
                raise ProtocolError(f"{reply.length} of {len(some)} keys match")
            length += reply.length
            if reply.length < len(some):
                break
        return length

    def _are_here(self, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of them are in the mapped segments."""
        self._link.check()
        packed = b"".join(digests)
        here = np.zeros(len(packed) // DIGEST_BYTES, dtype=np.bool_)
        for reader in self._link.readers:
            here |= reader.contains_many(packed)
        return here

    async def _ask(self, digests: Sequence[bytes]) -> bytes:
        """A byte per digest, as the peer answers."""
        request = local.Contains(b"".join(digests))
        reply = await self._link.request(LocalKind.CONTAINS, request, local.ContainsReply)
        if len(reply.present) != len(digests):
            raise ProtocolError(f"{len(reply.present)} answers about {len(digests)} keys")
        return reply.present
