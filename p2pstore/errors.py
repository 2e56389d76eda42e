"""Every error that p2pstore raises on purpose. Each message says what happened and what to do about it."""

from __future__ import annotations


class P2PStoreError(Exception):
    """Base of all errors of this package."""


class NoSuchKey(P2PStoreError, KeyError):
    """No live peer is known to hold the key, after the key's home peers were asked."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else "no such key"


class Unavailable(P2PStoreError):
    """Copies of the object are known, but none of their holders could be reached, proved it in time, or served it; or,
    where this peer keeps a part of the directory only, none of those that would know of copies could be reached. Or a
    write would be refused by other peers, as this machine's clock is wrong."""


class DeadlineExceeded(P2PStoreError, TimeoutError):
    """The operation made no progress within its deadline."""


class KeyExists(P2PStoreError):
    """A put with `on_conflict="error"` met its key with other bytes (or, for a tensor, another dtype or shape). The
    existing object was kept: put with `on_conflict="overwrite"`, or under another key. `key` is the key."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class BufferTooSmall(P2PStoreError):
    """The destination is smaller than the object; `needed` is the object's length in bytes."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class ObjectTooLarge(P2PStoreError):
    """The value is longer than an object can be anywhere (4 GiB): split it over several keys. A
    lease raises it for what is longer than the local peer's whole memory, too: get it instead."""


class CapacityExceeded(P2PStoreError):
    """No peer has room for the value: it is longer than what a peer offers, or everything that could make
    room is leased, pinned or being written."""


class LeaseLimitExceeded(P2PStoreError):
    """The client is at its limit of leased bytes: it must release views before it takes more."""


class PeerNotInstalled(P2PStoreError, ImportError):
    """This environment has the client only: the extra `p2pstore[peer]` runs a peer. `library` is missing."""

    def __init__(self, library: str | None) -> None:
        super().__init__(f"{library} is not installed, which a peer needs: pip install 'p2pstore[peer]'")


class CheckpointRefused(P2PStoreError):
    """A checkpoint's manifest is not what it should be: not signed by the publisher that is trusted, of another
    version, or with paths or sizes that are not allowed. Nothing of it was fetched."""


class CheckpointChanged(P2PStoreError):
    """A file changed while it was published. Publish it again when no process writes to it."""


class FollowersLag(DeadlineExceeded):
    """Not all followers of a checkpoint, or not as many as were asked for, had the version in time: none switches.
    `laggards` are those that did not (`results.CheckpointFollower`)."""

    def __init__(self, message: str, laggards: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.laggards = laggards


class TransferCancelled(P2PStoreError):
    """A transfer of a batch was cancelled before its end."""


class GpuCopyFailed(P2PStoreError):
    """A GPU did not copy. Its driver may be telling of what was asked of it before."""


class StoreClosed(P2PStoreError):
    """The peer or client was closed, or the connection to the local peer ended."""


class ClientForked(P2PStoreError):
    """The client was made in the parent process; a forked child must connect for itself."""


class ConfigError(P2PStoreError):
    """A setting is missing, malformed, or contradicts another one."""


class ProtocolError(P2PStoreError):
    """The other side sent something that the protocol does not allow; the connection is closed."""


class AnswerTooLarge(P2PStoreError, ValueError):
    """The answer to a request fits no frame: ask for less at a time."""


class ProtocolMismatch(P2PStoreError):
    """The two sides share no protocol version: one of them must be upgraded."""


class DuplicateIdentity(P2PStoreError):
    """Another live peer of the cluster uses this peer's identity (its state directory was copied)."""


class AuthenticationFailed(P2PStoreError):
    """The other side does not hold a cluster key that this side accepts."""


class NoLocalPeer(P2PStoreError):
    """No peer listens on the local socket; `mooncake-p2p join` starts one."""


class AmbiguousLocalPeer(NoLocalPeer):
    """Several local peers run and none was chosen; choose one with --socket, MOONCAKE_P2P_SOCKET or
    `connect(socket=...)`."""
