"""A masterless object store for LLM inference: KV cache and checkpoints, from peer to peer.

Names are imported when they are first used: a client does not pay for the peer (nor for trio,
when it uses `p2pstore.blocking` or `p2pstore.aio`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pstore import aio as aio
    from p2pstore import blocking as blocking
    from p2pstore.aio import AioClient as AioClient
    from p2pstore.blocking import BlockingClient as BlockingClient
    from p2pstore.client.object_store import ObjectStore as ObjectStore
    from p2pstore.client.trio_client import Client as Client
    from p2pstore.client.trio_client import connect as connect
    from p2pstore.config import PeerConfig as PeerConfig
    from p2pstore.errors import AmbiguousLocalPeer as AmbiguousLocalPeer
    from p2pstore.errors import AuthenticationFailed as AuthenticationFailed
    from p2pstore.errors import BufferTooSmall as BufferTooSmall
    from p2pstore.errors import CapacityExceeded as CapacityExceeded
    from p2pstore.errors import ClientForked as ClientForked
    from p2pstore.errors import ConfigError as ConfigError
    from p2pstore.errors import DeadlineExceeded as DeadlineExceeded
    from p2pstore.errors import DuplicateIdentity as DuplicateIdentity
    from p2pstore.errors import KeyExists as KeyExists
    from p2pstore.errors import LeaseLimitExceeded as LeaseLimitExceeded
    from p2pstore.errors import NoLocalPeer as NoLocalPeer
    from p2pstore.errors import NoSuchKey as NoSuchKey
    from p2pstore.errors import ObjectTooLarge as ObjectTooLarge
    from p2pstore.errors import P2PStoreError as P2PStoreError
    from p2pstore.errors import PeerNotInstalled as PeerNotInstalled
    from p2pstore.errors import ProtocolError as ProtocolError
    from p2pstore.errors import ProtocolMismatch as ProtocolMismatch
    from p2pstore.errors import StoreClosed as StoreClosed
    from p2pstore.errors import TransferCancelled as TransferCancelled
    from p2pstore.errors import Unavailable as Unavailable
    from p2pstore.peer.api import Peer as Peer
    from p2pstore.peer.api import open_peer as open_peer
    from p2pstore.results import FetchEstimate as FetchEstimate
    from p2pstore.results import FetchSource as FetchSource
    from p2pstore.results import ItemResult as ItemResult
    from p2pstore.results import KeyPage as KeyPage
    from p2pstore.results import ListedKey as ListedKey
    from p2pstore.results import Location as Location
    from p2pstore.results import PeerInfo as PeerInfo
    from p2pstore.results import PinResult as PinResult
    from p2pstore.results import PrefixHolder as PrefixHolder
    from p2pstore.results import PutResult as PutResult
    from p2pstore.results import TransferRequest as TransferRequest
    from p2pstore.results import TransferStatus as TransferStatus
    from p2pstore.transfer.transfer_trace import FetchTrace as FetchTrace
    from p2pstore.values import RegisteredBuffer as RegisteredBuffer

__version__ = "0.1.0"

_MODULES = ("aio", "blocking")
_NAMES_IN = {
    "p2pstore.aio": ("AioClient",),
    "p2pstore.blocking": ("BlockingClient",),
    "p2pstore.client.object_store": ("ObjectStore",),
    "p2pstore.values": ("RegisteredBuffer",),
    "p2pstore.client.trio_client": ("Client", "connect"),
    "p2pstore.config": ("PeerConfig",),
    "p2pstore.errors": (
        *("AmbiguousLocalPeer", "AuthenticationFailed", "BufferTooSmall", "CapacityExceeded"),
        *("ClientForked", "ConfigError", "DeadlineExceeded", "DuplicateIdentity"),
        *(
            "KeyExists",
            "LeaseLimitExceeded",
            "NoLocalPeer",
            "NoSuchKey",
            "ObjectTooLarge",
            "P2PStoreError",
            "PeerNotInstalled",
        ),
        *("ProtocolError", "ProtocolMismatch", "StoreClosed", "TransferCancelled", "Unavailable"),
    ),
    "p2pstore.peer.api": ("Peer", "open_peer"),
    "p2pstore.results": (
        *("ItemResult", "KeyPage", "ListedKey", "PinResult", "Location", "PeerInfo", "PrefixHolder"),
        *("PutResult", "TransferRequest", "TransferStatus", "FetchEstimate", "FetchSource"),
    ),
    "p2pstore.transfer.transfer_trace": ("FetchTrace",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = ["__version__", *_MODULES, *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"p2pstore.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'p2pstore' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "trio":
            raise
        raise ImportError(f"p2pstore.{name} needs trio: pip install 'p2pstore[trio]'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
