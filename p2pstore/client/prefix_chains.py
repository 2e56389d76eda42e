"""Chains of blocks that a client asked about: what is likely to be read after a block, and what a block that is put
follows. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from p2pstore.objects import DIGEST_BYTES

MAX_CHAINS: Final = 64
MAX_MISSING: Final = 16_384
"""Blocks that did not match, of all chains together: they are likely to be put soon."""
AHEAD: Final = 8
"""Blocks that are brought to memory ahead of the one that is read: of 5 MiB some 40 MiB."""


class PrefixChains:
    """The chains of the last calls of `match_prefix`, as far as they matched."""

    def __init__(self) -> None:
        self._chains: OrderedDict[bytes, bytes] = OrderedDict()
        """By the first block's digest: all digests, packed."""
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        """Blocks that were missing, and the one before each."""

    def matched(self, packed: bytes, length: int) -> None:
        """The first `length` blocks of this chain (packed digests) are held somewhere."""
        self._note_missing(packed, length)
        if length < 2:
            return
        head = packed[:DIGEST_BYTES]
        self._chains.pop(head, None)
        self._chains[head] = packed[: length * DIGEST_BYTES]
        if len(self._chains) > MAX_CHAINS:
            self._chains.popitem(last=False)

    def before(self, digest: bytes) -> bytes:
        """The digest of the block that this one follows in a chain, in which it was missing; empty for none known."""
        return self._before.get(digest, b"")

    def _note_missing(self, packed: bytes, length: int) -> None:
        blocks = min(len(packed) // DIGEST_BYTES, length + MAX_MISSING)
        for number in range(max(1, length), blocks):
            place = number * DIGEST_BYTES
            digest = packed[place : place + DIGEST_BYTES]
            self._before[digest] = packed[place - DIGEST_BYTES : place]
            self._before.move_to_end(digest)
        while len(self._before) > MAX_MISSING:
            self._before.popitem(last=False)

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
