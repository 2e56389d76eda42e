"""The interface between the server of the local socket and its peer: a connected client, answers, and an observer."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Protocol

from p2pstore.local.local_protocol import Access, HelloReply, LocalKind
from p2pstore.wire import Message


@dataclass(frozen=True, slots=True)
class LocalClient:
    """A connected client. `holder` names it in the segment and is never used again."""

    holder: int
    namespace: str
    access: Access
    process_id: int
    name: str
    reads_locations: bool = False
    """Whether it can use the peer's table of locations."""
    directory: int = -1
    """The descriptor of a directory that it passed, or -1; closed when the client is gone."""
    checkpoint: bytes = b""
    """The version of a checkpoint in memory that it wants to map."""
    hazards: bool = False
    """Whether it can lease objects by a page of its own."""

    def __hash__(self) -> int:
        return self.holder


class LocalBackend(Protocol):
    """What the server asks of the peer. Errors raised go to the client as failures."""

    @property
    def request_types(self) -> Mapping[int, type[Message]]:
        """The requests that it answers, by `LocalKind`."""
        ...

    def welcome(self, client: LocalClient, version: int) -> tuple[HelloReply, list[int]]:
        """The answer to a client's hello, and a descriptor for each memory of each segment in it: read-only ones for
        READ access, writable ones for WRITE; then, where the hello names one and the client reads it, a read-only
        one of the table of locations; then a writable one of its page of hazards; then one of the checkpoint that it
        wants. The descriptors stay the backend's."""
        ...

    def welcomed(self, client: LocalClient) -> None:
        """It has what `welcome` gave: descriptors that were for it alone are not needed any more."""
        ...

    def handle(
        self, client: LocalClient, kind: LocalKind, message: Message
    ) -> Message | Awaitable[Message | None] | None:
        """The answer to a request, at once or as something to await (which is cancelled when the
        client is gone). None for kinds without an answer."""
        ...

    def handled(self) -> None:
        """All requests that had come were handled, and their answers are on their way as far as the socket takes them:
        the time for what must not keep them waiting. In the same step, so nothing else happens in between."""
        ...

    def client_gone(self, client: LocalClient) -> None:
        """End the leases and reservations of this client. Called once per welcomed client."""
        ...


class RequestObserver(Protocol):
    """Is told of every request, for statistics. Quick; what it raises is an error of this peer."""

    def began(self, kind: LocalKind, message: Message) -> object:
        """A request is not answered at once; the returned value comes back with its answer."""
        ...

    def answered(
        self,
        client: LocalClient,
        kind: LocalKind,
        message: Message,
        answer: Message | Exception | None,
        seconds: float,
        began: object | None,
    ) -> None:
        """A request was answered, `seconds` after it was taken from the socket."""
        ...
