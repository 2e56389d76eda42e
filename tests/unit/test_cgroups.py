"""Limits of all cgroups around this process, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pstore.cgroups import memory_limits

FILES = {
    "cgroup/pod/box/memory.max": "4096\n",
    "cgroup/pod/box/memory.current": "100\n",
    "cgroup/pod/memory.max": "8192\n",
    "cgroup/pod/memory.current": "200\n",
    "cgroup/pod/memory.stat": "anon 5\ninactive_file 150\n",
    "cgroup/memory.max": "max\n",
    "cgroup/memory/box/memory.limit_in_bytes": "4096\n",
    "cgroup/memory/box/memory.usage_in_bytes": "100\n",
}


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("0::/pod/box\n", [(4096, 100), (8192, 50)]),
        ("5:cpu:/x\n3:cpu,memory:/box\n", [(4096, 100)]),
        ("1:name=systemd:/\n", []),
    ],
)
def test_all_groups_around_this_process_count(
    group: str, limits: list[tuple[int, int]], tmp_path: Path
) -> None:
    for name, text in {**FILES, "proc/self/cgroup": group}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert sorted(memory_limits(tmp_path / "proc", tmp_path / "cgroup")) == limits


def test_a_machine_that_says_nothing_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "proc", tmp_path / "cgroup") == []
