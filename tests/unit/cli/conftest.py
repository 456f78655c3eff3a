"""A fake scheduler for the tests of this directory."""

from collections.abc import Iterator

import pytest

from tests.support.fake_scheduler import FakeScheduler, running_fake_scheduler


@pytest.fixture
def fake() -> Iterator[FakeScheduler]:
    """A fake scheduler that serves for the length of one test."""
    with running_fake_scheduler() as server:
        yield server
