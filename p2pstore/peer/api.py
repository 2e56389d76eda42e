"""`open_peer`: a peer inside this process, and the store that it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import trio

from p2pstore.client import answers
from p2pstore.client.trio_client import Client, open_client, require_trio
from p2pstore.config import PeerConfig
from p2pstore.gossip.records import format_peer_id
from p2pstore.objects import key_digest
from p2pstore.peer.assembly import Assembly, open_memory
from p2pstore.peer.for_clients.local_queries import known_copy
from p2pstore.peer.lifetime.credentials import fitted_to_role
from p2pstore.peer.node import Node
from p2pstore.results import Location
from p2pstore.state.state_directory import StateDirectory


class Peer(Client):
    """A peer in this process: a client of itself, with what a peer knows besides. Satisfies `p2pstore.ObjectStore`.
    Methods whose names end in _nowait answer from local knowledge and may be called from any thread."""

    _node: Node
    control: str
    data: list[str]
    socket: str
    metrics: str | None

    @property
    def peer_id(self) -> str:
        """This peer's id, in base58."""
        return format_peer_id(self._node.core.peer_id)

    @property
    def name(self) -> str:
        return self._node.config.name

    @property
    def node(self) -> Node:
        """The running shell, for the command line and for tests."""
        return self._node

    async def reload(self) -> bool:
        """Read the cluster key file and the allow file again, as SIGHUP does. Whether something changed: connections
        that would not be admitted now end within seconds. Raises `ConfigError`, having changed nothing, for a bad
        file."""
        return await self._node.credentials.reload()

    def contains_nowait(self, key: str) -> bool:
        """Whether a live peer is known to hold the key."""
        return bool(self.locate_nowait(key))

    def locate_nowait(self, key: str) -> list[Location]:
        """The known copies that can be reached. Raises `StoreClosed` when the peer has ended."""
        self._node.check_open()
        digest = key_digest(key, self.namespace)
        core = self._node.core
        return [
            answers.location(known_copy(core, copy))
            for copy in core.copies.known(digest, self._node.now)
            if copy.reachable
        ]

    def match_prefix_nowait(self, keys: Sequence[str]) -> int:
        """How many of these keys, from the first on, are known to be held somewhere. As `match_prefix`."""
        for position, key in enumerate(keys):
            with suppress(ValueError):  # which no object can have
                if self.contains_nowait(key):
                    continue
            return position
        return len(keys)


@asynccontextmanager
async def open_peer(
    config: PeerConfig | None = None, *, namespace: str = "default"
) -> AsyncIterator[Peer]:
    """Run a peer while the `async with` block lasts. Leaving it, the peer says goodbye to the others.

    Raises `RuntimeError` outside of trio, and `ConfigError` for settings that cannot work. When the
    cluster refuses this peer (`AuthenticationFailed`, `ProtocolMismatch`) or another live peer turns out
    to have its identity (`DuplicateIdentity`), the block is cancelled and the error raised.
    """
    require_trio(
        "a peer in this process",
        "or start one with `mooncake-p2p join` and use it by p2pstore.aio or p2pstore.blocking",
    )
    checked = fitted_to_role((config or PeerConfig()).checked())
    async with AsyncExitStack() as stack:
        state = (
            stack.enter_context(StateDirectory.open(checked.state_dir)) if checked.state_dir else None
        )
        memory = await open_memory(checked, state)
        stack.callback(memory.close)
        assembly = Assembly(stack, checked, state, memory)
        node = await assembly.start()
        socket_path = str(assembly.socket_path)
        peer = await stack.enter_async_context(open_client(Peer, socket_path, namespace))
        peer._node = node
        peer.control, peer.data = assembly.control[0], assembly.data
        peer.metrics = assembly.metrics
        peer.socket = socket_path
        try:
            with trio.CancelScope() as scope:
                node.on_failure = scope.cancel
                if node.failure is not None:  # it failed during the start
                    scope.cancel()
                yield peer
        finally:
            with trio.CancelScope(shield=True):
                await node.leaving.run()
    if node.failure is not None:
        raise node.failure
