"""Stands in for launchctl and systemctl: notes the commands and answers from a table."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class FakeTool:
    """Answers of the first entry whose words start the command; success without words otherwise."""

    answers: dict[tuple[str, ...], tuple[int, str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Answer a command."""
        words = [*argv][1:]
        self.commands.append(words)
        for start, (code, text) in self.answers.items():
            if tuple(words[: len(start)]) == start:
                return subprocess.CompletedProcess(argv, code, text, text)
        return subprocess.CompletedProcess(argv, 0, "", "")
