"""What the cgroups around this process let it use. Shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
        limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
        if limit.isdigit() and used.isdigit():
            fields = _read(folder / "memory.stat").split()
            statistics = dict(zip(fields[::2], fields[1::2], strict=False))
            limits.append((int(limit), int(used) - int(statistics.get(names[2], 0))))
    return limits


def processor_limit(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """How many processors' time the groups around this process let it use at most, as a container's limit does; None
    where there is no limit, or nothing can be read."""
    limits = []
    for version, folder in _groups("cpu", proc, cgroups):
        if version == 2:
            quota, period = [*_read(folder / "cpu.max").split(), "", ""][:2]
        else:
            quota, period = (
                _read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        if quota.isdigit() and period.isdigit() and int(period):  # no limit: "max", or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group at or above this process that may limit what `controller` watches over."""
    for line in _read(proc / "self/cgroup").splitlines():
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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
