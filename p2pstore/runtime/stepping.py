"""Work in steps, so that nothing holds an event loop for long. Pure.

Work whose length depends on its input is a generator that yields between two steps of at most a few hundred
microseconds. It is the same work whether it runs in one go (`run_through`) or gives others their turn (`turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""Closing it takes back what it holds and has not returned."""


def run_through(steps: Steps[Result]) -> Result:
    """All steps in one go. Errors are those of the work."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def call_now(work: Callable[[], None]) -> None:
    """Put nothing off."""
    work()
