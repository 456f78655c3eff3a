"""Keeps measured profiles in the cache folder: one file for each device, build and model.

A file is JSON: its key in full, the points, and a SHA-256 over both. Whatever is wrong with it, it
is measured again: a profile is worth little more than its second of work.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from executor_service import logs
from executor_service.engine.profile import STORED, CostPoint, Profile, StepShape, monotone
from executor_service.models.cache import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

# Rises when points are measured in another way.
FORMAT: Final = 2
MOST_FILES: Final = 64
_LOG = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """All that a step's time depends on, but for what else runs on the machine."""

    device: str
    backend: str
    unit: str
    num_threads: int
    build: str  # digest of the kernels
    weights_digest: str
    numeric_class: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int


class ProfileStore:
    """The profiles in one folder."""

    def __init__(self, folder: Path) -> None:
        """Keep profiles in `folder`, which is created when something is written."""
        self._folder = folder

    def path(self, key: ProfileKey) -> Path:
        """Return the file of a key."""
        name = hashlib.sha256(_canonical(asdict(key))).hexdigest()[:32]
        return self._folder / f"{name}.json"

    def read(self, key: ProfileKey) -> Profile | None:
        """Return the stored profile; None, with a log line unless there is none, where unusable."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("profile cannot be read", path=str(path), error=str(error))
            return None
        try:
            return _decode(content, key)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _LOG.warning("profile is damaged and is measured again", path=str(path),
                         error=str(error))  # fmt: skip
            return None

    def write(self, key: ProfileKey, profile: Profile) -> None:
        """Store a profile; where that fails, a log line says so and the next start measures."""
        body = {
            "format": FORMAT,
            "key": asdict(key),
            "measured_at": profile.measured_at,
            "points": [
                [
                    *(point.shape.num_rows, point.shape.num_tokens, point.shape.context_length),
                    *(point.median_ns, point.num_repeats),
                ]
                for point in profile.points
            ],
            "choices": [list(pair) for pair in profile.choices],
        }
        body["checksum"] = _checksum(body)
        path = self.path(key)
        try:
            write_atomically(path, json.dumps(body, indent=1).encode() + b"\n")
            self._forget_old()
        except OSError as error:
            _LOG.warning("profile cannot be stored", path=str(path), error=str(error))

    def _forget_old(self) -> None:
        """Remove all but the latest profiles: builds and models come and go."""
        files = sorted(self._folder.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for each in files[:-MOST_FILES]:
            each.unlink(missing_ok=True)


def _decode(content: bytes, key: ProfileKey) -> Profile:
    body: dict[str, Any] = json.loads(content)
    if not isinstance(body, dict):
        raise ValueError("[profile] a profile must be an object")
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise ValueError(f"[profile] checksum must be {_checksum(body)}, got {checksum}")
    if (body["format"], body["key"]) != (FORMAT, asdict(key)):
        raise ValueError("[profile] format and key must be this process's, got others")
    points = [
        CostPoint(StepShape(rows, tokens, context), median, repeats, median)
        for rows, tokens, context, median, repeats in body["points"]
    ]
    choices = tuple((int(rows), str(name)) for rows, name in body["choices"])
    return Profile(STORED, int(body["measured_at"]), monotone(points), choices)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
