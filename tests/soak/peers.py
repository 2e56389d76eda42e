"""The peers of a soak: where they run, with which settings, what they leave behind."""

import json
import math
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.objects import MIB
from tests.forked import unconfigured
from tests.soak.network import Host

MEMORY: Final = "16MiB"
"""Less than the values of all take: peers evict all the time."""
FIRST_PORT: Final = 17946
VOLUME_BYTES: Final = 24 * MIB
SSD_BYTES: Final = 256 * MIB
SSD_SLACK_BYTES: Final = 8 * MIB
CLIENT_SECONDS: Final = 15.0
BALLAST: Final = "ballast"


@dataclass(frozen=True)
class Role:
    """The role of a peer: its host, and its special settings."""

    host: int
    ssd: bool = False
    options: tuple[str, ...] = ()
    steady: bool = False
    follows: bool = False
    publishes: bool = False

    @property
    def partitioned(self) -> bool:
        """Whether it keeps a part of the directory only."""
        return "partitioned" in self.options

    @property
    def volume_bytes(self) -> int:
        """How large its disk is."""
        return VOLUME_BYTES + (SSD_BYTES + SSD_SLACK_BYTES if self.ssd else 0)


ROLES: Final = (
    Role(0, ssd=True, publishes=True),
    Role(0, steady=True, follows=True),
    Role(1, ssd=True, options=("--data-tls", "on")),
    Role(1),
    Role(2, ssd=True, steady=True),
    Role(3, options=("--data-tls", "on"), follows=True),
    Role(4, options=("--quota", "flushed-6=4MiB", "--eviction-policy", "lru")),
    Role(5, options=("--directory", "partitioned"), follows=True),
)
"""Eight peers on six hosts: two hosts with two, so that some read each other's memory."""
HOSTS: Final = 6
IN_A_FILE: Final = 3
"""This one has its memory in a file of its volume's neighbour, which must not stay behind."""

CLIENT_PAGE: Final = "/memfd:p2pstore-hazards "


