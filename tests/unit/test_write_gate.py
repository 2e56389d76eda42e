"""How many writes go on at a time, beside reads and without."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from p2pstore.ssd_tier.disk import QUIET_SECONDS, WRITES_BESIDE_READS, WriteGate

PATIENCE_SECONDS = 20.0


class Writers:
    """A number of threads that write until they are told to end."""

    def __init__(self, gate: WriteGate, count: int) -> None:
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self._gate = gate
        self._threads = [threading.Thread(target=self._write) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        with self._gate.writing():
            self.began.release()
            assert self.may_end.acquire(timeout=PATIENCE_SECONDS)

    def join(self) -> None:
        self.may_end.release(len(self._threads))
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()

    def wait_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.began.acquire(timeout=PATIENCE_SECONDS)

    def has_another_begun(self) -> bool:
        return self.began.acquire(timeout=3 * QUIET_SECONDS)


@contextmanager
def writers(gate: WriteGate, count: int) -> Iterator[Writers]:
    them = Writers(gate, count)
    try:
        yield them
    finally:
        them.join()


def test_without_reads_all_write_at_once() -> None:
    with writers(WriteGate(), 8) as them:
        them.wait_begun(8)


def test_beside_reads_few_do_and_the_next_when_one_has_ended() -> None:
    now = 100.0
    gate = WriteGate(lambda: now)
    gate.read()
    assert gate.is_reading
    with writers(gate, WRITES_BESIDE_READS + 2) as them:
        them.wait_begun(WRITES_BESIDE_READS)
        assert not them.has_another_begun()
        them.may_end.release()
        them.wait_begun(1)
        assert not them.has_another_begun()


def test_when_reads_have_ended_all_write() -> None:
    now = [100.0]
    gate = WriteGate(lambda: now[0])
    gate.read()
    with writers(gate, 8) as them:
        them.wait_begun(WRITES_BESIDE_READS)
        now[0] += 1.0
        them.wait_begun(8 - WRITES_BESIDE_READS)
    assert not gate.is_reading


def test_nobody_waits_at_an_open_gate() -> None:
    gate = WriteGate(lambda: 100.0)
    gate.read()
    with writers(gate, 8) as them:
        them.wait_begun(WRITES_BESIDE_READS)
        gate.open_for_good()
        them.wait_begun(8 - WRITES_BESIDE_READS)
