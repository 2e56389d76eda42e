"""One program of `scripts/bench_vs_mooncake`: a store behind Mooncake's API, told by lines of JSON what to do.

The same file runs in Mooncake's environment and in ours, and imports nothing but numpy and the store. Each line of
standard input is `{"do": NAME, ...}`, each line of standard output the answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Times = list[float]
FULL = (-200, -201)
"""No room, or none that could be had just now."""
PUT_SECONDS = 20.0


class Workload:
    """A store and the memory that it reads into."""

    def __init__(self, module: str) -> None:
        self._module = importlib.import_module(module)
        self._store: Any = None
        self._memory = np.zeros(0, np.uint8)
        self._number = 0
        self._prefers: dict[str, str] = {}

    def setup(self, arguments: list[Any], memory: int, *, prefers_own: bool = False) -> None:
        """Set the store up, with `memory` registered bytes to put from and get into. `prefers_own`: puts go to the
        program's own segment."""
        self._store = self._module.MooncakeDistributedStore()
        code = self._store.setup(*arguments)
        assert code == 0, f"setup: {code}"
        self._memory = _content(memory)
        assert self._store.register_buffer(self._address, memory) == 0
        if prefers_own:
            self._prefers["preferred_segment"] = self._store.get_hostname()

    def _config(self, replicas: int = 1) -> Any:
        config = self._module.ReplicateConfig()
        config.replica_num = replicas
        for name, value in self._prefers.items():
            setattr(config, name, value)
        return config

    @property
    def _address(self) -> int:
        return int(self._memory.ctypes.data)

    def fill(self, prefix: str, count: int, size: int, replicas: int = 1) -> int:
        config = self._config(replicas)
        self._memory[:size] = _content(size)  # what was read lies there
        for number in range(count):
            self._store.put_from(f"{prefix}{number}", self._address, size, config)
        return sum(self._store.batch_is_exist([f"{prefix}{number}" for number in range(count)]))

    def overfill(self, prefix: str, count: int, size: int) -> None:
        """Put more than there is room for."""
        config = self._config()
        for number in range(count):
            self._put(f"{prefix}{number}", size, config)

    def _put(self, key: str, size: int, config: Any) -> None:
        """Again while memory is full and nothing was evicted yet."""
        end = time.monotonic() + PUT_SECONDS
        while code := self._store.put_from(key, self._address, size, config):
            if code not in FULL or time.monotonic() > end:
                raise RuntimeError(f"put_from: {code}")
            time.sleep(0.001)

    def remove(self, prefix: str) -> None:
        """Remove the objects that `fill` and `put_from` made."""
        self._store.remove_by_regex(f"^{prefix}", True)

    def measure(
        self,
        call: str,
        prefix: str,
        count: int,
        size: int,
        repeats: int,
        batch: int = 1,
        threads: int = 1,
    ) -> Times:
        """Seconds of each call; with threads, those of all of them together, per call."""
        actions = [
            self._action(call, prefix, count, size, batch, part, threads) for part in range(threads)
        ]
        if threads == 1:
            return _timed(actions[0], repeats)
        began = threading.Barrier(threads + 1)
        running = [
            threading.Thread(
                target=lambda action=action: (began.wait(), [action(n) for n in range(repeats)])
            )
            for action in actions
        ]
        for each in running:
            each.start()
        began.wait()
        start = time.perf_counter()
        for each in running:
            each.join()
        return [(time.perf_counter() - start) / (repeats * threads)]

    def _action(
        self, call: str, prefix: str, count: int, size: int, batch: int, part: int, parts: int
    ) -> Callable[[int], None]:
        store, room = self._store, len(self._memory) // parts
        address = self._address + part * room
        keys = [f"{prefix}{number}" for number in range(count)]
        groups = [keys[at : at + batch] for at in range(0, count - batch + 1, batch)]
        pointers = [address + number * size for number in range(batch)]
        sizes = [size] * batch

        def batch_get_into(number: int) -> None:
            got = store.batch_get_into(groups[number % len(groups)], pointers, sizes)
            assert got == sizes, got[:3]

        def get_batch(number: int) -> None:
            got = store.get_batch(groups[number % len(groups)])
            assert [len(value) for value in got] == sizes

        def batch_get_buffer(number: int) -> None:
            got = store.batch_get_buffer(groups[number % len(groups)])
            assert [len(value) for value in got] == sizes

        def get_into(number: int) -> None:
            got = store.get_into(keys[(number + part) % count], address, size)
            assert got == size, got

        def get(number: int) -> None:
            assert len(store.get(keys[number % count])) == size

        def get_buffer(number: int) -> None:
            assert len(store.get_buffer(keys[number % count])) == size

        config = self._config()

        def put_from(number: int) -> None:
            self._number += 1
            self._put(f"{prefix}put {self._number}", size, config)

        def batch_put_from(number: int) -> None:
            self._number += 1
            named = [f"{prefix}put {self._number} {each}" for each in range(batch)]
            end = time.monotonic() + PUT_SECONDS
            while named:
                room = pointers[: len(named)], sizes[: len(named)]
                codes = store.batch_put_from(named, *room, config)
                named = [key for key, code in zip(named, codes, strict=True) if code]
                if named and time.monotonic() > end:
                    raise RuntimeError(f"batch_put_from: {codes}")

        def is_exist(number: int) -> None:
            assert store.is_exist(keys[number % count]) == 1

        def is_absent(number: int) -> None:
            assert store.is_exist("nobody has this") == 0

        def batch_is_exist(number: int) -> None:
            assert sum(store.batch_is_exist(keys)) == count

        action: Callable[[int], None] = locals()[call]
        return action

    def check(self, prefix: str, size: int) -> bool:
        """Whether an object comes back as it was put, byte by byte."""
        self._memory[:size] = 0
        got = self._store.get_into(f"{prefix}0", self._address, size)
        return bool(got == size and (self._memory[:size] == _content(size)).all())

    def wait_for(self, prefix: str, size: int, seconds: float) -> bool:
        """`check`, again and again until it is so."""
        end = time.monotonic() + seconds
        while not self.check(prefix, size):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def watch(self, prefix: str, count: int, size: int, seconds: float) -> dict[str, float]:
        """Read without a pause: how many gets failed, how long the longest time without one that worked was, and until
        when `is_exist` said of a key that could not be read that it is there."""
        end = time.monotonic() + seconds
        worked = failed = 0
        last = time.monotonic()
        gap = wrong = 0.0
        while time.monotonic() < end:
            key = f"{prefix}{(worked + failed) % count}"
            if self._store.get_into(key, self._address, size) == size:
                worked += 1
                gap, last = max(gap, time.monotonic() - last), time.monotonic()
            else:
                failed += 1
                if self._store.is_exist(key) == 1:
                    wrong = time.monotonic() - (end - seconds)
        return {"worked": worked, "failed": failed, "longest_gap": gap, "wrong_until": wrong}

    def close(self) -> None:
        self._store.close()


def _content(size: int) -> Any:
    """What every object begins with: the same in every program."""
    block = np.random.default_rng(0).integers(0, 256, 2**20 + 7, np.uint8)
    return np.resize(block, size)


def _timed(action: Callable[[int], None], repeats: int) -> Times:
    action(0)
    taken = []
    for number in range(1, repeats + 1):
        start = time.perf_counter()
        action(number)
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    """`mooncake_workload.py MODULE`: do what is asked until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the store prints is no answer
    workload = Workload(sys.argv[1])
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = {"answer": getattr(workload, task.pop("do"))(**task)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
