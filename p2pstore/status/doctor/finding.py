"""The finding of a check, with cause and cure. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from p2pstore.objects import printable


class Status(StrEnum):
    """How bad it is. WARNING: works, but worse than it could, or might not for long."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"
    SKIPPED = "skipped"


class Failure(StrEnum):
    """Kind of breakage; decides the command's exit status."""

    NONE = ""
    BROKEN = "broken"
    UNREACHABLE = "unreachable"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `value` is what was read; `cause` and `cure` say what is wrong and what to do
    about it, and for a skipped check `cause` says why. `measured` are numbers for programs, each with its unit
    in its name."""

    name: str
    status: Status
    value: str = ""
    cause: str = ""
    cure: str = ""
    failure: Failure = Failure.NONE
    measured: tuple[tuple[str, float], ...] = ()

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "status": str(self.status),
            "value": self.value,
            "cause": self.cause,
            "cure": self.cure,
            **({"failure": str(self.failure)} if self.failure else {}),
            **({"measured": dict(self.measured)} if self.measured else {}),
        }


def fine(name: str, value: str, **measured: float) -> Finding:
    """Nothing is wrong."""
    return Finding(name, Status.OK, value, measured=tuple(measured.items()))


def warning(name: str, value: str, cause: str, cure: str, **measured: float) -> Finding:
    """Something could be better."""
    return Finding(name, Status.WARNING, value, cause, cure, measured=tuple(measured.items()))


def broken(name: str, value: str, cause: str, cure: str, failure: Failure = Failure.BROKEN) -> Finding:
    """Something does not work."""
    return Finding(name, Status.BROKEN, value, cause, cure, failure)


def skipped(name: str, cause: str) -> Finding:
    """The check could not be made, and why."""
    return Finding(name, Status.SKIPPED, cause=cause)


def summary(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings there are of each status."""
    counted = Counter(finding.status for finding in findings)
    return {str(status): counted[status] for status in Status}


def worst_failure(findings: Iterable[Finding]) -> Failure:
    """The first breakage: later ones mostly follow from it."""
    return next(
        (finding.failure for finding in findings if finding.status is Status.BROKEN), Failure.NONE
    )


MAX_NAME_LETTERS: Final = 80
MAX_KEY_LETTERS: Final = 200
MAX_TEXT_LETTERS: Final = 400


def shown(text: str, letters: int = MAX_NAME_LETTERS) -> str:
    """Printable text of at most `letters`; an ellipsis ends longer text."""
    visible = printable(text[: letters + 1])
    return visible if len(visible) <= letters else visible[: letters - 1] + "\u2026"
