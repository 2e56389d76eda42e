"""Coroutines in virtual time: code written for real drivers runs on the simulated kernel.

A task goes on in events of its own, never inside the one that woke it. So steps do not nest, and the order of
events alone decides what happens, as everywhere in the simulator: the same seed gives the same run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from simulation.kernel import Kernel

T = TypeVar("T")
Wake = Callable[[], None]
Wait = Callable[[Kernel, Wake], None]
"""How a task waits: this sees to it that it is woken. Only the first call of `Wake` counts."""


class Task(Generic[T]):
    """A coroutine under way: `main()` begins with the next event.

    `on_end` is called when it has returned or raised, and not when it was cancelled.
    """

    def __init__(
        self,
        kernel: Kernel,
        main: Callable[[], Coroutine[Any, Any, T]],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.ended = False
        self._kernel = kernel
        self._main = main
        self._on_end = on_end
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._waits = 0
        self._returned: list[T] = []
        self._error: Exception | None = None
        self._waker()()

    def result(self) -> T:
        """What it returned. Raises what it raised, and `RuntimeError` when there is nothing yet, or it was
        cancelled."""
        if self._error is not None:
            raise self._error
        if not self._returned:
            raise RuntimeError("the task was cancelled" if self.ended else "the task has not ended")
        return self._returned[0]

    def cancel(self) -> None:
        """End it where it waits: its `finally` blocks run now. Nothing when it has ended.

        Raises `RuntimeError` when it waits again instead of ending, and `ValueError` inside of its own step.
        """
        if self.ended:
            return
        if self._coroutine is not None:
            self._coroutine.close()
        self.ended = True

    def _waker(self) -> Wake:
        self._waits += 1
        number = self._waits

        def wake() -> None:
            if number == self._waits:
                self._waits += 1
                self._kernel.after(0.0, self._step)

        return wake

    def _step(self) -> None:
        """Run it to where it waits next, or to its end."""
        if self.ended:
            return
        if self._coroutine is None:
            self._coroutine = self._main()
        try:
            wait: Wait = self._coroutine.send(None)
        except StopIteration as stop:
            self._returned.append(stop.value)
        except Exception as error:
            self._error = error
        else:
            wait(self._kernel, self._waker())
            return
        self.ended = True
        self._on_end()


@types.coroutine
def _waiting(wait: Wait) -> Generator[Wait, None, None]:
    yield wait


async def sleep(seconds: float) -> None:
    """Go on after this much virtual time."""
    await _waiting(lambda kernel, wake: kernel.after(seconds, wake))


class Answer(Generic[T]):
    """What one task waits for and some event brings."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._wake: Wake = lambda: None

    def bring(self, value: T) -> None:
        """Deliver the value. Only the first counts: networks deliver twice."""
        if not self._values:
            self._values.append(value)
            self._wake()

    @property
    def value(self) -> T:
        """The delivered value. Raises `IndexError` before that."""
        return self._values[0]

    async def wait(self, timeout_seconds: float) -> bool:
        """Whether it came within that time."""
        if not self._values:

            def wait(kernel: Kernel, wake: Wake) -> None:
                self._wake = wake
                kernel.after(timeout_seconds, wake)

            await _waiting(wait)
        return bool(self._values)
