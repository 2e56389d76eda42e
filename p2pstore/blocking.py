"""The store for threads and plain scripts: `p2pstore.blocking.connect()`."""

from __future__ import annotations

import os

from p2pstore.client.blocking_client import BlockingClient
from p2pstore.objects import DEFAULT_NAMESPACE
from p2pstore.runtime.streams import DEFAULT_PROGRESS_SECONDS

__all__ = ["BlockingClient", "connect"]


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    timeout: float = DEFAULT_PROGRESS_SECONDS,
) -> BlockingClient:
    """Connect to the local peer; close the client, or use it as a context manager.

    `socket` is the peer's local socket: by default `MOONCAKE_P2P_SOCKET`, else the only live one.
    All keys are in `namespace`. `timeout` is the deadline of every call, in seconds without
    progress. Raises `NoLocalPeer` or `AmbiguousLocalPeer`.
    """
    return BlockingClient(socket=socket, namespace=namespace, timeout=timeout)
