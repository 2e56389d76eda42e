"""Queries of routers over HTTP: how much of a chain of blocks the pool has, and which peer how much of it.

`POST /v1/prefix` speaks of blocks, `POST /v1/estimate` of the time to bring them here, and `POST /query` of tokens, in
the shape of Mooncake's RFC 1403. All take keys, or what keys are made of: `prefix`, a hash a block, and `suffixes`
where a block is several objects (a rank or a piece each), of which a holder must have all. Where this peer does not
know all locations, it asks the keys' homes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from http import HTTPStatus
from itertools import product
from typing import Any, Final

import msgspec

from p2pstore.client.answers import fetch_estimate
from p2pstore.core.gets.key_pages import holdings_here, holdings_of, match
from p2pstore.core.gets.lookup import LookupOperation
from p2pstore.errors import P2PStoreError
from p2pstore.gossip.locations.location_lookups import HeldKeys
from p2pstore.gossip.records import Member
from p2pstore.objects import (
    DEFAULT_NAMESPACE,
    MAX_KEY_BYTES,
    batch_key_hasher,
    format_peer_id,
    namespace_digest,
)
from p2pstore.peer.for_clients.local_queries import estimated
from p2pstore.peer.node import Node
from p2pstore.status.http_server import Answer, Queries, text_answer

Holdings = Mapping[Member, HeldKeys]

MAX_KEYS: Final = 4096
MAX_SUFFIXES: Final = 256
MAX_NAMESPACES: Final = 64
"""Of which hashers are kept."""


class PrefixRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A chain of blocks, first one first: `keys`, or `prefix` + hash + suffix for each of `hashes` and `suffixes`."""

    namespace: str = DEFAULT_NAMESPACE
    keys: list[str] = []
    prefix: str = ""
    hashes: list[str] = []
    suffixes: list[str] = msgspec.field(default_factory=lambda: [""])


class TokenRequest(PrefixRequest, forbid_unknown_fields=True):
    """The same in tokens: of `block_size` tokens a block."""

    block_size: int = 0


class PrefixQueries:
    """Answers of one peer. Answers are hints: a block may have gone since, or just have come."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self._hasher = lru_cache(MAX_NAMESPACES)(batch_key_hasher)

    def by_path(self) -> Queries:
        """The queries, by their paths; each path's answer is what its document says."""
        return {
            "/v1/prefix": partial(self._answer, PrefixRequest, self._prefix_document),
            "/v1/estimate": partial(self._answer, PrefixRequest, self._estimate_document),
            "/query": partial(self._answer, TokenRequest, self._token_document),
        }

    def _answer(
        self,
        kind: type[PrefixRequest],
        document: Callable[[Any, Sequence[bytes], Holdings], Any],
        body: bytes,
    ) -> Answer | Awaitable[Answer]:
        try:
            request = msgspec.json.decode(body, type=kind)
            keys = _keys_of(request)
            digests = self._hasher(request.namespace)(keys)
        except (msgspec.DecodeError, ValueError) as error:
            return text_answer(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        space = namespace_digest(request.namespace)
        found = holdings_here(self._core, digests, self._node.now, space)
        if found is not None:
            return _json(document(request, digests, found))

        async def asked() -> Answer:
            operation = LookupOperation(self._core, digests, namespace=space)
            try:
                copies = await self._node.complete(operation)
            except P2PStoreError as error:
                return text_answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return _json(document(request, digests, holdings_of(copies)))

        return asked()

    def _estimate_document(
        self, request: PrefixRequest, digests: Sequence[bytes], found: Holdings
    ) -> dict[str, Any]:
        """The expected time to bring these objects here: see `FetchEstimate`."""
        estimate = fetch_estimate([estimated(self._node, digests, found)])
        return {**asdict(estimate), "p90_seconds": estimate.p90_seconds}

    def _prefix_document(
        self, request: PrefixRequest, digests: Sequence[bytes], found: Holdings
    ) -> dict[str, Any]:
        """`{matched, complete, holders: [{peer_id, peer, blocks, memory_blocks, local}], as_of}`."""
        core = self._core
        matched = match(found, len(digests), 1 if request.keys else len(request.suffixes))
        holders = []
        for run in matched.runs:
            state = core.gossip.membership.resolve(run.member)
            if state is not None:
                holders.append(
                    {
                        "peer_id": format_peer_id(state.peer_id),
                        "peer": core.name_of(state.peer_id),
                        "blocks": run.blocks,
                        "memory_blocks": run.memory_blocks,
                        "local": run.member == core.member,
                    }
                )
        return {
            "matched": matched.matched,
            "complete": matched.matched == len(request.keys or request.hashes),
            "holders": holders,
            "as_of": {"peer": core.name_of(core.peer_id), "unix": round(time.time(), 3)},
        }

    def _token_document(
        self, request: TokenRequest, digests: Sequence[bytes], found: Holdings
    ) -> dict[str, Any]:
        """`{namespace: {peer: {longest_matched, GPU, DP, CPU, DISK}}}` in tokens."""
        tokens = request.block_size
        document = self._prefix_document(request, digests, found)
        return {
            request.namespace: {
                each["peer"]: {
                    "longest_matched": each["blocks"] * tokens,
                    "GPU": 0,
                    "DP": {},
                    "CPU": each["memory_blocks"] * tokens,
                    "DISK": each["blocks"] * tokens,
                }
                for each in document["holders"]
            }
        }


def _keys_of(request: PrefixRequest) -> list[str]:
    if bool(request.keys) == bool(request.hashes):
        raise ValueError("give either keys or hashes")
    if not 1 <= len(request.suffixes) <= MAX_SUFFIXES:
        raise ValueError(f"suffixes: 1 to {MAX_SUFFIXES}, not {len(request.suffixes)}")
    if isinstance(request, TokenRequest) and request.block_size < 1:
        raise ValueError("block_size: the number of tokens a block, at least 1")
    pieces = 1 if request.keys else len(request.suffixes)
    count = len(request.keys or request.hashes) * pieces
    if count > MAX_KEYS:
        raise ValueError(f"{count:,} keys; at most {MAX_KEYS:,} are allowed")
    if request.keys:
        return request.keys
    prefix = request.prefix
    longest = len(prefix) + len(max(request.hashes, key=len)) + len(max(request.suffixes, key=len))
    if longest > MAX_KEY_BYTES:  # looked at before 4,096 of a million bytes each are made
        raise ValueError(f"a key of {longest:,} characters; at most {MAX_KEY_BYTES:,} bytes are allowed")
    return [prefix + each + suffix for each, suffix in product(request.hashes, request.suffixes)]


def _json(document: Any) -> Answer:
    return Answer(HTTPStatus.OK, "application/json", msgspec.json.encode(document))
