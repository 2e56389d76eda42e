"""The demo's output; and signals, which end a command only where that leaves nothing behind."""

import re
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from mooncake_p2p.commands import demo
from mooncake_p2p.manual import COMMANDS
from mooncake_p2p.output import ENDING_SIGNALS, Interrupts
from tests.command_line import Cli


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


def test_each_result_is_told_once_and_then_what_to_try(spun: list[str], cli: Cli) -> None:
    shown = cli("demo").out
    assert [shown.count(each) for each in ("  start: ", "  put: ", "they run")] == [1, 1, 1]
    assert spun == ["start"]
    tried = re.findall(r"^  mooncake-p2p (\w+)", shown.partition("Try next")[2], re.M)
    assert tried
    assert set(tried) <= set(COMMANDS)


def test_with_json_nothing_else_is_told(spun: list[str], cli: Cli) -> None:
    assert cli("demo", "--json").out.startswith('{"ok": true')
    assert spun == []


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in ENDING_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in ENDING_SIGNALS] == before


def send(number: int) -> None:
    signal.raise_signal(number)  # `os.kill` may give it to another thread, which takes a moment


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None)]
)
def test_interrupts_where_allowed(number: int, status: int | None) -> None:
    expected = KeyboardInterrupt if status is None else SystemExit
    with Interrupts() as interrupts, pytest.raises(expected) as raised, interrupts.allowed():
        send(number)
    assert status is None or raised.value.code == status  # type: ignore[attr-defined]


def test_waits_where_not_allowed() -> None:
    reached = []

    def work() -> None:
        with Interrupts() as interrupts:
            send(signal.SIGTERM)
            reached.append("before")
            with interrupts.allowed():
                reached.append("never")

    with pytest.raises(SystemExit):
        work()
    assert reached == ["before"]


def test_a_signal_that_came_last_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        send(signal.SIGINT)


def test_held_inside_allowed() -> None:
    reached = []

    def work() -> None:
        with Interrupts() as interrupts, interrupts.allowed():
            with interrupts.held():
                send(signal.SIGTERM)
                reached.append("held")
            reached.append("never")

    with pytest.raises(SystemExit):
        work()
    assert reached == ["held"]


def test_cleaning_up_is_not_interrupted_again() -> None:
    cleaned = []

    def work() -> None:
        with Interrupts() as interrupts:
            try:
                with interrupts.allowed():
                    send(signal.SIGINT)
            finally:
                send(signal.SIGINT)
                send(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [True]
