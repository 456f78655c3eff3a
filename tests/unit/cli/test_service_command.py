"""`isobatch service` and `isobatch config` on this machine, with the system's tools replaced."""

from __future__ import annotations

import json
import os
import plistlib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from scheduler_service.cli import app, children, doctor, service
from scheduler_service.service_manager.launchd import Launchd
from scheduler_service.service_manager.spec import Manager, Status
from scheduler_service.service_manager.systemd import Systemd
from tests.support.fake_tools import FakeTool


def _run(home: Path, *arguments: str, **more: str) -> Result:
    environment = {"HOME": str(home), "XDG_CONFIG_HOME": None, "XDG_STATE_HOME": None, **more}
    environment.setdefault("ISOBATCH_CONFIG", None)
    return CliRunner().invoke(app.cli, list(arguments), env=environment)


@pytest.mark.parametrize("is_mac", [False, True], ids=["linux", "mac"])
def test_install_writes_configuration_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mac: bool
) -> None:
    tool = FakeTool()
    system: Manager = Launchd(tmp_path, tool) if is_mac else Systemd(tmp_path / ".config", tool)
    monkeypatch.setattr(service, "manager", lambda: system)
    monkeypatch.setattr(service, "is_mac", lambda: is_mac)
    pulled: list[str] = []
    monkeypatch.setattr(children, "pull", pulled.append)
    config = tmp_path / ".config" / "isobatch" / "config.toml"
    printed = _run(tmp_path, "service", "install", "--print")
    assert printed.exit_code == 0
    assert f"{config}" in printed.stdout
    assert not config.exists()
    assert tool.commands == []
    done = _run(tmp_path, "service", "install")
    assert done.exit_code == 0, done.output
    assert "[scheduler]" in config.read_text()
    assert pulled == ["smollm2-135m-instruct"]
    logs = tmp_path / ("Library/Logs/isobatch" if is_mac else ".local/state/isobatch")
    assert f"logs in {logs}" in done.stderr
    if is_mac:
        (file, _) = sorted((tmp_path / "Library" / "LaunchAgents").iterdir())
        values = plistlib.loads(file.read_bytes())
        assert values["StandardOutPath"] == str(logs / "executor.output.log")
    config.write_text("[executor]\nthread = 1\n")
    again = _run(tmp_path, "service", "install")
    assert (again.exit_code, "did you mean threads?" in again.stderr) == (78, True)
    config.write_text("[executer]\n")
    refused = _run(tmp_path, "service", "install")
    assert (refused.exit_code, "did you mean executor?" in refused.stderr) == (78, True)
    assert _run(tmp_path, "service", "uninstall").exit_code == 0
    assert config.exists()


def test_install_without_a_bus_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = FakeTool({("--user",): (1, "Failed to connect to bus")})
    system = Systemd(tmp_path / ".config", tool)
    monkeypatch.setattr(service, "manager", lambda: system)
    monkeypatch.setattr(children, "pull", lambda _: pytest.fail("nothing is to be fetched"))
    done = _run(tmp_path, "service", "install")
    assert done.exit_code == 1
    assert "got Failed to connect to bus\n" in done.stderr
    assert "loginctl enable-linger" in done.stderr
    assert list(tmp_path.iterdir()) == []
    units = tmp_path / ".config" / "systemd" / "user"
    units.mkdir(parents=True)
    (units / "isobatch-executor.service").touch()
    removed = _run(tmp_path, "service", "uninstall")
    assert (removed.exit_code, "the units are removed" in removed.stderr) == (0, True)
    assert list(units.iterdir()) == []
    check = doctor.supervision()
    assert (check["state"], "make serve" in check["advice"]) == ("warning", True)
    tool.answers.clear()
    assert doctor.supervision()["state"] == "ok"


def test_status_words_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.describe(Status("x", False, False)) == "not installed"
    assert service.describe(Status("x", True, True, 5)) == "running (pid 5)"
    assert service.describe(Status("x", True, False, None, 1)) == "stopped; last exit code 1"
    refused = Status("x", True, False, None, 0, "configuration refused at noon")
    assert service.describe(refused) == "stopped: configuration refused at noon"
    system = Systemd(tmp_path, FakeTool())
    monkeypatch.setattr(service, "manager", lambda: system)
    done = _run(tmp_path, "service", "status", "--json")
    assert done.exit_code == 3
    assert [each["is_running"] for each in json.loads(done.stdout)] == [False, False]


def test_what_a_person_can_get_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Systemd(tmp_path, FakeTool())
    monkeypatch.setattr(service, "manager", lambda: system)
    started = _run(tmp_path, "service", "start")
    assert (started.exit_code, "executor must be installed first" in started.stderr) == (1, True)
    logs = _run(tmp_path, "service", "logs")
    assert (logs.exit_code, "there must be logs" in logs.stderr) == (1, True)
    assert _run(tmp_path, "service", "start", "gateway").exit_code == 2
    assert _run(tmp_path, "service", "status", HOME="here").exit_code == 3


def test_logs_are_shown_by_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "is_mac", lambda: False)
    folder = tmp_path / ".local" / "state" / "isobatch"
    folder.mkdir(parents=True)
    (folder / "executor.log").write_text("a line\n")
    (folder / "executor.output.log").write_text("")
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, argv: called.append(argv))
    assert _run(tmp_path, "service", "logs", "executor", "-n", "3").exit_code == 0
    assert called == [["tail", "-n3", str(folder / "executor.log")]]


def test_config_show_names_origins(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[executor]\nthreads = 3\n")
    variables = {"ISOBATCH_SCHEDULER_MAX_NUM_WAITING": "9"}
    done = _run(tmp_path, "config", "show", "--config", str(file), "--json", **variables)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = {(section, each["name"]): each for section in found for each in found[section]}
    assert rows["executor", "threads"] == {
        "name": "threads", "value": 3, "origin": f"file {file}"
    }  # fmt: skip
    waiting = rows["scheduler", "max_num_waiting"]
    assert waiting["origin"] == "variable ISOBATCH_SCHEDULER_MAX_NUM_WAITING"
    file.write_text("[executor]\nthread = 3\n")
    refused = _run(tmp_path, "config", "show", "--config", str(file))
    assert (refused.exit_code, "did you mean threads?" in refused.stderr) == (78, True)
    for section, said in (("scheduler", "listen"), ("executor", "model")):
        file.write_text(f"[{section}]\n{said} = 3\n")
        refused = _run(tmp_path, "config", "show", "--config", str(file))
        # Said once who says so, and once what it is about.
        words = f"isobatch: [config] {said} must be of type str, got 3: [{section}] in {file}\n"
        assert (refused.exit_code, refused.stderr) == (78, words)
    path = _run(tmp_path, "config", "path")
    assert path.stdout.strip() == str(tmp_path / ".config" / "isobatch" / "config.toml")


def test_a_long_path_stays_on_one_line_where_no_terminal_is(tmp_path: Path) -> None:
    """Who searches or copies what `config show` prints finds a value whole, and its origin."""
    file = tmp_path / "c.toml"
    model = "/" + "a-long-folder/" * 12 + "model.gguf"
    file.write_text(f'[executor]\nmodel = "{model}"\n')
    done = _run(tmp_path, "config", "show", "--origin", "--config", str(file))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    (line,) = [each for each in lines if each.split()[0] == "model"]
    assert line.split(maxsplit=1)[1] == f'"{model}"    # file {file}'
    assert [each for each in lines if each != each.rstrip()] == []
    assert lines[0] == "[scheduler]"
