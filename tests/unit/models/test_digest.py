"""The digest of weights, and when it is computed anew."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from executor_service.models import digest as digests
from executor_service.models.digest import remembered_digest, tensors_digest


def test_is_sha256_over_names_sizes_and_bytes() -> None:
    size = (2).to_bytes(8, "little")
    expected = hashlib.sha256((1).to_bytes(8, "little") + b"a" + size + b"xy")
    expected.update((1).to_bytes(8, "little") + b"b" + size + b"zz")
    tensors = {"b": memoryview(b"zz"), "a": memoryview(b"xy")}
    assert tensors_digest(tensors) == expected.hexdigest()


def test_borders_between_names_and_bytes_count() -> None:
    one = tensors_digest({"ab": memoryview(b"c")})
    assert one != tensors_digest({"a": memoryview(b"bc")})


def test_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"one")
    first = remembered_digest([file], {"a": memoryview(b"one")})
    calls: list[object] = []

    def count(tensors: object) -> str:
        calls.append(tensors)
        return "00" * 32

    monkeypatch.setattr(digests, "tensors_digest", count)
    assert remembered_digest([file], {}) == first
    assert calls == []
    os.utime(file, ns=(1, 1))
    assert remembered_digest([file], {}) == "00" * 32
    assert len(calls) == 1


def test_a_damaged_memory_is_ignored(tmp_path: Path, cache_folder: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"one")
    tensors = {"a": memoryview(b"one")}
    first = remembered_digest([file], tensors)
    (note,) = (cache_folder / "digests").iterdir()
    note.write_text('{"identity": 3}')
    assert remembered_digest([file], tensors) == first


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"one")
    monkeypatch.setenv("ISOBATCH_CACHE", str(file))  # a file, so no folder can be made in it
    tensors = {"a": memoryview(b"one")}
    assert remembered_digest([file], tensors) == tensors_digest(tensors)
