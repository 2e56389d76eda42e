"""Completion with the Tab key: the scripts for shells, what they ask for, and keys.

typer knows how to talk to shells; here is what it needs to do so for a command of its own main.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from mooncake_p2p.main import COMPLETION_VARIABLE, PROGRAM

KEY_SECONDS: Final = 0.3
MAX_KEYS: Final = 100


def script(shell: str) -> str:
    """What to evaluate in `shell` (bash, zsh, fish) at its start."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # as documented

    return get_completion_script(prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE, shell=shell)


def answer(command: Any, instruction: str) -> int:
    """Print the completions that a shell's script asked for. Returns the exit status."""
    from typer.completion import completion_init, shell_complete  # type: ignore[attr-defined]

    completion_init()
    status: int = shell_complete(command, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    return status


def keys_beginning(incomplete: str, socket: str | None, namespace: str) -> list[str]:
    """Keys that a word on the command line may become: those of the local peer, then those of all peers
    as far as they answer in time. A key that the shell would take apart is left out.

    Never fails: no peer, or a slow one, means no keys.
    """
    from p2pstore import blocking

    found: dict[str, None] = {}
    try:
        with (
            _time_limit(KEY_SECONDS),
            blocking.connect(socket, namespace=namespace, timeout=KEY_SECONDS) as client,
        ):
            for local in (True, False):
                page = client.list_keys(incomplete, limit=MAX_KEYS, local=local)
                found |= dict.fromkeys(entry.key for entry in page.keys)
    except Exception:  # whatever it was: a message would land in the middle of the typed command
        return _typable(found)
    return _typable(found)


def _typable(keys: dict[str, None]) -> list[str]:
    return sorted(key for key in keys if shlex.quote(key) == key)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in the body when it takes longer, whatever it waits for."""

    def stop(number: int, frame: object) -> NoReturn:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
