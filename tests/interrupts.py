"""Calls that are interrupted, as by Ctrl-C, at each of their lines, one after the other."""

import dis
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class Interrupted:
    """Calls a function with `KeyboardInterrupt` before one line of these modules, as Ctrl-C would, or where one of
    their calls has returned and nothing was done with that yet. `struck`: whether there was such a place; `where` it
    was."""

    def __init__(self, modules: Sequence[ModuleType], place: int, *, after_calls: bool = False) -> None:
        self._files = {module.__file__ for module in modules}
        self._left = place
        self._after_calls = after_calls
        self._last: tuple[int, str] = 0, ""
        """The last opcode, and in which frame: by number, as frames that are held on to hold their variables."""
        self.struck = False
        self.where = ""

    def call(self, function: Callable[[], object]) -> None:
        """Call it; the interrupt goes no further."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = self._after_calls  # Python 3.12 looks at it in `settrace`
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
        if frame.f_code.co_filename in self._files and self._is_place(frame, event):
            if not self._left:
                self.struck = True
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1
        return self._trace

    def _is_place(self, frame: FrameType, event: str) -> bool:
        if not self._after_calls:
            # No signal is looked at in a NOP (`try:`), which in a `with` may belong to neither.
            return event == "line" and _opcode(frame) != "NOP" and not _is_with(frame)
        frame.f_trace_opcodes = True
        if event != "opcode":
            return False
        (of, opcode), self._last = self._last, (id(frame), _opcode(frame))
        return of == id(frame) and opcode in _CALLS and not _is_with(frame)


_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
"""The interpreter looks for signals when they have returned."""


def _opcode(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _is_with(frame: FrameType) -> bool:
    """Whether the line is a `with`, which is traced at its end as well: there no signal is looked at before the lock
    is released."""
    if frame.f_lineno is None:  # what the compiler added belongs to no line
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "async with "))


def interrupted_at_each_line(function: Callable[[], object], *modules: ModuleType) -> Iterator[str]:
    """Call a function again and again, each time interrupted one line of these modules later, until it ends before
    that. After each call: where it was interrupted."""
    return _interrupted(function, modules, after_calls=False)


def interrupted_after_each_call(function: Callable[[], object], *modules: ModuleType) -> Iterator[str]:
    """The same, each time one call later that these modules make."""
    return _interrupted(function, modules, after_calls=True)


def _interrupted(
    function: Callable[[], object], modules: Sequence[ModuleType], *, after_calls: bool
) -> Iterator[str]:
    place = 0
    while True:
        interrupted = Interrupted(modules, place, after_calls=after_calls)
        interrupted.call(function)
        if not interrupted.struck:
            return
        yield interrupted.where
        place += 1
