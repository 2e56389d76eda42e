"""The protocol of one data connection at its holder: its states, which requests it takes, how they fail. Pure."""

from __future__ import annotations

import logging
from enum import IntEnum, auto
from typing import Final, NamedTuple

from p2pstore.errors import P2PStoreError, ProtocolError
from p2pstore.objects import DIGEST_BYTES
from p2pstore.transfer.data_messages import (
    REQUESTS,
    WRITE_KINDS,
    DataKind,
    Get,
    GetSmall,
    Refused,
    StorePart,
)
from p2pstore.transfer.read_tickets import Rights
from p2pstore.wire import (
    REPLY,
    Code,
    FrameHeader,
    Message,
    code_of,
    decode_body,
    encode_failure,
    encode_frame,
)

logger = logging.getLogger("p2pstore.transfer")

# Plain numbers: they are compared for every request.
HELLO, PROOF = int(DataKind.HELLO), int(DataKind.PROOF)


class State(IntEnum):
    """State of one connection."""

    QUIET = auto()
    """All that arrived is answered; it waits for the next request."""
    PARTIAL = auto()
    """It waits for the rest of a request."""
    ANSWERING = auto()
    LENT = auto()
    """A thread has the connection and answers reads."""
    TAKING_IN = auto()
    """A value is being stored: nothing else is read meanwhile."""
    LINKED = auto()
    """It is a link of a swarm until its end."""
    ENDED = auto()


class Event(IntEnum):
    """An event that changes the state of a connection."""

    RECEIVED = auto()
    ANSWERED = auto()
    """All that arrived was answered."""
    CUT = auto()
    """All that arrived whole was answered; part of another request is there."""
    LENT = auto()
    RETURNED = auto()
    STORE = auto()
    STORED = auto()
    LINK = auto()
    END = auto()


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.QUIET: {Event.RECEIVED: State.ANSWERING, Event.LENT: State.LENT, Event.END: State.ENDED},
    State.PARTIAL: {Event.RECEIVED: State.ANSWERING, Event.LENT: State.LENT, Event.END: State.ENDED},
    State.ANSWERING: {
        Event.ANSWERED: State.QUIET,
        Event.CUT: State.PARTIAL,
        Event.LENT: State.LENT,
        Event.STORE: State.TAKING_IN,
        Event.LINK: State.LINKED,
        Event.END: State.ENDED,
    },
    State.LENT: {Event.RETURNED: State.ANSWERING, Event.END: State.ENDED},
    State.TAKING_IN: {Event.STORED: State.ANSWERING, Event.END: State.ENDED},
    State.LINKED: {Event.END: State.ENDED},
    State.ENDED: {},
}


class Lifecycle:
    """The state of one connection, since when (`since`, monotonic seconds, for QUIET), and whether it is to end at
    its next pause. It begins with what came along with the hello."""

    __slots__ = ("retiring", "since", "state")

    def __init__(self) -> None:
        self.state = State.ANSWERING
        self.since = 0.0
        self.retiring = False

    def happened(self, event: Event, now: float = 0.0) -> None:
        """Change the state. Raises `KeyError` for an event that this state does not know."""
        self.state = TRANSITIONS[self.state][event]
        self.since = now

    def retire(self, now: float) -> None:
        """End at the next pause, which begins now: a request may be on its way."""
        self.retiring = True
        if self.state is State.QUIET:
            self.since = now

    @property
    def quiet_since(self) -> float | None:
        """When the last request was answered; None while one is being answered, or has begun."""
        return self.since if self.state is State.QUIET else None


class Refusal(NamedTuple):
    """Why a request is not answered; the connection goes on."""

    code: Code
    text: str


class RequestRules:
    """Which requests of a connection are answered, by what this peer does and by the ticket's rights."""

    def __init__(self, rights: Rights, *, stores: bool) -> None:
        """`stores`: whether this peer takes values in."""
        self._rights = rights
        self._known = {
            int(kind): message_type
            for kind, message_type in REQUESTS.items()
            if stores or kind not in WRITE_KINDS
        }
        self._allowed = {
            kind: message_type for kind, message_type in self._known.items() if rights.allow(kind)
        }

    def decode(self, header: FrameHeader, body: bytes) -> Message | Refusal:
        """The request in a frame. Raises `Refused` for one that is malformed, `ProtocolError` for what is none: both
        end the connection."""
        kind = header.kind
        if kind in (HELLO, PROOF) or header.flags & REPLY:
            raise ProtocolError(f"a frame of kind {kind}, flags {header.flags} is not a request")
        message_type = self._allowed.get(kind)
        if message_type is None:
            if kind in self._known:
                return Refusal(Code.AUTHENTICATION_FAILED, self._rights.why_not(kind))
            return Refusal(Code.UNSUPPORTED, f"kind {kind} is unknown to this version")
        try:
            message: Message = decode_body(message_type, body)
        except ProtocolError as error:
            raise malformed(header, str(error)) from error
        if refusal := self._rights.refusal(message):
            return Refusal(Code.AUTHENTICATION_FAILED, refusal)
        if isinstance(message, Get) and not message.items:
            raise malformed(header, "a GET without items")
        if isinstance(message, GetSmall) and len(message.digests) % DIGEST_BYTES:
            raise malformed(header, "digests are 16 bytes each")
        if isinstance(message, StorePart):
            raise malformed(header, "a part of a value, but no STORE was answered with room for it")
        return message


def malformed(header: FrameHeader, text: str) -> Refused:
    """The end of a connection because of this request."""
    return Refused(header.kind, header.request_id, Code.MALFORMED, text)


def reply_frame(header: FrameHeader, message: Message, bulk_length: int = 0) -> bytes:
    """The answer to a request, without its bulk bytes."""
    return encode_frame(header.kind, header.request_id, message, flags=REPLY, bulk_length=bulk_length)


def failure_frame(header: FrameHeader, error: Exception) -> bytes:
    """The answer to a request that failed. An internal error is logged, and not told in detail."""
    if isinstance(error, (P2PStoreError, ValueError)):
        detail = getattr(error, "needed", 0)
        return encode_failure(header.kind, header.request_id, code_of(error), str(error), detail)
    name = DataKind(header.kind).name
    logger.error("a %s request failed by an internal error", name, exc_info=error)
    text = f"internal error of the other peer ({type(error).__name__}): see its log"
    return encode_failure(header.kind, header.request_id, Code.INTERNAL, text)
