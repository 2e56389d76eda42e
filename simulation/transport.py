"""Reading another simulated peer's memory, in virtual time and without a lock: the simulator's `Transport`.

Slot and trailer first, then the payload in small pieces, each at another moment, so that eviction and reuse
happen under the reader and only the checks of `p2pstore.transfer` stand between it and a wrong byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

from p2pstore.objects import chunk_bounds
from p2pstore.transfer.data_messages import ObjectReply, ObjectStatus
from p2pstore.transfer.failover import PullFailed
from p2pstore.transfer.reading.arriving import Destination, checked_view, resume
from p2pstore.transfer.transport import Pulled, RemoteCopy, check_object
from p2pstore.wire import Code
from simulation.network import FaultyNetwork
from simulation.tasks import Answer, sleep

T = TypeVar("T")

PIECES: Final = 4
"""In which each chunk is read, so that even the smallest object may change under its reader."""
SMALL_BYTES: Final = 64
"""The size of a message without payload."""
RESEND_SECONDS: Final = 0.25
"""A lost request or answer costs this, as it does below TCP and RDMA, and not the whole read."""


class Holder(Protocol):
    """A host whose memory is read."""

    number: int
    life: int
    """Another one whenever its process ends or begins."""
    memory: memoryview

    def sending_seconds(self, size_bytes: int) -> float:
        """How long it takes to send an answer of that size, beyond the network's time; infinite for never."""
        ...

    def look(self, digest: bytes) -> ObjectReply | None:
        """What the process says of an object: its slot and trailer. None when no process runs."""
        ...


class SimulatedTransport:
    """Reads over `network` as host `reader`. The pieces of an object are spread over `read_seconds`, and each
    may take `progress_seconds`."""

    name = "simulated"

    def __init__(
        self,
        network: FaultyNetwork,
        reader: int,
        holders: Mapping[bytes, Holder],
        read_seconds: float,
        progress_seconds: float,
    ) -> None:
        self._network = network
        self._reader = reader
        self._holders = holders
        self._read_seconds = read_seconds
        self._progress_seconds = progress_seconds

    def why_not(self, copy: RemoteCopy) -> str:
        is_part = copy.peer_id in self._holders
        return "" if is_part else "the holder is not part of this simulation"

    def cost(self, copy: RemoteCopy) -> float:
        return 1.0

    async def pull(self, copy: RemoteCopy, digest: bytes, destination: Destination) -> Pulled:
        holder = self._holders[copy.peer_id]
        seconds = min(copy.answer_seconds, self._progress_seconds)
        life, reply = await self._look(holder, digest, seconds)
        slot, trailer = check_object(reply.slot, reply.trailer, digest)
        if not slot.length:
            checked_view(destination, slot, trailer)
            return Pulled(slot, trailer, 0, self.name)
        arriving = resume(destination, slot, trailer)
        bounds = list(chunk_bounds(slot.length))
        pause_seconds = self._read_seconds / (PIECES * len(bounds))
        try:
            while not arriving.complete:
                for number in arriving.take():
                    for first, last in _pieces(*bounds[number]):
                        await sleep(pause_seconds)
                        where = slice(slot.offset + first, slot.offset + last)
                        arriving.view[first:last] = await self._read(holder, life, where, seconds)
                    arriving.verify(number)
        finally:
            arriving.leave()
        return Pulled(slot, trailer, slot.length, self.name)

    async def _look(self, holder: Holder, digest: bytes, seconds: float) -> tuple[int, ObjectReply]:
        """What the holder's process says of the object, and in which life it says so."""

        def look() -> tuple[int, ObjectReply] | None:
            reply = holder.look(digest)
            return None if reply is None else (holder.life, reply)

        life, reply = await self._ask(holder, look, SMALL_BYTES, seconds)
        if reply.status == ObjectStatus.NOT_FOUND:
            raise PullFailed(
                Code.NO_SUCH_KEY,
                "the holder does not have the object any more",
                incarnation=reply.incarnation,
                sequence=reply.sequence,
            )
        return life, reply

    async def _read(self, holder: Holder, life: int, where: slice, seconds: float) -> bytes:
        """A piece of the holder's memory as it is when the request arrives."""

        def read() -> bytes | None:
            return bytes(holder.memory[where]) if holder.life == life else None

        return await self._ask(holder, read, where.stop - where.start, seconds)

    async def _ask(
        self, holder: Holder, find: Callable[[], T | None], answer_bytes: int, seconds: float
    ) -> T:
        """What `find` sees over there when the request arrives: None when the process is gone.

        Raises `PullFailed`: UNAVAILABLE for that, DEADLINE_EXCEEDED when no answer comes.
        """
        kernel, answer = self._network.kernel, Answer[T | None]()

        def arrive() -> None:
            found = find()

            def send() -> None:
                self._network.send(
                    holder.number, self._reader, answer_bytes, lambda: answer.bring(found)
                )

            pause_seconds = holder.sending_seconds(answer_bytes)
            if not pause_seconds:
                send()
            elif pause_seconds < math.inf:
                kernel.after(pause_seconds, send)

        give_up_at = kernel.now + seconds
        while kernel.now < give_up_at:
            self._network.send(self._reader, holder.number, SMALL_BYTES, arrive)
            if await answer.wait(min(RESEND_SECONDS, give_up_at - kernel.now)):
                break
        else:
            raise PullFailed(
                Code.DEADLINE_EXCEEDED, f"the holder did not answer within {seconds:g} s", retriable=True
            )
        if answer.value is None:
            raise PullFailed(Code.UNAVAILABLE, "the holder's process has ended", retriable=True)
        return answer.value


def _pieces(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The bounds of the pieces in which a chunk is read."""
    step = -(-(end - start) // PIECES)
    for first in range(start, end, step):
        yield first, min(first + step, end)
