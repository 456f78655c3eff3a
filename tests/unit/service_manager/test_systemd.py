"""Units by systemd's own tool where there is one, and the commands that are given."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_service.service_manager.spec import NAMES, ManagerError, Spec, make_specs
from scheduler_service.service_manager.systemd import Systemd, quoted, unit_text
from tests.support.fake_tools import FakeTool

ENVIRON = {"HOME": "/home/a", "XDG_RUNTIME_DIR": "/run/user/1"}


@pytest.fixture
def specs(tmp_path: Path) -> list[Spec]:
    return make_specs(tmp_path / "config.toml", tmp_path / "logs", ENVIRON)


def test_systemd_accepts_the_units(specs: list[Spec], tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    odd = replace(specs[0], argv=(*specs[0].argv, "--model", 'a %n "b" \\ $c'))
    files = Systemd(tmp_path, FakeTool()).files([odd, specs[1]])
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    done = subprocess.run(
        [program, "verify", "--man=no", "--generators=no", *map(str, files)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # Other units of the machine may be at fault; ours must not be named.
    assert not re.search(r"isobatch-\w+\.service", done.stdout + done.stderr), done.stderr


def test_systemd_complains_about_a_wrong_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "isobatch-wrong.service"
    file.write_text("[Service]\nExecStart=relative/path\n")
    done = subprocess.run(
        [program, "verify", "--man=no", "--generators=no", str(file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "isobatch-wrong.service" in done.stdout + done.stderr


def test_what_a_unit_says(specs: list[Spec]) -> None:
    executor, scheduler = (unit_text(spec) for spec in specs)
    for text in (executor, scheduler):
        assert "\nRestart=on-failure\n" in text
        assert "\nRestartPreventExitStatus=78\n" in text
        assert "\nTimeoutStopSec=30\n" in text
        assert "\nUMask=0077\n" in text
    assert "After=isobatch-executor.service" in scheduler
    assert "After=" not in executor
    assert 'Environment="HF_HUB_OFFLINE=1"' in executor


def test_words_are_quoted() -> None:
    assert quoted('a "b" %n \\') == '"a \\"b\\" %%n \\\\"'


def test_commands(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool()
    system = Systemd(tmp_path, tool)
    system.install(specs)
    system.start(NAMES)
    system.stop(NAMES)
    system.restart(["scheduler"])
    system.uninstall(NAMES)
    both = ["isobatch-executor.service", "isobatch-scheduler.service"]
    assert [words[1:] for words in tool.commands] == [
        ["daemon-reload"], ["enable", *both], ["restart", *both], ["start", *both],
        ["stop", *both[::-1]], ["restart", both[1]], ["show", "--property=Version"],
        ["disable", "--now", *both[::-1]], ["daemon-reload"],
    ]  # fmt: skip
    assert list((tmp_path / "systemd" / "user").iterdir()) == []
    tool.commands.clear()
    system.uninstall(NAMES)
    assert tool.commands == []
    with pytest.raises(ManagerError, match="executor must be installed first"):
        system.start(NAMES)


def test_a_refusal_is_passed_on(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool({("--user", "enable"): (1, "Failed to connect to bus")})
    with pytest.raises(ManagerError, match="systemctl enable failed: Failed to connect to bus"):
        Systemd(tmp_path, tool).install(specs)


def test_without_a_bus_the_files_go_all_the_same(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool()
    system = Systemd(tmp_path, tool)
    system.probe()
    system.install(specs)
    folder = tmp_path / "systemd" / "user"
    wanted = folder / "default.target.wants"
    wanted.mkdir()
    (wanted / "isobatch-executor.service").symlink_to(folder / "isobatch-executor.service")
    tool.answers = {("--user",): (1, "Failed to connect to bus")}
    with pytest.raises(ManagerError, match=r"got Failed to connect to bus\n.*loginctl"):
        system.probe()
    said = system.uninstall(NAMES)
    assert "Failed to connect to bus: the units are removed" in said
    assert [path.name for path in folder.rglob("*")] == ["default.target.wants"]


def test_a_system_without_systemctl(tmp_path: Path) -> None:
    def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError(2, "No such file", argv[0])

    with pytest.raises(ManagerError, match=r"got no systemctl\n.*isobatch serve"):
        Systemd(tmp_path, run).probe()


def test_status(specs: list[Spec], tmp_path: Path) -> None:
    answers = {
        "executor": "ActiveState=active\nMainPID=77\nExecMainStatus=0\nExecMainCode=0\n",
        "scheduler": "ActiveState=failed\nMainPID=0\nExecMainStatus=78\nExecMainCode=1\n",
    }
    tool = FakeTool()
    system = Systemd(tmp_path, tool)
    system.install(specs[:1])
    for name, text in answers.items():
        show = ("--user", "show")
        tool.answers = {show: (0, text)}
        (found,) = system.status([name])
        if name == "executor":
            assert (found.is_installed, found.is_running, found.pid) == (True, True, 77)
            assert found.exit_code is None
        else:
            assert (found.is_installed, found.is_running, found.pid) == (False, False, None)
            assert (found.exit_code, found.refused) == (78, "configuration refused")
