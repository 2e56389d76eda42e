"""The output of `demo`: each result once, a spinner while peers start, and what to try next."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest

from mooncake_p2p.commands import demo
from mooncake_p2p.main import COMMANDS, run


class Cluster:
    """Stands for the cluster of the demo; nothing is started."""

    def __init__(self, *arguments: object) -> None: ...

    def close(self) -> None: ...


def play(cluster: Any, show: Any, blocks: int, memory: str) -> None:
    with show.step("start", spins=True) as step:
        step.note = "they run"
    with show.step("put") as step:
        step.bytes = 1 << 20


@pytest.fixture
def spun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that showed a spinner."""
    labels: list[str] = []

    def progress(label: str, **options: object) -> Any:
        labels.append(label)
        return nullcontext()

    monkeypatch.setattr(demo, "LocalCluster", Cluster)
    monkeypatch.setattr(demo, "_play", play)
    monkeypatch.setattr(demo, "progress", progress)
    return labels


def test_each_result_is_told_once_and_then_what_to_try(
    spun: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo"]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(each) for each in ("  start: ", "  put: ", "they run")] == [1, 1, 1]
    assert spun == ["start"]
    tried = re.findall(r"^  mooncake-p2p (\w+)", shown.partition("Try next")[2], re.M)
    assert tried
    assert set(tried) <= set(COMMANDS)


def test_with_json_nothing_else_is_told(spun: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--json"]) == 0
    assert capsys.readouterr().out.startswith('{"ok": true')
    assert spun == []
