"""The output of a log record: one line, as text or as JSON."""

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.peer.lifetime.logs import BURST, configure_logs, reopen_logs
from p2pstore.state.folder import open_log_file


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, left as it was."""
    package = logging.getLogger("p2pstore")
    root = list(logging.getLogger().handlers)
    handlers, level, propagate = list(package.handlers), package.level, package.propagate
    yield logging.getLogger("p2pstore.peer")
    for handler in set(package.handlers) - set(handlers):
        handler.close()
    package.handlers[:] = handlers
    package.setLevel(level)
    package.propagate = propagate
    logging.getLogger().handlers[:] = root


def test_text(logger: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"
    configure_logs(PeerConfig(log_file=str(file)))
    logger.debug("not this")
    logger.info("peer %s is alive", "a\n2026 ERROR\x1b[2J", extra={"peer_id": "x\ny"})
    (line,) = file.read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    peer: ", line)
    assert line.endswith(r"peer a\n2026 ERROR\x1b[2J is alive peer_id=x\ny")


def test_json(logger: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"
    configure_logs(PeerConfig(log_file=str(file), log_format="json", log_level="debug"))
    logger.debug("two\nlines", extra={"peer_id": "x"})
    document = json.loads(file.read_text())
    assert document.pop("time").endswith("Z")
    assert document == {
        "level": "debug",
        "event": "",
        "part": "peer",
        "message": "two\nlines",
        "peer_id": "x",
    }


def test_an_event_has_a_name_that_programs_can_rely_on(logger: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"
    for style in ("json", "text"):
        configure_logs(PeerConfig(log_file=str(file), log_format=style))
        fields = {"event": "joined", "peer_id": "x", "time": "forged", "traceback": "forged"}
        logger.info("joined through %s", "y", extra=fields)
    first, second = file.read_text().splitlines()
    document = json.loads(first)
    assert (document["event"], document["peer_id"]) == ("joined", "x")
    assert "forged" not in first
    assert second.endswith("peer: joined through y peer_id=x")


def test_of_what_strangers_cause_a_bounded_share_is_written(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log"
    configure_logs(PeerConfig(log_file=str(file)))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now * 1e9))

    def cause(number: int) -> None:
        logger.warning("dropped %d", number)

    for number in range(1000):
        cause(number)
        logger.info("harmless")
    logger.warning("something else")
    lines = file.read_text().splitlines()
    assert sum("dropped" in line for line in lines) == BURST
    assert sum("harmless" in line for line in lines) == 1000
    assert "something else" in lines[-1]
    now += 61
    cause(1000)
    assert "dropped 1000 (980 more like it were not written)" in file.read_text().splitlines()[-1]


def test_other_libraries_get_a_line_for_a_warning_and_no_traceback(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    configure_logs(PeerConfig(log_file=str(file), log_level="debug"))
    library = logging.getLogger("some.library")
    library.info("chatter")
    try:
        raise ValueError("of a stranger")
    except ValueError:
        library.exception("it failed")
    (line,) = file.read_text().splitlines()
    assert "ERROR   some.library: it failed" in line
    assert capsys.readouterr().err == ""


def test_a_rotated_file_is_opened_anew(logger: logging.Logger, tmp_path: Path) -> None:
    file, rotated = tmp_path / "log", tmp_path / "log.1"
    configure_logs(PeerConfig(log_file=str(file)))
    logger.info("one")
    file.rename(rotated)
    logger.info("two")
    reopen_logs()
    logger.info("three")
    assert [line.split()[-1] for line in rotated.read_text().splitlines()] == ["one", "two"]
    assert [line.split()[-1] for line in file.read_text().splitlines()] == ["three"]


def test_a_file_that_cannot_be_opened_anew_is_written_on(logger: logging.Logger, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    configure_logs(PeerConfig(log_file=str(folder / "log")))
    folder.rename(tmp_path / "moved")
    reopen_logs()
    logger.info("still here")
    first, second = (tmp_path / "moved" / "log").read_text().splitlines()
    assert "cannot be opened anew: No such file" in first
    assert "still here" in second


def test_a_full_disk_costs_lines_and_nothing_else(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "log"
    file.symlink_to("/dev/full")
    configure_logs(PeerConfig(log_file=str(file)))
    for _ in range(3):
        logger.info("lost")
    file.unlink()
    reopen_logs()
    logger.info("written")
    logger.info("as usual")
    first, second = file.read_text().splitlines()
    assert first.endswith("written (3 lines before it could not be written)")
    assert second.endswith("as usual")
    assert capsys.readouterr().err == ""


def test_configuring_twice_writes_each_line_once(logger: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"
    for _ in range(2):
        configure_logs(PeerConfig(log_file=str(file)))
    logger.warning("once")
    assert file.read_text().count("once") == 1


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_file: .* cannot be written"):
        configure_logs(PeerConfig(log_file=str(tmp_path / "none" / "log")))


def test_a_line_torn_by_a_full_disk_spoils_no_other(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    configure_logs(PeerConfig(log_file=str(file)))
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr("os.write", lambda descriptor, line: write(descriptor, line[:30]))
        logger.info("torn")
        disk.setattr("os.write", lambda descriptor, line: write(descriptor, line[:1]))
        logger.info("only its line break")
    logger.info("whole")
    logger.info("as usual")
    first, second, third = file.read_text().splitlines()
    assert len(first) == 30
    assert second.endswith("whole (2 lines before it could not be written)")
    assert third.endswith("as usual")


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another user may write, the name of the log may lead to any file of this one."""
    victim, link = tmp_path / "victim", tmp_path / "peer.log"
    victim.write_text("precious")
    link.symlink_to(victim)
    os.close(open_log_file(link))  # this user's own, in a directory of its own
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"peer.log is a link that another user"):
        open_log_file(link)
    tmp_path.chmod(0o1777)  # no other user can exchange it
    os.close(open_log_file(link))
    if os.geteuid() == 0:
        os.chown(link, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"log_file: .*is a link that another user"):
        configure_logs(PeerConfig(log_file=str(link)))
    assert victim.read_text() == "precious"


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "peer.log")
    with pytest.raises(ConfigError, match=r"log_file: .*cannot be written"):
        configure_logs(PeerConfig(log_file=str(tmp_path / "peer.log")))
