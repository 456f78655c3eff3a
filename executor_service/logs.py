"""Logs of the process: JSON lines or a console, on standard error or in a file that is rotated.

A line never holds a prompt or an answer, unless the configuration asks for prompts. What is bound
(`request_id` in a call, `step_id` in a session) stands on every line of the same task, a library's
included. Each service has its own copy of this file, because the services share no code; a test
keeps the copies equal.

Standard logging with two formatters: importing a logging library would cost a tenth of the time
that a process takes to start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import TextIOWrapper
    from typing import TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("console", "json")
# A full file is renamed to .1, and that to .2; the last one goes.
MAX_FILE_BYTES: Final = 10 << 20
MAX_OLD_FILES: Final = 5

_NOTHING: Final[Mapping[str, object]] = {}
_bound: ContextVar[Mapping[str, object]] = ContextVar("isobatch_log_fields", default=_NOTHING)


class Logger:
    """A logger whose messages are an event and its fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log a detail."""
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        """Log something that happened as it should."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """Log something that the process got over."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log a failure, with its traceback when there is an exception."""
        self._logger.error(event, exc_info=exc_info, extra={"fields": fields})

    def exception(self, event: str, **fields: object) -> None:
        """Log a failure with the traceback of the exception that is being handled."""
        self._logger.exception(event, extra={"fields": fields})


def get_logger(name: str) -> Logger:
    """Return the logger of a module."""
    return Logger(name)


def bind(**fields: object) -> None:
    """Put fields on every later line of the running task, beside those bound before."""
    _bound.set({**_bound.get(), **fields})


def configure(level: str, log_format: str, stream: TextIO | None = None, *, file: str = "") -> None:
    """Send the process's logs, those of libraries included, to a file or `stream`.

    The stream is standard error by default. Raises OSError when the file cannot be opened.
    """
    handler = _file_handler(file) if file else logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    root = logging.getLogger()
    for former in root.handlers:
        if isinstance(former, logging.FileHandler):
            former.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _file_handler(file: str) -> logging.Handler:
    # Imported here: it costs what the rest of logging does, and most processes have no file.
    from logging.handlers import RotatingFileHandler

    os.makedirs(os.path.dirname(os.path.abspath(file)), mode=0o700, exist_ok=True)

    has_failed: list[bool] = []

    class PrivateFile(RotatingFileHandler):
        """A file that nobody else can read, also after a rotation."""

        def _open(self) -> TextIOWrapper:
            return open(self.baseFilename, "a", encoding="utf-8", opener=_open_private)

        def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
            """Say once that the disk is full, instead of a traceback for every line."""
            error = sys.exc_info()[1]
            if not isinstance(error, OSError):
                super().handleError(record)
            elif not has_failed:
                has_failed.append(True)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(f"[logs] {file} must take lines, got {error.strerror}\n")

    return PrivateFile(file, maxBytes=MAX_FILE_BYTES, backupCount=MAX_OLD_FILES, encoding="utf-8")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", _NOTHING)
    return {**_bound.get(), **(fields if isinstance(fields, dict) else _NOTHING)}


def _shown(value: object) -> str:
    """Return a value on one line: a client may choose an id that looks like a line of the log."""
    text = str(value)
    return text if text.isprintable() else repr(text)


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
        fields = "".join(f" {key}={_shown(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()}{fields}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line
