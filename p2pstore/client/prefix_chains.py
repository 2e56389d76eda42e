"""Chains of blocks that a client asked about, by which it knows what is likely to be read after a block. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from p2pstore.objects import DIGEST_BYTES

MAX_CHAINS: Final = 64
AHEAD: Final = 8
"""Blocks that are brought to memory ahead of the one that is read: of 5 MiB some 40 MiB."""


class PrefixChains:
    """The chains of the last calls of `match_prefix`, as far as they matched."""

    def __init__(self) -> None:
        self._chains: OrderedDict[bytes, bytes] = OrderedDict()
        """By the first block's digest: all digests, packed."""

    def matched(self, packed: bytes, length: int) -> None:
        """The first `length` blocks of this chain (packed digests) are held somewhere."""
        if length < 2:
            return
        head = packed[:DIGEST_BYTES]
        self._chains.pop(head, None)
        self._chains[head] = packed[: length * DIGEST_BYTES]
        if len(self._chains) > MAX_CHAINS:
            self._chains.popitem(last=False)

    def after(self, digest: bytes) -> bytes:
        """The packed digests of the blocks to be brought when this one is read: those behind the head of a chain, or
        one more behind a later block, as those before it are on their way."""
        chain = self._chains.get(digest)
        if chain is not None:
            return chain[DIGEST_BYTES : (1 + AHEAD) * DIGEST_BYTES]
        for chain in self._chains.values():
            place = _place_of(digest, chain)
            if place >= 0:
                start = place + AHEAD * DIGEST_BYTES
                return chain[start : start + DIGEST_BYTES]
        return b""


def _place_of(digest: bytes, chain: bytes) -> int:
    """Where it begins, or -1."""
    place = chain.find(digest)
    while place > 0 and place % DIGEST_BYTES:
        place = chain.find(digest, place + 1)
    return place
