"""An owner in a process of its own, whose memory goes when it is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import trio

from p2pstore.objects import MIB
from p2pstore.transfer.transport import RemoteCopy
from tests.contract.test_transport import OWNER, grant, pattern, put, segment_of
from tests.rdma.harness import RdmaHarness

END_SECONDS = 30.0


class Owner:
    """A child process with one object, that lets others read it by RDMA."""

    def __init__(self, process: BaseProcess, told: Connection) -> None:
        self._process = process
        self._told = told

    @classmethod
    @contextlib.contextmanager
    def forked(cls, length_bytes: int) -> Iterator[Owner]:
        """Not under trio: the child begins with what is here."""
        fork = multiprocessing.get_context("fork")
        told, tell = fork.Pipe(duplex=False)
        process = fork.Process(target=trio.run, args=(_own, length_bytes, tell))
        process.start()
        tell.close()
        try:
            yield cls(process, told)
        finally:
            told.close()
            process.kill()
            process.join(END_SECONDS)
            process.close()

    def copy(self) -> tuple[RemoteCopy, bytes]:
        """The object's copy and digest. Blocks until it is there."""
        address, digest, slot = self._told.recv()
        copy = RemoteCopy(OWNER.peer_id, (address,), grant(), member=1, slot=slot, rdma=True)
        return copy, digest

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()

    def exit_status(self) -> int | None:
        """Of the process that was killed. Blocks until it has ended."""
        self._process.join(END_SECONDS)
        return self._process.exitcode


async def _own(length_bytes: int, tell: Connection) -> None:
    segment = segment_of(length_bytes + 8 * MIB)
    digest = put(segment, "key", pattern(length_bytes))
    async with RdmaHarness.open_rdma(segment) as harness:
        tell.send((harness.address, digest, harness.copy(digest).slot))
        await trio.sleep_forever()
