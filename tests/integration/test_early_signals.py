"""A signal in the first moments of a service, while its modules are still being imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Sends the signal to itself when the given module is first looked for.
PROGRAM = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, Sender())
from {package}.__main__ import main
sys.exit(main(["--help"]))
"""


@pytest.mark.parametrize("number", [15, 2])
@pytest.mark.parametrize("package", ["executor_service", "scheduler_service"])
def test_a_signal_during_imports_ends_it_quietly_with_0(package: str, number: int) -> None:
    program = PROGRAM.format(package=package)
    done = subprocess.run(
        [sys.executable, "-c", program, f"{package}.config", str(number)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
