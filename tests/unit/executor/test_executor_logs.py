"""Logs: an event and its fields, as JSON or for a console."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from executor_service import logs


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    """Puts the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(log_format: str, level: str = "info") -> list[str]:
    stream = io.StringIO()
    logs.configure(level, log_format, stream)
    log = logs.get_logger("some.module")
    log.info("serving", model="tiny", blocks=7)
    try:
        raise ValueError("boom")
    except ValueError as error:
        log.error("failed", exc_info=error, error_id="x1")
    logging.getLogger("library").warning("from %s", "elsewhere")
    return stream.getvalue().splitlines()


def test_json_lines() -> None:
    served, failed, library = (json.loads(line) for line in _lines("json"))
    assert served.pop("timestamp").endswith("+00:00")
    assert served == {
        "level": "info", "logger": "some.module", "event": "serving", "model": "tiny", "blocks": 7
    }  # fmt: skip
    assert (failed["event"], failed["error_id"]) == ("failed", "x1")
    assert "ValueError: boom" in failed["exception"]
    assert library["event"] == "from elsewhere"


def test_console_lines() -> None:
    served, failed, *traceback = _lines("console")
    assert served.endswith("info    serving model=tiny blocks=7")
    assert failed.endswith("error   failed error_id=x1")
    assert traceback[-2] == "ValueError: boom"


def test_levels() -> None:
    assert [json.loads(line)["level"] for line in _lines("json", "error")] == ["error"]
