"""Garbage collections of a process that is a peer: none may hold the event loop for long. Shell.

A full collection looks at every container, about 1 us each: a peer with a million objects would stand still for a
second whenever there are a quarter more. So what a long collection has found alive is left out of all later ones
(`gc.freeze`). It is freed as before when nothing refers to it; only cycles in it are not found any more, such as a
connection that was open then. Short collections leave nothing out: a peer with few objects collects as any program.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LONG_SECONDS: Final = 0.003
"""A full collection that takes longer, as with some 5,000 objects, is the last one for what it has looked at."""
_FULL: Final = 2


class _FreezeAfterLong:
    """A callback of the collector."""

    def __init__(self) -> None:
        self._began_at = 0.0

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._began_at = time.perf_counter()
        elif time.perf_counter() - self._began_at > LONG_SECONDS:
            gc.freeze()


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep full collections short within this block. Leaves the 100,000 objects of the imported modules out as well:
    with them a full collection takes 100 ms, and comes only when 25,000 objects have survived since the last."""
    gc.freeze()
    gc.collect()  # else the next one waits until there is a quarter of what was frozen
    callback = _FreezeAfterLong()
    gc.callbacks.append(callback)
    try:
        yield
    finally:
        gc.callbacks.remove(callback)
