"""docs/first-ten-minutes.md and README.md: every command, in order, in one shell, prints what the page says.

Numbers, identities and times are those of the moment, so they are compared by their kind. Two things are put in place
of the page's: the session's directory for sockets, and ports.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from tests.pages import DOCS, ROOT, Step, blocks, steps
from tests.ports import free_port

PAGE: Final = DOCS / "first-ten-minutes.md"
README: Final = ROOT / "README.md"
COMMAND_SECONDS: Final = 120.0
SESSION_DIRECTORY: Final = "/run/user/1000"
"""As the page has it."""
PROCESS: Final = re.compile(r"runs as process (\d+)")
KINDS: Final = (
    (r"12D3KooW\w+", "ID"),
    (r"\.\.\w{8}\b", "ID"),
    (r"\d+(\.\d+)? (us|ms|s)\b|(?<=\s)-(?=\s)", "TIME"),  # or not measured yet
    (r"\d+(\.\d+)? [KMG]?B/s", "RATE"),
    (r"[\d.,]+(?=\s|$|[^\w.])", "N"),
    (r"\[[#.]+\]", "BAR"),
    (r"\s+", " "),
)


def like(text: str) -> str:
    """The text with its varying parts replaced by words."""
    for pattern, word in KINDS:
        text = re.sub(pattern, word, text)
    return text.strip()


class Shell:
    """A bash that takes one command after the other. What the page names differently here is put in its place."""

    def __init__(self, folder: Path) -> None:
        session = folder / "run"
        session.mkdir()
        self.names = {SESSION_DIRECTORY: str(session)}
        for port in sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", PAGE.read_text("utf-8")))):
            self.names[f"127.0.0.1:{port}"] = f"127.0.0.1:{free_port('127.0.0.1')}"
        environment = {name: text for name, text in os.environ.items() if "MOONCAKE" not in name}
        environment |= {"XDG_RUNTIME_DIR": str(session), "XDG_STATE_HOME": str(folder / "state")}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment |= {"COLUMNS": "100"}
        self.started: list[int] = []
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )

    def run(self, step: Step) -> str:
        """The command's output, in the page's names."""
        command = step.command
        for theirs, ours in self.names.items():
            command = command.replace(theirs, ours)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\nprintf '\\n@end\\n'\n".encode())
        self._process.stdin.flush()
        printed = self._read()
        for theirs, ours in zip(PROCESS.findall(step.printed), PROCESS.findall(printed), strict=False):
            self.names[f"kill -9 {theirs}"] = f"kill -9 {ours}"
            self.started.append(int(ours))
        for theirs, ours in self.names.items():
            printed = printed.replace(ours, theirs)
        return printed

    def _read(self) -> str:
        assert self._process.stdout is not None
        deadline = time.monotonic() + COMMAND_SECONDS
        printed = b""
        while not printed.endswith(b"\n@end\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], deadline - time.monotonic())
            assert ready, f"no end after {COMMAND_SECONDS:g} s: {printed.decode()}"
            some = os.read(self._process.stdout.fileno(), 65536)
            assert some, f"the shell ended: {printed.decode()}"
            printed += some
        return printed.removesuffix(b"\n@end\n").decode()

    def close(self) -> None:
        """End it, and the peers that are left."""
        for process_id in self.started:
            try:
                command = Path(f"/proc/{process_id}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
            if b"join" in command:
                os.kill(process_id, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def shell() -> Iterator[Shell]:
    with tempfile.TemporaryDirectory(prefix="p2p") as folder:
        shell = Shell(Path(folder))
        for block in blocks(PAGE, "python"):  # which is to be saved under the name in its first line
            name = block.text.partition("\n")[0].removeprefix("# ")
            (Path(folder) / name).write_text(block.text, encoding="utf-8")
        with closing(shell):
            yield shell


def test_the_first_ten_minutes_are_as_the_page_says(shell: Shell) -> None:
    compare(shell, PAGE, least=20)


def test_one_minute_is_as_the_readme_says(shell: Shell) -> None:
    compare(shell, README, least=5)


def compare(shell: Shell, page: Path, *, least: int) -> None:
    """Run all commands of the page; fewer than `least` would mean that they were not found."""
    session = [step for block in blocks(page, "console") for step in steps(block)]
    assert len(session) >= least
    for step in session:
        printed = shell.run(step)
        assert like(printed) == like(step.printed), f"$ {step.command}\n{printed}"
