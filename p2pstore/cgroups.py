"""What the cgroups around this process let it use. Shell."""

from __future__ import annotations

from pathlib import Path


def memory_limits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """(limit, use without page cache that can be dropped), in bytes, of each group at or above this process
    that has a limit; versions 2 and 1. Empty where there is none, or nothing can be read."""
    limits: list[tuple[int, int]] = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        below = root / path.lstrip("/")
        # In a container, the path is often that of the host, and the limit lies at the root.
        above = (parent for parent in below.parents if root in parent.parents)
        for folder in {root, below, *above}:
            limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                fields = _read(folder / "memory.stat").split()
                statistics = dict(zip(fields[::2], fields[1::2], strict=False))
                limits.append((int(limit), int(used) - int(statistics.get(names[2], 0))))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
