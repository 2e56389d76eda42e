"""A hostile member: a real peer with a valid identity, whose messages are changed on their way out, or added to.

It takes part as every peer does, with the project's own codecs, so it is believed until it lies. What it tells comes
from `lies`, which are put in and taken out at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from p2pstore.gossip.gossip_messages import REPLIES as CONTROL_REPLIES
from p2pstore.gossip.gossip_messages import (
    ControlKind,
    Delta,
    Duplicate,
    ExchangeReply,
    Leave,
    SnapshotHead,
)
from p2pstore.gossip.records import Member, PeerId, SignedRecord, read_peer_record, sign_peer_record
from p2pstore.transfer.data_messages import REPLIES as DATA_REPLIES
from p2pstore.transfer.data_messages import DataKind, ObjectReply
from p2pstore.wire import Failure, Message, decode_body, encode_body
from simulation.peer import SimulatedPeer

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.lies import Behaviour

TOLD_TIMEOUT_SECONDS: Final = 2.0


class LyingPeer(SimulatedPeer):
    """See the module's docstring."""

    def __init__(self, cluster: SimulatedCluster, number: int, memory_bytes: int) -> None:
        super().__init__(cluster, number, memory_bytes)
        self.lies: list[Behaviour] = []
        self.lies_told = 0

    @property
    def victims(self) -> list[SimulatedPeer]:
        """The other peers that run."""
        return [peer for peer in self.cluster.running if peer is not self]

    # --- what is added -----------------------------------------------------------------------

    def tell(self, peer: SimulatedPeer, kind: ControlKind, request: Message) -> None:
        """Send a control request that no lie changes any more."""
        self.lies_told += 1
        super().send_control(
            peer.signer.peer_id, kind, request, TOLD_TIMEOUT_SECONDS, lambda reply: None
        )

    def tell_data(self, peer: SimulatedPeer, kind: DataKind, request: Message) -> None:
        """Send a data request that no lie changes any more."""
        self.lies_told += 1
        super().send_data(peer.signer.peer_id, kind, request, TOLD_TIMEOUT_SECONDS, lambda reply: None)

    # --- what is changed ---------------------------------------------------------------------

    def send_control(
        self,
        target: PeerId,
        kind: int,
        request: Message,
        timeout_seconds: float,
        finish: Callable[[Any], None],
    ) -> None:
        self._send(super().send_control, target, kind, request, timeout_seconds, finish)

    def send_data(
        self,
        target: PeerId,
        kind: int,
        request: Message,
        timeout_seconds: float,
        finish: Callable[[Any], None],
    ) -> None:
        self._send(super().send_data, target, kind, request, timeout_seconds, finish)

    def _send(
        self,
        send: Callable[[PeerId, int, Message, float, Callable[[Any], None]], None],
        target: PeerId,
        kind: int,
        request: Message,
        timeout_seconds: float,
        finish: Callable[[Any], None],
    ) -> None:
        changed = self._changed(request, target)
        if changed is not None:
            send(target, kind, changed, timeout_seconds, finish)
            return
        life = self.life

        def end() -> None:
            if life == self.life and self.core is not None:
                finish(None)
                self.settle()

        self.cluster.kernel.after(timeout_seconds, end)

    def serve_control(
        self, sender: PeerId, kind: int, request: Message, reply: Callable[[Message], None]
    ) -> None:
        def send(answer: Message) -> None:
            changed = self._changed(answer, sender)
            if changed is not None:
                reply(changed)

        self._note(sender, kind, request)
        assert kind in CONTROL_REPLIES
        super().serve_control(sender, kind, request, send)

    def serve_data(
        self, sender: PeerId, kind: int, request: Message, reply: Callable[[Any], None]
    ) -> None:
        def send(answer: Message) -> None:
            changed = self._changed(answer, sender)
            if changed is not None:
                told = Failure if isinstance(changed, Failure) else DATA_REPLIES[DataKind(kind)]
                reply(decode_body(told, encode_body(changed)))

        self._note(sender, kind, request)
        super().serve_data(sender, kind, request, send)

    def sending_seconds(self, size_bytes: int) -> float:
        return max((lie.sending_seconds(size_bytes) for lie in self.lies), default=0.0)

    def look(self, digest: bytes) -> ObjectReply | None:
        shown = super().look(digest)
        for lie in self.lies if self.core is not None else ():
            shown = lie.shown(digest, shown)
        return shown

    def snapshot_of(self, member: Member) -> tuple[SnapshotHead, bytes] | None:
        truth = super().snapshot_of(member)
        if truth is not None and self.core is not None and member == self.core.member:
            for lie in self.lies:
                truth = lie.snapshot(truth)
        return truth

    def _execute(self, effect: object) -> None:
        if not isinstance(effect, Duplicate):  # its own forged records, told to it by others
            super()._execute(effect)

    def _note(self, sender: PeerId, kind: int, request: Message) -> None:
        for lie in self.lies:
            lie.heard(sender, kind, request)

    def _changed(self, message: Message, to: PeerId) -> Message | None:
        if not self.lies:
            return message
        changed: Message | None = self._with_own_record(message)
        for lie in self.lies:
            if changed is not None:
                changed = lie.told(changed, to)
        self.lies_told += changed is not message
        return changed

    def _with_own_record(self, message: Message) -> Message:
        if isinstance(message, Delta):
            records = [self.forged(signed) for signed in message.records]
            return (
                message
                if records == message.records
                else msgspec.structs.replace(message, records=records)
            )
        if isinstance(message, ExchangeReply):
            delta = self._with_own_record(message.delta)
            return message if delta is message.delta else msgspec.structs.replace(message, delta=delta)
        if isinstance(message, Leave):
            return Leave(self.forged(message.record))
        return message

    def forged(self, signed: SignedRecord) -> SignedRecord:
        """The liar's own record, changed and signed again; those of others as they are."""
        record = read_peer_record(signed)
        if record.peer_id != self.signer.peer_id:
            return signed
        changed = record
        for lie in self.lies:
            changed = lie.record(changed)
        return signed if changed is record else sign_peer_record(changed, self.signer)
