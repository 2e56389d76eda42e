"""Small questions to Linux: identity of the host, limits of cgroups, owners of files and devices, shortages. Shell."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import pwd
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, Final

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""


def memory_limits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """(limit, use without page cache that can be dropped), in bytes, of each group at or above this process
    that has a limit; versions 2 and 1. Empty where there is none, or nothing can be read."""
    limits: list[tuple[int, int]] = []
    for version, folder in _groups("memory", proc, cgroups):
        if version == 2:
            names = "memory.max", "memory.current", "inactive_file"
        else:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        limit, used = text_of(folder / names[0]).strip(), text_of(folder / names[1]).strip()
        if limit.isdigit() and used.isdigit():
            fields = text_of(folder / "memory.stat").split()
            statistics = dict(zip(fields[::2], fields[1::2], strict=False))
            limits.append((int(limit), int(used) - int(statistics.get(names[2], 0))))
    return limits


def processor_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many processors' time the groups around this process let it use at most, as a container's limit does; None
    where there is no limit, or nothing can be read."""
    limits = []
    for version, folder in _groups("cpu", proc, cgroups):
        if version == 2:
            quota, period = [*text_of(folder / "cpu.max").split(), "", ""][:2]
        else:
            quota, period = (
                text_of(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        if quota.isdigit() and period.isdigit() and int(period):  # no limit: "max", or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group at or above this process that may limit what `controller` watches over."""
    for line in text_of(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, root = 2, cgroups
        elif controller in controllers.split(","):
            version, root = 1, cgroups / controller
        else:
            continue
        below = root / path.lstrip("/")
        # In a container, the path is often that of the host, and the limit lies at the root.
        above = (parent for parent in below.parents if root in parent.parents)
        for folder in {root, below, *above}:
            yield version, folder


def text_of(path: Path) -> str:
    """The content of a file of the kernel; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def take_lock(descriptor: int) -> bool:
    """Lock a file (`flock`) for this descriptor, without waiting. False when another one has the lock. Raises
    `OSError`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_owner(status: os.stat_result) -> str | None:
    """The process that holds a lock (`flock`) on a file, for people; None where unknown, as in another container."""
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == file and int(fields[4]) > 0:
            return _process(int(fields[4]))
    return None


def _process(number: int) -> str:
    try:
        command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return f"process {number}"
    return f"process {number} ({command.decode(errors='backslashreplace')[:80]})"


def mount_point(device: int) -> str | None:
    """Where a block device (its st_rdev) is mounted; None when it is not, or not that one can see from here."""
    fields = _mounted(device)
    return fields[4] if fields else None


def file_system(device: int) -> str | None:
    """The kind of the file system with that number (`st_dev`), such as "ext4"; None when it cannot be seen."""
    fields = _mounted(device)
    return fields[fields.index("-") + 1] if fields else None


def _mounted(device: int) -> list[str] | None:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # 36 35 98:0 /root /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue
        fields = line.split()
        if fields[2] == wanted:
            return fields
    return None


def connected_user(sock: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket, as the kernel has it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def user_name(number: int) -> str:
    """Name of a user; the number where the system has no name for it, as in containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def has_terminal() -> bool:
    """Whether this process can still talk to the terminal that controls it."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def survive_hangups() -> None:
    """From now on, until another handler is set, SIGHUP ends this process only when its terminal is gone.

    To a peer the signal means "read your files again", and its sender cannot know that the peer is still
    starting, and reads them anyway. A process that ignores the signal (nohup) goes on ignoring it.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        return
    bound_to_terminal = has_terminal()

    def handle(number: int, frame: FrameType | None) -> None:
        if bound_to_terminal and not has_terminal():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGHUP, handle)


def is_ready(descriptor: int, seconds: float | None, *, to_write: bool = False) -> bool:
    """Whether a read, or a write, would not wait, within `seconds`; None waits without limit. The other side's end
    counts as ready. Not by `select`, which fails in a process that has more than 1,023 descriptors."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def read_line(pipe: IO[bytes], deadline: float) -> bytes:
    """The next line, or what came of it until the deadline (`time.monotonic`) or the end."""
    line = b""
    while not line.endswith(b"\n"):
        ready = is_ready(pipe.fileno(), deadline - time.monotonic())
        piece = os.read(pipe.fileno(), 1) if ready else b""
        if not piece:
            break
        line += piece
    return line


SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_shortage(error: OSError) -> bool:
    """Whether something is lacking that may be there again."""
    return error.errno in SHORTAGES


def shortage(error: OSError) -> str:
    """The lacking resource, its limit, and what to do, for people."""
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        more = f" (the administrator allows {hard:,})" if hard > soft else ""
        return (
            f"this process has all of the {soft:,} descriptors that it may have{more}: raise `ulimit -n` (LimitNOFILE "
            "of a service, --ulimit nofile of a container), or close some connections"
        )
    if error.errno == errno.ENFILE:
        with contextlib.suppress(OSError, ValueError):
            most = int(Path("/proc/sys/fs/file-max").read_text())
            return (
                f"this machine has all of the {most:,} files open that it may have: raise `sysctl fs.file-max`, or "
                "find out what holds them (`lsof`)"
            )
    return f"the kernel has no memory for it ({error.strerror}): free some, or raise this process's limit of memory"


_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
"""The system call's number: glibc has no function for it."""
_QUERY: Final = 0
_GLOBAL: Final = 1 << 0
_GLOBAL_EXPEDITED: Final = 1 << 1
_REGISTER: Final = 1 << 2
_NEEDED: Final = _GLOBAL_EXPEDITED | _REGISTER

_libc = ctypes.CDLL(None, use_errno=True)


def _call(command: int) -> int:
    number = _MEMBARRIER.get(platform.machine())
    return -1 if number is None else int(_libc.syscall(number, command, 0, 0))


def has_barriers() -> bool:
    """Whether this kernel has such barriers, and lets this process ask for them."""
    supported = _call(_QUERY)
    return supported >= 0 and supported & _NEEDED == _NEEDED


def join_barriers() -> bool:
    """Have the barriers of other processes pass through this one from now on; whether they will."""
    return _call(_REGISTER) == 0


def memory_barrier() -> None:
    """A full barrier on every processor that runs a process which joined (membarrier, Linux 4.16), and in this thread:
    1.4 us, or 11 when threads of the others run. For flags in shared memory that one side sets often, at no cost, and
    the other reads seldom: earlier stores of all sides are visible to what it reads afterwards. Raises `OSError`
    where the kernel refuses (it has offered it: see `has_barriers`)."""
    # The second needs no memory and is slow: it waits until every processor has switched tasks.
    if _call(_GLOBAL_EXPEDITED) and _call(_GLOBAL):
        error = ctypes.get_errno()
        raise OSError(error, f"membarrier: {os.strerror(error)}")


@cache
def host_identity() -> bytes:
    """16 bytes that processes of one running machine share: a hash of the kernel's boot id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.blake2b(boot_id.encode(), digest_size=16, person=b"p2pstore.host.1").digest()
