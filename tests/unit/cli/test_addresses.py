"""What the option --address takes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from scheduler_service.cli import app


@pytest.mark.parametrize(
    "address", ["nonsense", "unix:", "http://127.0.0.1:8000", "127.0.0.1:", "a b:1", "h:123456"]
)
def test_an_address_that_is_none_is_wrong_usage(address: str) -> None:
    """It is said at once, and not after the wait for a connection."""
    result = CliRunner().invoke(app.cli, ["stats", "--address", address])
    assert result.exit_code == 2
    assert f"--address must be unix:PATH or HOST:PORT, got {address}" in result.stderr
