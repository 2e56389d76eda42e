"""Output into a pipe and on a terminal of 80 columns."""

import contextlib
import json
import os
import select
import sys
import threading
from collections.abc import Callable
from operator import itemgetter

import pytest

from mooncake_p2p import output
from mooncake_p2p.output import CommandFailed, ExitCode, format_transfer
from p2pstore.objects import MIB

SIZES: output.Columns[tuple[str, str]] = {"KEY": lambda row: row[0], ">SIZE": lambda row: row[1]}
LONG_KEY = "model/" + "x" * 120


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: str, work: Callable[[], None], columns: int = 80
) -> str:
    """The text that `work` writes to a terminal."""
    primary, secondary = os.openpty()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(primary, "rb", buffering=0) as screen, os.fdopen(secondary, "w") as terminal:
        monkeypatch.setattr(sys, stream, terminal)
        work()
        monkeypatch.undo()
        terminal.close()
        shown = b""
        with contextlib.suppress(OSError):  # the output comes in pieces, and then an error
            while piece := screen.read(1 << 20):
                shown += piece
    return shown.decode()


def test_json_is_one_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"key": "ключ\n", "n": [1]})
    output.json_output.end()
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert json.loads(printed) == {"key": "ключ\n", "n": [1]}


def test_json_survives_text_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9")  # a file name as Python reads it
    output.print_json({"output": name})
    output.json_output.end()
    assert json.loads(capsys.readouterr().out) == {"output": name}


def test_a_row_is_one_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table([(LONG_KEY, "5.0 MiB"), ("k", "0 B")], SIZES)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == [LONG_KEY, "5.0", "MiB"]
    assert lines[2].endswith("  0 B")
    assert all(line == line.rstrip() for line in lines)


def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(
        monkeypatch, "stdout", lambda: output.print_table([(LONG_KEY, "5.0 MiB")], SIZES)
    )
    lines = shown.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line.split()[0] for line in lines[1:]) == LONG_KEY


def test_control_characters_of_strangers_are_shown_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.print_table([("a\x1b[2Jb\nc [red]d", "1")], SIZES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(r"a\x1b[2Jb\nc [red]d")
    assert output.printable("schlüssel/文 1") == "schlüssel/文 1"


def test_a_rate_is_told_where_the_size_tells_one() -> None:
    assert format_transfer(300_000_000, 0.1) == "286.1 MiB in 100.0 ms (3.00 GB/s)"
    assert format_transfer(2 * MIB, 2.0) == "2.0 MiB in 2.00 s (1.05 MB/s)"
    assert format_transfer(3, 0.001) == "3 B in 1.0 ms"


def test_progress_is_silent_into_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PROGRESS_AFTER_SECONDS", 0.0)
    with output.progress("working", 10) as bar:
        bar.advance(10)
        assert not bar.shown
    assert capsys.readouterr().err == ""


def shown_progress(monkeypatch: pytest.MonkeyPatch, work: Callable[[output.ProgressBar], None]) -> str:
    """The text of a bar that is there from the beginning, while `work` goes on."""
    shown = threading.Event()
    show = output.ProgressBar.show

    def show_and_tell(bar: output.ProgressBar) -> None:
        show(bar)
        shown.set()

    def slow() -> None:
        monkeypatch.setattr(output.ProgressBar, "show", show_and_tell)
        with output.progress("working [x]", 1 << 20, after_seconds=0.0) as bar:
            assert shown.wait(60)
            work(bar)

    return on_terminal(monkeypatch, "stderr", slow)


def test_progress_shows_after_a_while_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def quick() -> None:
        with output.progress("working [x]", 10) as bar:
            bar.advance(10)

    assert on_terminal(monkeypatch, "stderr", quick) == ""
    assert "working [x]" in shown_progress(monkeypatch, lambda bar: bar.advance(1 << 20))


def test_progress_may_change_its_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bar: output.ProgressBar) -> None:
        bar.at(3 * MIB, 4 * MIB)
        bar.relabel("again")
        bar.at(MIB, 2 * MIB)

    shown = shown_progress(monkeypatch, work)
    assert "again" in shown
    assert "1.0 MiB of 2.0 MiB" in shown


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        (0, 100, 5.0, ""),
        (0, None, 5.0, ""),
        (2 * MIB, None, 2.0, "2.0 MiB, 1.05 MB/s"),
        (MIB, 4 * MIB, 2.0, "1.0 MiB of 4.0 MiB, 0.52 MB/s, 6 s left"),
        (MIB, 4 * MIB, 0.01, "1.0 MiB of 4.0 MiB"),
        (4 * MIB, 4 * MIB, 2.0, "4.0 MiB of 4.0 MiB"),
    ],
)
def test_how_far_and_how_long(done: int, total: int | None, seconds: float, text: str) -> None:
    assert output.format_progress(done, total, seconds) == text


def test_nobody_is_asked_without_a_terminal() -> None:
    output.confirm("Remove all?", yes=True)
    with pytest.raises(CommandFailed, match="--yes") as refused:
        output.confirm("Remove all?", yes=False)
    assert refused.value.code == ExitCode.USAGE


@pytest.mark.parametrize(("typed", "agreed"), [("y", True), ("YES", True), ("", False), ("n", False)])
def test_a_terminal_is_asked(typed: str, agreed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    primary, secondary = os.openpty()
    os.write(primary, typed.encode() + b"\n")
    with os.fdopen(secondary, "r+b", buffering=0) as device:
        monkeypatch.setattr(sys, "stdin", os.fdopen(os.dup(device.fileno()), "r"))
        monkeypatch.setattr(sys, "stderr", os.fdopen(os.dup(device.fileno()), "w"))
        stdin, stderr = sys.stdin, sys.stderr
        try:
            with contextlib.nullcontext() if agreed else pytest.raises(CommandFailed):
                output.confirm("Remove all?", yes=False)
        finally:
            monkeypatch.undo()
            stdin.close()
            stderr.close()
    shown = os.read(primary, 1000)  # the echo, and the question at once or later
    while b"Remove all? [y/N] " not in shown:
        assert select.select([primary], [], [], 5.0)[0], shown
        shown += os.read(primary, 1000)
    os.close(primary)


def test_a_table_loses_nothing_on_a_terminal_that_is_far_too_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"NAME": "alpha", "STATUS": "alive", "CONTROL": "127.0.0.1:7001", "PEER ID": "..AbGgYNyh"}
    columns: output.Columns[dict[str, str]] = {each: itemgetter(each) for each in row}
    shown = on_terminal(monkeypatch, "stdout", lambda: output.print_table([row], columns), columns=20)
    for text in (*row, *row.values()):
        assert text in shown
