"""Record the pictures of the documents from real peers: docs/pictures/terminal.svg and docs/pictures/status.png.

The terminal picture holds the real output of real commands on three peers of this machine, drawn by rich. The second
picture is the status page of one of them, taken with Chromium (`scripts/setup --browser`); without a browser it is left
as it is. Run it in the project's environment: `.venv/bin/python scripts/docs_pictures.py`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).parents[1]
PICTURES: Final = ROOT / "docs" / "pictures"
COLUMNS: Final = 104
COMMAND_SECONDS: Final = 60
PROCESS: Final = re.compile(r"runs as process (\d+)")
SESSION: Final = (
    "mooncake-p2p join --detach --name a --listen 127.0.0.1:7001 --memory 256MiB >a.json",
    "mooncake-p2p join --detach --name b --listen 127.0.0.1:7002 --memory 256MiB \\\n"
    "      --bootstrap 127.0.0.1:7001 --http 127.0.0.1:9946 >b.json",
    "mooncake-p2p join --detach --name c --listen 127.0.0.1:7003 --memory 256MiB \\\n"
    "      --bootstrap 127.0.0.1:7001 >c.json",
    "mooncake-p2p put --socket $A weights/layer0 layer0.bin --replicas 2",
    "mooncake-p2p get --socket $B weights/layer0 -o copy.bin && cmp layer0.bin copy.bin && echo same bytes",
    "kill -9 {a}   # peer a",
    "mooncake-p2p get --socket $B weights/layer0 -o copy.bin && cmp layer0.bin copy.bin && echo same bytes",
)
HIDDEN: Final = 3
"""The first commands, which start the peers: the picture shows them without what they print."""
SVG: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; }} {styles}</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""rich's own frame, without its fonts, which a network would have to bring."""


class Session:
    """A directory with files, an environment, and the peers that its commands start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, int] = {}
        sockets = folder / "mooncake-p2p"
        self.environment = {
            **{name: text for name, text in os.environ.items() if "MOONCAKE" not in name},
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": str(COLUMNS),
            **{name.upper(): str(sockets / f"{name}.sock") for name in "abc"},
        }
        (folder / "layer0.bin").write_bytes(os.urandom(20_000_000))

    def run(self, command: str) -> str:
        """The output of one command of the shell. Raises `CalledProcessError` when it fails."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=True,
        )
        if started := PROCESS.search(done.stdout):
            name = re.search(r"--name (\w+)", command)
            assert name is not None
            self.processes[name[1]] = int(started[1])
        return done.stdout

    def close(self) -> None:
        """End the peers that still run."""
        for process in self.processes.values():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def record(session: Session) -> Console:
    """Run all commands; the console holds what a terminal would show."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    for number, template in enumerate(SESSION):
        command = template.format(**session.processes)
        printed = session.run(command)
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")), soft_wrap=False)
        if number >= HIDDEN and printed:
            console.print(Text(printed.rstrip("\n")), highlight=False)
    return console


def take_status_page(folder: Path) -> None:
    """The status page of peer b as a browser shows it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        print("no browser: docs/pictures/status.png stays as it is", file=sys.stderr)
        return
    address = "http://127.0.0.1:9946/"
    urllib.request.urlopen(f"{address}livez", timeout=COMMAND_SECONDS).close()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--user-data-dir={folder / 'browser'}", "--window-size=900,1000"]
    flags += ["--virtual-time-budget=4000", f"--screenshot={PICTURES / 'status.png'}"]
    subprocess.run([browser, *flags, address], timeout=COMMAND_SECONDS, check=True, capture_output=True)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="p2p") as name:
        session = Session(Path(name))
        try:
            console = record(session)
            take_status_page(Path(name))
        finally:
            session.close()
    picture = console.export_svg(title="p2pstore", code_format=SVG, unique_id="terminal")
    (PICTURES / "terminal.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
