"""Errors that peers log because of what is done to them; each with the reason for which it is no complaint."""

import re
from typing import Final

KNOWN: Final[tuple[tuple[str, str], ...]] = (
    (r"^Killed$|^Terminated$", "a shell says what was done to the process"),
    (
        r"^error: .*state\.json cannot be written: No space left on device",
        "a peer does not start while its disk is full",
    ),
)
"""(pattern, why)."""


def why_known(line: str) -> str | None:
    """The reason, or None for a line that is a complaint."""
    return next((why for pattern, why in KNOWN if re.search(pattern, line)), None)
