"""Puts into a program's own memory and reads from there, as inference engines do: a part of `bench_vs_mooncake`.

Mooncake copies by memcpy when a put prefers the segment of its own program; that is what a put into the own peer's
memory is beside. Batches go in turns, with keys that were never there before. Memory is empty first, then full, so
that every put evicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from benchmark import Report, cpu_seconds, size_text

from p2pstore.objects import KIB, MIB

BATCHES: Final = ((4 * KIB, 256), (64 * KIB, 256), (MIB, 64), (5 * MIB, 12))
"""Size of an object, and objects of one batch."""
SINGLES: Final = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
WANTED_PUTS: Final = {4 * KIB: ">= 1.0", 64 * KIB: ">= 1.3", MIB: ">= 1.2", 5 * MIB: ">= 1.2"}
WANTED_GETS: Final = {4 * KIB: ">= 1.0", 64 * KIB: ">= 1.3", MIB: ">= 1.1", 5 * MIB: ">= 1.1"}
REPEATS: Final = 4


class Asked(Protocol):
    """A program that does what it is told (`mooncake_workload`)."""

    def ask(self, do: str, **task: Any) -> Any: ...


@dataclass(frozen=True)
class OwnMemory:
    """A program with `segment_bytes` of memory, its own or that of its peer, which is the process `server`."""

    name: str
    program: Asked
    segment_bytes: int
    server: int = 0


@dataclass
class Round:
    """What the calls of one kind took with one side: seconds of each, CPU seconds of the server in all."""

    times: list[float]
    server_seconds: float = 0.0
    calls: int = 0

    def add(self, side: OwnMemory, call: str, task: dict[str, Any]) -> None:
        before = cpu_seconds(side.server) if side.server else 0.0
        times = side.program.ask("measure", call=call, **task)
        self.server_seconds += (cpu_seconds(side.server) if side.server else 0.0) - before
        self.times += times
        self.calls += len(times) + 1  # the first one of each is not timed

    @property
    def median(self) -> float:
        return statistics.median(self.times)


class OwnMemoryBench:
    """Measures the sides in turns, ours first, and reports."""

    def __init__(self, report: Report, sides: Sequence[OwnMemory], rounds: int) -> None:
        self._report = report
        self._sides = sides
        self._rounds = rounds
        self._number = 0

    def run(self) -> None:
        """Empty memory, then full memory: batches, then one by one."""
        self._each_once()
        for size, batch in BATCHES:
            rate = self._batch_puts(size, batch, "empty")
            self._batch_gets(size, batch)
            self._forget()
            self._fill(size)
            full = self._batch_puts(size, batch, "full")
            name = f"own memory, batch_put_from {batch} x {size_text(size)}, full beside empty"
            self._report.add(name, full, "GB/s", "empty memory", rate, ">= 0.8")
            self._forget()
        for size in SINGLES:
            self._puts(size)

    # --- what is measured --------------------------------------------------------------------

    def _batch_puts(self, size: int, batch: int, memory: str) -> float:
        """GB/s of ours."""
        taken = self._turns("batch_put_from", size, batch, forget=memory == "empty")
        name = f"own memory, {memory}, batch_put_from {batch} x {size_text(size)}"
        self._rates(name, size * batch, taken, WANTED_PUTS[size])
        ours = taken[0]
        spent = ours.server_seconds / (ours.calls * batch) * 1e6
        wanted = "<= 15" if memory == "empty" else "<= 25"
        self._report.add(f"{name}: CPU time of the peer, each", spent, "us", wanted=wanted)
        return size * batch / ours.median / 1e9

    def _batch_gets(self, size: int, batch: int) -> None:
        prefix = self._prefix()
        for side in self._sides:
            side.program.ask("fill", prefix=prefix, count=batch, size=size)
            if not side.program.ask("check", prefix=prefix, size=size):
                raise RuntimeError(f"{side.name}: what was read is not what was put")
        taken = self._turns("batch_get_into", size, batch, prefix=prefix)
        name = f"own memory, batch_get_into {batch} x {size_text(size)}"
        self._rates(name, size * batch, taken, WANTED_GETS[size])
        self._forget()

    def _puts(self, size: int) -> None:
        taken = self._turns("put_from", size, 1, forget=True)
        name = f"own memory, put_from {size_text(size)}"
        ours, theirs = taken
        if size < MIB:
            pair = ours.median * 1e6, "us", self._sides[1].name, theirs.median * 1e6
            self._report.add(f"{name}, p50", *pair, "<= 1" if size == 4 * KIB else "")
        else:
            self._rates(name, size, taken, ">= 1.2")

    # --- inside ------------------------------------------------------------------------------

    def _turns(
        self, call: str, size: int, batch: int, prefix: str = "", *, forget: bool = False
    ) -> list[Round]:
        rounds = [Round([]) for _ in self._sides]
        repeats = REPEATS if batch > 1 else max(4, min(60, 32 * MIB // size))
        for _ in range(self._rounds):
            for side, taken in zip(self._sides, rounds, strict=True):
                task = {"prefix": prefix or self._prefix(), "count": batch, "size": size}
                taken.add(side, call, {**task, "batch": batch, "repeats": repeats})
            if forget:
                self._forget()
        return rounds

    def _rates(self, name: str, amount: int, taken: list[Round], wanted: str) -> None:
        ours, theirs = (amount / each.median / 1e9 for each in taken)
        self._report.add(name, ours, "GB/s", self._sides[1].name, theirs, wanted)

    def _each_once(self) -> None:
        """Memory is touched for the first time before anything is measured."""
        self._fill(4 * MIB)
        self._forget()

    def _fill(self, size: int) -> None:
        for side in self._sides:
            count = side.segment_bytes * 5 // 4 // max(size, 64 * KIB)
            side.program.ask("overfill", prefix=self._prefix(), count=count, size=max(size, 64 * KIB))

    def _forget(self) -> None:
        for side in self._sides:
            side.program.ask("remove", prefix="own")

    def _prefix(self) -> str:
        self._number += 1
        return f"own{self._number}/"
