"""Calls that are interrupted, as by Ctrl-C, at each of their lines, one after the other."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class Interrupted:
    """Calls a function with `KeyboardInterrupt` before one line of these modules, as Ctrl-C would. `struck`: whether
    there was such a line; `where` it was."""

    def __init__(self, modules: Sequence[ModuleType], line: int) -> None:
        self._files = {module.__file__ for module in modules}
        self._left = line
        self.struck = False
        self.where = ""

    def call(self, function: Callable[[], object]) -> None:
        """Call it; the interrupt goes no further."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            assert self.struck
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.struck:
            return None
        if event == "line" and frame.f_code.co_filename in self._files and not _is_with(frame):
            if not self._left:
                self.struck = True
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1
        return self._trace


def _is_with(frame: FrameType) -> bool:
    """Whether the line is a `with`, which is traced at its end as well: there no signal is looked at before the lock
    is released."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "async with "))


def interrupted_at_each_line(function: Callable[[], object], *modules: ModuleType) -> Iterator[str]:
    """Call a function again and again, each time interrupted one line of these modules later, until it ends before
    that. After each call: where it was interrupted."""
    line = 0
    while True:
        interrupted = Interrupted(modules, line)
        interrupted.call(function)
        if not interrupted.struck:
            return
        yield interrupted.where
        line += 1
