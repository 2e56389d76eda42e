"""Running commands."""

import subprocess
from collections.abc import Sequence
from typing import Any


def ran(command: Sequence[str], seconds: float = 60.0, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended within that time, and what it printed."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **more)
