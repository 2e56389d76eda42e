"""The peer: the shells around the pure core, put together.

Importing it raises `PeerNotInstalled` where the libraries of the extra `p2pstore[peer]` are missing.
"""

from p2pstore.errors import PeerNotInstalled

try:
    from p2pstore.peer.api import Peer, open_peer
    from p2pstore.peer.lifetime.run import run_peer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] in ("p2pstore", "mooncake_p2p"):
        raise
    raise PeerNotInstalled(error.name) from error

__all__ = ["Peer", "open_peer", "run_peer"]
