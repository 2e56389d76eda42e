"""One real peer process of its own. For tests."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from p2pstore.runtime.linux import read_line

SECONDS: Final = 60.0


@contextlib.contextmanager
def peer_process(
    folder: Path, sources: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A peer, and its socket. `sources`: of another version than this checkout's."""
    path = str(folder / "s")
    command = [sys.executable, "-m", "mooncake_p2p.tied", str(os.getpid()), "join", "--name", "p"]
    command += ["--memory", "16MiB", "--listen", "127.0.0.1:0", "--socket", path]
    command += ["--state-dir", str(folder / "state"), "--metrics", "127.0.0.1:0"]
    with (folder / "log").open("wb") as log:
        paths = {} if sources is None else {"PYTHONPATH": f"{sources}:{sources / 'cli'}"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, cwd=folder, env={**os.environ, **paths}
        )
    try:
        assert process.stdout is not None
        line = read_line(process.stdout, time.monotonic() + SECONDS)
        assert line.startswith(b"ready "), (folder / "log").read_text()
        yield process, path
    finally:
        process.terminate()
        process.wait(SECONDS)
        assert process.stdout is not None
        process.stdout.close()
