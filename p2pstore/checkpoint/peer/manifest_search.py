"""Finding the version that a fetch means, and its manifest. Shell."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

import trio

from p2pstore.checkpoint.checkpoint_messages import Fetch
from p2pstore.checkpoint.content.manifest import (
    MAX_MANIFEST_BYTES,
    SignedManifest,
    Verifier,
    format_version,
    open_manifest,
)
from p2pstore.checkpoint.peer.running import SwarmParts
from p2pstore.checkpoint.peer.surroundings import PeerInterface
from p2pstore.errors import CheckpointRefused, NoSuchKey, P2PStoreError, Unavailable
from p2pstore.gossip.checkpoint_records import Head
from p2pstore.gossip.records import PeerId, member_of
from p2pstore.transfer.data_messages import DataKind, GetManifest, ManifestReply
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transport import RemotePeer

logger = logging.getLogger("p2pstore.peer")

MANIFEST_SECONDS: Final = 10.0
"""Deadline for getting a manifest from any member."""
ASK_AGAIN_SECONDS: Final = 0.5
"""Time between two rounds of asking members for a manifest."""


class Finder:
    """Resolves names to versions, and versions to verified manifests."""

    def __init__(
        self, peer: PeerInterface, parts: SwarmParts, verifier: Verifier, rng: Random
    ) -> None:
        self._peer = peer
        self._parts = parts
        self._verifier = verifier
        self._rng = rng

    async def find(self, order: Fetch) -> tuple[Head, bytes]:
        """The head of the name, and the version that the order means; waits for it if so ordered. Raises `NoSuchKey`,
        and `ValueError` when the publisher is ambiguous."""
        seen: object = None
        with trio.move_on_after(order.wait_ms / 1000):
            while True:
                try:
                    return self._find_now(order)
                except NoSuchKey:
                    if not order.wait_ms:
                        raise
                    seen = await self._peer.news(seen)
        return self._find_now(order)

    def _find_now(self, order: Fetch) -> tuple[Head, bytes]:
        head = self._peer.records.find(order.namespace, order.name, order.publisher or None)
        digits = order.version.lower()
        if not digits:
            return head, head.version
        known = [
            head.version,
            head.body.previous,
            *(each.run.version for each in self._parts.all()),
        ]
        found = {each for each in known if each and format_version(each).startswith(digits)}
        if len(digits) == 2 * len(head.version):
            found.add(bytes.fromhex(digits))
        if len(found) != 1:
            what = "more than one version" if found else "no version"
            raise NoSuchKey(
                f"{what} of {order.name} that is known here begins with {digits}: give all its "
                f"{2 * len(head.version)} digits, or none for the newest"
            )
        return head, found.pop()

    def check(self, signed: SignedManifest, version: bytes, publisher: PeerId) -> None:
        """Verify a manifest; blocking. Raises `CheckpointRefused`."""
        open_manifest(signed, version=version, publisher=publisher, verifier=self._verifier)

    async def manifest(self, version: bytes, publisher: PeerId) -> SignedManifest:
        """The verified manifest, from any member that has it. Gossip may name one only a moment later. Raises
        `Unavailable` when none answers, and `CheckpointRefused`."""
        part = self._parts.get(version)
        if part is not None and part.run.signed.signer == publisher:
            return part.run.signed
        with trio.move_on_after(MANIFEST_SECONDS):
            while True:
                ways = self._ways(version, publisher)
                found = await ask_for_manifest(
                    self._peer.pool, ways, version, publisher, self._verifier
                )
                if found is not None:
                    return found
                await trio.sleep(ASK_AGAIN_SECONDS)
        asked = f"{len(ways)} {'was' if len(ways) == 1 else 'were'} asked"
        why = self._peer.parts.why_not_offered(version, publisher) or asked
        raise Unavailable(
            f"no peer that has version {format_version(version)} can be reached: {why}"
        )

    def _ways(self, version: bytes, publisher: PeerId) -> list[RemotePeer]:
        members = {*self._peer.participants(version), member_of(publisher)} - {self._peer.own}
        order = sorted(members)
        self._rng.shuffle(order)
        return [way for member in order if (way := self._peer.way_to(member)) is not None]


async def ask_for_manifest(
    pool: DataPool,
    ways: Sequence[RemotePeer],
    version: bytes,
    publisher: bytes,
    verifier: Verifier,
) -> SignedManifest | None:
    """The manifest, from the first of these peers that has it; None when none has. Raises `CheckpointRefused` when
    the only manifests offered are not signed by this publisher."""
    refused: CheckpointRefused | None = None
    for way in ways:
        try:
            reply, body = await pool.request_bulk(
                way, DataKind.GET_MANIFEST, GetManifest(version), MAX_MANIFEST_BYTES
            )
        except (P2PStoreError, OSError, ValueError) as error:
            logger.debug("no manifest from %s: %s", ", ".join(way.data), error)
            continue
        assert isinstance(reply, ManifestReply)
        signed = SignedManifest(bytes(body), reply.signer, reply.signature)
        check = partial(
            open_manifest, signed, version=version, publisher=publisher, verifier=verifier
        )
        try:
            await trio.to_thread.run_sync(check)
        except CheckpointRefused as error:
            logger.warning("a manifest from %s: %s", ", ".join(way.data), error)
            refused = error
        else:
            return signed
    if refused is not None:
        raise refused
    return None
