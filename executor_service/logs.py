"""Structured logs of the process: JSON lines or a console, never a prompt or an output.

Standard logging with two formatters: importing a logging library would cost a tenth of the time
that the process takes to start.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("console", "json")


class Logger:
    """A logger whose messages are an event and its fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, **fields: object) -> None:
        """Log something that happened as it should."""
        self._logger.info(event, extra={"fields": fields})

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log a failure, with its traceback when there is an exception."""
        self._logger.error(event, exc_info=exc_info, extra={"fields": fields})


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    return Logger(name)


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send the process's logs, those of libraries included, to `stream` (standard error)."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", {})
    return fields if isinstance(fields, dict) else {}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: timestamp, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        values: dict[str, object] = {
            "timestamp": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        values.update(_fields(record))
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """Time, level, event and `key=value` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it where there is one."""
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()}{fields}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line
