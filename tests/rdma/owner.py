"""An owner in a process of its own, whose memory goes when it is killed. For tests and `bench_rdma`."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import trio

from p2pstore.objects import MIB
from p2pstore.transfer.transport import RemoteCopy
from tests.contract.test_transport import OWNER, grant, pattern, put, segment_of
from tests.rdma.harness import RdmaHarness

END_SECONDS = 30.0


class Owner:
    """A child process with objects, that lets others read them by RDMA."""

    def __init__(self, process: BaseProcess, told: Connection) -> None:
        self._process = process
        self._told = told

    @classmethod
    @contextlib.contextmanager
    def forked(cls, *lengths_bytes: int) -> Iterator[Owner]:
        """An owner of one object of each length. Not under trio: the child begins with what is here."""
        fork = multiprocessing.get_context("fork")
        told, tell = fork.Pipe(duplex=False)
        process = fork.Process(target=trio.run, args=(_own, lengths_bytes, tell))
        process.start()
        tell.close()
        try:
            yield cls(process, told)
        finally:
            told.close()
            process.kill()
            process.join(END_SECONDS)
            process.close()

    def copies(self) -> list[tuple[RemoteCopy, bytes]]:
        """Each object's copy and digest, in the order of the lengths. Blocks until they are there; once."""
        address, objects = self._told.recv()
        return [
            (RemoteCopy(OWNER.peer_id, (address,), grant(), member=1, slot=slot, rdma=True), digest)
            for digest, slot in objects
        ]

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()

    def exit_status(self) -> int | None:
        """Of the process that was killed. Blocks until it has ended."""
        self._process.join(END_SECONDS)
        return self._process.exitcode


async def _own(lengths_bytes: Sequence[int], tell: Connection) -> None:
    segment = segment_of(sum(lengths_bytes) + 8 * MIB)
    digests = [
        put(segment, f"key {number}", pattern(length)) for number, length in enumerate(lengths_bytes)
    ]
    async with RdmaHarness.open_rdma(segment) as harness:
        objects = [(digest, harness.copy(digest).slot) for digest in digests]
        tell.send((harness.address, objects))
        await trio.sleep_forever()
