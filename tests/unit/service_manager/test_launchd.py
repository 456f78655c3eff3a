"""Property lists against a table of launchd's keys, and the commands that are given."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.service_manager.launchd import Launchd, property_list
from scheduler_service.service_manager.spec import NAMES, ManagerError, Spec, make_specs
from tests.support.fake_tools import FakeTool

ENVIRON = {"HOME": "/Users/a", "TMPDIR": "/var/folders/x/T/", "SECRET": "s", "PATH": "/opt"}
# launchd.plist(5): key, type, and what the value must be.
TABLE: dict[str, tuple[type, Any]] = {
    "Label": (str, lambda value: value.startswith("org.isobatch.")),
    "ProgramArguments": (list, lambda value: all(isinstance(each, str) for each in value)),
    "EnvironmentVariables": (dict, lambda value: all(isinstance(v, str) for v in value.values())),
    "RunAtLoad": (bool, lambda value: value is True),
    "KeepAlive": (dict, lambda value: value == {"SuccessfulExit": False}),
    "ThrottleInterval": (int, lambda value: value >= 10),
    "ProcessType": (str, lambda value: value == "Interactive"),
    # Above the drain of either service.
    "ExitTimeOut": (int, lambda value: value > 25),
    "StandardOutPath": (str, os.path.isabs),
    "StandardErrorPath": (str, os.path.isabs),
    "SoftResourceLimits": (dict, lambda value: value == {"NumberOfFiles": 4096}),
    "Umask": (int, lambda value: value == 63),
    "WorkingDirectory": (str, os.path.isabs),
}


@pytest.fixture
def specs(tmp_path: Path) -> list[Spec]:
    return make_specs(tmp_path / "config.toml", tmp_path / "logs", ENVIRON)


@pytest.mark.parametrize("index", [0, 1], ids=NAMES)
def test_every_key_is_known_and_right(specs: list[Spec], index: int) -> None:
    values = property_list(specs[index])
    assert values.keys() == TABLE.keys()
    for key, (kind, is_right) in TABLE.items():
        assert type(values[key]) is kind, key
        assert is_right(values[key]), key


@pytest.mark.parametrize("index", [0, 1], ids=NAMES)
def test_nothing_needs_a_shell(specs: list[Spec], index: int) -> None:
    """launchd expands neither `~` nor variables."""
    values = property_list(specs[index])
    words = [*values["ProgramArguments"], *values["EnvironmentVariables"].values()]
    words += [values["StandardOutPath"], values["StandardErrorPath"]]
    assert not [word for word in words if word.startswith("~") or "$" in word]
    program, config = values["ProgramArguments"][0], words.index("--config") + 1
    assert os.path.isabs(program)
    assert os.access(program, os.X_OK)
    assert os.path.isabs(words[config])


def test_the_environment_is_bare_and_leads_to_the_sockets(specs: list[Spec]) -> None:
    executor, scheduler = specs
    assert executor.environment["HF_HUB_OFFLINE"] == "1"
    for spec in specs:
        assert spec.environment["TMPDIR"] == ENVIRON["TMPDIR"]
        assert spec.environment["PATH"].startswith("/usr/local/bin:")
        assert "SECRET" not in spec.environment
    assert "HF_HUB_OFFLINE" not in scheduler.environment


def test_it_is_read_back_from_both_formats(specs: list[Spec], tmp_path: Path) -> None:
    for path, content in Launchd(tmp_path, FakeTool()).files(specs).items():
        values = plistlib.loads(content)
        assert plistlib.loads(plistlib.dumps(values, fmt=plistlib.FMT_BINARY)) == values
        assert path.name == f"{values['Label']}.plist"
        if plutil := shutil.which("plutil"):
            file = tmp_path / path.name
            file.write_bytes(content)
            assert subprocess.run([plutil, "-lint", str(file)], check=False).returncode == 0


def test_the_log_goes_where_the_configuration_says(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[scheduler]\nlog_file = "/x/s.log"\nlog_format = "console"\n')
    executor, scheduler = make_specs(config, tmp_path / "logs", ENVIRON)
    assert "--log-file" not in scheduler.argv
    assert "--log-format" not in scheduler.argv
    assert executor.argv[executor.argv.index("--log-file") + 1] == f"{tmp_path}/logs/executor.log"


def test_install_replaces_what_runs_executor_first(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool()
    Launchd(tmp_path, tool, uid=501).install(specs)
    folder = tmp_path / "Library" / "LaunchAgents"
    verbs = [words for words in tool.commands if words[0] != "print"]
    assert verbs == [
        ["bootout", "gui/501/org.isobatch.executor"],
        ["bootstrap", "gui/501", str(folder / "org.isobatch.executor.plist")],
        ["bootout", "gui/501/org.isobatch.scheduler"],
        ["bootstrap", "gui/501", str(folder / "org.isobatch.scheduler.plist")],
    ]
    assert len(list(folder.iterdir())) == 2
    tool.commands.clear()
    Launchd(tmp_path, tool, uid=501).uninstall(NAMES)
    verbs = [words for words in tool.commands if words[0] != "print"]
    assert [words[1].rpartition(".")[2] for words in verbs] == ["scheduler", "executor"]
    assert list(folder.iterdir()) == []


def test_over_ssh_the_users_own_domain_is_used(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool({("print", "gui/501"): (113, "")})
    Launchd(tmp_path, tool, uid=501).install(specs)
    assert ["bootout", "user/501/org.isobatch.executor"] in tool.commands


def test_what_is_loaded_already_is_no_failure(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool({("bootstrap",): (5, "Bootstrap failed: 5")})
    system = Launchd(tmp_path, tool, uid=501)
    with pytest.raises(ManagerError, match="bootstrap failed: Bootstrap failed: 5"):
        system.install(specs)
    tool.answers["print", "gui/501/org.isobatch.executor"] = (0, "state = running\n")
    system.start(["executor"])
    assert tool.commands[-1] == ["kickstart", "gui/501/org.isobatch.executor"]


def test_a_service_that_still_drains_is_waited_for(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool({("bootout",): (36, "Operation now in progress")})
    executor = ("print", "gui/501/org.isobatch.executor")
    tool.answers[executor] = (0, "state = running\n")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            tool.answers[executor] = (113, "")

    Launchd(tmp_path, tool, 501, sleep).install(specs)
    assert len(slept) == 3
    tool.answers[executor] = (0, "state = running\n")
    with pytest.raises(ManagerError, match="bootout failed: Operation now in progress"):
        Launchd(tmp_path, tool, 501, slept.append).stop(["executor"])
    assert sum(slept) > 30


def test_start_stop_and_restart(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool()
    system = Launchd(tmp_path, tool, uid=501)
    system.install(specs)
    tool.answers[("print", "gui/501/org.isobatch.executor")] = (0, "state = running\n")
    for act, words in (
        (system.start, ["kickstart", "gui/501/org.isobatch.executor"]),
        (system.restart, ["kickstart", "-k", "gui/501/org.isobatch.executor"]),
        # Not a signal: a job that is still loaded might be started again.
        (system.stop, ["bootout", "gui/501/org.isobatch.executor"]),
    ):
        tool.commands.clear()
        if act == system.stop:
            del tool.answers[("print", "gui/501/org.isobatch.executor")]
        act(["executor"])
        assert words in tool.commands


def test_starting_what_is_not_installed(tmp_path: Path) -> None:
    tool = FakeTool({("print", "gui/501/org"): (113, "")})
    with pytest.raises(ManagerError, match="executor must be installed first"):
        Launchd(tmp_path, tool, uid=501).start(["executor"])


def test_status(specs: list[Spec], tmp_path: Path) -> None:
    tool = FakeTool()
    system = Launchd(tmp_path, tool, uid=501)
    system.install(specs)
    record = specs[1].record
    record.write_text(json.dumps({"time": "2026-01-02T03:04:05+00:00", "exit_code": 78}))
    tool.answers[("print", "gui/501/org.isobatch.executor")] = (
        0, "\tstate = running\n\tpid = 77\n\tlast exit code = 1\n"
    )  # fmt: skip
    tool.answers[("print", "gui/501/org.isobatch.scheduler")] = (
        0, "\tstate = not running\n\tlast exit code = 0\n"
    )  # fmt: skip
    executor, scheduler = system.status(NAMES)
    assert (executor.is_running, executor.pid, executor.exit_code) == (True, 77, 1)
    assert (scheduler.is_running, scheduler.pid, scheduler.exit_code) == (False, None, 0)
    assert scheduler.refused == "configuration refused at 2026-01-02T03:04:05+00:00 (exit code 78)"
