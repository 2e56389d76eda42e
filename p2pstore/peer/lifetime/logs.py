"""Structured logs: one line per event that matters, as text or as JSON. Shell.

Events carry `extra={"event": ...}` and fields that programs can rely on; what else a line says is for people.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.objects import printable
from p2pstore.state.folder import open_log_file

LOGGER_NAME: Final = "p2pstore"
BURST: Final = 20
"""Warnings of one kind that are written before the rest of the minute's are only counted."""
BURST_SECONDS: Final = 60.0
MAX_KINDS: Final = 1000

logger = logging.getLogger("p2pstore.peer")

_OWN_FIELDS: Final = ("time", "level", "event", "part", "message", "traceback")
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "asctime",
    "taskName",
    *_OWN_FIELDS,
}


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO  gossip: message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        part = record.name.removeprefix(LOGGER_NAME + ".")
        fields = "".join(f" {key}={value}" for key, value in _extra_fields(record).items())
        text = printable(f"{part}: {record.getMessage()}{fields}")
        line = f"{_timestamp(record)} {record.levelname:<7} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time`, `level`, `event` (empty when programs need not care), `part`, `message`,
    the event's own fields, and `traceback` after an error of this program."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", ""),
            "part": record.name.removeprefix(LOGGER_NAME + "."),
            "message": record.getMessage(),
            **_extra_fields(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class RepeatLimit(logging.Filter):
    """Strangers must not fill the disk: of the warnings and errors that one place in the program logs, 20 a
    minute are written. The next one after that minute says how many were not."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}
        """Place in the program and event -> when its minute began, and how many came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.pathname, record.lineno, getattr(record, "event", ""))
        began, count = self._kinds.get(kind, (record.created, 0))
        if not 0 <= record.created - began < BURST_SECONDS:
            if count > BURST:
                record.msg = f"{record.getMessage()} ({count - BURST:,} more like it were not written)"
                record.args = ()
            began, count = record.created, 0
        if len(self._kinds) >= MAX_KINDS and kind not in self._kinds:
            self._kinds.clear()
        self._kinds[kind] = (began, count + 1)
        return count < BURST


class _LogFile(logging.Handler):
    """A log file that may be opened anew. A full disk costs lines, which are counted, and nothing else."""

    def __init__(self, path: str) -> None:
        """Raises `OSError`, and `ConfigError` for a link that another user may have put there."""
        super().__init__()
        self.path = os.path.abspath(path)
        self._descriptor = self._open()
        self._lost = 0
        self._torn = False
        """Whether the file ends within a line, because the disk was full."""
        self._takes_stderr = False

    def _open(self) -> int:
        return open_log_file(Path(self.path))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lost:
                record = logging.makeLogRecord(vars(record))
                lost = f"({self._lost:,} lines before it could not be written)"
                record.msg, record.args = f"{record.getMessage()} {lost}", ()
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
            line = b"\n" + line if self._torn else line
            written = os.write(self._descriptor, line)
            complete = written == len(line)
            self._torn = not complete and line[written - 1 : written] != b"\n"
        except Exception:  # where should it be told?
            complete = False
        self._lost = 0 if complete else self._lost + 1

    def reopen(self) -> None:
        """Write to a new file of the old name. Raises `OSError`, still writing to the old one."""
        with self.lock or nullcontext():
            fresh = self._open()
            os.close(self._descriptor)
            self._descriptor = fresh
            self._torn = False
        if self._takes_stderr:
            self.take_stderr()

    def take_stderr(self) -> None:
        """Have whatever else this process says, such as the last words of a crash, go here as well."""
        self._takes_stderr = True
        os.dup2(self._descriptor, 2)

    def close(self) -> None:
        if self._descriptor != -1:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()


def configure_logs(config: PeerConfig) -> None:
    """Send this package's logs, and others' warnings, to stderr or a file. Raises `ConfigError` for that."""
    handler: logging.Handler
    if config.log_file:
        try:
            handler = _LogFile(config.log_file)
        except OSError as error:
            raise ConfigError(
                f"log_file: {config.log_file} cannot be written: {error.strerror}"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"log_file: {error}") from None
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    handler.addFilter(RepeatLimit())
    package = logging.getLogger(LOGGER_NAME)
    for old in list(package.handlers):
        package.removeHandler(old)
        old.close()
    package.addHandler(handler)
    package.setLevel(config.log_level.upper())
    package.propagate = False
    _take_foreign_lines(handler)


def _take_foreign_lines(handler: logging.Handler) -> None:
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, _Foreign):
            root.removeHandler(old)
    root.addHandler(_Foreign(handler))


class _Foreign(logging.Handler):
    """The root logger's way to this package's handler: other libraries' warnings as single lines, as their tracebacks
    are about strangers, not about us."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        record.exc_info = record.exc_text = record.stack_info = None
        self._target.handle(record)


def _log_files() -> list[_LogFile]:
    handlers = logging.getLogger(LOGGER_NAME).handlers
    return [handler for handler in handlers if isinstance(handler, _LogFile)]


def reopen_logs() -> None:
    """Reopen a renamed log file. On failure the old one stays in use."""
    for file in _log_files():
        try:
            file.reopen()
        except OSError as error:
            logger.error("%s cannot be opened anew: %s", file.path, error.strerror)
        except ConfigError as error:
            logger.error("the log file cannot be opened anew: %s", error)


def send_stderr_to_log() -> None:
    """From now on the process's stderr is its log file, if it has one."""
    for file in _log_files():
        file.take_stderr()
