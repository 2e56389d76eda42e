"""What becomes of a log record: one line, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.peer.logs import configure_logs


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, left as it was."""
    package = logging.getLogger("p2pstore")
    handlers, level, propagate = list(package.handlers), package.level, package.propagate
    yield logging.getLogger("p2pstore.peer")
    for handler in set(package.handlers) - set(handlers):
        handler.close()
    package.handlers[:] = handlers
    package.setLevel(level)
    package.propagate = propagate


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
    assert document == {"level": "debug", "part": "peer", "message": "two\nlines", "peer_id": "x"}


def test_configuring_twice_writes_each_line_once(logger: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"
    for _ in range(2):
        configure_logs(PeerConfig(log_file=str(file)))
    logger.warning("once")
    assert file.read_text().count("once") == 1


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_file: .* cannot be written"):
        configure_logs(PeerConfig(log_file=str(tmp_path / "none" / "log")))