class Peer:
    """One `mooncake-p2p join`: its addresses, identity, socket and volume stay the same whenever it is started."""

    def __init__(self, number: int, host: Host, folder: Path, log: Path, key: Path) -> None:
        role = ROLES[number]
        self.number = number
        self.name = f"peer{number}"
        self.role = role
        self.host = host
        self.log = log
        self.volume = folder / f"{self.name}.volume"
        self.place = folder / f"{self.name}.place"
        self.follows = self.volume / "follows"
        self.socket = self.place / "socket"
        self.memory_file = self.place / "memory"
        self.exit_status: int | None = None
        self._disk_full_until = -math.inf
        self._process: subprocess.Popen[bytes] | None = None
        second = sum(each.host == role.host for each in ROLES[:number])
        self.control = f"{host.address}:{FIRST_PORT + second}"
        self._arguments = [
            *("--name", self.name, "--cluster", "soak", "--cluster-key-file", str(key)),
            *("--listen", self.control, "--data-listen", f"{host.address}:0"),
            *("--memory", MEMORY, "--socket", str(self.socket)),
            *("--state-dir", str(self.volume / "state")),
            *("--log-format", "json", "--join-timeout", "2"),
            *role.options,
        ]
        if role.ssd:
            self._arguments += ["--ssd", str(self.volume / "ssd"), "--ssd-capacity", "256MiB"]
        if number == IN_A_FILE:
            self._arguments += ["--memory-path", str(self.memory_file)]
        places = ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
        self._environment = unconfigured(**dict.fromkeys(places, str(self.place)))

    @property
    def pid(self) -> int:
        """Of its process, which was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process is there. A process that ended has an `exit_status` from then on."""
        if self._process is None:
            return False
        self.exit_status = self._process.poll()
        return self.exit_status is None

    def start(self, bootstrap: list[str]) -> None:
        """Start its process; `is_ready` says when it serves."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        arguments = [*self._arguments, *(f"--bootstrap={each}" for each in bootstrap)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.host.command(
                    *(sys.executable, "-m", "mooncake_p2p.tied", str(os.getpid()), "join"), *arguments
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                process_group=0,  # Ctrl-C is for who started it
            )
        self.exit_status = None

    def is_ready(self) -> bool:
        """Whether it said `ready` by now; asked until it did, or ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 0)[0]:
            return False
        return self._process.stdout.readline().startswith(b"ready ")

    def signal(self, number: int) -> None:
        """Send a signal; one that ended by itself gets none."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.exit_status = self._process.returncode

    def connect(self) -> BlockingClient:
        """A client, for looking at it."""
        return blocking.connect(str(self.socket), namespace="soak", timeout=CLIENT_SECONDS)

    # --- its disk ----------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """Leave no byte of its volume."""
        self._disk_full_until = math.inf
        with (self.volume / BALLAST).open("wb", buffering=0) as ballast:
            block = bytes(MIB)
            with suppress(OSError):
                while ballast.write(block):
                    pass

    def free_disk(self) -> None:
        """End what `fill_disk` began."""
        (self.volume / BALLAST).unlink(missing_ok=True)
        self._disk_full_until = time.monotonic()

    def disk_was_full(self, since: float) -> bool:
        """Whether it was at some time after `since` (monotonic): then it may refuse to start."""
        return self._disk_full_until > since

    # --- what it costs, what it leaves -----------------------------------------------------------

    def resources(self) -> dict[str, float]:
        """Resources of its process, as the kernel counts them. Raises `OSError` when it has ended, or is ending."""
        base = Path(f"/proc/{self.pid}")
        status = dict(
            line.split(":", 1) for line in (base / "status").read_text().splitlines() if ":" in line
        )
        if "RssAnon" not in status:
            raise ProcessLookupError(f"{self.name} has no memory any more")
        descriptors = list((base / "fd").iterdir())
        memfds = 0
        for each in descriptors:
            with suppress(OSError):
                name = os.readlink(each)
                # Clients come and go, and have a page each: of these, `descriptors` tells.
                memfds += name.startswith("/memfd:") and not name.startswith(CLIENT_PAGE)
        fields = (base / "stat").read_text().rpartition(")")[2].split()
        return {
            "resident_bytes": 1024 * int(status["RssAnon"].split()[0]),
            "descriptors": len(descriptors),
            "threads": int(status["Threads"]),
            "memfds": memfds,
            "mappings": (base / "maps").read_text().count("\n"),
            "cpu_seconds": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        }

    def left_behind(self) -> list[str]:
        """Paths that an ended peer left and should not have: sockets, memory files, any file in its directory."""
        left = [str(path) for path in self.place.rglob("*") if not path.is_dir()]
        ssd = self.volume / "ssd"
        known = {self.volume / "state", ssd, self.volume / BALLAST, self.follows}
        left += [str(path) for path in self.volume.iterdir() if path not in known]
        return left


def listening(host: Host) -> list[str]:
    """Addresses, as the kernel writes them, at which a process on that host listens."""
    lines = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{host.process_id}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                lines.append(fields[1])
    return lines


def left_over(log: Path, since: int) -> int:
    """How many objects that it alone had a peer did not hand over, by what it logged from byte `since` on."""
    with log.open("rb") as file:
        file.seek(since)
        lines = [line for line in file.read().splitlines() if b'"handed_over"' in line]
    return int(json.loads(lines[-1])["left_objects"]) if lines else 0


def error_lines(log: Path, since: int) -> tuple[list[str], int, int]:
    """Lines of an error, or that are no line of the log at all (last words of a crash), from byte `since` on; how
    far it was read, and how many lines that are."""
    with log.open("rb") as file:
        file.seek(since)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    found = []
    for line in whole.decode(errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            document: dict[str, Any] = json.loads(line)
        except ValueError:
            found.append(line)
            continue
        if document.get("level") in ("error", "critical"):
            found.append(line)
    return found, since + len(whole), whole.count(b"\n")
