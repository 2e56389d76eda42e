"""Structured logs: one line per event that matters, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError

LOGGER_NAME: Final = "p2pstore"
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}


def _one_line(text: str) -> str:
    """Text with control characters made visible: names of strangers must not pass for other lines."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO  gossip: message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        part = record.name.removeprefix(LOGGER_NAME + ".")
        fields = "".join(f" {key}={value}" for key, value in _extra_fields(record).items())
        text = _one_line(f"{part}: {record.getMessage()}{fields}")
        line = f"{_timestamp(record)} {record.levelname:<7} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
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


def configure_logs(config: PeerConfig) -> None:
    """Send this package's logs to stderr or the configured file. Raises `ConfigError`."""
    handler: logging.Handler
    if config.log_file:
        try:
            handler = logging.FileHandler(config.log_file)
        except OSError as error:
            raise ConfigError(
                f"log_file: {config.log_file} cannot be written: {error.strerror}"
            ) from None
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(config.log_level.upper())
    logger.propagate = False
