"""The store for asyncio: `client = await p2pstore.aio.connect()`."""

from __future__ import annotations

import os

from p2pstore.client.aio_client import AioClient
from p2pstore.objects import DEFAULT_NAMESPACE
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS

__all__ = ["AioClient", "connect"]


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    timeout: float = DEFAULT_PROGRESS_SECONDS,
) -> AioClient:
    """A client of the local peer: `client = await connect()`, or `async with connect() as client`.

    `socket` is the peer's local socket: by default `MOONCAKE_P2P_SOCKET`, else the only live one.
    All keys are in `namespace`. `timeout` is the deadline of every call, in seconds without
    progress. Awaiting it, or entering the block, raises `NoLocalPeer` or `AmbiguousLocalPeer`.
    """
    return AioClient(socket=socket, namespace=namespace, timeout=timeout)
