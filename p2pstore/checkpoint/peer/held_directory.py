"""A directory that a client opened and passed: what its paths mean here. Shell."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from p2pstore.errors import ConfigError


class HeldDirectory:
    """An own descriptor of it, and a path through that. So it is the directory that its user means, whatever this
    process sees under the same name, and wherever it is moved."""

    def __init__(self, descriptor: int, shown: str) -> None:
        """`shown` is what people call it. Raises `ConfigError` when the descriptor is not that of a directory."""
        if descriptor < 0 or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise ConfigError("no directory came with the request")
        self.shown = shown or "the directory"
        self._descriptor = os.dup(descriptor)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def identity(self) -> tuple[int, int]:
        """The same for all descriptors of one directory."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    @property
    def place(self) -> Path | None:
        """Where this process finds it by its path; None where that leads elsewhere, or nowhere."""
        place = self.path.readlink()
        try:
            found = place.stat()
        except OSError:
            return None
        return place if (found.st_dev, found.st_ino) == self.identity else None

    def again(self) -> HeldDirectory:
        """The same directory, to be closed by somebody else."""
        return HeldDirectory(self._descriptor, self.shown)

    def hand_over(self) -> HeldDirectory:
        """The same descriptor, in the hands of somebody else: `close` here lets go of nothing any more."""
        other = object.__new__(HeldDirectory)
        other.shown, other.path, other._descriptor = self.shown, self.path, self._descriptor
        self._descriptor = -1
        return other

    def say(self, text: str) -> str:
        """What is said of it, in its user's words."""
        return text.replace(str(self.path), self.shown)

    def close(self) -> None:
        """Let go of it; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
