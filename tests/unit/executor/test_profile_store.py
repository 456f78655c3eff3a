"""Stored profiles: read back as they were, and measured anew whatever is wrong with them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from executor_service.engine.profile import (
    MEASURED,
    OFF,
    STORED,
    CostPoint,
    Profile,
    StepShape,
    monotone,
)
from executor_service.engine.profile_load import load_profile
from executor_service.engine.profile_store import MOST_FILES, ProfileKey, ProfileStore

KEY = ProfileKey("a processor", "cpu", "vnni", 2, "ab12", "cd34", "X1", 256, 512, 4096)
POINTS = monotone(
    [
        CostPoint(StepShape(1, 1), 900, 9, 0),
        CostPoint(StepShape(2, 2), 800, 9, 0),
        CostPoint(StepShape(1, 64), 5000, 3, 0),
    ]
)
CHOICES = ((8, "default"), (16, "panel8"))
PROFILE = Profile(MEASURED, 1_700_000_000, POINTS, CHOICES)


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles")


def test_a_profile_is_read_back(store: ProfileStore) -> None:
    assert store.read(KEY) is None
    store.write(KEY, PROFILE)
    assert store.read(KEY) == replace(PROFILE, origin=STORED)
    assert [path.name for path in store.path(KEY).parent.iterdir()] == [store.path(KEY).name]


@pytest.mark.parametrize("name", [field.name for field in fields(ProfileKey)])
def test_another_machine_build_or_model_has_no_profile(store: ProfileStore, name: str) -> None:
    store.write(KEY, PROFILE)
    value = getattr(KEY, name)
    changed: Any = value + 1 if isinstance(value, int) else value + "x"
    other = replace(KEY, **{name: changed})
    assert store.read(other) is None


def test_only_the_latest_profiles_are_kept(store: ProfileStore) -> None:
    keys = [replace(KEY, build=str(number)) for number in range(MOST_FILES + 2)]
    for number, key in enumerate(keys):
        store.write(key, PROFILE)
        os.utime(store.path(key), (number, number))
    store.write(KEY, PROFILE)
    found = [key for key in keys if store.read(key) is not None]
    assert found == keys[3:]
    assert store.read(KEY) is not None


def _swap(store: ProfileStore) -> bytes:
    other = replace(KEY, device="another")
    store.write(other, PROFILE)
    return store.path(other).read_bytes()


def test_a_damaged_file_is_named_and_left_out(
    store: ProfileStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(KEY, PROFILE)
    whole = store.path(KEY).read_bytes()
    body = json.loads(whole)
    faster = json.dumps(body | {"points": [[1, 1, 0, 1, 1]]}).encode()
    for damaged in (
        b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 10**6, whole[: len(whole) // 2],
        whole.replace(b"900", b"901"), faster, _swap(store),
    ):  # fmt: skip
        caplog.clear()
        store.path(KEY).write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert store.read(KEY) is None, damaged[:40]
        assert "profile is damaged" in caplog.text
    store.path(KEY).write_bytes(whole)
    assert store.read(KEY) is not None


def test_a_folder_that_cannot_be_used_is_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file" / "profiles")
    with caplog.at_level(logging.WARNING):
        store.write(KEY, PROFILE)
        assert store.read(KEY) is None
    assert "profile cannot be stored" in caplog.text
    assert "profile cannot be read" in caplog.text


class Measurement:
    """Counts how often it is made."""

    def __init__(self, points: tuple[CostPoint, ...] = POINTS) -> None:
        self.times = 0
        self._points = points

    def __call__(self) -> Profile:
        self.times += 1
        return Profile(MEASURED, 0, self._points, CHOICES)


def test_auto_measures_once(store: ProfileStore) -> None:
    measure = Measurement()
    first = load_profile("auto", KEY, store, measure, now=lambda: 1_700_000_000.5)
    assert first == PROFILE
    second = load_profile("auto", KEY, store, measure)
    assert second == replace(PROFILE, origin=STORED)
    assert measure.times == 1


def test_measure_measures_each_time_and_stores_it(store: ProfileStore) -> None:
    store.write(KEY, PROFILE)
    measure = Measurement(POINTS[2:])
    found = load_profile("measure", KEY, store, measure, now=lambda: 2.0)
    assert found == Profile(MEASURED, 2, POINTS[2:], CHOICES)
    assert measure.times == 1
    assert store.read(KEY) == Profile(STORED, 2, POINTS[2:], CHOICES)


def test_off_neither_reads_nor_measures(store: ProfileStore) -> None:
    store.write(KEY, PROFILE)
    measure = Measurement()
    assert load_profile("off", KEY, store, measure) == Profile(OFF)
    assert measure.times == 0


def test_a_cache_without_room_has_no_profile_and_stores_none(store: ProfileStore) -> None:
    assert load_profile("auto", KEY, store, Measurement(())) == Profile(OFF)
    assert not store.path(KEY).exists()


def test_stored_never_measures(store: ProfileStore) -> None:
    measure = Measurement()
    assert load_profile("stored", KEY, store, measure) == Profile(OFF)
    store.write(KEY, PROFILE)
    assert load_profile("stored", KEY, store, measure) == replace(PROFILE, origin=STORED)
    assert measure.times == 0


def test_a_measurement_that_fails_is_a_log_line(
    store: ProfileStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Profile:
        raise RuntimeError("a broken step")

    with caplog.at_level(logging.WARNING):
        assert load_profile("auto", KEY, store, fail) == Profile(OFF)
    assert "profile cannot be measured" in caplog.text
    assert store.read(KEY) is None
