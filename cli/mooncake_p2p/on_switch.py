"""`checkpoint follow --exec`: a command that is run when another version is in use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from mooncake_p2p.output import printable, remark
from p2pstore.errors import ConfigError
from p2pstore.state.folder import read_regular_file, replace_file

RECORD: Final = ".p2pstore/exec"
"""In the directory: the version for which the command was run last, with success."""


class OnSwitch:
    """Runs the command once for each version that is in use; again after a start, when it did not end well."""

    def __init__(self, command: str, name: str, directory: str) -> None:
        self._command = command
        self._name = name
        self._directory = Path(directory).absolute()
        self._record = self._directory / RECORD
        self._ran_for = ""

    def used(self, version: str) -> None:
        """This version is in use. Returns when the command has ended."""
        if not self._ran_for:
            self._ran_for = self._recorded()
        if version == self._ran_for:
            return
        self._ran_for = version
        environment = {
            **os.environ,
            "CHECKPOINT_NAME": self._name,
            "CHECKPOINT_VERSION": version,
            "CHECKPOINT_DIRECTORY": str(self._directory / version),
        }
        # Its output goes to stderr: stdout is for what this command says.
        done = subprocess.run(
            ["/bin/sh", "-c", self._command], env=environment, stdout=2, check=False
        )
        if done.returncode:
            remark(
                f"error: {printable(self._command)}: exit status {done.returncode}, for {version}; it is run again "
                "for the next version, or when this command is started again"
            )
            return
        self._save(version)

    def _recorded(self) -> str:
        try:
            return read_regular_file(self._record).decode("ascii").strip()
        except (OSError, UnicodeDecodeError, ConfigError):
            return ""

    def _save(self, version: str) -> None:
        try:
            replace_file(self._record, f"{version}\n".encode("ascii"))
        except OSError as error:
            remark(
                f"error: {self._record}: {error.strerror}; the next start runs the command again"
            )
