"""Limits of all cgroups around this process, of both versions."""

from pathlib import Path

import pytest

from p2pstore.runtime.linux import memory_limits, processor_limit

FILES = {
    "cgroup/pod/box/memory.max": "4096\n",
    "cgroup/pod/box/memory.current": "100\n",
    "cgroup/pod/memory.max": "8192\n",
    "cgroup/pod/memory.current": "200\n",
    "cgroup/pod/memory.stat": "anon 5\ninactive_file 150\n",
    "cgroup/memory.max": "max\n",
    "cgroup/memory/box/memory.limit_in_bytes": "4096\n",
    "cgroup/memory/box/memory.usage_in_bytes": "100\n",
    "cgroup/memory/box/memory.stat": "total_inactive_file 40\n",
}


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("0::/pod/box\n", [(4096, 100), (8192, 50)]),
        ("5:cpu:/x\n3:cpu,memory:/box\n", [(4096, 60)]),
        ("1:name=systemd:/\n", []),
    ],
)
def test_all_groups_around_this_process_count(
    group: str, limits: list[tuple[int, int]], tmp_path: Path
) -> None:
    write({**FILES, "proc/self/cgroup": group}, tmp_path)
    assert sorted(memory_limits(tmp_path / "proc", tmp_path / "cgroup")) == limits


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/pod/box\n", "cgroup/pod/box/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/pod/box\n", "cgroup/pod/box/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "cgroup/pod/box/cpu.max": "400000 100000\n",
                "cgroup/pod/cpu.max": "300000 100000\n",
                "cgroup/cpu.max": "max 100000\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/of/the/host\n", "cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
                "cgroup/cpu/box/cpu.cfs_quota_us": "200000\n",
                "cgroup/cpu/box/cpu.cfs_period_us": "50000\n",
                "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            4,
        ),
        ({"proc/self/cgroup": "0::/box\n", "cgroup/box/cpu.max": "\n"}, None),
        ({"proc/self/cgroup": "0::/box\n", "cgroup/box/cpu.max": "100 0\n"}, None),
    ],
)
def test_the_smallest_limit_of_processors_counts(
    files: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    write(files, tmp_path)
    assert processor_limit(tmp_path / "proc", tmp_path / "cgroup") == limit


def test_a_machine_that_says_nothing_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "proc", tmp_path / "cgroup") == []
    assert processor_limit(tmp_path / "proc", tmp_path / "cgroup") is None
