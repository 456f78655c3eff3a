"""The SDK and the start of the command line stay light: checked in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import sys
{statement}
loaded = {{name.partition(".")[0] for name in sys.modules}}
print(*sorted(loaded & set({names!r})))
"""

ENGINES = ("executor_service", "isobatch_kernels", "jinja2", "mlx", "numpy", "tokenizers")
SERVER = ("prometheus_client", "uvloop")
SCREEN = ("click", "prompt_toolkit", "rich")


def loaded(statement: str, names: tuple[str, ...]) -> str:
    """Return which of the packages a fresh interpreter has loaded after a statement."""
    script = PROBE.format(statement=statement, names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_sdk_loads_no_engine() -> None:
    """A program that only asks needs neither arrays nor templates nor a screen."""
    assert loaded("import scheduler_service.client", ENGINES + SERVER + SCREEN) == ""


def test_probe_sees_what_is_loaded() -> None:
    """The check above can fail."""
    assert loaded("import numpy", ENGINES) == "numpy"


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("import scheduler_service.runtime_paths", ("grpc", "google", *ENGINES, *SCREEN)),
        ("import scheduler_service.cli", ("grpc", "google", "rich", "prompt_toolkit", *ENGINES)),
    ],
)
def test_start_of_the_command_line_is_lazy(statement: str, names: tuple[str, ...]) -> None:
    """`isobatch --version` and the children of `serve` start before gRPC is loaded."""
    assert loaded(statement, names) == ""
