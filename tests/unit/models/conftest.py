"""Keeps what loaders remember away from the user's cache."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ISOBATCH_CACHE", str(folder))
    return folder
