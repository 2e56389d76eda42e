"""Finding a version's manifest: with whomever has a part in it, verified by its hash and its publisher's signature."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import trio

from p2pstore.checkpoint.content.manifest import (
    MAX_MANIFEST_BYTES,
    SignedManifest,
    Verifier,
    open_manifest,
)
from p2pstore.errors import CheckpointRefused, P2PStoreError
from p2pstore.transfer.data_messages import DataKind, GetManifest, ManifestReply
from p2pstore.transfer.reading.data_pool import DataPool
from p2pstore.transfer.transport import RemotePeer

logger = logging.getLogger("p2pstore.peer")


async def ask_for_manifest(
    pool: DataPool,
    ways: Sequence[RemotePeer],
    version: bytes,
    publisher: bytes,
    verifier: Verifier,
) -> SignedManifest | None:
    """The manifest, from the first of these peers who gives it; None when none of them does. Raises
    `CheckpointRefused` when the version is none that this publisher signed, whoever is asked."""
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
