"""Runs checks one after the other, none longer than its deadline. Shell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from p2pstore.errors import P2PStoreError, PeerNotInstalled
from p2pstore.status.doctor.finding import Finding, broken, skipped, warning

CHECK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """A reading and its judgement. `run` may block; what it cannot read it raises as `OSError`."""

    name: str
    run: Callable[[], Sequence[Finding]]
    seconds: float = CHECK_SECONDS


def run_check(check: Check) -> list[Finding]:
    """The check's findings. Never raises, and never takes longer than `check.seconds`.

    The check runs in a thread that is left behind when it hangs: nothing else helps against a file system
    whose server is gone. Being a daemon, it does not keep the process alive.
    """
    outcome: list[list[Finding]] = []

    def run() -> None:
        outcome.append(_guarded(check))

    thread = threading.Thread(target=run, name=f"doctor: {check.name}", daemon=True)
    thread.start()
    thread.join(check.seconds)
    if outcome:
        return outcome[0]
    return [
        warning(
            check.name,
            "",
            f"no answer within {check.seconds:g} s: a device or a file system hangs",
            "look at `dmesg`, and for mounts whose server is gone",
        )
    ]


def _guarded(check: Check) -> list[Finding]:
    try:
        return list(check.run())
    except PeerNotInstalled as error:  # an environment of clients is whole without a peer
        return [skipped(check.name, str(error))]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return [skipped(check.name, f"{where}{error.strerror or error}")]
    except P2PStoreError as error:
        return [broken(check.name, "", str(error), "see above")]
    except Exception as error:
        return [
            broken(
                check.name,
                "",
                f"the check itself failed ({type(error).__name__}: {error})",
                "please report it",
            )
        ]
