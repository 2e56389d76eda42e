"""The peer: the shells around the pure core, put together."""

from p2pstore.peer.api import Peer, open_peer
from p2pstore.peer.lifetime.run import run_peer

__all__ = ["Peer", "open_peer", "run_peer"]
