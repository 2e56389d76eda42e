"""The sources of an older version, out of this repository's history. For tests."""

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 60


def sources_of(commit: str, folder: Path) -> Path:
    """`p2pstore` and `cli` of that commit, in `folder`; they run with the libraries of this version. Skips the test
    where the history is not here, unless P2PSTORE_REQUIRE_HISTORY is set."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "p2pstore", "cli"],
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    if archive.returncode and not os.environ.get("P2PSTORE_REQUIRE_HISTORY"):
        pytest.skip(f"commit {commit} is not here: {archive.stderr.decode().strip()}")
    assert not archive.returncode, archive.stderr.decode()
    command = ["tar", "-x", "-C", str(folder)]
    subprocess.run(command, input=archive.stdout, timeout=SECONDS, check=True)
    return folder
