"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Have Ctrl-C end this process and those that it starts: a shell that started the tests in the background, as some
    builders do, has it ignored, and each process hands that on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
