"""Signals that end a command only where it can be ended without leaving something behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final

ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, Ctrl-C, SIGTERM and SIGHUP end what runs inside `allowed`, and only that.

    Elsewhere (starting a process, cleaning up) a signal is remembered, and raised at the next place
    that allows it: `KeyboardInterrupt` for Ctrl-C, `SystemExit` with status 128 + n for others.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        self._previous = {each: signal.signal(each, self._handle) for each in ENDING_SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is None:
            self._raise_pending()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending = number
        if self._allowed:
            self._raise_pending()

    def _raise_pending(self) -> None:
        number, self._pending = self._pending, None
        if number is None:
            return
        self._allowed = False  # whoever cleans up now is not interrupted again
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Signals may interrupt the body."""
        self._allowed = True
        try:
            self._raise_pending()
            yield
        finally:
            self._allowed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside `allowed`: signals wait until the end of the body."""
        self._allowed = False
        yield
        self._allowed = True
        self._raise_pending()
