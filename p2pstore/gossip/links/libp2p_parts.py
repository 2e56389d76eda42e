"""The used parts of libp2p: peer ids, Noise and multistream-select, without the rest of it.

libp2p's packages import everything they have, from QUIC to a certificate authority's client, as soon as one module of
them is imported: 600 modules more, 30 MB of each peer's memory and a third of the time that it takes to start. So these
packages' own code waits until one of its definitions is asked for; a program that embeds a peer and uses libp2p as
well notices nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _DeferredPackage(ModuleType):
    """A package with importable submodules, whose own code runs when a name is asked for that is not there."""

    __spec__: ModuleSpec

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # some look for these in every module that there is
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        loader = self.__spec__.loader
        assert loader is not None
        # In its own code it is a module like others.
        self.__class__ = ModuleType  # type: ignore[assignment] # of which this one is a kind
        try:
            loader.exec_module(self)
        except BaseException:
            self.__class__ = _DeferredPackage
            raise
        return getattr(self, name)


@contextmanager
def deferred(*packages: str) -> Iterator[None]:
    """Modules of these packages are imported here. Parents before children; those that were imported before, and
    those that are not installed, stay as they are."""
    for name in packages:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None:
            package = module_from_spec(spec)
            package.__class__ = _DeferredPackage
            sys.modules[name] = package
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, package)
    yield


@contextmanager
def stand_in(name: str, **attributes: Any) -> Iterator[None]:
    """In place of this module, modules that are imported here get one with these attributes. Imported later, it is
    itself. For what is named in type aliases only."""
    if name in sys.modules:
        yield
        return
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(attributes)
    try:
        yield
    finally:
        del sys.modules[name]


DEFERRED = (
    "libp2p",
    "libp2p.transport",
    "libp2p.transport.quic",
    "libp2p.network",
    "psutil",
    "Crypto.PublicKey.RSA",
)
with deferred(*DEFERRED), stand_in("libp2p.transport.quic.stream", QUICStream=object):
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import X25519PrivateKey
    from libp2p.custom_types import TProtocol
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.peer.id import ID
    from libp2p.protocol_muxer.multiselect import Multiselect
    from libp2p.protocol_muxer.multiselect_client import MultiselectClient
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from libp2p.security.security_multistream import SecurityMultistream

__all__ = [
    "ID",
    "NOISE_PROTOCOL",
    "Multiselect",
    "MultiselectClient",
    "MultiselectCommunicator",
    "NoiseTransport",
    "PeerIDMismatchesPubkey",
    "RawConnection",
    "SecurityMultistream",
    "TProtocol",
    "X25519PrivateKey",
    "create_new_key_pair",
]
