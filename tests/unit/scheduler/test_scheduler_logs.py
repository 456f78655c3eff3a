"""Log lines: ours and libraries' in one shape."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from scheduler_service import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_of_ours_and_of_libraries() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logs.get_logger("scheduler_service.test").info("model_served", model="toy")
    logging.getLogger("library").warning("careful %d", 3)
    logging.getLogger("library").debug("hidden")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["model"], first["level"]) == ("model_served", "toy", "info")
    assert (second["event"], second["logger"]) == ("careful 3", "library")
    assert first["timestamp"] <= second["timestamp"]


def test_the_console_is_plain_text_where_it_is_no_terminal() -> None:
    stream = io.StringIO()
    logs.configure("error", "console", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get_logger("x").exception("failed")
    text = stream.getvalue()
    assert "failed" in text
    assert "ValueError: broken" in text
    assert "\x1b" not in text


def test_what_a_client_chose_stays_on_its_line() -> None:
    """An id may look like the next line of the log; words with spaces stay as they are."""
    stream = io.StringIO()
    logs.configure("info", "console", stream)
    forged = "a\n2026-11-30T00:00:00.000+00:00 error   forged"
    logs.get_logger("x").info("request", request_id=forged, error="two words é")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(f"request request_id={forged!r} error=two words é")
