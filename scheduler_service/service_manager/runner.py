"""Runs a service for launchd, and turns "my configuration is refused" into "do not restart me".

Usage: python -m scheduler_service.service_manager.runner --record FILE -- COMMAND...

Exit code: the command's own; 0 when it was 78 (noted in FILE); 128 + n when signal n ended it.
Standard library only and small, because one of these stays for as long as each service.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

_EXIT_CONFIGURATION: Final = 78
_EXIT_USAGE: Final = 2


def read_record(path: Path) -> str:
    """Return when a configuration was refused, in words; empty when none was."""
    try:
        document = json.loads(path.read_text())
        return f"configuration refused at {document['time']} (exit code {document['exit_code']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def supervise(record: Path, command: list[str]) -> int:
    """Run the command, hand signals on to it, and return the exit code for launchd."""
    child: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if child is not None:
            child.send_signal(number)

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, hand_on)
    record.unlink(missing_ok=True)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # One that came while the child was being made.
    for number in asked:
        child.send_signal(number)
    code = child.wait()
    if code == _EXIT_CONFIGURATION:
        note = {"exit_code": code, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps(note))
        os.replace(partial, record)
        return 0
    return 128 - code if code < 0 else code


def main(arguments: list[str]) -> int:
    """Read the command line and run."""
    if len(arguments) < 4 or arguments[0] != "--record" or arguments[2] != "--":
        print(__doc__, file=sys.stderr)
        return _EXIT_USAGE
    return supervise(Path(arguments[1]), arguments[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
